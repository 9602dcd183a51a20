//! A forked root, that makes a program of its own of itself and of copies of the contexts: see
//! [`crate::fork::context_copy`].

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use orrery_domain::Moment;
use orrery_domain::forked::Creator;
use orrery_domain::gate::is_dead;
use orrery_sys::descriptors;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::Pid;

use crate::error::{Error, Result};
use crate::fork::context_copy::{end_at_once, install, inventory};
use crate::fork::message::{ALL, CONNECT, ForkMessage, GO, GRANT, HERE, PEER, READY, SHARED};
use crate::fork::rendezvous::{PATIENCE, Rendezvous};
use crate::id::Id;
use crate::peers::socket::own_pidfd;
use crate::shared::link::Link;
use crate::shared::program::{COPY_REQUESTED, DECLINED, Program, ROOT};
use crate::spawn::reaper;
use crate::spawn::signal_forwarding;
use crate::state::State;
use crate::threads::logical;
use crate::threads::state_lock;
use crate::types::Forked;

/// A copy, seen from the new root.
struct Double {
    line: OwnedFd,
    context_slot: u32,
    pid: Pid,
    pidfd: OwnedFd,
    has: Vec<(ForkMessage, Vec<OwnedFd>)>,
}

/// In a process that was forked from a root, by one of its threads: makes a program of its own of it, with copies of
/// the contexts.
///
/// # Errors
/// [`Error::OtherProcess`] where that cannot be; everything is as before then.
pub(crate) fn adopt(state: &mut State) -> Result<()> {
    let until = Moment::now().after(PATIENCE);
    let former = state.program;
    let logical_thread = own_strand(state);
    let rendezvous = state.rendezvous.take().ok_or(Error::OtherProcess)?;
    let made =
        rendezvous.take_turn().map_err(|e| Error::system("take a turn at the door", 0, e)).and_then(|()| {
            let (program, file) = Program::succeed(former, logical_thread)?;
            let pidfd = own_pidfd()?;
            let own = Rendezvous::open().ok_or(Error::OtherProcess)?;
            let go = ForkMessage { what: GO, ..ForkMessage::default() };
            let sent = [file.as_fd(), pidfd.as_fd(), own.1.as_fd()];
            let doubles = gather(former, logical_thread, &rendezvous, &go, sent, until);
            Ok((program, pidfd, doubles, own))
        });
    let (program, pidfd, doubles, own) = match made {
        Ok(made) => made,
        Err(error) => {
            state.rendezvous = Some(rendezvous);
            return Err(error);
        }
    };
    for double in &doubles {
        program.seat_process(double.context_slot, double.pid);
    }
    let seats: Vec<u32> = doubles.iter().map(|double| double.context_slot).collect();
    for context_slot in former.used().filter(|context_slot| !seats.contains(context_slot)) {
        program.context_slot(context_slot).generation.fetch_add(1, SeqCst);
    }
    state.leave_table();
    state.shared_credentials = None;
    state.logical_thread = logical_thread;
    state.forget_threads();
    let ready = distribute(state, doubles, &pidfd, until);
    signal_forwarding::forget_program();
    // SAFETY: this thread is the only one, and uses the new one from here on.
    unsafe { former.leave() };
    state.program = Box::leak(Box::new(program));
    signal_forwarding::set_slot(state.program, ROOT);
    state.creator = Creator::here();
    // SAFETY: `main` is a descriptor that the state owns by its number, which is replaced below, so that
    // nobody closes it again.
    unsafe { rustix::io::close(state.main) };
    state.main = own_pidfd()?.into_raw_fd();
    state.list_names();
    state.pidfd = pidfd;
    state.cpus = rustix::thread::sched_getaffinity(None).ok();
    logical::know(logical_thread);
    drop(rendezvous);
    (state.rendezvous, state.connector) = (Some(own.0), Some(own.1));
    reaper::adopt(ready);
    Ok(())
}

