//! Opening files.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::answer::{Answer, Outcome};
use crate::file::{DirectoryEntry, Location, ResolvedFile, is_directory, is_link, is_plain};
use crate::identity::decimal;
use crate::log::Event;
use crate::policy::Rights;
use crate::syscall::Syscall;
use crate::system_files;

/// What was asked for.
struct Wanted {
    directory: i32,
    path: Vec<u8>,
    flags: OFlags,
    mode: Mode,
    within: ResolveFlags,
}

/// Devices that are opened so often that they are not looked for first; opening them does nothing.
const HARMLESS: [&[u8]; 5] = [b"/dev/null", b"/dev/zero", b"/dev/random", b"/dev/urandom", b"/dev/tty"];
/// How often a name is looked for and made again while others remove and make it.
const MOST_ROUNDS: usize = 16;

pub(super) fn open(syscall: &Syscall<'_>) -> Outcome {
    let wanted = Wanted::classic(libc::AT_FDCWD, syscall.path(0)?, syscall.unsigned(1), syscall.unsigned(2));
    perform(syscall, &wanted)
}

pub(super) fn openat(syscall: &Syscall<'_>) -> Outcome {
    let wanted = Wanted::classic(syscall.int(0), syscall.path(1)?, syscall.unsigned(2), syscall.unsigned(3));
    perform(syscall, &wanted)
}

pub(super) fn creat(syscall: &Syscall<'_>) -> Outcome {
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::TRUNC;
    perform(syscall, &Wanted::classic(libc::AT_FDCWD, syscall.path(0)?, flags.bits(), syscall.unsigned(1)))
}

/// `struct open_how` may be longer than known here as long as the rest is zero (openat2(2)).
pub(super) fn openat2(syscall: &Syscall<'_>) -> Outcome {
    const KNOWN: usize = 24;
    let size = usize::try_from(syscall.argument(3)).map_err(|_| Errno::TOOBIG)?;
    if size < KNOWN {
        return Err(Errno::INVAL);
    }
    if size > 4096 {
        return Err(Errno::TOOBIG);
    }
    let mut how = vec![0; size];
    crate::memory::read(syscall.notification.thread, syscall.argument(2), &mut how)?;
    if how[KNOWN..].iter().any(|&byte| byte != 0) {
        return Err(Errno::TOOBIG);
    }
    let number = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| how[at + byte]));
    let flags = u32::try_from(number(0)).map_err(|_| Errno::INVAL)?;
    let mode = u32::try_from(number(8)).map_err(|_| Errno::INVAL)?;
    let flags = OFlags::from_bits(flags).ok_or(Errno::INVAL)?;
    let within = ResolveFlags::from_bits(number(16)).ok_or(Errno::INVAL)?;
    let makes = flags.contains(OFlags::CREATE) || flags.contains(OFlags::TMPFILE);
    let of_path = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    if mode & !0o7777 != 0 || mode != 0 && !makes || flags.contains(OFlags::PATH) && !of_path.contains(flags)
    {
        return Err(Errno::INVAL);
    }
    let wanted = Wanted {
        directory: syscall.int(0),
        path: syscall.path(1)?,
        flags,
        mode: Mode::from_raw_mode(mode),
        within,
    };
    perform(syscall, &wanted)
}

impl Wanted {
    /// open(2) ignores what it does not know.
    fn classic(directory: i32, path: Vec<u8>, flags: u32, mode: u32) -> Self {
        let mut flags = OFlags::from_bits_truncate(flags);
        if flags.contains(OFlags::PATH) {
            flags &= OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        }
        let makes = flags.contains(OFlags::CREATE) || flags.contains(OFlags::TMPFILE);
        let mode = Mode::from_raw_mode(if makes { mode & 0o7777 } else { 0 });
        Self { directory, path, flags, mode, within: ResolveFlags::empty() }
    }

    fn is_temporary(&self) -> bool {
        self.flags.contains(OFlags::TMPFILE)
    }

    fn makes(&self) -> bool {
        self.flags.contains(OFlags::CREATE) && !self.is_temporary() && !self.flags.contains(OFlags::PATH)
    }

