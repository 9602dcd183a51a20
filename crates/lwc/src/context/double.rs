//! Doubles: a program forks, and its contexts with it.
//!
//! A process can only be copied by itself. So the copy of the root, the *new root*, asks each context for a copy of itself,
//! its *double*, and makes of all these a program of its own:
//!
//! 1. It rings each context at the place of the strand that forked. There the context, parked, knocks at the root's door
//!    ([`super::door`]), which the new root has inherited, and sees that it is that door.
//! 2. It forks twice, so that the double is nobody's child who would have to bury it, and goes on waiting. The double says
//!    who it is, and what it has: the ends of descriptors that others hold of it, the descriptors that it holds, with the
//!    memory that it shares with each of those, and memory that it shares with others ([`super::Spec::share`]).
//! 3. The new root makes all of these anew: one socket pair for each pair of ends, one link for each link, one file for
//!    each shared file, with its bytes. Doubles that knew each other name the same [`Id`]s, and nobody else can. Shared files
//!    are shown, not named.
//! 4. Each double puts what it gets into the place of what it had, under the same numbers, starts its watcher, which watches
//!    the new root, and parks.
//!
//! So no double has any way to the contexts of the other program, nor they to it. A context that does not answer in time, because
//! it runs or is stopped, has no double, nor has one whose system calls are filtered: its calls would go on arriving in
//! the old program. Descriptors of such contexts are there, and their contexts gone.

use std::collections::{BTreeMap, HashMap};
use std::io::{IoSlice, IoSliceMut};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use orrery_domain::Moment;
use orrery_domain::copy::{Kin, copy_process};
use orrery_domain::forked::Creator;
use orrery_domain::gate::is_dead;
use orrery_domain::watch::Watcher;
use orrery_sys::{descriptors, signals};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::MapFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Pid, WaitId, WaitIdOptions};
use syscalls::{Sysno, syscall};

use super::birth::die;
use super::door::{Door, is_readable, knock};
use super::error::{Error, Result};
use super::id::Id;
use super::leash::Leash;
use super::link::Link;
use super::program::{DECLINED, DOUBLE, Program, ROOT, own_thread};
use super::ranges::map;
use super::state;
use super::state::{Held, State, inode, own_pidfd};
use super::still::Still;
use super::{Arrival, Forked, handover, reaper, strands};

/// How long all contexts together may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// One message between a double and the new root, with at most three descriptors.
#[derive(Clone, Copy, Debug, Default)]
struct Note {
    what: u32,
    seat: u32,
    /// A place in a list of the double's.
    index: u32,
    /// For a link, from which side it is seen.
    side: u32,
    id: [u8; 16],
    link: [u8; 16],
}

const KNOCK: u32 = 1;
const GO: u32 = 2;
const HERE: u32 = 3;
const GRANT: u32 = 4;
const PEER: u32 = 5;
const SHARED: u32 = 6;
const ALL: u32 = 7;
const READY: u32 = 8;
const LENGTH: usize = 48;

impl Note {
    fn bytes(&self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        for (place, word) in bytes.chunks_exact_mut(4).zip([self.what, self.seat, self.index, self.side]) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes[16..32].copy_from_slice(&self.id);
        bytes[32..].copy_from_slice(&self.link);
        bytes
    }

    fn of(bytes: &[u8; LENGTH]) -> Self {
        let word = |at: usize| bytes[at..].first_chunk().map_or(0, |word| u32::from_ne_bytes(*word));
        let id = |at: usize| bytes[at..].first_chunk().copied().unwrap_or_default();
        Self { what: word(0), seat: word(4), index: word(8), side: word(12), id: id(16), link: id(32) }
    }

    /// Sends it.
    fn send(&self, to: BorrowedFd<'_>, fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let bytes = self.bytes();
        let end = Moment::now().after(PATIENCE);
        loop {
            match sendmsg(
                to,
                &[IoSlice::new(&bytes)],
                &mut ancillary,
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            ) {
                // The other side reads before long, or never.
                Err(Errno::AGAIN) if Moment::now() < end => std::thread::sleep(Duration::from_millis(1)),
                Err(Errno::INTR) => {}
                sent => return sent.map(|_| ()),
            }
        }
    }