/// Forks the program; the child has its copies when this returns.
///
/// # Safety
/// As for fork(2) in a program with other threads.
pub(crate) unsafe fn fork() -> Result<Forked> {
    let failed = |errno| Error::system("fork the program", 0, errno);
    let held = state_lock::hold()?;
    if held.as_ref().is_some_and(|state| state.me != ROOT) {
        return Err(Error::NotTheRoot);
    }
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(failed)?;
    // SAFETY: the child needs nothing that another thread may have held at the fork (# Safety).
    match unsafe { libc::fork() } {
        -1 => Err(failed(orrery_domain::watch::last_errno())),
        0 => {
            drop(reader);
            if let Some(held) = held {
                held.keep();
                drop(held);
                // Makes the copies.
                let errno = match state_lock::hold() {
                    Ok(_) => 0,
                    Err(Error::System(error)) => error.errno.raw_os_error(),
                    Err(_) => libc::ECHILD,
                };
                let written = rustix::io::write(&writer, &errno.to_ne_bytes());
                if errno != 0 || written.is_err() {
                    end_at_once();
                }
            }
            Ok(Forked::Child)
        }
        pid => {
            drop(writer);
            let child = Pid::from_raw(pid).ok_or(failed(Errno::CHILD))?;
            let mut errno = [0; 4];
            let contexts = held.is_some();
            let read = rustix::io::retry_on_intr(|| rustix::io::read(&reader, &mut errno[..]));
            match (contexts, read, i32::from_ne_bytes(errno)) {
                (false, ..) | (true, Ok(4), 0) => Ok(Forked::Parent(pid.unsigned_abs())),
                (_, read, errno) => {
                    let _ = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty());
                    let known = matches!(read, Ok(4));
                    Err(failed(if known { Errno::from_raw_os_error(errno) } else { Errno::CHILD }))
                }
            }
        }
    }
}

/// The logical thread of the forking thread, which this one is a copy of.
fn own_strand(state: &State) -> u32 {
    logical::inherited().unwrap_or(state.logical_thread)
}

/// Asks all contexts for copies.
fn gather(
    former: &Program,
    logical_thread: u32,
    rendezvous: &Rendezvous,
    go: &ForkMessage,
    with: [BorrowedFd<'_>; 3],
    until: Moment,
) -> Vec<Double> {
    let mut asked: Vec<u32> = former
        .used()
        .filter(|context_slot| {
            former.pid(*context_slot).is_some()
                && former.exists(logical_thread, *context_slot)
                && !former.is_marked_dead(*context_slot)
        })
        .collect();
    for context_slot in &asked {
        let place = former.place(logical_thread, *context_slot);
        place.copy_requested.store(COPY_REQUESTED, SeqCst);
        place.face.call();
    }
    let mut lines = Vec::new();
    while !asked.is_empty() && Moment::now() < until {
        let glance = Moment::now().after(Duration::from_millis(20)).min(until);
        if let Some((line, pid)) = rendezvous.answer(glance)
            && let Ok((note, _)) = ForkMessage::expect(line.as_fd(), until, CONNECT, 0)
            && former.pid(note.context_slot) == Some(pid)
            && asked.contains(&note.context_slot)
        {
            asked.retain(|context_slot| *context_slot != note.context_slot);
            if go.send(line.as_fd(), &with).is_ok() {
                lines.push((line, note.context_slot));
            }
        }
        asked.retain(|context_slot| {
            former.pid(*context_slot).is_some()
                && !former.is_marked_dead(*context_slot)
                && former.place(logical_thread, *context_slot).copy_requested.load(SeqCst) != DECLINED
        });
    }
    for context_slot in asked {
        former.place(logical_thread, context_slot).copy_requested.store(0, SeqCst);
    }
    lines.into_iter().filter_map(|(line, context_slot)| take_stock(line, context_slot, until).ok()).collect()
}

/// Returns what a copy has.
fn take_stock(line: OwnedFd, context_slot: u32, until: Moment) -> rustix::io::Result<Double> {
    let (here, fds) = ForkMessage::expect(line.as_fd(), until, HERE, 1)?;
    let pid = i32::try_from(here.index).ok().and_then(Pid::from_raw).ok_or(Errno::BADMSG)?;
    let pidfd = fds.into_iter().next().ok_or(Errno::BADMSG)?;
    let mut has = Vec::new();
    loop {
        match ForkMessage::receive(line.as_fd(), until)? {
            (note, _) if note.what == ALL => return Ok(Double { line, context_slot, pid, pidfd, has }),
            item => has.push(item),
        }
    }
}

/// What is made again, each once.
#[derive(Default)]
struct Fresh {
    /// The descriptor, and the context's own end.
    ends: HashMap<[u8; 16], (OwnedFd, OwnedFd)>,
    links: HashMap<[u8; 16], OwnedFd>,
    /// By device and inode of the original.
    files: BTreeMap<(u64, u64), OwnedFd>,
}

impl Fresh {
    fn ends(&mut self, id: [u8; 16]) -> rustix::io::Result<&(OwnedFd, OwnedFd)> {
        use std::collections::hash_map::Entry;
        Ok(match self.ends.entry(id) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(none) => {
                let kind = SocketType::SEQPACKET;
                none.insert(socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?)
            }
        })
    }

    fn link(&mut self, id: [u8; 16]) -> rustix::io::Result<&OwnedFd> {
        use std::collections::hash_map::Entry;
        Ok(match self.links.entry(id) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(none) => none.insert(Link::make().map_err(|_| Errno::NOMEM)?.1),
        })
    }

    fn file(&mut self, shown: BorrowedFd<'_>) -> rustix::io::Result<&OwnedFd> {
        use std::collections::btree_map::Entry;
        let status = rustix::fs::fstat(shown)?;
        Ok(match self.files.entry((status.st_dev, status.st_ino)) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(none) => none.insert(copy_of(shown, status.st_size)?),
        })
    }

    /// Returns what is to take the place of something, as descriptors to send or keep.
    fn replace(
        &mut self,
        note: &ForkMessage,
        shown: &[OwnedFd],
        pidfds: &HashMap<u32, OwnedFd>,
        root: &OwnedFd,
    ) -> rustix::io::Result<Vec<OwnedFd>> {
        let copy = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 0);
        match note.what {
            GRANT => Ok(vec![copy(&self.ends(note.id)?.1)?]),
            PEER => {
                let mut fds = vec![
                    copy(&self.ends(note.id)?.0)?,
                    copy(pidfds.get(&note.context_slot).unwrap_or(root))?,
                ];
                if note.link != Id::NONE.0 {
                    fds.push(copy(self.link(note.link)?)?);
                }
                Ok(fds)
            }
            SHARED => {
                let shown = shown.first().ok_or(Errno::BADMSG)?;
                Ok(vec![copy(self.file(shown.as_fd())?)?])
            }
            _ => Err(Errno::BADMSG),
        }
    }
}

