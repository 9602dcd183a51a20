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
