//! Memory that the supervisor and all tracees share: System V segments. See `orrery_hijack_image::shared_page` for why.

use std::ffi::c_int;
use std::mem::{size_of, zeroed};
use std::ptr::{self, NonNull};
use std::sync::Mutex;

use orrery_hijack_image::shared_page::{SharedPage, Verdicts};

use crate::error::{Error, Result};

/// The page, and the verdicts about code, attached to this process until it executes another program.
#[derive(Debug)]
pub(crate) struct SharedSegment {
    page: Attached<SharedPage>,
    /// Everybody may read it; only this process' user may write it, and only this process has it attached so.
    verdicts: Attached<Verdicts>,
    lending: Mutex<()>,
}

impl SharedSegment {
    /// Fresh segments. The kernel frees them when nobody is attached any more.
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: both are made of atomics, for which zeros are valid.
        let (page, verdicts) = unsafe { (Attached::new(0o600)?, Attached::new(0o644)?) };
        Ok(Self { page, verdicts, lending: Mutex::new(()) })
    }

    pub(crate) fn page(&self) -> &SharedPage {
        self.page.get()
    }

    pub(crate) fn id(&self) -> c_int {
        self.page.id
    }

    pub(crate) fn verdicts(&self) -> &Verdicts {
        self.verdicts.get()
    }

    pub(crate) fn verdicts_id(&self) -> c_int {
        self.verdicts.id
    }

    /// How many processes are attached. `None` where that is not known.
    pub(crate) fn attached(&self) -> Option<u64> {
        self.page.status().map(|status| status.shm_nattch)
    }

    /// Lets a user attach the page while `attach` runs: a tracee that changed its user.
    pub(crate) fn lend<R>(&self, user: u32, attach: impl FnOnce() -> R) -> R {
        let _lent = self.lending.lock();
        let before = self.page.status().map(|status| status.shm_perm.uid);
        let foreign = before.filter(|before| *before != user);
        if foreign.is_some() {
            self.page.own(user);
        }
        let result = attach();
        if let Some(before) = foreign {
            self.page.own(before);
        }
        result
    }
}

/// The page of a run that another process of this user, or of `owner`, has started.
#[derive(Debug)]
pub(crate) struct ForeignPage(Attached<SharedPage>);

impl ForeignPage {
    /// Attaches it, if `owner` has made it: nobody can have a segment read that is another user's.
    pub(crate) fn attach(id: c_int, owner: u32) -> Result<Self> {
        let refused = |cause| Error::Facility {
            facility: "the journal of another process",
            cause,
            way_out: "it is the segment of a run of the same user",
        };
        // SAFETY: what is attached, and for as long as this lives, is a segment of the size of a `SharedPage`, which consists of atomics, of
        // which any bytes are valid. A segment's size never changes.
        unsafe {
            let mut status: libc::shmid_ds = zeroed();
            if libc::shmctl(id, libc::IPC_STAT, &raw mut status) != 0 {
                return Err(refused(std::io::Error::last_os_error()));
            }
            if status.shm_segsz != size_of::<SharedPage>() || status.shm_perm.cuid != owner {
                return Err(refused(std::io::Error::from_raw_os_error(libc::EPERM)));
            }
            let at = libc::shmat(id, ptr::null(), 0);
            // A failing shmat gives an address of -1.
            if at.addr() == usize::MAX {
                return Err(refused(std::io::Error::last_os_error()));
            }
            let error = refused(std::io::Error::from_raw_os_error(libc::EFAULT));
            Ok(Self(Attached { id, at: NonNull::new(at.cast()).ok_or(error)? }))
        }
    }

    pub(crate) fn page(&self) -> &SharedPage {
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
    /// A fresh segment of zeros with these permissions, marked for removal.
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
