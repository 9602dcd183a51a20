//! System calls of one context that another one makes, or refuses.

use std::mem::MaybeUninit;
use std::time::Duration;

use orrery_context::{Calls, Error, FromCaller, Overlay, Rights, Spec, create};
use rustix::process::{DumpableBehavior, Signal, geteuid, set_dumpable_behavior};

use crate::pages::Pages;
use crate::support::{
    OWN_MEMORY, await_end_of, become_ordinary, call_number, die, errno, is_open, kill, only, own_pid, server,
    set_users, uname, uname_of, written,
};

pub(crate) fn withheld_calls_fail() {
    let spec = Spec::new().withhold(&only(libc::SYS_getppid).or(&only(libc::SYS_uname)));
    let other = create(
        &spec,
        server(|word| {
            let ppid = std::os::unix::process::parent_id().cast_signed();
            let named = uname();
            // SAFETY: reads a structure at address 0, where there is none: it would fail if it were made.
            let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, 0) };
            // Getting a parent's number is among what a context cannot do without.
            u64::from(ppid > 0 && named.is_err() && ring == -1 && errno() == libc::EPERM) + word
        }),
    )
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 1);
    // A thread that it makes has no more than itself.
    let other = create(
        &Spec::new().withhold(&only(libc::SYS_uname)),
        server(|_| {
            let thread = std::thread::spawn(|| uname().is_err());
            u64::from(thread.join().unwrap())
        }),
    )
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 1);
}

