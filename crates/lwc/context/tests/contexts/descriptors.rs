//! What a new context has of its creator: descriptors.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, RawFd};

use orrery_context::{Context, Error, Rights, Spec, create};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit, Signal, setrlimit};

use crate::support::{
    await_end_of, copy_high, die, end, forked, is_open, kill, named, own_pid, server, status_of, written,
};

/// Closes a number; whether it was open.
fn close(number: RawFd) -> bool {
    // SAFETY: what goes by the number was opened as a mere number, or is a context's copy of a file that only the root
    // uses by its owner, or is closed already: nobody here takes it for open any more.
    unsafe { libc::close(number) == 0 }
}

/// Returns a file as a mere number.
fn open() -> RawFd {
    rustix::fs::open(c"/dev/null", OFlags::RDONLY, Mode::empty()).unwrap().into_raw_fd()
}

pub(crate) fn descriptors_are_copies() {
    let file = tempfile::tempfile().unwrap();
    let fd = file.as_raw_fd();
    let other = create(&Spec::new(), server(move |_| u64::from(close(fd)))).unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 1);
    assert_eq!(other.switch(0, &[]).unwrap().word, 0);
    assert!(file.metadata().is_ok(), "the creator's stays");
}

pub(crate) fn descriptors_may_be_withheld() {
    let (a, b) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let [a, b] = [&a, &b].map(|file| u32::try_from(file.as_raw_fd()).unwrap());
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
                u64::from(is_open(fd))
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

/// Returns whether two processes have one table of descriptors, as the kernel says.
fn share_a_table(one: u64, other: u64) -> bool {
    const KCMP_FILES: i32 = 2;
    // SAFETY: with KCMP_FILES the call takes numbers only.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_FILES, 0, 0) == 0 }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// 0: who it is; else opens a file (1), or closes the one of that number.
fn opener() -> impl FnOnce(orrery_context::Start) -> std::convert::Infallible {
    server(|word| match word {
        0 => own_pid(),
        1 => open().unsigned_abs().into(),
        number => u64::from(close(i32::try_from(number).unwrap())),
    })
}

pub(crate) fn a_table_of_descriptors_is_shared() {
    let apart = create(&Spec::new().dumpable(true), opener()).unwrap();
    let other = create(&Spec::new().share_descriptors(true).dumpable(true), opener()).unwrap();
    let ask = |word| other.switch(word, &[]).unwrap().word;
    let pid = ask(0);
    assert!(share_a_table(own_pid(), pid));
    assert!(!share_a_table(own_pid(), apart.switch(0, &[]).unwrap().word));
    // What it opens is open here, and what either closes is closed in both.
    let number = i32::try_from(ask(1)).unwrap();
    assert!(is_open(number));
    assert!(close(number));
    assert_eq!(ask(u64::try_from(number).unwrap()), 0);
    let ours = open();
    assert_eq!(ask(u64::try_from(ours).unwrap()), 1);
    assert!(!is_open(ours));
    // The other one has its own.
    let theirs = i32::try_from(apart.switch(1, &[]).unwrap().word).unwrap();
    assert!(!is_open(theirs));
    // It ends when its name is closed in the table, and all go on.
    other.close().unwrap();
    await_end_of(pid);
    assert_eq!(apart.switch(1, &[]).unwrap().word, u64::try_from(theirs).unwrap() + 1);
}

pub(crate) fn a_shared_table_is_left_in_order() {
    create(&Spec::new(), server(|word| word)).unwrap().close().unwrap();
    let shared = Spec::new().share_descriptors(true);
    let used = open_descriptors();
    for round in 0..12 {
        let other = create(&shared, move |start| {
            // One of its own with the same table, one with another.
            let inner = create(
                &Spec::new().share_descriptors(true),
                server(|word| if word == 0 { own_pid() } else { word + 1 }),
            )
            .unwrap();
            let inner_process = inner.switch(0, &[]).unwrap().word;
            let apart = create(&Spec::new(), server(|word| word + 2)).unwrap();
            let mut arrival = start.arrival;
            loop {
                let word = match arrival.word {
                    0 => own_pid(),
                    1 => inner.switch(3, &[]).unwrap().word + apart.switch(3, &[]).unwrap().word,
                    2 => {
                        inner.close().unwrap();
                        apart.close().unwrap();
                        // Both have copies of names, so they end one after the other.
                        await_end_of(inner_process);
                        0
                    }
                    _ => die(),
                };
                arrival = arrival.caller.switch(word, &[]).unwrap();
            }
        })
        .unwrap();
        let pid = other.switch(0, &[]).unwrap().word;
        assert_eq!(other.switch(1, &[]).unwrap().word, 4 + 5);
        if round % 2 == 0 {
            // It has copies of all names, and so holds those who are named.
            let copied = create(&Spec::new(), server(|word| word * 2)).unwrap();
            assert_eq!(copied.switch(4, &[]).unwrap().word, 8);
            copied.close().unwrap();
            assert_eq!(other.switch(2, &[]).unwrap().word, 0);
        } else {
            assert_eq!(other.switch(2, &[]).unwrap().word, 0);
            let told = other.switch(3, &[]).unwrap_err();
            assert!(matches!(told, Error::Died { .. } | Error::Orphaned), "{told}");
        }
        other.close().unwrap();
        await_end_of(pid);
    }
    // Whatever they lived by is gone with them; the last one's is swept out by the next one.
    let left = (0..100).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        create(&Spec::new(), server(|word| word)).unwrap().close().unwrap();
        open_descriptors() <= used + 12
    });
    assert!(left, "{} descriptors are open, {used} were", open_descriptors());
}

