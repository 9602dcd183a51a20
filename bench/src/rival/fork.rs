//! A child process for every piece of work.

use anyhow::{Context, Result, bail, ensure};

use crate::contender::{Contender, Sample};
use crate::footprint::Footprint;
use crate::work::Work;

/// `fork`, dirty in the child, `_exit`, `waitpid`: the parent's memory is as it was, because nobody wrote to
/// it.
pub struct ForkExitWait {
    footprint: Footprint,
}

impl ForkExitWait {
    /// Forks a process that holds `footprint`.
    pub fn new(footprint: Footprint) -> Self {
        Self { footprint }
    }
}

impl Contender for ForkExitWait {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let work: Work = work.parse()?;
        let sample = Sample::batch(iterations, |_| {
            let footprint = &mut self.footprint;
            fork_exit_wait(|| {
                footprint.perform(work);
                true
            })?;
            Ok(())
        })?;
        self.footprint.check_pristine(work)?;
        Ok(sample)
    }
}

/// Runs `work` in a forked child and waits for its end. As for what it may do, see `in_child`: nothing that takes a lock.
pub fn fork_exit_wait(work: impl FnOnce() -> bool) -> Result<()> {
    wait_for(in_child(work)?)
}

/// Runs `work` in a forked child, which ends with status 0 where it returns true; returns the child's process
/// id. `work` must not allocate or lock anything: another thread may have held the lock at the time of the
/// fork.
pub(super) fn in_child(work: impl FnOnce() -> bool) -> Result<libc::pid_t> {
    // SAFETY: the child only runs `work`, which does only what is allowed after fork in a process that may
    // have threads, and leaves by _exit, so that nothing of the parent's is run twice.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()).context("fork"),
        0 => {
            let status = if work() { 0 } else { 1 };
            // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in it.
            unsafe { libc::_exit(status) }
        }
        child => Ok(child),
    }
}

/// Waits until `child` has ended, and well.
pub(super) fn wait_for(child: libc::pid_t) -> Result<()> {
    let mut status = 0;
    loop {
        // SAFETY: `status` is a valid place for waitpid to write to.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        if waited == child {
            break;
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            bail!("waiting for child {child}: {error}");
        }
    }
    ensure!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        "child {child} ended with status {status:#x}"
    );
    Ok(())
}