pub(crate) fn calls_are_trapped() {
    let other = create(
        &Spec::new().withhold(&only(libc::SYS_getpgid).or(&only(libc::SYS_uname))).trap(true),
        server(|word| {
            // SAFETY: the arguments are numbers, and getpgid(2) takes no pointer.
            let answer = unsafe { libc::syscall(libc::SYS_getpgid, word, 2_i64, 3_i64, 4_i64, 5_i64, 6_i64) };
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
                // SAFETY: takes a number only. (A kernel's thread has group 0, which rustix does not expect.)
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
    assert!(matches!(Pages::new(1).overlay(other, Overlay::Copy), Err(Error::Stopped { .. })));
    assert_eq!(uname_of(other, other.switch(7, &[]).unwrap()), 7);
    other.close().unwrap();
}

pub(crate) fn a_trapped_open_is_performed_by_the_parent() {
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

pub(crate) fn a_dead_context_is_no_longer_heard() {
    let make = || {
        create(&Spec::new().withhold(&only(libc::SYS_uname)).trap(true), |start| {
            let mut arrival = start.arrival;
            loop {
                let word = match arrival.word {
                    0 => own_pid(),
                    1 => uname().is_err().into(),
                    _ => die(),
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
    kill(pid, Signal::KILL);
    await_end_of(pid.unsigned_abs().into());
    assert!(matches!(second.switch(0, &[]), Err(Error::Died { .. } | Error::Gone { .. })));
    let third = make();
    let pid = i32::try_from(third.switch(0, &[]).unwrap().word).unwrap();
    kill(pid, Signal::KILL);
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

pub(crate) fn only_the_parent_answers() {
    let other =
        create(&Spec::new().withhold(&only(libc::SYS_uname)).trap(true), server(|_| uname().is_ok().into()))
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

pub(crate) fn calls_of_others_it_made_are_refused() {
    let other = create(
        &Spec::new().withhold(&only(libc::SYS_uname)).trap(true),
        server(|_| {
            let thread = std::thread::spawn(|| uname().map_or_else(|errno| errno, |_| 0));
            thread.join().unwrap().unsigned_abs().into()
        }),
    )
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, u64::from(libc::EPERM.unsigned_abs()));
}

pub(crate) fn a_flood_of_traps_is_answered() {
    let other = create(
        &Spec::new().withhold(&only(libc::SYS_uname)).trap(true),
        server(|word| {
            let mut name = MaybeUninit::<libc::utsname>::uninit();
            // SAFETY: has room for a name, should the kernel write one.
            let trap = |_| unsafe { libc::syscall(libc::SYS_uname, name.as_mut_ptr()) }.cast_unsigned();
            (0..word).map(trap).sum()
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

pub(crate) fn an_asked_context_cannot_trap() {
    // Sharing takes calls of the owner's library, which nobody could answer while it is waited for.
    let memory = Pages::new(1);
    let other =
        create(&Spec::new().withhold(&only(libc::SYS_memfd_create)).trap(true), server(|word| word)).unwrap();
    assert_eq!(other.switch(3, &[]).unwrap().word, 3);
    let refused = memory.overlay(other, Overlay::Copy);
    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(other.switch(4, &[]).unwrap().word, 4);
}

pub(crate) fn calls_are_made_for_a_parked_context() {
    use std::os::fd::AsRawFd;
    let file = tempfile::tempfile().unwrap();
    let other = create(&Spec::new(), server(|word| if word == 0 { own_pid() } else { word })).unwrap();
    let pid = other.switch(0, &[]).unwrap().word;
    // SAFETY: what is called below does nothing, is refused, or reads and writes what is passed for it: texts, a buffer
    // of the length that is told, the page.
    let call = |own, number, arguments| unsafe { other.syscall(own, call_number(number), arguments) };
    // All of it is the context's.
    assert_eq!(call(FromCaller::default(), libc::SYS_getpid, [0; 6]), Ok(pid.cast_signed()));
    // Its descriptors, our memory: what it is told to open is open there and not here.
    let path = c"/etc/passwd";
    let open = [libc::AT_FDCWD.cast_unsigned().into(), path.as_ptr().addr() as u64, 0, 0, 0, 0];
    let there = call(OWN_MEMORY, libc::SYS_openat, open).unwrap();
    assert!(there >= 0);
    let number = i32::try_from(there).unwrap();
    assert!(!is_open(number), "not in our table");
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
    let memory = Pages::new(1);
    memory.poke(0, b'a');
    let fresh = create(&Spec::new(), server(|word| word)).unwrap();
    memory.poke(0, b'b');
    let write = [file.as_raw_fd().unsigned_abs().into(), memory.address() as u64, 1, 5, 0, 0];
    // SAFETY: reads one byte of a page that is mapped there.
    let wrote = unsafe { fresh.syscall(FromCaller::default(), call_number(libc::SYS_pwrite64), write) };
    assert_eq!(wrote, Ok(1));
    assert_eq!(written(&file), "helloa");
    // Errors are the call's.
    let nowhere = [99_999, memory.address() as u64, 1, 0, 0, 0];
    assert_eq!(call(OWN_MEMORY, libc::SYS_write, nowhere), Ok(-i64::from(libc::EBADF)));
    let absent = [1, 8, 1, 0, 0, 0];
    assert!(call(OWN_MEMORY, libc::SYS_write, absent).is_err(), "nothing to copy");
    assert_eq!(call(FromCaller::default(), libc::SYS_write, absent), Ok(-i64::from(libc::EFAULT)));
    assert!(matches!(call(FromCaller::default(), libc::SYS_fork, [0; 6]), Err(Error::CallUnknown { .. })));
    assert!(matches!(call(OWN_MEMORY, libc::SYS_ioctl, [0; 6]), Err(Error::CallUnknown { .. })));
    // Ours alone: a call of our own.
    let ours = FromCaller { memory: true, descriptors: true, credentials: true };
    assert_eq!(call(ours, libc::SYS_getpid, [0; 6]), Ok(own_pid().cast_signed()));
    other.close().unwrap();
}

pub(crate) fn numbers_that_name_no_descriptor_are_errors() {
    let trapped =
        create(&Spec::new().withhold(&only(libc::SYS_uname)).trap(true), server(|_| uname().is_ok().into()))
            .unwrap();
    assert!(trapped.switch(0, &[]).unwrap().call.is_some());
    let parked = create(&Spec::new(), server(|word| word)).unwrap();
    for number in [-1, -5, i32::MIN, 99_999] {
        for child in [trapped, parked] {
            let write = [u64::from(number.cast_unsigned()), c"x".as_ptr().addr() as u64, 1, 0, 0, 0];
            // SAFETY: nothing is written: the number names no descriptor anywhere.
            let wrote = unsafe { child.syscall(OWN_MEMORY, call_number(libc::SYS_write), write) };
            assert_eq!(wrote, Ok(-i64::from(libc::EBADF)), "{number}");
        }
    }
    assert_eq!(trapped.proceed().unwrap().word, 1);
}

pub(crate) fn calls_need_rights() {
    let names = only(libc::SYS_uname);
    let spec = Spec::new().may_call(&only(libc::SYS_getpid));
    let child = create(&spec, move |start| {
        // SAFETY: calls that tell a number, and do nothing.
        let call =
            |number| unsafe { start.creator.syscall(FromCaller::default(), call_number(number), [0; 6]) };
        let allowed = call(libc::SYS_getpid);
        let denied = matches!(call(libc::SYS_getuid), Err(Error::CallDenied { .. }));
        let word = if denied { allowed.unwrap_or(0).cast_unsigned() } else { 0 };
        start.creator.switch(word, &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(child.switch(0, &[]).unwrap().word, own_pid());
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    // SAFETY: calls that tell a number, and do nothing.
    let call = |number| unsafe { other.syscall(FromCaller::default(), call_number(number), [0; 6]) };
    assert!(call(libc::SYS_getuid).is_ok());
    other.restrict_to(&Rights::none().calls(&only(libc::SYS_getpid).or(&names))).unwrap();
    assert!(call(libc::SYS_getpid).is_ok());
    assert_eq!(
        call(libc::SYS_getuid).unwrap_err(),
        Error::CallDenied { descriptor: other.descriptor(), number: call_number(libc::SYS_getuid) }
    );
    other.restrict(&[]).unwrap();
    assert!(matches!(call(libc::SYS_getpid), Err(Error::CallDenied { .. })));
    // A context whose creator may not: the same where calls are trapped.
    let trapped = create(&Spec::new().withhold(&names).trap(true), |_| {
        let _ = uname();
        unreachable!();
    })
    .unwrap();
    trapped.restrict_to(&Rights::all().calls(&Calls::none())).unwrap();
    trapped.restrict(&[]).unwrap();
    assert!(trapped.switch(0, &[]).unwrap().call.is_some());
    // SAFETY: getpid(2) takes nothing and changes nothing.
    let denied = unsafe { trapped.syscall(OWN_MEMORY, call_number(libc::SYS_getpid), [0; 6]) };
    assert!(matches!(denied, Err(Error::CallDenied { .. })));
}

/// The paper's Algorithm 4: the parent makes the call for the child, with its own credentials.
pub(crate) fn a_monitor_makes_the_calls_it_allows() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("secret");
    std::fs::write(&path, "for the monitor's eyes").unwrap();
    let privileged = geteuid().is_root();
    if privileged {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    }
    let wanted = path.clone();
    let child = create(&Spec::new().trap(true), move |start| {
        if privileged {
            assert!(set_users(65534, 65534, 65534));
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
    let serve = |own: FromCaller, target: &std::path::Path| {
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
                    // SAFETY: opens the file of a name that lives here until the call is done.
                    unsafe { child.syscall(own, call.number, arguments) }.unwrap()
                } else {
                    // SAFETY: opens a file: what the child itself wanted.
                    unsafe { child.syscall(own, call.number, call.arguments) }.unwrap()
                }
            } else {
                let own = FromCaller { credentials: true, ..FromCaller::default() };
                // SAFETY: what the child itself wanted, in its own memory.
                unsafe { child.syscall(own, call.number, call.arguments) }.unwrap_or(-i64::from(libc::ENOSYS))
            };
            arrival = child.switch(answer.cast_unsigned(), &[]).unwrap();
        }
        (arrival.word, String::from_utf8(arrival.bytes).unwrap())
    };
    let secret = || (0, "for the monitor's eyes".to_owned());
    let with_rights = FromCaller { credentials: true, ..OWN_MEMORY };
    assert_eq!(serve(with_rights, &path), secret());
    assert_eq!(serve(FromCaller { memory: false, ..with_rights }, &path), secret());
    let elsewhere = directory.path().join("decoy");
    std::fs::write(&elsewhere, "a decoy").unwrap();
    assert_eq!(serve(with_rights, &elsewhere), (0, "a decoy".to_owned()));
    // With the child's own credentials the kernel refuses.
    let expected = if privileged { libc::EACCES.unsigned_abs().into() } else { 0 };
    for own in [FromCaller::default(), OWN_MEMORY] {
        assert_eq!(serve(own, &path).0, expected);
        assert_eq!(geteuid().is_root(), privileged, "ours are ours again");
    }
    assert_eq!(serve(with_rights, &path), secret());
}

pub(crate) fn a_monitor_needs_no_privilege() {
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
            let own = FromCaller { credentials: true, ..FromCaller::default() };
            // SAFETY: opens a file: what the child itself wanted.
            let answer = unsafe { child.syscall(own, call.number, call.arguments) }.unwrap();
            child.switch(answer.cast_unsigned(), &[]).unwrap()
        } else {
            child.proceed().unwrap()
        };
    }
    assert_eq!((opened, arrival.bytes), (1, b"text".to_vec()));
    // A program that is closed to debuggers cannot look into its own copies.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).unwrap();
    let refused = create(&Spec::new().trap(true), server(|word| word)).unwrap_err();
    assert!(matches!(refused, Error::Birth { .. }), "{refused}");
}

/// The paper's own example: a context reads and appends a few bytes of a file that it has no descriptor of.
pub(crate) fn files_out_of_reach_are_read_and_written_for_it() {
    use std::os::fd::AsRawFd;
    let file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut &file, b"kept: ").unwrap();
    let number = file.as_raw_fd();
    let reach = u32::try_from(number).unwrap();
    let spec = Spec::new().trap(true).withhold(&only(libc::SYS_uname)).close_descriptors(reach, reach);
    let child = create(&spec, move |start| {
        let mut bytes = *b"words";
        // It cannot write there itself; a call that its creator answers says where the bytes are.
        // SAFETY: the kernel reads five bytes at most, which the array has.
        let own = unsafe { libc::write(number, bytes.as_ptr().cast(), 5) };
        // SAFETY: who answers in the kernel's place reads five bytes, which are there.
        let written = unsafe { libc::syscall(libc::SYS_uname, bytes.as_ptr(), 5, 1) };
        // SAFETY: who answers in the kernel's place writes four bytes, for which there is room.
        let read = unsafe { libc::syscall(libc::SYS_uname, bytes.as_mut_ptr(), 4, 0) };
        let word = u64::from((own, written, read) == (-1, 5, 4));
        start.creator.switch(word, &bytes).unwrap();
        unreachable!();
    })
    .unwrap();
    let own = FromCaller { memory: false, descriptors: true, credentials: true };
    let mut arrival = child.switch(0, &[]).unwrap();
    while let Some(call) = arrival.call {
        let [address, length, writes, ..] = call.arguments;
        let (call, place) = if writes == 1 { (libc::SYS_write, 0) } else { (libc::SYS_pread64, 0) };
        let arguments = [u64::try_from(number).unwrap(), address, length, place, 0, 0];
        // SAFETY: reads or writes the bytes that the child named for this.
        let done = unsafe { child.syscall(own, call_number(call), arguments) }.unwrap();
        arrival = child.switch(done.cast_unsigned(), &[]).unwrap();
    }
    assert_eq!((arrival.word, &arrival.bytes[..]), (1, &b"kepts"[..]));
    assert_eq!(written(&file), "kept: words");
}
