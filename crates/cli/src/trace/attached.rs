//! Processes that run already, to which an executive is attached.

use std::io;
use std::os::fd::OwnedFd;

use anyhow::{Context, bail};
use orrery_hijack::{Hijack, Options};
use orrery_sys::signals;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// What ends a trace of processes that are not this one's children.
const ENDING: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Processes that have an executive, or are to have one.
pub(crate) struct Attached {
    processes: Vec<(i32, OwnedFd)>,
    signals: OwnedFd,
}

impl Attached {
    /// Finds the processes. From now on this process is not ended by SIGINT, SIGTERM and SIGHUP, which [`Attached::wait`] notices; to be
    /// called before it has other threads.
    ///
    /// # Errors
    /// A process does not exist.
    pub(crate) fn find(processes: &[i32]) -> anyhow::Result<Self> {
        let open = |process: &i32| {
            let pid = Pid::from_raw(*process).context("cannot attach to process 0")?;
            let found = pidfd_open(pid, PidfdFlags::empty());
            Ok((*process, found.with_context(|| format!("cannot attach to process {process}"))?))
        };
        let processes = processes.iter().map(open).collect::<anyhow::Result<_>>()?;
        let set = ENDING.iter().fold(0, |set, signal| set | 1 << (signal - 1));
        let signals = signals::descriptor(set).context("cannot receive signals")?;
        Ok(Self { processes, signals })
    }

    /// Puts executives under them. Reports those that get none.
    ///
    /// # Errors
    /// None of them gets one.
    pub(crate) fn attach(&mut self, hijack: &Hijack, options: Options) -> anyhow::Result<()> {
        let numbers: Vec<i32> = self.processes.iter().map(|(process, _)| *process).collect();
        let refused = hijack.attach(options, &numbers)?;
        let reason =
            |(process, reason): &(i32, String)| format!("cannot attach to process {process}: {reason}");
        if refused.len() == numbers.len() {
            bail!("{}", refused.iter().map(reason).collect::<Vec<_>>().join("; "));
        }
        for refusal in &refused {
            eprintln!("orrery: {}", reason(refusal));
        }
        self.processes.retain(|(process, _)| refused.iter().all(|(other, _)| other != process));
        Ok(())
    }

    /// Waits until all of them have ended, or a signal comes that ends the trace; returns the processes that run.
    ///
    /// # Errors
    /// They cannot be waited for.
    pub(crate) fn wait(mut self) -> io::Result<Vec<i32>> {
        while !self.processes.is_empty() {
            let descriptors = self.processes.iter().map(|(_, descriptor)| descriptor).chain([&self.signals]);
            let mut waiting: Vec<_> =
                descriptors.map(|descriptor| PollFd::new(descriptor, PollFlags::IN)).collect();
            match poll(&mut waiting, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let ready: Vec<bool> =
                waiting.iter().map(|descriptor| !descriptor.revents().is_empty()).collect();
            if ready.last() == Some(&true) {
                break;
            }
            let mut ended = ready.into_iter();
            self.processes.retain(|_| ended.next() != Some(true));
        }
        Ok(self.processes.into_iter().map(|(process, _)| process).collect())
    }
}

/// Takes the executives away from processes that go on, and from what they have started, unless the policy `stays`; reports it.
pub(crate) fn leave(hijack: &Hijack, running: &[i32], stays: bool) {
    if stays {
        for process in running {
            eprintln!("orrery: process {process} goes on, and the policy stays in force");
        }
        return;
    }
    // Children may run where the processes themselves have ended.
    let kept = hijack.detach();
    for process in running.iter().filter(|process| kept.iter().all(|(other, _)| other != *process)) {
        eprintln!("orrery: detached from process {process}");
    }
    for (process, reason) in kept {
        eprintln!(
            "orrery: cannot detach from process {process}, which goes on under its executive: {reason}"
        );
    }
}
