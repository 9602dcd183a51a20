//! What becomes of a system call that was under way. The table stands in the book, too (`docs/src/orthros-calls.md`).
//!
//! A call that had only been waiting has done nothing: it is begun again. So is one that may be done twice because the
//! second time changes nothing, and a write to a place in a file, which writes the same to the same place: a file's position
//! moves when the write is done. Whatever else was under way fails with `EINTR`: it may or may not have had its effect,
//! and is not done twice. A program says otherwise through liborthros, whose block is looked for in its memory.

use anyhow::{Context as _, Result};
use orrery_kimage::{FileKind, OpenFile, Registers, Task};

/// What becomes of a call unless the program says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Begun again: it had only been waiting.
    Waits,
    /// Begun again: done twice, it changes nothing more.
    Repeats,
    /// Begun again if it goes to a place in a regular file; else it fails.
    Places,
    /// Fails with `EINTR`.
    Fails,
}

macro_rules! calls {
    ($($class:ident: $($name:ident)*;)*) => {
        &[$($((libc::$name, stringify!($name), Class::$class)),*),*]
    };
}

/// Every call that does not fail.
pub(crate) const CALLS: &[(i64, &str, Class)] = calls! {
    Waits: SYS_read SYS_readv SYS_poll SYS_ppoll SYS_select SYS_pselect6 SYS_epoll_wait SYS_epoll_pwait SYS_epoll_pwait2
        SYS_pause SYS_nanosleep SYS_clock_nanosleep SYS_accept SYS_accept4 SYS_recvfrom SYS_recvmsg SYS_recvmmsg
        SYS_wait4 SYS_waitid SYS_flock SYS_futex SYS_rt_sigtimedwait SYS_rt_sigsuspend SYS_sched_yield SYS_getrandom
        SYS_semop SYS_semtimedop SYS_msgrcv SYS_mq_timedreceive SYS_io_getevents;
    Repeats: SYS_fsync SYS_fdatasync SYS_sync SYS_syncfs SYS_sync_file_range SYS_msync SYS_pread64 SYS_preadv SYS_preadv2
        SYS_stat SYS_fstat SYS_lstat SYS_newfstatat SYS_statx SYS_statfs SYS_fstatfs SYS_access SYS_faccessat SYS_readlink
        SYS_readlinkat SYS_getcwd SYS_madvise SYS_mprotect SYS_munmap SYS_brk SYS_truncate SYS_ftruncate SYS_fallocate
        SYS_fadvise64 SYS_readahead SYS_chmod SYS_fchmod SYS_fchmodat SYS_chown SYS_fchown SYS_lchown SYS_fchownat SYS_utimensat
        SYS_setxattr SYS_fsetxattr SYS_getxattr SYS_fgetxattr SYS_getsockopt SYS_setsockopt SYS_getsockname SYS_getpeername
        SYS_epoll_create1 SYS_mincore SYS_mlock SYS_munlock SYS_clock_gettime SYS_getdents64;
    Places: SYS_write SYS_writev SYS_pwrite64 SYS_pwritev;
};

/// What becomes of a call.
pub(crate) fn class(call: i64) -> Class {
    CALLS.iter().find(|(number, ..)| *number == call).map_or(Class::Fails, |&(.., class)| class)
}

/// liborthros' block: see that library, which lays it out.
const MARK: &[u8] = b"orthros calls 1\0";
const CALLS_WITH_ANSWERS: usize = 512;
const ENTRY_AT: usize = 16;
const ANSWERS_AT: usize = 24;
const BLOCK: usize = ANSWERS_AT + 2 * CALLS_WITH_ANSWERS;
const STEP: usize = 64;
const PAGE: usize = 4096;
const MOST_BYTES: u64 = 16 << 20;
const EXECUTABLE: u64 = 4;

/// What a program has said.
#[derive(Clone, Debug)]
pub(crate) struct Answers {
    entry: u64,
    answers: Vec<u16>,
}

