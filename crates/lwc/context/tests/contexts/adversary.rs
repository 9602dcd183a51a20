//! What a context without a capability could try, one attack each.
//!
//! Each is made three times: on a process of the same user that is open to debuggers, to see that it is an attack; on
//! another context; and on the root, which is open, too. The book has the list.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use orrery_context::{Error, Spec, create};

use crate::pages::{PAGE, Pages};
use crate::support::{become_ordinary, errno, own_pid, reap, shared_words};

/// What an attack is after.
struct Target {
    pid: i32,
    /// Where its memory holds the secret.
    address: usize,
    /// The file that does.
    descriptor: i32,
    /// It counts the signals that it gets.
    caught: &'static AtomicU64,
}

/// Tells what it got.
type Attack = fn(&Target) -> Vec<&'static str>;

/// Never in memory as a whole but where it was put on purpose.
fn secret() -> [u8; 16] {
    std::hint::black_box(*b"udrqdu#ri#ruuhu|").map(|byte| byte - 3)
}

fn hide_secret(address: usize) -> i32 {
    // SAFETY: a page of ours that is mapped there in every process of the test.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address).copy_from(secret().as_ptr(), 16) };
    let file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut &file, &secret()).unwrap();
    // SAFETY: the call takes numbers only.
    let far = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD, 700) };
    assert!(far >= 700);
    far
}

static CAUGHT: AtomicPtr<u64> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn catch(_signal: i32) {
    // SAFETY: a word that is shared and stays mapped; set before the handler is.
    unsafe { AtomicU64::from_ptr(CAUGHT.load(Ordering::SeqCst)) }.fetch_add(1, Ordering::SeqCst);
}

fn catch_signals(with: &'static AtomicU64) {
    CAUGHT.store(with.as_ptr(), Ordering::SeqCst);
    for signal in [libc::SIGUSR1, libc::SIGIO, libc::SIGRTMIN()] {
        // SAFETY: the handler touches an atomic only.
        unsafe { libc::signal(signal, catch as extern "C" fn(i32) as usize) };
    }
}

/// The attack in a process of its own, which it may not survive; what it got.
fn attempt(attack: Attack, target: &Target) -> String {
    let mut pipe = [0; 2];
    // SAFETY: writes two numbers into the array.
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    // SAFETY: the child attacks, writes what it got, and ends; no other thread holds a lock that it needs.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let got = attack(target).join(" ");
        // SAFETY: reads as many bytes as the text has.
        unsafe { libc::write(pipe[1], got.as_ptr().cast(), got.len()) };
        // SAFETY: ends the child without running anything of its parent's.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: the end is owned by its number in this function alone, and is closed once.
    unsafe { libc::close(pipe[1]) };
    let mut got = String::new();
    // SAFETY: the end is ours, and is owned here from now on.
    std::io::Read::read_to_string(&mut unsafe { std::fs::File::from_raw_fd(pipe[0]) }, &mut got).unwrap();
    reap(pid);
    got
}