    /// The next one.
    fn receive(from: BorrowedFd<'_>, until: Moment) -> rustix::io::Result<(Self, Vec<OwnedFd>)> {
        if !is_readable(from, until) {
            return Err(Errno::TIMEDOUT);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; LENGTH];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)?;
        let fds = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        // Out of the way of the numbers that are to be replaced.
        let fds = fds.flatten().map(descriptors::raise).collect();
        if received.bytes != LENGTH { Err(Errno::PIPE) } else { Ok((Self::of(&bytes), fds)) }
    }

    /// The next one, which has to be about this, with so many descriptors.
    fn expect(
        from: BorrowedFd<'_>,
        until: Moment,
        what: u32,
        fds: usize,
    ) -> rustix::io::Result<(Self, Vec<OwnedFd>)> {
        let (note, sent) = Self::receive(from, until)?;
        if note.what == what && sent.len() == fds { Ok((note, sent)) } else { Err(Errno::BADMSG) }
    }
}

/// In a context that is parked and was asked for its double: makes it. In the double: waits until somebody switches to it.
pub(crate) fn serve(state: &mut Held) -> Option<Arrival> {
    let asked = &state.place().asked_to_double;
    let line = match (state.door_name, state.filtered) {
        (Some(name), false) => knock(name, state.root).ok(),
        _ => None,
    };
    let Some(line) = line else {
        asked.store(DECLINED, SeqCst);
        return None;
    };
    asked.store(0, SeqCst);
    let until = Moment::now().after(PATIENCE);
    let hello = Note { what: KNOCK, seat: state.me, ..Note::default() };
    hello.send(line.as_fd(), &[]).ok()?;
    let (go, fds) = Note::expect(line.as_fd(), until, GO, 2).ok()?;
    let [program, root] = <[OwnedFd; 2]>::try_from(fds).ok()?;
    let others = Still::hold(state.program, state.me).ok()?;
    let mask = others.as_ref().map_or_else(signals::block_all, Still::mask);
    // SAFETY: the first copy does nothing but make the second. That one hangs where another thread held what it needs, and
    // is not waited for beyond the limit.
    let copied = unsafe { copy_process(Kin::HiddenChild) };
    if let Ok(None) = copied {
        let _left = ManuallyDrop::new(others);
        // SAFETY: as above.
        match unsafe { copy_process(Kin::HiddenChild) } {
            Ok(None) => {}
            _ => end_at_once(),
        }
        state.door_name = Some(Id(go.id)).filter(|name| *name != Id::NONE);
        state.root = i32::try_from(go.index).ok().and_then(Pid::from_raw).unwrap_or(state.root);
        return match become_double(state, &line, program, root, mask, until) {
            Ok(()) => match handover::park(state, None, None) {
                Ok(arrival) => Some(arrival),
                Err(_) => die(),
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
        // SAFETY: ends the process.
        let _ = unsafe { syscall!(Sysno::exit_group, 0) };
    }
}

/// In the double, which is a copy of a parked context, all by itself.
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
    let pidfd = own_pidfd()?;
    let own = rustix::process::getpid().as_raw_pid().unsigned_abs();
    let (me, strand) = (state.me, state.strand);
    let here = Note { what: HERE, seat: me, index: own, ..Note::default() };
    here.send(line.as_fd(), &[pidfd.as_fd()]).map_err(failed)?;

    // SAFETY: nothing of the former program's is used from here on: whatever refers to it belongs to waits that are broken
    // off, or is replaced.
    unsafe { state.program.leave() };
    state.program = Box::leak(Box::new(Program::join(program.as_fd())?));
    state.creator = Creator::here();
    state.pidfd = pidfd;
    strands::know(strand);
    state.spare = None;
    state.forget_strands();
    if let Some(leash) = state.leash.take() {
        leash.close_copy();
    }
    let main = core::mem::replace(&mut state.main, root.into_raw_fd());
    // SAFETY: nobody else closes it.
    unsafe { rustix::io::close(main) };
    exchange(state, line, until).map_err(failed)?;

    let place = state.program.place(strand, me);
    state.program.clear_place(strand, me);
    place.thread.store(own_thread(), SeqCst);
    let leash = Leash::make(state.program, me)?;
    state.leash = Some(leash);
    for (slot, grant) in state.grants.iter().enumerate() {
        if let Some(grant) = grant {
            leash.add(&grant.socket, slot)?;
        }
    }
    let mut watcher = Watcher::prepare(state.main, place.face.mark())?;
    // SAFETY: as for a new context.
    unsafe { watcher.listen(leash.ear()) };
    let watcher = Box::leak(Box::new(watcher));
    let thread = watcher.start().map_err(failed)?;
    crate::companion::note(thread, [watcher.stack(), leash.pages()]);
    signals::set_mask(mask);
    Note { what: READY, seat: me, ..Note::default() }.send(line.as_fd(), &[]).map_err(failed)
}

/// In a double: says what it has, and puts what it gets in its place.
fn exchange(state: &mut State, line: &OwnedFd, until: Moment) -> rustix::io::Result<()> {
    let line = line.as_fd();
    for (note, shared) in inventory(state) {
        let shown: Vec<BorrowedFd<'_>> =
            shared.iter().filter_map(|index| Some(state.shared.get(*index)?.file.as_fd())).collect();
        note.send(line, &shown)?;
    }
    Note { what: ALL, ..Note::default() }.send(line, &[])?;
    loop {
        let (note, fds) = Note::receive(line, until)?;
        if note.what == ALL {
            return Ok(());
        }
        install(state, &note, fds)?;
    }
}

/// What a context has that its double needs anew; for shared memory, which.
fn inventory(state: &State) -> Vec<(Note, Option<usize>)> {
    let number = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
    let grants = state.grants.iter().enumerate().filter_map(|(index, grant)| {
        let id = grant.as_ref()?.id.0;
        Some((Note { what: GRANT, index: number(index), id, ..Note::default() }, None))
    });
    let peers = state.peers.iter().enumerate().filter_map(|(index, peer)| {
        let peer = peer.as_ref()?;
        let link = peer.link.as_ref().map_or(Id::NONE, |link| link.id).0;
        let side = peer.link.as_ref().map_or(0, |link| number(link.side()));
        let note = Note { what: PEER, seat: peer.seat, index: number(index), side, id: peer.id.0, link };
        Some((note, None))
    });
    let shared = (0..state.shared.len())
        .map(|index| (Note { what: SHARED, index: number(index), ..Note::default() }, Some(index)));
    grants.chain(peers).chain(shared).collect()
}

/// Puts something new in the place of what a note says.
fn install(state: &mut State, note: &Note, fds: Vec<OwnedFd>) -> rustix::io::Result<()> {
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
            peer.pidfd = Arc::new(pidfd);
            // The new program has its own numbers.
            peer.pid = 0;
            if let Some(link) = &link {
                link.set_slot(index);
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

/// A double, seen from the new root.
struct Double {
    line: OwnedFd,
    seat: u32,
    pid: Pid,
    pidfd: OwnedFd,
    has: Vec<(Note, Vec<OwnedFd>)>,
}

/// In a process that was forked from a root, by one of its threads: makes a program of its own of it, with doubles of the
/// contexts.
///
/// # Errors
/// [`Error::OtherProcess`] where that cannot be; everything is as before then.
pub(crate) fn adopt(state: &mut State) -> Result<()> {
    let until = Moment::now().after(PATIENCE);
    let former = state.program;
    let strand = own_strand(state);
    let door = state.door.take().ok_or(Error::OtherProcess)?;
    let made = door.take_turn().map_err(|e| Error::system("take a turn at the door", 0, e)).and_then(|()| {
        let (program, file) = Program::succeed(former, strand)?;
        let pidfd = own_pidfd()?;
        let own = Door::open().unzip();
        let go = Note {
            what: GO,
            index: rustix::process::getpid().as_raw_pid().unsigned_abs(),
            id: own.1.unwrap_or(Id::NONE).0,
            ..Note::default()
        };
        let doubles = gather(former, strand, &door, &go, [file.as_fd(), pidfd.as_fd()], until);
        Ok((program, pidfd, doubles, own))
    });
    let (program, pidfd, doubles, own) = match made {
        Ok(made) => made,
        Err(error) => {
            state.door = Some(door);
            return Err(error);
        }
    };
    for double in &doubles {
        program.seat_process(double.seat, double.pid);
    }
    let seats: Vec<u32> = doubles.iter().map(|double| double.seat).collect();
    for seat in former.used().filter(|seat| !seats.contains(seat)) {
        program.seat(seat).generation.fetch_add(1, SeqCst);
    }
    state.strand = strand;
    state.forget_strands();
    let ready = distribute(state, doubles, &pidfd, until);
    // SAFETY: this thread is the only one, and uses the new one from here on.
    unsafe { former.leave() };
    state.program = Box::leak(Box::new(program));
    state.creator = Creator::here();
    state.root = rustix::process::getpid();
    // SAFETY: nobody else closes it.
    unsafe { rustix::io::close(state.main) };
    state.main = own_pidfd()?.into_raw_fd();
    state.pidfd = pidfd;
    state.cpus = rustix::thread::sched_getaffinity(None).ok();
    strands::know(strand);
    drop(door);
    (state.door, state.door_name) = own;
    reaper::adopt(ready);
    Ok(())
}

/// Forks the program; the child has its doubles when this returns.
///
/// # Safety
/// As for fork(2) in a program with other threads.
pub(crate) unsafe fn fork() -> Result<Forked> {
    let failed = |errno| Error::system("fork the program", 0, errno);
    let held = state::hold()?;
    if held.as_ref().is_some_and(|state| state.me != ROOT) {
        return Err(Error::NotTheRoot);
    }
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(failed)?;
    // SAFETY: the caller's promise.
    match unsafe { libc::fork() } {
        -1 => Err(failed(orrery_domain::watch::last_errno())),
        0 => {
            drop(reader);
            if let Some(held) = held {
                held.keep();
                drop(held);
                // Makes the doubles.
                let errno = match state::hold() {
                    Ok(_) => 0,
                    Err(Error::System(error)) => error.errno.raw_os_error(),
                    Err(_) => libc::ECHILD,
                };
                let told = rustix::io::write(&writer, &errno.to_ne_bytes());
                if errno != 0 || told.is_err() {
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
            let told = rustix::io::retry_on_intr(|| rustix::io::read(&reader, &mut errno[..]));
            match (contexts, told, i32::from_ne_bytes(errno)) {
                (false, ..) | (true, Ok(4), 0) => Ok(Forked::Parent(pid.unsigned_abs())),
                (_, told, errno) => {
                    let _ = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty());
                    let known = matches!(told, Ok(4));
                    Err(failed(if known { Errno::from_raw_os_error(errno) } else { Errno::CHILD }))
                }
            }
        }
    }
}

/// The strand of the forking thread, which this one is a copy of.
fn own_strand(state: &State) -> u32 {
    strands::inherited().unwrap_or(state.strand)
}

/// Asks all contexts for doubles.
fn gather(
    former: &Program,
    strand: u32,
    door: &Door,
    go: &Note,
    with: [BorrowedFd<'_>; 2],
    until: Moment,
) -> Vec<Double> {
    let mut asked: Vec<u32> = former
        .used()
        .filter(|seat| {
            former.pid(*seat).is_some() && former.exists(strand, *seat) && !former.is_marked_dead(*seat)
        })
        .collect();
    for seat in &asked {
        let place = former.place(strand, *seat);
        place.asked_to_double.store(DOUBLE, SeqCst);
        place.face.call();
    }
    let mut lines = Vec::new();
    while !asked.is_empty() && Moment::now() < until {
        let glance = Moment::now().after(Duration::from_millis(20)).min(until);
        if let Some((line, pid)) = door.answer(glance)
            && let Ok((note, _)) = Note::expect(line.as_fd(), until, KNOCK, 0)
            && former.pid(note.seat) == Some(pid)
            && asked.contains(&note.seat)
        {
            asked.retain(|seat| *seat != note.seat);
            if go.send(line.as_fd(), &with).is_ok() {
                lines.push((line, note.seat));
            }
        }
        asked.retain(|seat| {
            former.pid(*seat).is_some()
                && !former.is_marked_dead(*seat)
                && former.place(strand, *seat).asked_to_double.load(SeqCst) != DECLINED
        });
    }
    for seat in asked {
        former.place(strand, seat).asked_to_double.store(0, SeqCst);
    }
    lines.into_iter().filter_map(|(line, seat)| take_stock(line, seat, until).ok()).collect()
}

/// What a double has.
fn take_stock(line: OwnedFd, seat: u32, until: Moment) -> rustix::io::Result<Double> {
    let (here, fds) = Note::expect(line.as_fd(), until, HERE, 1)?;
    let pid = i32::try_from(here.index).ok().and_then(Pid::from_raw).ok_or(Errno::BADMSG)?;
    let pidfd = fds.into_iter().next().ok_or(Errno::BADMSG)?;
    let mut has = Vec::new();
    loop {
        match Note::receive(line.as_fd(), until)? {
            (note, _) if note.what == ALL => return Ok(Double { line, seat, pid, pidfd, has }),
            item => has.push(item),
        }
    }
}

/// What is made anew, each once.
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

    /// What is to take the place of something, as descriptors to send or keep.
    fn replace(
        &mut self,
        note: &Note,
        shown: &[OwnedFd],
        pidfds: &HashMap<u32, OwnedFd>,
        root: &OwnedFd,
    ) -> rustix::io::Result<Vec<OwnedFd>> {
        let copy = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 0);
        match note.what {
            GRANT => Ok(vec![copy(&self.ends(note.id)?.1)?]),
            PEER => {
                let mut fds =
                    vec![copy(&self.ends(note.id)?.0)?, copy(pidfds.get(&note.seat).unwrap_or(root))?];
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

/// Gives everybody what takes the place of what they had; gives those doubles that are ready, by seat and pidfd.
fn distribute(state: &mut State, doubles: Vec<Double>, root: &OwnedFd, until: Moment) -> Vec<(u32, OwnedFd)> {
    let mut fresh = Fresh::default();
    let pidfds: HashMap<u32, OwnedFd> =
        doubles.iter().filter_map(|double| Some((double.seat, double.pidfd.try_clone().ok()?))).collect();
    let own: Vec<(Note, Option<usize>)> = inventory(state);
    for double in &doubles {
        for (note, shown) in &double.has {
            if let Ok(fds) = fresh.replace(note, shown, &pidfds, root) {
                let sent: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
                let _ = note.send(double.line.as_fd(), &sent);
            }
        }
        let _ = Note { what: ALL, ..Note::default() }.send(double.line.as_fd(), &[]);
    }
    for (note, shared) in own {
        let shown: Vec<OwnedFd> =
            shared.and_then(|index| state.shared.get(index)?.file.try_clone().ok()).into_iter().collect();
        if let Ok(fds) = fresh.replace(&note, &shown, &pidfds, root) {
            let _ = install(state, &note, fds.into_iter().map(descriptors::raise).collect());
        }
    }
    let ready = |double: &Double| {
        Note::expect(double.line.as_fd(), until, READY, 0).is_ok() && !is_dead(double.pidfd.as_fd())
    };
    doubles
        .into_iter()
        .map(|double| {
            if !ready(&double) {
                let _ = rustix::process::pidfd_send_signal(&double.pidfd, rustix::process::Signal::KILL);
            }
            (double.seat, double.pidfd)
        })
        .collect()
}
