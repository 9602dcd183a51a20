//! Copies: a program forks, and its contexts with it.
//!
//! A process can only be copied by itself. So the copy of the root, the *new root*, asks each context for a copy of
//! itself, its *copy*, and makes of all these a program of its own:
//!
//! 1. It rings each context at the place of the logical thread that forked. There the context, parked, connects at the
//!    root's door ([`crate::fork::rendezvous`]), which the new root has inherited.
//! 2. It forks twice, so that the copy is nobody's child who would have to reap it, and goes on waiting. The copy says
//!    who it is, and what it has: the ends of descriptors that others hold of it, the descriptors that it holds, with
//!    the memory that it shares with each of those, and memory that it shares with others ([`crate::Spec::share`]).
//! 3. The new root makes all of these again: one socket pair for each pair of ends, one link for each link, one file
//!    for each shared file, with its bytes. Doubles that knew each other name the same [`Id`]s, and nobody else can.
//!    Shared files are shown, not named.
//! 4. Each copy puts what it gets into the place of what it had, under the same numbers, starts its watcher, which
//!    watches the new root, and parks.
//!
//! So no copy has any way to the contexts of the other program, nor they to it. A context that does not answer in time,
//! because it runs or is stopped, has no copy, nor has one whose system calls are trapped: its copy's would go on
//! arriving in the old program, for the kernel knows one listener for a filter and all who inherit it. Nor has one from
//! which calls are withheld that this takes ([`NEEDED`]). Descriptors of such contexts are there, and their contexts
//! gone.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::Ordering::SeqCst;

use orrery_domain::Moment;
use orrery_domain::copy::{Kin, copy_process};
use orrery_domain::forked::Creator;
use orrery_domain::watch::Watcher;
use orrery_sys::signals;
use rustix::io::Errno;
use rustix::mm::MapFlags;
use rustix::process::{WaitId, WaitIdOptions};
use syscalls::{Sysno, syscall};

use crate::credentials::isolation;
use crate::error::{Error, Result};
use crate::exit::kill_self;
use crate::fork::message::{ALL, CONNECT, ForkMessage, GO, GRANT, HERE, PEER, READY, SHARED};
use crate::fork::rendezvous::{PATIENCE, connect};
use crate::id::Id;
use crate::memory::ranges::map;
use crate::peers::socket::{inode, own_pidfd};
use crate::shared::link::Link;
use crate::shared::program::{DECLINED, Program, own_thread};
use crate::spawn::lifetime::Lifetime;
use crate::spawn::signal_forwarding::{self, Shared};
use crate::state::State;
use crate::switch::slow;
use crate::syscalls::filter::Calls;
use crate::threads::logical;
use crate::threads::state_lock::Held;
use crate::threads::stop_threads::StoppedThreads;
use crate::types::Arrival;
use orrery_rollback::watcher;

/// What a context must be allowed to do to make a copy of itself.
const NEEDED: [libc::c_long; 24] = [
    libc::SYS_socketpair,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_clone,
    libc::SYS_waitid,
    libc::SYS_mmap,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_dup3,
    libc::SYS_prctl,
    libc::SYS_get_robust_list,
    libc::SYS_pidfd_open,
    libc::SYS_epoll_create1,
    libc::SYS_prlimit64,
    libc::SYS_capget,
    // Itself, by its new number, which its filter does not know.
    libc::SYS_kill,
    libc::SYS_tgkill,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_mprotect,
    libc::SYS_openat,
    libc::SYS_getdents64,
    libc::SYS_read,
];

/// Returns whether a context that may not make these calls cannot make a copy of itself.
pub(crate) fn takes(withheld: &Calls) -> bool {
    NEEDED.iter().any(|call| u32::try_from(*call).is_ok_and(|number| withheld.has(number)))
}

