//! Lifetime: a context ends when nobody holds a descriptor of it and it does not have control.
//!
//! Its watcher ([`orrery_domain::watch`]) hears, through an epoll(7) instance over all grants, of each that is hung up.

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU8, Ordering};

use orrery_domain::watch::EventSource;
use orrery_sys::PageRange;
use rustix::event::epoll;
use syscalls::{Sysno, syscall};

use crate::error::{Error, Result};
use crate::shared::program::{MAX_CONTEXTS, Program};
use crate::spawn::{job_control, signal_forwarding};
use crate::syscalls::listener_transfer::{self, ListenerTransfer};

/// What main thread and watcher of a context both know. It has pages of its own, which no rollback touches: the watcher
/// goes on while the rest is restored.
#[derive(Debug)]
#[repr(align(4096))]
pub(crate) struct Lifetime {
    epoll: OwnedFd,
    /// How many grants are held.
    held: AtomicI32,
    hung_up: [AtomicU8; 2 * MAX_CONTEXTS],
    program: &'static Program,
    me: u32,
    /// What the watcher hands out when its starter is readable: a
    /// [`crate::syscalls::listener_transfer::ListenerTransfer`].
    transfer: AtomicPtr<c_void>,
}

/// What the starter is known by, beside the slots of grants.
const STARTER: u64 = u64::MAX;

// SAFETY: all that changes is atomic, and the pointer goes to memory that is never unmapped.
unsafe impl Send for Lifetime {}
// SAFETY: all that changes is atomic, and the pointer goes to memory that is never unmapped.
unsafe impl Sync for Lifetime {}

impl Lifetime {
    /// Makes one for the context of slot `me`, which stays for the rest of the process.
    pub(crate) fn make(program: &'static Program, me: u32) -> Result<&'static Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map(orrery_sys::descriptors::raise)
            .map_err(|e| Error::system("epoll_create1", 0, e))?;
        let lifetime = Box::leak(Box::new(Self {
            epoll,
            held: AtomicI32::new(0),
            hung_up: [const { AtomicU8::new(0) }; 2 * MAX_CONTEXTS],
            program,
            me,
            transfer: AtomicPtr::new(std::ptr::null_mut()),
        }));
        job_control::set_slot(program, me);
        signal_forwarding::set_slot(program, me);
        Ok(lifetime)
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// The pages that it has to itself.
    pub(crate) fn pages(&'static self) -> PageRange {
        PageRange::covering(std::ptr::from_ref(self).addr(), size_of::<Self>())
    }

    pub(crate) fn event_source(&'static self) -> EventSource {
        let with = std::ptr::from_ref(self).cast();
        EventSource { fd: self.epoll.as_raw_fd(), on_readable: on_event, with, on_idle: Some(on_idle) }
    }

    /// In a context that was just created: closes its copy of its creator's epoll instance, through which it could
    /// meddle with the creator's lifetime.
    pub(crate) fn close_copy(&self) {
        // SAFETY: the lifetime stays behind unused, so nobody closes the number a second time.
        unsafe { rustix::io::close(self.epoll.as_raw_fd()) };
    }

    /// Listens to one grant more.
    pub(crate) fn add(&self, socket: &OwnedFd, slot: usize) -> Result<()> {
        let Some(flag) = self.hung_up.get(slot) else { return Err(Error::Full { most: self.hung_up.len() }) };
        flag.store(0, Ordering::SeqCst);
        self.held.fetch_add(1, Ordering::SeqCst);
        let number = u64::from(socket.as_raw_fd().unsigned_abs()) << 32 | slot as u64;
        // Hang-ups are reported without being asked for.
        epoll::add(&self.epoll, socket.as_fd(), epoll::EventData::new_u64(number), epoll::EventFlags::empty())
            .map_err(|e| {
                self.held.fetch_sub(1, Ordering::SeqCst);
                Error::system("epoll_ctl", slot, e)
            })
    }

    /// Has the watcher call [`crate::syscalls::listener_transfer::on_event`] with `transfer`, once; `starter` is
    /// readable already.
    pub(crate) fn transfer_listener(
        &self,
        transfer: &'static ListenerTransfer,
        starter: &OwnedFd,
    ) -> rustix::io::Result<()> {
        self.transfer.store(std::ptr::from_ref(transfer).cast_mut().cast(), Ordering::SeqCst);
        epoll::add(&self.epoll, starter.as_fd(), epoll::EventData::new_u64(STARTER), epoll::EventFlags::IN)
    }

    pub(crate) fn is_hung_up(&self, slot: usize) -> bool {
        self.hung_up.get(slot).is_some_and(|flag| flag.load(Ordering::SeqCst) != 0)
    }

    /// The grant's place may be used again.
    pub(crate) fn forget(&self, slot: usize) {
        if let Some(flag) = self.hung_up.get(slot) {
            flag.store(0, Ordering::SeqCst);
        }
    }
}

/// On the watcher's thread: stops the context with the program.
unsafe extern "C" fn on_idle(with: *const c_void) -> i32 {
    // SAFETY: `event_source` passed a lifetime, which is never freed.
    let lifetime = unsafe { &*with.cast::<Lifetime>() };
    job_control::follow_root(lifetime.program, lifetime.me)
}

/// On the watcher's thread: notes which grants were hung up, and ends the context if that was the last one.
///
/// It ends by SIGKILL: an exit would be taken for the program's.
unsafe extern "C" fn on_event(with: *const c_void) {
    // SAFETY: `event_source` passed a lifetime, which is never freed.
    let lifetime = unsafe { &*with.cast::<Lifetime>() };
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
    // SAFETY: the kernel writes at most eight events.
    let heard = unsafe {
        syscall!(Sysno::epoll_pwait, lifetime.epoll.as_raw_fd(), events.as_mut_ptr(), events.len(), 0, 0, 0)
    };
    for event in events.iter().take(heard.unwrap_or(0)) {
        if event.u64 == STARTER {
            // SAFETY: `transfer_listener` put it there, and its closing ends what the starter tells.
            unsafe { listener_transfer::on_event(lifetime.transfer.load(Ordering::SeqCst)) };
            continue;
        }
        let (number, slot) = (event.u64 >> 32, event.u64 & 0xffff_ffff);
        // SAFETY: takes a socket of ours out of our own epoll instance.
        let _ =
            unsafe { syscall!(Sysno::epoll_ctl, lifetime.epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, number, 0) };
        lifetime.held.fetch_sub(1, Ordering::SeqCst);
        if let Some(flag) = usize::try_from(slot).ok().and_then(|slot| lifetime.hung_up.get(slot)) {
            flag.store(1, Ordering::SeqCst);
        }
    }
    if lifetime.held.load(Ordering::SeqCst) <= 0 && !lifetime.program.has_control(lifetime.me) {
        let own = rustix::process::getpid().as_raw_pid();
        // SAFETY: the call takes numbers only, and ends this process.
        let _ = unsafe { syscall!(Sysno::kill, own, libc::SIGKILL) };
    }
}
