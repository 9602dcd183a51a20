//! The functions that a program calls.

use std::convert::Infallible;
use std::ffi::CString;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::descriptors::pass;
use crate::error::{Error, Result};
use crate::fork::new_root;
use crate::memory::overlay::{self, Overlay};
use crate::memory::ranges::pages;
use crate::requests::HANDLERS;
use crate::rights::Rights;
use crate::shared::program::ROOT as ROOT_SLOT;
use crate::spawn::create::{self as spawn, SpawnSide};
use crate::spawn::{root_names, signal_forwarding};
use crate::spec::Spec;
use crate::state;
use crate::switch::fast::{self, Crossed};
use crate::switch::slow;
use crate::syscalls::listener::Answer;
use crate::syscalls::remote::{self, FromCaller};
use crate::syscalls::trap;
use crate::threads::state_lock;
use crate::types::{Arrival, Context, Created, Forked, Start};

/// The number of the root's descriptor, the same in every context ([`root`]).
pub const ROOT: RawFd = state::WELL_KNOWN;

/// Creates a context, which begins with `entry` at the first switch to it.
///
/// `entry` cannot return, for there is nowhere to return to. It switches, or exits, which ends the program.
///
/// # Errors
/// [`Error::TooManyThreads`]; [`Error::Unaligned`], [`Error::Overlap`], [`Error::Memory`]
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

/// Returns the root, the context in which the program began. Its descriptor has the number [`ROOT`] in every context,
/// and carries no rights; its creator's others, if the root is that, may.
///
/// # Errors
/// [`Error::NoContext`] where there are no contexts yet, where the number was closed or taken away
/// ([`Spec::close_descriptors`]), and where the program used it before its first context, or may have none so high
/// (RLIMIT_NOFILE in getrlimit(2)).
pub fn root() -> Result<Context> {
    // SAFETY: the number is the library's, and the root's name where it names a context.
    unsafe { Context::of_descriptor(ROOT) }
}

/// Creates a context, which begins by returning from this call as well.
///
/// # Errors
/// Those of [`create`].
pub fn create_here(spec: &Spec) -> Result<Created> {
    let mut state = state_lock::hold_or_become_root(&HANDLERS)?;
    let born = spawn::create(&mut state, spec);
    let born = match state.shared_signals {
        None => born,
        Some(_) => deliver_signals(state, born),
    };
    born.map(|born| match born {
        SpawnSide::Creator(context) => Created::Creator(context),
        SpawnSide::Context(creator, arrival) => Created::Context(Start { creator, arrival }),
    })
}

/// Forks the program, with all its contexts, as the paper's fork does: the child has a copy of each, by the same
/// descriptors, with the same rights. What was shared by [`Spec::share`] is shared among the child's contexts, apart
/// from the parent's; shared mappings of the program's own are one memory in all. As ever with fork(2), the child has
/// the calling thread alone, in the root and in each context.
///
/// After a plain fork(2) the first call about contexts in the child does the same, as the contexts are then. Each
/// context must be parked, and gets ten seconds: those that run or are stopped are [`Error::Gone`] in the child, and so
/// are those whose system calls are trapped, or withheld as far as making a copy takes them (those of
/// [`Calls::global`](crate::Calls::global), for instance).
///
/// # Errors
/// [`Error::NotTheRoot`]; [`Error::System`] where there is no room for a process, or the copies cannot be made. There
/// is no child then.
///
/// # Safety
/// In a program with other threads, the child must not need what one of them may have held.
pub unsafe fn fork() -> Result<Forked> {
    // SAFETY: the child needs nothing that another thread may have held at the fork (# Safety).
    unsafe { new_root::fork() }
}

impl Context {
    /// Returns the descriptor that names the context.
    pub fn descriptor(self) -> RawFd {
        self.fd
    }

