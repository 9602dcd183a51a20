//! System calls on behalf of another context (the paper's lwSyscall).
//!
//! Memory, descriptors and credentials of such a call are each the caller's or the target's. A target that is parked in
//! a switch makes the call itself, when asked, after it has looked at the rights of the descriptor over which it was
//! asked; where the memory is the caller's, the arguments' bytes go there and back. Where the descriptors are the
//! caller's, or its credentials, and those differ, the target could not make the call; nor can one that is stopped in a
//! trapped call. Then the caller makes it, with copies of the target's memory and descriptors
//! ([`crate::syscalls::target`]), and its credentials where wanted.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::spawn::process_status::pid_of;
use rustix::io::Errno;
use syscalls::syscall_args;
use syscalls::{SyscallArgs, Sysno};

use crate::credentials::assume::Identity;
use crate::error::{Error, Result};
use crate::shared::link::Kind;
use crate::state::Peer;
use crate::switch::slow;
use crate::syscalls::signatures::{self, Argument, Parcel, Part, Signature};
use crate::syscalls::target::{self, copy_own, write_own};
use crate::syscalls::trap;
use crate::threads::state_lock::Held;

/// What of the caller's takes the place of the target's in [`Context::syscall`](crate::Context::syscall).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FromCaller {
    /// The memory that arguments point to.
    pub memory: bool,
    /// The descriptors, and the working directory.
    pub descriptors: bool,
    /// Whether user, groups and capabilities are the caller's.
    pub credentials: bool,
}

/// They do not return once, or not to where they were called.
const RETURN_ODDLY: [libc::c_long; 5] =
    [libc::SYS_clone, libc::SYS_clone3, libc::SYS_fork, libc::SYS_vfork, libc::SYS_rt_sigreturn];

/// With the caller's memory.
const CARRIED: u64 = 1;

/// Makes a call for a peer; gives what it returned.
pub(crate) fn perform(
    state: &mut Held,
    slot: usize,
    own: FromCaller,
    number: u32,
    arguments: [u64; 6],
) -> Result<i64> {
    let refuse = |why| Error::CallUnknown { number, why };
    if RETURN_ODDLY.contains(&libc::c_long::from(number)) {
        return Err(refuse("it does not return as others do"));
    }
    let peer = state.peer(slot)?;
    let descriptor = peer.fd.as_raw_fd();
    if peer.is_gone(state.program) {
        return Err(Error::Gone { descriptor });
    }
    if let Some(listener) = &peer.listener
        && !listener.rights.calls.has(number)
    {
        return Err(Error::CallDenied { descriptor, number });
    }
    let differ = || Identity::of(rustix::process::getpid()) != identity_of(peer);
    if trap::pending(state, slot).is_some() || own.descriptors || own.credentials && differ() {
        return here(state, slot, own, number, arguments);
    }
    there(state, slot, own, number, arguments)
}

/// Has the target make it.
fn there(
    state: &mut Held,
    slot: usize,
    own: FromCaller,
    number: u32,
    mut arguments: [u64; 6],
) -> Result<i64> {
    let descriptor = state.peer(slot)?.fd.as_raw_fd();
    let mut parcel = Parcel::default();
    let mut signature = None;
    if own.memory {
        let known = shape_of(number)?;
        parcel = Parcel::pack(&known, &mut arguments, fetch)?;
        signature = Some(known);
    }
    let mut bytes: Vec<u8> = arguments.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let words = parcel
        .parts
        .iter()
        .flat_map(|part| [part.argument as u64, part.offset as u64, part.length as u64, u64::from(part.out)]);
    bytes.extend([parcel.parts.len() as u64].into_iter().chain(words).flat_map(u64::to_ne_bytes));
    bytes.extend(&parcel.bytes);
    let flags = if own.memory { CARRIED } else { 0 };
    let reply = slow::ask(state, slot, Kind::Call, (number.into(), flags), &bytes)?;
    match i32::try_from(reply.word) {
        Ok(0) => {}
        Ok(libc::EPERM) => return Err(Error::CallDenied { descriptor, number }),
        Ok(errno @ 1..4096) => {
            return Err(Error::system(
                "call for a context",
                number as usize,
                Errno::from_raw_os_error(errno),
            ));
        }
        _ => return Err(Error::system("call for a context", number as usize, Errno::IO)),
    }
    let result = reply.extent.cast_signed();
    if let Some(signature) = signature {
        if reply.bytes.len() != parcel.bytes.len() {
            return Err(Error::system("call for a context", number as usize, Errno::BADMSG));
        }
        parcel.bytes = reply.bytes;
        for (argument, written) in parcel.written(&signature, result) {
            store(arguments[argument], written)?;
        }
    }
    Ok(result)
}

