//! Descriptors and what is behind them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use orrery_rollback::Outcome;

use super::common::{open_descriptors, rollback};

pub(crate) fn descriptors_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(dir.path().join("a")).unwrap();
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    let before = open_descriptors();
    for _ in 0..3 {
        rollback
            // SAFETY: what the run closes behind the file's back is open again when it is used; the string ends with a
            // zero.
            .run(|| unsafe {
                libc::close(file.as_raw_fd());
                for _ in 0..20 {
                    libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
                }
                libc::dup2(0, 500);
                libc::dup2(0, 2);
                libc::fcntl(1, libc::F_SETFL, libc::O_NONBLOCK);
            })
            .unwrap();
        assert_eq!(open_descriptors(), before);
        // SAFETY: takes numbers.
        assert_eq!(unsafe { libc::fcntl(1, libc::F_GETFL) } & libc::O_NONBLOCK, 0);
    }
}

/// What belongs to an open file is changed through either of two numbers that share it, and what belongs to a number for
/// each of several that follow one another.
pub(crate) fn what_numbers_share_comes_back() {
    use std::io::{Seek, Write};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let mut file = std::fs::File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    file.write_all(b"0123456789").unwrap();
    file.seek(std::io::SeekFrom::Start(3)).unwrap();
    let first = OwnedFd::from(file);
    let shared: Vec<OwnedFd> = (0..3).map(|_| first.try_clone().unwrap()).collect();
    let alike = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let place = rustix::fs::open(dir.path(), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    rustix::io::fcntl_setfd(&shared[2], rustix::io::FdFlags::empty()).unwrap();
    let numbers: Vec<i32> = std::iter::once(&first)
        .chain(&shared)
        .map(AsRawFd::as_raw_fd)
        .chain([alike.as_raw_fd(), place.as_raw_fd()])
        .collect();
    // SAFETY: takes numbers.
    let state = |number: i32| unsafe {
        let own = rustix::process::getpid();
        let same = orrery_sys::kcmp::same_file(own, numbers[0], own, number);
        let flags = (libc::fcntl(number, libc::F_GETFD), libc::fcntl(number, libc::F_GETFL));
        (flags, libc::lseek(number, 0, libc::SEEK_CUR), same)
    };
    let all = || numbers.iter().copied().map(state).collect::<Vec<_>>();
    let before = all();
    let changes: [fn(i32, i32) -> i32; 6] = [
        // SAFETY: takes numbers.
        |number, _| unsafe { libc::fcntl(number, libc::F_SETFL, libc::O_APPEND | libc::O_NONBLOCK) },
        // SAFETY: takes numbers.
        |number, _| i32::from(unsafe { libc::lseek(number, 7, libc::SEEK_SET) } == 7),
        // SAFETY: takes numbers.
        |number, _| unsafe { libc::fcntl(number, libc::F_SETFD, 0) },
        // SAFETY: takes numbers.
        |number, _| unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) },
        // SAFETY: takes numbers; what is replaced is not used before it is back.
        |number, other| unsafe { libc::dup3(other, number, libc::O_CLOEXEC) },
        // SAFETY: takes numbers; what is closed is not used before it is back.
        |number, _| unsafe { libc::close(number) },
    ];
    for (which, change) in changes.iter().enumerate() {
        for &number in &numbers {
            // The same file opened another time, or the other way about.
            let other = if number == alike.as_raw_fd() { numbers[0] } else { alike.as_raw_fd() };
            let outcome = rollback().run(|| drop(Box::new(change(number, other))));
            assert_eq!(outcome, Ok(Outcome::Returned));
            assert_eq!(all(), before, "change {which} of {number}");
        }
    }
    // In rounds the table was copied once.
    let kept = orrery_rollback::KeptBuffer::with_capacity(1024).unwrap();
    rollback()
        .repeat(|_| {
            let done = kept.bytes().len();
            kept.push(&[u8::from(all() == before)]).unwrap();
            if done == changes.len() * numbers.len() {
                return std::ops::ControlFlow::Break(());
            }
            let number = numbers[done % numbers.len()];
            let other = if number == alike.as_raw_fd() { numbers[0] } else { alike.as_raw_fd() };
            changes[done / numbers.len()](number, other);
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(kept.bytes(), vec![1; changes.len() * numbers.len() + 1]);
}

/// The flags of all numbers, the engine's own included, are those that they were: what programs inherit does not change.
pub(crate) fn what_is_inherited_comes_back() {
    let _inherited = rustix::io::dup(std::io::stdin()).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    let mut rollback = rollback();
    // A number that is left alone, among the others.
    // SAFETY: the number is nobody's.
    assert_eq!(unsafe { libc::dup2(0, 300) }, 300);
    rollback.exempt_descriptor(300).unwrap();
    // SAFETY: takes numbers.
    let flags = |number: i32| unsafe { libc::fcntl(number, libc::F_GETFD) };
    rollback.run(|| {}).unwrap();
    let numbers: Vec<i32> = open_descriptors().into_iter().map(|(number, _)| number).collect();
    let before: Vec<i32> = numbers.iter().copied().map(flags).collect();
    assert!(before.iter().filter(|&&flags| flags == libc::FD_CLOEXEC).count() > 5, "{before:?}");
    // One alone, and all.
    for changed in numbers.iter().map(std::slice::from_ref).chain([numbers.as_slice()]) {
        let outcome = rollback.run(|| {
            for &number in changed {
                // SAFETY: takes numbers.
                unsafe { libc::fcntl(number, libc::F_SETFD, flags(number) ^ libc::FD_CLOEXEC) };
            }
        });
        assert_eq!(outcome, Ok(Outcome::Returned));
        // SAFETY: takes numbers.
        let left = unsafe { libc::fcntl(300, libc::F_SETFD, 0) };
        assert_eq!(left, 0);
        let after: Vec<i32> = numbers.iter().copied().map(flags).collect();
        assert_eq!(after, before, "{changed:?}");
    }
    assert_eq!(flags(file.as_raw_fd()), libc::FD_CLOEXEC);
    // What is left alone stays as a run made it.
    // SAFETY: takes numbers.
    rollback.run(|| drop(Box::new(unsafe { libc::fcntl(300, libc::F_SETFD, libc::FD_CLOEXEC) }))).unwrap();
    assert_eq!(flags(300), libc::FD_CLOEXEC);
    // SAFETY: takes numbers.
    rollback.run(|| drop(Box::new(unsafe { libc::fcntl(300, libc::F_SETFD, 0) }))).unwrap();
    assert_eq!(flags(300), 0);
}

/// A closure that forbids others to look into the process, as an ordinary user's, forbids the engine to compare.
pub(crate) fn a_lookalike_goes_where_nobody_may_look() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let first = std::fs::File::create(&path).unwrap();
    let alike = std::fs::File::options().write(true).open(&path).unwrap();
    // SAFETY: takes numbers; the case has one thread.
    if unsafe { libc::setresuid(65_534, 65_534, 65_534) } != 0 && rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("no other user can be had");
        return;
    }
    // SAFETY: takes numbers.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) };
    let same = || {
        let own = rustix::process::getpid();
        orrery_sys::kcmp::same_file(own, first.as_raw_fd(), own, alike.as_raw_fd())
    };
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    let before = same();
    for _ in 0..3 {
        // SAFETY: takes numbers; what is replaced is not used before it is back.
        let outcome = rollback.run(|| unsafe {
            libc::prctl(libc::PR_SET_DUMPABLE, 0);
            libc::dup3(alike.as_raw_fd(), first.as_raw_fd(), libc::O_CLOEXEC);
        });
        assert_eq!(outcome, Ok(Outcome::Returned));
        assert_eq!((before, same()), (Ok(false), Ok(false)), "they are the same file, opened twice");
    }
}

