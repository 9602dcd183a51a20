//! Spares: a context that is killed goes on from a state that was good ([`Context::keep_good`](crate::Context::keep_good)).
//!
//! Asked to, a context forks: the copy, its *spare*, has the same ends of descriptors and links, and sleeps. When the root
//! buries the context, it gives the seat to the spare, with its generation: all names stay what they are. The spare passes
//! over whatever was said to its predecessor since, and parks.
//!
//! A spare is its original's child, for that one to bury when it is replaced by a newer one; and when the original dies,
//! nobody's, as a double is ([`crate::fork::context_copy`]).

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
use crate::spawn::lifetime::Leash;
use crate::switch::slow;
use crate::threads::logical;
use crate::threads::state_lock::Held;
use crate::threads::stop_threads::Still;
use crate::types::Arrival;
use orrery_rollback::watcher;

/// How long a spare may take to set itself up.
const PATIENCE: Duration = Duration::from_secs(5);

/// In a context that a peer asked for a spare: makes it and says so. In the spare, once it has the context's seat: waits
/// until somebody switches to it.
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
    let others = Still::hold(state.program, state.me).map_err(|_| Errno::AGAIN)?;
    set_copied(state, true);
    let mask = others.as_ref().map_or_else(signals::block_all, Still::mask);
    // SAFETY: where another thread held what the spare needs, it hangs, and is not waited for beyond the limit.
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
        bury(copied.pid);
        return Err(Errno::NOMEM);
    }
    let seat = state.seat();
    seat.spare_strand.store(state.strand, SeqCst);
    seat.spare.store(copied.pid.as_raw_pid().unsigned_abs(), SeqCst);
    state.spare = Some(copied.pid);
    Ok(None)
}

/// Whether what it shares with its peers is in its copies.
fn set_copied(state: &Held, copied: bool) {
    for link in state.peers.iter().flatten().filter_map(|peer| peer.link.as_ref()) {
        link.set_copied(copied);
    }
}

/// Ends the spare that there is.
fn discard(state: &mut Held) {
    state.seat().spare.store(0, SeqCst);
    if let Some(spare) = state.spare.take() {
        bury(spare);
    }
}

/// Ends a child.
fn bury(child: Pid) {
    let all = WaitIdOptions::from_bits_retain(libc::__WALL.cast_unsigned());
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT | all;
    if rustix::process::waitid(WaitId::Pid(child), look).is_ok() {
        let _ = rustix::process::kill_process(child, Signal::KILL);
        let options = WaitIdOptions::EXITED | all;
        let _ = rustix::io::retry_on_intr(|| rustix::process::waitid(WaitId::Pid(child), options));
    }
}

/// In the spare.
fn be_spare(state: &mut Held, writer: OwnedFd, mask: signals::Mask) -> Arrival {
    let ready = set_up(state).is_ok() && rustix::io::write(&writer, &[1]) == Ok(1);
    drop(writer);
    if !ready {
        end_at_once();
    }
    let seat = state.seat();
    let own = rustix::process::getpid().as_raw_pid().unsigned_abs();
    // The watcher ends us where the root dies, or nobody holds a descriptor of us any more.
    loop {
        let there = seat.pid.load(SeqCst);
        if there == own {
            break;
        }
        let _ = futex::wait(&seat.pid, futex::Flags::empty(), there, None);
    }
    if take_over(state).is_err() {
        end_at_once();
    }
    signals::set_mask(mask);
    seat.settled.store(1, SeqCst);
    let _ = futex::wake(&seat.settled, futex::Flags::empty(), u32::MAX >> 1);
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
    state.common = None;
    state.pidfd = own_pidfd()?;
    state.spare = None;
    logical::know(state.strand);
    state.forget_strands();
    if let Some(leash) = state.leash.take() {
        leash.close_copy();
    }
    let leash = Leash::make(state.program, state.me)?;
    state.leash = Some(leash);
    for (slot, grant) in state.grants.iter().enumerate() {
        if let Some(grant) = grant {
            leash.add(&grant.socket, slot)?;
        }
    }
    let mut watcher = Watcher::prepare(state.main, std::ptr::null())?;
    // SAFETY: as for a new context.
    unsafe { watcher.listen(leash.ear()) };
    start(watcher, leash)
}

fn start(watcher: Watcher, leash: &'static Leash) -> Result<()> {
    let watcher = Box::leak(Box::new(watcher));
    let thread = watcher.start().map_err(|e| crate::Error::system("start a watcher", 0, e))?;
    watcher::set(thread, [watcher.stack(), leash.pages()]);
    Ok(())
}

/// The seat is ours.
fn take_over(state: &mut Held) -> Result<()> {
    for strand in state.program.strands() {
        for link in state.peers.iter_mut().flatten().filter_map(|peer| peer.link.as_mut()) {
            link.catch_up(strand);
        }
    }
    let place = state.place();
    // A second watcher, by which the kernel marks our death; the first one has nothing to mark.
    let marker = Box::leak(Box::new(Watcher::prepare(state.main, place.face.mark())?));
    marker.start().map_err(|e| crate::Error::system("start a watcher", 0, e))?;
    place.thread.store(own_thread(), SeqCst);
    Ok(())
}
