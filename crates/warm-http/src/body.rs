//! Bodies: those of requests, which arrive before a script begins, and those of answers.
//!
//! A script that read its request from the connection would hold its worker for as long as a slow client takes. So the body goes
//! to a file without a name first, which the script then has as its standard input; its size is known then, too, which CGI wants
//! to be told (RFC 3875, section 4.1.2).

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use tokio::io::{AsyncSeekExt as _, AsyncWriteExt as _};

/// The body of an answer.
pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Returns a body of these bytes.
pub(crate) fn of(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// Why the body of a request is not there.
pub(crate) enum Failed {
    /// It is larger than allowed.
    TooLarge,
    /// It did not arrive in time.
    TooSlow,
    /// What came is no body, or the client has gone.
    Broken(hyper::Error),
    /// It cannot be stored.
    Storing(io::Error),
}

/// Receives a body, and returns a file at its start with its size.
pub(crate) async fn receive(body: Incoming, limit: u64, time: Duration) -> Result<(OwnedFd, u64), Failed> {
    let known = body.size_hint();
    if known.lower() > limit {
        return Err(Failed::TooLarge);
    }
    if known.exact() == Some(0) {
        let nothing = std::fs::File::open("/dev/null").map_err(Failed::Storing)?;
        return Ok((nothing.into(), 0));
    }
    tokio::time::timeout(time, store(body, limit)).await.unwrap_or(Err(Failed::TooSlow))
}

async fn store(body: Incoming, limit: u64) -> Result<(OwnedFd, u64), Failed> {
    let file = tokio::task::spawn_blocking(tempfile::tempfile)
        .await
        .map_err(|error| Failed::Storing(error.into()))?;
    let mut file = tokio::fs::File::from_std(file.map_err(Failed::Storing)?);
    let mut body = Limited::new(body, usize::try_from(limit).unwrap_or(usize::MAX));
    let mut size = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| match error.downcast::<hyper::Error>() {
            Ok(error) => Failed::Broken(*error),
            Err(error) if error.is::<LengthLimitError>() => Failed::TooLarge,
            Err(error) => Failed::Storing(io::Error::other(error)),
        })?;
        // Trailers have no place in CGI.
        if let Ok(data) = frame.into_data() {
            size += data.len() as u64;
            file.write_all(&data).await.map_err(Failed::Storing)?;
        }
    }
    // Also waits for what is being written.
    file.rewind().await.map_err(Failed::Storing)?;
    Ok((file.into_std().await.into(), size))
}