    fn follows(&self) -> bool {
        let exclusive = self.makes() && self.flags.contains(OFlags::EXCL);
        let stops = self.flags.contains(OFlags::NOFOLLOW) || self.within.contains(ResolveFlags::NO_SYMLINKS);
        !exclusive && !stops
    }

    /// The rights that it takes.
    fn needed(&self) -> Rights {
        if self.flags.contains(OFlags::PATH) {
            return Rights::STAT;
        }
        // Besides reading, writing and both there is neither (3), for ioctl(2), which takes both rights (open(2)).
        let mut needed = match self.flags.bits() & OFlags::ACCMODE.bits() {
            0 => Rights::READ,
            1 => Rights::WRITE,
            _ => Rights::READ | Rights::WRITE,
        };
        if self.flags.contains(OFlags::TRUNC) {
            needed |= Rights::WRITE;
        }
        if self.is_temporary() {
            needed |= Rights::CREATE;
        }
        needed
    }

    fn given(&self, file: OwnedFd) -> Answer {
        Answer::File { file, close_on_exec: self.flags.contains(OFlags::CLOEXEC) }
    }

    /// The flags with which the monitor opens: never so that a terminal becomes its own.
    fn flags(&self) -> OFlags {
        let extra = if self.flags.contains(OFlags::PATH) {
            OFlags::CLOEXEC
        } else {
            OFlags::CLOEXEC | OFlags::NOCTTY
        };
        self.flags | extra
    }
}

fn perform(syscall: &Syscall<'_>, wanted: &Wanted) -> Outcome {
    if let Some(answer) = at_once(syscall, wanted)? {
        return Ok(answer);
    }
    syscall.still_waits()?;
    for round in 0..MOST_ROUNDS {
        match syscall.find_within(wanted.directory, &wanted.path, wanted.follows(), wanted.within) {
            Ok(found) => return existing(syscall, wanted, found),
            Err(Errno::NOENT) if wanted.makes() => (),
            Err(errno) => return Err(errno),
        }
        let place = if round == 0 || !wanted.follows() || !wanted.within.is_empty() {
            syscall.entry_within(wanted.directory, &wanted.path, wanted.within)?
        } else {
            syscall.entry_behind_links(wanted.directory, &wanted.path)?
        };
        match make(syscall, wanted, &place) {
            Err(Errno::EXIST) if !wanted.flags.contains(OFlags::EXCL) => (),
            result => return result,
        }
    }
    Err(Errno::AGAIN)
}

/// The usual case in one system call: a plain path that the policy allows, in which no name is a symbolic link. Then
/// the path as written is the path as the kernel spells it, and deciding about it before opening is safe: the kernel
/// itself refuses (`ELOOP`) if a link has come in between.
fn at_once(syscall: &Syscall<'_>, wanted: &Wanted) -> Result<Option<Answer>, Errno> {
    if !is_plain(&wanted.path)
        || wanted.flags.contains(OFlags::PATH)
        || !wanted.within.is_empty()
        || wanted.is_temporary()
        || syscall.state.policy.is_recorded()
    {
        return Ok(None);
    }
    // A device does something when it is opened: which one it is has to be known before.
    if wanted.path.starts_with(b"/dev/") && !HARMLESS.contains(&wanted.path.as_slice())
        || system_files::setting(&wanted.path).is_some()
    {
        return Ok(None);
    }
    let makes = if wanted.makes() { Rights::CREATE } else { Rights::empty() };
    if !syscall.state.policy.rights(&wanted.path).contains(wanted.needed() | makes)
        || !syscall.passes(&wanted.path)
    {
        return Ok(None);
    }
    if wanted.makes() {
        syscall.assume_umask()?;
    }
    if wanted.flags.intersects(OFlags::CREATE | OFlags::TRUNC) {
        syscall.still_waits()?;
    }
    // Not to be held up by a pipe that nobody has at its other end.
    let waits = !wanted.flags.contains(OFlags::NONBLOCK);
    let flags = wanted.flags() | if waits { OFlags::NONBLOCK } else { OFlags::empty() };
    let within = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let file = match rustix::fs::openat2(CWD, wanted.path.as_slice(), flags, wanted.mode, within) {
        Ok(file) => file,
        Err(errno @ (Errno::NOENT | Errno::NOTDIR)) if !wanted.makes() => return Err(errno),
        Err(_) => return Ok(None),
    };
    let stat = rustix::fs::fstat(&file)?;
    match FileType::from_raw_mode(stat.st_mode) {
        _ if syscall.state.identity.is_proc(&stat) => return Ok(None),
        FileType::RegularFile | FileType::Directory => (),
        FileType::BlockDevice => return Ok(None),
        FileType::CharacterDevice if !system_files::is_harmless(&stat) => return Ok(None),
        FileType::CharacterDevice => right_terminal(syscall, &stat)?,
        // With what is open now still open, so that the other end sees no gap.
        FileType::Fifo if waits => return Ok(Some(wait_for_pipe(syscall, wanted, file)?)),
        _ => (),
    }
    if waits {
        // SAFETY: the descriptor is open; only its flags change.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, wanted.flags.bits()) };
    }
    Ok(Some(wanted.given(file)))
}

