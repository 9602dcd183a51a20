//! What contexts are to each other, and how they end.
//!
//! Contexts belong to a process, and end with it, so each case is a process of its own: this program runs itself once for
//! each case.

#![expect(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, reason = "tests of system calls")]

use std::convert::Infallible;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use orrery_domain::End;
use orrery_lwc::context::{
    Calls, Context, Created, Error, Overlay, Own, ROOM, Rights, Spec, Start, create, create_here,
    remove_overlay,
};
use orrery_lwc::vault::Vault;

const PAGE: usize = 4096;

orrery_testing::cases![
    seconds = 60, trackers = &[];
    control_goes_back_and_forth,
    a_switch_carries_bytes,
    create_returns_in_both,
    memory_is_a_copy,
    shared_memory_is_one,
    unmapped_memory_is_gone,
    shared_memory_stays_from_other_contexts,
    descriptors_are_copies,
    descriptors_may_be_withheld,
    credentials_are_its_own,
    callers_are_known,
    contexts_nest,
    many_come_and_go,
    a_closed_context_ends,
    a_plain_close_ends_it,
    it_lives_while_anybody_holds_it,
    the_root_may_be_closed,
    exit_ends_the_program,
    exit_of_a_nested_context_ends_the_program,
    a_killed_context_is_an_error,
    a_fault_is_an_error,
    contexts_die_at_any_moment,
    nested_contexts_die_at_any_moment,
    a_killed_caller_leaves_control_to_the_root,
    another_program_is_an_error,
    time_limits_hold,
    the_roots_death_ends_all,
    wait_sees_no_context,
    signals_go_to_the_root,
    a_handler_may_not_switch_from_within,
    threads_are_refused,
    a_forked_process_has_its_own,
    closed_names_are_refused,
    senseless_specifications_are_refused,
    without_descriptors_nothing_is_made,
    memory_is_overlaid_by_copy,
    memory_is_overlaid_by_sharing,
    overlays_need_rights,
    rights_only_narrow,
    a_context_is_closed_to_its_like,
    withheld_calls_fail,
    calls_are_trapped,
    a_trapped_open_is_performed_by_the_parent,
    a_dead_context_is_no_longer_heard,
    only_the_parent_answers,
    calls_of_others_it_made_are_refused,
    a_flood_of_traps_is_answered,
    an_asked_context_cannot_trap,
    a_stopped_context_holds_nobody_up,
    orphans_are_told_of,
    rights_do_not_come_by_other_ways,
    calls_are_made_for_a_parked_context,
    calls_need_rights,
    a_monitor_makes_the_calls_it_allows,
    a_monitor_needs_no_privilege,
    descriptors_are_overlaid,
    a_vault_serves,
    a_vault_keeps_its_secret,
    a_vault_that_panics_is_dead,
    a_vault_that_cannot_load_says_why,
];

/// Returns to every caller what `answer` makes of its value.
fn server(answer: impl Fn(u64) -> u64 + 'static) -> impl FnOnce(Start) -> Infallible {
    move |start| {
        let mut arrival = start.arrival;
        loop {
            arrival = arrival.caller.switch(answer(arrival.word), &[]).unwrap();
        }
    }
}

/// The case's own process made a root elsewhere: runs `root` in a forked child; gives its wait status.
fn in_child(root: impl FnOnce()) -> i32 {
    match unsafe { libc::fork() } {
        0 => {
            root();
            unsafe { libc::_exit(99) }
        }
        pid => {
            let mut status = 0;
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            status
        }
    }
}

fn mapped(pages: usize) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, protection, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    start.cast()
}

/// Memory that root and contexts share in the kernel's own way.
fn shared_words() -> &'static [AtomicU64; 8] {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let start = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, protection, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    unsafe { &*start.cast() }
}

fn own_pid() -> u64 {
    u64::from(std::process::id())
}

fn is_running(pid: u64) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    !status.rsplit(')').next().unwrap().trim_start().starts_with(['Z', 'X'])
}

fn await_end_of(pid: u64) {
    let start = Instant::now();
    while is_running(pid) {
        assert!(start.elapsed() < Duration::from_secs(20), "process {pid} goes on");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn is_mapped(address: *const u8) -> bool {
    let mut pipe = [0; 2];
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let there = unsafe { libc::write(pipe[1], address.cast(), 1) } == 1;
    unsafe { libc::close(pipe[0]) };
    unsafe { libc::close(pipe[1]) };
    there
}

fn control_goes_back_and_forth() {
    let other = create(&Spec::new(), |start| {
        assert_eq!(start.creator, start.arrival.caller);
        let mut arrival = start.arrival;
        let mut sum = 0;
        loop {
            sum += arrival.word;
            arrival = arrival.caller.switch(sum, &[]).unwrap();
        }
    })
    .unwrap();
    let mut sum = 0;
    for word in 0..20_000 {
        sum += word;
        let back = other.switch(word, &[]).unwrap();
        assert_eq!(back.word, sum);
        assert_eq!(back.caller, other);
    }
    other.close().unwrap();
}

fn a_switch_carries_bytes() {
    let other = create(&Spec::new(), |start| {
        let mut arrival = start.arrival;
        loop {
            arrival.bytes.reverse();
            arrival = arrival.caller.switch(0, &arrival.bytes).unwrap();
        }
    })
    .unwrap();
    for length in [0, 1, 5, 4096, ROOM] {
        let sent: Vec<u8> = (0..length).map(|index| u8::try_from(index % 251).unwrap()).collect();
        let mut back = other.switch(0, &sent).unwrap().bytes;
        back.reverse();
        assert_eq!(back, sent);
    }
    let refused = other.switch(0, &vec![0; ROOM + 1]).unwrap_err();
    assert_eq!(refused, Error::TooLong { bytes: ROOM + 1, room: ROOM });
    assert_eq!(other.switch(0, b"ok").unwrap().bytes, b"ko");
}

fn create_returns_in_both() {
    let mut local = 1;
    match create_here(&Spec::new()).unwrap() {
        Created::Creator(other) => {
            local += 10;
            let back = other.switch(5, &[]).unwrap();
            assert_eq!((back.word, local), (106, 11));
        }
        Created::Context(start) => {
            local += 100;
            start.creator.switch(start.arrival.word + local, &[]).unwrap();
            unreachable!();
        }
    }
}

fn memory_is_a_copy() {
    static GLOBAL: AtomicU64 = AtomicU64::new(1);
    let mut boxed = Box::new(1_u64);
    let other = create(&Spec::new(), |start| {
        let mut arrival = start.arrival;
        loop {
            GLOBAL.fetch_add(arrival.word, Ordering::SeqCst);
            *boxed += arrival.word;
            arrival = arrival.caller.switch(GLOBAL.load(Ordering::SeqCst) * 1000 + *boxed, &[]).unwrap();
        }
    })
    .unwrap();
    GLOBAL.store(500, Ordering::SeqCst);
    *boxed = 500;
    assert_eq!(other.switch(1, &[]).unwrap().word, 2002);
    assert_eq!(other.switch(1, &[]).unwrap().word, 3003);
    assert_eq!((GLOBAL.load(Ordering::SeqCst), *boxed), (500, 500));
}

fn shared_memory_is_one() {
    let memory = mapped(4);
    unsafe { memory.add(PAGE).write(7) };
    // The two pages in the middle; those beside stay private.
    let spec = unsafe { Spec::new().share(memory.add(PAGE), 2 * PAGE) };
    let address = memory.expose_provenance();
    let other = create(&spec, move |start| {
        let memory = std::ptr::with_exposed_provenance_mut::<u8>(address);
        let mut arrival = start.arrival;
        loop {
            let there = unsafe { memory.add(PAGE).read_volatile() };
            for page in 0..4 {
                unsafe { memory.add(page * PAGE + 1).write_volatile(9) };
            }
            arrival = arrival.caller.switch(u64::from(there), &[]).unwrap();
        }
    })
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 7);
    let seen: Vec<u8> = (0..4).map(|page| unsafe { memory.add(page * PAGE + 1).read_volatile() }).collect();
    assert_eq!(seen, [0, 9, 9, 0]);
    unsafe { memory.add(PAGE).write_volatile(8) };
    assert_eq!(other.switch(0, &[]).unwrap().word, 8);
}

fn unmapped_memory_is_gone() {
    let memory = mapped(3);
    unsafe { memory.write_bytes(1, 3 * PAGE) };
    let spec = unsafe { Spec::new().unmap(memory.add(PAGE), PAGE) };
    let address = memory.expose_provenance();
    let other = create(
        &spec,
        server(move |page| {
            let memory = std::ptr::with_exposed_provenance::<u8>(address);
            u64::from(is_mapped(unsafe { memory.add(usize::try_from(page).unwrap() * PAGE) }))
        }),
    )
    .unwrap();
    let seen: Vec<u64> = (0..3).map(|page| other.switch(page, &[]).unwrap().word).collect();
    assert_eq!(seen, [1, 0, 1]);
    assert!(is_mapped(unsafe { memory.add(PAGE) }));
}

fn shared_memory_stays_from_other_contexts() {
    let memory = mapped(1);
    let address = memory.expose_provenance();
    let peek =
        move |_| u64::from(unsafe { std::ptr::with_exposed_provenance::<u8>(address).read_volatile() });
    let insider = create(&unsafe { Spec::new().share(memory, PAGE) }, server(peek)).unwrap();
    unsafe { memory.write_volatile(3) };
    let outsider = create(&Spec::new(), server(peek)).unwrap();
    unsafe { memory.write_volatile(4) };
    assert_eq!(insider.switch(0, &[]).unwrap().word, 4);
    assert_eq!(outsider.switch(0, &[]).unwrap().word, 3, "a copy as of its creation");
    let files = create(
        &Spec::new(),
        server(|_| {
            let links = std::fs::read_dir("/proc/self/fd").unwrap();
            let shared = |link: &std::path::Path| {
                std::fs::read_link(link).is_ok_and(|to| to.to_string_lossy().contains("orrery-shared"))
            };
            u64::try_from(links.filter(|link| shared(&link.as_ref().unwrap().path())).count()).unwrap()
        }),
    )
    .unwrap();
    assert_eq!(files.switch(0, &[]).unwrap().word, 0, "nor the file behind it");
}

fn descriptors_are_copies() {
    let file = tempfile::tempfile().unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    let other = create(&Spec::new(), server(move |_| u64::from(unsafe { libc::close(fd) } == 0))).unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 1);
    assert_eq!(other.switch(0, &[]).unwrap().word, 0);
    assert!(file.metadata().is_ok(), "the creator's stays");
}

