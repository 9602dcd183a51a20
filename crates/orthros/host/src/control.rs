//! Lines of JSON from and to a guest, over its second serial port, which QEMU shows as a socket.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Error, Result, file, of_qemu};

/// What a guest says; `orrery-guest` has the same, for writing.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "said", rename_all = "lowercase")]
pub enum Said {
    /// Where in the machine's memory its processors leave their heartbeats.
    Beats {
        /// The page's address.
        physical: u64,
        /// How many processors there are.
        cpus: usize,
    },
    /// The same of the backup, with one number more: how much it has done.
    Standby {
        /// The page's address.
        physical: u64,
        /// How many processors there are.
        cpus: usize,
    },
    /// The active runs its service.
    Ready {
        /// Its number in the guest.
        pid: i32,
    },
    /// The backup is up.
    Waiting,
    /// It is there, and listens.
    Alive,
    /// The backup knows the active's kernel.
    Armed {
        /// The kernel's release.
        release: String,
        /// How long that took.
        seconds: f64,
    },
    /// What it would take to rebuild the service.
    Weighed {
        /// MiB of memory that it takes.
        needs: u64,
        /// MiB that the backup has for it.
        has: u64,
    },
    /// The service has been read, and nothing is in the way of rebuilding it.
    Read,
    /// The service comes onto the network now: what it does from here on the old machine does not know of.
    Online,
    /// The service lives again.
    Survived {
        /// Its number in the guest that survives.
        pid: i32,
        /// What took how long.
        steps: Vec<Step>,
        /// What was carried over.
        summary: Value,
    },
    /// All of the service's memory has come.
    Whole {
        /// How many pages came when the service lived again.
        pages: u64,
        /// How long that took, in seconds.
        seconds: f64,
    },
    /// The answer of a program that was run.
    Ran {
        /// How it ended.
        status: i32,
        /// What it printed.
        output: String,
    },
    /// The service has ended, and its disk is unmounted.
    Ended,
    /// It did not work.
    Failed {
        /// Why.
        why: String,
    },
}

/// A part of a failover.
#[derive(Clone, Debug, Deserialize, serde::Serialize)]
pub struct Step {
    /// What was done.
    pub name: String,
    /// How long it took.
    pub seconds: f64,
}

/// A connection to a guest's own program.
pub struct Control {
    machine: String,
    stream: UnixStream,
    said: Receiver<Said>,
    /// What was said before anyone listened.
    kept: VecDeque<Said>,
    /// Where the heartbeats are, once that was said.
    beats: Option<(u64, usize)>,
    /// Where those of the backup are.
    standby: Option<(u64, usize)>,
    /// How many pages came after the service lived again, and how long that took, once that was said.
    whole: Option<(u64, f64)>,
    /// How many MiB it takes to rebuild the service and how many there are, as last said.
    weighed: Option<(u64, u64)>,
    /// When it was last asked whether it is there, if it has not answered yet.
    knocked: Option<Instant>,
    /// When it last answered that.
    answered: Option<Instant>,
}

