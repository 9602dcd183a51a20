//! Requests of the host and reports of the guests.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A request that the host sends to a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Read the types and symbols of the active's kernel.
    Arm,
    /// Answer with [`Report::Pong`].
    Ping,
    /// Report how much memory a restore of the service would take.
    EstimateMemory {
        /// The PID of the service in its guest.
        pid: i32,
    },
    /// Read the service from the active's memory and write images of it. The active must be paused.
    ReadService {
        /// The PID of the service in its guest.
        pid: i32,
        /// The registers of the active's processors, as QEMU's monitor prints them.
        registers: String,
        /// Fail unless all of the service can be restored: the active may then continue.
        strict: bool,
    },
    /// Restore the service from its images.
    Restore,
    /// Run a program and wait for its exit.
    Run {
        /// The program and its arguments.
        argv: Vec<String>,
    },
    /// Stop the service and unmount its disk.
    Stop,
    /// Crash the guest's kernel.
    Crash {
        /// The name of the fault.
        kind: String,
        /// A file that crashes the kernel when it is read, for the faults that need one.
        trigger: Option<String>,
    },
}

/// A report that a guest sends to the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Report {
    /// The active's processors count heartbeats in a page of memory.
    Heartbeats {
        /// The guest-physical address of the page.
        physical: u64,
        /// The number of processors, each of which has a 64-bit counter in the page.
        cpus: usize,
    },
    /// The backup's processors count heartbeats in a page of memory; one more counter goes up with the work done.
    StandbyHeartbeats {
        /// The guest-physical address of the page.
        physical: u64,
        /// The number of processors, each of which has a 64-bit counter in the page.
        cpus: usize,
    },
    /// The active has started the service.
    Ready {
        /// The PID of the service in the guest.
        pid: i32,
    },
    /// The backup has booted.
    BackupReady,
    /// The guest answers a [`Request::Ping`].
    Pong,
    /// The backup has read the types and symbols of the active's kernel.
    Armed {
        /// The release of the active's kernel.
        release: String,
        /// How long that took.
        seconds: f64,
    },
    /// The memory that a restore of the service would take now.
    MemoryEstimate {
        /// MiB that the restore takes.
        required_mib: u64,
        /// MiB that the backup has available.
        available_mib: u64,
    },
    /// The images of the service are complete.
    ImagesWritten,
    /// The restored service is about to come onto the network: from here on it acts on what the old active does not know of.
    Online,
    /// The service is restored and runs.
    Restored {
        /// The PID of the service in the guest that survives.
        pid: i32,
        /// The steps of the restore, in order.
        steps: Vec<Step>,
        /// The summary of what was restored.
        summary: Summary,
    },
    /// All pages that were restored lazily have arrived.
    LazyPagesDone {
        /// The number of pages.
        pages: u64,
        /// The time from the start of the service to the last page.
        seconds: f64,
    },
    /// A program of [`Request::Run`] has exited.
    Exited {
        /// Its exit status, or -1 if it was killed or could not be started.
        status: i32,
        /// Its standard output and error.
        output: String,
    },
    /// The service's main process has exited; reported once more when the last of the processes that it left has.
    ServiceExited(ServiceExit),
    /// The service is stopped, and its disk is unmounted.
    Stopped,
    /// A request, or the guest itself, has failed.
    Failed {
        /// The error and its causes.
        error: String,
    },
}

/// How a service's main process has exited.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceExit {
    /// Its exit status, unless a signal killed it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<i32>,
    /// The signal that killed it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// Whether processes of the service remain, as those of a program that goes into the background do.
    pub remains: bool,
    /// The last lines that the service has printed since it was started or restored.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub output: String,
}

impl ServiceExit {
    /// Returns whether the service is still there: it has exited with success, and left other processes behind.
    #[must_use]
    pub fn is_in_background(&self) -> bool {
        self.remains && self.status == Some(0)
    }
}

impl fmt::Display for ServiceExit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.status, self.signal) {
            (Some(status), _) => write!(out, "exited with status {status}")?,
            (None, Some(signal)) => write!(out, "was killed by signal {signal}")?,
            (None, None) => out.write_str("has ended")?,
        }
        if self.remains {
            out.write_str(", and other processes of it remain")?;
        }
        if !self.output.is_empty() {
            write!(out, "; it printed last: {}", self.output)?;
        }
        Ok(())
    }
}