fn descriptors_may_be_withheld() {
    let (a, b) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let [a, b] = [&a, &b].map(|file| u32::try_from(std::os::fd::AsRawFd::as_raw_fd(file)).unwrap());
    let first = create(&Spec::new(), server(|word| word)).unwrap();
    let known = first;
    let spec = Spec::new().close_descriptors(3, b - 1).close_descriptors(b + 1, u32::MAX);
    let other = create(&spec, move |start| {
        let mut arrival = start.arrival;
        loop {
            let word = if arrival.word == 0 {
                u64::from(known.switch(1, &[]).is_ok())
            } else {
                let fd = i32::try_from(arrival.word).unwrap();
                u64::from(unsafe { libc::fcntl(fd, libc::F_GETFD) } != -1)
            };
            arrival = arrival.caller.switch(word, &[]).unwrap();
        }
    })
    .unwrap();
    assert_eq!(other.switch(u64::from(a), &[]).unwrap().word, 0);
    assert_eq!(other.switch(u64::from(b), &[]).unwrap().word, 1);
    assert_eq!(other.switch(0, &[]).unwrap().word, 0, "nor the contexts that they named");
    assert_eq!(first.switch(6, &[]).unwrap().word, 6);
}

fn credentials_are_its_own() {
    if unsafe { libc::geteuid() } != 0 {
        orrery_testing::skipped!("only root changes its user");
        return;
    }
    let other = create(
        &Spec::new(),
        server(|_| {
            if unsafe { libc::geteuid() } == 0 {
                assert_eq!(unsafe { libc::setresuid(65534, 65534, 65534) }, 0);
            }
            u64::from(unsafe { libc::geteuid() })
        }),
    )
    .unwrap();
    for _ in 0..3 {
        assert_eq!(other.switch(0, &[]).unwrap().word, 65534);
        assert_eq!(unsafe { libc::geteuid() }, 0);
    }
}

fn callers_are_known() {
    let last = create(&Spec::new(), server(|word| word + 1000)).unwrap();
    // A context that knows `last` by its creator's descriptor: `last` has never heard of it.
    let middle = create(&Spec::new(), move |start| {
        let mut arrival = start.arrival;
        loop {
            let there = last.switch(arrival.word, &[]).unwrap();
            assert_eq!(there.caller, last);
            arrival = start.creator.switch(there.word + 1, &[]).unwrap();
        }
    })
    .unwrap();
    for word in 0..200 {
        let back = middle.switch(word, &[]).unwrap();
        assert_eq!((back.word, back.caller), (word + 1001, middle));
        let back = last.switch(word, &[]).unwrap();
        assert_eq!((back.word, back.caller), (word + 1000, last));
    }
    // Once round: root, first, second, root.
    let second = create(&Spec::new(), |start| {
        let mut arrival = start.arrival;
        loop {
            arrival = start.creator.switch(arrival.word * 2, &[]).unwrap();
        }
    })
    .unwrap();
    let first = create(&Spec::new(), move |start| {
        let mut arrival = start.arrival;
        loop {
            arrival = second.switch(arrival.word + 1, &[]).unwrap();
        }
    })
    .unwrap();
    for word in 0..200 {
        let back = first.switch(word, &[]).unwrap();
        assert_eq!((back.word, back.caller), ((word + 1) * 2, second));
    }
}

fn contexts_nest() {
    fn level(start: Start) -> Infallible {
        let depth = start.arrival.word;
        let below = (depth > 0).then(|| {
            let below = create(&Spec::new(), level).unwrap();
            below.switch(depth - 1, &[]).unwrap();
            below
        });
        let mut arrival = start.creator.switch(depth, &[]).unwrap();
        loop {
            let sum = below.map_or(0, |below| below.switch(arrival.word, &[]).unwrap().word);
            arrival = start.creator.switch(sum + arrival.word, &[]).unwrap();
        }
    }
    let top = create(&Spec::new(), level).unwrap();
    top.switch(5, &[]).unwrap();
    assert_eq!(top.switch(3, &[]).unwrap().word, 18);
    assert_eq!(top.switch(4, &[]).unwrap().word, 24);
}

fn many_come_and_go() {
    let fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let children = || {
        std::fs::read_to_string(format!("/proc/self/task/{}/children", std::process::id()))
            .map_or(0, |text| text.split_whitespace().count())
    };
    create(&Spec::new(), server(|word| word)).unwrap().close().unwrap();
    let before = fds();
    for round in 0..300 {
        let other = create(&Spec::new(), server(|word| word + 1)).unwrap();
        assert_eq!(other.switch(round, &[]).unwrap().word, round + 1);
        other.close().unwrap();
    }
    assert!(fds() < before + 30, "{} descriptors after {before}", fds());
    assert!(children() < 10, "{} children", children());
    let all: Vec<Context> = (0..60).map(|_| create(&Spec::new(), server(|word| word)).unwrap()).collect();
    for (index, context) in all.iter().enumerate() {
        assert_eq!(context.switch(index as u64, &[]).unwrap().word, index as u64);
    }
}

fn a_closed_context_ends() {
    let other = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = other.switch(0, &[]).unwrap().word;
    assert!(is_running(pid) && pid != own_pid());
    other.close().unwrap();
    await_end_of(pid);
    let unborn = create(&Spec::new(), server(|word| word)).unwrap();
    unborn.close().unwrap();
}

fn a_plain_close_ends_it() {
    let other = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = other.switch(0, &[]).unwrap().word;
    assert_eq!(unsafe { libc::close(other.descriptor()) }, 0);
    await_end_of(pid);
    assert!(matches!(other.switch(0, &[]), Err(Error::Gone { .. } | Error::NoContext { .. })));
    assert!(matches!(Context::of_descriptor(other.descriptor()), Err(Error::NoContext { .. })));
}

fn it_lives_while_anybody_holds_it() {
    let held = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = held.switch(0, &[]).unwrap().word;
    let holder = create(
        &Spec::new(),
        server(move |word| match word {
            0 => held.switch(0, &[]).unwrap().word,
            _ => u64::from(held.close().is_ok()),
        }),
    )
    .unwrap();
    held.close().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(holder.switch(0, &[]).unwrap().word, pid, "the other holder's descriptor keeps it");
    assert_eq!(holder.switch(1, &[]).unwrap().word, 1);
    await_end_of(pid);
}

/// The paper's Algorithm 1: the first state is closed by the second, that one by the third, and so on.
fn the_root_may_be_closed() {
    fn snapshot() -> Context {
        loop {
            match create_here(&Spec::new()).unwrap() {
                Created::Creator(snap) => return snap,
                Created::Context(start) => start.arrival.caller.close().unwrap(),
            }
        }
    }
    let words = shared_words();
    let status = in_child(|| {
        let mut state = 0;
        let snap = snapshot();
        state += 1;
        let round = words[0].fetch_add(1, Ordering::SeqCst);
        words[1].fetch_add(state, Ordering::SeqCst);
        if round == 20 {
            std::process::exit(17);
        }
        let _ = snap.switch(0, &[]);
        unreachable!();
    });
    assert_eq!(libc::WEXITSTATUS(status), 17);
    assert_eq!((words[0].load(Ordering::SeqCst), words[1].load(Ordering::SeqCst)), (21, 21));
}

fn exit_ends_the_program() {
    for status in [0, 7] {
        let got = in_child(|| {
            let other = create(&Spec::new(), move |_| std::process::exit(status)).unwrap();
            let _ = other.switch(0, &[]);
            unsafe { libc::_exit(98) };
        });
        assert!(libc::WIFEXITED(got) && libc::WEXITSTATUS(got) == status, "{got:#x}");
    }
}

fn exit_of_a_nested_context_ends_the_program() {
    let words = shared_words();
    let got = in_child(|| {
        let other = create(&Spec::new(), |_| {
            words[0].store(own_pid(), Ordering::SeqCst);
            let inner = create(&Spec::new(), |_| std::process::exit(5)).unwrap();
            let _ = inner.switch(0, &[]);
            unsafe { libc::_exit(97) };
        })
        .unwrap();
        let _ = other.switch(0, &[]);
        unsafe { libc::_exit(98) };
    });
    assert_eq!(libc::WEXITSTATUS(got), 5);
    await_end_of(words[0].load(Ordering::SeqCst));
}

