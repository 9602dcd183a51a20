//! What the program of all objects holds besides: sockets of its own machine, memory files, watches, locks, children that
//! are confined, have ended, or cannot be rebuilt.

use std::ffi::c_long;
use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Read as _, Seek as _, SeekFrom, Write as _};
use std::mem::MaybeUninit;
use std::net::UdpSocket;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::event::EventfdFlags;
use rustix::fs::{FileType, FlockOperation, MemfdFlags, Mode, SealFlags, inotify};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

const PATIENCE: Duration = Duration::from_secs(10);
const PATH: &str = "/run/objects.socket";
const NOTE: &str = "/tmp/a file in memory";
const LINK: &str = "/tmp/a link to it";
const SHARED: &str = "/dev/shm/objects";
const FIFO: &str = "/tmp/fifo";
const CONTENT: &[u8] = b"what /tmp holds is in memory only";
const BUFFER: usize = 50_000;
/// A capability that a program may keep beyond `execve` without being root: `CAP_NET_BIND_SERVICE`.
const CAPABILITY: u32 = 10;

/// What children count up while all is well with them.
struct Shared {
    confined: AtomicU64,
    wrong: AtomicU64,
}

pub(super) struct Objects {
    pair: (UnixStream, UnixStream),
    datagrams: (UnixDatagram, UnixDatagram),
    internet: (UdpSocket, UdpSocket),
    listener: UnixListener,
    accepted: (UnixStream, UnixStream),
    /// Asked for, and not accepted.
    asked: UnixStream,
    carrier: (UnixStream, UnixStream),
    /// Connected to the kernel, not to a part of the service.
    netlink: OwnedFd,
    memfd: File,
    mapped: &'static AtomicU64,
    watcher: OwnedFd,
    watch: i32,
    note: File,
    shared_file: &'static AtomicU64,
    fifo: File,
    shared: &'static Shared,
    system_v: &'static AtomicU64,
    ended: i32,
    lost: i32,
}

fn check(result: i32, what: &str) -> Result<i32> {
    ensure!(result >= 0, "{what}: {}", io::Error::last_os_error());
    Ok(result)
}

