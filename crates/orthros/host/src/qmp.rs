//! QEMU's monitor: JSON lines over a socket, commands answered in order, events in between.
//! Source: QEMU `docs/interop/qmp-spec.rst`.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::{Error, Result, of_qemu};
use crate::socket::{SHORTAGE_PAUSE, is_gone};

/// How long QEMU may take to answer anything.
const PATIENCE: Duration = Duration::from_secs(20);

/// Something that happened in a machine by itself.
#[derive(Clone, Debug)]
pub struct Event {
    /// Its name, such as `GUEST_PANICKED`.
    pub name: String,
    /// What it brought along.
    pub data: Value,
    /// When it arrived here.
    pub at: Instant,
}

impl Event {
    /// Returns whether a machine was stopped because this host has no room for what it writes to its disk.
    pub(crate) fn is_host_disk_full(&self) -> bool {
        self.name == "BLOCK_IO_ERROR" && self.data["nospace"] == true && self.data["action"] == "stop"
    }
}

/// A connection to the monitor of a machine.
pub struct Qmp {
    machine: String,
    stream: UnixStream,
    reader: BufReader<UnixStream>,
    events: VecDeque<Event>,
    line: String,
}

impl Qmp {
    /// Connects to the monitor that listens, or is just about to, at `socket`.
    ///
    /// # Errors
    ///
    /// [`Error::Qmp`].
    pub fn connect(machine: &str, socket: &Path) -> Result<Self> {
        let failed =
            |why: String| Error::Qmp { machine: machine.to_owned(), command: "connect".to_owned(), why };
        let stream = crate::socket::connect(socket).map_err(|error| failed(error.to_string()))?;
        let copy = stream.try_clone().map_err(|error| failed(error.to_string()))?;
        let mut qmp = Self {
            machine: machine.to_owned(),
            stream,
            reader: BufReader::new(copy),
            events: VecDeque::new(),
            line: String::new(),
        };
        let greeting = qmp.receive("connect", Instant::now() + PATIENCE)?;
        if greeting.as_ref().is_none_or(|greeting| greeting.get("QMP").is_none()) {
            return Err(failed(format!("its greeting was {greeting:?}")));
        }
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and gives what it returns.
    ///
    /// # Errors
    ///
    /// [`Error::Qmp`] with QEMU's description.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        self.execute_within(command, arguments, PATIENCE)
    }

    /// Runs a command that QEMU must answer within `patience`. After a timeout the connection is of no use any more: the
    /// next command would be given this one's answer.
    ///
    /// # Errors
    ///
    /// [`Error::Qmp`] with QEMU's description.
    pub(crate) fn execute_within(
        &mut self,
        command: &str,
        arguments: &Value,
        patience: Duration,
    ) -> Result<Value> {
        let failed = |machine: &str, why: String| Error::Qmp {
            machine: machine.to_owned(),
            command: command.to_owned(),
            why,
        };
        let text = json!({"execute": command, "arguments": arguments}).to_string();
        let sent = writeln!(self.stream, "{text}");
        sent.map_err(|error| failed(&self.machine, of_qemu(&error)))?;
        let deadline = Instant::now() + patience;
        loop {
            let Some(answer) = self.receive(command, deadline)? else {
                return Err(failed(&self.machine, format!("no answer for {} s", patience.as_secs_f64())));
            };
            if let Some(error) = answer.get("error") {
                let why = error.get("desc").and_then(Value::as_str).unwrap_or("without a reason");
                return Err(failed(&self.machine, why.to_owned()));
            }
            if let Some(value) = answer.get("return") {
                return Ok(value.clone());
            }
        }
    }

    /// Runs a command of the monitor for people, and gives the text that it prints.
    ///
    /// # Errors
    ///
    /// [`Error::Qmp`].
    pub fn human(&mut self, command: &str) -> Result<String> {
        self.human_within(command, PATIENCE)
    }

