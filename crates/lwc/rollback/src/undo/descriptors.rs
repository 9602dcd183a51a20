//! File descriptors: new ones closed, closed or replaced ones brought back, flags and offsets as they were.
//!
//! That a descriptor is still the same open file does not show from the outside, so the table is copied into a
//! [`FdTableCopy`], with which each descriptor is compared and from which lost ones are fetched. A keeper is made when
//! the table changed, not for every run. Where none can be made, or it may not be asked, files are compared by device
//! and inode, and a lost one stays lost.
//!
//! Each descriptor is asked for by a system call of its own: the kernel has no other way to tell which file a number has.
//! What belongs to the open file, not to the number (open(2)), is asked for once where several numbers share it: status
//! flags and offset. A descriptor that only names a place (`O_PATH`) has neither. That numbers are to be closed on
//! execution is said for whole stretches of them in one call, the engine's own included, which sets what was set and what
//! was not alike.
//!
//! Offsets are restored for regular files, but for those that standard output and standard error go to: what was
//! written to them stays written, and what follows must come behind it.

use std::os::fd::{AsRawFd, BorrowedFd};

use orrery_memory::{Arena, HeapVec};
use orrery_sys::fd_table_copy::FdTableCopy;
use orrery_sys::process;
use rustix::fs::{FileType, OFlags, SeekFrom};
use rustix::io::{Errno, FdFlags};

use crate::error::{Leftover, Result};

/// Status flags that fcntl(2) can set.
const SETTABLE: OFlags = OFlags::APPEND.union(OFlags::NONBLOCK).union(OFlags::DSYNC);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct File {
    fd: i32,
    flags: FdFlags,
    status: OFlags,
    /// Device, inode and mode: the identity, as far as it shows.
    identity: Identity,
    /// The offset, for regular files whose offset is restored.
    offset: Option<u64>,
    /// The place in the list of one before it, of the first [`SHARED`], that is the same open file.
    same_as: Option<usize>,
}

/// Among so many first files are those looked for that others share: standard streams are.
const SHARED: usize = 16;

/// Keepers, each shared by every state whose files it holds, and the descriptors that all states leave alone.
#[derive(Debug)]
pub(crate) struct Keepers {
    keepers: HeapVec<Option<(FdTableCopy, usize)>>,
    /// The one that was made last.
    latest: Option<usize>,
    /// Whether a keeper may be made and asked at all.
    allowed: bool,
    /// Descriptors that are left alone, sorted.
    exempt: HeapVec<i32>,
    /// The engine's own descriptors, sorted: the program leaves them alone, a closure may not.
    own: HeapVec<i32>,
    /// By what each of these is known, if that shows.
    own_shown: HeapVec<Option<Shown>>,
    /// Descriptors that states hold for themselves, sorted; a number is in it once for each holder.
    held: HeapVec<i32>,
    /// Tells how many are open.
    open: Option<process::Descriptors>,
}

impl Keepers {
    pub(crate) fn new(arena: &'static Arena) -> Self {
        Self {
            keepers: arena.vec(),
            latest: None,
            allowed: true,
            exempt: arena.vec(),
            own: arena.vec(),
            own_shown: arena.vec(),
            held: arena.vec(),
            open: process::Descriptors::open().ok(),
        }
    }

    /// Takes `fds` for the engine's own.
    pub(crate) fn own(&mut self, fds: impl Iterator<Item = i32>) -> Result<()> {
        for fd in fds {
            if let Err(at) = self.own.binary_search(&fd) {
                self.own.try_reserve(1).map_err(|_| out_of_memory())?;
                self.own_shown.try_reserve(1).map_err(|_| out_of_memory())?;
                self.own.insert(at, fd);
                self.own_shown.insert(at, Shown::of(fd).filter(|_| is_of_proc(fd)));
            }
        }
        Ok(())
    }

    /// Leaves `fd` alone from now on, open or not.
    pub(crate) fn exempt(&mut self, fd: i32) -> Result<()> {
        if let Err(at) = self.exempt.binary_search(&fd) {
            self.exempt.try_reserve(1).map_err(|_| out_of_memory())?;
            self.exempt.insert(at, fd);
        }
        Ok(())
    }

    /// Returns a held descriptor of the directory with that device and inode.
    pub(crate) fn directory(&self, directory: (u64, u64)) -> Option<i32> {
        self.held
            .iter()
            .copied()
            .find(|&fd| identity(fd).map(|(device, inode, _)| (device, inode)) == Some(directory))
    }