/// In a context that is parked and was asked for its copy: makes it. In the copy: waits until a context switches to it.
pub(crate) fn serve(state: &mut Held) -> Option<Arrival> {
    let asked = &state.place().copy_requested;
    let line =
        state.connector.as_ref().filter(|_| !state.cannot_copy).and_then(|connector| connect(connector).ok());
    let Some(line) = line else {
        asked.store(DECLINED, SeqCst);
        return None;
    };
    asked.store(0, SeqCst);
    let until = Moment::now().after(PATIENCE);
    let hello = ForkMessage { what: CONNECT, context_slot: state.me, ..ForkMessage::default() };
    hello.send(line.as_fd(), &[]).ok()?;
    let (_, fds) = ForkMessage::expect(line.as_fd(), until, GO, 3).ok()?;
    let [program, root, connector] = <[OwnedFd; 3]>::try_from(fds).ok()?;
    let others = StoppedThreads::hold(state.program, state.me).ok()?;
    let mask = others.as_ref().map_or_else(signals::block_all, StoppedThreads::mask);
    // SAFETY: the first copy does nothing but make the second. That one hangs where another thread held what it needs,
    // and is not waited for beyond the limit.
    let copied = unsafe { copy_process(Kin::HiddenChild) };
    if let Ok(None) = copied {
        let _left = ManuallyDrop::new(others);
        // SAFETY: this is the first copy, which has one thread and makes the second. That one hangs where
        // another thread held what it needs, and is not waited for beyond the limit.
        match unsafe { copy_process(Kin::HiddenChild) } {
            Ok(None) => {}
            _ => end_at_once(),
        }
        state.connector = Some(connector);
        return match become_double(state, &line, program, root, mask, until) {
            Ok(()) => match slow::park(state, None, None) {
                Ok(arrival) => Some(arrival),
                Err(_) => kill_self(),
            },
            Err(_) => end_at_once(),
        };
    }
    drop(others);
    signals::set_mask(mask);
    if let Ok(Some(first)) = copied {
        let options = WaitIdOptions::EXITED | WaitIdOptions::from_bits_retain(libc::__WALL.cast_unsigned());
        let _ = rustix::io::retry_on_intr(|| {
            rustix::process::waitid(WaitId::PidFd(first.pidfd.as_fd()), options)
        });
    }
    None
}

/// Ends a copy that nobody waits for, without a trace in what it shares.
pub(crate) fn end_at_once() -> ! {
    loop {
        // SAFETY: the call takes a number and ends the process.
        let _ = unsafe { syscall!(Sysno::exit_group, 0) };
    }
}

/// In the copy, which is a copy of a parked context, all by itself.
fn become_double(
    state: &mut Held,
    line: &OwnedFd,
    program: OwnedFd,
    root: OwnedFd,
    mask: signals::Mask,
    until: Moment,
) -> Result<()> {
    let failed = |errno| Error::system("make a double of a context", 0, errno);
    state.keep();
    state.leave_table();
    state.shared_credentials = None;
    let pidfd = own_pidfd()?;
    let own = rustix::process::getpid().as_raw_pid().unsigned_abs();
    if state.isolated {
        // The number that its filter lets it name is its original's.
        isolation::from_limits(own, &Calls::none()).map_err(failed)?;
    }
    let (me, logical_thread) = (state.me, state.logical_thread);
    let here = ForkMessage { what: HERE, context_slot: me, index: own, ..ForkMessage::default() };
    here.send(line.as_fd(), &[pidfd.as_fd()]).map_err(failed)?;

    signal_forwarding::forget_program();
    // SAFETY: nothing of the former program's is used from here on: all that refers to it belongs to waits that are
    // broken off, or is replaced.
    unsafe { state.program.leave() };
    state.program = Box::leak(Box::new(Program::join(program.as_fd())?));
    state.creator = Creator::here();
    state.pidfd = pidfd;
    logical::know(logical_thread);
    state.checkpoint_pid = None;
    state.forget_threads();
    if let Some(lifetime) = state.lifetime.take() {
        lifetime.close_copy();
    }
    let main = std::mem::replace(&mut state.main, root.into_raw_fd());
    // SAFETY: the state owned the number and has another one now, so that nobody closes it again.
    unsafe { rustix::io::close(main) };
    exchange(state, line, until).map_err(failed)?;
    state.list_names();

    let place = state.program.place(logical_thread, me);
    state.program.clear_place(logical_thread, me);
    place.thread.store(own_thread(), SeqCst);
    let lifetime = Lifetime::make(state.program, me)?;
    let program = state.program;
    if let Some(shared) = &mut state.shared_signals {
        **shared = Shared::from_now_on(program, me);
    }
    state.lifetime = Some(lifetime);
    for (slot, grant) in state.grants.iter().enumerate() {
        if let Some(grant) = grant {
            lifetime.add(&grant.socket, slot)?;
        }
    }
    // SAFETY: the mark is in the program's shared pages, which contexts never unmap.
    let mut watcher = unsafe { Watcher::prepare(state.main, place.face.mark())? };
    // SAFETY: the source's functions keep to the rules of the watcher's thread, and its lifetime is never
    // freed, as for a new context.
    unsafe { watcher.listen(lifetime.event_source()) };
    let watcher = Box::leak(Box::new(watcher));
    let thread = watcher.start().map_err(failed)?;
    watcher::set(thread, [watcher.stack(), lifetime.pages()]);
    signals::set_mask(mask);
    ForkMessage { what: READY, context_slot: me, ..ForkMessage::default() }
        .send(line.as_fd(), &[])
        .map_err(failed)
}