pub(crate) fn a_shared_table_keeps_others_out() {
    // One with a table of its own must not get what those who share ours live by: it could hear what is said to them.
    let sharing = create(&Spec::new().share_descriptors(true), server(|word| word + 1)).unwrap();
    assert_eq!(sharing.switch(1, &[]).unwrap().word, 2);
    let sockets = || {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        links
            .filter(|link| {
                std::fs::read_link(link.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket:"))
            })
            .count() as u64
    };
    let apart = create(&Spec::new().dumpable(true), server(move |_| sockets())).unwrap();
    let with_one = apart.switch(0, &[]).unwrap().word;
    let more: Vec<Context> =
        (0..5).map(|_| create(&Spec::new().share_descriptors(true), server(|word| word)).unwrap()).collect();
    more.iter().for_each(|one| assert_eq!(one.switch(1, &[]).unwrap().word, 1));
    let apart = create(&Spec::new().dumpable(true), server(move |_| sockets())).unwrap();
    // The names of those five, of which it has copies as ever, and of the first one with a table of its own.
    assert_eq!(apart.switch(0, &[]).unwrap().word, with_one + 6);
}

pub(crate) fn copies_of_a_shared_table_are_apart() {
    let other = create(&Spec::new().share_descriptors(true).dumpable(true), opener()).unwrap();
    other.switch(0, &[]).unwrap();
    let pid = forked(|| {
        let process = other.switch(0, &[]).unwrap().word;
        let number = i32::try_from(other.switch(1, &[]).unwrap().word).unwrap();
        let apart = !share_a_table(own_pid(), process) && !is_open(number);
        end(i32::from(!apart))
    });
    assert_eq!(status_of(pid), 0);
    // A good state, too, has what was open then.
    other.checkpoint().unwrap();
    let process = other.switch(0, &[]).unwrap().word;
    kill(i32::try_from(process).unwrap(), Signal::KILL);
    await_end_of(process);
    assert!(matches!(other.switch(0, &[]), Err(Error::Died { .. })));
    let heir = other.switch(0, &[]).unwrap().word;
    assert!(heir != process && !share_a_table(own_pid(), heir));
    assert_eq!(other.switch(0, &[]).unwrap().word, heir);
}

pub(crate) fn shared_tables_have_conditions() {
    for spec in [
        Spec::new().share_descriptors(true).close_descriptors(5, 6),
        Spec::new().share_descriptors(true).trap(true),
    ] {
        let refused = create(&spec, server(|word| word)).unwrap_err();
        assert!(matches!(refused, Error::Unmet { .. }), "{refused}");
    }
}

pub(crate) fn closed_names_are_refused() {
    let first = create(&Spec::new(), server(|word| word)).unwrap();
    first.close().unwrap();
    let descriptor = first.descriptor();
    assert_eq!(first.switch(0, &[]).unwrap_err(), Error::NoContext { descriptor });
    assert_eq!(first.close().unwrap_err(), Error::NoContext { descriptor });
    let second = create(&Spec::new(), server(|word| word + 1)).unwrap();
    assert_eq!(second.descriptor(), descriptor, "the number is used again");
    assert_eq!(first.switch(0, &[]).unwrap_err(), Error::NoContext { descriptor });
    assert_eq!(named(descriptor).unwrap(), second);
    assert!(matches!(named(0), Err(Error::NoContext { descriptor: 0 })));
}

pub(crate) fn without_descriptors_nothing_is_made() {
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    let mut taken = Vec::new();
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(40), maximum: Some(4096) });
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