fn map_shared(file: BorrowedFd<'_>) -> Result<&'static AtomicU64> {
    // SAFETY: a new mapping disturbs nothing, and lives as long as the process.
    let memory = unsafe {
        mmap(std::ptr::null_mut(), 4096, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)?
    };
    // SAFETY: the mapping is aligned, and its file as long.
    Ok(unsafe { &*memory.cast::<AtomicU64>() })
}

/// Forks a child that does `what`, and ends with what it gives.
fn child(what: impl FnOnce() -> i32) -> Result<i32> {
    // SAFETY: the child does what needs no other thread, and leaves by `_exit`.
    match unsafe { libc::fork() } {
        0 => {
            let status = what();
            // SAFETY: nothing is left behind that others would miss.
            unsafe { libc::_exit(status) }
        }
        pid => check(pid, "fork"),
    }
}

impl Objects {
    /// Takes hold of everything; while the process has one thread.
    pub(super) fn take() -> Result<Self> {
        let pair = UnixStream::pair()?;
        for buffer in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
            set_buffer(&pair.0, buffer)?;
        }
        let _ = fs::remove_file(PATH);
        let listener = UnixListener::bind(PATH)?;
        let there = UnixStream::connect(PATH)?;
        let accepted = (listener.accept()?.0, there);
        let asked = UnixStream::connect(PATH)?;

        // SAFETY: the call takes numbers only, and makes a descriptor that nobody knows yet.
        let netlink = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        // SAFETY: the kernel just made the descriptor, as `check` sees to, and nobody else owns it.
        let netlink = unsafe { OwnedFd::from_raw_fd(check(netlink, "netlink")?) };

        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        let memfd = File::from(rustix::fs::memfd_create("held", flags)?);
        memfd.set_len(8192)?;
        rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW)?;
        let mapped = map_shared(memfd.as_fd())?;
        mapped.store(4711, Ordering::Relaxed);

        let watcher = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        let other = inotify::add_watch(&watcher, "/run", inotify::WatchFlags::DELETE_SELF)?;
        let watch = inotify::add_watch(&watcher, "/tmp", inotify::WatchFlags::CREATE)?;
        inotify::remove_watch(&watcher, other)?;
        // Who removed a watch is told; that is no part of the test.
        let mut told = [0; 256];
        let _ = rustix::io::read(&watcher, &mut told);

        let open =
            |path: &str| OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path);
        let mut note = open(NOTE)?;
        note.write_all(CONTENT)?;
        let _ = fs::remove_file(LINK);
        std::os::unix::fs::symlink(NOTE, LINK)?;
        rustix::fs::flock(&note, FlockOperation::LockExclusive)?;
        lock_record(&note)?;
        note.seek(SeekFrom::Start(5))?;
        let file = open(SHARED)?;
        file.set_len(4096)?;
        let shared_file = map_shared(file.as_fd())?;

        let _ = fs::remove_file(FIFO);
        rustix::fs::mknodat(rustix::fs::CWD, FIFO, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let fifo = OpenOptions::new().read(true).write(true).open(FIFO)?;

        // SAFETY: a new mapping at an address of the kernel's choice replaces none.
        let memory = unsafe {
            mmap_anonymous(std::ptr::null_mut(), 4096, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)?
        };
        // SAFETY: the mapping is aligned, zeroed, and lives as long as the process.
        let shared: &'static Shared = unsafe { &*memory.cast::<Shared>() };
        child(|| confined(shared))?;
        let system_v = system_v()?;
        child(|| count(system_v))?;
        let ended = child(|| 3)?;
        let lost = child(beyond_rescue)?;
        set_processor_timer()?;
        let more = Self {
            pair,
            datagrams: UnixDatagram::pair()?,
            internet: (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?),
            listener,
            accepted,
            asked,
            carrier: UnixStream::pair()?,
            netlink,
            memfd,
            mapped,
            watcher,
            watch,
            note,
            shared_file,
            fifo,
            shared,
            system_v,
            ended,
            lost,
        };
        more.prepare()?;
        Ok(more)
    }

    /// Leaves things on their way.
    fn prepare(&self) -> Result<()> {
        (&self.pair.0).write_all(b"one way")?;
        (&self.pair.1).write_all(b"and the other")?;
        // Of what came at once a part has been read.
        let mut part = [0; 4];
        (&self.pair.0).read_exact(&mut part)?;
        self.datagrams.0.send(b"first")?;
        self.datagrams.0.send(b"second")?;
        let to = self.internet.1.local_addr()?;
        self.internet.0.send_to(b"first over the network", to)?;
        self.internet.0.send_to(&[7; 9000], to)?;
        (&self.accepted.0).write_all(b"to who asked")?;
        (&self.asked).write_all(b"said before it was accepted")?;
        (&self.fifo).write_all(b"through a name")?;
        self.shared_file.store(99, Ordering::Relaxed);
        self.send_descriptor()
    }

    /// Sends an eventfd that nobody else has.
    fn send_descriptor(&self) -> Result<()> {
        let event = rustix::event::eventfd(7, EventfdFlags::CLOEXEC)?;
        let files = [event.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        ensure!(control.push(SendAncillaryMessage::ScmRights(&files)), "no room for a descriptor");
        rustix::net::sendmsg(&self.carrier.0, &[IoSlice::new(b"!")], &mut control, SendFlags::empty())?;
        Ok(())
    }

    fn receive_descriptor(&self) -> Result<OwnedFd> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let parts = &mut [IoSliceMut::new(&mut byte)];
        rustix::net::recvmsg(&self.carrier.1, parts, &mut control, RecvFlags::DONTWAIT)?;
        for message in control.drain() {
            if let rustix::net::RecvAncillaryMessage::ScmRights(mut files) = message {
                return files.next().context("no descriptor came along");
            }
        }
        bail!("no descriptor came along")
    }

    /// Whether everything is as it was left.
    pub(super) fn look(&mut self) -> Result<()> {
        let mut bytes = [0; 256];
        for (socket, expected) in [(&self.pair.1, &b"one way"[..]), (&self.pair.0, b"the other")] {
            socket.set_nonblocking(true)?;
            let count = (&mut &*socket).read(&mut bytes).context("a pair of sockets")?;
            ensure!(&bytes[..count] == expected, "a socket holds {:?}", text(&bytes[..count]));
            socket.set_nonblocking(false)?;
        }
        let buffers = (buffer(&self.pair.0, libc::SO_SNDBUF)?, buffer(&self.pair.0, libc::SO_RCVBUF)?);
        ensure!(buffers == (2 * BUFFER, 2 * BUFFER), "its buffers are {buffers:?}");
        for expected in [&b"first"[..], b"second"] {
            let count = self.datagrams.1.recv(&mut bytes)?;
            ensure!(&bytes[..count] == expected, "a datagram is {:?}", text(&bytes[..count]));
        }
        let mut large = vec![0; 10_000];
        let from = self.internet.0.local_addr()?;
        self.internet.1.set_read_timeout(Some(PATIENCE))?;
        for expected in [&b"first over the network"[..], &[7; 9000]] {
            let (count, sender) = self.internet.1.recv_from(&mut large).context("a datagram of UDP")?;
            ensure!(sender == from, "a datagram of UDP comes from {sender}, not {from}");
            ensure!(&large[..count] == expected, "a datagram of UDP has {count} other bytes");
        }
        let count = self.accepted.1.read(&mut bytes)?;
        ensure!(&bytes[..count] == b"to who asked", "a connection holds {:?}", text(&bytes[..count]));
        self.listener.set_nonblocking(true)?;
        let mut late = self.listener.accept().context("who asked for a connection")?.0;
        self.listener.set_nonblocking(false)?;
        let count = late.read(&mut bytes)?;
        ensure!(
            &bytes[..count] == b"said before it was accepted",
            "who asked said {:?}",
            text(&bytes[..count])
        );
        late.write_all(b"welcome")?;
        let count = self.asked.read(&mut bytes)?;
        ensure!(&bytes[..count] == b"welcome", "who asked hears {:?}", text(&bytes[..count]));
        self.asked = UnixStream::connect(PATH).context("asking again")?;
        let event = self.receive_descriptor().context("a descriptor on its way")?;
        let count = rustix::io::read(&event, &mut bytes[..8])?;
        ensure!(count == 8 && bytes[0] == 7, "the eventfd on its way held {}", bytes[0]);
        let end = rustix::io::read(&self.netlink, &mut bytes).context("what is hung up")?;
        ensure!(end == 0, "what is hung up gave {end} bytes");

        ensure!(self.mapped.load(Ordering::Relaxed) == 4711, "the memfd is empty");
        let seals = rustix::fs::fcntl_get_seals(&self.memfd)?;
        ensure!(seals == SealFlags::SHRINK | SealFlags::GROW, "the memfd's seals are {seals:?}");
        ensure!(self.memfd.metadata()?.len() == 8192, "the memfd has another length");
        self.look_at_files(&mut bytes)?;
        self.look_at_children()?;
        let left = processor_timer_left()?;
        ensure!((1..=3600).contains(&left), "the processor timer has {left} s left");
        self.prepare()
    }

    fn look_at_files(&mut self, bytes: &mut [u8; 256]) -> Result<()> {
        File::create("/tmp/new")?;
        let pid = child(|| i32::from(is_record_locked()))?;
        ensure!(ending(pid)? == 1 << 8, "the lock of its record is gone");
        let count = rustix::io::read(&self.watcher, &mut *bytes).context("the watch")?;
        let number = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        ensure!(count > 16 && number == self.watch, "the watch gave {count} bytes from {number}");
        fs::remove_file("/tmp/new")?;
        let mut rest = Vec::new();
        self.note.read_to_end(&mut rest)?;
        ensure!(rest == CONTENT[5..], "the file in memory holds {:?}", text(&rest));
        self.note.seek(SeekFrom::Start(5))?;
        ensure!(fs::read(LINK)? == CONTENT, "the link leads elsewhere");
        let other = File::open(NOTE)?;
        let locked = rustix::fs::flock(&other, FlockOperation::NonBlockingLockExclusive);
        ensure!(locked == Err(rustix::io::Errno::WOULDBLOCK), "its lock is gone");
        // Whoever closes a file loses its locks of records, however often it has it open.
        drop(other);
        lock_record(&self.note)?;
        ensure!(self.shared_file.load(Ordering::Relaxed) == 99, "the file in shared memory is empty");
        ensure!(fs::read(SHARED)?[0] == 99, "it is not the file that is mapped");
        let count = self.fifo.read(bytes)?;
        ensure!(&bytes[..count] == b"through a name", "the named pipe holds {:?}", text(&bytes[..count]));
        Ok(())
    }

    fn look_at_children(&mut self) -> Result<()> {
        let before = self.shared.confined.load(Ordering::Relaxed);
        let deadline = Instant::now() + PATIENCE;
        while self.shared.confined.load(Ordering::Relaxed) < before + 20 {
            ensure!(Instant::now() < deadline, "the confined child does not count on from {before}");
            std::thread::sleep(Duration::from_millis(5));
        }
        let before = self.system_v.load(Ordering::Relaxed);
        while self.system_v.load(Ordering::Relaxed) == before {
            ensure!(Instant::now() < deadline, "System V memory is not shared any more");
            std::thread::sleep(Duration::from_millis(5));
        }
        ensure!(before > 0, "System V memory is empty");
        ensure!(self.shared.wrong.load(Ordering::Relaxed) == 0, "the confined child is not confined");
        for (pid, expected) in [(&mut self.ended, 3 << 8), (&mut self.lost, libc::SIGKILL)] {
            let status = ending(*pid)?;
            ensure!(status == expected, "child {pid} ended with {status:#x}, not {expected:#x}");
        }
        self.ended = child(|| 3)?;
        self.lost = child(beyond_rescue)?;
        Ok(())
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ending(pid: i32) -> Result<i32> {
    let mut status = 0;
    // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
    check(unsafe { libc::waitpid(pid, &raw mut status, 0) }, "a child")?;
    Ok(status)
}

fn set_buffer(socket: &UnixStream, option: i32) -> Result<()> {
    let size = i32::try_from(BUFFER)?;
    // SAFETY: the value is a number of four bytes.
    let set = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, (&raw const size).cast(), 4)
    };
    check(set, "a socket's buffer").map(drop)
}

