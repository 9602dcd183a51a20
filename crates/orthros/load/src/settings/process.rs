//! What a process has set for itself: by prctl(2) and its like, in `/proc`, and for its memory.

use std::fs;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use super::listing::Listing;

const PAGE: usize = 4096;
/// Lines of `/proc/PID/status` that are counters, or sizes that memory comes with.
const COUNTERS: &[&str] = &[
    "Vm",
    "Rss",
    "voluntary_ctxt",
    "nonvoluntary_ctxt",
    "SigQ",
    "State",
    "HugetlbPages",
    "CoreDumping",
    "FDSize",
    "PPid",
    "NSpid",
    "NSpgid",
    "NSsid",
    "NStgid",
    "Pid",
    "Tgid",
];
/// Questions of prctl(2): their numbers and second arguments.
const ASKED: &[(i32, u64)] = &[
    (libc::PR_GET_DUMPABLE, 0),
    (libc::PR_GET_KEEPCAPS, 0),
    (libc::PR_GET_TIMING, 0),
    (libc::PR_GET_SECCOMP, 0),
    (libc::PR_GET_SECUREBITS, 0),
    (libc::PR_GET_TIMERSLACK, 0),
    (libc::PR_MCE_KILL_GET, 0),
    (libc::PR_GET_NO_NEW_PRIVS, 0),
    (libc::PR_GET_THP_DISABLE, 0),
    (libc::PR_GET_SPECULATION_CTRL, 0),
    (libc::PR_GET_SPECULATION_CTRL, 1),
    (libc::PR_GET_SPECULATION_CTRL, 2),
    // PR_GET_IO_FLUSHER, PR_GET_MDWE.
    (58, 0),
    (66, 0),
];
/// Questions whose answer is written to an address.
const ASKED_BY_ADDRESS: &[i32] =
    &[libc::PR_GET_PDEATHSIG, libc::PR_GET_CHILD_SUBREAPER, libc::PR_GET_TSC, libc::PR_GET_TID_ADDRESS];

pub(super) struct Process {
    /// The pages with advice, and those that only belong to this process.
    memory: usize,
    child: i32,
    /// A child that shares this program's memory.
    sharing: i32,
}

fn prctl(option: i32, words: [u64; 4]) -> i32 {
    let [two, three, four, five] = words;
    // SAFETY: the options that come here take numbers.
    unsafe { libc::prctl(option, two, three, four, five) }
}