    /// Notes that a state holds `fd` for itself: states that do not, neither remember nor close it.
    pub(crate) fn hold(&mut self, fd: i32) -> Result<()> {
        self.held.try_reserve(1).map_err(|_| out_of_memory())?;
        self.held.insert(self.held.partition_point(|&held| held < fd), fd);
        Ok(())
    }

    /// Counts one holder less; returns whether none is left.
    pub(crate) fn unhold(&mut self, fd: i32) -> bool {
        if let Ok(at) = self.held.binary_search(&fd) {
            self.held.remove(at);
        }
        self.held.binary_search(&fd).is_err()
    }

    /// Returns whether process `pid` is a keeper.
    pub(crate) fn owns(&self, pid: i32) -> bool {
        self.keepers.iter().flatten().any(|(keeper, _)| keeper.pid().as_raw_pid() == pid)
    }

    fn get(&self, at: Option<usize>) -> Option<&FdTableCopy> {
        self.keepers.get(at?)?.as_ref().map(|(keeper, _)| keeper)
    }

    /// A keeper that holds all of `files`, with one more user; none where none may be had.
    fn acquire(&mut self, files: &[File]) -> Result<Option<usize>> {
        let holds_all = |keeper: &FdTableCopy| files.iter().all(|file| keeper.holds(file.fd) == Ok(true));
        if let Some(at) = self.latest
            && let Some((keeper, users)) = &mut self.keepers[at]
            && holds_all(keeper)
        {
            *users += 1;
            return Ok(Some(at));
        }
        if !self.allowed {
            return Ok(None);
        }
        let Ok(keeper) = FdTableCopy::spawn() else {
            return Ok(None);
        };
        if !holds_all(&keeper) {
            // Comparing is forbidden, so there is no use in a keeper.
            self.allowed = false;
            return Ok(None);
        }
        let free = match self.keepers.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                self.keepers.try_reserve(1).map_err(|_| out_of_memory())?;
                self.keepers.push(None);
                self.keepers.len() - 1
            }
        };
        self.keepers[free] = Some((keeper, 1));
        self.latest = Some(free);
        Ok(self.latest)
    }

    /// One user less; a keeper without any ends.
    fn release(&mut self, at: Option<usize>) {
        let Some(place) = at.and_then(|at| self.keepers.get_mut(at)) else {
            return;
        };
        if let Some((_, users)) = place {
            *users -= 1;
            if *users == 0 {
                *place = None;
                if self.latest == at {
                    self.latest = None;
                }
            }
        }
    }
}

/// The file table of a state.
#[derive(Debug)]
pub(crate) struct Descriptors {
    files: HeapVec<File>,
    keeper: Option<usize>,
}

impl Descriptors {
    pub(crate) fn new(arena: &'static Arena) -> Self {
        Self { files: arena.vec(), keeper: None }
    }

    /// Lets go of the keeper.
    pub(crate) fn clear(&mut self, keepers: &mut Keepers) {
        keepers.release(self.keeper.take());
        self.files.clear();
    }

    /// `held` is a descriptor that this state holds for itself.
    pub(crate) fn capture(&mut self, keepers: &mut Keepers, held: Option<i32>) -> Result<()> {
        let mut count = 0;
        let Self { files, .. } = self;
        let mut room = Ok(());
        let outputs = [1, 2].map(identity);
        process::for_each_descriptor(|fd| {
            let others = [&keepers.exempt, &keepers.own, &keepers.held];
            let left_alone = others.iter().any(|list| list.binary_search(&fd).is_ok()) && held != Some(fd);
            if left_alone || room.is_err() {
                return;
            }
            // A number that is closed while the list is read is not there.
            let Some(file) = look(fd, &outputs) else { return };
            match files.get_mut(count) {
                Some(place) => *place = file,
                None => match files.try_reserve(1) {
                    Ok(()) => files.push(file),
                    Err(_) => room = Err(out_of_memory()),
                },
            }
            count += 1;
        })?;
        room?;
        files.truncate(count);
        if !files.is_sorted_by_key(|file| file.fd) {
            files.sort_unstable_by_key(|file| file.fd);
        }
        note_shared(files);
        let keeper = keepers.acquire(files)?;
        keepers.release(std::mem::replace(&mut self.keeper, keeper));
        Ok(())
    }