    /// Returns the context that a descriptor names in the calling one. Copies (dup(2)) name the same context with the
    /// same rights, and so does what came over a socket of the program's own (SCM_RIGHTS in unix(7)). From this call
    /// on it is a name like others: [`Context::close`] closes it.
    ///
    /// # Errors
    /// [`Error::NoContext`]: it names none of this program, or was closed behind our back. [`Error::Gone`] of a
    /// descriptor that was no name here before: what it named has ended.
    ///
    /// # Safety
    /// Nothing else owns the descriptor, where it is no name here yet: it is closed as one from then on.
    pub unsafe fn of_descriptor(descriptor: RawFd) -> Result<Self> {
        held(descriptor)?.named_or_adopted(descriptor)
    }

    /// Switches there, with a value and at most [`ROOM`](crate::ROOM) bytes. Returns when control comes back, from any
    /// context.
    ///
    /// # Errors
    /// [`Error::Gone`] where the context has ended before, [`Error::Died`] where it died meanwhile,
    /// [`Error::NoContext`], [`Error::TooLong`], [`Error::System`].
    pub fn switch(self, word: u64, bytes: &[u8]) -> Result<Arrival> {
        let mut state = held(self.fd)?;
        let slot = state.find(self)?;
        let arrival = match fast::cross(&mut state, slot, word, bytes) {
            Crossed::Back { caller, word, bytes } => Ok(Arrival { caller, word, bytes, call: None }),
            Crossed::Out => slow::park(&mut state, Some(slot), None),
            Crossed::OutForLong => slow::park_asleep(&mut state, slot),
            Crossed::No => slow::switch(&mut state, slot, word, bytes, None),
        };
        match state.shared_signals {
            None => arrival,
            Some(_) => deliver_signals(state, arrival),
        }
    }

    /// The same, but not for longer than `limit`: the context that has control then is killed.
    ///
    /// # Errors
    /// Those of [`Context::switch`]; [`Error::TimedOut`]; [`Error::RootLimit`] where this is the root.
    pub fn switch_within(self, word: u64, bytes: &[u8], limit: Duration) -> Result<Arrival> {
        let mut state = held(self.fd)?;
        let slot = state.find(self)?;
        let arrival = slow::switch(&mut state, slot, word, bytes, Some(limit));
        match state.shared_signals {
            None => arrival,
            Some(_) => deliver_signals(state, arrival),
        }
    }

    /// Has that context keep its state as it is now, parked, for the case that it is killed. Its death is an error of
    /// the switch that meets it ([`Error::Died`], [`Error::TimedOut`]) as ever, once; the next one finds the context
    /// where it was when this was called, by the same descriptors. It is then without such a state: call again to keep
    /// it.
    ///
    /// What is restored are memory that is not shared, descriptors and credentials, not what files contain. The context
    /// goes on with the calling thread alone. Descriptors of it that came to be since are those of a context that has
    /// ended.
    ///
    /// # Errors
    /// [`Error::Denied`] where this descriptor does not carry all rights, or the context's calls are withheld; those of
    /// [`Context::overlay`].
    pub fn checkpoint(self) -> Result<()> {
        let mut state = held_to_ask(self.fd)?;
        let slot = state.find(self)?;
        overlay::checkpoint(&mut state, slot)
    }

    /// Gives that context a copy of a descriptor of ours: it waits there until it is taken with [`Context::passed`].
    ///
    /// # Errors
    /// [`Error::NoContext`], [`Error::Gone`], [`Error::System`] where the two have never switched to
    /// each other, and neither created the other one, and where the kernel takes no more descriptors under way.
    pub fn pass(self, descriptor: BorrowedFd<'_>) -> Result<()> {
        let state = held(self.fd)?;
        let slot = state.find(self)?;
        pass::pass(&state, slot, descriptor)
    }

    /// Takes a descriptor that this context, the other one, has passed to the calling one before it switched here; none
    /// if there is none, or no number free for it.
    ///
    /// # Errors
    /// [`Error::NoContext`].
    pub fn passed(self) -> Result<Option<OwnedFd>> {
        let mut state = held(self.fd)?;
        let slot = state.find(self)?;
        pass::passed(&mut state, slot)
    }

