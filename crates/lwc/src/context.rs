//! Contexts: isolated memory, descriptors and credentials into which the running thread steps, and back.
//!
//! ```standalone_crate
//! use core::convert::Infallible;
//! use orrery_lwc::context::{self, Spec, Start};
//!
//! fn serve(start: Start) -> Infallible {
//!     let mut calls = 0;
//!     let mut arrival = start.arrival;
//!     loop {
//!         calls += 1;
//!         arrival = match arrival.caller.switch(arrival.word * 2 + calls, &[]) {
//!             Ok(next) => next,
//!             Err(error) => panic!("{error}"),
//!         };
//!     }
//! }
//!
//! # fn main() -> context::Result<()> {
//! let other = context::create(&Spec::new(), serve)?;
//! assert_eq!(other.switch(10, &[])?.word, 21);
//! assert_eq!(other.switch(10, &[])?.word, 22);
//! other.close()
//! # }
//! ```
//!
//! From "Light-Weight Contexts" (Litton et al., OSDI 2016), sections 3.1 to 3.9, on a stock kernel.
//!
//! # What a context is underneath
//!
//! A process: the only thing to which a stock kernel gives memory, descriptors and credentials of its own. [`create`]
//! copies the calling process, and the copy waits. Its first moment is inside the creator's call, with a copy of the
//! creator's stack, so control transfers have fork's shape: one call, two returns.
//!
//! There is **one thread of control**. Exactly one context runs, all others are parked in a switch. From this follows
//! most of the rest:
//!
//! - A switch is a message and a call, then waiting: microseconds between two CPUs, far less on one. So a context
//!   follows its caller's CPU.
//! - Nothing changes a parked context's memory. It can give out parts of it when asked, or turn them into shared memory.
//! - Whoever waits for the one that has control notices its death, and gets control back together with an error. Where
//!   that one is dead, too, the root does.
//!
//! The **root** is the program's own process. It is the kernel's parent of all contexts, whoever created them, but gives
//! them no exit signal, so that no wait(2) of the program sees them (`__WCLONE` in waitpid(2)). It ends when any context
//! exits, with that status; and all contexts end when it ends, however that may be (each watches the root's pidfd).
//!
//! # Names and rights
//!
//! A context is named by a descriptor: one end of a socket pair, the other end of which is the context's own. So the
//! kernel counts holders, and tells the context when there are none; then it ends, unless it has control.
//! Descriptors pass on by creation (a new context has copies of its creator's) and by switching (the called context gets
//! one of its caller). Rights to overlay memory belong to such a pair, are kept by the owner of the memory, and only
//! ever narrow ([`Context::restrict`]).
//!
//! Three kinds of memory connect contexts, each with no more trust than it needs:
//!
//! - one page range for all, with who has control and how to call each. Nonsense written there can stop the program; it
//!   tells nothing and grants nothing;
//! - a link for each two that speak: arguments, and who the caller is. The kernel keeps all others out;
//! - what was declared shared.
//!
//! # Where it ends
//!
//! A program with other threads gets [`Error::NotAlone`]. Signal handlers of the root run while another context has
//! control. getpid(2) differs between contexts. A hostile context may compute on while another one has control, and may
//! stop or end the program. The book tells all differences.

mod birth;
mod carry;
mod error;
mod handover;
mod introduce;
mod leash;
mod link;
mod overlay;
mod program;
mod ranges;
mod reaper;
mod spec;
mod state;

use core::convert::Infallible;
use core::time::Duration;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

pub use error::{Error, Result};
pub use link::ROOM;
pub use overlay::Overlay;
pub use spec::Spec;

use birth::Born;
pub(crate) use birth::die;
use ranges::pages;
pub(crate) use state::after_rollback;

/// The name of another context; its descriptor stays open until [`Context::close`].
///
/// A new context knows what its creator knew by the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Context {
    fd: RawFd,
    slot: usize,
    serial: u32,
}

/// What a context learns when control enters it.
#[derive(Debug)]
pub struct Arrival {
    /// Who switched here.
    pub caller: Context,
    /// The argument that is a value.
    pub word: u64,
    /// The argument that is a buffer: a copy of what the caller gave.
    pub bytes: Vec<u8>,
}

/// What a new context learns when control enters it for the first time.
#[derive(Debug)]
pub struct Start {
    /// Who created it.
    pub creator: Context,
    /// Who switched to it, and with what.
    pub arrival: Arrival,
}

/// Where a call of [`create_here`] returns.
#[derive(Debug)]
pub enum Created {
    /// In the creator.
    Creator(Context),
    /// In the new context, when somebody switches to it for the first time.
    Context(Start),
}

/// Creates a context, which begins with `entry` when somebody first switches to it.
///
/// `entry` cannot return, for there is nowhere to return to. It switches, or exits, which ends the program.
///
/// # Errors
/// [`Error::NotAlone`] in a program with other threads; [`Error::Unaligned`], [`Error::Overlap`], [`Error::Memory`]
/// where the specification makes no sense; [`Error::Birth`], [`Error::Full`], [`Error::System`] where there is no room.
/// There is no new context then, but memory that was to be shared may be backed by a file already.
pub fn create(spec: &Spec, entry: impl FnOnce(Start) -> Infallible) -> Result<Context> {
    match create_here(spec)? {
        Created::Creator(context) => Ok(context),
        Created::Context(start) => {
            // A panic must not unwind into the creator's frames, of which this is a copy.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || entry(start)));
            std::process::abort()
        }
    }
}

