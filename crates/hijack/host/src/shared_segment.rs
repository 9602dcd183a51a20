//! Memory that the supervisor and all tracees share: System V segments. See `orrery_hijack_image::shared_page` for why.

use std::ffi::c_int;
use std::mem::{size_of, zeroed};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use orrery_hijack_image::journal::Journal;
use orrery_hijack_image::shared_page::{SharedPage, ThreadCounters, Verdicts};
use orrery_hijack_image::users::{Identity, User};

use rustix::thread::futex::{self, Flags};

use crate::error::{Error, Result};

/// The verdicts about code, and what each identity among the tracees shares, attached to this process until it executes
/// another program.
#[derive(Debug)]
pub(crate) struct SharedSegment {
    /// Everybody may read it; only this process' user may write it, and only this process has it attached so.
    verdicts: Attached<Verdicts>,
    /// That of the first program.
    first: Arc<UserMemory>,
    /// All that this process has attached, in the order of the verdicts' users.
    users: Mutex<Vec<Arc<UserMemory>>>,
}

/// What those share who have one identity: see [`orrery_hijack_image::users`].
#[derive(Debug)]
pub(crate) struct UserMemory {
    page: Attached<SharedPage>,
    counters: Attached<ThreadCounters>,
    journal: Attached<Journal>,
}

impl UserMemory {
    /// Makes new segments.
    fn new() -> Result<Self> {
        // SAFETY: all are made of atomics, for which zeros are valid.
        unsafe {
            Ok(Self {
                page: Attached::new(0o600)?,
                counters: Attached::new(0o600)?,
                journal: Attached::new(0o600)?,
            })
        }
    }

    /// Those that another process has made.
    fn attach([page, counters, journal]: [u32; 3]) -> Result<Self> {
        let id = |id: u32| c_int::try_from(id).unwrap_or(-1);
        // SAFETY: made by `new`, by the supervisor, which alone writes which they are.
        unsafe {
            Ok(Self {
                page: Attached::attach(id(page))?,
                counters: Attached::attach(id(counters))?,
                journal: Attached::attach(id(journal))?,
            })
        }
    }

    fn ids(&self) -> [u32; 3] {
        [self.page.id, self.counters.id, self.journal.id].map(|id| u32::try_from(id).unwrap_or(0))
    }

    pub(crate) fn page(&self) -> &SharedPage {
        self.page.get()
    }

    pub(crate) fn counters(&self) -> &ThreadCounters {
        self.counters.get()
    }

    pub(crate) fn journal(&self) -> &Journal {
        self.journal.get()
    }

    pub(crate) fn journal_id(&self) -> c_int {
        self.journal.id
    }

    /// Returns how many processes are attached. `None` where that is not known.
    pub(crate) fn attached(&self) -> Option<u64> {
        self.page.status().map(|status| status.shm_nattch)
    }

    /// Lets a user attach all of it.
    fn own(&self, user: u32) {
        self.page.own(user);
        self.counters.own(user);
        self.journal.own(user);
    }
}

impl SharedSegment {
    /// Makes new segments. The kernel frees them when no process is attached any more.
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: made of atomics, for which zeros are valid.
        let verdicts: Attached<Verdicts> = unsafe { Attached::new(0o644)? };
        let first = Arc::new(UserMemory::new()?);
        Ok(Self { verdicts, users: Mutex::new(vec![Arc::clone(&first)]), first })
    }

    /// Returns the memory of the first program.
    pub(crate) fn first(&self) -> &UserMemory {
        &self.first
    }

    pub(crate) fn verdicts(&self) -> &Verdicts {
        self.verdicts.get()
    }

    pub(crate) fn verdicts_id(&self) -> c_int {
        self.verdicts.id
    }

    /// Returns the memory of all identities that there are. What cannot be attached is left out, with all behind it.
    pub(crate) fn users(&self) -> Vec<Arc<UserMemory>> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(ids) = self.verdicts().users.get(users.len()).and_then(User::segments) {
            let Ok(memory) = UserMemory::attach(ids) else { break };
            users.push(Arc::new(memory));
        }
        users.clone()
    }

    /// Returns which of the users has an identity.
    pub(crate) fn find(&self, identity: &Identity) -> Option<usize> {
        let has = |user: &User| user.identity().is_some_and(|other| other.shares_with(identity));
        self.verdicts().users.iter().position(has)
    }

    /// Says whose the first memory is. In the supervisor only, before there are tracees.
    pub(crate) fn enter_first(&self, identity: &Identity) {
        if let Some(user) = self.verdicts().users.first() {
            user.enter(identity, self.first.ids());
        }
    }

    /// Adds memory for one more identity, when it was prepared. In the supervisor only.
    ///
    /// # Errors
    /// Where there are too many, or no more segments.
    pub(crate) fn add(
        &self,
        identity: &Identity,
        prepare: impl FnOnce(usize, &Arc<UserMemory>),
    ) -> Result<usize> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let index = users.len();
        let Some(place) = self.verdicts().users.get(index) else {
            return Err(Error::System {
                operation: "share memory with one more user",
                source: std::io::ErrorKind::OutOfMemory.into(),
            });
        };
        let memory = Arc::new(UserMemory::new()?);
        memory.own(identity.users[1]);
        prepare(index, &memory);
        place.enter(identity, memory.ids());
        // Readers of other processes know the first journal only.
        let first = self.first.journal();
        first.announce(index.saturating_sub(1), memory.ids()[2]);
        // Who does not sleep looks by itself.
        let _woken = futex::wake(&first.further, Flags::empty(), i32::MAX.unsigned_abs());
        users.push(memory);
        Ok(index)
    }
}