fn a_killed_context_is_an_error() {
    let other = create(
        &Spec::new(),
        server(|word| {
            if word == 1 {
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            }
            word
        }),
    )
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 0);
    let died = other.switch(1, &[]).unwrap_err();
    let descriptor = other.descriptor();
    assert_eq!(died, Error::Died { descriptor, end: End::Killed { signal: libc::SIGKILL } });
    assert_eq!(other.switch(0, &[]).unwrap_err(), Error::Gone { descriptor });
    other.close().unwrap();
    // Killed while parked.
    let parked = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = parked.switch(0, &[]).unwrap().word;
    unsafe { libc::kill(i32::try_from(pid).unwrap(), libc::SIGKILL) };
    await_end_of(pid);
    assert!(matches!(parked.switch(0, &[]), Err(Error::Gone { .. } | Error::Died { .. })));
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    assert_eq!(other.switch(3, &[]).unwrap().word, 3, "the program goes on");
}

fn a_fault_is_an_error() {
    let other = create(
        &Spec::new(),
        server(|_| {
            unsafe { std::ptr::with_exposed_provenance_mut::<u64>(8).write_volatile(1) };
            0
        }),
    )
    .unwrap();
    let died = other.switch(0, &[]).unwrap_err();
    assert!(died.to_string().contains("SIGSEGV"), "{died}");
}

/// Kills a process from outside, after so many microseconds.
fn kill_after(victim: u64, delay: u64) -> i32 {
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        std::thread::sleep(Duration::from_micros(delay));
        unsafe { libc::kill(i32::try_from(victim).unwrap(), libc::SIGKILL) };
        unsafe { libc::_exit(0) };
    }
    pid
}

fn reap(pid: i32) {
    assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
}

fn contexts_die_at_any_moment() {
    for round in 0..150 {
        let other =
            create(&Spec::new(), server(|word| if word == 0 { own_pid() } else { word + 1 })).unwrap();
        let killer = kill_after(other.switch(0, &[]).unwrap().word, round * 37 % 2_000);
        let error = (1..).find_map(|word| match other.switch(word, &[]) {
            Ok(back) => {
                assert_eq!(back.word, word + 1);
                None
            }
            Err(error) => Some(error),
        });
        assert!(matches!(error, Some(Error::Died { .. } | Error::Gone { .. })), "{error:?}");
        other.close().unwrap();
        reap(killer);
    }
}

fn nested_contexts_die_at_any_moment() {
    for round in 0..12 {
        let words = shared_words();
        let middle = create(&Spec::new(), move |start| {
            let last =
                create(&Spec::new(), server(|word| if word == 0 { own_pid() } else { word + 1 })).unwrap();
            words[0].store(own_pid(), Ordering::SeqCst);
            words[1].store(last.switch(0, &[]).unwrap().word, Ordering::SeqCst);
            let mut arrival = start.arrival;
            loop {
                let word = last.switch(arrival.word, &[]).map_or(0, |back| back.word);
                arrival = start.creator.switch(word, &[]).unwrap();
            }
        })
        .unwrap();
        assert_eq!(middle.switch(1, &[]).unwrap().word, 2);
        let victim = words[usize::from(round % 2 == 1)].load(Ordering::SeqCst);
        let killer = kill_after(victim, round * 171 % 2_000);
        let outcome = (1..).find_map(|word| match middle.switch(word, &[]) {
            Ok(back) if back.word == 0 => Some(None),
            Ok(back) => {
                assert_eq!(back.word, word + 1);
                None
            }
            Err(error) => Some(Some(error)),
        });
        match outcome.unwrap() {
            // The one behind it died, and it told.
            None => assert_eq!(round % 2, 1),
            Some(error) => {
                assert!(
                    matches!(error, Error::Died { .. } | Error::Gone { .. } | Error::Orphaned),
                    "{error}"
                );
            }
        }
        middle.close().unwrap();
        reap(killer);
        await_end_of(words[0].load(Ordering::SeqCst));
        await_end_of(words[1].load(Ordering::SeqCst));
    }
}