/// Makes an attack on all targets. `works` says whether it gets something from a process that is open.
fn is_refused(attack: Attack, works: bool) {
    assert!(become_ordinary());
    // SAFETY: the call takes numbers only.
    unsafe { libc::setpgid(0, 0) };
    let words = shared_words();
    let address = Pages::new(1).address();
    catch_signals(&words[3]);
    // The target that shows that the attack is one.
    // SAFETY: the child hides its secret and sleeps.
    let open = unsafe { libc::fork() };
    if open == 0 {
        // SAFETY: PR_SET_PDEATHSIG takes numbers only.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        CAUGHT.store(words[0].as_ptr(), Ordering::SeqCst);
        words[1].store(hide_secret(address).unsigned_abs().into(), Ordering::SeqCst);
        loop {
            std::thread::sleep(std::time::Duration::from_secs(1));
        }
    }
    while words[1].load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    let descriptor = |word: u64| i32::try_from(word).unwrap();
    let target = Target {
        pid: open,
        address,
        descriptor: descriptor(words[1].load(Ordering::SeqCst)),
        caught: &words[0],
    };
    let got = attempt(attack, &target);
    // SAFETY: our child, which is not reaped yet.
    unsafe { libc::kill(open, libc::SIGKILL) };
    reap(open);
    let is_open = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope")
        .map_or(true, |scope| scope.trim() == "0");
    assert!(!works || !is_open || !got.is_empty(), "this attack fails even where nothing is in its way");

    let rich = create(&Spec::new().shared_signals(true), move |start| {
        CAUGHT.store(words[2].as_ptr(), Ordering::SeqCst);
        let file = hide_secret(address);
        start.creator.switch(own_pid(), &file.to_ne_bytes()).unwrap();
        unreachable!();
    })
    .unwrap();
    let told = rich.switch(0, &[]).unwrap();
    let file = i32::from_ne_bytes(told.bytes.try_into().unwrap());
    rich.restrict(&[]).unwrap();
    let context = Target { pid: descriptor(told.word), address, descriptor: file, caught: &words[2] };
    let root = std::process::id().cast_signed();
    let poor = create(&Spec::new(), move |start| {
        CAUGHT.store(words[4].as_ptr(), Ordering::SeqCst);
        let file = descriptor(start.arrival.word);
        let root = Target { pid: root, address, descriptor: file, caught: &words[3] };
        let got = [("context", &context), ("root", &root)].map(|(name, target)| {
            let got = attempt(attack, target);
            if got.is_empty() { got } else { format!("{name}: {got}; ") }
        });
        start.creator.switch(0, got.concat().as_bytes()).unwrap();
        unreachable!();
    });
    let poor = match poor {
        Err(Error::Birth { step, errno }) if step.contains("isolated") => {
            return orrery_testing::skipped!("no isolation here ({errno}): attacks on the root");
        }
        poor => poor.unwrap(),
    };
    words[3].store(0, Ordering::SeqCst);
    let file = hide_secret(address);
    let got = poor.switch(file.unsigned_abs().into(), &[]).unwrap();
    assert_eq!(String::from_utf8(got.bytes).unwrap(), "");
}

/// Adds to what was got.
fn note(got: &mut Vec<&'static str>, name: &'static str, success: bool) {
    if success {
        got.push(name);
    }
}

fn has_secret(bytes: &[u8]) -> bool {
    let wanted = secret();
    bytes.windows(16).any(|window| window == wanted)
}

fn read_file(path: &str) -> Vec<u8> {
    let Ok(mut file) = std::fs::File::open(path) else { return Vec::new() };
    let mut bytes = vec![0; 4096];
    let read = std::io::Read::read(&mut file, &mut bytes).unwrap_or(0);
    bytes.truncate(read);
    bytes
}

pub(crate) fn attack_by_pointer() {
    fn attack(target: &Target) -> Vec<&'static str> {
        let mut got = Vec::new();
        let place = std::ptr::with_exposed_provenance::<[u8; 16]>(target.address);
        // SAFETY: the same address is a page of ours in each process of the test.
        note(&mut got, "pointer", unsafe { place.read_volatile() } == secret());
        // All that is shared with anybody: what is private is a copy that was made before there was a secret.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        for line in maps.lines().filter(|line| line.contains(" rw-s ")) {
            let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let [from, to] = [from, to].map(|text| usize::from_str_radix(text, 16).unwrap());
            let start = std::ptr::with_exposed_provenance::<u8>(from);
            // SAFETY: the mapping is this process's own and readable; nobody unmaps it meanwhile.
            note(&mut got, "mapping", has_secret(unsafe { std::slice::from_raw_parts(start, to - from) }));
        }
        got
    }
    is_refused(attack, false);
}

pub(crate) fn attack_by_process_vm() {
    fn attack(target: &Target) -> Vec<&'static str> {
        let mut got = Vec::new();
        let mut bytes = [0_u8; 16];
        let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 16 };
        let remote =
            libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(target.address), iov_len: 16 };
        // SAFETY: writes to the local buffer only; of the other process the kernel asks whether we may.
        let read =
            unsafe { libc::process_vm_readv(target.pid, &raw const local, 1, &raw const remote, 1, 0) };
        note(&mut got, "readv", read > 0);
        // SAFETY: reads the local buffer only; of the other process the kernel asks whether we may.
        let wrote =
            unsafe { libc::process_vm_writev(target.pid, &raw const local, 1, &raw const remote, 1, 0) };
        note(&mut got, "writev", wrote > 0);
        got
    }
    is_refused(attack, true);
}