impl Control {
    /// Connects to the socket of a machine's second serial port.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn connect(machine: &str, socket: &Path) -> Result<Self> {
        let stream = crate::machine::connect(socket).map_err(file("connect to", socket))?;
        let reader = stream.try_clone().map_err(file("connect to", socket))?;
        let (sender, said) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(reader).split(b'\n').map_while(std::result::Result::ok) {
                // The port's first bytes may be of the kernel; what is no message is nobody's.
                if let Ok(said) = serde_json::from_slice(&line)
                    && sender.send(said).is_err()
                {
                    return;
                }
            }
        });
        Ok(Self {
            machine: machine.to_owned(),
            stream,
            said,
            kept: VecDeque::new(),
            beats: None,
            standby: None,
            whole: None,
            weighed: None,
            knocked: None,
            answered: None,
        })
    }

    /// Asks for something.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] where the machine is gone.
    pub fn ask(&mut self, what: &Value) -> Result<()> {
        let sent = writeln!(self.stream, "{what}");
        sent.map_err(|error| Error::Guest { machine: self.machine.clone(), why: of_qemu(&error) })
    }

    /// Takes note of what is said by the way; anything else is given back.
    fn take_note(&mut self, said: Said) -> Option<Said> {
        match said {
            Said::Beats { physical, cpus } => self.beats = Some((physical, cpus)),
            Said::Standby { physical, cpus } => self.standby = Some((physical, cpus)),
            Said::Whole { pages, seconds } => self.whole = Some((pages, seconds)),
            Said::Weighed { needs, has } => self.weighed = Some((needs, has)),
            Said::Alive => (self.knocked, self.answered) = (None, Some(Instant::now())),
            said => return Some(said),
        }
        None
    }

    /// The next thing that is said other than by the way, if it is said within `patience`.
    pub fn listen(&mut self, patience: Duration) -> Option<Said> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(said) = self.kept.pop_front() {
                return Some(said);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.said.recv_timeout(left) {
                Ok(said) => {
                    if let Some(said) = self.take_note(said) {
                        return Some(said);
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// Where the heartbeats are and of how many processors; nothing before that was said.
    pub(crate) fn beats(&mut self) -> Option<(u64, usize)> {
        while let Ok(said) = self.said.try_recv() {
            let kept = self.take_note(said);
            self.kept.extend(kept);
        }
        self.beats
    }

    /// The same of a backup.
    pub(crate) fn standby(&mut self) -> Option<(u64, usize)> {
        self.beats();
        self.standby
    }

    /// How many pages of the service's memory came later, and how long that took, once they are all there.
    pub(crate) fn whole(&mut self) -> Option<(u64, f64)> {
        self.beats();
        self.whole
    }

    /// Asks whether it is there. What is asked after that is listened to when this has been answered, however long it takes then.
    ///
    /// # Errors
    ///
    /// As [`ask`](Self::ask).
    pub(crate) fn knock(&mut self) -> Result<()> {
        self.knocked.get_or_insert_with(Instant::now);
        self.ask(&json!({"do": "knock"}))
    }

    /// How long it has not answered that, and how long ago it last did; nothing of what was not asked, or never answered.
    pub(crate) fn hearing(&mut self) -> (Option<Duration>, Option<Duration>) {
        self.beats();
        (self.knocked.map(|at| at.elapsed()), self.answered.map(|at| at.elapsed()))
    }

    /// Asks a backup how many MiB it would take to rebuild the service and how many it has; nothing where it does not know, or
    /// does not say so soon enough.
    pub(crate) fn weigh(&mut self, pid: i32, patience: Duration) -> Option<(u64, u64)> {
        self.beats();
        self.weighed = None;
        self.ask(&json!({"do": "weigh", "pid": pid})).ok()?;
        let deadline = Instant::now() + patience;
        while self.weighed.is_none() && Instant::now() < deadline {
            match self.said.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(said) => {
                    let kept = self.take_note(said);
                    self.kept.extend(kept);
                }
                Err(_) => break,
            }
        }
        self.weighed
    }

    /// Why what was asked for without waiting for an answer did not work, if that was said.
    pub(crate) fn complaint(&mut self) -> Option<Error> {
        self.beats();
        let at = self.kept.iter().position(|said| matches!(said, Said::Failed { .. }))?;
        let Some(Said::Failed { why }) = self.kept.remove(at) else { return None };
        Some(Error::Guest { machine: self.machine.clone(), why })
    }

    /// Waits for something to be said; anything that failed is an error.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] with what the guest said, [`Error::Timeout`].
    pub fn expect(&mut self, what: &str, patience: Duration) -> Result<Said> {
        match self.listen(patience) {
            Some(Said::Failed { why }) => Err(Error::Guest { machine: self.machine.clone(), why }),
            Some(said) => Ok(said),
            None => Err(Error::Timeout {
                machine: self.machine.clone(),
                seconds: patience.as_secs(),
                what: what.to_owned(),
                hint: String::new(),
            }),
        }
    }

    /// Runs a program in the guest to its end, and gives what it printed.
    ///
    /// # Errors
    ///
    /// As [`expect`](Self::expect); [`Error::Guest`] where the program failed.
    pub fn run(&mut self, argv: &[&str]) -> Result<String> {
        self.ask(&json!({"do": "run", "argv": argv}))?;
        match self.expect(&format!("`{}`", argv.join(" ")), Duration::from_secs(30))? {
            Said::Ran { status: 0, output } => Ok(output),
            said => Err(Error::Guest {
                machine: self.machine.clone(),
                why: format!("{}: {said:?}", argv.join(" ")),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn who_does_not_answer_is_found_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = UnixListener::bind(&path).unwrap();
        let mut control = Control::connect("guest", &path).unwrap();
        let (mut guest, _) = listener.accept().unwrap();
        assert_eq!(control.hearing(), (None, None), "it was not asked");
        control.knock().unwrap();
        let mut asked = String::new();
        BufReader::new(guest.try_clone().unwrap()).read_line(&mut asked).unwrap();
        assert_eq!(asked.trim(), r#"{"do":"knock"}"#);
        std::thread::sleep(Duration::from_millis(30));
        // Asking once more does not make it younger.
        control.knock().unwrap();
        let (unanswered, answered) = control.hearing();
        assert!(unanswered.unwrap() >= Duration::from_millis(30) && answered.is_none());
        writeln!(guest, r#"{{"said":"alive"}}"#).unwrap();
        // It is heard by the way: nobody takes it for the answer to something else.
        assert!(control.listen(Duration::from_millis(200)).is_none());
        let (unanswered, answered) = control.hearing();
        assert!(unanswered.is_none() && answered.is_some());
        // A program that another test starts meanwhile may have it open for a moment, too.
        guest.shutdown(std::net::Shutdown::Both).unwrap();
        drop((guest, listener));
        assert_eq!(control.knock().unwrap_err().to_string(), "guest: QEMU has ended");
    }
}