fn a_killed_caller_leaves_control_to_the_root() {
    let middle = create(&Spec::new(), |_| {
        let pid = unsafe { libc::getpid() };
        let last = create(&Spec::new(), move |_| {
            unsafe { libc::kill(pid, libc::SIGKILL) };
            await_end_of(pid.try_into().unwrap());
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            unreachable!();
        })
        .unwrap();
        last.switch(0, &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(middle.switch(0, &[]).unwrap_err(), Error::Orphaned);
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    assert_eq!(other.switch(3, &[]).unwrap().word, 3);
}

fn another_program_is_an_error() {
    let other = create(&Spec::new(), |_| {
        let program = c"/bin/sleep";
        let arguments = [program.as_ptr(), c"100".as_ptr(), std::ptr::null()];
        unsafe { libc::execv(program.as_ptr(), arguments.as_ptr()) };
        unreachable!();
    })
    .unwrap();
    assert!(matches!(other.switch(0, &[]), Err(Error::Died { .. })));
}

fn time_limits_hold() {
    let other = create(
        &Spec::new(),
        server(|word| {
            if word == 1 {
                loop {
                    std::hint::spin_loop();
                }
            }
            own_pid()
        }),
    )
    .unwrap();
    let limit = Duration::from_millis(60);
    let pid = other.switch_within(0, &[], limit).unwrap().word;
    assert_eq!(other.switch_within(1, &[], limit).unwrap_err(), Error::TimedOut);
    await_end_of(pid);
    // The one that hangs is not the one that was switched to.
    let far = create(&Spec::new(), |start| {
        let inner = create(&Spec::new(), |_| {
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        })
        .unwrap();
        let outcome = inner.switch(0, &[]);
        start.creator.switch(u64::from(outcome.is_ok()), &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(far.switch_within(0, &[], limit).unwrap_err(), Error::TimedOut);
    let back = create(&Spec::new(), |start| {
        let refused = start.creator.switch_within(0, &[], Duration::from_secs(1)).unwrap_err();
        start.creator.switch(u64::from(refused == Error::RootLimit), &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(back.switch(0, &[]).unwrap().word, 1);
}

fn the_roots_death_ends_all() {
    let words = shared_words();
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let first = create(&Spec::new(), server(|_| own_pid())).unwrap();
        words[0].store(first.switch(0, &[]).unwrap().word, Ordering::SeqCst);
        let second = create(&Spec::new(), |_| {
            words[1].store(own_pid(), Ordering::SeqCst);
            words[2].store(1, Ordering::SeqCst);
            loop {
                std::hint::spin_loop();
            }
        })
        .unwrap();
        let _ = second.switch(0, &[]);
        unreachable!();
    }
    while words[2].load(Ordering::SeqCst) == 0 {
        std::thread::sleep(Duration::from_millis(2));
    }
    unsafe { libc::kill(pid, libc::SIGKILL) };
    await_end_of(words[0].load(Ordering::SeqCst));
    await_end_of(words[1].load(Ordering::SeqCst));
    let mut status = 0;
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
}

fn wait_sees_no_context() {
    let other = create(
        &Spec::new(),
        server(|word| {
            if word == 1 {
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            }
            word
        }),
    )
    .unwrap();
    let nothing = || {
        let mut status = 0;
        let waited = unsafe { libc::waitpid(-1, &raw mut status, 0) };
        waited == -1 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ECHILD)
    };
    assert!(nothing());
    other.switch(0, &[]).unwrap();
    assert!(nothing());
    other.switch(1, &[]).unwrap_err();
    assert!(nothing());
}

static CAUGHT: AtomicI32 = AtomicI32::new(0);

extern "C" fn count(_signal: i32) {
    CAUGHT.fetch_add(1, Ordering::SeqCst);
}

fn signals_go_to_the_root() {
    unsafe { libc::setpgid(0, 0) };
    unsafe { libc::signal(libc::SIGUSR1, count as extern "C" fn(i32) as usize) };
    let deaf = create(&Spec::new(), server(|_| CAUGHT.load(Ordering::SeqCst).unsigned_abs().into())).unwrap();
    let open = create(
        &Spec::new().shared_signals(true),
        server(|_| CAUGHT.load(Ordering::SeqCst).unsigned_abs().into()),
    )
    .unwrap();
    unsafe { libc::kill(0, libc::SIGUSR1) };
    // To a group a signal comes in no particular order.
    while CAUGHT.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    while open.switch(0, &[]).unwrap().word == 0 {}
    assert_eq!(deaf.switch(0, &[]).unwrap().word, 0);
}

static HANDLER: AtomicU64 = AtomicU64::new(0);
static OTHER: std::sync::OnceLock<Context> = std::sync::OnceLock::new();

extern "C" fn switch_in_handler(_signal: i32) {
    let refused = OTHER.get().map(|other| other.switch(0, &[]).unwrap_err());
    HANDLER.store(if refused == Some(Error::Busy) { 1 } else { 2 }, Ordering::SeqCst);
}

fn a_handler_may_not_switch_from_within() {
    let root = unsafe { libc::getpid() };
    let words = shared_words();
    unsafe { libc::signal(libc::SIGUSR1, switch_in_handler as extern "C" fn(i32) as usize) };
    let other = create(
        &Spec::new(),
        server(move |_| {
            // The root is parked in its switch.
            unsafe { libc::kill(root, libc::SIGUSR1) };
            std::thread::sleep(Duration::from_millis(50));
            words[0].fetch_add(1, Ordering::SeqCst)
        }),
    )
    .unwrap();
    OTHER.set(other).unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 0);
    assert_eq!(HANDLER.load(Ordering::SeqCst), 1);
    assert_eq!(words[0].load(Ordering::SeqCst), 1);
}

fn threads_are_refused() {
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        let _ = stopped.recv();
    });
    assert_eq!(create(&Spec::new(), server(|word| word)).unwrap_err(), Error::NotAlone { others: 1 });
    drop(stop);
    thread.join().unwrap();
    // The kernel may take a moment to forget the thread.
    let start = Instant::now();
    let other = loop {
        match create(&Spec::new(), server(|word| word)) {
            Ok(other) => break other,
            Err(Error::NotAlone { .. }) if start.elapsed() < Duration::from_secs(10) => {}
            Err(error) => panic!("{error}"),
        }
    };
    std::thread::spawn(move || assert_eq!(other.switch(0, &[]).unwrap_err(), Error::WrongThread))
        .join()
        .unwrap();
    assert_eq!(other.switch(4, &[]).unwrap().word, 4);
}

fn a_forked_process_has_its_own() {
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    let status = in_child(|| {
        assert_eq!(other.switch(0, &[]).unwrap_err(), Error::OtherProcess);
        let own = create(&Spec::new(), server(|word| word * 3)).unwrap();
        assert_eq!(own.switch(5, &[]).unwrap().word, 15);
        unsafe { libc::_exit(4) };
    });
    assert_eq!(libc::WEXITSTATUS(status), 4);
    assert_eq!(other.switch(2, &[]).unwrap().word, 2);
}

fn closed_names_are_refused() {
    let first = create(&Spec::new(), server(|word| word)).unwrap();
    first.close().unwrap();
    let descriptor = first.descriptor();
    assert_eq!(first.switch(0, &[]).unwrap_err(), Error::NoContext { descriptor });
    assert_eq!(first.close().unwrap_err(), Error::NoContext { descriptor });
    let second = create(&Spec::new(), server(|word| word + 1)).unwrap();
    assert_eq!(second.descriptor(), descriptor, "the number is used again");
    assert_eq!(first.switch(0, &[]).unwrap_err(), Error::NoContext { descriptor });
    assert_eq!(Context::of_descriptor(descriptor).unwrap(), second);
    assert!(matches!(Context::of_descriptor(0), Err(Error::NoContext { descriptor: 0 })));
}

fn senseless_specifications_are_refused() {
    let memory = mapped(4);
    // The library's own mappings may come to lie at the hole's end.
    let hole = mapped(1024);
    unsafe { libc::munmap(hole.cast(), 1024 * PAGE) };
    let nothing = hole.wrapping_add(512 * PAGE);
    let on_stack = 0_u8;
    let stack = (&raw const on_stack).map_addr(|address| address & !(PAGE - 1));
    let try_it = |spec: Spec| create(&spec, server(|word| word)).unwrap_err();
    assert!(matches!(try_it(unsafe { Spec::new().share(memory.add(1), PAGE) }), Error::Unaligned { .. }));
    assert!(matches!(try_it(unsafe { Spec::new().unmap(memory, 0) }), Error::Unaligned { .. }));
    assert!(matches!(try_it(Spec::new().may_access(PAGE, 5)), Error::Unaligned { .. }));
    assert!(matches!(try_it(Spec::new().close_descriptors(9, 3)), Error::Unaligned { .. }));
    let twice = unsafe { Spec::new().share(memory, 2 * PAGE).unmap(memory.add(PAGE), PAGE) };
    assert!(matches!(try_it(twice), Error::Overlap { .. }));
    assert!(matches!(try_it(unsafe { Spec::new().share(nothing, PAGE) }), Error::Memory { .. }));
    assert!(matches!(try_it(unsafe { Spec::new().share(stack, PAGE) }), Error::Memory { .. }));
    // A context that takes its own ground away dies at once, and alone.
    let here = (senseless_specifications_are_refused as fn() as *const u8).expose_provenance();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let bounds = maps.lines().filter_map(|line| line.split(' ').next().unwrap().split_once('-'));
    let (first, last) = bounds
        .map(|(first, last)| [first, last].map(|text| usize::from_str_radix(text, 16).unwrap()))
        .find_map(|[first, last]| (first <= here && here < last).then_some((first, last)))
        .unwrap();
    let code = std::ptr::with_exposed_provenance::<u8>(first);
    let ground = unsafe { Spec::new().unmap(code, last - first) };
    assert!(matches!(try_it(ground), Error::Birth { .. }));
    let shared = create(&unsafe { Spec::new().share(memory, 2 * PAGE) }, server(|word| word)).unwrap();
    assert!(matches!(try_it(unsafe { Spec::new().share(memory, PAGE) }), Error::Memory { .. }));
    assert_eq!(shared.switch(1, &[]).unwrap().word, 1);
}

fn without_descriptors_nothing_is_made() {
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    let mut taken = Vec::new();
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &libc::rlimit { rlim_cur: 40, rlim_max: 4096 }) };
    while let Ok(file) = std::fs::File::open("/dev/null") {
        taken.push(file);
    }
    for spare in 0..8 {
        taken.truncate(taken.len() - usize::from(spare > 0));
        let before = taken.len();
        match create(&Spec::new(), server(|word| word)) {
            Ok(made) => {
                made.close().unwrap();
                break;
            }
            Err(Error::System(_) | Error::Birth { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        let mut free = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            free.push(file);
        }
        assert_eq!(free.len(), spare, "with {before} taken: nothing is left over");
    }
    assert_eq!(other.switch(1, &[]).unwrap().word, 1);
}

fn memory_is_overlaid_by_copy() {
    let memory = mapped(2);
    unsafe { memory.write(5) };
    let address = memory.expose_provenance();
    let spec = Spec::new().may_access(0, usize::MAX & !(PAGE - 1));
    let other = create(&spec, move |start| {
        let memory = std::ptr::with_exposed_provenance_mut::<u8>(address);
        let mut arrival = start.arrival;
        loop {
            unsafe { arrival.caller.overlay(memory, PAGE, Overlay::Copy).unwrap() };
            let seen = unsafe { memory.read_volatile() };
            unsafe { memory.write_volatile(77) };
            unsafe { remove_overlay(memory, PAGE).unwrap() };
            assert!(!is_mapped(memory));
            assert!(matches!(unsafe { remove_overlay(memory, PAGE) }, Err(Error::Memory { .. })));
            arrival = arrival.caller.switch(u64::from(seen), &[]).unwrap();
        }
    })
    .unwrap();
    for value in [6, 7] {
        unsafe { memory.write_volatile(value) };
        assert_eq!(other.switch(0, &[]).unwrap().word, u64::from(value));
        assert_eq!(unsafe { memory.read_volatile() }, value, "writes stay with the copy");
    }
    // The creator has every right to its context.
    let theirs = create(&Spec::new(), move |start| {
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address).write_volatile(99) };
        start.creator.switch(0, &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    theirs.switch(0, &[]).unwrap();
    unsafe { theirs.overlay(memory, PAGE, Overlay::Copy).unwrap() };
    assert_eq!(unsafe { memory.read_volatile() }, 99);
}

fn memory_is_overlaid_by_sharing() {
    let memory = mapped(2);
    let address = memory.expose_provenance();
    let spec = Spec::new().may_access(address, 2 * PAGE);
    let other = create(&spec, move |start| {
        let memory = std::ptr::with_exposed_provenance_mut::<u8>(address);
        let mut arrival = start.arrival;
        loop {
            unsafe { arrival.caller.overlay(memory, PAGE, Overlay::Share).unwrap() };
            unsafe { memory.write_volatile(memory.read_volatile() + 1) };
            unsafe { remove_overlay(memory, PAGE).unwrap() };
            arrival = arrival.caller.switch(0, &[]).unwrap();
        }
    })
    .unwrap();
    for round in 0..50 {
        unsafe { memory.write_volatile(round) };
        unsafe { memory.add(PAGE).write_volatile(round) };
        other.switch(0, &[]).unwrap();
        assert_eq!(unsafe { memory.read_volatile() }, round + 1);
        assert_eq!(unsafe { memory.add(PAGE).read_volatile() }, round);
    }
    // What was given out is still no other context's.
    let outsider = create(
        &Spec::new(),
        server(move |_| {
            u64::from(unsafe { std::ptr::with_exposed_provenance::<u8>(address).read_volatile() })
        }),
    )
    .unwrap();
    unsafe { memory.write_volatile(200) };
    assert_eq!(outsider.switch(0, &[]).unwrap().word, 50);
}

fn overlays_need_rights() {
    let memory = mapped(3);
    let address = memory.expose_provenance();
    // The page in the middle.
    let spec = Spec::new().may_access(address + PAGE, PAGE);
    let other = create(&spec, move |start| {
        let memory = std::ptr::with_exposed_provenance_mut::<u8>(address);
        let attempts = [(0, 1), (0, 2), (1, 2), (2, 1), (0, 3), (1, 1)];
        let mut allowed = 0;
        for (index, (page, count)) in attempts.into_iter().enumerate() {
            for how in [Overlay::Copy, Overlay::Share] {
                match unsafe { start.creator.overlay(memory.add(page * PAGE), count * PAGE, how) } {
                    Ok(()) => allowed |= 1 << index,
                    Err(Error::Denied { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
        start.creator.switch(allowed, &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 1 << 5);
    let plain = create(&Spec::new(), move |start| {
        let memory = std::ptr::with_exposed_provenance_mut::<u8>(address);
        let denied = unsafe { start.creator.overlay(memory, PAGE, Overlay::Copy) };
        start.creator.switch(u64::from(matches!(denied, Err(Error::Denied { .. }))), &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(plain.switch(0, &[]).unwrap().word, 1);
    // With every right, what is not there still is not.
    unsafe { libc::munmap(memory.cast(), PAGE) };
    let gone = create(&Spec::new(), server(|word| word)).unwrap();
    assert!(matches!(unsafe { gone.overlay(memory, PAGE, Overlay::Copy) }, Err(Error::Memory { .. })));
    assert!(matches!(unsafe { gone.overlay(memory, PAGE, Overlay::Share) }, Err(Error::Memory { .. })));
    assert_eq!(gone.switch(1, &[]).unwrap().word, 1);
}

fn rights_only_narrow() {
    let memory = mapped(3);
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    let copy = |page: usize| unsafe { other.overlay(memory.add(page * PAGE), PAGE, Overlay::Copy) };
    let start = memory.addr();
    copy(0).unwrap();
    other.restrict(&[(start + PAGE, 2 * PAGE)]).unwrap();
    assert!(matches!(copy(0), Err(Error::Denied { .. })));
    copy(1).unwrap();
    other.restrict(&[(start, 2 * PAGE)]).unwrap();
    assert!(matches!(copy(0), Err(Error::Denied { .. })), "what was given up stays given up");
    copy(1).unwrap();
    assert!(matches!(copy(2), Err(Error::Denied { .. })));
    other.restrict(&[]).unwrap();
    assert!(matches!(copy(1), Err(Error::Denied { .. })));
    assert!(matches!(other.restrict(&[(1, 2)]), Err(Error::Unaligned { .. })));
    assert_eq!(other.switch(1, &[]).unwrap().word, 1);
}

/// Makes the calling process an ordinary user's, that others of the same user may look into.
fn become_ordinary() -> bool {
    if unsafe { libc::geteuid() } == 0 {
        let gone = unsafe { libc::setgroups(0, std::ptr::null()) } == 0
            && unsafe { libc::setresgid(65534, 65534, 65534) } == 0
            && unsafe { libc::setresuid(65534, 65534, 65534) } == 0;
        assert!(gone);
    }
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) == 0 }
}

/// Which of the kernel's ways into process `pid` are open: to its memory at `address`, its descriptors, its control.
fn open_ways(pid: i32, address: usize) -> Vec<&'static str> {
    let mut open = Vec::new();
    let mut byte = [0_u8; 8];
    let local = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 8 };
    let remote = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address), iov_len: 8 };
    if unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) } > 0 {
        open.push("process_vm_readv");
    }
    if unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) } > 0 {
        open.push("process_vm_writev");
    }
    for file in ["mem", "maps", "pagemap", "environ", "auxv", "syscall"] {
        use std::io::Read;
        let opened = std::fs::File::open(format!("/proc/{pid}/{file}"));
        // Some of them are refused at open, others at read.
        if let Ok(mut opened) = opened
            && (file == "mem" || opened.read(&mut byte).is_ok_and(|read| read > 0))
        {
            open.push(file);
        }
    }
    if std::fs::read_dir(format!("/proc/{pid}/fd")).is_ok() {
        open.push("fd");
    }
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd, 0, 0) } >= 0 {
        open.push("pidfd_getfd");
    }
    if unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) } == 0 {
        open.push("ptrace");
    }
    open
}

fn a_context_is_closed_to_its_like() {
    assert!(become_ordinary());
    let memory = mapped(1);
    let closed = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let open = create(&Spec::new().dumpable(true), server(|_| own_pid())).unwrap();
    let pid_of = |context: Context| i32::try_from(context.switch(0, &[]).unwrap().word).unwrap();
    assert_eq!(open_ways(pid_of(closed), memory.addr()), [""; 0]);
    if open_ways(pid_of(open), memory.addr()).is_empty() {
        println!("this kernel closes all processes to each other (Yama?): nothing to compare with");
    }
}

fn a_vault_serves() {
    let mut vault = Vault::new(
        || Ok::<_, std::io::Error>((0x5eed_u64, 0_u64)),
        |(secret, calls), input| {
            *calls += 1;
            let sum: u64 = input.iter().map(|byte| u64::from(*byte)).sum();
            [(*secret ^ sum).to_ne_bytes(), calls.to_ne_bytes()].concat()
        },
    )
    .unwrap();
    for call in 1_u64..=500 {
        let out = vault.call(&[1, 2, 3]).unwrap();
        assert_eq!(out[..8], (0x5eed_u64 ^ 6).to_ne_bytes());
        assert_eq!(out[8..], call.to_ne_bytes());
    }
    let pid = u64::try_from(vault.pid().as_raw_pid()).unwrap();
    assert!(matches!(vault.call(&vec![0; ROOM + 1]), Err(Error::TooLong { .. })));
    drop(vault);
    await_end_of(pid);
}

/// What the secret of the test below looks like in the program.
const SHIFTED: [u8; 24] = *b"ifdsfu.pg.uif.wbvmu.pomz";

/// The secret, made when called: nowhere else is it whole.
fn secret() -> Vec<u8> {
    std::hint::black_box(SHIFTED).iter().map(|byte| std::hint::black_box(*byte) - 1).collect()
}

fn a_vault_keeps_its_secret() {
    assert!(become_ordinary());
    let mut vault = Vault::new(
        || {
            let secret = secret();
            let words = secret.as_ptr().addr();
            Ok::<_, std::io::Error>((secret, words))
        },
        |(secret, at), input| match input {
            b"where" => at.to_ne_bytes().to_vec(),
            _ => vec![u8::from(secret == input)],
        },
    )
    .unwrap();
    let address = usize::from_ne_bytes(vault.call(b"where").unwrap().try_into().unwrap());
    let pid = vault.pid().as_raw_pid();
    assert_eq!(open_ways(pid, address), [""; 0]);
    // Nor does a capability lead there, nor does our own memory hold it.
    let context = vault.context();
    let page = std::ptr::with_exposed_provenance::<u8>(address & !(PAGE - 1));
    for how in [Overlay::Copy, Overlay::Share] {
        assert!(matches!(unsafe { context.overlay(page, PAGE, how) }, Err(Error::Denied { .. })));
    }
    context.restrict(&[(0, usize::MAX & !(PAGE - 1))]).unwrap();
    assert!(matches!(unsafe { context.overlay(page, PAGE, Overlay::Copy) }, Err(Error::Denied { .. })));
    assert!(!memory_holds_secret(), "the secret is in main's memory");
    let right = secret();
    assert_eq!(vault.call(&right).unwrap(), [1]);
    assert!(memory_holds_secret(), "what is there is found");
    assert_eq!(right.len(), 24);
}

/// Whether the calling process' readable memory holds the secret. Neither it nor what is read is whole anywhere here.
fn memory_holds_secret() -> bool {
    use std::os::unix::fs::FileExt;
    let shifted = std::hint::black_box(SHIFTED);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let memory = std::fs::File::open("/proc/self/mem").unwrap();
    let window = mapped(1);
    let mut looked = 0;
    for line in maps.lines().filter(|line| line.contains(" r") && !line.contains("[v")) {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let start = usize::from_str_radix(start, 16).unwrap();
        let end = usize::from_str_radix(end, 16).unwrap();
        let mut at = start;
        while at < end {
            let bytes = unsafe { std::slice::from_raw_parts_mut(window, PAGE) };
            let read = memory.read_at(bytes, at as u64).unwrap_or(0);
            let found = bytes[..read].windows(shifted.len()).position(|window| {
                window.iter().zip(shifted).all(|(byte, shifted)| byte.wrapping_add(1) == shifted)
            });
            if let Some(found) = found {
                println!("it is at {:#x} in {line}", at + found);
                return true;
            }
            looked += read;
            // Windows overlap, lest it lie across the end of one.
            at += PAGE - shifted.len();
        }
    }
    assert!(looked > 0, "nothing could be read");
    false
}

fn a_vault_that_panics_is_dead() {
    let mut vault = Vault::new(
        || Ok::<_, std::io::Error>(()),
        |(), input| {
            assert_ne!(input, b"panic");
            Vec::new()
        },
    )
    .unwrap();
    assert!(vault.call(b"").is_ok());
    assert!(matches!(vault.call(b"panic"), Err(Error::Died { .. })));
    assert!(matches!(vault.call(b""), Err(Error::Gone { .. })));
}

fn a_vault_that_cannot_load_says_why() {
    let refused = Vault::new(|| std::fs::read("/does/not/exist"), |secret, _| secret.clone()).unwrap_err();
    assert!(refused.to_string().contains("No such file"), "{refused}");
}

fn call_number(call: libc::c_long) -> u32 {
    u32::try_from(call).unwrap()
}

fn only(call: libc::c_long) -> Calls {
    Calls::none().with(call_number(call), call_number(call))
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

fn withheld_calls_fail() {
    let spec = Spec::new().withhold(&only(libc::SYS_getppid).or(&only(libc::SYS_uname)));
    let other = create(
        &spec,
        server(|word| {
            let ppid = unsafe { libc::getppid() };
            let mut name: libc::utsname = unsafe { std::mem::zeroed() };
            let uname = unsafe { libc::uname(&raw mut name) };
            let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, 0) };
            // Getting a parent's number is among what a context cannot do without.
            u64::from(ppid > 0 && uname == -1 && ring == -1 && errno() == libc::EPERM) + word
        }),
    )
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 1);
    // A thread that it makes has no more than itself.
    let other = create(
        &Spec::new().withhold(&only(libc::SYS_uname)),
        server(|_| {
            let thread = std::thread::spawn(|| {
                let mut name: libc::utsname = unsafe { std::mem::zeroed() };
                unsafe { libc::uname(&raw mut name) }
            });
            u64::from(thread.join().unwrap() == -1)
        }),
    )
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 1);
}