fn must(result: i64, what: &str) -> Result<()> {
    ensure!(result >= 0, "{what}: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Starts a process that shares this one's memory without being a thread of it.
fn sharing_child() -> Result<i32> {
    const STACK: usize = 16 * PAGE;
    extern "C" fn wait(_: *mut libc::c_void) -> libc::c_int {
        loop {
            // SAFETY: the call takes no pointer.
            unsafe { libc::pause() };
        }
    }
    // Aligned, and never freed.
    let stack: &'static mut [u128] = Box::leak(vec![0; STACK / size_of::<u128>()].into_boxed_slice());
    // SAFETY: the child has a stack of its own, which is never freed, and only makes system calls on it.
    let child = unsafe {
        let top = stack.as_mut_ptr_range().end;
        libc::clone(wait, top.cast(), libc::CLONE_VM | libc::SIGCHLD, std::ptr::null_mut())
    };
    must(child.into(), "clone")?;
    Ok(child)
}

impl Process {
    pub(super) fn take() -> Result<Self> {
        let memory = Self::advise()?;
        rustix::system::sethostname(b"renamed")?;
        rustix::system::setdomainname(b"example.org")?;
        fs::write("/proc/self/coredump_filter", "0x7f")?;
        fs::write("/proc/self/oom_score_adj", "-500")?;
        // SAFETY: the calls take numbers only.
        unsafe {
            must(libc::syscall(libc::SYS_membarrier, 1 << 4, 0, 0), "membarrier")?;
            must(libc::syscall(libc::SYS_membarrier, 1 << 6, 0, 0), "membarrier")?;
            must(libc::syscall(libc::SYS_ioprio_set, 1, 0, 2 << 13 | 6), "ioprio_set")?;
            must(libc::personality(0x0040_0000).into(), "personality")?;
            must(libc::mlockall(libc::MCL_FUTURE | libc::MCL_ONFAULT).into(), "mlockall")?;
            libc::umask(0o13);
        }
        let kill_early =
            [libc::PR_MCE_KILL_SET, libc::PR_MCE_KILL_EARLY].map(|n| u64::from(n.cast_unsigned()));
        for (option, words) in [
            (libc::PR_SET_CHILD_SUBREAPER, [1, 0, 0, 0]),
            (libc::PR_SET_PDEATHSIG, [12, 0, 0, 0]),
            (libc::PR_SET_TIMERSLACK, [77_777, 0, 0, 0]),
            (libc::PR_SET_THP_DISABLE, [1, 0, 0, 0]),
            (libc::PR_MCE_KILL, [kill_early[0], kill_early[1], 0, 0]),
            (57, [1, 0, 0, 0]),
            (libc::PR_SET_NO_NEW_PRIVS, [1, 0, 0, 0]),
            (libc::PR_SET_KEEPCAPS, [1, 0, 0, 0]),
        ] {
            must(prctl(option, words).into(), "prctl")?;
        }
        // Where the processor has no such setting, there is none to survive.
        let _ = prctl(libc::PR_SET_SPECULATION_CTRL, [0, 4, 0, 0]);
        Ok(Self { memory, child: Self::child_without_clock()?, sharing: sharing_child()? })
    }

    /// Starts a child that may not read the time stamp counter, which this program does all the time.
    fn child_without_clock() -> Result<i32> {
        // SAFETY: this process has one thread; the child only makes system calls.
        match unsafe { libc::fork() } {
            0 => {
                prctl(libc::PR_SET_TSC, [2, 0, 0, 0]);
                loop {
                    // SAFETY: the call takes no pointer.
                    unsafe { libc::pause() };
                }
            }
            -1 => bail!("cannot fork: {}", std::io::Error::last_os_error()),
            child => Ok(child),
        }
    }

    /// Maps memory, and gives each other page some advice.
    fn advise() -> Result<usize> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at a place of the kernel's choice.
        let memory = unsafe { mmap_anonymous(std::ptr::null_mut(), 32 * PAGE, access, flags) }?;
        let at = memory.expose_provenance();
        for (index, advice) in [
            libc::MADV_WIPEONFORK,
            libc::MADV_DONTFORK,
            libc::MADV_DONTDUMP,
            libc::MADV_NOHUGEPAGE,
            libc::MADV_HUGEPAGE,
            libc::MADV_SEQUENTIAL,
            libc::MADV_RANDOM,
            libc::MADV_MERGEABLE,
        ]
        .into_iter()
        .enumerate()
        {
            // SAFETY: the page is within the mapping, and nothing is in it yet.
            let result = unsafe { libc::madvise(memory.byte_add(index * 2 * PAGE), PAGE, advice) };
            // A kernel may be built without some of them.
            if result != 0 && std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL) {
                bail!("madvise {advice}: {}", std::io::Error::last_os_error());
            }
        }
        // SAFETY: the pages are within the mapping.
        unsafe {
            must(libc::mlock2(memory.byte_add(20 * PAGE), PAGE, 1).into(), "mlock2")?;
            must(libc::mlock(memory.byte_add(22 * PAGE), PAGE).into(), "mlock")?;
            for page in 0..32 {
                memory.byte_add(page * PAGE).cast::<u8>().write(1);
            }
        }
        Ok(at)
    }

    pub(super) fn list(&self, listing: &mut Listing) -> Result<()> {
        for &(option, argument) in ASKED {
            let answer = prctl(option, [argument, 0, 0, 0]);
            listing.insert(format!("prctl {option} {argument}"), answer.to_string());
        }
        for &option in ASKED_BY_ADDRESS {
            let mut answer = 0_u64;
            prctl(option, [(&raw mut answer).expose_provenance() as u64, 0, 0, 0]);
            listing.insert(format!("prctl {option}"), answer.to_string());
        }
        for capability in 0..64 {
            let answer = prctl(libc::PR_CAPBSET_READ, [capability, 0, 0, 0]);
            let ambient = prctl(libc::PR_CAP_AMBIENT, [1, capability, 0, 0]);
            listing.insert(format!("capability {capability}"), format!("{answer} {ambient}"));
        }
        // SAFETY: the calls take numbers only.
        let (personality, priority, barrier, serializing) = unsafe {
            (
                libc::personality(0xffff_ffff),
                libc::syscall(libc::SYS_ioprio_get, 1, 0),
                libc::syscall(libc::SYS_membarrier, 1 << 3, 0, 0),
                libc::syscall(libc::SYS_membarrier, 1 << 5, 0, 0),
            )
        };
        for (name, answer) in [
            ("personality", i64::from(personality)),
            ("I/O priority", priority),
            ("membarrier", barrier),
            ("serializing membarrier", serializing),
        ] {
            listing.insert(name.to_owned(), answer.to_string());
        }
        let name = rustix::system::uname();
        listing.insert("host name".to_owned(), format!("{:?} {:?}", name.nodename(), name.domainname()));
        self.list_fork(listing)?;
        list_proc(listing)?;
        for (name, child) in [("child", self.child), ("child that shares memory", self.sharing)] {
            let status = fs::read_to_string(format!("/proc/{child}/status"))?;
            let has_ended = status.lines().any(|line| line.starts_with("State:\tZ"));
            listing.insert(name.to_owned(), if has_ended { "has ended" } else { "lives" }.to_owned());
        }
        list_future(listing)
    }

    /// Lists what a new child sees of two pages.
    fn list_fork(&self, listing: &mut Listing) -> Result<()> {
        let (wiped, absent) = (self.memory, self.memory + 2 * PAGE);
        // SAFETY: this process has one thread; the child only looks at its memory and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut present = 0_u8;
            // SAFETY: the first page is there in the child, too; mincore writes one byte for one page.
            unsafe {
                let byte = std::ptr::with_exposed_provenance::<u8>(wiped).read_volatile();
                let place = std::ptr::with_exposed_provenance_mut::<libc::c_void>(absent);
                let is_absent = libc::mincore(place, PAGE, &raw mut present) != 0;
                libc::_exit(i32::from(byte != 0) | i32::from(!is_absent) << 1);
            }
        }
        ensure!(child > 0, "cannot fork: {}", std::io::Error::last_os_error());
        let mut status = 0;
        // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        listing.insert("a new child's pages".to_owned(), status.to_string());
        Ok(())
    }
}

