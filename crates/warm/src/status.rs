//! The page on which a worker notes what it is doing, for the master to read when the worker no longer can speak.
//!
//! One sealed-size memfd page per worker, shared between that worker and the master and nobody else. The worker
//! writes, the master reads. A hostile script runs inside the worker and can write anything here, so the master
//! believes nothing that could hurt another: a request id claimed falsely is of no use to a script that cannot
//! guess another's 128 random bits, and times are taken by the master's own clock.
//!
//! The mapping is shared, so a rollback of the worker does not undo it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::protocol::{Outcome, RequestId};

const PAGE: usize = 4096;

/// What is written on the page.
#[repr(C)]
#[derive(Debug)]
struct Layout {
    /// Requests begun and requests ended, counted together: odd while one runs.
    turns: AtomicU64,
    /// The id of the request that runs, in two halves; both zero before it is known.
    id: [AtomicU64; 2],
    /// When the running request began, in nanoseconds of the monotonic clock, and the inode of its connection: for the
    /// worker itself, whose own memory forgets.
    began: AtomicU64,
    connection: AtomicU64,
    /// Set when the interpreter is ready for its first request.
    ready: AtomicU64,
    /// 1 while the worker waits for a connection.
    waiting: AtomicU64,
    /// 1 when the worker has taken a connection since its last round began, and how many rounds in a row ended by a
    /// fault before it did; for the worker itself.
    taken: AtomicU64,
    faults: AtomicU64,
    /// How many scripts in a row died of a fault; likewise.
    deaths: AtomicU64,
    /// How long the note is; 0 for none.
    note_length: AtomicU64,
    /// How the request ended, encoded.
    note: [AtomicU8; MAX_NOTE],
}

/// How many rounds in a row may fault before they take a connection.
const MOST_FAULTS: u64 = 2;
/// How many scripts in a row may die of faults before their worker is replaced.
const MOST_DEATHS: u64 = 3;
/// Longest note in bytes.
const MAX_NOTE: usize = 1024;

/// Whether a worker can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fitness {
    /// The worker can serve.
    Fit,
    /// So many scripts in a row died of faults that the reason may be the worker.
    Doubtful,
    /// Its own part of a round faults, before it has taken a connection.
    Unfit,
}

/// One worker's page, mapped.
#[derive(Debug)]
pub struct StatusPage {
    layout: NonNull<Layout>,
}

// SAFETY: the page consists of atomics only.
unsafe impl Send for StatusPage {}
// SAFETY: the page consists of atomics only.
unsafe impl Sync for StatusPage {}

/// What the page says at an instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Whether the interpreter is ready.
    pub ready: bool,
    /// Requests finished by this worker.
    pub served: u64,
    /// Changes with every beginning and end of a request; odd while one runs.
    pub turns: u64,
    /// The request that runs, once its id is known.
    pub current: Option<RequestId>,
    /// Whether the worker waits for a connection.
    pub waiting: bool,
    /// Whether the program of the request that runs has come to its end, which remains to be undone.
    pub over: bool,
}

impl Status {
    /// Returns whether a request runs.
    #[must_use]
    pub fn busy(&self) -> bool {
        self.turns % 2 == 1
    }
}