pub(crate) fn attack_by_ptrace() {
    fn attack(target: &Target) -> Vec<&'static str> {
        let mut got = Vec::new();
        // SAFETY: changes nothing of this process's memory.
        note(&mut got, "attach", unsafe { libc::ptrace(libc::PTRACE_ATTACH, target.pid, 0, 0) } == 0);
        // SAFETY: changes nothing of this process's memory.
        note(&mut got, "seize", unsafe { libc::ptrace(libc::PTRACE_SEIZE, target.pid, 0, 0) } == 0);
        // SAFETY: changes nothing of this process's memory.
        let word = unsafe { libc::ptrace(libc::PTRACE_PEEKDATA, target.pid, target.address, 0) };
        note(&mut got, "peek", word != -1);
        got
    }
    is_refused(attack, true);
}

pub(crate) fn attack_by_proc() {
    fn attack(target: &Target) -> Vec<&'static str> {
        let mut got = Vec::new();
        let pid = target.pid;
        if let Ok(file) = std::fs::File::open(format!("/proc/{pid}/mem")) {
            let mut bytes = [0; 16];
            let read = std::os::unix::fs::FileExt::read_at(&file, &mut bytes, target.address as u64);
            note(&mut got, "mem", read.is_ok());
        }
        for name in ["maps", "smaps", "pagemap", "environ", "auxv", "syscall", "stack", "io", "personality"] {
            note(&mut got, name, !read_file(&format!("/proc/{pid}/{name}")).is_empty());
        }
        // The numbers of open files may be listed, not what they are.
        for name in ["fd", "map_files", "fdinfo"] {
            let entries = std::fs::read_dir(format!("/proc/{pid}/{name}")).into_iter().flatten().flatten();
            let is_told = |path: std::path::PathBuf| {
                std::fs::read_link(&path).is_ok() || name == "fdinfo" && std::fs::read(&path).is_ok()
            };
            note(&mut got, name, entries.map(|entry| entry.path()).any(is_told));
        }
        for name in ["cwd", "root", "exe"] {
            note(&mut got, name, std::fs::read_link(format!("/proc/{pid}/{name}")).is_ok());
        }
        let thread = format!("/proc/{pid}/task/{pid}/mem");
        note(&mut got, "task/mem", std::fs::File::open(thread).is_ok());
        got
    }
    is_refused(attack, true);
}

pub(crate) fn attack_by_descriptors_of_others() {
    fn attack(target: &Target) -> Vec<&'static str> {
        let mut got = Vec::new();
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, target.pid, 0) };
        for number in [0, 1, 2, target.descriptor] {
            // SAFETY: takes numbers only; what the kernel makes of them is the attack.
            let taken = unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd, number, 0) };
            note(&mut got, "pidfd_getfd", taken >= 0);
        }
        let path = format!("/proc/{}/fd/{}", target.pid, target.descriptor);
        note(&mut got, "open", has_secret(&read_file(&path)));
        let here = std::process::id();
        // KCMP_FILE
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        let same = unsafe { libc::syscall(libc::SYS_kcmp, here, target.pid, 0, 0, target.descriptor) };
        note(&mut got, "kcmp", same >= 0);
        got
    }
    is_refused(attack, true);
}

