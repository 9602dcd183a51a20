//! Threads that wait in a system call each, while the kernel dies: all must wait on, and get what they waited for.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::event::{PollFd, PollFlags, epoll, poll};

const PATIENCE: Duration = Duration::from_secs(10);
const PATH: &str = "/run/waiters.socket";

static READ: AtomicU32 = AtomicU32::new(0);
static ACCEPTED: AtomicU32 = AtomicU32::new(0);
static WOKEN: AtomicU32 = AtomicU32::new(0);
static POLLED: AtomicU32 = AtomicU32::new(0);
static REPORTED: AtomicU32 = AtomicU32::new(0);
static SLEPT: AtomicU32 = AtomicU32::new(0);
/// What a futex waits for.
static WORD: AtomicU32 = AtomicU32::new(0);
/// The error that `pause` came back with.
static PAUSED: AtomicI32 = AtomicI32::new(0);

pub(super) struct Waiters {
    pipe: File,
    polled: UnixStream,
    reported: UnixStream,
    /// Whether the environment says that `pause` is to be cancelled.
    cancels: bool,
}

/// Waits in a futex until its word is no longer `value`.
fn wait_in_futex(value: u32) -> i64 {
    let forever = std::ptr::null::<libc::timespec>();
    // SAFETY: the word is a static, and the null pointer stands for no time limit.
    unsafe { libc::syscall(libc::SYS_futex, WORD.as_ptr(), libc::FUTEX_WAIT, value, forever) }
}

impl Waiters {
    pub(super) fn start() -> Result<Self> {
        let (mut reader, pipe) = pipe()?;
        std::thread::spawn(move || {
            let mut byte = [0];
            while reader.read_exact(&mut byte).is_ok() && byte == *b"x" {
                READ.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _ = std::fs::remove_file(PATH);
        let listener = UnixListener::bind(PATH)?;
        std::thread::spawn(move || {
            while listener.accept().is_ok() {
                ACCEPTED.fetch_add(1, Ordering::Relaxed);
            }
        });
        std::thread::spawn(|| {
            loop {
                let value = WORD.load(Ordering::Acquire);
                if wait_in_futex(value) < 0 || WORD.load(Ordering::Acquire) == value {
                    // Woken for nothing: an interrupted wait would show here.
                    continue;
                }
                WOKEN.fetch_add(1, Ordering::Relaxed);
            }
        });
        let (polled, mut other) = UnixStream::pair()?;
        std::thread::spawn(move || {
            loop {
                let mut files = [PollFd::new(&other, PollFlags::IN)];
                if poll(&mut files, None) != Ok(1) || other.read_exact(&mut [0]).is_err() {
                    return;
                }
                POLLED.fetch_add(1, Ordering::Relaxed);
            }
        });
        let (reported, mut other) = UnixStream::pair()?;
        let queue = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&queue, other.as_fd(), epoll::EventData::new_u64(7), epoll::EventFlags::IN)?;
        std::thread::spawn(move || {
            let mut events: [epoll::Event; 1] =
                [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
            while epoll::wait(&queue, &mut events[..], None) == Ok(1) {
                if events[0].data.u64() != 7 || other.read_exact(&mut [0]).is_err() {
                    return;
                }
                REPORTED.fetch_add(1, Ordering::Relaxed);
            }
        });
        std::thread::spawn(|| {
            loop {
                // Mostly asleep when its kernel dies; it sleeps on, and wakes.
                std::thread::sleep(Duration::from_secs(1));
                SLEPT.fetch_add(1, Ordering::Relaxed);
            }
        });
        std::thread::spawn(|| {
            loop {
                // SAFETY: it waits for a signal that does not come.
                unsafe { libc::syscall(libc::SYS_pause) };
                let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(-1);
                PAUSED.store(error, Ordering::Relaxed);
            }
        });
        let cancels = std::env::var("ORTHROS_CALLS").is_ok_and(|calls| calls.contains("pause=ECANCELED"));
        Ok(Self { pipe, polled, reported, cancels })
    }

    /// Gives each thread what it waits for.
    pub(super) fn look(&mut self) -> Result<()> {
        let slept = SLEPT.load(Ordering::Relaxed);
        for round in 1..=2_u32 {
            let before =
                [&READ, &ACCEPTED, &WOKEN, &POLLED, &REPORTED].map(|count| count.load(Ordering::Relaxed));
            self.pipe.write_all(b"x")?;
            drop(UnixStream::connect(PATH).context("who accepts connections")?);
            WORD.fetch_add(1, Ordering::Release);
            // SAFETY: the word is a static, and waking takes no further pointer.
            unsafe { libc::syscall(libc::SYS_futex, WORD.as_ptr(), libc::FUTEX_WAKE, 1) };
            self.polled.write_all(b"x")?;
            self.reported.write_all(b"x")?;
            for ((name, count), before) in [
                ("read", &READ),
                ("accept", &ACCEPTED),
                ("futex", &WOKEN),
                ("poll", &POLLED),
                ("epoll_wait", &REPORTED),
            ]
            .into_iter()
            .zip(before)
            {
                let came = wait_until(|| count.load(Ordering::Relaxed) == before + 1);
                let now = count.load(Ordering::Relaxed);
                ensure!(came, "round {round}: {name} came back {} times", now.wrapping_sub(before));
            }
        }
        ensure!(wait_until(|| SLEPT.load(Ordering::Relaxed) > slept), "who slept does not wake");
        let expected = if self.cancels { libc::ECANCELED } else { 0 };
        ensure!(
            wait_until(|| PAUSED.load(Ordering::Relaxed) == expected),
            "pause came back with {}",
            PAUSED.load(Ordering::Relaxed)
        );
        Ok(())
    }
}

fn wait_until(is_so: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

fn pipe() -> Result<(File, File)> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    Ok((File::from(reader), File::from(writer)))
}