/// The journal of a run that another process of this user, or of `owner`, has started.
#[derive(Debug)]
pub(crate) struct ForeignJournal(Attached<Journal>);

impl ForeignJournal {
    /// Attaches it, if `owner` has made it: nobody can have a segment read that is another user's.
    pub(crate) fn attach(id: c_int, owner: u32) -> Result<Self> {
        let refused = |cause| Error::Facility {
            facility: "the journal of another process",
            cause,
            way_out: "it is the segment of a run of the same user",
        };
        // SAFETY: what is attached, and for as long as this lives, is a segment of the size of a `Journal`, which
        // consists of atomics, of which any bytes are valid. A segment's size never changes.
        unsafe {
            let mut status: libc::shmid_ds = zeroed();
            if libc::shmctl(id, libc::IPC_STAT, &raw mut status) != 0 {
                return Err(refused(std::io::Error::last_os_error()));
            }
            if status.shm_segsz != size_of::<Journal>() || status.shm_perm.cuid != owner {
                return Err(refused(std::io::Error::from_raw_os_error(libc::EPERM)));
            }
            Ok(Self(Attached::attach(id)?))
        }
    }

    pub(crate) fn journal(&self) -> &Journal {
        self.0.get()
    }
}

/// A segment with a `T` in it, attached for reading and writing.
struct Attached<T> {
    id: c_int,
    at: NonNull<T>,
}

impl<T> std::fmt::Debug for Attached<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attached").field("id", &self.id).field("at", &self.at).finish()
    }
}

// SAFETY: what is attached consists of atomics, by the caller of `new`.
unsafe impl<T> Send for Attached<T> {}
// SAFETY: what is attached consists of atomics, which threads and processes may share.
unsafe impl<T> Sync for Attached<T> {}

impl<T> Attached<T> {
    /// A segment that another process has made.
    ///
    /// # Safety
    /// `T` is in it, and consists of atomics.
    unsafe fn attach(id: c_int) -> Result<Self> {
        // SAFETY: only adds memory.
        let at = unsafe { libc::shmat(id, ptr::null(), 0) };
        let error = Error::system("attach shared memory");
        // A failing shmat gives an address of -1.
        NonNull::new(at.cast())
            .filter(|at| at.addr().get() != usize::MAX)
            .map(|at| Self { id, at })
            .ok_or(error)
    }

    /// Returns a fresh segment of zeros with these permissions, marked for removal.
    ///
    /// # Safety
    /// `T` consists of atomics, of which zeros are valid.
    unsafe fn new(permissions: c_int) -> Result<Self> {
        // SAFETY: the segment is new, and marked for removal as soon as it is attached.
        unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, size_of::<T>(), libc::IPC_CREAT | permissions);
            if id < 0 {
                return Err(Error::Facility {
                    facility: "System V shared memory",
                    cause: std::io::Error::last_os_error(),
                    way_out: "it needs CONFIG_SYSVIPC, and kernel.shmall above what is in use",
                });
            }
            let at = libc::shmat(id, ptr::null(), 0);
            let error = Error::system("attach shared memory");
            libc::shmctl(id, libc::IPC_RMID, ptr::null_mut());
            // A failing shmat gives an address of -1.
            if at.addr() == usize::MAX {
                return Err(error);
            }
            Ok(Self { id, at: NonNull::new(at.cast()).ok_or(error)? })
        }
    }

    fn get(&self) -> &T {
        // SAFETY: attached for as long as this lives; the bytes are a valid `T`, by the caller of `new`.
        unsafe { self.at.as_ref() }
    }

    fn status(&self) -> Option<libc::shmid_ds> {
        // SAFETY: the structure is integers, and large enough.
        unsafe {
            let mut status: libc::shmid_ds = zeroed();
            (libc::shmctl(self.id, libc::IPC_STAT, &raw mut status) == 0).then_some(status)
        }
    }

    fn own(&self, user: u32) {
        if let Some(mut status) = self.status() {
            status.shm_perm.uid = user;
            // SAFETY: the structure was filled by the kernel. Where this fails, attaching does.
            unsafe { libc::shmctl(self.id, libc::IPC_SET, &raw mut status) };
        }
    }
}

impl<T> Drop for Attached<T> {
    fn drop(&mut self) {
        // SAFETY: nobody refers to what is attached any more.
        unsafe { libc::shmdt(self.at.as_ptr().cast()) };
    }
}
