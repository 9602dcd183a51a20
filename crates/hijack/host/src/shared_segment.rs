//! The shared page's memory: a System V segment. See `orrery_hijack_image::shared_page` for why.

use std::ffi::c_int;
use std::mem::{size_of, zeroed};
use std::ptr::{self, NonNull};
use std::sync::Mutex;

use orrery_hijack_image::shared_page::SharedPage;

use crate::error::{Error, Result};

/// A page, attached to this process until it executes another program.
#[derive(Debug)]
pub(crate) struct SharedSegment {
    id: c_int,
    page: NonNull<SharedPage>,
    lending: Mutex<()>,
}

// SAFETY: the shared page consists of atomics.
unsafe impl Send for SharedSegment {}
// SAFETY: the page consists of atomics, which threads may share.
unsafe impl Sync for SharedSegment {}

impl SharedSegment {
    /// A fresh shared page. The kernel frees it when nobody is attached any more.
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: the segment is new, and marked for removal as soon as it is attached.
        unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, size_of::<SharedPage>(), libc::IPC_CREAT | 0o600);
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
            let page = NonNull::new(at.cast()).ok_or(error)?;
            Ok(Self { id, page, lending: Mutex::new(()) })
        }
    }

    pub(crate) fn page(&self) -> &SharedPage {
        // SAFETY: attached for as long as this lives; zeros are a valid page.
        unsafe { self.page.as_ref() }
    }

    pub(crate) fn id(&self) -> c_int {
        self.id
    }

    /// How many processes are attached. `None` where that is not known.
    pub(crate) fn attached(&self) -> Option<u64> {
        self.status().map(|status| status.shm_nattch)
    }

    fn status(&self) -> Option<libc::shmid_ds> {
        // SAFETY: the structure is integers, and large enough.
        unsafe {
            let mut status: libc::shmid_ds = zeroed();
            (libc::shmctl(self.id, libc::IPC_STAT, &raw mut status) == 0).then_some(status)
        }
    }

    /// Lets a user attach while `attach` runs: a tracee that changed its user.
    pub(crate) fn lend<R>(&self, user: u32, attach: impl FnOnce() -> R) -> R {
        let _lent = self.lending.lock();
        let before = self.status().map(|status| status.shm_perm.uid);
        let foreign = before.filter(|before| *before != user);
        if foreign.is_some() {
            self.own(user);
        }
        let result = attach();
        if let Some(before) = foreign {
            self.own(before);
        }
        result
    }

    fn own(&self, user: u32) {
        if let Some(mut status) = self.status() {
            status.shm_perm.uid = user;
            // SAFETY: the structure was filled by the kernel. Where this fails, attaching does.
            unsafe { libc::shmctl(self.id, libc::IPC_SET, &raw mut status) };
        }
    }
}

impl Drop for SharedSegment {
    fn drop(&mut self) {
        // SAFETY: nobody refers to the shared page any more.
        unsafe { libc::shmdt(self.page.as_ptr().cast()) };
    }
}