    /// Puts the engine's own descriptors back, without which it is blind; returns whether all were in place.
    pub(crate) fn restore_own(&self, keepers: &Keepers) -> std::result::Result<bool, Leftover> {
        let keeper = keepers.get(self.keeper);
        let mut in_place = true;
        for (&fd, shown) in keepers.own.iter().zip(&keepers.own_shown) {
            let there = match keeper.map(|keeper| keeper.holds(fd)) {
                Some(Ok(same)) => same,
                // It is closed, or there is nobody to ask.
                _ => shown.map_or_else(|| identity(fd).is_some(), |shown| Shown::of(fd) == Some(shown)),
            };
            if !there {
                in_place = false;
                bring_back(fd, keeper)?;
            }
        }
        Ok(in_place)
    }

    /// Puts the table of the program back; `own` says whether the engine's own descriptors are in place.
    pub(crate) fn restore(&self, keepers: &Keepers, own: bool) -> std::result::Result<(), Leftover> {
        let mut alone = own && self.may_be_alone(keepers);
        if !alone {
            self.close_others(keepers);
        }
        let mut outcome = Ok(());
        let keeper = keepers.get(self.keeper);
        // Of the first files, which are known to be there as they were.
        let mut as_before = [false; SHARED];
        for (place, file) in self.files.iter().enumerate() {
            if keepers.exempt.binary_search(&file.fd).is_ok() {
                continue;
            }
            let mut found = file.find(keeper);
            if alone && found == Found::Gone {
                // Another one may be open in its place, and stand in the way.
                self.close_others(keepers);
                alone = false;
            }
            if found == Found::Gone {
                match bring_back(file.fd, keeper) {
                    Ok(()) => found = Found::Same,
                    Err(leftover) => {
                        outcome = Err(leftover);
                        continue;
                    }
                }
            }
            let is_done = found == Found::Same && file.same_as.is_some_and(|other| as_before[other]);
            match if is_done { Ok(()) } else { file.restore_state() } {
                Ok(()) if place < SHARED => as_before[place] = found == Found::Same,
                Ok(()) => {}
                Err(leftover) => outcome = Err(leftover),
            }
        }
        outcome.and(self.restore_flags(keepers))
    }

    /// Puts the flags of the descriptors back, the program's and the engine's own, which are there.
    fn restore_flags(&self, keepers: &Keepers) -> std::result::Result<(), Leftover> {
        let exempt_before = |fd: i32| keepers.exempt.partition_point(|&exempt| exempt < fd);
        let mut outcome = Ok(());
        let mut end_stretch = |stretch: Stretch| {
            if stretch.is_long && stretch.flags == FdFlags::CLOEXEC && close_on_execution(&stretch) {
                return;
            }
            let inside = |&(fd, _): &(i32, FdFlags)| (stretch.first..=stretch.last).contains(&fd);
            for (fd, flags) in self.all_flags(keepers).filter(inside) {
                if let Err(leftover) = restore_flags_of(fd, flags) {
                    outcome = Err(leftover);
                }
            }
        };
        let mut stretch: Option<Stretch> = None;
        for (fd, flags) in self.all_flags(keepers) {
            match &mut stretch {
                // Between them is none that is left alone, and no other is open.
                Some(before) if before.flags == flags && exempt_before(before.first) == exempt_before(fd) => {
                    (before.last, before.is_long) = (fd, true);
                }
                _ => {
                    let fresh = Stretch { first: fd, last: fd, flags, is_long: false };
                    if let Some(ended) = stretch.replace(fresh) {
                        end_stretch(ended);
                    }
                }
            }
        }
        if let Some(last) = stretch {
            end_stretch(last);
        }
        outcome
    }

    /// Returns the descriptors, the program's and the engine's own, in order, with the flags that they are to have; not
    /// those that are left alone.
    fn all_flags<'a>(&'a self, keepers: &'a Keepers) -> impl Iterator<Item = (i32, FdFlags)> + 'a {
        let mut files = self.files.iter().map(|file| (file.fd, file.flags)).peekable();
        let mut own = keepers.own.iter().map(|&fd| (fd, FdFlags::CLOEXEC)).peekable();
        let all = std::iter::from_fn(move || match (files.peek(), own.peek()) {
            (Some(file), Some(engines)) if file.0 < engines.0 => files.next(),
            (_, Some(_)) => own.next(),
            (_, None) => files.next(),
        });
        all.filter(|(fd, _)| keepers.exempt.binary_search(fd).is_err())
    }

