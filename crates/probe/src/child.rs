//! Running a probe in a forked child, with a time limit.
//!
//! **Between `fork` and `_exit` only async-signal-safe code may run**, in this file's [`live`] and in every function
//! that is handed to [`run`] or [`fork`]: the caller may have other threads, and what they held at the time of the fork
//! (allocator and library locks) stays held for ever in the child. So no allocation, no lock, no output, no panic, no
//! libc function outside signal-safety(7); system calls go to the kernel directly.
//!
//! The child answers with one message, written at once and smaller than `PIPE_BUF`, so the parent gets all of it or
//! nothing. No message means that the child died; how, its wait status tells. The child leads a process group of its
//! own, so that what a probe forked in turn is killed along with it, whatever happens.

use std::fmt::{self, Write as _};
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{self, Pid, Resource, Rlimit, Signal, WaitOptions, WaitStatus};
use syscalls::{Sysno, syscall};

use crate::facility::State;
use crate::text::Text;

/// How long a killed child may take to be gone before it is left to the process that reaps it.
const DEATH: Duration = Duration::from_millis(100);

/// What a probe found: it works, or the step at which it did not.
pub(crate) type Verdict = Result<(), Trouble>;

/// The step at which a probe gave up, and the error that tells missing from denied; without one it is missing.
#[derive(Clone, Copy)]
pub(crate) struct Trouble {
    step: &'static str,
    errno: Option<Errno>,
}

impl Trouble {
    /// Reports that the facility is not there, or does not do what it should.
    pub(crate) fn missing(step: &'static str) -> Self {
        Self { step, errno: None }
    }
}

/// Names the step in which an error came up.
pub(crate) trait During<T> {
    /// `step` in the words of the manual page.
    fn during(self, step: &'static str) -> Result<T, Trouble>;
}

impl<T> During<T> for Result<T, Errno> {
    fn during(self, step: &'static str) -> Result<T, Trouble> {
        self.map_err(|errno| Trouble { step, errno: Some(errno) })
    }
}

impl<T> During<T> for Result<T, syscalls::Errno> {
    fn during(self, step: &'static str) -> Result<T, Trouble> {
        self.map_err(|e| Errno::from_raw_os_error(e.into_raw())).during(step)
    }
}

/// Fails with [`Trouble::missing`] unless what was expected came true.
pub(crate) fn expect(came_true: bool, otherwise: &'static str) -> Verdict {
    if came_true { Ok(()) } else { Err(Trouble::missing(otherwise)) }
}

/// What a probe wants to tell beside "it works"; text that does not fit is cut off.
pub(crate) struct Note(Text<{ Note::ROOM }>);

impl Note {
    const ROOM: usize = 240;

    fn new() -> Self {
        Self(Text::new())
    }

