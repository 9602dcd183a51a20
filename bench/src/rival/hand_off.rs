//! Ways in which two threads or processes hand control to each other.

use std::ffi::c_void;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use anyhow::{Result, ensure};
use rustix::thread::futex;

use crate::contender::{Contender, Sample};
use crate::machine;

/// The kind of the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Between {
    /// A thread of the same process.
    Threads,
    /// A forked process.
    Processes,
}

/// The mechanism of the hand-over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// Two POSIX semaphores (sem_post(3)).
    Semaphore,
    /// A turn word and futex(2).
    Futex,
    /// Two pipes.
    Pipe,
    /// A pair of Unix sockets.
    Socket,
    /// A turn word and sched_yield(2): as little as a hand-over takes where both sides stay runnable on one CPU.
    Yield,
    /// A turn word and nothing: as little as it takes where each side has a CPU.
    Spin,
}

/// Two semaphores and a turn word, in memory that a forked process shares.
#[repr(C)]
struct Shared {
    there: libc::sem_t,
    back: libc::sem_t,
    turn: AtomicU32,
    /// A line of the cache for each side, which it alone writes.
    turns: [Line; 2],
}

#[repr(align(128))]
struct Line {
    /// How often the side has handed over.
    turns: AtomicU32,
    /// 1 while the first side measures nothing: the other one is to sleep here, and not to burn a CPU that somebody else's
    /// figure is taken on.
    rests: AtomicU32,
}

/// One side of a hand-over.
enum Side {
    Semaphore {
        post: *mut libc::sem_t,
        wait: *mut libc::sem_t,
    },
    Futex {
        word: *const AtomicU32,
        mine: u32,
    },
    Streams(Box<dyn Read>, Box<dyn Write>),
    /// Each side counts how often it has handed over. The first one waits for as many of the other's; the other for one more.
    Words {
        mine: *const Line,
        theirs: *const Line,
        ahead: u32,
        between: fn(),
    },
}

// SAFETY: the pointers go to shared memory that is never unmapped, and what they point to is made for many threads; the
// streams are used by the one side that has them.
unsafe impl Send for Side {}

impl Side {
    /// Hands over, and waits until the other side hands back.
    fn there_and_back(&mut self) -> Result<()> {
        self.hand()?;
        self.take()
    }

    fn hand(&mut self) -> Result<()> {
        match self {
            Self::Semaphore { post, .. } => {
                // SAFETY: `HandOff::new` initialised the semaphore in the shared mapping, which is never
                // unmapped (see `Send`).
                ensure!(unsafe { libc::sem_post(*post) } == 0, "sem_post failed");
            }
            Self::Futex { word, mine } => {
                // SAFETY: the word is in the shared mapping, which is never unmapped (see `Send`), and is an
                // atomic.
                let word = unsafe { &**word };
                word.store(1 - *mine, Ordering::SeqCst);
                futex::wake(word, futex::Flags::empty(), 1)?;
            }
            Self::Streams(_, to) => to.write_all(&[1])?,
            Self::Words { mine, .. } => {
                // SAFETY: the line is in the shared mapping, which is never unmapped (see `Send`), and
                // consists of atomics.
                unsafe { &**mine }.turns.fetch_add(1, Ordering::SeqCst);
            }
        }
        Ok(())
    }

    fn take(&mut self) -> Result<()> {
        match self {
            Self::Semaphore { wait, .. } => {
                // SAFETY: the semaphore is in the shared mapping, which outlives both sides (see `Send`).
                while unsafe { libc::sem_wait(*wait) } != 0 {}
            }
            Self::Futex { word, mine } => {
                // SAFETY: the word is in the shared mapping, which outlives both sides (see `Send`).
                let word = unsafe { &**word };
                while word.load(Ordering::SeqCst) != *mine {
                    let _ = futex::wait(word, futex::Flags::empty(), 1 - *mine, None);
                }
            }
            Self::Streams(from, _) => from.read_exact(&mut [0])?,
            Self::Words { mine, theirs, ahead, between } => {
                // SAFETY: both lines are in the shared mapping, which is never unmapped (see `Send`), and
                // consist of atomics.
                let (mine, theirs) = unsafe { (&**mine, &**theirs) };
                let awaited = mine.turns.load(Ordering::Relaxed).wrapping_add(*ahead);
                while theirs.turns.load(Ordering::SeqCst) != awaited {
                    if theirs.rests.load(Ordering::Relaxed) != 0 {
                        let _ = futex::wait(&theirs.rests, futex::Flags::empty(), 1, None);
                    }
                    between();
                }
            }
        }
        Ok(())
    }

