//! The locks that are held while the process forks.
//!
//! Every lock of areas and mirrors is acquired before a fork and released on both sides, as the C library does with its
//! own, so that a child never inherits a lock whose holder it lacks. The order is: this registry, the arena, mirrors,
//! areas (in one area, the tracking before the heap), the process' tracking, the copier.
//!
//! This file holds the one list of everything that has such locks: a handler of `fork(2)` has no other way to them.

use core::any::Any;
use core::cell::Cell;
use std::sync::{Arc, Weak};
use std::vec::Vec;

use orrery_sys::PageRange;
use rustix::io::Errno;

use super::lock::Lock;
use super::{Error, copier, tracking};

/// Something with locks that are held while the process forks.
pub(super) trait ForkLocks: Any + Send + Sync {
    /// Acquires all of them.
    fn acquire(&self);

    /// Releases all of them, in the parent or in the child.
    ///
    /// # Safety
    /// [`ForkLocks::acquire`] was called by this thread, or by the one that forked it.
    unsafe fn release(&self);

    /// Returns the memory that it manages, if it is an area.
    fn memory(&self) -> Option<PageRange> {
        None
    }
}

impl<T: Send + 'static> ForkLocks for Lock<T> {
    fn acquire(&self) {
        self.take();
    }

    unsafe fn release(&self) {
        // SAFETY: the caller's promise is the same.
        unsafe { self.give() }
    }
}

/// The objects whose locks are held over a fork.
struct Registry {
    arena: Option<&'static dyn ForkLocks>,
    mirrors: Vec<Weak<dyn ForkLocks>>,
    areas: Vec<Weak<dyn ForkLocks>>,
}

static REGISTRY: Lock<Registry> = Lock::new(Registry { arena: None, mirrors: Vec::new(), areas: Vec::new() });
/// What the fork that is under way has acquired; reached only while `REGISTRY` is held.
static ACQUIRED: Lock<Vec<Arc<dyn ForkLocks>>> = Lock::new(Vec::new());

std::thread_local! {
    /// Whether this thread holds all locks already, inside [`with_all`].
    static HOLDING: Cell<bool> = const { Cell::new(false) };
}

/// Installs the handlers, with the lock of the arena. It is called once.
pub(super) fn install(arena: &'static dyn ForkLocks) -> Result<(), Error> {
    REGISTRY.lock().arena = Some(arena);
    // SAFETY: the handlers are functions of this program that stay loaded as long as it runs.
    match unsafe { libc::pthread_atfork(Some(prepare), Some(release), Some(release)) } {
        0 => Ok(()),
        errno => Err(Error::Memory { bytes: 0, errno: Errno::from_raw_os_error(errno) }),
    }
}

/// Registers an area.
pub(super) fn add_area(area: Weak<dyn ForkLocks>) {
    add(&mut REGISTRY.lock().areas, area);
}

/// Registers a mirror.
pub(super) fn add_mirror(mirror: Weak<dyn ForkLocks>) {
    add(&mut REGISTRY.lock().mirrors, mirror);
}

fn add(list: &mut Vec<Weak<dyn ForkLocks>>, new: Weak<dyn ForkLocks>) {
    list.retain(|other| other.strong_count() > 0);
    list.push(new);
}

/// Returns the registered area that `address` is in.
pub(super) fn area_at(address: usize) -> Option<Arc<dyn ForkLocks>> {
    areas().into_iter().find(|area| area.memory().is_some_and(|range| range.contains(address)))
}

/// Returns all registered areas.
pub(super) fn areas() -> Vec<Arc<dyn ForkLocks>> {
    REGISTRY.lock().areas.iter().filter_map(Weak::upgrade).collect()
}

extern "C" fn prepare() {
    if !HOLDING.get() {
        acquire_all();
    }
}

extern "C" fn release() {
    if !HOLDING.get() {
        release_all();
    }
}

fn acquire_all() {
    let registry = REGISTRY.lock();
    if let Some(arena) = registry.arena {
        arena.acquire();
    }
    let all: Vec<_> = registry.mirrors.iter().chain(&registry.areas).filter_map(Weak::upgrade).collect();
    all.iter().for_each(|one| one.acquire());
    *ACQUIRED.lock() = all;
    core::mem::forget(registry);
    tracking::lock().take();
    copier::lock().take();
}

fn release_all() {
    let acquired = core::mem::take(&mut *ACQUIRED.lock());
    // SAFETY: `acquire_all` acquired them all in this thread, or in the one that forked it. The registry is read before
    // its own lock is released.
    unsafe {
        copier::lock().give();
        tracking::lock().give();
        acquired.iter().rev().for_each(|one| one.release());
        let arena = REGISTRY.value_while_held().arena;
        if let Some(arena) = arena {
            arena.release();
        }
        REGISTRY.give();
    }
    // Handles that were the last of their kind are dropped here, with every lock free.
    drop(acquired);
}

/// Calls `work`, which may fork, with all locks held, and passes it the memory of every area. Other threads that fork
/// meanwhile wait, and so do those that allocate in areas or make calls.
pub(super) fn with_all<R>(work: impl FnOnce(&[PageRange]) -> R) -> R {
    acquire_all();
    HOLDING.set(true);
    let areas: Vec<_> = ACQUIRED.lock().iter().filter_map(|one| one.memory()).collect();
    let result = work(&areas);
    HOLDING.set(false);
    release_all();
    result
}
