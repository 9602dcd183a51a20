//! The control connection to a guest: its second serial port, which QEMU offers as a socket.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use orrery_orthros_wire::{Report, Request, ServiceExit, decode, encode};

use crate::error::{Error, Result, file, of_qemu};
use crate::socket::{SHORTAGE_PAUSE, is_gone};

/// The control connection to a guest.
pub struct Control {
    machine: String,
    stream: UnixStream,
    reports: Receiver<Report>,
    /// Reports that were read while something else was waited for.
    queued: VecDeque<Report>,
    /// The address of the heartbeats and the number of processors, once reported.
    heartbeats: Option<(u64, usize)>,
    /// The same of a backup.
    standby_heartbeats: Option<(u64, usize)>,
    /// The number of pages that were restored lazily, and how long they took, once all are there.
    lazy_pages: Option<(u64, f64)>,
    /// MiB that a restore takes and MiB that the backup has, as last reported.
    memory_estimate: Option<(u64, u64)>,
    /// How the service has exited, as last reported.
    service_exit: Option<ServiceExit>,
    /// When the ping was sent that is still unanswered.
    pinged: Option<Instant>,
    /// When the last pong arrived.
    last_pong: Option<Instant>,
}

impl Control {
    /// Connects to the socket of a machine's second serial port.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn connect(machine: &str, socket: &Path) -> Result<Self> {
        let stream = crate::socket::connect(socket).map_err(file("connect to", socket))?;
        let reader = stream.try_clone().map_err(file("connect to", socket))?;
        let (sender, reports) = channel();
        let read = move || read_reports(BufReader::new(reader), &sender);
        std::thread::Builder::new().spawn(read).map_err(file("start a thread for", socket))?;
        Ok(Self {
            machine: machine.to_owned(),
            stream,
            reports,
            queued: VecDeque::new(),
            heartbeats: None,
            standby_heartbeats: None,
            lazy_pages: None,
            memory_estimate: None,
            service_exit: None,
            pinged: None,
            last_pong: None,
        })
    }

    /// Sends a request.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] if the machine is gone.
    pub fn send(&mut self, request: &Request) -> Result<()> {
        let sent = encode(request).map_err(Into::into).and_then(|line| self.stream.write_all(&line));
        sent.map_err(|error| Error::Guest { machine: self.machine.clone(), why: of_qemu(&error) })
    }

    /// Stores the content of reports that nobody waits for, and returns any other report.
    fn absorb(&mut self, report: Report) -> Option<Report> {
        match report {
            Report::Heartbeats { physical, cpus } => self.heartbeats = Some((physical, cpus)),
            Report::StandbyHeartbeats { physical, cpus } => self.standby_heartbeats = Some((physical, cpus)),
            Report::LazyPagesDone { pages, seconds } => self.lazy_pages = Some((pages, seconds)),
            Report::MemoryEstimate { required_mib, available_mib } => {
                self.memory_estimate = Some((required_mib, available_mib));
            }
            Report::ServiceExited(exit) => self.service_exit = Some(exit),
            Report::Pong => (self.pinged, self.last_pong) = (None, Some(Instant::now())),
            report => return Some(report),
        }
        None
    }

    /// Returns the next report that `absorb` does not store, if one arrives within `timeout`.
    pub fn receive(&mut self, timeout: Duration) -> Option<Report> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(report) = self.queued.pop_front() {
                return Some(report);
            }
            match self.reports.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(report) => {
                    if let Some(report) = self.absorb(report) {
                        return Some(report);
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// Reads all reports that have arrived, without waiting.
    fn poll(&mut self) {
        while let Ok(report) = self.reports.try_recv() {
            let queued = self.absorb(report);
            self.queued.extend(queued);
        }
    }

    /// Returns the address of the heartbeats and the number of processors, or `None` before they are reported.
    pub(crate) fn heartbeats(&mut self) -> Option<(u64, usize)> {
        self.poll();
        self.heartbeats
    }

    /// Returns the same of a backup.
    pub(crate) fn standby_heartbeats(&mut self) -> Option<(u64, usize)> {
        self.poll();
        self.standby_heartbeats
    }

    /// Returns the number of pages that were restored lazily, and how long they took, once all are there.
    pub(crate) fn lazy_pages(&mut self) -> Option<(u64, f64)> {
        self.poll();
        self.lazy_pages
    }

    /// Returns how the service has exited, if it has.
    pub(crate) fn service_exit(&mut self) -> Option<ServiceExit> {
        self.poll();
        self.service_exit.clone()
    }

    /// Sends a ping. A request after it is read when the guest has answered the ping, however long that request takes then.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    pub(crate) fn ping(&mut self) -> Result<()> {
        self.pinged.get_or_insert_with(Instant::now);
        self.send(&Request::Ping)
    }

    /// Returns how long a ping has been unanswered, and how long ago the last pong arrived.
    pub(crate) fn ping_state(&mut self) -> (Option<Duration>, Option<Duration>) {
        self.poll();
        (self.pinged.map(|at| at.elapsed()), self.last_pong.map(|at| at.elapsed()))
    }

    /// Requests a memory estimate from a backup: MiB that a restore of the service takes, and MiB that the backup has. Returns
    /// `None` if the backup cannot tell, or does not within `timeout`.
    pub(crate) fn estimate_memory(&mut self, pid: i32, timeout: Duration) -> Option<(u64, u64)> {
        self.poll();
        self.memory_estimate = None;
        self.send(&Request::EstimateMemory { pid }).ok()?;
        let deadline = Instant::now() + timeout;
        while self.memory_estimate.is_none() && Instant::now() < deadline {
            match self.reports.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(report) => {
                    let queued = self.absorb(report);
                    self.queued.extend(queued);
                }
                Err(_) => break,
            }
        }
        self.memory_estimate
    }

    /// Takes the error of a request whose answer nobody waited for, if one was reported.
    pub(crate) fn take_failure(&mut self) -> Option<Error> {
        self.poll();
        let at = self.queued.iter().position(|report| matches!(report, Report::Failed { .. }))?;
        let Some(Report::Failed { error }) = self.queued.remove(at) else { return None };
        Some(Error::Guest { machine: self.machine.clone(), why: error })
    }

    /// Waits for a report; a report of a failure is an error.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] with the guest's error, [`Error::Timeout`].
    pub fn expect(&mut self, what: &str, timeout: Duration) -> Result<Report> {
        match self.receive(timeout) {
            Some(Report::Failed { error }) => Err(Error::Guest { machine: self.machine.clone(), why: error }),
            Some(report) => Ok(report),
            None => Err(Error::Timeout {
                machine: self.machine.clone(),
                seconds: timeout.as_secs(),
                what: what.to_owned(),
                hint: String::new(),
            }),
        }
    }

    /// Runs a program in the guest, waits for its exit, and returns its output.
    ///
    /// # Errors
    ///
    /// As [`expect`](Self::expect); [`Error::Guest`] if the program fails.
    pub fn run(&mut self, argv: &[&str]) -> Result<String> {
        let command = argv.join(" ");
        self.send(&Request::Run { argv: argv.iter().map(|&word| word.to_owned()).collect() })?;
        let why = match self.expect(&format!("`{command}`"), Duration::from_secs(30))? {
            Report::Exited { status: 0, output } => return Ok(output),
            Report::Exited { status, output } => format!("{command} exits with {status}: {}", output.trim()),
            _ => format!("it did not answer the request to run {command}"),
        };
        Err(Error::Guest { machine: self.machine.clone(), why })
    }
}

