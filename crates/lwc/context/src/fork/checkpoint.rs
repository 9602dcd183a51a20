//! Checkpoints: a context that is killed goes on from a state that was good
//! ([`Context::checkpoint`](crate::Context::keep_good)).
//!
//! Asked to, a context forks: the copy, its *checkpoint*, has the same ends of descriptors and links, and sleeps. When
//! the root reaps the context, it gives the slot to the checkpoint, with its generation: all names stay what they are.
//! The checkpoint ignores what was sent to its predecessor since, and parks.
//!
//! A checkpoint is its original's child, for that one to reap when it is replaced by a newer one; and when the original
//! dies, nobody's, as a copy is ([`crate::fork::context_copy`]).

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use orrery_domain::Moment;
use orrery_domain::copy::{Kin, copy_process};
use orrery_domain::forked::Creator;
use orrery_domain::watch::Watcher;
use orrery_sys::signals;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use rustix::thread::futex;

use crate::error::Result;
use crate::exit::kill_self;
use crate::fork::context_copy::end_at_once;
use crate::peers::socket::is_readable;
use crate::peers::socket::own_pidfd;
use crate::shared::program::own_thread;
use crate::spawn::lifetime::Lifetime;
use crate::switch::slow;
use crate::threads::logical;
use crate::threads::state_lock::Held;
use crate::threads::stop_threads::StoppedThreads;
use crate::types::Arrival;
use orrery_rollback::watcher;

/// How long a checkpoint may take to set itself up.
const PATIENCE: Duration = Duration::from_secs(5);

/// In a context that a peer asked for a checkpoint: makes it and says so. In the checkpoint, once it has the context's
/// slot: waits until a context switches to it.
pub(crate) fn serve(state: &mut Held, slot: usize) -> Option<Arrival> {
    let through = state.peer(slot).ok().and_then(|peer| peer.through);
    let entitled = through
        .and_then(|grant| state.grants.get(grant)?.as_ref())
        .is_some_and(|grant| grant.rights.allow_all_memory());
    let made = if !entitled || state.filtered { Err(Errno::PERM) } else { make(state) };
    match made {
        Ok(Some(arrival)) => return Some(arrival),
        Ok(None) => slow::reply(state, slot, 0),
        Err(errno) => slow::reply(state, slot, errno.raw_os_error().unsigned_abs()),
    }
    None
}

fn make(state: &mut Held) -> rustix::io::Result<Option<Arrival>> {
    discard(state);
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let (reader, writer) = (orrery_sys::descriptors::raise(reader), orrery_sys::descriptors::raise(writer));
    let others = StoppedThreads::hold(state.program, state.me).map_err(|_| Errno::AGAIN)?;
    set_copied(state, true);
    let mask = others.as_ref().map_or_else(signals::block_all, StoppedThreads::mask);
    // SAFETY: where another thread held what the checkpoint needs, it hangs, and is not waited for beyond the limit.
    let copied = unsafe { copy_process(Kin::HiddenChild) };
    if let Ok(None) = copied {
        let _left = std::mem::ManuallyDrop::new(others);
        drop(reader);
        return Ok(Some(be_spare(state, writer, mask)));
    }
    drop(others);
    set_copied(state, false);
    signals::set_mask(mask);
    drop(writer);
    let copied = copied?.ok_or(Errno::CHILD)?;
    let until = Moment::now().after(PATIENCE);
    let mut said = [0; 1];
    if !is_readable(std::os::fd::AsFd::as_fd(&reader), until)
        || rustix::io::read(&reader, &mut said[..]) != Ok(1)
    {
        reap(copied.pid);
        return Err(Errno::NOMEM);
    }
    let context_slot = state.context_slot();
    context_slot.spare_strand.store(state.logical_thread, SeqCst);
    context_slot.checkpoint_pid.store(copied.pid.as_raw_pid().unsigned_abs(), SeqCst);
    state.checkpoint_pid = Some(copied.pid);
    Ok(None)
}

/// Whether what it shares with its peers is in its copies.
fn set_copied(state: &Held, copied: bool) {
    for link in state.peers.iter().flatten().filter_map(|peer| peer.link.as_ref()) {
        link.set_copied(copied);
    }
}

