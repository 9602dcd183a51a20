//! A closure under guard: a part of a program that is trusted less than the rest.

use std::os::fd::OwnedFd;

use rustix::process::{WaitOptions, waitpid};

use crate::Error;
use crate::guard::Guard;
use crate::run::End;
use crate::spawn::spawn;

impl Guard {
    /// Runs `work` under guard, in a process of its own that starts as a copy of this one, and waits for its end. Its
    /// value becomes the exit status.
    ///
    /// ```standalone_crate
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU32, Ordering};
    /// use orrery_monitor::{Decision, End, Guard, Log, Policy};
    ///
    /// fn main() -> Result<(), orrery_monitor::Error> {
    ///     let asked = Arc::new(AtomicU32::new(0));
    ///     let count = Arc::clone(&asked);
    ///     let policy = Policy::parse("[files]\nread = ['/etc']")?;
    ///     let end = Guard::new(policy)
    ///         .log(Log::Nowhere)
    ///         // Besides the policy, a function of one's own has its say.
    ///         .mediate(["openat"], move |request| {
    ///             count.fetch_add(1, Ordering::Relaxed);
    ///             match request.text(1) {
    ///                 Ok(path) if path == b"/etc/passwd" => Decision::Fails(2),
    ///                 Ok(_) => Decision::ByPolicy,
    ///                 Err(error) => Decision::Fails(error.raw_os_error().unwrap_or(5)),
    ///             }
    ///         })?
    ///         .closure(|| {
    ///             let allowed = std::fs::read("/etc/hostname").is_ok();
    ///             let refused = std::fs::read("/bin/sh").is_err() && std::fs::read("/etc/passwd").is_err();
    ///             if allowed && refused { 7 } else { 1 }
    ///         })?;
    ///     assert_eq!(end, End::Exited(7));
    ///     assert!(asked.load(Ordering::Relaxed) >= 3);
    ///     Ok(())
    /// }
    /// ```
    ///
    /// The process is made by fork(2): of this process' threads only the calling one is there, and locks that others
    /// hold stay held. What the closure changes in memory stays its own. From then on this process cannot be traced by
    /// others.
    ///
    /// # Errors
    /// What kept the closure from running; then nothing of it has run.
    pub fn closure(self, work: impl FnOnce() -> i32) -> Result<End, Error> {
        if self.policy.view.is_some() {
            return Err(Error::View {
                operation: "a closure".to_owned(),
                source: std::io::ErrorKind::Unsupported.into(),
                hint: "; this process would get the view, too: guard a program, or leave out [view]",
            });
        }
        let work = |pipe: &mut Option<OwnedFd>| {
            drop(pipe.take());
            let status = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(101);
            // SAFETY: ends the process without what belongs to the one that it is a copy of.
            unsafe { libc::_exit(status) }
        };
        let (process, _state, _) = spawn(self, work)?;
        loop {
            match waitpid(Some(process), WaitOptions::empty()) {
                Ok(Some((_, status))) => {
                    if let Some(code) = status.exit_status() {
                        return Ok(End::Exited(code));
                    }
                    if let Some(signal) = status.terminating_signal() {
                        return Ok(End::Killed(signal));
                    }
                }
                Ok(None) | Err(rustix::io::Errno::INTR) => (),
                Err(errno) => return Err(Error::kernel("waiting for the closure's process")(errno)),
            }
        }
    }
}