pub(crate) fn closing_everything_comes_back() {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    let before = open_descriptors();
    for _ in 0..3 {
        rollback
            // SAFETY: nothing uses a descriptor until all are back.
            .run(|| unsafe { drop(Box::new(libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0))) })
            .unwrap();
        assert_eq!(open_descriptors(), before);
    }
    // They are the same files: what goes in comes out.
    assert_eq!(rustix::io::write(&writer, b"through").unwrap(), 7);
    let mut text = [0; 7];
    rustix::io::read(&reader, &mut text).unwrap();
    assert_eq!(&text, b"through");
}

/// Of no use is who only counts descriptors.
pub(crate) fn as_many_others_do_not_stay() {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut rollback = rollback();
    rollback.exempt_descriptor(300).unwrap();
    rollback.exempt_descriptor(301).unwrap();
    // SAFETY: number 300 is nobody's.
    unsafe { libc::dup2(0, 300) };
    rollback.run(|| {}).unwrap();
    let before = open_descriptors();
    // Whoever closes one of these opens another: the program's, all of the engine's, one that is left alone.
    let engines = || open_descriptors().into_iter().map(|(fd, _)| fd).filter(|fd| *fd >= 600).collect();
    let victims: [Vec<i32>; 3] = [vec![reader.as_raw_fd(), writer.as_raw_fd()], engines(), vec![300]];
    assert!(victims[1].len() > 2, "{victims:?}");
    for victims in &victims {
        rollback
            // SAFETY: nothing uses the closed ones until they are back.
            .run(|| unsafe {
                for (victim, other) in victims.iter().zip(400..) {
                    libc::dup2(0, other);
                    libc::close(*victim);
                }
            })
            .unwrap();
        if victims[0] != 300 {
            assert_eq!(open_descriptors(), before);
        }
    }
    // What is left alone stays closed, or open.
    let open = |which: i32| open_descriptors().iter().any(|(fd, _)| *fd == which);
    assert!(!open(300) && !open(400));
    // SAFETY: number 301 is nobody's.
    rollback.run(|| unsafe { drop(Box::new([libc::dup2(0, 301), libc::dup2(0, 400)])) }).unwrap();
    assert!(open(301) && !open(400));
}