impl StatusPage {
    /// Makes a new page; the descriptor is for the worker to [`open`](Self::open).
    ///
    /// # Errors
    /// Those of `memfd_create(2)`, `ftruncate(2)` and `mmap(2)`.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
        let fd = match rustix::fs::memfd_create("orrery-warm-status", flags) {
            // Linux before 6.3 does not know NOEXEC_SEAL.
            Err(rustix::io::Errno::INVAL) => {
                rustix::fs::memfd_create("orrery-warm-status", flags - MemfdFlags::NOEXEC_SEAL)?
            }
            other => other?,
        };
        let file = File::from(fd);
        file.set_len(PAGE as u64)?;
        // A worker that shrank its page would make the master's next read a SIGBUS.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let page = Self::open(file.as_fd())?;
        Ok((page, file.into()))
    }

    /// Maps the page behind `fd`.
    ///
    /// # Errors
    /// Those of `fstat(2)` and `mmap(2)`; `InvalidData` where `fd` is no such page.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Self> {
        if rustix::fs::fstat(fd)?.st_size < 4096 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the status descriptor is not a status page",
            ));
        }
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing; the file is at least a page
        // long, so that the mapping can be read.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )?
        };
        let layout = NonNull::new(address.cast::<Layout>());
        Ok(Self { layout: layout.ok_or_else(|| io::Error::other("mmap answered a null address"))? })
    }

    fn layout(&self) -> &Layout {
        // SAFETY: the mapping lives as long as `self`, is page-aligned, and holds atomics, valid for any bytes.
        unsafe { self.layout.as_ref() }
    }

    /// Worker: the interpreter is ready.
    pub fn set_ready(&self) {
        self.layout().ready.store(1, Ordering::Release);
    }

    /// Worker: a connection, the socket with that inode, was taken; its request is not known yet.
    pub fn begin(&self, connection: u64) {
        let layout = self.layout();
        layout.began.store(monotonic_nanoseconds(), Ordering::Relaxed);
        layout.connection.store(connection, Ordering::Relaxed);
        layout.id[0].store(0, Ordering::Relaxed);
        layout.id[1].store(0, Ordering::Relaxed);
        layout.note_length.store(0, Ordering::Relaxed);
        layout.taken.store(1, Ordering::Relaxed);
        layout.faults.store(0, Ordering::Relaxed);
        layout.waiting.store(0, Ordering::Relaxed);
        layout.turns.fetch_or(1, Ordering::Release);
    }

    /// Worker: waits for a connection from now on.
    pub fn wait(&self) {
        self.layout().waiting.store(1, Ordering::Release);
    }

    /// Worker: another round begins after one that `died`, by a fault.
    ///
    /// It makes no system call and uses no thread-local storage, for either may be what is broken.
    pub fn begin_round(&self, died: bool) -> Fitness {
        let layout = self.layout();
        layout.waiting.store(0, Ordering::Relaxed);
        let taken = layout.taken.swap(0, Ordering::Relaxed) == 1;
        let count = |word: &AtomicU64| word.fetch_add(1, Ordering::Relaxed) + 1;
        if !died {
            layout.deaths.store(0, Ordering::Relaxed);
            return Fitness::Fit;
        }
        if taken && count(&layout.deaths) >= MOST_DEATHS {
            Fitness::Doubtful
        } else if !taken && count(&layout.faults) >= MOST_FAULTS {
            Fitness::Unfit
        } else {
            Fitness::Fit
        }
    }

    /// Worker: the running request is `id`.
    pub fn name(&self, id: RequestId) {
        let [low, high] = halves(id);
        self.layout().id[0].store(low, Ordering::Relaxed);
        self.layout().id[1].store(high, Ordering::Release);
    }

    /// Worker: the inode that [`StatusPage::begin`] was given.
    pub fn connection(&self) -> u64 {
        self.layout().connection.load(Ordering::Relaxed)
    }

    /// Worker: microseconds since [`StatusPage::begin`].
    pub fn micros(&self) -> u64 {
        monotonic_nanoseconds().saturating_sub(self.layout().began.load(Ordering::Relaxed)) / 1000
    }

    /// Worker: the running request is over and answered.
    pub fn end(&self) {
        let layout = self.layout();
        let turns = layout.turns.load(Ordering::Relaxed);
        if turns % 2 == 1 {
            layout.turns.store(turns.wrapping_add(1), Ordering::Release);
        }
    }

    /// Worker: the running request ended like this, though it is not answered yet.
    pub fn note(&self, outcome: &Outcome) {
        let mut buffer = [0; MAX_NOTE];
        let encoded = match postcard::to_slice(outcome, &mut buffer) {
            Ok(encoded) => encoded,
            Err(_) => {
                match postcard::to_slice(&Outcome::Refused("for a long reason".to_owned()), &mut buffer) {
                    Ok(encoded) => encoded,
                    Err(_) => return,
                }
            }
        };
        self.note_encoded(encoded);
    }

    /// Worker: as [`StatusPage::note`], with the outcome encoded (postcard) by the caller; what does not fit is cut
    /// off. As little can go wrong as in [`StatusPage::begin_round`].
    pub fn note_encoded(&self, encoded: &[u8]) {
        let layout = self.layout();
        for (place, byte) in layout.note.iter().zip(encoded) {
            place.store(*byte, Ordering::Relaxed);
        }
        layout.note_length.store(encoded.len().min(MAX_NOTE) as u64, Ordering::Release);
    }

    /// Returns how the running request ended, if that was noted.
    #[must_use]
    pub fn noted(&self) -> Option<Outcome> {
        let layout = self.layout();
        let length = usize::try_from(layout.note_length.load(Ordering::Acquire)).ok()?;
        let mut bytes = [0_u8; MAX_NOTE];
        for (byte, place) in bytes.iter_mut().zip(layout.note.get(..length)?) {
            *byte = place.load(Ordering::Relaxed);
        }
        if length == 0 { None } else { postcard::from_bytes(&bytes[..length]).ok() }
    }

    /// Master: what the page says now.
    #[must_use]
    pub fn read(&self) -> Status {
        let layout = self.layout();
        let turns = layout.turns.load(Ordering::Acquire);
        let high = layout.id[1].load(Ordering::Acquire);
        let low = layout.id[0].load(Ordering::Relaxed);
        let current = (turns % 2 == 1 && (low, high) != (0, 0)).then(|| whole([low, high]));
        Status {
            ready: layout.ready.load(Ordering::Acquire) != 0,
            served: turns / 2,
            turns,
            current,
            waiting: layout.waiting.load(Ordering::Acquire) != 0,
            over: layout.note_length.load(Ordering::Acquire) != 0,
        }
    }
}