/// In the target: makes the call that it was asked for, with the right to ask checked already. Gives its result, and
/// the bytes back.
pub(crate) fn serve(number: u64, flags: u64, bytes: &[u8]) -> rustix::io::Result<(u64, Vec<u8>)> {
    let number = u32::try_from(number).map_err(|_| Errno::INVAL)?;
    if RETURN_ODDLY.contains(&libc::c_long::from(number)) {
        return Err(Errno::INVAL);
    }
    let mut words =
        bytes.chunks_exact(8).map(|chunk| <[u8; 8]>::try_from(chunk).map_or(0, u64::from_ne_bytes));
    let mut arguments = [0; 6];
    for argument in &mut arguments {
        *argument = words.next().ok_or(Errno::INVAL)?;
    }
    let count = usize::try_from(words.next().ok_or(Errno::INVAL)?).map_err(|_| Errno::INVAL)?;
    let behind = 56 + count.min(7) * 32;
    let mut parcel = Parcel { bytes: bytes.get(behind..).ok_or(Errno::INVAL)?.to_vec(), parts: Vec::new() };
    if flags & CARRIED != 0 {
        for _ in 0..count.min(7) {
            let mut next = || usize::try_from(words.next().unwrap_or(u64::MAX)).map_err(|_| Errno::INVAL);
            let part = Part { argument: next()?, offset: next()?, length: next()?, out: next()? != 0 };
            let fits = part.offset.checked_add(part.length).is_some_and(|end| end <= parcel.bytes.len());
            if part.argument >= 6 || !fits {
                return Err(Errno::INVAL);
            }
            parcel.parts.push(part);
        }
        arguments = parcel.aim(arguments);
    }
    let result = call(number, arguments).ok_or(Errno::NOSYS)?;
    Ok((result.cast_unsigned(), parcel.bytes))
}