fn uname_of(other: Context, mut arrival: orrery_lwc::context::Arrival) -> u64 {
    while let Some(call) = arrival.call {
        assert_eq!(call.number, call_number(libc::SYS_uname));
        arrival = other.switch((-i64::from(libc::ENOTTY)).cast_unsigned(), &[]).unwrap();
    }
    arrival.word
}

fn calls_are_trapped() {
    let other = create(
        &Spec::new().withhold(&only(libc::SYS_getpgid).or(&only(libc::SYS_uname))).trap(true),
        server(|word| {
            let answer = unsafe { libc::syscall(libc::SYS_getpgid, word, 2, 3, 4, 5, 6) };
            if answer == -1 { u64::from(errno().unsigned_abs()) + 1000 } else { answer.cast_unsigned() }
        }),
    )
    .unwrap();
    for round in 0..200 {
        let arrival = other.switch(round, &[]).unwrap();
        let call = arrival.call.unwrap();
        assert_eq!(arrival.caller, other);
        assert_eq!((call.number, call.arguments), (call_number(libc::SYS_getpgid), [round, 2, 3, 4, 5, 6]));
        // Performed otherwise, refused, and let go on.
        let back = match round % 3 {
            0 => (other.switch(4242, &[]).unwrap(), 4242),
            1 => (other.switch((-i64::from(libc::EDOM)).cast_unsigned(), &[]).unwrap(), 1033),
            _ => {
                let none = i32::try_from(round).unwrap();
                let real = unsafe { libc::getpgid(none) };
                let expected = if real == -1 {
                    u64::from(errno().unsigned_abs()) + 1000
                } else {
                    real.unsigned_abs().into()
                };
                (other.proceed().unwrap(), expected)
            }
        };
        assert_eq!((back.0.word, back.0.call), (back.1, None), "round {round}");
    }
    assert_eq!(other.proceed().unwrap_err(), Error::NoCall { descriptor: other.descriptor() });
    let arrival = other.switch(0, &[]).unwrap();
    assert!(arrival.call.is_some());
    assert!(matches!(other.switch(0, b"x"), Err(Error::TooLong { .. })));
    assert!(matches!(unsafe { other.overlay(mapped(1), PAGE, Overlay::Copy) }, Err(Error::Stopped { .. })));
    assert_eq!(uname_of(other, other.switch(7, &[]).unwrap()), 7);
    other.close().unwrap();
}

