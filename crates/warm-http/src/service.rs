//! One request: which script it means, what it gets, and what becomes of how it ends.
//!
//! A balancer tries another server after an answer with status 503, so that stands for what never began, and for nothing else.
//! Nothing is tried again here.

use std::error::Error as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Frame, Incoming};
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use orrery_warm::client::Error;
use orrery_warm::protocol::Outcome;
use orrery_warm_http::answer::{self, Head};
use orrery_warm_http::variables;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::body::{self, Body, Failed};
use crate::connection::Connection;
use crate::health;
use crate::output::{Ending, Event};
use crate::script::{Execution, Script};
use crate::state::{Counts, State};
use crate::watch::Watch;

/// How long an answer is kept back that has begun: most scripts have ended by then, and how they ended and how much they wrote
/// can be told in the header.
const MOMENT: Duration = Duration::from_millis(10);
/// How much is kept back.
const KEPT: usize = 64 << 10;
/// How many pieces of an answer wait for the connection.
const PIECES: usize = 2;

/// Answers a request.
pub(crate) async fn answer(
    state: &State,
    connection: &Arc<Connection>,
    request: Request<Incoming>,
) -> Response<Body> {
    let has_body = !request.body().is_end_stream();
    let answered = if request.uri().path() == state.settings.health {
        match *request.method() {
            Method::GET | Method::HEAD => match health::patience(request.uri().query()) {
                Ok(patience) => Ok(health::answer(state, patience).await),
                Err(reason) => Err(refused(StatusCode::BAD_REQUEST, &reason)),
            },
            _ => Err(refused(StatusCode::METHOD_NOT_ALLOWED, "the state can only be read")),
        }
    } else {
        state.counts.received();
        let answered = run(state, connection, request).await;
        match answered.as_ref().map_err(|refused| refused.status()) {
            Err(StatusCode::SERVICE_UNAVAILABLE) => state.counts.refused(),
            Err(StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT) => state.counts.failed(),
            _ => {}
        }
        answered
    };
    // The body of what is refused may not have been read: then what follows on the connection is not another request.
    let closes = has_body && answered.is_err();
    if closes {
        connection.refuse();
    }
    let mut response = answered.unwrap_or_else(|refused| *refused);
    if closes || state.is_draining() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

type Refused = Box<Response<Body>>;

fn refusal(status: StatusCode, reason: &str) -> Response<Body> {
    let mut response = Response::new(body::of(format!("{status}: {reason}\n")));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    if status == StatusCode::SERVICE_UNAVAILABLE {
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

fn refused(status: StatusCode, reason: &str) -> Refused {
    Box::new(refusal(status, reason))
}

async fn run(
    state: &State,
    connection: &Arc<Connection>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Refused> {
    let settings = &state.settings;
    if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
        return Err(refused(StatusCode::METHOD_NOT_ALLOWED, "scripts do not get this method"));
    }
    let unavailable = |what: &str, error: io::Error| {
        tracing::warn!("cannot {what}: {error}; the request is refused");
        refused(StatusCode::SERVICE_UNAVAILABLE, "the server has not what a request needs")
    };
    let found = {
        let (settings, path) = (Arc::clone(settings), request.uri().path().to_owned());
        let found = tokio::task::spawn_blocking(move || settings.scripts.find(&path)).await;
        found
            .unwrap_or_else(|error| Err(error.into()))
            .map_err(|error| unavailable("look for a script", error))?
    };
    let Some(found) = found else { return Err(refused(StatusCode::NOT_FOUND, "there is no such script")) };
    let admit = || match state.watch.is_silent() {
        false => Ok(()),
        true => Err(refused(StatusCode::SERVICE_UNAVAILABLE, "the warm server does not reply")),
    };
    admit()?;
    let Ok(permit) = Arc::clone(&state.requests).try_acquire_owned() else {
        return Err(refused(StatusCode::SERVICE_UNAVAILABLE, "too many requests are being served"));
    };
    let (request, body) = request.into_parts();
    let (input, length) =
        body::receive(body, settings.body, settings.body_time).await.map_err(|failed| match failed {
            Failed::TooLarge => refused(StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than allowed"),
            Failed::TooSlow => refused(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time"),
            Failed::Broken(error) => {
                tracing::debug!("the body of a request is broken: {error}");
                refused(StatusCode::BAD_REQUEST, "the body is broken")
            }
            Failed::Storing(error) => unavailable("store the body of a request", error),
        })?;
    admit()?;
    state.watch.doubt();
    let described = variables::describe(&variables::Request {
        method: &request.method,
        uri: &request.uri,
        version: request.version,
        headers: &request.headers,
        length,
        found: &found,
        local: connection.local,
        peer: connection.peer,
        authorization: settings.authorization,
    });
    let is_described = |name| described.iter().any(|(other, _)| other == name);
    let mut environment: Vec<_> =
        settings.environment.iter().filter(|(name, _)| !is_described(name)).cloned().collect();
    environment.extend(described);
    let shown = found.path.display().to_string();
    let client = settings.client.clone();
    let execution = Execution { client, found, input, environment, umask: settings.umask };
    let script = execution.start().map_err(|error| unavailable("make pipes", error))?;
    let transfer = Transfer {
        script,
        permit,
        connection: Arc::clone(connection),
        watch: Arc::clone(&state.watch),
        counts: Arc::clone(&state.counts),
        shown,
        send_time: settings.send_time,
    };
    transfer.answer(&request.method, settings.answer_head).await
}

/// A script that runs, and where its output goes.
struct Transfer {
    script: Script,
    permit: OwnedSemaphorePermit,
    connection: Arc<Connection>,
    watch: Arc<Watch>,
    counts: Arc<Counts>,
    /// The script's path, for the log.
    shown: String,
    send_time: Duration,
}

/// Why nothing more comes from a script.
enum Lost {
    Unreadable(io::Error),
    /// The warm server does not reply.
    Silent,
}

impl std::fmt::Display for Lost {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unreadable(error) => write!(out, "its output cannot be read: {error}"),
            Self::Silent => out.write_str("nothing comes of it, and the warm server does not reply"),
        }
    }
}

impl Transfer {
    /// Waits for what comes next from the script; nothing is lost when the future is dropped.
    async fn next(&mut self) -> Result<Event, Lost> {
        tokio::select! {
            biased;
            event = self.script.output.next() => event.map_err(Lost::Unreadable),
            () = self.watch.silence() => Err(Lost::Silent),
        }
    }

    /// Waits for the header, and for the rest a moment; returns the answer, whose body may go on.
    async fn answer(mut self, method: &Method, limit: usize) -> Result<Response<Body>, Refused> {
        let (head, mut kept) = self.head(limit).await?;
        let has_body = *method != Method::HEAD && !head.is_without_body();
        let moment = tokio::time::sleep(MOMENT);
        tokio::pin!(moment);
        let (mut size, mut ending) = (kept.len() as u64, None);
        while ending.is_none() && !(has_body && kept.len() >= KEPT) {
            let event = tokio::select! {
                biased;
                event = self.next() => event,
                () = &mut moment, if has_body => break,
            };
            match event.map_err(|lost| self.lost(&lost))? {
                Event::Data(bytes) => {
                    size += bytes.len() as u64;
                    if has_body {
                        kept.extend_from_slice(&bytes);
                    }
                }
                Event::End(how) => ending = Some(how),
            }
        }
        let mut response = self.begin(&head)?;
        let headers = response.headers_mut();
        match ending {
            // The script's own length, if it has one, stands among the fields.
            None => *response.body_mut() = self.stream(kept.freeze()),
            Some(ending) => {
                if let Err(why) = whole(&ending) {
                    return Err(self.failed(&ending, &why));
                }
                if has_body {
                    if head.length.is_some_and(|length| length != size) {
                        return Err(self.broken("its Content-Length is not the size of what it wrote"));
                    }
                    *response.body_mut() = body::of(kept.freeze());
                } else if head.is_without_body() {
                    headers.remove(header::CONTENT_LENGTH);
                } else if head.length.is_none() && size > 0 {
                    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(size));
                }
            }
        }
        Ok(response)
    }

    /// Waits for the header; returns what came behind it, too.
    async fn head(&mut self, limit: usize) -> Result<(Head, BytesMut), Refused> {
        let mut bytes = BytesMut::new();
        loop {
            match self.next().await.map_err(|lost| self.lost(&lost))? {
                Event::Data(more) => bytes.extend_from_slice(&more),
                Event::End(ending) => {
                    let why = whole(&ending).err().unwrap_or_else(|| "it ended without a header".to_owned());
                    return Err(self.failed(&ending, &why));
                }
            }
            match answer::parse(&bytes) {
                Ok(Some((head, length))) if length <= limit => {
                    let rest = bytes.split_off(length);
                    return Ok((head, rest));
                }
                Ok(None) if bytes.len() <= limit => {}
                Ok(_) => return Err(self.broken("its header is longer than --answer-head allows")),
                Err(error) => return Err(self.broken(&error.to_string())),
            }
        }
    }

    fn begin(&self, head: &Head) -> Result<Response<Body>, Refused> {
        let mut response = Response::new(body::of(Bytes::new()));
        *response.status_mut() =
            StatusCode::from_u16(head.status).map_err(|error| self.broken(&error.to_string()))?;
        for (name, value) in &head.fields {
            let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::from_bytes(value)) else {
                return Err(self.broken(&format!("HTTP does not allow its field {name:?}")));
            };
            response.headers_mut().append(name, value);
        }
        Ok(response)
    }

    /// The status for a script that ended before anything of its answer was sent.
    fn failed(&self, ending: &Ending, why: &str) -> Refused {
        tracing::warn!(script = self.shown, "no answer: {why}");
        match ending {
            // Nothing of it ran.
            Err(Error::NoServer { .. } | Error::Busy { .. } | Error::NotBegun { .. }) => {
                refused(StatusCode::SERVICE_UNAVAILABLE, "no worker takes the request")
            }
            Ok(answer) if matches!(answer.outcome, Outcome::TimedOut { .. }) => {
                refused(StatusCode::GATEWAY_TIMEOUT, "the script took too long")
            }
            _ => refused(StatusCode::BAD_GATEWAY, "the script did not answer"),
        }
    }

    fn broken(&self, why: &str) -> Refused {
        tracing::warn!(script = self.shown, "no answer: {why}");
        refused(StatusCode::BAD_GATEWAY, "the script did not answer as it should")
    }

    fn lost(&self, lost: &Lost) -> Refused {
        match lost {
            Lost::Unreadable(_) => self.broken(&lost.to_string()),
            Lost::Silent => {
                tracing::warn!(script = self.shown, "no answer: {lost}");
                refused(StatusCode::GATEWAY_TIMEOUT, "the warm server does not reply")
            }
        }
    }

    /// The body, whose pieces are sent as they come.
    fn stream(self, kept: Bytes) -> Body {
        let (sender, receiver) = mpsc::channel(PIECES);
        tokio::spawn(self.transfer(kept, sender));
        Pieces(receiver).boxed_unsync()
    }

    async fn transfer(mut self, kept: Bytes, sender: mpsc::Sender<io::Result<Bytes>>) {
        let mut piece = kept;
        loop {
            if !piece.is_empty() {
                match tokio::time::timeout(self.send_time, sender.send(Ok(piece))).await {
                    Ok(Ok(())) => {}
                    // The client has gone; with `self`, the script is ended.
                    Ok(Err(_)) => return,
                    Err(_) => {
                        tracing::warn!(
                            script = self.shown,
                            "the client took nothing for {:?}: it is left",
                            self.send_time
                        );
                        return self.connection.end();
                    }
                }
            }
            let event = tokio::select! {
                biased;
                () = sender.closed() => return,
                event = self.next() => event,
            };
            let why = match event {
                Ok(Event::Data(bytes)) => {
                    piece = bytes;
                    continue;
                }
                Ok(Event::End(ending)) => match whole(&ending) {
                    Ok(()) => return,
                    Err(why) => why,
                },
                Err(lost) => lost.to_string(),
            };
            tracing::warn!(script = self.shown, "the answer is broken off: {why}");
            self.counts.failed();
            self.connection.reset();
            // An error has the connection ended, without the end of the body that clients wait for.
            let told = sender.send(Err(io::Error::other("the script did not end its answer")));
            if tokio::time::timeout(self.send_time, told).await.is_err() {
                self.connection.end();
            }
            drop(self.permit);
            return;
        }
    }
}

/// Returns why an answer is not whole, going by how the script ended.
fn whole(ending: &Ending) -> Result<(), String> {
    match ending {
        Ok(answer) => match &answer.outcome {
            Outcome::Exited(0) => Ok(()),
            Outcome::Exited(status) => Err(format!("the script exited with status {status}")),
            Outcome::Signaled(signal) => Err(format!("signal {signal} killed the script")),
            Outcome::TimedOut { limit } => {
                Err(format!("the script ran longer than {limit:?}, the warm server's --timeout"))
            }
            Outcome::MemoryLimit { limit } => {
                Err(format!("the script needed more than {limit} bytes, the warm server's --memory"))
            }
            Outcome::Cancelled => Err("the script was ended, as its client had gone".to_owned()),
            Outcome::Refused(reason) => Err(format!("the warm server refuses: {reason}")),
        },
        Err(error) => {
            let (mut text, mut cause) = (error.to_string(), error.source());
            while let Some(error) = cause {
                text.push_str(&format!(": {error}"));
                cause = error.source();
            }
            Err(text)
        }
    }
}

/// The pieces of a body that a task sends; an error breaks it off.
struct Pieces(mpsc::Receiver<io::Result<Bytes>>);

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}