/// What a program says of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Nothing.
    Default,
    /// Begin it again.
    Again,
    /// Go on at this address.
    Ask(u64),
    /// Fail with this error.
    Fail(u16),
}

impl Answers {
    /// Looks for what a process has said: nothing where it has not loaded the library.
    pub(crate) fn of(process: &Task<'_>) -> Result<Option<Self>> {
        let Some(space) = process.address_space()? else { return Ok(None) };
        let mappings = space.mappings().found;
        for mapping in mappings.iter().filter(|mapping| mapping.flags & 2 != 0 && !mapping.is_shared()) {
            let Some(file) = mapping.file()? else { continue };
            let path = OpenFile::check(file)?.path()?.bytes;
            let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
            if !name.starts_with(b"liborthros.so") || mapping.end - mapping.start > MOST_BYTES {
                continue;
            }
            let mut bytes = vec![0; usize::try_from(mapping.end - mapping.start)?];
            for (page, into) in (mapping.start..).step_by(PAGE).zip(bytes.chunks_mut(PAGE)) {
                // A page that was never touched has no block in it.
                let _ = space.read(page, into);
            }
            if let Some(found) = Self::find(&bytes) {
                let executable = |mapping: &&orrery_kimage::Mapping<'_>| {
                    mapping.flags & EXECUTABLE != 0 && (mapping.start..mapping.end).contains(&found.entry)
                };
                mappings.iter().find(executable).context("its liborthros leads to no code")?;
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Finds the block in a library's memory.
    fn find(bytes: &[u8]) -> Option<Self> {
        let blocks = (0..bytes.len()).step_by(STEP).filter_map(|at| bytes.get(at..at + BLOCK));
        let block = blocks.into_iter().find(|block| block.starts_with(MARK))?;
        let entry = block[ENTRY_AT..ANSWERS_AT].try_into().map(u64::from_le_bytes).ok()?;
        let words = block[ANSWERS_AT..].chunks_exact(2);
        Some(Self { entry, answers: words.map(|word| u16::from_le_bytes([word[0], word[1]])).collect() })
    }

    pub(crate) fn answer(&self, call: i64) -> Answer {
        let word = usize::try_from(call).ok().and_then(|call| self.answers.get(call)).copied().unwrap_or(0);
        match word {
            1 => Answer::Again,
            2 => Answer::Ask(self.entry),
            word if word & 0x8000 != 0 => Answer::Fail(word & 0xfff),
            _ => Answer::Default,
        }
    }
}

/// What becomes of the call that a thread was in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Again,
    Ask(u64),
    Fail(u16),
    /// It has moved so many bytes, and says so.
    Moved(u64),
}

/// Decides: what the program says counts, then what kind of call it is.
pub(crate) fn decide(call: i64, answer: Answer, goes_to_a_place: impl FnOnce() -> bool) -> Outcome {
    match (answer, class(call)) {
        (Answer::Ask(entry), _) => Outcome::Ask(entry),
        (Answer::Fail(error), _) => Outcome::Fail(error),
        (Answer::Again, _) | (Answer::Default, Class::Waits | Class::Repeats) => Outcome::Again,
        (Answer::Default, Class::Places) if goes_to_a_place() => Outcome::Again,
        (Answer::Default, Class::Places | Class::Fails) => Outcome::Fail(EINTR),
    }
}

const EINTR: u16 = 4;

/// Whether a descriptor is that of a regular file which is not only appended to.
pub(crate) fn goes_to_a_place(thread: &Task<'_>, registers: &Registers) -> bool {
    let append = libc::O_APPEND.cast_unsigned();
    thread.descriptors().found.iter().any(|descriptor| {
        u64::from(descriptor.number) == registers.di
            && matches!(descriptor.file.kind(), Ok(FileKind::Regular))
            && descriptor.file.flags().is_ok_and(|flags| flags & append == 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: fn() -> bool = || panic!("it was not to be asked");

    fn block(entry: u64, answers: &[(usize, u16)]) -> Vec<u8> {
        let mut bytes = vec![0; 3 * STEP + BLOCK + 100];
        let at = 2 * STEP;
        bytes[at..at + MARK.len()].copy_from_slice(MARK);
        bytes[at + ENTRY_AT..at + ANSWERS_AT].copy_from_slice(&entry.to_le_bytes());
        for &(call, answer) in answers {
            let place = at + ANSWERS_AT + 2 * call;
            bytes[place..place + 2].copy_from_slice(&answer.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn what_waited_or_may_be_done_twice_is_begun_again() {
        for call in [libc::SYS_read, libc::SYS_accept4, libc::SYS_futex, libc::SYS_nanosleep, libc::SYS_fsync]
        {
            assert_eq!(decide(call, Answer::Default, NEVER), Outcome::Again, "{call}");
        }
    }

    #[test]
    fn what_may_have_had_its_effect_fails() {
        for call in
            [libc::SYS_rename, libc::SYS_sendto, libc::SYS_clone, libc::SYS_execve, libc::SYS_close, 9999, -1]
        {
            assert_eq!(decide(call, Answer::Default, NEVER), Outcome::Fail(4), "{call}");
        }
    }

    #[test]
    fn a_write_is_begun_again_where_it_goes_to_a_place() {
        assert_eq!(decide(libc::SYS_write, Answer::Default, || true), Outcome::Again);
        assert_eq!(decide(libc::SYS_write, Answer::Default, || false), Outcome::Fail(4));
    }

    #[test]
    fn what_the_program_says_counts() {
        let said = [(82, 1), (0, 2), (34, 0x8000 | 125), (1, 0)];
        let answers = Answers::find(&block(0x7f00_1234, &said)).unwrap();
        assert_eq!(decide(82, answers.answer(82), NEVER), Outcome::Again);
        assert_eq!(decide(0, answers.answer(0), NEVER), Outcome::Ask(0x7f00_1234));
        assert_eq!(decide(34, answers.answer(34), NEVER), Outcome::Fail(125));
        assert_eq!(decide(1, answers.answer(1), || false), Outcome::Fail(4));
        assert_eq!((answers.answer(-1), answers.answer(512)), (Answer::Default, Answer::Default));
    }

    #[test]
    fn what_is_no_block_says_nothing() {
        assert!(Answers::find(&[]).is_none());
        let mut bytes = block(1, &[]);
        bytes.remove(0);
        assert!(Answers::find(&bytes).is_none(), "it is not where blocks are");
        let whole = block(1, &[]);
        assert!(Answers::find(&whole[..2 * STEP + BLOCK - 1]).is_none(), "it is cut off");
    }

    #[test]
    fn no_call_is_in_the_table_twice() {
        let mut numbers: Vec<i64> = CALLS.iter().map(|(number, ..)| *number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), CALLS.len());
    }

    /// The book says what the code does.
    #[test]
    fn the_book_has_the_same_table() {
        let book = include_str!("../../../../../docs/src/orthros-calls.md");
        let rows = |heading: &str| -> Vec<String> {
            let part = book.split("\n## ").find(|part| part.starts_with(heading)).unwrap();
            let mut names: Vec<String> = part.split('`').skip(1).step_by(2).map(str::to_owned).collect();
            names.sort_unstable();
            names
        };
        for (heading, class) in [
            ("Had only been waiting", Class::Waits),
            ("May be done twice", Class::Repeats),
            ("Go to a place", Class::Places),
        ] {
            let of_class = CALLS.iter().filter(|(.., found)| *found == class);
            let mut names: Vec<String> =
                of_class.map(|(_, name, _)| name.trim_start_matches("SYS_").to_owned()).collect();
            names.sort_unstable();
            assert_eq!(rows(heading), names, "{heading}");
        }
        let told = rows("Move bytes");
        let movers = crate::criu::movers::MOVERS.iter().map(|mover| mover.name());
        let missing: Vec<&str> = movers.filter(|name| !told.iter().any(|told| told == name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