fn a_trapped_open_is_performed_by_the_parent() {
    let allowed = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(allowed.path(), "what it may read").unwrap();
    let path = allowed.path().to_owned();
    let child_path = path.clone();
    let other = create(&Spec::new().trap(true), move |start| {
        let mut arrival = start.arrival;
        loop {
            let path =
                if arrival.word == 0 { child_path.as_path() } else { std::path::Path::new("/etc/passwd") };
            let answer = match std::fs::read(path) {
                Ok(bytes) => bytes,
                Err(error) => format!("{:?}", error.kind()).into_bytes(),
            };
            arrival = arrival.caller.switch(0, &answer).unwrap();
        }
    })
    .unwrap();
    let serve = |word| {
        let mut arrival = other.switch(word, &[]).unwrap();
        let mut asked = 0;
        while let Some(call) = arrival.call {
            let refused = (-i64::from(libc::EACCES)).cast_unsigned();
            let answer = if call.number == call_number(libc::SYS_openat) {
                asked += 1;
                let wanted = other.copy_path(call.arguments[1]).unwrap();
                if wanted.to_bytes() == path.as_os_str().as_encoded_bytes() {
                    let file = std::fs::File::open(&path).unwrap();
                    other.give(std::os::fd::AsFd::as_fd(&file), true).unwrap().unsigned_abs().into()
                } else {
                    refused
                }
            } else {
                // statx of an open file, which the names' set covers too.
                arrival = other.proceed().unwrap();
                continue;
            };
            arrival = other.switch(answer, &[]).unwrap();
        }
        assert_eq!(asked, 1);
        String::from_utf8(arrival.bytes).unwrap()
    };
    for _ in 0..20 {
        assert_eq!(serve(0), "what it may read");
        assert_eq!(serve(1), "PermissionDenied");
    }
    // Memory is the parent's to look into until it gives that up.
    let mut byte = [0];
    assert!(matches!(other.copy_in(8, &mut byte), Err(Error::Memory { .. })));
    let local = 77_u8;
    assert_eq!(other.copy_in((&raw const local).addr() as u64, &mut byte), Ok(1));
    other.restrict(&[]).unwrap();
    assert!(matches!(other.copy_in((&raw const local).addr() as u64, &mut byte), Err(Error::Denied { .. })));
}

fn a_dead_context_is_no_longer_heard() {
    let make = || {
        create(&Spec::new().withhold(&only(libc::SYS_uname)).trap(true), |start| {
            let mut arrival = start.arrival;
            let mut name: libc::utsname = unsafe { std::mem::zeroed() };
            loop {
                let word = match arrival.word {
                    0 => own_pid(),
                    1 => unsafe { libc::uname(&raw mut name) }.unsigned_abs().into(),
                    _ => unsafe { libc::kill(libc::getpid(), libc::SIGKILL) }.unsigned_abs().into(),
                };
                arrival = arrival.caller.switch(word, &[]).unwrap();
            }
        })
        .unwrap()
    };
    // Of its own hand; in a call; parked.
    let first = make();
    assert!(matches!(first.switch(2, &[]), Err(Error::Died { .. })));
    let second = make();
    let pid = i32::try_from(second.switch(0, &[]).unwrap().word).unwrap();
    assert!(second.switch(1, &[]).unwrap().call.is_some());
    unsafe { libc::kill(pid, libc::SIGKILL) };
    await_end_of(pid.unsigned_abs().into());
    assert!(matches!(second.switch(0, &[]), Err(Error::Died { .. } | Error::Gone { .. })));
    let third = make();
    let pid = i32::try_from(third.switch(0, &[]).unwrap().word).unwrap();
    unsafe { libc::kill(pid, libc::SIGKILL) };
    await_end_of(pid.unsigned_abs().into());
    assert!(matches!(third.switch(0, &[]), Err(Error::Died { .. } | Error::Gone { .. })));
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    assert_eq!(other.switch(5, &[]).unwrap().word, 5);
    // And a time limit ends one that stays in a call of its own.
    let fourth = create(
        &Spec::new().trap(true),
        server(|_| {
            loop {
                std::hint::spin_loop()
            }
        }),
    )
    .unwrap();
    assert_eq!(fourth.switch_within(0, &[], Duration::from_millis(40)).unwrap_err(), Error::TimedOut);
}

fn only_the_parent_answers() {
    let other = create(
        &Spec::new().withhold(&only(libc::SYS_uname)).trap(true),
        server(|_| {
            let mut name: libc::utsname = unsafe { std::mem::zeroed() };
            u64::from(unsafe { libc::uname(&raw mut name) } == 0)
        }),
    )
    .unwrap();
    let stranger = create(
        &Spec::new(),
        server(move |word| match word {
            0 => u64::from(matches!(other.switch(0, &[]), Err(Error::Stopped { .. }))),
            _ => {
                let mut byte = [0];
                let closed = matches!(other.copy_in(0, &mut byte), Err(Error::NoCall { .. }))
                    && matches!(other.proceed(), Err(Error::NoCall { .. }));
                let fds = std::fs::read_dir("/proc/self/fd").unwrap();
                let held = fds
                    .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
                    .filter(|to| to.to_string_lossy().contains("seccomp") || to.ends_with("mem"))
                    .count();
                u64::from(closed && held == 0)
            }
        }),
    )
    .unwrap();
    assert!(other.switch(0, &[]).unwrap().call.is_some());
    assert_eq!(stranger.switch(0, &[]).unwrap().word, 1);
    assert_eq!(stranger.switch(1, &[]).unwrap().word, 1);
    assert_eq!(other.proceed().unwrap().word, 1);
    // A trap reaches the parent whoever had switched there.
    let third = create(
        &Spec::new(),
        server(move |word| match other.switch(0, &[]) {
            Ok(back) => back.word + word,
            Err(_) => 99,
        }),
    )
    .unwrap();
    let arrival = third.switch(10, &[]).unwrap();
    assert_eq!((arrival.caller, arrival.call.is_some()), (other, true));
    assert_eq!(other.proceed().unwrap().word, 11);
}

fn calls_of_others_it_made_are_refused() {
    let other = create(
        &Spec::new().withhold(&only(libc::SYS_uname)).trap(true),
        server(|_| {
            let thread = std::thread::spawn(|| {
                let mut name: libc::utsname = unsafe { std::mem::zeroed() };
                if unsafe { libc::uname(&raw mut name) } == -1 { errno() } else { 0 }
            });
            thread.join().unwrap().unsigned_abs().into()
        }),
    )
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, u64::from(libc::EPERM.unsigned_abs()));
}

