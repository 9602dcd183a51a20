//! A program of the kernel's at a control group, which drops a random part of the UDP packets that arrive for its sockets
//! ([bpf(2)](https://man7.org/linux/man-pages/man2/bpf.2.html): `BPF_PROG_TYPE_CGROUP_SKB`).
//!
//! Unlike a filter of a socket, it stands beside filters of the programs' own, is there for sockets that are made later, and ends with the
//! process that attached it, however that ends: it hangs on a descriptor. It is assembled here, since a library that loads compiled
//! objects would need a compiler for two dozen instructions. A socket belongs to the group in which its maker was when it made it, for ever.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use syscalls::{Sysno, syscall};

use crate::{Error, Result};

const MAP_CREATE: u32 = 0;
const PROG_LOAD: u32 = 5;
const LINK_CREATE: u32 = 28;
/// `BPF_MAP_TYPE_ARRAY`, and that it can be mapped.
const ARRAY: u32 = 2;
const MAPPABLE: u32 = 1 << 10;
/// `BPF_PROG_TYPE_CGROUP_SKB`, at `BPF_CGROUP_INET_INGRESS`.
const CGROUP_SKB: u32 = 8;
const INGRESS: u32 = 0;

/// Two words: how many of 2^32 packets are dropped, and how many were.
const VALUE: usize = 16;
const PAGE: usize = 4096;

#[repr(C)]
struct MapCreate {
    kind: u32,
    key: u32,
    value: u32,
    entries: u32,
    flags: u32,
}

/// The first fields of `union bpf_attr` for `BPF_PROG_LOAD`.
#[repr(C)]
struct ProgLoad {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach: u32,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    target: u32,
    attach: u32,
    flags: u32,
}

/// `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    /// The destination in the lower half, the source in the upper one.
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// The offsets of `sk` in `struct __sk_buff`, and of `type` and `protocol` in `struct bpf_sock`.
const SOCKET: i16 = 168;
const TYPE: i16 = 8;
const PROTOCOL: i16 = 12;
/// The numbers of helpers.
const LOOK_UP: i32 = 1;
const RANDOM: i32 = 7;
const SOCKET_UID: i32 = 47;
const FULL_SOCKET: i32 = 95;
/// Where jumps lead to the end, which passes the packet.
const PASS: i16 = i16::MAX;

/// More than the program has.
const ROOM: usize = 32;

/// A program that is assembled: no allocator is needed, so that a forked child can try it.
struct Assembled {
    all: [Instruction; ROOM],
    count: usize,
}

impl Assembled {
    fn extend<const COUNT: usize>(&mut self, instructions: [Instruction; COUNT]) {
        for instruction in instructions {
            if let Some(place) = self.all.get_mut(self.count) {
                *place = instruction;
                self.count += 1;
            }
        }
    }
}

/// Returns the program. `user`: only of sockets that this user made.
fn program(map: i32, user: Option<u32>) -> Assembled {
    let i = |code: u8, to: u8, from: u8, offset: i16, immediate: i32| Instruction {
        code,
        registers: to | from << 4,
        offset,
        immediate,
    };
    let call = |helper: i32| i(0x85, 0, 0, 0, helper);
    let mut all = Assembled { all: [i(0, 0, 0, 0, 0); ROOM], count: 0 };
    all.extend([
        // r6 = the packet; r0 = its socket, if that is one.
        i(0xbf, 6, 1, 0, 0),
        i(0x79, 1, 6, SOCKET, 0),
        i(0x15, 1, 0, PASS, 0),
        call(FULL_SOCKET),
        i(0x15, 0, 0, PASS, 0),
        i(0x61, 1, 0, TYPE, 0),
        i(0x55, 1, 0, PASS, libc::SOCK_DGRAM),
        i(0x61, 1, 0, PROTOCOL, 0),
        i(0x55, 1, 0, PASS, libc::IPPROTO_UDP),
    ]);
    if let Some(user) = user {
        all.extend([i(0xbf, 1, 6, 0, 0), call(SOCKET_UID), i(0x56, 0, 0, PASS, user.cast_signed())]);
    }
    all.extend([
        // r7 = the two words.
        i(0x62, 10, 0, -4, 0),
        i(0xbf, 2, 10, 0, 0),
        i(0x07, 2, 0, 0, -4),
        i(0x18, 1, 1, 0, map),
        i(0, 0, 0, 0, 0),
        call(LOOK_UP),
        i(0x15, 0, 0, PASS, 0),
        i(0xbf, 7, 0, 0, 0),
        i(0x79, 8, 7, 0, 0),
        call(RANDOM),
        i(0x3d, 0, 8, PASS, 0),
        // Counts, and drops.
        i(0xb7, 1, 0, 0, 1),
        i(0xdb, 7, 1, 8, 0),
        i(0xb7, 0, 0, 0, 0),
        i(0x95, 0, 0, 0, 0),
    ]);
    let end = all.count;
    for (index, instruction) in all.all.iter_mut().enumerate().filter(|(_, it)| it.offset == PASS) {
        instruction.offset = i16::try_from(end - index - 1).unwrap_or(0);
    }
    all.extend([i(0xb7, 0, 0, 0, 1), i(0x95, 0, 0, 0, 0)]);
    all
}

