//! What a task sees: its arguments, the orbit's private store, and a way to send updates.

use core::any::Any;
use core::cell::Cell;
use core::ffi::c_void;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::sync::Arc;

use orrery_domain::Channel;

use crate::control_block::ControlBlock;
use crate::update::Scratch;
use crate::update_socket::UpdateSocket;
use crate::{Error, Result, check};

/// A running task, as a Rust entry function gets it.
pub struct Task<'a> {
    pub(crate) call: u64,
    pub(crate) arguments: &'a mut [u8],
    pub(crate) store: &'a mut Store,
}

impl core::fmt::Debug for Task<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Task")
            .field("call", &self.call)
            .field("arguments", &self.arguments)
            .finish_non_exhaustive()
    }
}

/// The orbit's private memory between tasks, as its init function made it.
pub(crate) enum Store {
    Rust(Box<dyn Any>),
    C(*mut c_void),
}

impl Store {
    /// As a C function gets it.
    pub(crate) fn pointer(&self) -> *mut c_void {
        match self {
            Self::C(pointer) => *pointer,
            Self::Rust(_) => core::ptr::null_mut(),
        }
    }
}

impl Task<'_> {
    /// Returns the call's number, as its future has it.
    pub fn call(&self) -> u64 {
        self.call
    }

    /// Returns the argument bytes of the call, the task's own copy.
    pub fn arguments(&mut self) -> &mut [u8] {
        self.arguments
    }

    /// Returns the arguments as one value; `None` if they have another size.
    pub fn argument<T: bytemuck::AnyBitPattern>(&self) -> Option<T> {
        bytemuck::try_pod_read_unaligned(self.arguments).ok()
    }

    /// Returns the arguments as an address, such as main gets from `expose_provenance`;
    /// `None` if they have another size.
    ///
    /// The pointer is valid in the task if it leads into an area that the call named, or to what main had when the orbit was
    /// created.
    pub fn pointer<T>(&self) -> Option<*mut T> {
        self.argument().map(core::ptr::with_exposed_provenance_mut)
    }

    /// Returns what the init function returned.
    ///
    /// Returns `None` where that was of another type.
    pub fn store<T: 'static>(&mut self) -> Option<&mut T> {
        match self.store {
            Store::Rust(store) => store.downcast_mut(),
            Store::C(_) => None,
        }
    }

    /// Sends what is in `scratch` to main and empties it: [`send`].
    ///
    /// # Errors
    /// Those of [`send`].
    pub fn send(&self, scratch: &mut Scratch) -> Result<()> {
        send(scratch)
    }
}

/// What an orbit has at hand for its tasks.
pub(crate) struct Inside {
    /// That of the orbit's process, which one that a task forked does not share.
    pub(crate) generation: u64,
    pub(crate) name: String,
    pub(crate) channel: Arc<Channel>,
    pub(crate) control: Arc<ControlBlock>,
    pub(crate) update_socket: Arc<UpdateSocket>,
    pub(crate) call: Cell<Option<u64>>,
}

/// Set in an orbit, null in main. C functions have no other way to it.
static INSIDE: AtomicPtr<Inside> = AtomicPtr::new(core::ptr::null_mut());

/// Says that this process is an orbit.
pub(crate) fn enter(inside: &'static Inside) {
    INSIDE.store(core::ptr::from_ref(inside).cast_mut(), Ordering::SeqCst);
}

fn inside() -> Option<&'static Inside> {
    let inside = INSIDE.load(Ordering::SeqCst);
    // SAFETY: null, or what `enter` set, which is never freed.
    unsafe { inside.as_ref() }
}

/// Returns whether this process is an orbit (or was forked by one).
pub fn is_orbit() -> bool {
    inside().is_some() || orrery_domain::forked::is_inside()
}

/// Returns whether this process is an orbit, and no child that a task forked. Async-signal-safe.
pub(crate) fn is_orbit_itself() -> bool {
    inside().is_some_and(|inside| inside.generation == orrery_sys::generation())
}

/// Returns the name of the orbit that this process is.
pub fn name() -> Option<&'static str> {
    inside().map(|inside| inside.name.as_str())
}

/// Returns the number of the call whose task is running.
pub fn current_call() -> Option<u64> {
    inside().and_then(|inside| inside.call.get())
}

/// From a task: sends what is in `scratch` to main as one update, and empties it. It may be called several times per
/// task. What was sent is out of this process' reach: main gets it even if the task crashes right after.
///
/// Waits while main has too many updates that it has not received.
///
/// # Errors
/// [`Error::Outside`] where no task runs, [`Error::Send`]; the scratch keeps its records then.
pub fn send(scratch: &mut Scratch) -> Result<()> {
    send_bytes(scratch.bytes())?;
    scratch.clear();
    Ok(())
}

/// Like [`send`], with records as [`Scratch::bytes`] has them.
///
/// # Errors
/// Those of [`send`].
pub fn send_bytes(records: &[u8]) -> Result<()> {
    // The kernel is to read memory that a checking mode may have made inaccessible.
    let checking = check::end();
    let sent = send_unchecked(records);
    check::again(checking);
    sent
}

fn send_unchecked(records: &[u8]) -> Result<()> {
    let outside = Error::Outside { operation: "sending an update" };
    let inside = inside().ok_or(outside.clone())?;
    let call = inside.call.get().ok_or(outside)?;
    // The domain's gate, seen from this side.
    let ring = || inside.channel.domain_gate().ring();
    // Counted first: main looks whenever the count is ahead.
    inside.control.count_update();
    inside
        .update_socket
        .send(call, records, ring)
        .map_err(|errno| Error::Send { bytes: records.len(), reason: errno.to_string() })?;
    ring();
    Ok(())
}