    /// Begins or ends a measurement, on the first side. A side that is never asleep of itself sleeps between two.
    fn rest(&mut self, rests: bool) -> Result<()> {
        if let Self::Words { mine, .. } = self {
            // SAFETY: the line is in the shared mapping, which is never unmapped (see `Send`), and consists
            // of atomics.
            let word = unsafe { &(**mine).rests };
            word.store(u32::from(rests), Ordering::SeqCst);
            if !rests {
                futex::wake(word, futex::Flags::empty(), 1)?;
                // What waking it costs is not the hand-over's.
                self.there_and_back()?;
            }
        }
        Ok(())
    }

    /// Runs the other side.
    fn answer(mut self) {
        while self.take().is_ok() && self.hand().is_ok() {}
    }
}

/// Hands control there and back.
pub struct HandOff {
    side: Side,
    process: Option<rustix::process::Pid>,
}

impl HandOff {
    /// Starts the other side.
    pub fn new(between: Between, by: By) -> Result<Self> {
        Self::start(between, by, None)
    }

    /// Starts it on a CPU of its own: the second last that the process may use, where this side is bound to the last.
    ///
    /// # Errors
    /// [`Skipped`](crate::contender::Skipped) where there is but one; those of [`HandOff::new`].
    pub fn across(between: Between, by: By) -> Result<Self> {
        let (here, there) = machine::two_cpus()?;
        machine::pin(here)?;
        Self::start(between, by, Some(there))
    }

    /// Hands control there and back once: for who does something else in between. Not for sides that never sleep of themselves.
    ///
    /// # Errors
    /// Fails where the other side has ended.
    pub fn trip(&mut self) -> Result<()> {
        self.side.there_and_back()
    }

    fn start(between: Between, by: By, there: Option<usize>) -> Result<Self> {
        let (side, other) = sides(by)?;
        let answer = move || {
            if there.is_none_or(|cpu| machine::pin(cpu).is_ok()) {
                other.answer();
            }
        };
        let process = match between {
            Between::Threads => {
                std::thread::Builder::new().spawn(answer)?;
                None
            }
            Between::Processes => {
                // SAFETY: the process has one thread: contenders have one of their own.
                match unsafe { libc::fork() } {
                    0 => {
                        // A pipe whose writing end the reader holds, too, never ends.
                        drop(side);
                        // SAFETY: ends with the contender, whose thread this is.
                        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                        answer();
                        // SAFETY: the call takes a number and ends the process, so that nothing of the
                        // parent's runs in it.
                        unsafe { libc::_exit(0) }
                    }
                    pid => {
                        ensure!(pid > 0, "fork: {}", std::io::Error::last_os_error());
                        rustix::process::Pid::from_raw(pid)
                    }
                }
            }
        };
        Ok(Self { side, process })
    }
}