/// In a copy: says what it has, and puts what it gets in its place.
fn exchange(state: &mut State, line: &OwnedFd, until: Moment) -> rustix::io::Result<()> {
    let line = line.as_fd();
    for (note, shared) in inventory(state) {
        let shown: Vec<BorrowedFd<'_>> =
            shared.iter().filter_map(|index| Some(state.shared.get(*index)?.file.as_fd())).collect();
        note.send(line, &shown)?;
    }
    ForkMessage { what: ALL, ..ForkMessage::default() }.send(line, &[])?;
    loop {
        let (note, fds) = ForkMessage::receive(line, until)?;
        if note.what == ALL {
            state.forget_links();
            return Ok(());
        }
        install(state, &note, fds)?;
    }
}

/// Returns what a context has that its copy needs again; for shared memory, which.
pub(crate) fn inventory(state: &State) -> Vec<(ForkMessage, Option<usize>)> {
    let number = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
    let grants = state.grants.iter().enumerate().filter_map(|(index, grant)| {
        let id = grant.as_ref()?.id.0;
        Some((ForkMessage { what: GRANT, index: number(index), id, ..ForkMessage::default() }, None))
    });
    let peers = state.peers.iter().enumerate().filter_map(|(index, peer)| {
        let peer = peer.as_ref()?;
        let link = peer.link.as_ref().map_or(Id::NONE, |link| link.id).0;
        let side = peer.link.as_ref().map_or(0, |link| number(link.side()));
        let note = ForkMessage {
            what: PEER,
            context_slot: peer.context_slot,
            index: number(index),
            side,
            id: peer.id.0,
            link,
        };
        Some((note, None))
    });
    let shared = (0..state.shared.len()).map(|index| {
        (ForkMessage { what: SHARED, index: number(index), ..ForkMessage::default() }, Some(index))
    });
    grants.chain(peers).chain(shared).collect()
}

/// Puts something new in the place of what a note says.
pub(crate) fn install(state: &mut State, note: &ForkMessage, fds: Vec<OwnedFd>) -> rustix::io::Result<()> {
    let index = note.index as usize;
    let mut fds = fds.into_iter();
    let first = fds.next().ok_or(Errno::BADMSG)?;
    match note.what {
        GRANT => {
            let grant = state.grants.get_mut(index).and_then(Option::as_mut).ok_or(Errno::BADMSG)?;
            grant.socket = first;
        }
        PEER => {
            let pidfd = fds.next().ok_or(Errno::BADMSG)?;
            let link = match fds.next() {
                Some(file) => {
                    let made = Link::accept_as(file.as_fd(), note.side as usize & 1, Id(note.link));
                    Some(made.map_err(|_| Errno::NOMEM)?)
                }
                None => None,
            };
            let peer = state.peers.get_mut(index).and_then(Option::as_mut).ok_or(Errno::BADMSG)?;
            if !peer.is_intact() {
                // The program closed it behind our back, and the number is something else's.
                return Ok(());
            }
            let number = peer.fd.as_raw_fd();
            // SAFETY: the number is the peer's descriptor, which stays what it is called.
            let placed = unsafe { syscall!(Sysno::dup3, first.as_raw_fd(), number, libc::O_CLOEXEC) };
            placed.map_err(|errno| Errno::from_raw_os_error(errno.into_raw()))?;
            peer.inode = inode(number).unwrap_or(0);
            peer.pidfd = Rc::new(pidfd);
            // The new program has its own numbers.
            peer.pid = 0;
            if let Some(link) = &link {
                link.set_slot(index);
                link.set_copied(false);
            }
            peer.link = link;
            peer.listener = None;
            peer.silent.clear();
        }
        SHARED => {
            let shared = state.shared.get_mut(index).ok_or(Errno::BADMSG)?;
            map(shared.range, &first, MapFlags::SHARED).map_err(|_| Errno::NOMEM)?;
            shared.file = first;
        }
        _ => return Err(Errno::BADMSG),
    }
    Ok(())
}