/// Creates a context, which begins by returning from this call as well.
///
/// # Errors
/// Those of [`create`].
pub fn create_here(spec: &Spec) -> Result<Created> {
    let mut state = state::hold_or_become_root()?;
    birth::create(&mut state, spec).map(|born| match born {
        Born::Creator(context) => Created::Creator(context),
        Born::Context(creator, arrival) => Created::Context(Start { creator, arrival }),
    })
}

impl Context {
    /// The descriptor that names the context.
    pub fn descriptor(self) -> RawFd {
        self.fd
    }

    /// The context that a descriptor names in the calling one.
    ///
    /// # Errors
    /// [`Error::NoContext`]: it names none, or was closed behind our back.
    pub fn of_descriptor(descriptor: RawFd) -> Result<Self> {
        held(descriptor)?.named(descriptor)
    }

    /// Switches there, with a value and at most [`ROOM`] bytes. Returns when control comes back, whoever returns it.
    ///
    /// # Errors
    /// [`Error::Gone`] where the context has ended before, [`Error::Died`] where it died meanwhile,
    /// [`Error::NoContext`], [`Error::TooLong`], [`Error::System`].
    pub fn switch(self, word: u64, bytes: &[u8]) -> Result<Arrival> {
        let mut state = held(self.fd)?;
        let slot = state.find(self)?;
        handover::switch(&mut state, slot, word, bytes, None)
    }

    /// The same, but not for longer than `limit`: whoever has control then is killed.
    ///
    /// # Errors
    /// Those of [`Context::switch`]; [`Error::TimedOut`]; [`Error::RootLimit`] where this is the root.
    pub fn switch_within(self, word: u64, bytes: &[u8], limit: Duration) -> Result<Arrival> {
        let mut state = held(self.fd)?;
        let slot = state.find(self)?;
        handover::switch(&mut state, slot, word, bytes, Some(limit))
    }

    /// Gives that context a copy of a descriptor of ours: it waits there until it is taken with [`Context::passed`].
    ///
    /// # Errors
    /// [`Error::NoContext`], [`Error::Gone`], [`Error::System`] where the two have never switched to
    /// each other, and neither created the other one, and where the kernel takes no more descriptors under way.
    pub fn pass(self, descriptor: BorrowedFd<'_>) -> Result<()> {
        let state = held(self.fd)?;
        let slot = state.find(self)?;
        carry::pass(&state, slot, descriptor)
    }

    /// Takes a descriptor that this context, the other one, has passed to the calling one before it switched here; none
    /// if there is none, or no number free for it.
    ///
    /// # Errors
    /// [`Error::NoContext`].
    pub fn passed(self) -> Result<Option<OwnedFd>> {
        let state = held(self.fd)?;
        let slot = state.find(self)?;
        carry::passed(&state, slot)
    }

    /// Maps that context's memory from `start` on, `length` bytes, at the same place of the calling one, whose own memory
    /// there is gone.
    ///
    /// # Errors
    /// [`Error::Denied`] where the descriptor carries no right to all of it, [`Error::Unaligned`], [`Error::Memory`]
    /// where there is none or it cannot be shared, [`Error::Gone`], [`Error::System`].
    ///
    /// # Safety
    /// Nothing of the calling context's own may be needed there any more. Of shared memory no reference may live across
    /// a switch, and what is read there is the other context's, to be trusted as far as that is.
    pub unsafe fn overlay(self, start: *const u8, length: usize, how: Overlay) -> Result<()> {
        let range = pages(start.expose_provenance(), length)?;
        let mut state = held(self.fd)?;
        let slot = state.find(self)?;
        overlay::overlay(&mut state, slot, range, how)
    }

    /// Narrows what this descriptor allows to overlay to what of it lies in `keep`, (start, length) each. It holds at
    /// once, for all who have copies of the descriptor.
    ///
    /// # Errors
    /// [`Error::Unaligned`], [`Error::TooLong`], [`Error::Gone`].
    pub fn restrict(self, keep: &[(usize, usize)]) -> Result<()> {
        let keep = keep.iter().map(|(start, length)| pages(*start, *length)).collect::<Result<Vec<_>>>()?;
        let mut state = held(self.fd)?;
        let slot = state.find(self)?;
        overlay::restrict(&mut state, slot, &keep)
    }

    /// Closes the descriptor. The context ends if nobody else holds one.
    ///
    /// # Errors
    /// [`Error::NoContext`].
    pub fn close(self) -> Result<()> {
        let mut state = held(self.fd)?;
        let slot = state.find(self)?;
        if let Some(peer) = state.peers[slot].take()
            && let Some(link) = &peer.link
        {
            link.set_closed();
        }
        Ok(())
    }
}

/// Removes what [`Context::overlay`] mapped from `start` on, `length` bytes: nothing is mapped there then.
///
/// # Errors
/// [`Error::Memory`] where nothing was overlaid, or another range.
///
/// # Safety
/// Nothing there may be in use.
pub unsafe fn remove_overlay(start: *const u8, length: usize) -> Result<()> {
    let range = pages(start.addr(), length)?;
    let mut state = held(-1)?;
    overlay::undo(&mut state, range)
}

/// The state of a process that knows contexts.
fn held(descriptor: RawFd) -> Result<state::Held> {
    state::hold()?.ok_or(Error::NoContext { descriptor })
}
