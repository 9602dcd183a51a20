//! A context is born: a copy of its creator, made to what was asked for, parked until a context switches to it.
//!
//! The copy is a hidden child of the *root* ([`orrery_domain::copy`]), whichever context creates it. So contexts
//! outlive their creators, the root can reap all of them, and none shows up in the program's wait(2).

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use orrery_domain::Moment;
use orrery_domain::copy::{Copied, Kin, copy_process, copy_process_sharing_files};
use orrery_domain::forked::Creator;
use orrery_domain::gate::is_dead;
use orrery_domain::watch::Watcher;
use orrery_sys::{PageRange, descriptors, signals};
use rustix::io::Errno;
use rustix::thread::futex;
use syscalls::{Sysno, syscall};

use crate::credentials::isolation;
use crate::descriptors::table::InitialFds;
use crate::error::{Error, Result};
use crate::exit::kill_self;
use crate::fork::context_copy;
use crate::id::Id;
use crate::memory::ranges::{contains, privatise, share, unmap, without};
use crate::peers::socket;
use crate::peers::socket::receive_on;
use crate::rights::Rights;
use crate::shared::link::Link;
use crate::shared::program::{ROOT, own_thread};
use crate::spawn::job_control;
use crate::spawn::lifetime::Lifetime;
use crate::spawn::process_status;
use crate::spawn::reaper;
use crate::spawn::signal_forwarding;
use crate::spec::{Checked, Spec};
use crate::state::State;
use crate::switch::slow;
use crate::syscalls::install::{install_filter, open_memory};
use crate::syscalls::listener::Listener;
use crate::threads::logical;
use crate::threads::state_lock::Held;
use crate::threads::stop_threads;
use crate::types::{Arrival, Context};
use orrery_rollback::watcher;

/// Signals that the kernel raises because of what a context did itself (signal(7)); all others are not its business.
const OWN_DOING: [i32; 10] = [
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGSYS,
    libc::SIGPIPE,
    libc::SIGXCPU,
    libc::SIGXFSZ,
];

/// What a new context does before it waits.
const STEPS: [&str; 12] = [
    "be set up",
    "be set up within its memory",
    "unmap memory",
    "have shared memory of its own",
    "close descriptors",
    "watch over its end",
    "close itself to debuggers",
    "open its own memory for its creator (a program closed to debuggers cannot: create it before)",
    "put on the filter of its system calls (a filtered context cannot have its own traps)",
    "get hold of what another thread held when it was created (malloc's lock, for instance): have that thread wait",
    "have the program's other threads",
    "be isolated from other processes (it takes Landlock's scopes, Linux 6.12: `isolate(false)`, in C \
     ORRERY_CONTEXT_NOT_ISOLATED, leaves that out)",
];

/// The step that fails where another thread held a lock of the C library.
const HELD_UP: usize = 9;

/// Who comes out of a birth.
pub(crate) enum SpawnSide {
    /// The creator, with the new context's name.
    Creator(Context),
    /// The new context, switched to for the first time, with its creator's name.
    Context(Context, Arrival),
}

/// What both sides need of what was made before.
struct Ends {
    link: Link,
    context_slot: u32,
    /// The new context's: its own end, and the descriptor for the creator.
    child: (OwnedFd, OwnedFd, Id),
    /// The creator's: its own end, and the descriptor for the new context.
    parent: (OwnedFd, OwnedFd, Id),
    watcher: Watcher,
}

/// How often a new context of a program with other threads is tried: whichever lock another thread held when the copy
/// was made is held for ever there.
const ATTEMPTS: u32 = 64;
/// How long it may take to set itself up.
const PATIENCE: Duration = Duration::from_secs(5);
/// What a new context says while it tries the C library's locks.
const TRYING: u32 = u32::MAX;

/// Creates a context of the calling one.
pub(crate) fn create(state: &mut Held, spec: &Spec) -> Result<SpawnSide> {
    let checked = spec.check()?;
    state.sweep_grants();
    reaper::sweep(state);
    state.sweep_table();
    share_all(state, &checked.share)?;
    if spec.shared_signals && state.me == ROOT {
        let engines = signals::mask_of(&[orrery_rollback::CONTROL_SIGNAL, libc::SIGKILL, libc::SIGSTOP]);
        let kept = signals::mask_of(&OWN_DOING) | stop_threads::NEVER_BLOCKED | engines;
        signal_forwarding::wrap_handlers(state.program, !kept);
    }
    let threaded = process_status::other_threads()? != 0;
    for _ in 1..ATTEMPTS {
        match attempt(state, spec, &checked, threaded) {
            Err(Error::Birth { step, .. }) if step == STEPS[HELD_UP] => {}
            other => return other,
        }
    }
    attempt(state, spec, &checked, threaded)
}