pub(crate) fn descriptors_are_overlaid() {
    let ours = tempfile::tempfile().unwrap();
    let number = u32::try_from(ours.as_raw_fd()).unwrap();
    let spec = Spec::new().may_fetch(number, number);
    let other = create(&spec, move |start| {
        // Closes its copy, opens something of its own, and later has its creator's again.
        let fd = i32::try_from(number).unwrap();
        assert!(close(fd));
        let mut theirs = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut theirs, b"theirs").unwrap();
        let far = copy_high(&theirs, 300);
        drop(theirs);
        let mut arrival = start.creator.switch(far.unsigned_abs().into(), &[]).unwrap();
        // SAFETY: this context has nothing open by that number any more; of the next one it gets nothing.
        let overlay = |number| unsafe { start.creator.overlay_descriptor(number) };
        assert!(matches!(overlay(number + 1), Err(Error::Denied { .. })));
        overlay(number).unwrap();
        // SAFETY: it has come to be open just now, and has no other owner here that uses it.
        let mut file = unsafe { std::fs::File::from_raw_fd(fd) };
        std::io::Write::write_all(&mut file, b"written by it").unwrap();
        arrival = arrival.caller.switch(0, &[]).unwrap();
        unreachable!("{arrival:?}");
    })
    .unwrap();
    let there = u32::try_from(other.switch(0, &[]).unwrap().word).unwrap();
    copy_high(&ours, 200);
    other.switch(0, &[]).unwrap();
    assert_eq!(written(&ours), "written by it");
    // SAFETY: nothing here is open by these numbers, but the context's own name, for which that is refused.
    let overlay = |number| unsafe { other.overlay_descriptor(number) };
    overlay(there).unwrap();
    // SAFETY: it has come to be open just now, and is nobody's yet.
    assert_eq!(written(&unsafe { std::fs::File::from_raw_fd(i32::try_from(there).unwrap()) }), "theirs");
    // What contexts live by stays.
    let own = u32::try_from(other.descriptor()).unwrap();
    assert!(matches!(overlay(own), Err(Error::System(_))));
    assert!(matches!(overlay(99_999), Err(Error::System(_))));
    other.restrict_to(&Rights::none().descriptors(0, 2)).unwrap();
    assert!(matches!(overlay(there), Err(Error::Denied { .. })));
}

/// Without a word, answers the first byte of the file that its caller passed, or 0 without one.
fn reader() -> impl FnOnce(orrery_context::Start) -> std::convert::Infallible {
    |start| {
        let mut arrival = start.arrival;
        loop {
            let mut byte = [0];
            if arrival.word == 0
                && let Some(file) = arrival.caller.passed().unwrap()
            {
                assert_eq!(rustix::io::pread(&file, &mut byte, 0).unwrap(), 1);
                assert!(file.as_raw_fd() < 700, "it has the lowest number that is free");
            }
            arrival = arrival.caller.switch(byte[0].into(), &[]).unwrap();
        }
    }
}

fn file_of(bytes: &[u8]) -> std::fs::File {
    use std::io::Write;
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

pub(crate) fn a_descriptor_is_passed() {
    let files = [file_of(b"a"), file_of(b"b")];
    let other = create(&Spec::new(), reader()).unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 0);
    other.pass(files[0].as_fd()).unwrap();
    other.pass(files[1].as_fd()).unwrap();
    for answer in [b'a', b'b', 0] {
        assert_eq!(other.switch(0, &[]).unwrap().word, u64::from(answer), "in order, each once");
    }
}

/// A context that hears of a stranger looks at all that came over its name.
pub(crate) fn a_passed_descriptor_waits_while_a_stranger_calls() {
    let files = [file_of(b"a"), file_of(b"b")];
    let other = create(&Spec::new(), reader()).unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 0);
    let known = other;
    let stranger = create(&Spec::new(), server(move |word| known.switch(word, &[]).unwrap().word)).unwrap();
    other.pass(files[0].as_fd()).unwrap();
    other.pass(files[1].as_fd()).unwrap();
    assert_eq!(stranger.switch(1, &[]).unwrap().word, 0);
    for answer in [b'a', b'b', 0] {
        assert_eq!(other.switch(0, &[]).unwrap().word, u64::from(answer));
    }
}