fn a_flood_of_traps_is_answered() {
    let other = create(
        &Spec::new().withhold(&only(libc::SYS_uname)).trap(true),
        server(|word| {
            let mut name: libc::utsname = unsafe { std::mem::zeroed() };
            (0..word).map(|_| unsafe { libc::syscall(libc::SYS_uname, &raw mut name) }.cast_unsigned()).sum()
        }),
    )
    .unwrap();
    let mut arrival = other.switch(5_000, &[]).unwrap();
    let mut count = 0;
    while arrival.call.is_some() {
        count += 1;
        arrival = other.switch(2, &[]).unwrap();
    }
    assert_eq!((count, arrival.word), (5_000, 10_000));
}

fn an_asked_context_cannot_trap() {
    // Sharing takes calls of the owner's library, which nobody could answer while it is waited for.
    let memory = mapped(1);
    let other =
        create(&Spec::new().withhold(&only(libc::SYS_memfd_create)).trap(true), server(|word| word)).unwrap();
    assert_eq!(other.switch(3, &[]).unwrap().word, 3);
    let refused = unsafe { other.overlay(memory, PAGE, Overlay::Copy) };
    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(other.switch(4, &[]).unwrap().word, 4);
}

fn written(file: &std::fs::File) -> String {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; 100];
    let read = file.read_at(&mut bytes, 0).unwrap();
    String::from_utf8(bytes[..read].to_vec()).unwrap()
}

const OWN_MEMORY: Own = Own { memory: true, descriptors: false, credentials: false };

fn calls_are_made_for_a_parked_context() {
    use std::os::fd::AsRawFd;
    let file = tempfile::tempfile().unwrap();
    let other = create(&Spec::new(), server(|word| if word == 0 { own_pid() } else { word })).unwrap();
    let pid = other.switch(0, &[]).unwrap().word;
    let call = |own, number, arguments| unsafe { other.syscall(own, call_number(number), arguments) };
    // All of it is the context's.
    assert_eq!(call(Own::default(), libc::SYS_getpid, [0; 6]), Ok(pid.cast_signed()));
    // Its descriptors, our memory: what it is told to open is open there and not here.
    let path = c"/etc/passwd";
    let open = [libc::AT_FDCWD.cast_unsigned().into(), path.as_ptr().addr() as u64, 0, 0, 0, 0];
    let there = call(OWN_MEMORY, libc::SYS_openat, open).unwrap();
    assert!(there >= 0);
    let number = i32::try_from(there).unwrap();
    assert_eq!(unsafe { libc::fcntl(number, libc::F_GETFD) }, -1, "not in our table");
    let mut buffer = [0_u8; 200_000];
    let read = [there.cast_unsigned(), buffer.as_mut_ptr().addr() as u64, buffer.len() as u64, 0, 0, 0];
    let passwd = std::fs::read("/etc/passwd").unwrap();
    let got = usize::try_from(call(OWN_MEMORY, libc::SYS_read, read).unwrap()).unwrap();
    assert_eq!(buffer[..got], passwd[..got]);
    assert!(got > 0 && buffer[got..].iter().all(|byte| *byte == 0));
    let write = [file.as_raw_fd().unsigned_abs().into(), c"hello".as_ptr().addr() as u64, 5, 0, 0, 0];
    assert_eq!(call(OWN_MEMORY, libc::SYS_write, write), Ok(5));
    assert_eq!(written(&file), "hello");
    // Its memory: the same address holds something else there.
    let memory = mapped(1);
    unsafe { memory.write(b'a') };
    let fresh = create(&Spec::new(), server(|word| word)).unwrap();
    unsafe { memory.write(b'b') };
    let write = [file.as_raw_fd().unsigned_abs().into(), memory.addr() as u64, 1, 5, 0, 0];
    assert_eq!(unsafe { fresh.syscall(Own::default(), call_number(libc::SYS_pwrite64), write) }, Ok(1));
    assert_eq!(written(&file), "helloa");
    // Errors are the call's.
    let nowhere = [99_999, memory.addr() as u64, 1, 0, 0, 0];
    assert_eq!(call(OWN_MEMORY, libc::SYS_write, nowhere), Ok(-i64::from(libc::EBADF)));
    let absent = [1, 8, 1, 0, 0, 0];
    assert!(call(OWN_MEMORY, libc::SYS_write, absent).is_err(), "nothing to copy");
    assert_eq!(call(Own::default(), libc::SYS_write, absent), Ok(-i64::from(libc::EFAULT)));
    assert!(matches!(call(Own::default(), libc::SYS_fork, [0; 6]), Err(Error::CallUnknown { .. })));
    assert!(matches!(call(OWN_MEMORY, libc::SYS_ioctl, [0; 6]), Err(Error::CallUnknown { .. })));
    // Ours alone: a call of our own.
    let ours = Own { memory: true, descriptors: true, credentials: true };
    assert_eq!(call(ours, libc::SYS_getpid, [0; 6]), Ok(own_pid().cast_signed()));
    other.close().unwrap();
}

fn calls_need_rights() {
    let uname = only(libc::SYS_uname);
    let spec = Spec::new().may_call(&only(libc::SYS_getpid));
    let child = create(&spec, move |start| {
        let call = |number| unsafe { start.creator.syscall(Own::default(), call_number(number), [0; 6]) };
        let allowed = call(libc::SYS_getpid);
        let denied = matches!(call(libc::SYS_getuid), Err(Error::CallDenied { .. }));
        let word = if denied { allowed.unwrap_or(0).cast_unsigned() } else { 0 };
        start.creator.switch(word, &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(child.switch(0, &[]).unwrap().word, own_pid());
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    let call = |number| unsafe { other.syscall(Own::default(), call_number(number), [0; 6]) };
    assert!(call(libc::SYS_getuid).is_ok());
    other.restrict_to(&Rights::none().calls(&only(libc::SYS_getpid).or(&uname))).unwrap();
    assert!(call(libc::SYS_getpid).is_ok());
    assert_eq!(
        call(libc::SYS_getuid).unwrap_err(),
        Error::CallDenied { descriptor: other.descriptor(), number: call_number(libc::SYS_getuid) }
    );
    other.restrict(&[]).unwrap();
    assert!(matches!(call(libc::SYS_getpid), Err(Error::CallDenied { .. })));
    // A context whose creator may not: the same where calls are trapped.
    let trapped = create(&Spec::new().withhold(&uname).trap(true), |_| {
        let mut name: libc::utsname = unsafe { std::mem::zeroed() };
        unsafe { libc::uname(&raw mut name) };
        unreachable!();
    })
    .unwrap();
    trapped.restrict_to(&Rights::all().calls(&Calls::none())).unwrap();
    trapped.restrict(&[]).unwrap();
    assert!(trapped.switch(0, &[]).unwrap().call.is_some());
    let denied = unsafe { trapped.syscall(OWN_MEMORY, call_number(libc::SYS_getpid), [0; 6]) };
    assert!(matches!(denied, Err(Error::CallDenied { .. })));
}

/// The paper's Algorithm 4: the parent makes the call for the child, with its own credentials.
fn a_monitor_makes_the_calls_it_allows() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("secret");
    std::fs::write(&path, "for the monitor's eyes").unwrap();
    let privileged = unsafe { libc::geteuid() } == 0;
    if privileged {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    }
    let wanted = path.clone();
    let child = create(&Spec::new().trap(true), move |start| {
        if privileged {
            assert_eq!(unsafe { libc::setresuid(65534, 65534, 65534) }, 0);
        }
        let mut arrival = start.arrival;
        loop {
            use std::io::Read;
            let mut text = String::new();
            let outcome = std::fs::File::open(&wanted).and_then(|mut file| file.read_to_string(&mut text));
            let word =
                if let Err(error) = outcome { error.raw_os_error().unwrap().unsigned_abs() } else { 0 };
            arrival = arrival.caller.switch(word.into(), text.as_bytes()).unwrap();
        }
    })
    .unwrap();
    let serve = |own: Own, target: &std::path::Path| {
        let mut arrival = child.switch(0, &[]).unwrap();
        while let Some(call) = arrival.call {
            let answer = if call.number == call_number(libc::SYS_openat) {
                let copy = child.copy_path(call.arguments[1]).unwrap();
                assert_eq!(copy.to_bytes(), path.as_os_str().as_encoded_bytes());
                if own.memory {
                    // On the copy that was looked at, or another one altogether.
                    let copy = std::ffi::CString::new(target.as_os_str().as_encoded_bytes()).unwrap();
                    let mut arguments = call.arguments;
                    arguments[1] = copy.as_ptr().addr() as u64;
                    unsafe { child.syscall(own, call.number, arguments) }.unwrap()
                } else {
                    unsafe { child.syscall(own, call.number, call.arguments) }.unwrap()
                }
            } else {
                unsafe {
                    child.syscall(Own { credentials: true, ..Own::default() }, call.number, call.arguments)
                }
                .unwrap_or(-i64::from(libc::ENOSYS))
            };
            arrival = child.switch(answer.cast_unsigned(), &[]).unwrap();
        }
        (arrival.word, String::from_utf8(arrival.bytes).unwrap())
    };
    let secret = || (0, "for the monitor's eyes".to_owned());
    let with_rights = Own { credentials: true, ..OWN_MEMORY };
    assert_eq!(serve(with_rights, &path), secret());
    assert_eq!(serve(Own { memory: false, ..with_rights }, &path), secret());
    let elsewhere = directory.path().join("decoy");
    std::fs::write(&elsewhere, "a decoy").unwrap();
    assert_eq!(serve(with_rights, &elsewhere), (0, "a decoy".to_owned()));
    // With the child's own credentials the kernel refuses.
    let expected = if privileged { libc::EACCES.unsigned_abs().into() } else { 0 };
    for own in [Own::default(), OWN_MEMORY] {
        assert_eq!(serve(own, &path).0, expected);
        assert_eq!(unsafe { libc::geteuid() } == 0, privileged, "ours are ours again");
    }
    assert_eq!(serve(with_rights, &path), secret());
}

fn a_monitor_needs_no_privilege() {
    assert!(become_ordinary());
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "text").unwrap();
    let path = file.path().to_owned();
    let child = create(&Spec::new().trap(true), move |start| {
        let text = std::fs::read(&path).unwrap_or_default();
        start.creator.switch(0, &text).unwrap();
        unreachable!();
    })
    .unwrap();
    let mut arrival = child.switch(0, &[]).unwrap();
    let mut opened = 0;
    while let Some(call) = arrival.call {
        arrival = if call.number == call_number(libc::SYS_openat) {
            opened += 1;
            let path = child.copy_path(call.arguments[1]).unwrap();
            assert_eq!(path.to_bytes(), file.path().as_os_str().as_encoded_bytes());
            let own = Own { credentials: true, ..Own::default() };
            let answer = unsafe { child.syscall(own, call.number, call.arguments) }.unwrap();
            child.switch(answer.cast_unsigned(), &[]).unwrap()
        } else {
            child.proceed().unwrap()
        };
    }
    assert_eq!((opened, arrival.bytes), (1, b"text".to_vec()));
    // A program that is closed to debuggers cannot look into its own copies.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    let refused = create(&Spec::new().trap(true), server(|word| word)).unwrap_err();
    assert!(matches!(refused, Error::Birth { .. }), "{refused}");
}

fn descriptors_are_overlaid() {
    use std::os::fd::{AsRawFd, FromRawFd};
    let ours = tempfile::tempfile().unwrap();
    let number = u32::try_from(ours.as_raw_fd()).unwrap();
    let spec = Spec::new().may_fetch(number, number);
    let other = create(&spec, move |start| {
        // Closes its copy, opens something of its own, and later has its creator's again.
        let fd = i32::try_from(number).unwrap();
        assert_eq!(unsafe { libc::close(fd) }, 0);
        let mut theirs = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut theirs, b"theirs").unwrap();
        let far = unsafe { libc::fcntl(theirs.as_raw_fd(), libc::F_DUPFD, 300) };
        drop(theirs);
        let mut arrival = start.creator.switch(far.unsigned_abs().into(), &[]).unwrap();
        let denied = unsafe { start.creator.overlay_descriptor(number + 1) };
        assert!(matches!(denied, Err(Error::Denied { .. })));
        unsafe { start.creator.overlay_descriptor(number) }.unwrap();
        let mut file = unsafe { std::fs::File::from_raw_fd(fd) };
        std::io::Write::write_all(&mut file, b"written by it").unwrap();
        arrival = arrival.caller.switch(0, &[]).unwrap();
        unreachable!("{arrival:?}");
    })
    .unwrap();
    let there = u32::try_from(other.switch(0, &[]).unwrap().word).unwrap();
    let spare = unsafe { libc::fcntl(ours.as_raw_fd(), libc::F_DUPFD, 200) };
    assert!(spare >= 200);
    other.switch(0, &[]).unwrap();
    assert_eq!(written(&ours), "written by it");
    unsafe { other.overlay_descriptor(there) }.unwrap();
    assert_eq!(written(&unsafe { std::fs::File::from_raw_fd(i32::try_from(there).unwrap()) }), "theirs");
    // What contexts live by stays.
    let own = u32::try_from(other.descriptor()).unwrap();
    assert!(matches!(unsafe { other.overlay_descriptor(own) }, Err(Error::System(_))));
    assert!(matches!(unsafe { other.overlay_descriptor(99_999) }, Err(Error::System(_))));
    other.restrict_to(&Rights::none().descriptors(0, 2)).unwrap();
    assert!(matches!(unsafe { other.overlay_descriptor(there) }, Err(Error::Denied { .. })));
}