impl Drop for StatusPage {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `open`, and no reference into it outlives `self`.
        // A failure would leave the page mapped, which harms nobody.
        let _ = unsafe { rustix::mm::munmap(self.layout.as_ptr().cast(), PAGE) };
    }
}

fn monotonic_nanoseconds() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

fn halves(id: RequestId) -> [u64; 2] {
    let whole = u128::from_le_bytes(id.0);
    #[expect(clippy::cast_possible_truncation, reason = "the halves of 128 bits")]
    [whole as u64, (whole >> 64) as u64]
}

fn whole([low, high]: [u64; 2]) -> RequestId {
    RequestId((u128::from(low) | (u128::from(high) << 64)).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_master_sees_what_the_worker_notes() {
        let (master, fd) = StatusPage::create().unwrap();
        let worker = StatusPage::open(fd.as_fd()).unwrap();
        assert!(!master.read().ready && !master.read().busy());
        worker.set_ready();
        worker.begin(1);
        assert!(master.read().busy() && master.read().current.is_none());
        let id = RequestId([9; 16]);
        worker.name(id);
        assert_eq!(master.read().current, Some(id));
        worker.end();
        let idle = Status { ready: true, served: 1, turns: 2, current: None, waiting: false, over: false };
        assert_eq!(master.read(), idle);
        worker.wait();
        assert!(master.read().waiting);
        worker.begin(1);
        assert_eq!(master.read().current, None, "the last request's id must not stand for the next");
    }

    #[test]
    fn a_worker_cannot_shrink_the_page_under_the_master() {
        let (_master, fd) = StatusPage::create().unwrap();
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
    }

    #[test]
    fn a_worker_gives_up_when_its_own_part_faults() {
        let (_master, fd) = StatusPage::create().unwrap();
        let page = StatusPage::open(fd.as_fd()).unwrap();
        page.begin(1);
        assert_eq!(page.begin_round(true), Fitness::Fit, "the script's fault");
        assert_eq!(
            [true; 2].map(|died| page.begin_round(died)),
            [Fitness::Fit, Fitness::Unfit],
            "its own, twice"
        );
        page.begin(1);
        assert_eq!(page.begin_round(false), Fitness::Fit);
        for deaths in 1..=MOST_DEATHS {
            page.begin(1);
            assert_eq!(page.begin_round(true) == Fitness::Doubtful, deaths == MOST_DEATHS);
        }
    }

    #[test]
    fn ids_survive_their_halves() {
        let id = RequestId::random().unwrap();
        assert_eq!(whole(halves(id)), id);
    }
}