pub(crate) fn attack_by_descriptors_of_its_own() {
    fn attack(_: &Target) -> Vec<&'static str> {
        let mut got = Vec::new();
        for fd in 0..2048 {
            let mut bytes = [0_u8; 4096];
            // SAFETY: writes at most as many bytes as the array has.
            let read = unsafe { libc::pread(fd, bytes.as_mut_ptr().cast(), bytes.len(), 0) };
            note(&mut got, "file", read > 0 && has_secret(&bytes));
            let size = 1 << 20;
            // SAFETY: a new mapping, where the kernel likes.
            let start =
                unsafe { libc::mmap(std::ptr::null_mut(), size, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
            if start != libc::MAP_FAILED {
                // SAFETY: integers, for which zero is valid.
                let mut status = unsafe { std::mem::zeroed::<libc::stat>() };
                // SAFETY: the C library writes one `stat` to `status`, which outlives the call.
                unsafe { libc::fstat(fd, &raw mut status) };
                let length = usize::try_from(status.st_size).unwrap_or(0).min(size);
                // SAFETY: mapped just now, as far as the file goes.
                let bytes = unsafe { std::slice::from_raw_parts(start.cast::<u8>(), length) };
                note(&mut got, "mapped file", has_secret(bytes));
                // SAFETY: mapped just now, and not used any more.
                unsafe { libc::munmap(start, size) };
            }
        }
        got
    }
    is_refused(attack, false);
}

pub(crate) fn attack_by_signals() {
    fn attack(target: &Target) -> Vec<&'static str> {
        let mut got = Vec::new();
        let pid = target.pid;
        let usr1 = libc::SIGUSR1;
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        note(&mut got, "kill 0", unsafe { libc::kill(pid, 0) } == 0);
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        note(&mut got, "kill", unsafe { libc::kill(pid, usr1) } == 0);
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        note(&mut got, "tgkill", unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, usr1) } == 0);
        // SAFETY: integers and pointers that nobody follows, for which zero is valid.
        let mut info = unsafe { std::mem::zeroed::<libc::siginfo_t>() };
        info.si_code = libc::SI_QUEUE;
        // SAFETY: reads a structure of the kernel's size.
        let queued = unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, pid, usr1, &raw const info) };
        note(&mut got, "rt_sigqueueinfo", queued == 0);
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd, usr1, 0, 0) };
        note(&mut got, "pidfd_send_signal", sent == 0);
        // By the kernel's hand: a file that tells of news by a signal.
        let mut pair = [0; 2];
        // SAFETY: writes two numbers into the array.
        unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr()) };
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        unsafe { libc::fcntl(pair[0], libc::F_SETOWN, pid) };
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        unsafe { libc::fcntl(pair[0], libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK) };
        // SAFETY: the kernel reads one byte, which is static.
        unsafe { libc::write(pair[1], b"x".as_ptr().cast(), 1) };
        std::thread::sleep(std::time::Duration::from_millis(20));
        note(&mut got, "a signal that arrived", target.caught.load(Ordering::SeqCst) > 0);
        got
    }
    is_refused(attack, true);
}

pub(crate) fn attack_by_stopping() {
    fn attack(target: &Target) -> Vec<&'static str> {
        let mut got = Vec::new();
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        note(&mut got, "stop", unsafe { libc::kill(target.pid, libc::SIGSTOP) } == 0);
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        note(&mut got, "go on", unsafe { libc::kill(target.pid, libc::SIGCONT) } == 0);
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        note(&mut got, "core", unsafe { libc::kill(target.pid, libc::SIGQUIT) } == 0);
        got
    }
    is_refused(attack, true);
}

pub(crate) fn attack_by_signals_to_a_group() {
    fn attack(target: &Target) -> Vec<&'static str> {
        // The program's own, which every context is in.
        // SAFETY: takes numbers only; the test is in a group of its own.
        unsafe { libc::kill(0, libc::SIGUSR1) };
        std::thread::sleep(std::time::Duration::from_millis(20));
        let mut got = Vec::new();
        note(&mut got, "a signal that arrived", target.caught.load(Ordering::SeqCst) > 0);
        got
    }
    is_refused(attack, true);
}

pub(crate) fn attack_by_io_uring() {
    fn attack(target: &Target) -> Vec<&'static str> {
        let mut got = Vec::new();
        let memory = CString::new(format!("/proc/{}/mem", target.pid)).unwrap();
        match uring_open(&memory) {
            Some(opened) => note(&mut got, "openat by ring", opened >= 0),
            None => orrery_testing::skipped!("no io_uring here: {}", errno()),
        }
        got
    }
    is_refused(attack, uring_open(c"/dev/null").is_some());
}

