//! What a context without a right could try.

use orrery_context::{Context, Error, FromCaller, Overlay, Rights, Spec, create};
use rustix::process::dumpable_behavior;

use crate::pages::Pages;
use crate::support::{OWN_MEMORY, become_ordinary, call_number, copy_high, open_ways, own_pid, server};

pub(crate) fn a_context_is_closed_to_its_like() {
    assert!(become_ordinary());
    let memory = Pages::new(1);
    let closed = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let open = create(&Spec::new().dumpable(true), server(|_| own_pid())).unwrap();
    let pid_of = |context: Context| i32::try_from(context.switch(0, &[]).unwrap().word).unwrap();
    assert_eq!(open_ways(pid_of(closed), memory.address()), [""; 0]);
    if open_ways(pid_of(open), memory.address()).is_empty() {
        println!("this kernel closes all processes to each other (Yama?): nothing to compare with");
    }
}

/// Returns what code in a context reaches of the process `pid`, which has a secret at `address`.
fn reached(pid: i32, address: usize) -> String {
    let mut found = String::new();
    let mut bytes = [0_u8; 10];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 10 };
    let remote = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address), iov_len: 10 };
    // SAFETY: writes to the buffer, within its length.
    if unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) } == 10 {
        found += "memory ";
    }
    // SAFETY: takes numbers, and gives a new descriptor or an error.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    // SAFETY: the call takes numbers, and gives a new descriptor or an error.
    if pidfd >= 0 && unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd, 0, 0) } >= 0 {
        found += "descriptors ";
    }
    // SAFETY: the call takes numbers only, and signal 0 is not sent.
    if unsafe { libc::kill(pid, 0) } == 0 {
        found += "signals ";
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the null pointer sets no limit, and the kernel writes one `rlimit` to `limit`, which outlives
    // the call.
    if unsafe { libc::prlimit(pid, libc::RLIMIT_CORE, std::ptr::null(), &raw mut limit) } == 0 {
        found += "limits ";
    }
    found
}

/// Contexts are isolated unless that is left out, those that contexts create with them, however deep.
pub(crate) fn contexts_do_not_reach_the_root() {
    fn nested(depth: u32, root: i32, address: usize) -> String {
        if depth == 0 {
            return reached(root, address);
        }
        let inner = create(&Spec::new(), move |start| {
            let found = nested(depth - 1, root, address);
            start.arrival.caller.switch(0, found.as_bytes()).unwrap();
            unreachable!();
        });
        String::from_utf8(inner.unwrap().switch(0, &[]).unwrap().bytes).unwrap()
    }
    assert!(become_ordinary());
    let memory = Pages::new(1);
    memory.put(b"the secret");
    let (root, address) = (std::process::id().cast_signed(), memory.address());
    let attack = |spec: &Spec, depth: u32| {
        let attacker = create(spec, move |start| {
            let found = nested(depth, root, address);
            start.arrival.caller.switch(0, found.as_bytes()).unwrap();
            unreachable!();
        })?;
        let found = attacker.switch(0, &[]).unwrap().bytes;
        attacker.close().unwrap();
        Ok(String::from_utf8(found).unwrap())
    };
    let open = attack(&Spec::new().isolate(false), 0).unwrap();
    let is_open = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope")
        .map_or(true, |scope| scope.trim() == "0");
    assert_eq!(open, if is_open { "memory descriptors signals limits " } else { "signals limits " });
    for (spec, depth) in
        [(Spec::new(), 0), (Spec::new().isolate(true), 0), (Spec::new(), 1), (Spec::new(), 20)]
    {
        match attack(&spec, depth) {
            Err(Error::Birth { step, errno }) if step.contains("isolated") => {
                return orrery_testing::skipped!("no isolation here ({errno})");
            }
            found => assert_eq!(found.unwrap(), "", "{spec:?}, {depth} deep"),
        }
    }
}