/// A step of a failover.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The name of the step.
    pub name: String,
    /// How long it took.
    pub seconds: f64,
}

/// What a failover has carried over.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The number of processes.
    pub processes: usize,
    /// The number of threads in all processes.
    pub threads: usize,
    /// The number of memory pages.
    pub pages: u64,
    /// The number of pages of those that arrive after the service runs.
    pub lazy_pages: u64,
    /// The number of file descriptors.
    pub descriptors: usize,
    /// The number of established TCP connections.
    pub connections: usize,
    /// What was written to the service's disk on behalf of the dead kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub written: Option<WrittenBack>,
    /// The files in memory file systems that were created again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tmpfs: Option<TmpfsFiles>,
    /// Everything that could not be carried over exactly, as sentences.
    pub remarks: Vec<String>,
}

/// What was written to the service's disk because the dead kernel had not written it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenBack {
    /// The number of files and directories that were changed.
    pub files: usize,
    /// The number of those that did not exist on the disk.
    pub created: usize,
    /// The number of directory entries that were added, removed or moved.
    pub names: usize,
    /// The number of bytes of file contents.
    pub bytes: u64,
}

/// The files in memory file systems that were created again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TmpfsFiles {
    /// The number of files.
    pub files: usize,
    /// The number of bytes of their contents.
    pub bytes: u64,
}

/// Encodes a message as one line, with its line feed.
///
/// # Errors
///
/// Never for the messages of this crate; the error is that of [`serde_json`].
pub fn encode(message: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

/// Decodes a message from a line, with or without its line feed.
///
/// # Errors
///
/// The line is no such message, as one that the kernel has printed to the port.
pub fn decode<'l, T: Deserialize<'l>>(line: &'l [u8]) -> serde_json::Result<T> {
    serde_json::from_slice(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line_each_and_are_decoded_as_they_were() {
        let requests = [
            Request::Ping,
            Request::ReadService { pid: 2, registers: "CPU#0\r\nRAX=1".to_owned(), strict: true },
            Request::Run { argv: vec!["sh".to_owned(), "-c".to_owned(), "echo \"a\nb\"".to_owned()] },
            Request::Crash { kind: "panic".to_owned(), trigger: None },
        ];
        for request in requests {
            let line = encode(&request).unwrap();
            assert_eq!(line.iter().position(|&byte| byte == b'\n'), Some(line.len() - 1), "{request:?}");
            assert_eq!(decode::<Request>(&line).unwrap(), request);
        }
        let summary = Summary { lazy_pages: 7, written: Some(WrittenBack::default()), ..Summary::default() };
        let steps = vec![Step { name: "images".to_owned(), seconds: 0.25 }];
        let report = Report::Restored { pid: 2, steps, summary };
        assert_eq!(decode::<Report>(&encode(&report).unwrap()).unwrap(), report);
    }

    #[test]
    fn an_exit_is_described_in_words() {
        let exit = |status, signal, remains| ServiceExit { status, signal, remains, output: String::new() };
        let loud = ServiceExit { output: "no such file".to_owned(), ..exit(Some(1), None, false) };
        assert_eq!(loud.to_string(), "exited with status 1; it printed last: no such file");
        assert_eq!(exit(Some(3), None, false).to_string(), "exited with status 3");
        assert_eq!(
            exit(None, Some(9), true).to_string(),
            "was killed by signal 9, and other processes of it remain"
        );
        assert!(exit(Some(0), None, true).is_in_background());
        assert!(
            !exit(Some(1), None, true).is_in_background() && !exit(Some(0), None, false).is_in_background()
        );
        let report = Report::ServiceExited(exit(None, Some(11), false));
        assert_eq!(decode::<Report>(&encode(&report).unwrap()).unwrap(), report);
    }

    #[test]
    fn lines_that_are_no_messages_are_refused() {
        for line in
            ["", "[    0.1] kernel: hello", r#"{"report":"pong"}"#, r#"{"request":"run","argv":[],"pid":1}"#]
        {
            assert!(decode::<Request>(line.as_bytes()).is_err(), "{line}");
        }
    }
}