/// Ends the checkpoint that there is.
fn discard(state: &mut Held) {
    state.context_slot().checkpoint_pid.store(0, SeqCst);
    if let Some(checkpoint_pid) = state.checkpoint_pid.take() {
        reap(checkpoint_pid);
    }
}

/// Ends a child.
fn reap(child: Pid) {
    let all = WaitIdOptions::from_bits_retain(libc::__WALL.cast_unsigned());
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT | all;
    if rustix::process::waitid(WaitId::Pid(child), look).is_ok() {
        let _ = rustix::process::kill_process(child, Signal::KILL);
        let options = WaitIdOptions::EXITED | all;
        let _ = rustix::io::retry_on_intr(|| rustix::process::waitid(WaitId::Pid(child), options));
    }
}

/// Runs in the checkpoint: waits until a copy of it is wanted.
fn be_spare(state: &mut Held, writer: OwnedFd, mask: signals::Mask) -> Arrival {
    let ready = set_up(state).is_ok() && rustix::io::write(&writer, &[1]) == Ok(1);
    drop(writer);
    if !ready {
        end_at_once();
    }
    let context_slot = state.context_slot();
    let own = rustix::process::getpid().as_raw_pid().unsigned_abs();
    // The watcher ends us where the root dies, or nobody holds a descriptor of us any more.
    loop {
        let there = context_slot.pid.load(SeqCst);
        if there == own {
            break;
        }
        let _ = futex::wait(&context_slot.pid, futex::Flags::empty(), there, None);
    }
    if take_over(state).is_err() {
        end_at_once();
    }
    signals::set_mask(mask);
    context_slot.settled.store(1, SeqCst);
    let _ = futex::wake(&context_slot.settled, futex::Flags::empty(), u32::MAX >> 1);
    slow::park(state, None, None).unwrap_or_else(|_| kill_self())
}

fn set_up(state: &mut Held) -> Result<()> {
    state.keep();
    state.creator = Creator::here();
    for link in state.peers.iter_mut().flatten().filter_map(|peer| peer.link.as_mut()) {
        link.inherit();
        link.set_copied(false);
    }
    state.leave_table();
    state.shared_credentials = None;
    state.pidfd = own_pidfd()?;
    state.checkpoint_pid = None;
    logical::know(state.logical_thread);
    state.forget_threads();
    if let Some(lifetime) = state.lifetime.take() {
        lifetime.close_copy();
    }
    let lifetime = Lifetime::make(state.program, state.me)?;
    state.lifetime = Some(lifetime);
    for (slot, grant) in state.grants.iter().enumerate() {
        if let Some(grant) = grant {
            lifetime.add(&grant.socket, slot)?;
        }
    }
    // SAFETY: a null mark stands for none, so that nothing has to outlive the watcher.
    let mut watcher = unsafe { Watcher::prepare(state.main, std::ptr::null())? };
    // SAFETY: the source's functions keep to the rules of the watcher's thread, and its lifetime is never
    // freed, as for a new context.
    unsafe { watcher.listen(lifetime.event_source()) };
    start(watcher, lifetime)
}

fn start(watcher: Watcher, lifetime: &'static Lifetime) -> Result<()> {
    let watcher = Box::leak(Box::new(watcher));
    let thread = watcher.start().map_err(|e| crate::Error::system("start a watcher", 0, e))?;
    watcher::set(thread, [watcher.stack(), lifetime.pages()]);
    Ok(())
}

/// The slot is ours.
fn take_over(state: &mut Held) -> Result<()> {
    for logical_thread in state.program.logical_threads() {
        for link in state.peers.iter_mut().flatten().filter_map(|peer| peer.link.as_mut()) {
            link.catch_up(logical_thread);
        }
    }
    let place = state.place();
    // A second watcher, by which the kernel marks our death; the first one has nothing to mark.
    // SAFETY: the mark is in the program's shared pages, which contexts never unmap.
    let marker = unsafe { Watcher::prepare(state.main, place.face.mark())? };
    let marker = Box::leak(Box::new(marker));
    marker.start().map_err(|e| crate::Error::system("start a watcher", 0, e))?;
    place.thread.store(own_thread(), SeqCst);
    Ok(())
}