/// The program at a group. It is removed with this, and when this process ends.
#[derive(Debug)]
pub struct CgroupFilter {
    words: NonNull<AtomicU64>,
    _link: OwnedFd,
}

impl CgroupFilter {
    /// Attaches a program that drops nothing to a group of version 2, beside others that are there. With `user`, it leaves sockets alone
    /// that another user made, a set-user-ID program for instance.
    ///
    /// # Errors
    /// `EPERM` without `CAP_BPF` and `CAP_NET_ADMIN`; `EINVAL` where the kernel has no such programs or links (before Linux 5.7), or the
    /// directory is no group of version 2; `ENOSYS` without bpf(2).
    pub fn attach(group: BorrowedFd<'_>, user: Option<u32>) -> Result<Self> {
        let value = u32::try_from(VALUE).unwrap_or(0);
        let attributes = MapCreate { kind: ARRAY, key: 4, value, entries: 1, flags: MAPPABLE };
        let map = bpf("bpf BPF_MAP_CREATE", MAP_CREATE, &attributes)?;
        let instructions = program(map.as_raw_fd(), user);
        let attributes = ProgLoad {
            kind: CGROUP_SKB,
            count: u32::try_from(instructions.count).unwrap_or(0),
            instructions: instructions.all.as_ptr() as u64,
            license: c"Dual MIT/GPL".as_ptr() as u64,
            log_level: 0,
            log_size: 0,
            log: 0,
            version: 0,
            flags: 0,
            name: *b"orrery_net_shar\0",
            interface: 0,
            attach: INGRESS,
        };
        let program = bpf("bpf BPF_PROG_LOAD", PROG_LOAD, &attributes)?;
        let number = |fd: i32| u32::try_from(fd).unwrap_or(u32::MAX);
        let (program, target) = (number(program.as_raw_fd()), number(group.as_raw_fd()));
        let attributes = LinkCreate { program, target, attach: INGRESS, flags: 0 };
        let link = bpf("bpf BPF_LINK_CREATE", LINK_CREATE, &attributes)?;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let words = unsafe {
            mmap(
                core::ptr::null_mut(),
                PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                map.as_fd(),
                0,
            )
        }
        .map_err(|errno| Error::new("mmap", 0, errno))?;
        let words = NonNull::new(words.cast()).ok_or(Error::new("mmap", 0, rustix::io::Errno::NOMEM))?;
        Ok(Self { words, _link: link })
    }

    /// Has a random part of what arrives dropped: `threshold` of 2^32 packets.
    pub fn set(&self, threshold: u32) {
        self.word(0).store(threshold.into(), Ordering::Relaxed);
    }

    /// Returns how many packets were dropped so far.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.word(1).load(Ordering::Relaxed)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: the page is mapped for as long as this is there, and has both words, which the kernel changes by atomic operations.
        unsafe { self.words.add(index.min(1)).as_ref() }
    }
}