fn buffer(socket: &UnixStream, option: i32) -> Result<usize> {
    let (mut size, mut length) = (0_i32, 4);
    // SAFETY: both are writable, and the value is a number of four bytes.
    let got = unsafe {
        let place = (&raw mut size).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, place, &raw mut length)
    };
    check(got, "a socket's buffer")?;
    Ok(usize::try_from(size)?)
}

fn record() -> libc::flock {
    // SAFETY: a `flock` consists of integers, for which zero is a valid value.
    let mut lock: libc::flock = unsafe { MaybeUninit::zeroed().assume_init() };
    (lock.l_type, lock.l_start, lock.l_len) = (i16::try_from(libc::F_WRLCK).unwrap_or(1), 2, 3);
    lock
}

fn lock_record(file: &File) -> Result<()> {
    let lock = record();
    // SAFETY: the kernel reads one `flock`, which outlives the call.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const lock) }, "a record's lock")
        .map(drop)
}

fn is_record_locked() -> bool {
    let mut lock = record();
    let Ok(file) = OpenOptions::new().write(true).open(NOTE) else { return false };
    // SAFETY: the lock is one, and writable.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut lock) };
    asked == 0 && i32::from(lock.l_type) != libc::F_UNLCK && (lock.l_start, lock.l_len) == (2, 3)
}

