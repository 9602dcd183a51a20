//! The server: more clients than sessions.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use orrery_sessions::{Builder, Connection, Pool};

use super::obedient::{line_of, obey};

/// A server in a process of its own, on a port of the kernel's choice.
struct Server {
    pid: i32,
    port: u16,
}

impl Server {
    fn start(settings: Builder, serve: impl Fn(&mut Connection)) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // SAFETY: the case has one thread, so the child finds no lock held.
        match unsafe { libc::fork() } {
            0 => {
                let mut pool = settings.build(serve).unwrap();
                let result = pool.serve(listener.as_fd(), None);
                println!("the server ended: {result:?}");
                std::process::exit(1);
            }
            pid => Self { pid, port },
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SAFETY: takes numbers; the process is this case's own.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

fn answer(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let mut byte = [0];
    while byte[0] != b'\n' {
        assert_eq!(
            stream.read(&mut byte).unwrap(),
            1,
            "an answer after {:?}",
            String::from_utf8_lossy(&text)
        );
        text.push(byte[0]);
    }
    text.pop();
    String::from_utf8(text).unwrap()
}

pub(crate) fn the_server_serves_more_than_there_are_sessions() {
    let server = Server::start(Pool::builder().ready(2).most(4), obey);
    // Some that say nothing do not take a session.
    let _silent: Vec<TcpStream> = (0..10).map(|_| server.connect()).collect();
    for round in 0..4 {
        let mut streams: Vec<TcpStream> = (0..30).map(|_| server.connect()).collect();
        // Four get sessions, the others wait until one of those has ended.
        for (number, stream) in streams.iter_mut().enumerate() {
            stream.write_all(format!("remember {round}.{number}\nrecall\n").as_bytes()).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
        }
        for (number, stream) in streams.iter_mut().enumerate() {
            assert_eq!(answer(stream), "ok");
            assert_eq!(answer(stream), format!("{round}.{number}"));
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        }
        let mut crash = server.connect();
        crash.write_all(b"crash\n").unwrap();
        let ended = crash.read(&mut [0]);
        assert!(!matches!(ended, Ok(1..)), "{ended:?}");
    }
}

pub(crate) fn greeting_sessions_speak_first() {
    let server = Server::start(Pool::builder().ready(1).greets(true), |connection| {
        connection.write_all(b"hello\n").unwrap();
        // More than the socket takes at once.
        let _ = line_of(connection);
        connection.write_all(&[b'x'; 6 << 20]).unwrap();
        connection.write_all(b"\n").unwrap();
    });
    let mut streams: Vec<TcpStream> = (0..3).map(|_| server.connect()).collect();
    for stream in &mut streams {
        assert_eq!(answer(stream), "hello");
        stream.write_all(b"go\n").unwrap();
    }
    for stream in &mut streams {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), (6 << 20) + 1);
    }
}