    /// Returns whether no others are open, provided that all of the program's and the engine's are: as many are open
    /// as these, and those of the rest that are. close_range(2) looks at each number up to the table's size, at 9 ns;
    /// this costs as much as 40 of them.
    fn may_be_alone(&self, keepers: &Keepers) -> bool {
        let Keepers { exempt, own, held, open, .. } = keepers;
        let is_in = |list: &[i32], fd: i32| list.binary_search(&fd).is_ok();
        let is_file = |fd: i32| self.files.binary_search_by_key(&fd, |file| file.fd).is_ok();
        // SAFETY: only asked about.
        let is_open = |fd: i32| rustix::io::fcntl_getfd(unsafe { borrow(fd) }).is_ok();
        let files = self.files.iter().filter(|file| !is_in(exempt, file.fd)).count();
        let own_only = own.iter().filter(|&&fd| !is_in(exempt, fd) && !is_file(fd)).count();
        let held_only = held.chunk_by(|one, other| one == other).map(|same| same[0]);
        let held_only = held_only.filter(|&fd| !is_in(exempt, fd) && !is_in(own, fd) && !is_file(fd));
        let rest = held_only.chain(exempt.iter().copied()).filter(|&fd| is_open(fd)).count();
        open.as_ref().and_then(process::Descriptors::count) == Some(files + own_only + rest)
    }

    /// Closes all that are neither the program's, nor the engine's, nor left alone.
    fn close_others(&self, keepers: &Keepers) {
        let mut next = 0;
        let lists = [&keepers.exempt, &keepers.own, &keepers.held];
        // The lowest number from `next` on that stays.
        let first_of = |list: &[i32], next: i32| list.get(list.partition_point(|&fd| fd < next)).copied();
        loop {
            let file = self.files.get(self.files.partition_point(|file| file.fd < next)).map(|file| file.fd);
            let stays = lists.iter().filter_map(|list| first_of(list, next)).chain(file).min();
            let Some(stays) = stays else { break };
            if next < stays {
                close_range(next, stays - 1);
            }
            next = stays + 1;
        }
        close_range(next, i32::MAX);
    }
}

impl File {
    /// Looks whether it is still open.
    fn find(&self, keeper: Option<&FdTableCopy>) -> Found {
        match keeper.map(|keeper| keeper.holds(self.fd)) {
            Some(Ok(true)) => Found::Same,
            Some(Ok(false)) => Found::Gone,
            // Closed, or the keeper is dead, or there is none: go by what shows.
            _ if identity(self.fd) == Some(self.identity) => Found::Alike,
            _ => Found::Gone,
        }
    }

    /// Puts back what belongs to the open file.
    fn restore_state(&self) -> std::result::Result<(), Leftover> {
        let lost = Leftover::Descriptor(self.fd);
        // SAFETY: the number is the file's that was just found there, or brought back.
        let fd = unsafe { borrow(self.fd) };
        if !self.status.contains(OFlags::PATH) {
            let status = rustix::fs::fcntl_getfl(fd).map_err(|_| lost)?;
            if (status ^ self.status).intersects(SETTABLE) {
                rustix::fs::fcntl_setfl(fd, self.status & SETTABLE).map_err(|_| lost)?;
            }
        }
        if let Some(offset) = self.offset
            && rustix::fs::tell(fd) != Ok(offset)
        {
            rustix::fs::seek(fd, SeekFrom::Start(offset)).map_err(|_| lost)?;
        }
        Ok(())
    }
}

fn restore_flags_of(number: i32, flags: FdFlags) -> std::result::Result<(), Leftover> {
    let lost = Leftover::Descriptor(number);
    // SAFETY: the number is that of a file that was just found there, or brought back.
    let fd = unsafe { borrow(number) };
    if rustix::io::fcntl_getfd(fd).map_err(|_| lost)? != flags {
        rustix::io::fcntl_setfd(fd, flags).map_err(|_| lost)?;
    }
    Ok(())
}

/// Descriptors that follow one another and are to have the same flags.
#[derive(Debug)]
struct Stretch {
    first: i32,
    last: i32,
    flags: FdFlags,
    /// Whether there is more than one.
    is_long: bool,
}

/// How a descriptor was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// It is the open file that it was.
    Same,
    /// It is open, and the same file as far as is visible.
    Alike,
    /// It is closed, or another.
    Gone,
}

/// Notes which of `files`, which are sorted, are the same open file as one of the first.
fn note_shared(files: &mut [File]) {
    let own = rustix::process::getpid();
    for place in 1..files.len() {
        let (before, rest) = files.split_at_mut(place);
        let file = &mut rest[0];
        file.same_as = before.iter().take(SHARED).position(|other| {
            other.same_as.is_none()
                && (other.identity, other.status, other.offset) == (file.identity, file.status, file.offset)
                && orrery_sys::kcmp::same_file(own, other.fd, own, file.fd) == Ok(true)
        });
    }
}