/// Makes it in the calling process.
fn here(state: &mut Held, slot: usize, own: FromCaller, number: u32, mut arguments: [u64; 6]) -> Result<i64> {
    let refuse = |why| Error::CallUnknown { number, why };
    let plain = own.memory && own.descriptors;
    let signature = if plain { None } else { Some(shape_of(number)?) };
    let mut borrowed: Vec<OwnedFd> = Vec::new();
    let mut parcel = Parcel::default();
    let mut aimed = arguments;
    if let Some(signature) = &signature {
        parcel = if own.memory {
            Parcel::pack(signature, &mut arguments, fetch)?
        } else {
            Parcel::pack(signature, &mut arguments, |address, buffer| {
                target::copy_in(state, slot, address, buffer)
            })?
        };
        aimed = parcel.aim(arguments);
        if !own.descriptors {
            let relative = |argument: usize| {
                let part = parcel.parts.iter().find(|part| part.argument == argument);
                part.is_some_and(|part| parcel.bytes.get(part.offset).is_some_and(|first| *first != b'/'))
            };
            for (index, kind) in signature.arguments.iter().enumerate() {
                match kind {
                    Argument::File => {
                        // The kernel looks at 32 bits of it.
                        let there = u32::try_from(aimed[index] & 0xffff_ffff).unwrap_or(0).cast_signed();
                        if there == libc::AT_FDCWD && !relative(index + 1) {
                            continue;
                        }
                        let file = target::borrow(state, slot, there)?;
                        // What is none there must not be one of ours.
                        aimed[index] =
                            file.as_ref().map_or(u64::MAX, |file| file.as_raw_fd().unsigned_abs().into());
                        borrowed.extend(file);
                    }
                    Argument::Text
                        if relative(index)
                            && !signature.arguments[..index]
                                .last()
                                .is_some_and(|kind| *kind == Argument::File)
                            && number != SYMLINKAT =>
                    {
                        return Err(refuse("its path is relative to a directory that it does not name"));
                    }
                    _ => {}
                }
            }
        }
    }
    let act = || call(number, aimed).ok_or(refuse("there is no such call"));
    let result = if own.credentials {
        act()?
    } else {
        let me = Identity::of(rustix::process::getpid());
        let (Some(me), Some(them)) = (me, identity_of(state.peer(slot)?)) else {
            return Err(refuse("the credentials cannot be read (is /proc mounted?)"));
        };
        them.lend(&me, act)
            .map_err(|errno| Error::system("take on a context's credentials", slot, errno))??
    };
    let Some(signature) = signature else { return Ok(result) };
    for (argument, written) in parcel.written(&signature, result) {
        if own.memory {
            store(arguments[argument], written)?;
        } else {
            target::copy_out(state, slot, arguments[argument], written)?;
        }
    }
    if signature.makes_file && !own.descriptors && result >= 0 {
        let file = RawFd::try_from(result).map_err(|_| refuse("its result is no descriptor"))?;
        // SAFETY: the call has just made it, for us to pass on.
        let made = unsafe { OwnedFd::from_raw_fd(file) };
        let flags = rustix::io::fcntl_getfd(&made).unwrap_or(rustix::io::FdFlags::empty());
        let close_on_exec = flags.contains(rustix::io::FdFlags::CLOEXEC);
        return target::give(state, slot, number, made.as_fd(), close_on_exec).map(i64::from);
    }
    Ok(result)
}

const SYMLINKAT: u32 = 266;

fn shape_of(number: u32) -> Result<Signature> {
    let why = "what its arguments point to is not known: let it go on, or give it memory and descriptors of one context";
    signatures::of(number).ok_or(Error::CallUnknown { number, why })
}

/// Makes a call; gives what the kernel returned, errors as negative numbers.
fn call(number: u32, arguments: [u64; 6]) -> Option<i64> {
    let call = Sysno::new(number as usize)?;
    let word = |index: usize| usize::try_from(arguments[index]).unwrap_or(usize::MAX);
    let arguments: SyscallArgs = syscall_args!(word(0), word(1), word(2), word(3), word(4), word(5));
    // SAFETY: the caller vouches for what it does: see `Context::syscall`.
    Some(match unsafe { syscalls::syscall(call, &arguments) } {
        Ok(value) => i64::try_from(value).unwrap_or_else(|_| (value as u64).cast_signed()),
        Err(errno) => -i64::from(errno.into_raw()),
    })
}

fn identity_of(peer: &Peer) -> Option<Identity> {
    Identity::of(pid_of(peer.pidfd.as_fd())?)
}

/// Copies an argument's memory of our own.
fn fetch(address: u64, buffer: &mut [u8]) -> Result<usize> {
    copy_own(address, buffer).map_err(|errno| failed(address, errno))
}

/// Writes what a call gave to memory of our own.
fn store(address: u64, bytes: &[u8]) -> Result<()> {
    write_own(address, bytes).map_err(|errno| failed(address, errno))
}

fn failed(address: u64, errno: Errno) -> Error {
    Error::system("copy a call's arguments", usize::try_from(address).unwrap_or(usize::MAX), errno)
}