    /// Runs a command of the monitor for people that QEMU must answer within `patience`, as
    /// [`execute_within`](Self::execute_within) does.
    ///
    /// # Errors
    ///
    /// [`Error::Qmp`].
    pub(crate) fn human_within(&mut self, command: &str, patience: Duration) -> Result<String> {
        let arguments = json!({"command-line": command});
        let text = self.execute_within("human-monitor-command", &arguments, patience)?;
        Ok(text.as_str().unwrap_or_default().to_owned())
    }

    /// The next event, if one comes within `patience`.
    ///
    /// # Errors
    ///
    /// [`Error::Qmp`] where QEMU is gone.
    pub fn event(&mut self, patience: Duration) -> Result<Option<Event>> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            if self.receive("event", deadline)?.is_none() && self.events.is_empty() {
                return Ok(None);
            }
        }
    }

    /// One message; events are put aside (and given as null), silence until `deadline` is nothing.
    fn receive(&mut self, command: &str, deadline: Instant) -> Result<Option<Value>> {
        let failed = |machine: &str, why: String| Error::Qmp {
            machine: machine.to_owned(),
            command: command.to_owned(),
            why,
        };
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let _ = self.stream.set_read_timeout(Some(left));
            match self.reader.read_line(&mut self.line) {
                Ok(0) => return Err(failed(&self.machine, "QEMU has ended".to_owned())),
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if Instant::now() >= deadline {
                        return Ok(None);
                    }
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if is_gone(&error) => return Err(failed(&self.machine, of_qemu(&error))),
                // What has come so far is in the line; QEMU is as it was.
                Err(_) => {
                    if Instant::now() >= deadline {
                        return Ok(None);
                    }
                    std::thread::sleep(SHORTAGE_PAUSE);
                    continue;
                }
            }
            let message: Value = serde_json::from_str(&self.line)
                .map_err(|error| failed(&self.machine, format!("{error} in {:?}", self.line)))?;
            self.line.clear();
            if let Some(name) = message.get("event").and_then(Value::as_str) {
                let data = message.get("data").cloned().unwrap_or(Value::Null);
                self.events.push_back(Event { name: name.to_owned(), data, at: Instant::now() });
                return Ok(Some(Value::Null));
            }
            return Ok(Some(message));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::{self, sleep};

    use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketType};

    use super::*;

    #[test]
    fn a_monitor_that_does_not_listen_yet_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let socket = net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let refused = UnixStream::connect(&path).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);

        let monitor = thread::spawn(move || {
            sleep(Duration::from_millis(50));
            net::listen(&socket, 1).unwrap();
            let mut stream = UnixStream::from(net::accept(&socket).unwrap());
            writeln!(stream, "{}", json!({"QMP": {}})).unwrap();
            let mut command = String::new();
            BufReader::new(stream.try_clone().unwrap()).read_line(&mut command).unwrap();
            writeln!(stream, "{}", json!({"return": {}})).unwrap();
            command
        });
        Qmp::connect("guest", &path).unwrap();
        assert!(monitor.join().unwrap().contains("qmp_capabilities"));
    }

    #[test]
    fn a_monitor_that_is_gone_is_told_in_words() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let monitor = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            writeln!(stream, "{}\n{}", json!({"QMP": {}}), json!({"return": {}})).unwrap();
            let mut command = String::new();
            BufReader::new(stream).read_line(&mut command).unwrap();
        });
        let mut qmp = Qmp::connect("guest", &path).unwrap();
        monitor.join().unwrap();
        let why = qmp.execute("stop", &json!({})).unwrap_err().to_string();
        assert_eq!(why, "guest: QMP stop failed: QEMU has ended");
    }

    #[test]
    fn a_monitor_that_is_not_there_is_an_error_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let Err(error) = Qmp::connect("guest", &directory.path().join("qmp")) else { panic!("connected") };
        assert!(error.to_string().starts_with("guest: QMP connect failed"), "{error}");
    }
}