/// Opens a file through a ring, which no filter of system calls sees. None where there are no rings.
fn uring_open(path: &CStr) -> Option<i32> {
    let mut parameters = [0_u32; 30];
    // SAFETY: the array is as large as the structure.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 2, parameters.as_mut_ptr()) };
    let ring = i32::try_from(ring).ok().filter(|ring| *ring >= 0)?;
    let map = |offset: libc::off_t| {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, where the kernel likes.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), PAGE, protection, libc::MAP_SHARED, ring, offset) };
        assert_ne!(start, libc::MAP_FAILED);
        start.cast::<u32>()
    };
    // struct io_uring_params: ten words, then the offsets of the submission ring, then of the completion ring.
    let (submissions, completions) = (&parameters[10..20], &parameters[20..30]);
    let (rings, entry) = (map(0), map(0x1000_0000));
    // SAFETY: offsets are the kernel's, within the page that it has mapped.
    let at = |offset: u32| unsafe { rings.add(offset as usize / 4) };
    let path = path.as_ptr().expose_provenance();
    // struct io_uring_sqe: opcode 18 is IORING_OP_OPENAT.
    let words = [
        (0, 18),
        (1, libc::AT_FDCWD.cast_unsigned()),
        (4, u32::try_from(path & 0xffff_ffff).unwrap()),
        (5, u32::try_from(path >> 32).unwrap()),
        (7, libc::O_RDONLY.cast_unsigned()),
    ];
    // SAFETY: the entry and the words of the ring are in what the kernel has mapped for them; nobody else uses the
    // ring.
    unsafe {
        entry.write_bytes(0, 16);
        words.into_iter().for_each(|(place, word)| entry.add(place).write(word));
        at(submissions[6]).write(0);
        AtomicU32::from_ptr(at(submissions[1])).store(1, Ordering::SeqCst);
    }
    const GET_EVENTS: u32 = 1;
    // SAFETY: the entry names a string that lives until the call returns.
    let done = unsafe { libc::syscall(libc::SYS_io_uring_enter, ring, 1, 1, GET_EVENTS, 0, 0) };
    assert_eq!(done, 1, "{}", errno());
    // SAFETY: within the page of the ring.
    Some(unsafe { at(completions[5] + 8).read() }.cast_signed())
}

pub(crate) fn attack_by_advice_and_events() {
    fn attack(target: &Target) -> Vec<&'static str> {
        let mut got = Vec::new();
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, target.pid, 0) };
        let there =
            libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(target.address), iov_len: PAGE };
        // SAFETY: reads the structure beside it; of the other process the kernel asks whether we may.
        let advised = unsafe {
            libc::syscall(libc::SYS_process_madvise, pidfd, &raw const there, 1, libc::MADV_PAGEOUT, 0)
        };
        note(&mut got, "process_madvise", advised >= 0);
        let mut status = 0_i32;
        let mut page = target.address;
        let node: *const i32 = std::ptr::null();
        // SAFETY: reads and writes the numbers beside it only.
        let moved = unsafe {
            libc::syscall(libc::SYS_move_pages, target.pid, 1, &raw mut page, node, &raw mut status, 0)
        };
        note(&mut got, "move_pages", moved >= 0);
        // struct perf_event_attr: PERF_TYPE_SOFTWARE, its size, PERF_COUNT_SW_TASK_CLOCK, user space only.
        let mut attributes = [0_u64; 16];
        attributes[0] = 1 | 128 << 32;
        attributes[1] = 1;
        attributes[5] = 1 << 5 | 1 << 6;
        // SAFETY: reads a structure of the size that it names.
        let event =
            unsafe { libc::syscall(libc::SYS_perf_event_open, attributes.as_ptr(), target.pid, -1, -1, 0) };
        note(&mut got, "perf_event_open", event >= 0);
        let mut list = [0_usize; 2];
        // SAFETY: writes two words, for which there is room.
        let robust = unsafe {
            libc::syscall(libc::SYS_get_robust_list, target.pid, &raw mut list[0], &raw mut list[1])
        };
        note(&mut got, "get_robust_list", robust >= 0);
        got
    }
    is_refused(attack, true);
}