    /// Appends text, after a semicolon if there is some already.
    pub(crate) fn say(&mut self, text: fmt::Arguments<'_>) {
        // A full buffer is the only error, and it is documented.
        let _ = if self.0.is_empty() { Ok(()) } else { self.0.write_str("; ") };
        let _ = self.0.write_fmt(text);
    }
}

/// The answer as it goes through the pipe: a tag and an errno, then text.
const HEADER: usize = 5;
const WORKS: u8 = 0;
const REFUSED: u8 = 1;
const MISSING: u8 = 2;

/// Runs `probe` in a forked child and returns what it found, or how the child died, or that `limit` passed.
pub(crate) fn run(limit: Duration, probe: impl FnOnce(&mut Note) -> Verdict) -> State {
    let deadline = Instant::now() + limit;
    let (reader, writer) = match pipe_with(PipeFlags::CLOEXEC) {
        Ok(ends) => ends,
        Err(errno) => return State::refused("pipe2, before trying", errno),
    };
    // SAFETY: the child runs `live` only, which keeps to async-signal-safe code and never returns.
    match unsafe { fork() } {
        Err(errno) => State::refused("fork, before trying", errno),
        Ok(None) => live(&writer, probe),
        Ok(Some(pid)) => {
            drop(writer);
            // The first of the two, parent or child, makes the group; the other's attempt changes nothing.
            let _ = process::setpgid(Some(pid), Some(pid));
            let answer = listen(&reader, deadline);
            let _ = process::kill_process_group(pid, Signal::KILL);
            let status = reap(pid);
            let killed_by_us = status.is_none_or(|s| s.terminating_signal() == Some(libc::SIGKILL));
            match answer {
                Ok(Some(state)) => state,
                Err(_) if killed_by_us => {
                    State::missing(format!("no answer within {} ms", limit.as_millis()))
                }
                // A child that another thread forked meanwhile may hold our pipe open beyond the death of ours.
                Ok(None) | Err(_) => epitaph(status),
            }
        }
    }
}

/// Forks without libc's handlers: `None` in the child, the child's id in the parent.
///
/// # Safety
/// In the child, only async-signal-safe code may run, and it must end through [`exit`].
pub(crate) unsafe fn fork() -> Result<Option<Pid>, Errno> {
    // SAFETY: clone with no flag but the exit signal is fork(2); the child gets a copy of everything, this stack too.
    let pid = unsafe { syscall!(Sysno::clone, libc::SIGCHLD, 0, 0, 0, 0) };
    let pid = pid.map_err(|e| Errno::from_raw_os_error(e.into_raw()))?;
    Ok(i32::try_from(pid).ok().and_then(Pid::from_raw))
}

/// Ends the calling process at once.
pub(crate) fn exit(status: i32) -> ! {
    // SAFETY: _exit(2) is always sound; it runs nothing.
    unsafe { libc::_exit(status) }
}

/// Returns the child: settles down, tries, tells.
fn live(writer: &OwnedFd, probe: impl FnOnce(&mut Note) -> Verdict) -> ! {
    /// A panic in a probe is a mistake of ours; it must not unwind into the caller's copied frames.
    struct NoWayBack;
    impl Drop for NoWayBack {
        fn drop(&mut self) {
            exit(101);
        }
    }
    let _no_way_back = NoWayBack;
    settle();
    let mut note = Note::new();
    let (tag, errno) = match probe(&mut note) {
        Ok(()) => (WORKS, 0),
        Err(trouble) => {
            note = Note::new();
            note.say(format_args!("{}", trouble.step));
            match trouble.errno {
                Some(errno) => (REFUSED, errno.raw_os_error()),
                None => (MISSING, 0),
            }
        }
    };
    let header = &mut [tag, 0, 0, 0, 0];
    header[1..].copy_from_slice(&errno.to_ne_bytes());
    let _ = rustix::io::writev(writer, &[IoSlice::new(header), IoSlice::new(note.0.bytes())]);
    exit(0)
}

/// Makes the child a quiet one: no handlers of the caller's, no core file, death along with the caller.
fn settle() {
    let _ = process::setpgid(None, None);
    let _ = process::set_parent_process_death_signal(Some(Signal::KILL));
    // What is ignored stays ignored over a fork, and who ignores SIGCHLD cannot wait for a partner.
    for signal in [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGILL,
        libc::SIGFPE,
        libc::SIGSYS,
        libc::SIGTRAP,
        libc::SIGPIPE,
        libc::SIGCHLD,
    ] {
        // SAFETY: the default action needs no handler to be valid; signal(2) is async-signal-safe.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: an all-zero set is valid; sigemptyset and sigprocmask are async-signal-safe and write only to it.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
    // A limit of one byte, unlike one of zero, also keeps the kernel from piping the core to a program: core(5).
    let _ = process::setrlimit(Resource::Core, Rlimit { current: Some(1), maximum: Some(1) });
}

/// Returns the child's answer; nothing if it died without one; an error when the deadline passed.
fn listen(reader: &OwnedFd, deadline: Instant) -> Result<Option<State>, Errno> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(|_| Errno::OVERFLOW)?;
        match poll(&mut [PollFd::new(reader, PollFlags::IN)], Some(&timeout)) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
            Ok(0) => return Err(Errno::TIMEDOUT),
            Ok(_) => {
                let mut message = [0; HEADER + Note::ROOM];
                let len = rustix::io::retry_on_intr(|| rustix::io::read(reader, &mut message))?;
                return Ok(message.get(..len).and_then(decode));
            }
        }
    }
}