impl Drop for CgroupFilter {
    fn drop(&mut self) {
        // SAFETY: the mapping of `attach`, which has no other owner: references to it end with the borrow of this.
        let _unmapped = unsafe { munmap(self.words.as_ptr().cast(), PAGE) };
    }
}

/// Makes the call, which returns a descriptor.
fn bpf<T>(operation: &'static str, command: u32, attributes: &T) -> Result<OwnedFd> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes, and what they point to, which lives in the caller.
    let fd = unsafe { syscall!(Sysno::bpf, command, core::ptr::from_ref(attributes), size_of::<T>()) }
        .map_err(|e| Error::raw(operation, 0, e))?;
    let fd = i32::try_from(fd).map_err(|_| Error::new(operation, 0, rustix::io::Errno::BADF))?;
    // SAFETY: a new descriptor, which has no other owner; the kernel opens it with close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::UdpSocket;
    use std::process::{Command, Stdio};

    use orrery_testing::{is_there, skipped};

    use super::*;

    /// Answers each line with how many packets have come since.
    const RECEIVER: &str = "
import os, socket, sys
open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('127.0.0.1', 0)); s.setblocking(False)
os.setuid(65534)
print(s.getsockname()[1], flush=True)
for line in sys.stdin:
    n = 0
    try:
        while True: s.recv(100); n += 1
    except BlockingIOError: print(n, flush=True)
";

    #[test]
    fn a_random_part_is_dropped_and_counted_and_ends_with_the_filter() {
        let Some(above) = crate::cgroups::own_group(None) else {
            return skipped!("there is no control group of version 2");
        };
        let group = above.join(format!("orrery-test-{}", std::process::id()));
        if let Err(error) = std::fs::create_dir(&group) {
            return skipped!("no control group can be made: {error}");
        }
        let directory = std::fs::File::open(&group).unwrap();
        let filters = [None, Some(0), Some(65534)].map(|user| CgroupFilter::attach(directory.as_fd(), user));
        if let [Err(error), ..] = &filters {
            std::fs::remove_dir(&group).unwrap();
            return skipped!("the kernel refuses: {error}");
        }
        let [all, roots, others] = filters.map(Result::unwrap);
        if !is_there("/usr/bin/python3") {
            std::fs::remove_dir(&group).unwrap();
            return skipped!("there is no /usr/bin/python3");
        }
        let mut receiver = Command::new("/usr/bin/python3")
            .args(["-c", RECEIVER, group.to_str().unwrap()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut orders = receiver.stdin.take().unwrap();
        let mut answers = BufReader::new(receiver.stdout.take().unwrap());
        let mut answer = || {
            let mut line = String::new();
            answers.read_line(&mut line).unwrap();
            line.trim().parse::<u64>().unwrap()
        };
        let port = u16::try_from(answer()).unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut delivered = || {
            let mut sum = 0;
            for _ in 0..20 {
                (0..50).for_each(|_| assert_eq!(sender.send_to(b"x", ("127.0.0.1", port)).unwrap(), 1));
                writeln!(orders, "count").unwrap();
                sum += answer();
            }
            sum
        };
        assert_eq!(delivered(), 1000);
        all.set(u32::MAX / 2);
        let got = delivered();
        assert!((350..=650).contains(&got), "{got} of 1000");
        assert_eq!(all.dropped(), 1000 - got);
        all.set(0);
        // The user counts that made the socket, not the one that has it.
        others.set(u32::MAX);
        assert_eq!((delivered(), others.dropped()), (1000, 0));
        roots.set(u32::MAX);
        let got = delivered();
        assert!(got <= 1 && roots.dropped() == 1000 - got, "{got}");
        drop(roots);
        assert_eq!(delivered(), 1000);
        drop(orders);
        receiver.wait().unwrap();
        std::fs::remove_dir(&group).unwrap();
    }

    #[test]
    fn what_is_no_group_is_refused() {
        let directory = std::fs::File::open("/tmp").unwrap();
        assert!(CgroupFilter::attach(directory.as_fd(), None).is_err());
    }
}
