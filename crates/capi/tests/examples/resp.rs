//! A client that speaks RESP2.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::PATIENCE;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Status(String),
    Error(String),
    Integer(i64),
    Bulk(Vec<u8>),
    Null,
    Array(Vec<Reply>),
}

impl Reply {
    pub fn bulk(bytes: impl AsRef<[u8]>) -> Self {
        Self::Bulk(bytes.as_ref().to_vec())
    }

    pub fn text(&self) -> String {
        match self {
            Self::Status(text) | Self::Error(text) => text.clone(),
            Self::Bulk(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            Self::Integer(number) => number.to_string(),
            Self::Null | Self::Array(_) => panic!("{self:?} is no text"),
        }
    }

    pub fn integer(&self) -> i64 {
        match self {
            Self::Integer(number) => *number,
            other => panic!("{other:?} is no number"),
        }
    }

    pub fn array(&self) -> &[Self] {
        match self {
            Self::Array(elements) => elements,
            other => panic!("{other:?} is no array"),
        }
    }
}

pub struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    pub fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self { stream: BufReader::new(stream) }
    }

    pub fn run(&mut self, line: &str) -> Reply {
        let words: Vec<&str> = line.split(' ').collect();
        self.command(&words)
    }

    pub fn command<W: AsRef<[u8]>>(&mut self, words: &[W]) -> Reply {
        self.send(&encode(words));
        self.reply()
    }

    /// Several commands in one write: the server answers them one right after the other.
    pub fn together(&mut self, lines: &[&str]) -> Vec<Reply> {
        let bytes: Vec<u8> =
            lines.iter().flat_map(|line| encode(&line.split(' ').collect::<Vec<_>>())).collect();
        self.send(&bytes);
        lines.iter().map(|_| self.reply()).collect()
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).unwrap();
    }

    pub fn reply(&mut self) -> Reply {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        let line = line.strip_suffix("\r\n").unwrap_or_else(|| panic!("{line:?} is no reply"));
        let (kind, rest) = line.split_at(1);
        match kind {
            "+" => Reply::Status(rest.to_owned()),
            "-" => Reply::Error(rest.to_owned()),
            ":" => Reply::Integer(rest.parse().unwrap()),
            "$" | "*" if rest == "-1" => Reply::Null,
            "$" => {
                let mut bytes = vec![0; rest.parse::<usize>().unwrap() + 2];
                self.stream.read_exact(&mut bytes).unwrap();
                assert!(bytes.ends_with(b"\r\n"));
                bytes.truncate(bytes.len() - 2);
                Reply::Bulk(bytes)
            }
            "*" => Reply::Array((0..rest.parse::<usize>().unwrap()).map(|_| self.reply()).collect()),
            other => panic!("there is no reply of kind {other:?}"),
        }
    }

    /// Returns whether the server closes the connection.
    pub fn is_at_end(&mut self) -> bool {
        self.stream.read(&mut [0; 1]).unwrap() == 0
    }

    pub fn info(&mut self, name: &str) -> String {
        let text = self.run("INFO").text();
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .unwrap_or_else(|| panic!("INFO does not tell {name}:\n{text}"))
            .to_owned()
    }

    /// One field of an orbit's line.
    pub fn orbit(&mut self, orbit: &str, field: &str) -> String {
        let line = self.info(&format!("orbit_{orbit}"));
        // The last field is a text with whatever in it.
        line.split_once(&format!("{field}="))
            .map(|(_, rest)| {
                if field == "last_trouble" { rest } else { rest.split(',').next().unwrap() }.to_owned()
            })
            .unwrap_or_else(|| panic!("there is no {field} in {line}"))
    }

    pub fn orbit_count(&mut self, orbit: &str, field: &str) -> u64 {
        self.orbit(orbit, field).parse().unwrap()
    }
}

fn encode<W: AsRef<[u8]>>(words: &[W]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n", word.as_ref().len()).bytes());
        bytes.extend(word.as_ref());
        bytes.extend(b"\r\n");
    }
    bytes
}