    /// Lets the system call go on in which that context is stopped, with its own arguments. Returns when control comes
    /// back.
    ///
    /// **What its pointers point to may have changed since it was looked at**, where others can write there:
    /// threads and processes that the context started, and all that share that memory. Decide by values alone, or make
    /// the call yourself.
    ///
    /// # Errors
    /// [`Error::NoCall`], and those of [`Context::switch`].
    pub fn proceed(self) -> Result<Arrival> {
        let mut state = held(self.fd)?;
        let slot = state.find(self)?;
        slow::answer(&mut state, slot, Answer::GoesOn, None)
    }

    /// Puts a descriptor into the context that is stopped in a system call, which can be given its number there by
    /// answering with it.
    ///
    /// # Errors
    /// [`Error::NoCall`]; [`Error::System`] where there is no room.
    pub fn give(self, descriptor: BorrowedFd<'_>, close_on_exec: bool) -> Result<RawFd> {
        let state = held(self.fd)?;
        let slot = state.find(self)?;
        trap::give(&state, slot, descriptor, close_on_exec)
    }

    /// Copies memory of a context that is trapped ([`Spec::trap`]) by the calling one, as it is now. Gives how much of
    /// the buffer was filled: less than all where the context's memory ends.
    ///
    /// # Errors
    /// [`Error::Memory`] where there is none; [`Error::NoCall`] where it is not trapped by the calling context;
    /// [`Error::Denied`] where the right to its memory was given up ([`Context::restrict`]).
    pub fn copy_in(self, address: u64, buffer: &mut [u8]) -> Result<usize> {
        let state = held(self.fd)?;
        let slot = state.find(self)?;
        trap::copy_in(&state, slot, address, buffer)
    }

    /// The same of a text that ends with 0, such as a path, of less than 4096 bytes.
    ///
    /// # Errors
    /// Those of [`Context::copy_in`], and [`Error::System`] where it is longer.
    pub fn copy_path(self, address: u64) -> Result<CString> {
        let state = held(self.fd)?;
        let slot = state.find(self)?;
        trap::copy_path(&state, slot, address)
    }

    /// Writes into memory of a context that is trapped by the calling one.
    ///
    /// # Errors
    /// Those of [`Context::copy_in`]; part of the bytes may have been written.
    ///
    /// # Safety
    /// The context has not to mind: it passed the address for this, for instance.
    pub unsafe fn copy_out(self, address: u64, bytes: &[u8]) -> Result<()> {
        let state = held(self.fd)?;
        let slot = state.find(self)?;
        trap::copy_out(&state, slot, address, bytes)
    }