fn sides(by: By) -> Result<(Side, Side)> {
    match by {
        By::Semaphore | By::Futex => {
            let shared = shared()?;
            // SAFETY: fresh memory of that size; it is never unmapped.
            let (there, back, turn) = unsafe {
                let (there, back) = (&raw mut (*shared).there, &raw mut (*shared).back);
                ensure!(libc::sem_init(there, 1, 0) == 0 && libc::sem_init(back, 1, 0) == 0, "sem_init");
                (there, back, &raw const (*shared).turn)
            };
            Ok(match by {
                By::Semaphore => {
                    (Side::Semaphore { post: there, wait: back }, Side::Semaphore { post: back, wait: there })
                }
                _ => (Side::Futex { word: turn, mine: 0 }, Side::Futex { word: turn, mine: 1 }),
            })
        }
        By::Yield | By::Spin => {
            let shared = shared()?;
            // SAFETY: fresh memory of that size, of which zeroes are a value; nobody else has it yet.
            unsafe { &(*shared).turns[0] }.rests.store(1, Ordering::SeqCst);
            // SAFETY: fresh memory of that size; it is never unmapped.
            let words = unsafe { [&raw const (*shared).turns[0], &raw const (*shared).turns[1]] };
            let between = if by == By::Spin { std::hint::spin_loop } else { rustix::thread::sched_yield };
            Ok((
                Side::Words { mine: words[0], theirs: words[1], ahead: 0, between },
                Side::Words { mine: words[1], theirs: words[0], ahead: 1, between },
            ))
        }
        By::Pipe => {
            let (there, here) = (std::io::pipe()?, std::io::pipe()?);
            Ok((
                Side::Streams(Box::new(here.0), Box::new(there.1)),
                Side::Streams(Box::new(there.0), Box::new(here.1)),
            ))
        }
        By::Socket => {
            let (a, b) = UnixStream::pair()?;
            let side = |stream: UnixStream| -> Result<Side> {
                Ok(Side::Streams(Box::new(stream.try_clone()?), Box::new(stream)))
            };
            Ok((side(a)?, side(b)?))
        }
    }
}

fn shared() -> Result<*mut Shared> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let length = size_of::<Shared>().next_multiple_of(crate::footprint::PAGE);
    // SAFETY: a new mapping takes nothing from anybody.
    let start: *mut c_void =
        unsafe { mmap_anonymous(std::ptr::null_mut(), length, protection, MapFlags::SHARED) }?;
    Ok(start.cast())
}

impl Contender for HandOff {
    fn measure(&mut self, _work: &str, iterations: u32) -> Result<Sample> {
        self.side.rest(false)?;
        let sample = round_trips(iterations, |_| self.side.there_and_back())?;
        self.side.rest(true)?;
        Ok(sample)
    }
}

impl Drop for HandOff {
    fn drop(&mut self) {
        if let Some(pid) = self.process {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
        }
    }
}

/// Times trips there and back, of which each is two switches.
pub fn round_trips(iterations: u32, mut trip: impl FnMut(u32) -> Result<()>) -> Result<Sample> {
    let start = Instant::now();
    for round in 0..iterations {
        trip(round)?;
    }
    Ok(Sample { iterations: iterations.saturating_mul(2), elapsed: start.elapsed(), latencies: Vec::new() })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// What floors do between two measurements was in everybody's figures: a process that yields all the time took turns with
    /// the two that were measured, and one that spins left no CPU to spare.
    #[test]
    fn who_is_not_measured_sleeps() {
        let mut ways = vec![HandOff::new(Between::Processes, By::Yield).unwrap()];
        ways.extend(HandOff::across(Between::Processes, By::Spin));
        for way in &mut ways {
            for _ in 0..2 {
                way.measure("switch", 20).unwrap();
                let status = format!("/proc/{}/stat", way.process.unwrap().as_raw_pid());
                let sleeps = || std::fs::read_to_string(&status).unwrap().contains(") S ");
                let mut looks = 0..5_000;
                let slept =
                    looks.any(|_| sleeps() || (std::thread::sleep(Duration::from_millis(1)), false).1);
                assert!(slept, "it still runs");
            }
        }
    }

    #[test]
    fn every_way_leads_there_and_back() {
        for between in [Between::Threads, Between::Processes] {
            for by in [By::Semaphore, By::Futex, By::Pipe, By::Socket, By::Yield] {
                let mut way = HandOff::new(between, by).unwrap();
                let sample = way.measure("switch", 20).unwrap();
                assert_eq!(sample.iterations, 40, "{between:?} {by:?}");
                match HandOff::across(between, by) {
                    Ok(mut way) => assert_eq!(way.measure("switch", 20).unwrap().iterations, 40),
                    Err(error) => println!("SKIPPED: {error:#}"),
                }
            }
        }
        // On one CPU each hand-over would take a time slice.
        match HandOff::across(Between::Processes, By::Spin) {
            Ok(mut way) => assert_eq!(way.measure("switch", 20).unwrap().iterations, 40),
            Err(error) => println!("SKIPPED: {error:#}"),
        }
    }
}
