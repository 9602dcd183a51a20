//! The health report of a server: what `orrery-warm-http` answers to `GET /-/health`, and how `orrery status` asks for it.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Where the report is unless `--health` names another path.
pub const PATH: &str = "/-/health";
/// How long a server waits at most for its warm server before it reports.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// The size of the longest answer that is read, in bytes.
const LONGEST: u64 = 64 << 10;

/// What a server reports; an object in JSON, with the names of these fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// `ok`, or why no requests are to be sent here, in words.
    pub status: String,
    /// Whether the warm server replied to a question just asked.
    pub warm: Warm,
    /// Workers of the warm server.
    pub workers: usize,
    /// Workers whose interpreter has started.
    pub ready: usize,
    /// Workers that run a script.
    pub busy: usize,
    /// Scripts that the warm server has run, for all of its clients; `None` if it does not reply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served: Option<u64>,
    /// Connections that are open, that of the question among them.
    pub connections: usize,
    /// Requests that run, wait for a worker, or are being received or sent.
    pub requests: usize,
    /// Requests that have come since the server started, without questions about its health.
    pub received: u64,
    /// Requests of these that were answered with status 503: nothing of them ran.
    pub refused: u64,
    /// Requests of these that were answered with status 502 or 504, or whose answer was broken off.
    pub failed: u64,
}

/// What is known of a warm server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Warm {
    /// It replies.
    Replies,
    /// It is there, and has not replied in time: it is stopped or stuck, or has too much to do.
    Silent,
    /// No server listens, or not for this user.
    Absent,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The connection failed.
    #[error("cannot ask the HTTP server at {address}")]
    Io {
        /// The server's address.
        address: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// What was answered is no report.
    #[error(
        "what answers at http://{address}{path} is no HTTP server of Orrery's of this version, or has another --health"
    )]
    NoReport {
        /// The server's address.
        address: SocketAddr,
        /// The path that was asked for.
        path: String,
    },
}

/// Asks the server at an address for its report, which is at `path`. The server is to wait for its warm server half of `limit`, and
/// all takes `limit` at most.
///
/// # Errors
/// See [`Error`].
pub fn ask(address: SocketAddr, path: &str, limit: Duration) -> Result<Report, Error> {
    let failed = |source| Error::Io { address, source };
    let answer = converse(address, path, limit).map_err(failed)?;
    parse(&answer).ok_or_else(|| Error::NoReport { address, path: path.to_owned() })
}

/// Sends the request, and returns what comes until the server ends the connection.
fn converse(address: SocketAddr, path: &str, limit: Duration) -> io::Result<Vec<u8>> {
    let end = Instant::now() + limit;
    // A time-out of zero is none.
    let left = || Some(end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
    let mut stream = TcpStream::connect_timeout(&address, limit)?;
    stream.set_write_timeout(left())?;
    // In HTTP/1.0 the end of the answer is that of the connection.
    let wait = (limit / 2).as_millis();
    stream.write_all(format!("GET {path}?wait={wait}ms HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let mut answer = Vec::new();
    loop {
        stream.set_read_timeout(left())?;
        let mut piece = [0; 4096];
        match stream.read(&mut piece) {
            Ok(0) => return Ok(answer),
            Ok(count) => answer.extend_from_slice(&piece[..count]),
            // This process was stopped and goes on.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if answer.len() as u64 > LONGEST || Instant::now() >= end {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

/// Parses an answer, whose status does not matter: a server that is not to get requests reports with 503.
fn parse(answer: &[u8]) -> Option<Report> {
    let mut fields = [httparse::EMPTY_HEADER; 32];
    match httparse::Response::new(&mut fields).parse(answer) {
        Ok(httparse::Status::Complete(head)) => serde_json::from_slice(&answer[head..]).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const JSON: &str = r#"{"status":"no worker is ready","warm":"absent","workers":0,"ready":0,"busy":0,
        "connections":1,"requests":2,"received":3,"refused":1,"failed":0,"later":"key"}"#;

    /// Answers one connection with these bytes; returns the address, and what was asked.
    fn server(answer: String) -> (SocketAddr, std::thread::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let served = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1000];
            let count = stream.read(&mut request).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            String::from_utf8_lossy(&request[..count]).into_owned()
        });
        (address, served)
    }

    #[test]
    fn a_report_is_read_whatever_its_status() {
        let (address, served) = server(format!("HTTP/1.1 503 Service Unavailable\r\nX: y\r\n\r\n{JSON}\n"));
        let report = ask(address, PATH, Duration::from_secs(60)).unwrap();
        assert_eq!((report.warm, report.requests, report.served), (Warm::Absent, 2, None));
        assert!(served.join().unwrap().starts_with("GET /-/health?wait=30000ms HTTP/1.0\r\n"));
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    }

    #[test]
    fn what_is_no_report_is_an_error() {
        for answer in ["", "HTTP/1.1 200 OK\r\n\r\nhello", "SSH-2.0-x\r\n", "HTTP/1.1 200 OK\r\n\r\n{}"] {
            let (address, served) = server(answer.to_owned());
            let error = ask(address, PATH, Duration::from_secs(60)).unwrap_err();
            assert!(matches!(error, Error::NoReport { .. }), "{answer:?}: {error}");
            served.join().unwrap();
        }
        let nowhere = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(matches!(ask(nowhere, PATH, Duration::from_secs(60)), Err(Error::Io { .. })));
        // Connections are queued, and never accepted.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = ask(silent.local_addr().unwrap(), PATH, Duration::from_millis(100)).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
    }
}