fn a_stopped_context_holds_nobody_up() {
    let memory = mapped(1);
    let other = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = i32::try_from(other.switch(0, &[]).unwrap().word).unwrap();
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    let silent = Error::Silent { descriptor: other.descriptor() };
    assert_eq!(unsafe { other.overlay(memory, PAGE, Overlay::Copy) }.unwrap_err(), silent);
    assert_eq!(unsafe { other.syscall(Own::default(), 39, [0; 6]) }.unwrap_err(), silent);
    // Once it goes on, its late answer is nobody's, and it can still be switched to.
    unsafe { libc::kill(pid, libc::SIGCONT) };
    assert_eq!(other.restrict(&[]).unwrap_err(), silent);
    for _ in 0..20 {
        assert_eq!(other.switch(0, &[]).unwrap().word, u64::from(pid.unsigned_abs()));
    }
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    assert_eq!(other.switch_within(0, &[], Duration::from_millis(30)).unwrap_err(), Error::TimedOut);
    await_end_of(pid.unsigned_abs().into());
}

fn orphans_are_told_of() {
    // Whoever has control dies, after the one that waited for it.
    for round in 0..6_u64 {
        let middle = create(&Spec::new(), move |start| {
            let own = unsafe { libc::getpid() };
            let last = create(&Spec::new(), move |_| {
                unsafe { libc::kill(own, libc::SIGKILL) };
                await_end_of(own.unsigned_abs().into());
                std::thread::sleep(Duration::from_millis(round * 13));
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
                unreachable!();
            })
            .unwrap();
            last.switch(0, &[]).unwrap();
            unreachable!("{start:?}");
        })
        .unwrap();
        assert_eq!(middle.switch(0, &[]).unwrap_err(), Error::Orphaned);
        middle.close().unwrap();
    }
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    assert_eq!(other.switch(3, &[]).unwrap().word, 3);
}

/// What a context without a right could try on one that has something to hide.
fn rights_do_not_come_by_other_ways() {
    assert!(become_ordinary());
    let memory = mapped(1);
    unsafe { memory.write_bytes(0, PAGE) };
    let address = memory.addr();
    let rich = create(&Spec::new(), move |start| {
        let memory = std::ptr::with_exposed_provenance_mut::<u8>(address);
        unsafe { memory.copy_from(b"the secret".as_ptr(), 10) };
        let file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut &file, b"the secret file").unwrap();
        let far = unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&file), libc::F_DUPFD, 500) };
        assert!(far >= 500);
        start.creator.switch(own_pid(), &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    let _ = memory.expose_provenance();
    let pid = i32::try_from(rich.switch(0, &[]).unwrap().word).unwrap();
    rich.restrict(&[]).unwrap();
    // It has a descriptor of the rich one, by its creator, and every right that its creator kept: none.
    let poor = create(&Spec::new(), move |start| {
        let memory = std::ptr::with_exposed_provenance_mut::<u8>(address);
        let mut found = open_ways(pid, address).join(" ");
        let mut try_it = |name: &str, refused: bool| {
            if !refused {
                found += " ";
                found += name;
            }
        };
        for how in [Overlay::Copy, Overlay::Share] {
            try_it("overlay", unsafe { rich.overlay(memory, PAGE, how) }.is_err());
        }
        for number in [0, 1, 500] {
            try_it("descriptor", unsafe { rich.overlay_descriptor(number) }.is_err());
        }
        for own in [Own::default(), OWN_MEMORY] {
            let write = [1, address as u64, 10, 0, 0, 0];
            try_it("syscall", unsafe { rich.syscall(own, call_number(libc::SYS_write), write) }.is_err());
        }
        try_it("rights", rich.restrict_to(&Rights::all()).is_ok());
        try_it("overlay afterwards", unsafe { rich.overlay(memory, PAGE, Overlay::Copy) }.is_err());
        try_it("copy in", rich.copy_in(address as u64, &mut [0; 10]).is_err());
        try_it("copy out", unsafe { rich.copy_out(address as u64, &[0; 10]) }.is_err());
        try_it("give", rich.give(std::os::fd::AsFd::as_fd(&std::io::stderr()), false).is_err());
        try_it("memory", unsafe { memory.cast::<[u8; 10]>().read() } != *b"the secret");
        // What it inherited or shares with all others: no mapping, no file holds it.
        let everything = std::fs::read_to_string("/proc/self/maps").unwrap();
        for line in everything.lines().filter(|line| line.contains("rw-s")) {
            let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let [from, to] = [from, to].map(|text| usize::from_str_radix(text, 16).unwrap());
            let start = std::ptr::with_exposed_provenance::<u8>(from);
            let bytes = unsafe { std::slice::from_raw_parts(start, to - from) };
            try_it("a shared mapping", !bytes.windows(10).any(|window| window == b"the secret"));
        }
        for fd in 0..1024 {
            let mut bytes = [0_u8; 64];
            let read = unsafe { libc::pread(fd, bytes.as_mut_ptr().cast(), bytes.len(), 0) };
            try_it("a file", read <= 0 || !bytes.starts_with(b"the secret"));
        }
        start.creator.switch(0, found.trim().as_bytes()).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(String::from_utf8(poor.switch(0, &[]).unwrap().bytes).unwrap(), "");
}
