//! What a new context has of its creator: descriptors and credentials.

use orrery_lwc::context::{Context, Error, Rights, Spec, create};

use crate::support::{server, written};

pub(crate) fn descriptors_are_copies() {
    let file = tempfile::tempfile().unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    let other = create(&Spec::new(), server(move |_| u64::from(unsafe { libc::close(fd) } == 0))).unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 1);
    assert_eq!(other.switch(0, &[]).unwrap().word, 0);
    assert!(file.metadata().is_ok(), "the creator's stays");
}

pub(crate) fn descriptors_may_be_withheld() {
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

pub(crate) fn credentials_are_its_own() {
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

pub(crate) fn closed_names_are_refused() {
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

pub(crate) fn without_descriptors_nothing_is_made() {
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

pub(crate) fn descriptors_are_overlaid() {
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