/// Another file with the same bytes.
fn copy_of(file: BorrowedFd<'_>, length: i64) -> rustix::io::Result<OwnedFd> {
    let length = u64::try_from(length).map_err(|_| Errno::INVAL)?;
    let copy = rustix::fs::memfd_create("orrery-shared", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&copy, length)?;
    let mut buffer = vec![0; 1 << 16];
    let mut at = 0;
    while at < length {
        let read = rustix::io::pread(file, &mut buffer, at)?;
        if read == 0 {
            break;
        }
        // Holes stay holes.
        if buffer[..read].iter().any(|byte| *byte != 0) {
            let mut done = 0;
            while done < read {
                done += rustix::io::pwrite(&copy, &buffer[done..read], at + done as u64)?;
            }
        }
        at += read as u64;
    }
    rustix::fs::fcntl_add_seals(&copy, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(copy)
}

/// Gives everybody what takes the place of what they had; gives those copies that are ready, by slot and pidfd.
fn distribute(state: &mut State, doubles: Vec<Double>, root: &OwnedFd, until: Moment) -> Vec<(u32, OwnedFd)> {
    let mut fresh = Fresh::default();
    let pidfds: HashMap<u32, OwnedFd> = doubles
        .iter()
        .filter_map(|double| Some((double.context_slot, double.pidfd.try_clone().ok()?)))
        .collect();
    let own: Vec<(ForkMessage, Option<usize>)> = inventory(state);
    for double in &doubles {
        for (note, shown) in &double.has {
            if let Ok(fds) = fresh.replace(note, shown, &pidfds, root) {
                let sent: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
                let _ = note.send(double.line.as_fd(), &sent);
            }
        }
        let _ = ForkMessage { what: ALL, ..ForkMessage::default() }.send(double.line.as_fd(), &[]);
    }
    for (note, shared) in own {
        let shown: Vec<OwnedFd> =
            shared.and_then(|index| state.shared.get(index)?.file.try_clone().ok()).into_iter().collect();
        if let Ok(fds) = fresh.replace(&note, &shown, &pidfds, root) {
            let _ = install(state, &note, fds.into_iter().map(descriptors::raise).collect());
        }
    }
    state.forget_links();
    let ready = |double: &Double| {
        ForkMessage::expect(double.line.as_fd(), until, READY, 0).is_ok() && !is_dead(double.pidfd.as_fd())
    };
    doubles
        .into_iter()
        .map(|double| {
            if !ready(&double) {
                let _ = rustix::process::pidfd_send_signal(&double.pidfd, rustix::process::Signal::KILL);
            }
            (double.context_slot, double.pidfd)
        })
        .collect()
}