/// Opens what is there.
fn existing(syscall: &Syscall<'_>, wanted: &Wanted, found: ResolvedFile) -> Outcome {
    if wanted.makes() && wanted.flags.contains(OFlags::EXCL) {
        syscall.check(&found, Rights::STAT)?;
        return Err(Errno::EXIST);
    }
    if wanted.is_temporary() {
        return temporary(syscall, wanted, &found);
    }
    syscall.check(&found, wanted.needed())?;
    let directory = is_directory(&found.stat);
    if wanted.flags.contains(OFlags::DIRECTORY) && !directory {
        return Err(Errno::NOTDIR);
    }
    if wanted.flags.contains(OFlags::PATH) {
        return stand_in(syscall, wanted, &found);
    }
    if is_link(&found.stat) {
        return Err(Errno::LOOP);
    }
    if directory && wanted.makes() {
        return Err(Errno::ISDIR);
    }
    match FileType::from_raw_mode(found.stat.st_mode) {
        FileType::CharacterDevice => right_terminal(syscall, &found.stat)?,
        FileType::Fifo if !wanted.flags.contains(OFlags::NONBLOCK) => {
            return wait_for_pipe(syscall, wanted, found.file);
        }
        _ => (),
    }
    if wanted.flags.contains(OFlags::TRUNC) {
        syscall.still_waits()?;
    }
    reopen(syscall, wanted, &found.file).map(|file| wanted.given(file))
}

/// Makes a file without a name in a directory (`O_TMPFILE`). What it is known as tells its number.
fn temporary(syscall: &Syscall<'_>, wanted: &Wanted, found: &ResolvedFile) -> Outcome {
    if !is_directory(&found.stat) {
        return Err(Errno::NOTDIR);
    }
    let learning = syscall.state.policy.learning;
    let own = match &found.location {
        Location::Path(path) => {
            let (rights, _) = syscall.rights(found);
            syscall.state.policy.trees.owns(&[path.as_slice(), b"/#"].concat())
                && !rights.contains(wanted.needed())
        }
        Location::Outside(_) | Location::Anonymous => false,
    };
    if !own && !learning {
        syscall.check(found, wanted.needed())?;
    }
    syscall.assume_umask()?;
    syscall.still_waits()?;
    let file = reopen(syscall, wanted, &found.file)?;
    if own || learning {
        let name = syscall.state.identity.path_of(&file)?;
        let name = name.strip_suffix(b" (deleted)").unwrap_or(&name);
        if learning {
            syscall.state.recorder.file(name, wanted.needed());
        }
        // A file of that name is another one.
        let there = rustix::fs::statat(CWD, name, AtFlags::SYMLINK_NOFOLLOW).is_ok();
        syscall.made(name, own && !there);
    }
    Ok(wanted.given(file))
}