/// Sends on what a guest reports, until it is gone.
fn read_reports(mut reader: impl BufRead, reports: &Sender<Report>) {
    let mut line = Vec::new();
    loop {
        match reader.read_until(b'\n', &mut line) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if is_gone(&error) => return,
            // Want of memory passes, and what has come so far is in the line.
            Err(_) => {
                std::thread::sleep(SHORTAGE_PAUSE);
                continue;
            }
        }
        // The kernel may print to the port before the guest's program opens it: such lines are skipped.
        if let Ok(report) = decode(line.strip_suffix(b"\n").unwrap_or(&line))
            && reports.send(report).is_err()
        {
            return;
        }
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Reads bytes in small pieces, between which the kernel is short of memory.
    struct Short<'a>(&'a [u8], bool);

    impl std::io::Read for Short<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.1 = !self.1;
            if self.1 {
                return Err(std::io::Error::from_raw_os_error(libc::ENOMEM));
            }
            self.0.read(&mut buffer[..3])
        }
    }

    #[test]
    fn want_of_memory_loses_no_report() {
        let mut bytes = b"a kernel's own line\n".to_vec();
        bytes.extend(encode(&Report::BackupReady).unwrap());
        let (sender, reports) = channel();
        read_reports(BufReader::new(Short(&bytes, false)), &sender);
        assert_eq!(reports.try_recv().unwrap(), Report::BackupReady);
        assert!(reports.try_recv().is_err());
    }

    #[test]
    fn an_unanswered_ping_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let listener = UnixListener::bind(&path).unwrap();
        let mut control = Control::connect("guest", &path).unwrap();
        let (mut guest, _) = listener.accept().unwrap();
        assert_eq!(control.ping_state(), (None, None), "no ping was sent");
        control.ping().unwrap();
        let mut request = String::new();
        BufReader::new(guest.try_clone().unwrap()).read_line(&mut request).unwrap();
        assert_eq!(decode::<Request>(request.as_bytes()).unwrap(), Request::Ping);
        std::thread::sleep(Duration::from_millis(30));
        // A second ping does not make the first one younger.
        control.ping().unwrap();
        let (unanswered, last_pong) = control.ping_state();
        assert!(unanswered.unwrap() >= Duration::from_millis(30) && last_pong.is_none());
        guest.write_all(&encode(&Report::Pong).unwrap()).unwrap();
        // Nobody takes it for the answer to something else.
        assert!(control.receive(Duration::from_millis(200)).is_none());
        let (unanswered, last_pong) = control.ping_state();
        assert!(unanswered.is_none() && last_pong.is_some());
        // A program that another test starts meanwhile may have it open for a moment, too.
        guest.shutdown(std::net::Shutdown::Both).unwrap();
        drop((guest, listener));
        assert_eq!(control.ping().unwrap_err().to_string(), "guest: QEMU has ended");
    }
}
