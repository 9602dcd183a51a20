//! A program that holds one of everything a process can hold, and looks at all of it when it finds itself under another
//! kernel: what tests let a kernel die under.

mod ipc;
mod sockets_and_watches;
mod waiters;

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::io::read;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::mount::MountFlags;
use rustix::pty::OpenptFlags;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

const BOOT: &str = "/proc/sys/kernel/random/boot_id";
const PATIENCE: Duration = Duration::from_secs(5);
const TYPED: &[u8] = b"typed and not read";
const FORGOTTEN: &[u8] = b"this file has no name";

/// How far the spinning thread has come, and whether its two counts ever disagreed.
static SPUN: AtomicU64 = AtomicU64::new(0);
static DISAGREED: AtomicU64 = AtomicU64::new(0);

struct Held {
    more: sockets_and_watches::Objects,
    system_v: ipc::SystemV,
    ticking: OwnedFd,
    one_shot: OwnedFd,
    signals: OwnedFd,
    shared: &'static AtomicU64,
    nameless: File,
    master: OwnedFd,
    slave: OwnedFd,
}

/// Holds everything for ever, and leaves a verdict after each change of kernels.
pub(crate) fn run() -> Result<()> {
    let mut held = Held::take()?;
    let mut waiters = waiters::Waiters::start()?;
    std::thread::spawn(spin);
    let mut boot = fs::read_to_string(BOOT)?;
    fs::write("/run/holding", "")?;
    loop {
        std::thread::sleep(Duration::from_millis(20));
        let now = fs::read_to_string(BOOT)?;
        if now != boot {
            boot = now;
            let verdict = match held.look().and_then(|()| waiters.look()) {
                Ok(()) => "right\n".to_owned(),
                Err(error) => format!("wrong: {error:#}\n"),
            };
            crate::verdict::leave(&verdict)?;
            held.prepare()?;
        }
    }
}