    /// Maps that context's memory from `start` on, `length` bytes, at the same place of the calling one, whose own
    /// memory there is gone.
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
        let mut state = held_to_ask(self.fd)?;
        let slot = state.find(self)?;
        overlay::overlay(&mut state, slot, range, how)
    }

    /// Puts a copy of that context's descriptor `number` in the place of the calling one's own of that number. It
    /// refers to the same open file.
    ///
    /// # Errors
    /// [`Error::Denied`] where this descriptor carries no right to it; [`Error::System`] with EBADF where there is
    /// none, EBUSY where the calling context lives by the one that has the number here; [`Error::Gone`].
    ///
    /// # Safety
    /// Nothing in the calling context may need what has this number now.
    pub unsafe fn overlay_descriptor(self, number: u32) -> Result<()> {
        let mut state = held_to_ask(self.fd)?;
        let slot = state.find(self)?;
        overlay::overlay_descriptor(&mut state, slot, number)
    }

    /// Makes a system call for that context, as if it had made it itself, except for what `own` says is the caller's in
    /// its place. Gives what the kernel returned: -4095 to -1 are errors.
    ///
    /// A context that is parked makes the call itself, unless it would have to have the caller's descriptors, or
    /// credentials that are not its own: then the calling context makes it, as for one that is stopped in a trapped
    /// call. Arguments are then copied once, and written back once, and a descriptor that the call makes is put where
    /// it belongs. Reads and writes of more than some 56 KiB are done in part, as read(2) and write(2) may.
    ///
    /// # Errors
    /// [`Error::CallDenied`] where this descriptor carries no right to the call; [`Error::CallUnknown`] where it cannot
    /// be put together from two contexts; [`Error::Denied`] where it carries none to memory or a descriptor that the
    /// caller needs for it; [`Error::Memory`], [`Error::Gone`]; [`Error::Stopped`] where the context is stopped in a
    /// call that another one answers; [`Error::System`] where the descriptors of one that is stopped cannot be borrowed
    /// (it is closed to debuggers, and the caller no superuser), or its credentials not taken on.
    ///
    /// # Safety
    /// The call may do to either context all that such a call can do, to memory for instance.
    pub unsafe fn syscall(self, own: FromCaller, number: u32, arguments: [u64; 6]) -> Result<i64> {
        let mut state = held_to_ask(self.fd)?;
        let slot = state.find(self)?;
        remote::perform(&mut state, slot, own, number, arguments)
    }

    /// Narrows what this descriptor allows to overlays of the memory that is in `keep`, (start, length) each: no
    /// other memory, no descriptors, no system calls ([`Context::restrict_to`] can keep those). It holds at once, for
    /// all who have copies of the descriptor.
    ///
    /// # Errors
    /// [`Error::Unaligned`], [`Error::TooLong`], [`Error::Gone`].
    pub fn restrict(self, keep: &[(usize, usize)]) -> Result<()> {
        let rights =
            keep.iter().try_fold(Rights::none(), |rights, (start, length)| rights.memory(*start, *length))?;
        self.restrict_to(&rights)
    }

    /// Narrows what this descriptor allows to what is in `keep`, too.
    ///
    /// # Errors
    /// Those of [`Context::restrict`].
    pub fn restrict_to(self, keep: &Rights) -> Result<()> {
        let mut state = held_to_ask(self.fd)?;
        let slot = state.find(self)?;
        overlay::restrict(&mut state, slot, keep)
    }

    /// Closes the descriptor. The context ends if nobody else holds one. The root does not, but parked, and named by
    /// nobody except by its number ([`ROOT`]), it holds nobody any more: its own descriptors of contexts are closed.
    ///
    /// # Errors
    /// [`Error::NoContext`].
    pub fn close(self) -> Result<()> {
        let mut state = held(self.fd)?;
        let slot = state.find(self)?;
        let closed = state.peers[slot].take();
        let is_root = closed.as_ref().is_some_and(|peer| peer.context_slot == ROOT_SLOT);
        if let Some(link) = closed.as_ref().and_then(|peer| peer.link.as_ref()) {
            link.set_closed();
        }
        drop(closed);
        if is_root && state.me != ROOT_SLOT {
            root_names::report_close(&state);
        }
        state.sweep_table();
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

/// Control has come, with `arrival`: sends the calling thread the signals that the root has had and this context has
/// not. Handlers run without the turn at the state, so that they may use contexts as any code may.
#[cold]
fn deliver_signals<T>(mut state: state_lock::Held, arrival: T) -> T {
    let (program, me) = (state.program, state.me);
    let missed = state.shared_signals.as_mut().map(|shared| shared.missed(program, me)).unwrap_or_default();
    drop(state);
    signal_forwarding::send(&missed);
    arrival
}

/// Returns the state of a process that knows contexts.
#[inline]
fn held(descriptor: RawFd) -> Result<state_lock::Held> {
    state_lock::hold()?.ok_or(Error::NoContext { descriptor })
}

/// Returns the same, for asking another context.
fn held_to_ask(descriptor: RawFd) -> Result<state_lock::Held> {
    state_lock::hold_to_ask()?.ok_or(Error::NoContext { descriptor })
}
