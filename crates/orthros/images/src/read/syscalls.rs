//! What becomes of a system call that was interrupted. The table is in the book, too (`docs/src/orthros-calls.md`).
//!
//! A call that had only been waiting has done nothing: it is restarted. So is one that changes nothing if it is done
//! twice, and a write at a position of a file, which writes the same to the same place: a file's position moves when
//! the write is done. Any other call fails with `EINTR`: it may or may not have had its effect, and is not done twice.
//! A program decides otherwise through liborthros, whose block is looked for in its memory.

use anyhow::{Context as _, Result};
use orrery_kimage::{FileKind, OpenFile, Registers, Task};

/// What becomes of a system call by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// It is restarted: it had only been waiting.
    Waiting,
    /// It is restarted: done twice, it changes nothing more.
    Idempotent,
    /// It is restarted if it writes at a position of a regular file; otherwise it fails.
    Positioned,
    /// It fails with `EINTR`.
    Fails,
}

macro_rules! calls {
    ($($class:ident: $($name:ident)*;)*) => {
        &[$($((libc::$name, stringify!($name), Class::$class)),*),*]
    };
}

/// Every call that does not fail by default.
pub(super) const CALLS: &[(i64, &str, Class)] = calls! {
    Waiting: SYS_read SYS_readv SYS_poll SYS_ppoll SYS_select SYS_pselect6 SYS_epoll_wait SYS_epoll_pwait SYS_epoll_pwait2
        SYS_pause SYS_nanosleep SYS_clock_nanosleep SYS_accept SYS_accept4 SYS_recvfrom SYS_recvmsg SYS_recvmmsg
        SYS_wait4 SYS_waitid SYS_flock SYS_futex SYS_rt_sigtimedwait SYS_rt_sigsuspend SYS_sched_yield SYS_getrandom
        SYS_semop SYS_semtimedop SYS_msgrcv SYS_mq_timedreceive SYS_io_getevents;
    Idempotent: SYS_fsync SYS_fdatasync SYS_sync SYS_syncfs SYS_sync_file_range SYS_msync SYS_pread64 SYS_preadv SYS_preadv2
        SYS_stat SYS_fstat SYS_lstat SYS_newfstatat SYS_statx SYS_statfs SYS_fstatfs SYS_access SYS_faccessat SYS_readlink
        SYS_readlinkat SYS_getcwd SYS_madvise SYS_mprotect SYS_munmap SYS_brk SYS_truncate SYS_ftruncate SYS_fallocate
        SYS_fadvise64 SYS_readahead SYS_chmod SYS_fchmod SYS_fchmodat SYS_chown SYS_fchown SYS_lchown SYS_fchownat SYS_utimensat
        SYS_setxattr SYS_fsetxattr SYS_getxattr SYS_fgetxattr SYS_getsockopt SYS_setsockopt SYS_getsockname SYS_getpeername
        SYS_epoll_create1 SYS_mincore SYS_mlock SYS_munlock SYS_clock_gettime SYS_getdents64;
    Positioned: SYS_write SYS_writev SYS_pwrite64 SYS_pwritev;
};

/// Returns what becomes of a call by default.
pub(super) fn class(call: i64) -> Class {
    CALLS.iter().find(|(number, ..)| *number == call).map_or(Class::Fails, |&(.., class)| class)
}

/// liborthros' block: see that library, which lays it out.
const MAGIC: &[u8] = b"orthros calls 1\0";
const CALLS_WITH_ANSWERS: usize = 512;
const ENTRY_AT: usize = 16;
const ANSWERS_AT: usize = 24;
const BLOCK: usize = ANSWERS_AT + 2 * CALLS_WITH_ANSWERS;
const STEP: usize = 64;
const PAGE: usize = 4096;
const MOST_BYTES: u64 = 16 << 20;
const EXECUTABLE: u64 = 4;

/// What a program decides about its system calls.
#[derive(Clone, Debug)]
pub(super) struct Answers {
    entry: u64,
    answers: Vec<u16>,
}

/// What a program decides about a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The program decides nothing about the call.
    Default,
    /// Restart the call.
    Restart,
    /// Continue at this address.
    Call(u64),
    /// Let it fail with this error.
    Fail(u16),
}