/// Counts in general and in vector registers at once, mostly on the processor when that is stopped.
fn spin() {
    let (mut whole, mut real) = (0_u64, 0.0_f64);
    loop {
        for _ in 0..200_000 {
            whole = std::hint::black_box(whole + 1);
            real = std::hint::black_box(real + 1.0);
        }
        #[expect(clippy::cast_precision_loss, reason = "it does not count that far")]
        if whole as f64 != real {
            DISAGREED.fetch_add(1, Ordering::Relaxed);
        }
        SPUN.store(whole, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn queue_signal(signal: i32, value: usize) -> Result<()> {
    let value = libc::sigval { sival_ptr: std::ptr::without_provenance_mut(value) };
    // SAFETY: the signal goes to this process, where it is blocked.
    let sent = unsafe { libc::sigqueue(libc::getpid(), signal, value) };
    ensure!(sent == 0, "cannot queue signal {signal}: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Takes a signal that is blocked, and gives what came along with it.
fn take_signal(signal: i32) -> Result<usize> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the set is written before it is read.
    let set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        set.assume_init()
    };
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let patience = libc::timespec { tv_sec: 5, tv_nsec: 0 };
    // SAFETY: all three are what the call wants; zeros are a siginfo.
    let (taken, info) = unsafe {
        (libc::sigtimedwait(&raw const set, info.as_mut_ptr(), &raw const patience), info.assume_init())
    };
    ensure!(taken == signal, "signal {signal} did not come: {}", std::io::Error::last_os_error());
    // SAFETY: signals that are queued or sent by timers have a value.
    Ok(unsafe { info.si_value() }.sival_ptr.addr())
}

impl Held {
    fn take() -> Result<Self> {
        let mut set = MaybeUninit::uninit();
        let timer_signal = libc::SIGRTMIN();
        let more = sockets_and_watches::Objects::take()?;
        // SAFETY: the set is written before it is used; this thread is the only one yet.
        let set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in [libc::SIGUSR1, libc::SIGUSR2, timer_signal] {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            set.assume_init()
        };
        let mut only = set;
        // SAFETY: the set has been filled by the call before; this thread is the only one yet.
        let signals = unsafe {
            libc::sigdelset(&raw mut only, libc::SIGUSR2);
            libc::sigdelset(&raw mut only, timer_signal);
            libc::signalfd(-1, &raw const only, libc::SFD_CLOEXEC)
        };
        ensure!(signals >= 0, "no signalfd: {}", std::io::Error::last_os_error());
        // SAFETY: the kernel just made the descriptor, and nobody else owns it.
        let signals = unsafe { OwnedFd::from_raw_fd(signals) };
        timer(timer_signal)?;

        let clock = |first: i64, interval: i64| -> Result<OwnedFd> {
            let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
            let at = |milliseconds: i64| Timespec {
                tv_sec: milliseconds / 1000,
                tv_nsec: milliseconds % 1000 * 1_000_000,
            };
            let times = Itimerspec { it_interval: at(interval), it_value: at(first) };
            rustix::time::timerfd_settime(&timer, TimerfdTimerFlags::empty(), &times)?;
            Ok(timer)
        };
        let (ticking, one_shot) = (clock(30, 30)?, clock(3_600_000, 0)?);

        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at a place of the kernel's choice.
        let memory = unsafe { mmap_anonymous(std::ptr::null_mut(), 16 * 4096, access, flags) }?;
        // SAFETY: the mapping is zeros, which are a number, is aligned, and stays for ever.
        let shared: &'static AtomicU64 = unsafe { &*memory.cast::<AtomicU64>() };
        // SAFETY: this process has one thread yet; the child only counts.
        match unsafe { libc::fork() } {
            0 => loop {
                shared.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            },
            -1 => bail!("cannot fork: {}", std::io::Error::last_os_error()),
            child => confine(child).context("cannot put a child into a control group")?,
        }

        let path = "/tmp/nameless";
        let mut nameless = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        fs::remove_file(path)?;
        nameless.write_all(FORGOTTEN)?;

        let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
        rustix::pty::grantpt(&master)?;
        rustix::pty::unlockpt(&master)?;
        let name = rustix::pty::ptsname(&master, Vec::new())?;
        let slave = rustix::fs::open(&*name, OFlags::RDWR | OFlags::NOCTTY, rustix::fs::Mode::empty())?;
        let mut modes = rustix::termios::tcgetattr(&slave)?;
        modes.make_raw();
        rustix::termios::tcsetattr(&slave, rustix::termios::OptionalActions::Now, &modes)?;
        rustix::termios::tcsetwinsize(
            &master,
            rustix::termios::Winsize { ws_row: 33, ws_col: 77, ws_xpixel: 0, ws_ypixel: 0 },
        )?;
        let system_v = ipc::SystemV::take()?;
        let held = Self { more, system_v, ticking, one_shot, signals, shared, nameless, master, slave };
        held.prepare()?;
        Ok(held)
    }

    /// Leaves things on their way.
    fn prepare(&self) -> Result<()> {
        self.system_v.prepare()?;
        queue_signal(libc::SIGUSR1, 4711)?;
        queue_signal(libc::SIGUSR2, 42)?;
        rustix::io::write(&self.master, TYPED)?;
        Ok(())
    }

    /// Whether everything is as it was left.
    fn look(&mut self) -> Result<()> {
        self.more.look()?;
        self.system_v.look()?;
        let mut number = [0; 8];
        // The first time it may have gone off before.
        for _ in 0..2 {
            let mut files = [PollFd::new(&self.ticking, PollFlags::IN)];
            let patience = Timespec { tv_sec: 5, tv_nsec: 0 };
            ensure!(poll(&mut files, Some(&patience))? == 1, "the timer that ticks has stopped");
            read(&self.ticking, &mut number).context("the timer that ticks")?;
        }
        let left = rustix::time::timerfd_gettime(&self.one_shot)?.it_value.tv_sec;
        ensure!((3000..3600).contains(&left), "the timer of an hour has {left} s left");
        let mut info = [0; 128];
        ensure!(read(&self.signals, &mut info).context("the signalfd")? == 128, "half a signal");
        let value = info[48..56].try_into().map(usize::from_le_bytes)?;
        ensure!(info[0] == 10 && value == 4711, "the signalfd gave signal {} with {value}", info[0]);
        let value = take_signal(libc::SIGUSR2)?;
        ensure!(value == 42, "the pending signal came with {value}");
        for _ in 0..3 {
            let value = take_signal(libc::SIGRTMIN())?;
            ensure!(value == 99, "the timer's signal came with {value}");
        }
        let before = self.shared.load(Ordering::Relaxed);
        ensure!(before > 0, "the shared memory is empty");
        let deadline = Instant::now() + PATIENCE;
        while self.shared.load(Ordering::Relaxed) == before {
            ensure!(Instant::now() < deadline, "the child does not count on");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut content = Vec::new();
        self.nameless.seek(SeekFrom::Start(0))?;
        self.nameless.read_to_end(&mut content)?;
        ensure!(content == FORGOTTEN, "the nameless file holds {:?}", String::from_utf8_lossy(&content));
        let mut typed = [0; 64];
        let count = read(&self.slave, &mut typed).context("the terminal")?;
        ensure!(
            &typed[..count] == TYPED,
            "the terminal holds {:?}",
            String::from_utf8_lossy(&typed[..count])
        );
        let size = rustix::termios::tcgetwinsize(self.slave.as_fd())?;
        ensure!((size.ws_row, size.ws_col) == (33, 77), "the terminal is {} x {}", size.ws_row, size.ws_col);
        let modes = rustix::termios::tcgetattr(&self.slave)?;
        ensure!(!modes.local_modes.contains(rustix::termios::LocalModes::ECHO), "the terminal echoes");
        ensure!(
            rustix::termios::isatty(&self.master),
            "descriptor {} is no terminal",
            self.master.as_raw_fd()
        );
        let spun = SPUN.load(Ordering::Relaxed);
        while SPUN.load(Ordering::Relaxed) == spun {
            ensure!(Instant::now() < deadline, "the thread does not spin on");
            std::thread::sleep(Duration::from_millis(5));
        }
        ensure!(DISAGREED.load(Ordering::Relaxed) == 0, "vector registers have changed");
        Ok(())
    }
}

/// Puts a process into a control group of its own, which cannot be carried over.
fn confine(child: i32) -> Result<()> {
    let hierarchy = Path::new("/tmp/groups");
    fs::create_dir(hierarchy)?;
    rustix::mount::mount("groups", hierarchy, "cgroup2", MountFlags::empty(), None)?;
    fs::create_dir(hierarchy.join("confined"))?;
    Ok(fs::write(hierarchy.join("confined/cgroup.procs"), child.to_string())?)
}

/// A timer that sends a signal thirty times a second.
fn timer(signal: i32) -> Result<()> {
    // SAFETY: zeros are an event, to be filled in.
    let mut event: libc::sigevent = unsafe { MaybeUninit::zeroed().assume_init() };
    event.sigev_notify = libc::SIGEV_SIGNAL;
    event.sigev_signo = signal;
    event.sigev_value = libc::sigval { sival_ptr: std::ptr::without_provenance_mut(99) };
    let mut timer = MaybeUninit::uninit();
    let at = libc::timespec { tv_sec: 0, tv_nsec: 30_000_000 };
    let times = libc::itimerspec { it_interval: at, it_value: at };
    // SAFETY: all structures live during the calls; the timer is written by the first.
    let set = unsafe {
        libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, timer.as_mut_ptr()) == 0
            && libc::timer_settime(timer.assume_init(), 0, &raw const times, std::ptr::null_mut()) == 0
    };
    ensure!(set, "no timer: {}", std::io::Error::last_os_error());
    Ok(())
}