/// An hour of processor time.
fn set_processor_timer() -> Result<()> {
    let at = libc::timeval { tv_sec: 3600, tv_usec: 0 };
    let timer = libc::itimerval { it_interval: at, it_value: at };
    // SAFETY: the kernel reads one `itimerval`, which outlives the call, and the null pointer asks for no old
    // one.
    check(unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const timer, std::ptr::null_mut()) }, "a timer")
        .map(drop)
}

fn processor_timer_left() -> Result<i64> {
    let mut timer = MaybeUninit::<libc::itimerval>::zeroed();
    // SAFETY: the timer is writable; zeros are one.
    let (got, timer) =
        unsafe { (libc::getitimer(libc::ITIMER_PROF, timer.as_mut_ptr()), timer.assume_init()) };
    check(got, "a timer")?;
    Ok(timer.it_value.tv_sec)
}

/// Memory that a child will share by its number.
fn system_v() -> Result<&'static AtomicU64> {
    // SAFETY: a new piece of memory, at a place of the kernel's choice.
    let memory = unsafe {
        let number = check(libc::shmget(libc::IPC_PRIVATE, 4096, 0o600), "System V memory")?;
        let memory = libc::shmat(number, std::ptr::null(), 0);
        // It lives as long as somebody has it.
        libc::shmctl(number, libc::IPC_RMID, std::ptr::null_mut());
        memory
    };
    ensure!(memory.addr() != usize::MAX, "System V memory: {}", io::Error::last_os_error());
    // SAFETY: it is aligned, zeroed, and lives as long as the process.
    Ok(unsafe { &*memory.cast::<AtomicU64>() })
}

