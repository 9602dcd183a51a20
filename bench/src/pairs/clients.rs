//! Clients of a pair's services whose protocol is more than lines of text.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use orrery_orthros_host::Network;

/// The timeout of operations that take seconds.
const TIMEOUT: Duration = Duration::from_secs(120);
/// What the answer to each statement ends with.
const DONE: &str = "-- done --";

/// A user who types into a terminal over the network, and waits for each key's echo.
pub struct Typist {
    stream: TcpStream,
}

impl Typist {
    /// Connects, and waits until the program shows something.
    pub fn connect(port: u16) -> Result<Self> {
        let stream = super::connect(port)?;
        let mut typist = Self { stream };
        typist.press(b"", "Exit")?;
        Ok(typist)
    }

    /// Types a letter and returns how long its echo took.
    pub fn key(&mut self, letter: char) -> Result<Duration> {
        let mut bytes = [0; 4];
        let text = letter.encode_utf8(&mut bytes).to_owned();
        self.press(text.as_bytes(), &text)
    }

    /// Presses keys, and returns how long it took until a text was shown.
    pub fn press(&mut self, keys: &[u8], until: &str) -> Result<Duration> {
        let begin = Instant::now();
        self.stream.write_all(keys)?;
        let mut shown = Vec::new();
        let mut bytes = [0; 4096];
        while !String::from_utf8_lossy(&shown).contains(until) {
            let count = self.stream.read(&mut bytes).context("nothing is shown")?;
            ensure!(count > 0, "the terminal hung up");
            shown.extend_from_slice(&bytes[..count]);
        }
        Ok(begin.elapsed())
    }
}

/// A client of MariaDB: its own command.
pub struct Sql {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Sql {
    /// Connects as soon as the server accepts connections.
    pub fn connect(port: u16) -> Result<Self> {
        let deadline = Instant::now() + TIMEOUT;
        while let Err(error) = TcpStream::connect((Network::SERVICE, port)) {
            ensure!(Instant::now() < deadline, "MariaDB does not come up: {error}");
            std::thread::sleep(Duration::from_millis(50));
        }
        let mut child = Command::new("mariadb")
            .args([
                "--no-defaults",
                "--user=root",
                "--skip-ssl",
                "--unbuffered",
                "--skip-column-names",
                "--batch",
            ])
            .args([format!("--host={}", Network::SERVICE), format!("--port={port}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start mariadb")?;
        let (input, output) =
            (child.stdin.take().context("no input")?, child.stdout.take().context("no output")?);
        let mut sql = Self { child, input, output: BufReader::new(output) };
        sql.ask("select 1;")?;
        Ok(sql)
    }

    /// Executes statements, and returns their output.
    pub fn ask(&mut self, statements: &str) -> Result<String> {
        writeln!(self.input, "{statements} select '{DONE}';")?;
        let mut answer = String::new();
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line)? == 0 {
                bail!("MariaDB refused {statements:?}, or the connection broke");
            }
            if line.trim_end() == DONE {
                return Ok(answer.trim_end().to_owned());
            }
            answer.push_str(&line);
        }
    }
}

impl Drop for Sql {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _ended = self.child.wait();
    }
}
