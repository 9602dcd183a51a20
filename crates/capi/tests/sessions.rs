//! `examples/sessions`: the same bug lets a client read others' notes, and does not where each has a session.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod examples;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Command, Stdio};

use examples::{COMPILERS, PATIENCE, build};

struct Server {
    process: Child,
    port: u16,
}

impl Server {
    fn start(compiler: &str, arguments: &[&str]) -> Option<Self> {
        let mut process = Command::new(build("sessions", compiler)?)
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut port = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut port).unwrap();
        Some(Self { process, port: port.trim().parse().unwrap() })
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Returns what a client gets who says that two bytes are so many.
    fn attack(&self, claimed: usize) -> Vec<u8> {
        let mut stream = self.connect();
        stream.write_all(format!("ECHO {claimed} hi\n").as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut memory = Vec::new();
        // The server may end the connection harshly.
        let _ = stream.read_to_end(&mut memory);
        assert!(memory.starts_with(b"hi\n"));
        memory
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

fn ask(stream: &mut TcpStream, line: &str) -> String {
    stream.write_all(line.as_bytes()).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    answer
}

fn contains(memory: &[u8], secret: &str) -> bool {
    memory.windows(secret.len()).any(|window| window == secret.as_bytes())
}

/// Returns whether a liar reads a client's note, while that one is there and when it has left.
fn is_read(server: &Server) -> (bool, bool) {
    let secret = format!("note-{:x}", std::process::id());
    let mut client = server.connect();
    assert_eq!(ask(&mut client, &format!("KEEP {secret}\n")), "kept 1\n");
    let (mut here, mut gone) = (false, false);
    for _ in 0..3 {
        here |= contains(&server.attack(60_000), &secret);
    }
    assert_eq!(ask(&mut client, "LIST\n"), format!("{secret}\n"));
    drop(client);
    for _ in 0..6 {
        gone |= contains(&server.attack(60_000), &secret);
    }
    (here, gone)
}

#[test]
fn in_one_memory_a_liar_reads_what_others_said() {
    let Some(server) = Server::start("gcc", &["--plain"]) else { return };
    assert_eq!(is_read(&server), (true, true));
}

#[test]
fn in_sessions_he_does_not() {
    for compiler in COMPILERS {
        // Two contexts: the liar gets the client's as soon as that one has left.
        let Some(server) = Server::start(compiler, &["--ready", "2", "--most", "2"]) else { continue };
        assert_eq!(is_read(&server), (false, false));
        // One who asks for more than there is does not end the others.
        let mut client = server.connect();
        assert_eq!(ask(&mut client, "KEEP this\n"), "kept 1\n");
        server.attack(1 << 30);
        assert_eq!(ask(&mut client, "LIST\n"), "this\n");
    }
}

#[test]
fn more_clients_than_sessions_are_served() {
    let Some(server) = Server::start("gcc", &["--ready", "1", "--most", "3"]) else { return };
    let mut clients: Vec<TcpStream> = (0..20).map(|_| server.connect()).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        client.write_all(format!("KEEP {number}\nLIST\n").as_bytes()).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
    }
    for (number, client) in clients.iter_mut().enumerate() {
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, format!("kept 1\n{number}\n"));
    }
}