fn attempt(state: &mut Held, spec: &Spec, checked: &Checked, threaded: bool) -> Result<SpawnSide> {
    let ends = prepare(state)?;
    let context_slot = ends.context_slot;
    if spec.shares_table {
        state.open_table()?;
    } else {
        state.publish_descriptors();
    }
    if spec.shares_credentials {
        state.open_credentials()?;
    } else {
        state.publish_credentials();
    }
    let kin = if state.me == ROOT { Kin::HiddenChild } else { Kin::Sibling };
    let others = if spec.alone || !threaded {
        None
    } else {
        stop_threads::StoppedThreads::hold(state.program, state.me)?
    };
    let mask = others.as_ref().map_or_else(signals::block_all, stop_threads::StoppedThreads::mask);
    // SAFETY: no other thread holds anything that we need; where it holds what the C library needs, the copy hangs, and
    // is given up.
    let copied =
        unsafe { if spec.shares_table { copy_process_sharing_files(kin) } else { copy_process(kin) } };
    let copied = match copied {
        Ok(None) => {
            let others = ManuallyDrop::new(others);
            let number = live(state, ends, spec, checked, mask, others.as_ref(), threaded);
            let arrival = wait_for_control(state, number);
            return Ok(SpawnSide::Context(state.handle(number), arrival));
        }
        Ok(Some(copied)) => Ok(copied),
        Err(errno) => {
            state.clear_failed_spawn();
            Err(Error::Birth { step: "be forked", errno })
        }
    };
    drop(others);
    signals::set_mask(mask);
    let mut dowry = None;
    let delivered = copied
        .and_then(|copied| deliver(state, ends, copied, spec, checked.access.clone(), threaded, &mut dowry));
    if delivered.is_err() {
        // What there is of it goes; a slot without a process is given up by ourselves.
        let pid = state.program.context_slot(context_slot).pid.load(SeqCst);
        reaper::reap(state, context_slot, pid);
        if state.program.pid(context_slot).is_none() {
            state.program.vacate(context_slot);
        }
        if let Some(dowry) = dowry {
            dowry.close_remaining();
            state.clear_failed_spawn();
        }
    }
    delivered.map(|slot| SpawnSide::Creator(state.handle(slot)))
}

/// Makes the ranges shared that are not yet.
fn share_all(state: &mut State, ranges: &[PageRange]) -> Result<()> {
    for range in ranges {
        if let Some(part) = state
            .shared
            .iter()
            .find(|shared| shared.range.overlaps(*range) && !contains(*range, shared.range))
        {
            let why = "it is part of a larger range that is shared as a whole: share all of that";
            return Err(Error::Memory { address: part.range.start, what: "shared", why });
        }
        for piece in without(*range, state.shared.iter().map(|shared| shared.range)) {
            let (program, me) = (state.program, state.me);
            let shared = share(piece, || stop_threads::StoppedThreads::hold(program, me))?;
            state.shared.push(shared);
        }
    }
    Ok(())
}

fn prepare(state: &State) -> Result<Ends> {
    let (link, _file) = Link::make()?;
    let child = socket::pair()?;
    let parent = socket::pair()?;
    let context_slot = state.program.reserve(state.logical_thread)?;
    let mark = state.program.place(state.logical_thread, context_slot).face.mark();
    // SAFETY: the mark is in the program's shared pages, which contexts never unmap.
    match unsafe { Watcher::prepare(state.main, mark) } {
        Ok(watcher) => Ok(Ends { link, context_slot, child, parent, watcher }),
        Err(error) => {
            state.program.vacate(context_slot);
            Err(error.into())
        }
    }
}