pub(crate) fn attack_by_limits_and_priorities() {
    fn attack(target: &Target) -> Vec<&'static str> {
        let mut got = Vec::new();
        let pid = target.pid;
        let who = pid.unsigned_abs();
        // Things that nobody is harmed by; others are refused, or not, just as these are.
        // SAFETY: integers, for which zero is valid.
        let mut limit = unsafe { std::mem::zeroed::<libc::rlimit>() };
        // SAFETY: the kernel writes one `rlimit` to `limit`, which outlives the call.
        unsafe { libc::getrlimit(libc::RLIMIT_CORE, &raw mut limit) };
        // SAFETY: the kernel reads one `rlimit`, which outlives the call, and the null pointer asks for no
        // old one.
        let set = unsafe { libc::prlimit(pid, libc::RLIMIT_CORE, &raw const limit, std::ptr::null_mut()) };
        note(&mut got, "prlimit", set == 0);
        // SAFETY: bits, for which zero is valid.
        let mut cpus = unsafe { std::mem::zeroed::<libc::cpu_set_t>() };
        let size = size_of_val(&cpus);
        // SAFETY: the kernel writes at most `size` bytes to `cpus`, which has them.
        unsafe { libc::sched_getaffinity(0, size, &raw mut cpus) };
        // SAFETY: the kernel reads `size` bytes of `cpus`, which has them.
        let set = unsafe { libc::sched_setaffinity(pid, size, &raw const cpus) };
        note(&mut got, "sched_setaffinity", set == 0);
        let parameter = libc::sched_param { sched_priority: 0 };
        // SAFETY: the kernel reads one `sched_param`, which outlives the call.
        let set = unsafe { libc::sched_setscheduler(pid, libc::SCHED_BATCH, &raw const parameter) };
        note(&mut got, "sched_setscheduler", set == 0);
        // SAFETY: the kernel reads one `sched_param`, which outlives the call.
        note(&mut got, "sched_setparam", unsafe { libc::sched_setparam(pid, &raw const parameter) } == 0);
        // struct sched_attr, of SCHED_OTHER and niceness 1: size and policy, flags, niceness and priority.
        let attributes = [48_u64, 0, 1, 0, 0, 0];
        // SAFETY: reads a structure of the size that it names.
        let set = unsafe { libc::syscall(libc::SYS_sched_setattr, pid, attributes.as_ptr(), 0) };
        note(&mut got, "sched_setattr", set == 0);
        // SAFETY: the call takes a number only.
        let groups = unsafe { libc::getpgid(pid) }.unsigned_abs();
        // SAFETY: the call takes nothing.
        let user = unsafe { libc::getuid() };
        for (name, kind, whom) in [
            ("setpriority", libc::PRIO_PROCESS, who),
            ("setpriority of a group", libc::PRIO_PGRP, groups),
            ("setpriority of the group", libc::PRIO_PGRP, 0),
            ("setpriority of a user", libc::PRIO_USER, user),
            ("setpriority of the user", libc::PRIO_USER, 0),
        ] {
            // SAFETY: takes numbers only; what the kernel makes of them is the attack.
            note(&mut got, name, unsafe { libc::setpriority(kind, whom, 2) } == 0);
        }
        // Best effort, 7.
        let lowest = 2 << 13 | 7;
        for (name, kind, whom) in
            [("ioprio_set", 1, who), ("ioprio_set of the group", 2, 0), ("ioprio_set of a user", 3, user)]
        {
            // SAFETY: takes numbers only; what the kernel makes of them is the attack.
            let set = unsafe { libc::syscall(libc::SYS_ioprio_set, kind, whom, lowest) };
            note(&mut got, name, set == 0);
        }
        // One's own are one's own.
        // SAFETY: takes numbers only; what the kernel makes of them is the attack.
        assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) }, 0);
        // SAFETY: the kernel reads `size` bytes of `cpus`, which has them.
        assert_eq!(unsafe { libc::sched_setaffinity(0, size, &raw const cpus) }, 0);
        got
    }
    is_refused(attack, true);
}

pub(crate) fn attack_by_another_program() {
    fn attack(target: &Target) -> Vec<&'static str> {
        let path = format!("/proc/{}/environ", target.pid);
        let read =
            std::process::Command::new("/bin/cat").arg(path).stderr(std::process::Stdio::null()).output();
        let mut got = Vec::new();
        note(&mut got, "cat", read.is_ok_and(|read| !read.stdout.is_empty()));
        let killed = std::process::Command::new("/bin/sh")
            .args(["-c", &format!("kill -USR1 {} 2>/dev/null", target.pid)])
            .status();
        note(&mut got, "kill", killed.is_ok_and(|status| status.success()));
        got
    }
    is_refused(attack, true);
}