/// Has a stretch closed on execution; false where the kernel cannot (before 5.11).
fn close_on_execution(stretch: &Stretch) -> bool {
    let Stretch { first, last, .. } = *stretch;
    // SAFETY: changes a flag of numbers that the caller chose, and closes none.
    unsafe { syscalls::syscall!(syscalls::Sysno::close_range, first, last, libc::CLOSE_RANGE_CLOEXEC) }
        .is_ok()
}

fn out_of_memory() -> crate::Error {
    orrery_memory::Error::Memory { bytes: size_of::<File>(), errno: Errno::NOMEM }.into()
}

/// Device, inode and mode.
type Identity = (u64, u64, u32);

fn identity(fd: i32) -> Option<Identity> {
    // SAFETY: only asked about.
    rustix::fs::fstat(unsafe { borrow(fd) }).ok().map(|found| (found.st_dev, found.st_ino, found.st_mode))
}

/// What shows of an open file: which it is, and how it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shown {
    identity: Identity,
    status: OFlags,
}

impl Shown {
    fn of(fd: i32) -> Option<Self> {
        // SAFETY: only asked about.
        let status = rustix::fs::fcntl_getfl(unsafe { borrow(fd) }).ok()?;
        Some(Self { identity: identity(fd)?, status })
    }
}

fn is_of_proc(fd: i32) -> bool {
    // SAFETY: only asked about.
    let found = rustix::fs::fstatfs(unsafe { borrow(fd) });
    found.is_ok_and(|found| found.f_type == rustix::fs::PROC_SUPER_MAGIC)
}

/// Returns what there is to see of a descriptor.
fn look(number: i32, outputs: &[Option<Identity>]) -> Option<File> {
    // SAFETY: only asked about.
    let fd = unsafe { borrow(number) };
    let identity = identity(number)?;
    let regular = FileType::from_raw_mode(identity.2) == FileType::RegularFile;
    let is_output = outputs.contains(&Some(identity));
    Some(File {
        fd: number,
        flags: rustix::io::fcntl_getfd(fd).ok()?,
        status: rustix::fs::fcntl_getfl(fd).ok()?,
        identity,
        offset: if regular && !is_output { rustix::fs::tell(fd).ok() } else { None },
        same_as: None,
    })
}

/// Puts the file that the keeper has at number `fd` there again.
fn bring_back(fd: i32, keeper: Option<&FdTableCopy>) -> std::result::Result<(), Leftover> {
    let lost = Leftover::Descriptor(fd);
    let fetched = keeper.and_then(|keeper| keeper.fetch(fd).ok()).ok_or(lost)?;
    if fetched.as_raw_fd() == fd {
        // The lowest free number was the right one.
        std::mem::forget(fetched);
        return Ok(());
    }
    // SAFETY: dup3 onto a number that belongs to the state being restored.
    let duplicated =
        unsafe { syscalls::syscall!(syscalls::Sysno::dup3, fetched.as_raw_fd(), fd, libc::O_CLOEXEC) };
    duplicated.map(|_| ()).map_err(|_| lost)
}

/// Borrows a number, which the program may have closed or made something else's.
///
/// # Safety
/// It is used at once, for system calls that take a closed one for an error, and that do what is meant to be done to
/// what has the number.
pub(crate) unsafe fn borrow<'a>(fd: i32) -> BorrowedFd<'a> {
    // SAFETY: the caller's promise.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

fn close_range(first: i32, last: i32) {
    // SAFETY: everything in these ranges was opened by the closure whose doings are being undone.
    let closed = unsafe { syscalls::syscall!(syscalls::Sysno::close_range, first, last, 0) };
    if closed.is_err() {
        // Kernels before 5.9.
        let mut victims = [0; 256];
        loop {
            let mut count = 0;
            let _ = process::for_each_descriptor(|fd| {
                if (first..=last).contains(&fd) && count < victims.len() {
                    victims[count] = fd;
                    count += 1;
                }
            });
            for fd in &victims[..count] {
                // SAFETY: every descriptor in the list was opened by the closure that is being undone, so
                // nothing else owns it.
                let _ = unsafe { syscalls::syscall!(syscalls::Sysno::close, *fd) };
            }
            if count < victims.len() {
                return;
            }
        }
    }
}