impl Answers {
    /// Looks for the decisions of a process; `None` if it has not loaded the library.
    pub(super) fn of(process: &Task<'_>) -> Result<Option<Self>> {
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

    /// Finds the block in the library's memory.
    fn find(bytes: &[u8]) -> Option<Self> {
        let blocks = (0..bytes.len()).step_by(STEP).filter_map(|at| bytes.get(at..at + BLOCK));
        let block = blocks.into_iter().find(|block| block.starts_with(MAGIC))?;
        let entry = block[ENTRY_AT..ANSWERS_AT].try_into().map(u64::from_le_bytes).ok()?;
        let words = block[ANSWERS_AT..].chunks_exact(2);
        Some(Self { entry, answers: words.map(|word| u16::from_le_bytes([word[0], word[1]])).collect() })
    }

    pub(super) fn answer(&self, call: i64) -> Answer {
        let word = usize::try_from(call).ok().and_then(|call| self.answers.get(call)).copied().unwrap_or(0);
        match word {
            1 => Answer::Restart,
            2 => Answer::Call(self.entry),
            word if word & 0x8000 != 0 => Answer::Fail(word & 0xfff),
            _ => Answer::Default,
        }
    }
}

/// What becomes of the call that a thread was in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Restart,
    /// The thread continues at this address.
    Call(u64),
    /// It fails with this error.
    Fail(u16),
    /// It returns this number of bytes.
    Return(u64),
}

/// Decides what becomes of a call: as the program says, and otherwise by the default.
pub(super) fn decide(call: i64, answer: Answer, writes_at_position: impl FnOnce() -> bool) -> Outcome {
    match (answer, class(call)) {
        (Answer::Call(entry), _) => Outcome::Call(entry),
        (Answer::Fail(error), _) => Outcome::Fail(error),
        (Answer::Restart, _) | (Answer::Default, Class::Waiting | Class::Idempotent) => Outcome::Restart,
        (Answer::Default, Class::Positioned) if writes_at_position() => Outcome::Restart,
        (Answer::Default, Class::Positioned | Class::Fails) => Outcome::Fail(EINTR),
    }
}

const EINTR: u16 = 4;

/// Returns whether a call writes to a regular file that is not only appended to.
pub(super) fn writes_at_position(thread: &Task<'_>, registers: &Registers) -> bool {
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
        bytes[at..at + MAGIC.len()].copy_from_slice(MAGIC);
        bytes[at + ENTRY_AT..at + ANSWERS_AT].copy_from_slice(&entry.to_le_bytes());
        for &(call, answer) in answers {
            let place = at + ANSWERS_AT + 2 * call;
            bytes[place..place + 2].copy_from_slice(&answer.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn calls_that_waited_or_are_idempotent_are_restarted() {
        for call in [libc::SYS_read, libc::SYS_accept4, libc::SYS_futex, libc::SYS_nanosleep, libc::SYS_fsync]
        {
            assert_eq!(decide(call, Answer::Default, NEVER), Outcome::Restart, "{call}");
        }
    }

    #[test]
    fn calls_that_may_have_had_an_effect_fail() {
        for call in
            [libc::SYS_rename, libc::SYS_sendto, libc::SYS_clone, libc::SYS_execve, libc::SYS_close, 9999, -1]
        {
            assert_eq!(decide(call, Answer::Default, NEVER), Outcome::Fail(4), "{call}");
        }
    }

    #[test]
    fn a_write_is_begun_again_where_it_writes_at_position() {
        assert_eq!(decide(libc::SYS_write, Answer::Default, || true), Outcome::Restart);
        assert_eq!(decide(libc::SYS_write, Answer::Default, || false), Outcome::Fail(4));
    }

    #[test]
    fn the_program_decides() {
        let said = [(82, 1), (0, 2), (34, 0x8000 | 125), (1, 0)];
        let answers = Answers::find(&block(0x7f00_1234, &said)).unwrap();
        assert_eq!(decide(82, answers.answer(82), NEVER), Outcome::Restart);
        assert_eq!(decide(0, answers.answer(0), NEVER), Outcome::Call(0x7f00_1234));
        assert_eq!(decide(34, answers.answer(34), NEVER), Outcome::Fail(125));
        assert_eq!(decide(1, answers.answer(1), || false), Outcome::Fail(4));
        assert_eq!((answers.answer(-1), answers.answer(512)), (Answer::Default, Answer::Default));
    }

    #[test]
    fn bytes_that_are_no_block_are_ignored() {
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
            ("Had only been waiting", Class::Waiting),
            ("May be done twice", Class::Idempotent),
            ("Go to a place", Class::Positioned),
        ] {
            let of_class = CALLS.iter().filter(|(.., found)| *found == class);
            let mut names: Vec<String> =
                of_class.map(|(_, name, _)| name.trim_start_matches("SYS_").to_owned()).collect();
            names.sort_unstable();
            assert_eq!(rows(heading), names, "{heading}");
        }
        let listed = rows("Move bytes");
        let movers = super::super::io_calls::IO_CALLS.iter().map(|call| call.name());
        let missing: Vec<&str> = movers.filter(|name| !listed.iter().any(|listed| listed == name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
