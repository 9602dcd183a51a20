//! The orbits of this process by their ids, and the calls that somebody may still receive.
//!
//! C code names orbits and calls by numbers, so there has to be a table. A forked child gets an empty one of its own: the
//! parent's orbits are not the child's, and a lock of the parent's may be held by a thread that the child lacks.

use core::ffi::c_int;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use orrery_orbit::{Future, Life, Orbit};

/// Received scratches that are in buffers of our own stay for this many more messages.
const KEPT: usize = 64;

/// So many dead orbits stay that nobody has destroyed: programs that make a new one after each crash do not.
const DEAD: usize = 16;

/// One orbit.
pub(super) struct Known {
    /// The number of the orbit in this process.
    number: c_int,
    pub(super) orbit: Orbit,
    pub(super) calls: Mutex<Calls>,
}

/// Calls of one orbit.
#[derive(Default)]
pub(super) struct Calls {
    /// Those that somebody can name, and those that can be cancelled by their arguments.
    pub(super) open: HashMap<u64, Pending>,
    /// Messages that could not be put where they were sent from.
    pub(super) buffers: VecDeque<Vec<u64>>,
}

/// A call that is not received completely.
#[derive(Clone)]
pub(super) struct Pending {
    pub(super) future: Arc<Future>,
    pub(super) arguments: Arc<[u8]>,
    /// Nobody has its number: it is here to be cancelled, while it waits.
    pub(super) unnamed: bool,
}

impl Calls {
    /// Keeps a buffer for a while; gives its address.
    pub(super) fn keep(&mut self, buffer: Vec<u64>) -> usize {
        let address = buffer.as_ptr().expose_provenance();
        self.buffers.push_back(buffer);
        if self.buffers.len() > KEPT {
            self.buffers.pop_front();
        }
        address
    }
}

/// All orbits of one process.
pub(super) struct Registry {
    process: u32,
    table: Mutex<Table>,
}

#[derive(Default)]
pub(super) struct Table {
    orbits: HashMap<c_int, Arc<Known>>,
    last: c_int,
}

/// A registry per process; a child of the process that made it makes its own, and leaves this one as it is.
static REGISTRY: AtomicPtr<Registry> = AtomicPtr::new(core::ptr::null_mut());

fn registry() -> &'static Registry {
    let process = std::process::id();
    let known = REGISTRY.load(Ordering::Acquire);
    // SAFETY: the pointer is null or leads to a registry that was leaked below and is never freed.
    if let Some(registry) = unsafe { known.as_ref() }
        && registry.process == process
    {
        return registry;
    }
    let fresh = Box::leak(Box::new(Registry { process, table: Mutex::default() }));
    match REGISTRY.compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => fresh,
        // Another thread was first.
        // SAFETY: registries are leaked, and this one is of this process, since only its threads get here.
        Err(other) => unsafe { &*other },
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds an orbit; gives its local number.
pub(super) fn add(id: c_int, orbit: Orbit) -> c_int {
    let mut table = lock(&registry().table);
    table.last += 1;
    let number = table.last;
    let known = Arc::new(Known { number, orbit, calls: Mutex::default() });
    // A dead orbit's id may have been given to this one.
    let before = table.orbits.insert(id, known);
    let all: Vec<(c_int, Arc<Known>)> =
        table.orbits.iter().map(|(id, known)| (*id, Arc::clone(known))).collect();
    drop(table);
    drop(before);
    forget_dead(all);
    number
}

/// Takes out the oldest of those that are dead, and of which nothing can be received any more.
fn forget_dead(mut all: Vec<(c_int, Arc<Known>)>) {
    if all.len() <= DEAD {
        return;
    }
    all.retain(|(_, known)| {
        matches!(known.orbit.life(), Ok(Life::Down { .. }))
            && lock(&known.calls).open.values().all(|call| call.unnamed)
    });
    all.sort_by_key(|(_, known)| core::cmp::Reverse(known.number));
    for (id, dead) in all.split_off(DEAD.min(all.len())) {
        let mut table = lock(&registry().table);
        if table.orbits.get(&id).is_some_and(|known| Arc::ptr_eq(known, &dead)) {
            table.orbits.remove(&id);
        }
    }
}

/// Returns the orbit with this id.
pub(super) fn find(id: c_int) -> Option<Arc<Known>> {
    lock(&registry().table).orbits.get(&id).map(Arc::clone)
}

/// Takes one out.
pub(super) fn remove(id: c_int) -> Option<Arc<Known>> {
    lock(&registry().table).orbits.remove(&id)
}

/// Takes all out.
pub(super) fn remove_all() -> Vec<Arc<Known>> {
    core::mem::take(&mut lock(&registry().table).orbits).into_values().collect()
}