/// Returns a child that counts in it.
fn count(shared: &AtomicU64) -> i32 {
    loop {
        shared.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A child whose memory cannot be carried over: it asks that a part of it be memory of a socket.
fn beyond_rescue() -> i32 {
    // SAFETY: a new socket, and a new mapping of its ring.
    unsafe {
        let socket = libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0);
        let ring: [u32; 4] = [4096, 1, 2048, 2];
        const RX_RING: i32 = 5;
        let set = libc::setsockopt(socket, libc::SOL_PACKET, RX_RING, ring.as_ptr().cast(), 16);
        let memory = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, socket, 0);
        if socket < 0 || set < 0 || memory == libc::MAP_FAILED {
            return 1;
        }
        loop {
            libc::pause();
        }
    }
}

/// A child that cannot ask for its parent's number, has no way to more rights, and has a capability to hand on.
fn confined(shared: &Shared) -> i32 {
    let refusal: u32 = libc::SECCOMP_RET_ERRNO | 77;
    let (load, jump, answer) = (0x20, 0x15, 0x06);
    let wanted = u32::try_from(libc::SYS_getppid).unwrap_or(0);
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let program = [
        step(load, 0, 0, 0),
        step(jump, 0, 1, wanted),
        step(answer, 0, 0, refusal),
        step(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: 4, filter: program.as_ptr().cast_mut() };
    let header: [u32; 2] = [0x2008_0522, 0];
    let bit = 1_u32 << CAPABILITY;
    let mut sets = [0_u32; 6];
    // SAFETY: each call gets what it wants; the child has one thread.
    unsafe {
        let got = libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr());
        sets[2] |= bit;
        let set = libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr());
        let raise = c_long::from(libc::PR_CAP_AMBIENT_RAISE);
        let raised = libc::prctl(libc::PR_CAP_AMBIENT, raise, c_long::from(CAPABILITY), 0, 0);
        let kept = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let mode = c_long::from(libc::SECCOMP_MODE_FILTER);
        let confined = libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter);
        if got != 0 || set != 0 || raised != 0 || kept != 0 || confined != 0 {
            shared.wrong.fetch_add(1, Ordering::Relaxed);
        }
    }
    loop {
        // SAFETY: the calls take numbers only, and errno is this thread's own.
        let (asked, errno, kept, ambient) = unsafe {
            let asked = libc::syscall(libc::SYS_getppid);
            let errno = *libc::__errno_location();
            let is_set = c_long::from(libc::PR_CAP_AMBIENT_IS_SET);
            (
                asked,
                errno,
                libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0),
                libc::prctl(libc::PR_CAP_AMBIENT, is_set, c_long::from(CAPABILITY), 0, 0),
            )
        };
        let right = (asked, errno, kept, ambient) == (-1, 77, 1, 1);
        let into = if right { &shared.confined } else { &shared.wrong };
        into.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(2));
    }
}