/// Of a file that the engine reads, what would not do in its place does not stay: another one, or the same, opened in another
/// way. Where it is the same in all ways, it does not matter which it is.
pub(crate) fn lookalikes_of_the_engines_files_do_no_harm() {
    let mut rollback = rollback();
    let mut word = vec![0_u64; 512];
    rollback.run(|| {}).unwrap();
    let link = |fd: i32| std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default();
    let engines: Vec<(i32, std::path::PathBuf)> = open_descriptors()
        .into_iter()
        .map(|(fd, _)| (fd, link(fd)))
        .filter(|(fd, path)| *fd >= 600 && path.starts_with("/proc"))
        .collect();
    assert!(engines.len() > 3, "{engines:?}");
    let same = |path: &std::path::PathBuf, flags| rustix::fs::open(path, flags, rustix::fs::Mode::empty());
    type Replacement<'a> = &'a dyn Fn(&std::path::PathBuf) -> rustix::io::Result<OwnedFd>;
    let replacements: [Replacement<'_>; 3] = [
        &|path| same(path, rustix::fs::OFlags::PATH),
        &|_| rustix::fs::open(c"/proc/self/stat", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()),
        &|path| same(path, rustix::fs::OFlags::RDONLY),
    ];
    for replacement in replacements {
        for _ in 0..2 {
            rollback
                .run(|| {
                    for (fd, path) in &engines {
                        let other = replacement(path).unwrap();
                        // SAFETY: the engine's number; until the engine is at work nobody uses it.
                        unsafe { libc::dup2(other.as_raw_fd(), *fd) };
                    }
                    word[300] += 1;
                })
                .unwrap();
            // It sees what was written, ends threads and children, and finds the same files.
            assert_eq!(word[300], 0);
            assert!(engines.iter().all(|(fd, path)| link(*fd) == *path));
        }
    }
}

pub(crate) fn offsets_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("numbers");
    std::fs::write(&path, "0123456789").unwrap();
    let file: OwnedFd = std::fs::File::open(&path).unwrap().into();
    let mut byte = [0];
    rustix::io::read(&file, &mut byte).unwrap();
    let mut rollback = rollback();
    for _ in 0..3 {
        rollback
            .run(|| {
                let mut rest = [0; 5];
                rustix::io::read(&file, &mut rest).unwrap();
                assert_eq!(&rest, b"12345");
            })
            .map(|outcome| assert_eq!(outcome, Outcome::Returned))
            .unwrap();
    }
    rustix::io::read(&file, &mut byte).unwrap();
    assert_eq!(&byte, b"1");
}

pub(crate) fn output_stays_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("output");
    let file = std::fs::File::create(&path).unwrap();
    let mut rollback = rollback();
    // SAFETY: just made, and nobody else's.
    let saved = unsafe { OwnedFd::from_raw_fd(libc::dup(1)) };
    // SAFETY: nobody owns descriptor 1.
    unsafe { libc::dup2(file.as_raw_fd(), 1) };
    for number in 0..3 {
        rollback.run(|| println!("closure {number}")).unwrap();
        println!("program {number}");
    }
    // SAFETY: descriptor 1 has no owner in this process.
    unsafe { libc::dup2(saved.as_raw_fd(), 1) };
    let expected = "closure 0\nprogram 0\nclosure 1\nprogram 1\nclosure 2\nprogram 2\n";
    assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
}

pub(crate) fn an_exempt_descriptor_stays() {
    let mut rollback = rollback();
    rollback.exempt_descriptor(300).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    rollback
        .run(|| {
            // SAFETY: number 300 is nobody's.
            unsafe { libc::dup2(writer.as_raw_fd(), 300) };
        })
        .unwrap();
    drop(writer);
    // SAFETY: reads one byte that is there.
    assert_eq!(unsafe { libc::write(300, b"x".as_ptr().cast(), 1) }, 1);
    rollback
        .run(|| {
            // SAFETY: number 300 is this case's own.
            unsafe { libc::close(300) };
        })
        .unwrap();
    // The copies of the table that these runs made had both ends.
    rollback.release_files().unwrap();
    let mut text = Vec::new();
    std::io::Read::read_to_end(&mut { reader }, &mut text).unwrap();
    assert_eq!(text, b"x");
}