/// What a context without a right could try on one that has something to hide.
pub(crate) fn rights_do_not_come_by_other_ways() {
    assert!(become_ordinary());
    let memory = Pages::new(1);
    memory.fill(0);
    let address = memory.address();
    let rich = create(&Spec::new(), move |start| {
        memory.put(b"the secret");
        let file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut &file, b"the secret file").unwrap();
        copy_high(&file, 500);
        start.creator.switch(own_pid(), &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    let pid = i32::try_from(rich.switch(0, &[]).unwrap().word).unwrap();
    rich.restrict(&[]).unwrap();
    // It has a descriptor of the rich one, by its creator, and every right that its creator kept: none.
    let poor = create(&Spec::new(), move |start| {
        let mut found = open_ways(pid, address).join(" ");
        let mut try_it = |name: &str, refused: bool| {
            if !refused {
                found += " ";
                found += name;
            }
        };
        for how in [Overlay::Copy, Overlay::Share] {
            try_it("overlay", memory.overlay(rich, how).is_err());
        }
        for number in [0, 1, 500] {
            // SAFETY: refused; and nothing here needs what has these numbers.
            try_it("descriptor", unsafe { rich.overlay_descriptor(number) }.is_err());
        }
        for own in [FromCaller::default(), OWN_MEMORY] {
            let write = [1, address as u64, 10, 0, 0, 0];
            // SAFETY: at most, the kernel reads ten bytes that are mapped in both.
            try_it("syscall", unsafe { rich.syscall(own, call_number(libc::SYS_write), write) }.is_err());
        }
        try_it("rights", rich.restrict_to(&Rights::all()).is_ok());
        try_it("overlay afterwards", memory.overlay(rich, Overlay::Copy).is_err());
        try_it("copy in", rich.copy_in(address as u64, &mut [0; 10]).is_err());
        // SAFETY: refused; else it would write zeros to the page that is there for this.
        try_it("copy out", unsafe { rich.copy_out(address as u64, &[0; 10]) }.is_err());
        try_it("give", rich.give(std::os::fd::AsFd::as_fd(&std::io::stderr()), false).is_err());
        try_it("memory", memory.get() != *b"the secret");
        // What it inherited or shares with all others: no mapping, no file holds it.
        let everything = std::fs::read_to_string("/proc/self/maps").unwrap();
        for line in everything.lines().filter(|line| line.contains("rw-s")) {
            let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let [from, to] = [from, to].map(|text| usize::from_str_radix(text, 16).unwrap());
            let start = std::ptr::with_exposed_provenance::<u8>(from);
            // SAFETY: a mapping of this process's own, which is readable, and stays. Other contexts that have it are
            // parked; what the library's watchers may note there are numbers, and no part of what is looked for.
            let bytes = unsafe { std::slice::from_raw_parts(start, to - from) };
            try_it("a shared mapping", !bytes.windows(10).any(|window| window == b"the secret"));
        }
        for fd in 0..1024 {
            let mut bytes = [0_u8; 64];
            // SAFETY: writes at most as many bytes as the array has.
            let read = unsafe { libc::pread(fd, bytes.as_mut_ptr().cast(), bytes.len(), 0) };
            try_it("a file", read <= 0 || !bytes.starts_with(b"the secret"));
        }
        start.creator.switch(0, found.trim().as_bytes()).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(String::from_utf8(poor.switch(0, &[]).unwrap().bytes).unwrap(), "");
}

/// Threads of the calling process that may do more than an ordinary user's.
fn privileged_threads() -> String {
    let mut found = String::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let line = |name: &str| status.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        let users = line("Uid:") + &line("Gid:") + &line("Groups:");
        let is_root = users.split_whitespace().any(|word| word == "0");
        if is_root || !line("CapPrm:").ends_with("\t0000000000000000") {
            found += &format!("{users} {}\n", line("CapPrm:"));
        }
    }
    found
}

pub(crate) fn privileges_that_were_given_up_stay_nowhere() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("it takes root to give that up");
        return;
    }
    for dumpable in [false, true] {
        let other = create(&Spec::new().dumpable(dumpable), move |start| {
            let before = dumpable_behavior().unwrap() as i32;
            assert_eq!(before, i32::from(dumpable), "the watcher changed it");
            assert!(become_ordinary());
            start.creator.switch(0, privileged_threads().as_bytes()).unwrap();
            unreachable!();
        })
        .unwrap();
        let arrival = other.switch(0, &[]).unwrap();
        assert_eq!(String::from_utf8(arrival.bytes).unwrap(), "");
    }
}
