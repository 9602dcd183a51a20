//! The language of Redis ([RESP](https://redis.io/docs/latest/develop/reference/protocol-spec/)), and the server that speaks it.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use crate::contender::Skipped;

/// A connection to a server.
#[derive(Debug)]
pub struct Resp<S: Read + Write> {
    stream: BufReader<S>,
}

impl<S: Read + Write> Resp<S> {
    /// Makes a client over a connected stream.
    pub fn new(stream: S) -> Self {
        Self { stream: BufReader::new(stream) }
    }

    /// Sends requests, whose replies are to be waited for one by one.
    pub fn send(&mut self, text: &str) -> Result<()> {
        self.stream.get_mut().write_all(text.as_bytes()).context("asking the server")
    }

    /// Reads a status, an error, or the bytes of a string; of an array only its length.
    pub fn reply(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line).context("cannot wait for the server's answer")?;
        anyhow::ensure!(line.ends_with("\r\n"), "the server hung up");
        let line = line.trim_end();
        if let Some(count) = line.strip_prefix('*') {
            for _ in 0..count.parse::<usize>()? {
                self.reply()?;
            }
        }
        match line.strip_prefix('$') {
            Some(length) if length != "-1" => {
                let mut bytes = vec![0; length.parse::<usize>()? + 2];
                self.stream.read_exact(&mut bytes)?;
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            _ => Ok(line.to_owned()),
        }
    }

    /// Sends a request and returns its reply.
    pub fn ask(&mut self, text: &str) -> Result<String> {
        self.send(text)?;
        self.reply()
    }
}

/// Returns a command that sets a key.
pub fn set(key: &str, value: &str) -> String {
    format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${}\r\n{value}\r\n", key.len(), value.len())
}

/// Returns a command that reads a key.
pub fn get(key: &str) -> String {
    format!("*2\r\n$3\r\nGET\r\n${}\r\n{key}\r\n", key.len())
}

/// Returns the program that serves as `redis-server` when it is executed by that name.
///
/// # Errors
/// [`Skipped`] where it is not installed.
pub fn redis_program() -> Result<&'static str> {
    let works = |program: &&str| {
        let mut command = named(program);
        command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    // Debian's redis-tools has the server under the second name, and does not start one as a service.
    let found = ["redis-server", "redis-check-rdb"].into_iter().find(works);
    found.ok_or_else(|| Skipped("redis-server is not installed (Debian: redis-tools)".to_owned()).into())
}

fn named(program: &str) -> Command {
    let mut command = Command::new(program);
    command.arg0("redis-server");
    command
}

/// Returns a command of `redis-server`, to which the caller adds options.
pub fn redis() -> Result<Command> {
    redis_program().map(named)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    #[test]
    fn replies_are_read_whole() {
        let output = b"+OK\r\n$3\r\na\r\n\r\n$-1\r\n*2\r\n$1\r\nx\r\n:5\r\n-ERR no\r\n:7\r\n+cut".to_vec();
        let mut server = Resp::new(Cursor::new(output));
        let mut next = || server.reply().ok();
        let wanted = ["+OK", "a\r\n\r\n", "$-1", "*2", "-ERR no", ":7"];
        for wanted in wanted {
            assert_eq!(next().as_deref(), Some(wanted));
        }
        assert_eq!(next(), None);
    }

    #[test]
    fn commands_tell_lengths() {
        assert_eq!(set("ab", "xyz"), "*3\r\n$3\r\nSET\r\n$2\r\nab\r\n$3\r\nxyz\r\n");
        assert_eq!(get("ab"), "*2\r\n$3\r\nGET\r\n$2\r\nab\r\n");
    }
}
