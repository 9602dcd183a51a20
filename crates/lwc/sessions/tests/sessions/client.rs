//! A client's end of a session.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use orrery_sessions::{Builder, Ended, Interest, Pool, SessionId, Step};

use super::obedient::obey;

/// A client's end of a session.
pub(crate) struct Client {
    pub(crate) stream: UnixStream,
    pub(crate) server: Option<UnixStream>,
    pub(crate) session: Option<SessionId>,
    pub(crate) ended: Option<Ended>,
}

impl Client {
    pub(crate) fn begin(pool: &mut Pool) -> Self {
        let (stream, server) = UnixStream::pair().unwrap();
        let (session, step) = pool.begin(server.as_fd()).unwrap();
        let mut client = Self { stream, server: Some(server), session: Some(session), ended: None };
        client.note(step);
        client
    }

    pub(crate) fn note(&mut self, step: Step) {
        match step {
            Step::Waits(interest) => assert_eq!(interest, Interest::Readable),
            Step::Ended(ended) => {
                self.ended = Some(ended);
                self.session = None;
                self.server = None;
            }
        }
    }

    /// Sends a command, lets the session go on, and gives the answer; none where it ended instead.
    pub(crate) fn ask(&mut self, pool: &mut Pool, command: &str) -> Option<String> {
        self.stream.write_all(format!("{command}\n").as_bytes()).unwrap();
        let step = pool.step(self.session.unwrap()).unwrap();
        self.note(step);
        if self.ended.is_some() {
            return None;
        }
        let mut answer = Vec::new();
        let mut part = [0; 4096];
        while answer.last() != Some(&b'\n') {
            let length = self.stream.read(&mut part).unwrap();
            assert!(length > 0, "{command} brings an answer");
            answer.extend_from_slice(&part[..length]);
        }
        answer.pop();
        Some(String::from_utf8(answer).unwrap())
    }

    /// Ends the session in good order.
    pub(crate) fn end(mut self, pool: &mut Pool) {
        self.stream.shutdown(std::net::Shutdown::Write).unwrap();
        let step = pool.step(self.session.unwrap()).unwrap();
        assert_eq!(step, Step::Ended(Ended::Returned));
        self.server = None;
        let mut rest = Vec::new();
        assert_eq!(self.stream.read_to_end(&mut rest).unwrap(), 0, "the session has closed its descriptor");
    }
}

pub(crate) fn pool(settings: Builder) -> Pool {
    settings.build(obey).unwrap()
}

pub(crate) fn tidy_all(pool: &mut Pool) {
    while pool.tidy().unwrap() {}
}