/// In the creator: takes hold of the new context, once it waits.
fn deliver(
    state: &mut State,
    ends: Ends,
    copied: Copied,
    spec: &Spec,
    access: Vec<PageRange>,
    threaded: bool,
    dowry: &mut Option<InitialFds>,
) -> Result<usize> {
    let Ends { link, context_slot: number, child, parent, watcher: _ } = ends;
    if spec.shares_table {
        *dowry = Some(InitialFds::of([child.0, parent.1]));
    }
    let context_slot = state.program.context_slot(number);
    context_slot.pid.store(copied.pid.as_raw_pid().unsigned_abs(), SeqCst);
    await_settled(&context_slot.settled, &copied, threaded);
    match context_slot.settled.load(SeqCst) {
        1 => {}
        0 | TRYING if !is_dead(copied.pidfd.as_fd()) => {
            return Err(Error::Birth { step: STEPS[HELD_UP], errno: Errno::DEADLK });
        }
        0 | TRYING => return Err(Error::Birth { step: STEPS[1], errno: Errno::FAULT }),
        packed => {
            let step = STEPS.get((packed >> 16) as usize).copied().unwrap_or(STEPS[0]);
            let errno = i32::try_from(packed & 0xfff).unwrap_or(0).max(1);
            return Err(Error::Birth { step, errno: Errno::from_raw_os_error(errno) });
        }
    }
    let listener = if spec.trap {
        let mut sent = receive_on(&child.1, &mut [0]).unwrap_or_default().into_iter().map(descriptors::raise);
        match (sent.next(), sent.next()) {
            (Some(listener), Some(memory)) => Some(Listener::new(listener, memory)),
            _ => return Err(Error::Birth { step: STEPS[8], errno: Errno::PIPE }),
        }
    } else {
        None
    };
    let rights = Rights { memory: access, files: spec.fetchable.clone(), calls: spec.callable };
    let grant = match spec.shares_table {
        true => state.add_members_grant(parent.0, parent.2, rights),
        false => state.add_grant(parent.0, parent.2, rights)?,
    };
    let generation = context_slot.generation.load(SeqCst);
    state.had_listener |= listener.is_some();
    let slot =
        state.add_peer(child.1, child.2, copied.pidfd, (number, generation), Some(link), Some(grant))?;
    let peer = state.peer_mut(slot)?;
    peer.listener = listener;
    if spec.shares_table {
        let pidfd = peer.pidfd.clone();
        state.add_member(pidfd, grant);
    }
    Ok(slot)
}

/// Waits until a new context has set itself up, failed to, or died; or hangs, where another thread of this one may have
/// held what it needs.
fn await_settled(settled: &AtomicU32, copied: &Copied, threaded: bool) {
    let end = threaded.then(|| Moment::now().after(PATIENCE));
    let mut asleep = 0;
    for round in 0.. {
        let now = settled.load(SeqCst);
        if !matches!(now, 0 | TRYING) || is_dead(copied.pidfd.as_fd()) {
            return;
        }
        if end.is_some_and(|end| Moment::now() >= end) {
            return;
        }
        if round < 50 {
            rustix::thread::sched_yield();
            continue;
        }
        // Trying locks sleeps only for a lock that is held; and who would give it back is not there.
        asleep = if now == TRYING && process_status::is_asleep(copied.pid) { asleep + 1 } else { 0 };
        if asleep > 2 {
            return;
        }
        let nap = rustix::time::Timespec { tv_sec: 0, tv_nsec: if threaded { 500_000 } else { 2_000_000 } };
        let _ = futex::wait(settled, futex::Flags::empty(), now, Some(&nap));
    }
}