fn decode(message: &[u8]) -> Option<State> {
    let (header, text) = message.split_first_chunk::<HEADER>()?;
    let [tag, errno @ ..] = *header;
    let text = String::from_utf8_lossy(text);
    Some(match tag {
        WORKS => State::available(text),
        REFUSED => State::refused(text, Errno::from_raw_os_error(i32::from_ne_bytes(errno))),
        MISSING => State::missing(text),
        _ => return None,
    })
}

/// Waits for a child that was just killed. Gives up on one that does not die (stuck in the kernel), and on one that
/// another reaped (a caller that ignores `SIGCHLD`).
fn reap(pid: Pid) -> Option<WaitStatus> {
    let deadline = Instant::now() + DEATH;
    loop {
        match process::waitpid(Some(pid), WaitOptions::NOHANG) {
            Ok(Some((_, status))) => return Some(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_micros(50)),
            Err(Errno::INTR) => {}
            Ok(None) | Err(_) => return None,
        }
    }
}

/// Returns what the death of a child that did not answer says of the facility.
fn epitaph(status: Option<WaitStatus>) -> State {
    match status.and_then(WaitStatus::terminating_signal) {
        Some(libc::SIGSYS) => State::denied("killed by a seccomp filter (SIGSYS)"),
        Some(signal) => State::missing(format!("trying it ended with signal {signal}")),
        None => State::missing("trying it ended without an answer"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    #[test]
    fn an_answer_comes_back_with_its_note() {
        let state = run(LIMIT, |note| {
            note.say(format_args!("version {}", 7));
            note.say(format_args!("more"));
            Ok(())
        });
        assert_eq!(state, State::available("version 7; more"));
    }

    #[test]
    fn errors_tell_missing_from_denied() {
        let missing = run(LIMIT, |_| Err::<(), _>(Errno::NOSYS).during("step"));
        assert_eq!((missing.word(), missing.errno(), missing.detail()), ("missing", Some("ENOSYS"), "step"));
        let denied = run(LIMIT, |_| Err::<(), _>(Errno::PERM).during("step"));
        assert_eq!((denied.word(), denied.errno(), denied.detail()), ("denied", Some("EPERM"), "step"));
        assert_eq!(run(LIMIT, |_| expect(false, "why")), State::missing("why"));
    }

    #[test]
    fn a_long_note_is_cut_not_lost() {
        let state = run(LIMIT, |note| {
            for _ in 0..100 {
                note.say(format_args!("0123456789"));
            }
            Ok(())
        });
        assert_eq!(state.detail().len(), Note::ROOM);
    }

    #[test]
    fn a_crash_is_an_answer() {
        let state = run(LIMIT, |_| {
            // SAFETY: raising a signal whose action is the default one ends this child.
            unsafe { libc::raise(libc::SIGSEGV) };
            Ok(())
        });
        assert_eq!(state, State::missing(format!("trying it ended with signal {}", libc::SIGSEGV)));
    }

    #[test]
    fn death_by_filter_is_a_denial() {
        let state = run(LIMIT, |_| {
            // SAFETY: raising a signal whose action is the default one ends this child, which has nothing to
            // clean up.
            unsafe { libc::raise(libc::SIGSYS) };
            Ok(())
        });
        assert_eq!(state.word(), "denied");
    }

    #[test]
    fn a_hang_ends_with_its_whole_group() {
        // The grandchild keeps this pipe open for as long as it lives.
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let state = run(Duration::from_millis(60), |_| {
            // SAFETY: both sides only call pause(2), which is async-signal-safe.
            let _ = unsafe { fork() };
            loop {
                // SAFETY: the call takes no pointer, and pause(2) is async-signal-safe.
                unsafe { libc::pause() };
            }
        });
        assert_eq!(state, State::missing("no answer within 60 ms"));
        drop(writer);
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0), "nobody holds the pipe any more");
    }
}