/// From a descriptor that only stands for a file to one that reads or writes it: the same file, no matter what its path
/// means by now.
fn reopen(syscall: &Syscall<'_>, wanted: &Wanted, file: &OwnedFd) -> Result<OwnedFd, Errno> {
    let flags = wanted.flags() - OFlags::NOFOLLOW;
    let flags = if wanted.is_temporary() { flags } else { flags - OFlags::CREATE - OFlags::EXCL };
    let mut number = [0; 16];
    let number = decimal(file.as_raw_fd(), &mut number);
    rustix::fs::openat(syscall.state.identity.descriptors(), number, flags, wanted.mode)
}

/// The kernel puts no `O_PATH` descriptors into other processes. Where the program may read the file, it gets one for
/// reading instead, which does all that the other would. Else the call goes on by itself, if there is nothing about
/// files that the program must not see: what it then holds says no more than that, and all that it does with it is
/// asked about again.
fn stand_in(syscall: &Syscall<'_>, wanted: &Wanted, found: &ResolvedFile) -> Outcome {
    let (rights, _) = syscall.rights(found);
    let readable = match FileType::from_raw_mode(found.stat.st_mode) {
        FileType::Directory => rights.contains(Rights::LIST),
        FileType::RegularFile => rights.contains(Rights::READ),
        _ => false,
    };
    if readable {
        let mut number = [0; 16];
        let number = decimal(found.file.as_raw_fd(), &mut number);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        if let Ok(file) =
            rustix::fs::openat(syscall.state.identity.descriptors(), number, flags, Mode::empty())
        {
            return Ok(wanted.given(file));
        }
    }
    // openat2(2) has its flags in memory, where they may change. So has every call its path, which matters where rules
    // hide some files.
    let hides = !syscall.state.policy.all_visible() || syscall.keeps_names(b"/");
    if !hides && syscall.name() != "openat2" {
        return Ok(Answer::GoOn);
    }
    let reason = "O_PATH needs a file that can be read, or a policy under which everything may be looked at";
    Err(syscall.refuse(&Event::Call { reason }))
}

/// Makes the file, which must not exist.
fn make(syscall: &Syscall<'_>, wanted: &Wanted, place: &DirectoryEntry) -> Outcome {
    if place.name.last() == Some(&b'/') {
        return Err(Errno::ISDIR);
    }
    let own = syscall.check_new_entry(place, wanted.needed() | Rights::CREATE)?;
    syscall.assume_umask()?;
    syscall.still_waits()?;
    let flags = wanted.flags() | OFlags::EXCL | OFlags::NOFOLLOW;
    let file = rustix::fs::openat(&place.directory, place.name.as_slice(), flags, wanted.mode)?;
    syscall.made(&place.path, own);
    Ok(wanted.given(file))
}

/// `/dev/tty` is the terminal of the process that opens it.
fn right_terminal(syscall: &Syscall<'_>, stat: &Stat) -> Result<(), Errno> {
    let own = rustix::fs::makedev(5, 0);
    if stat.st_rdev != own {
        return Ok(());
    }
    let thread = rustix::process::Pid::from_raw(syscall.caller()?.process);
    if rustix::process::getsid(thread)? == rustix::process::getsid(None)? { Ok(()) } else { Err(Errno::NXIO) }
}

/// A named pipe opens once its other end is opened. `held` stays open until then.
fn wait_for_pipe(syscall: &Syscall<'_>, wanted: &Wanted, held: OwnedFd) -> Outcome {
    let mut number = [0; 16];
    let number = decimal(held.as_raw_fd(), &mut number).to_vec();
    let flags = wanted.flags() - OFlags::NOFOLLOW - OFlags::CREATE - OFlags::EXCL;
    let (state, close_on_exec) = (syscall.state.clone(), wanted.flags.contains(OFlags::CLOEXEC));
    Ok(Answer::Later(Box::new(move || {
        let file = rustix::fs::openat(state.identity.descriptors(), number.as_slice(), flags, Mode::empty())?;
        drop(held);
        Ok(Answer::File { file, close_on_exec })
    })))
}