/// In the new context: becomes what was asked for. Gives the place of its creator among its peers.
fn live(
    state: &mut Held,
    ends: Ends,
    spec: &Spec,
    checked: &Checked,
    mask: signals::Mask,
    others: Option<&stop_threads::StoppedThreads>,
    threaded: bool,
) -> usize {
    let number = ends.context_slot;
    state.keep();
    let settled = &state.program.context_slot(number).settled;
    let stopping = job_control::stop_by_terminal();
    let heard = signals::mask_of(&OWN_DOING) | stop_threads::NEVER_BLOCKED | stopping;
    let deaf = if spec.shared_signals { 0 } else { !heard };
    if threaded {
        settled.store(TRYING, SeqCst);
        stop_threads::try_locks();
        settled.store(0, SeqCst);
    }
    // It binds this thread and those that come of it: all that the context will have.
    let isolates = spec.isolated.unwrap_or(!state.isolated);
    let isolated = if isolates { isolation::enter(&spec.taken()) } else { Ok(()) };
    state.isolated |= isolates;
    let outcome = isolated
        .map_err(|errno| (11, errno))
        .and_then(|()| {
            stop_threads::make_counterparts(others, state.program, number, deaf).map_err(|errno| (10, errno))
        })
        .and_then(|()| settle(state, ends, spec, checked, others.is_some()));
    match outcome {
        Ok(slot) => {
            state.publish_descriptors();
            let mask = mask | deaf;
            state.hears_program &= spec.shared_signals;
            let (program, me) = (state.program, state.me);
            let shared = || Box::new(signal_forwarding::Shared::from_now_on(program, me));
            state.shared_signals = state.hears_program.then(shared);
            signals::set_mask(mask);
            settled.store(1, SeqCst);
            let _ = futex::wake(settled, futex::Flags::empty(), 1);
            slot
        }
        Err((step, errno)) => {
            state.publish_descriptors();
            settled.store(step << 16 | errno.raw_os_error().unsigned_abs() & 0xfff, SeqCst);
            let _ = futex::wake(settled, futex::Flags::empty(), 1);
            kill_self()
        }
    }
}

fn settle(
    state: &mut State,
    ends: Ends,
    spec: &Spec,
    checked: &Checked,
    counterparts: bool,
) -> std::result::Result<usize, (u32, Errno)> {
    let Ends { mut link, context_slot, child, parent, watcher } = ends;
    let (own_end, creators_name_of_us, own_id) = child;
    let (creators_end, creators_name, creators_id) = parent;
    let at = |step: u32| move |errno: Errno| (step, errno);
    let because = |step: u32| {
        move |error: Error| match error {
            Error::System(error) => (step, error.errno),
            _ => (step, Errno::IO),
        }
    };
    let creator = (state.me, state.program.context_slot(state.me).generation.load(SeqCst));
    state.creators_name = -1;
    state.shared_credentials.take_if(|_| !spec.shares_credentials);
    if spec.shares_table {
        // Its creator's, in a table that is that one's, too.
        let _ = (creators_end.into_raw_fd(), creators_name_of_us.into_raw_fd());
        state.share_table().map_err(at(4))?;
        state.creators_name = creators_name.as_raw_fd();
    } else {
        drop((creators_end, creators_name_of_us));
        state.leave_table();
    }
    state.me = context_slot;
    state.creator = Creator::here();
    state.program.place(state.logical_thread, context_slot).thread.store(own_thread(), SeqCst);
    logical::know(state.logical_thread);
    state.checkpoint_pid = None;
    state.forget_threads();
    // Only copies of the root may ask contexts for copies.
    state.rendezvous = None;
    state.connector.take_if(|_| spec.stays_behind);
    // Our creator's ends are its own, and so is what it says to others. Of its books about those, as little as can be
    // is written to: each page is the creator's until then, and freeing memory writes to all.
    for grant in state.grants.iter().flatten() {
        // SAFETY: the handles are forgotten with the list.
        unsafe { rustix::io::close(grant.socket.as_raw_fd()) };
    }
    std::mem::forget(std::mem::take(&mut state.grants));
    if let Some(lifetime) = state.lifetime.take() {
        lifetime.close_copy();
    }
    for peer in state.peers.iter_mut().flatten() {
        // It is not mapped here.
        std::mem::forget(peer.link.take());
        peer.through = None;
        peer.listener = None;
        peer.silent.clear();
    }
    for range in &checked.unmap {
        unmap(*range).map_err(at(2))?;
    }
    own_memory(state, checked).map_err(at(3))?;
    let lifetime = Lifetime::make(state.program, context_slot).map_err(because(0))?;
    state.lifetime = Some(lifetime);
    let creators_pidfd =
        std::mem::replace(&mut state.pidfd, crate::peers::socket::own_pidfd().map_err(because(0))?);
    let grant = state.add_grant(own_end, own_id, Rights::all()).map_err(because(0))?;
    link.turn();
    let slot = state
        .add_peer(creators_name, creators_id, creators_pidfd, creator, Some(link), Some(grant))
        .map_err(because(0))?;
    close_descriptors(state, slot, lifetime.descriptor(), &spec.close).map_err(at(4))?;
    let memory = spec.trap.then(open_memory).transpose().map_err(at(7))?;
    if !spec.dumpable {
        rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
            .map_err(at(6))?;
    }
    let watcher = Box::leak(Box::new(watcher));
    // SAFETY: the lifetime's `on_event` keeps to the rules, and neither lifetime nor watcher are ever freed.
    unsafe { watcher.listen(lifetime.event_source()) };
    let taken = spec.taken();
    let filtered = spec.trap || !taken.is_empty();
    if filtered {
        job_control::leave_root_alone();
        rustix::thread::set_no_new_privs(true).map_err(at(8))?;
    }
    let thread = watcher.start().map_err(at(5))?;
    watcher::set(thread, [watcher.stack(), lifetime.pages()]);
    if filtered {
        let grant = state.grants.get(grant).and_then(Option::as_ref).ok_or((8, Errno::IO))?;
        install_filter(lifetime, &taken, &grant.socket, memory, counterparts).map_err(at(8))?;
        state.filtered = true;
        state.cannot_copy |= spec.trap || context_copy::takes(&taken);
    }
    Ok(slot)
}