/// Lists what `/proc` says.
fn list_proc(listing: &mut Listing) -> Result<()> {
    for name in [
        "oom_score_adj",
        "coredump_filter",
        "timerslack_ns",
        "personality",
        "limits",
        "loginuid",
        "sessionid",
        "cgroup",
        "uid_map",
        "gid_map",
        "setgroups",
        "comm",
        "cmdline",
        "environ",
        "timers",
        "autogroup",
    ] {
        if let Ok(text) = fs::read(format!("/proc/self/{name}")) {
            listing.insert(
                format!("/proc/self/{name}"),
                String::from_utf8_lossy(&text).replace(['\n', '\0'], " "),
            );
        }
    }
    for line in fs::read_to_string("/proc/self/status")?.lines() {
        if let Some((name, value)) = line.split_once(':')
            && !COUNTERS.iter().any(|counter| name.starts_with(counter))
        {
            listing.insert(format!("status {name}"), value.trim().to_owned());
        }
    }
    for line in fs::read_to_string("/proc/self/stat")?.split_whitespace().enumerate() {
        // Nice value, scheduling class, its priority, signal that ends it: proc_pid_stat(5).
        if [17, 18, 37, 39, 40].contains(&line.0) {
            listing.insert(format!("stat {}", line.0), line.1.to_owned());
        }
    }
    list_memory(listing)
}

/// A mapping of `/proc/PID/smaps`.
#[derive(PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    permissions: String,
    offset: u64,
    name: String,
    flags: String,
}

/// Lists the mappings of memory. Neighbours that differ in nothing count as one, as the kernel takes them if it can.
fn list_memory(listing: &mut Listing) -> Result<()> {
    let number = |text: &str| u64::from_str_radix(text, 16);
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in fs::read_to_string("/proc/self/smaps")?.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [range, permissions, offset, _, _, ref name @ ..] if range.contains('-') => {
                let Some((start, end)) = range.split_once('-') else { continue };
                let (start, end, offset) = (number(start)?, number(end)?, number(offset)?);
                let (permissions, name) = (permissions.to_owned(), name.join(" "));
                mappings.push(Mapping { start, end, permissions, offset, name, flags: String::new() });
            }
            ["VmFlags:", ref flags @ ..] => {
                // Whether a page was written since somebody asked, and whether it counts against what the kernel has promised, are no
                // settings.
                let flags = flags.iter().copied().filter(|flag| !["sd", "ac"].contains(flag));
                let flags = flags.collect::<Vec<_>>().join(" ");
                mappings.last_mut().into_iter().for_each(|mapping| mapping.flags.clone_from(&flags));
            }
            _ => {}
        }
    }
    mappings.dedup_by(|next, last| {
        let follows = last.end == next.start
            && (last.offset + (last.end - last.start) == next.offset || last.name.is_empty())
            && (&last.permissions, &last.name, &last.flags) == (&next.permissions, &next.name, &next.flags);
        if follows {
            last.end = next.end;
        }
        follows
    });
    // The heap and the stack grow.
    for mapping in mappings.iter().filter(|mapping| !["[heap]", "[stack]"].contains(&&*mapping.name)) {
        let Mapping { start, end, permissions, offset, name, flags } = mapping;
        let what = format!("{permissions} {offset:x} {name} {flags}");
        listing.insert(format!("memory {start:x}-{end:x}"), what);
    }
    Ok(())
}

/// Lists whether new memory is locked.
fn list_future(listing: &mut Listing) -> Result<()> {
    // SAFETY: a new mapping at a place of the kernel's choice, which is unmapped below.
    let memory = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGE, ProtFlags::READ, MapFlags::SHARED) }?;
    std::thread::sleep(Duration::from_millis(1));
    let range = format!("{:x}-", memory.addr());
    let smaps = fs::read_to_string("/proc/self/smaps")?;
    let flags =
        smaps.lines().skip_while(|line| !line.starts_with(&range)).find(|line| line.starts_with("VmFlags"));
    let is_locked = flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "lo"));
    listing.insert("new memory is locked".to_owned(), is_locked.to_string());
    // SAFETY: the mapping is the one made above, and nothing refers to it.
    unsafe { rustix::mm::munmap(memory, PAGE) }?;
    Ok(())
}