/// Leaves of the shared ranges those that were declared, and makes the others' remains our own.
fn own_memory(state: &mut State, checked: &Checked) -> rustix::io::Result<()> {
    let declared = |range: PageRange| checked.share.iter().any(|share| contains(*share, range));
    for shared in state.shared.iter().filter(|shared| !declared(shared.range)) {
        for piece in without(shared.range, checked.unmap.iter().copied()) {
            privatise(piece)?;
        }
    }
    state.shared.retain(|shared| declared(shared.range));
    let gone = |range: PageRange| checked.unmap.iter().any(|unmap| unmap.overlaps(range));
    state.overlaid.retain(|range| !gone(*range));
    Ok(())
}

/// Closes what was to be closed, except what the context itself runs on.
fn close_descriptors(
    state: &mut State,
    creator: usize,
    lifetime: RawFd,
    ranges: &[(u32, u32)],
) -> rustix::io::Result<()> {
    if ranges.is_empty() {
        return Ok(());
    }
    let to_close = |fd: RawFd| {
        let fd = fd.unsigned_abs();
        ranges.iter().any(|(first, last)| (*first..=*last).contains(&fd))
    };
    let mut awaited = Vec::new();
    for slot in 0..state.peers.len() {
        if slot != creator && state.peers[slot].as_ref().is_some_and(|peer| to_close(peer.fd.as_raw_fd())) {
            // The copy of a thread that waited for it closes it.
            awaited.extend(
                state.peers[slot]
                    .take()
                    .filter(|peer| Rc::strong_count(&peer.pidfd) > 1)
                    .map(|peer| peer.pidfd.as_raw_fd()),
            );
        }
    }
    let mut keep: Vec<u32> = state
        .peers
        .iter()
        .flatten()
        .flat_map(|peer| [peer.fd.as_raw_fd(), peer.pidfd.as_raw_fd()])
        .chain(state.grants.iter().flatten().map(|grant| grant.socket.as_raw_fd()))
        .chain(state.shared.iter().map(|shared| shared.file.as_raw_fd()))
        .chain([lifetime, state.main, state.pidfd.as_raw_fd()])
        .chain(state.connector.iter().map(AsRawFd::as_raw_fd))
        .chain(awaited)
        .map(RawFd::unsigned_abs)
        .collect();
    keep.sort_unstable();
    for (first, last) in ranges {
        let mut from = *first;
        for kept in keep.iter().copied().filter(|kept| (*first..=*last).contains(kept)) {
            if kept > from {
                close_range(from, kept - 1)?;
            }
            from = kept.saturating_add(1);
        }
        if from <= *last {
            close_range(from, *last)?;
        }
    }
    Ok(())
}

fn close_range(first: u32, last: u32) -> rustix::io::Result<()> {
    // SAFETY: the creator asked for it: see `Spec::close_descriptors`.
    unsafe { syscall!(Sysno::close_range, first, last, 0) }
        .map(|_| ())
        .map_err(|errno| Errno::from_raw_os_error(errno.into_raw()))
}

/// In the new context: waits until a context switches to it.
fn wait_for_control(state: &mut Held, creator: usize) -> Arrival {
    match slow::park(state, None, None) {
        Ok(arrival) => arrival,
        // The context that switched here died on the way, so there is no one to report to: control is released to the
        // creator.
        Err(_) => Arrival { caller: state.handle(creator), word: 0, bytes: Vec::new(), call: None },
    }
}
