//! The fast answer to rules about paths: that none of them can hold.
//!
//! Of the calls that take paths, few have one that a rule is about. So a rewritten site of such a call asks here first. The path
//! is led through the policy's automaton where the program has it: no copy, no signal frame, and no system call but where
//! its memory was not read before (see [`super::readable`]). If no rule can hold, the site goes on to its trampoline, with the
//! registers that it had. All else (a path upwards, a directory given by a descriptor, a rule without path,
//! a path that fits) is decided by [`super::decide`], rule by rule.

use core::mem::MaybeUninit;

use crate::automaton::{Automaton, Progress, Walk};
use crate::executive::abi::readable;
use crate::executive::abi::syscall::{EFAULT, call, failed};
use crate::executive::policy::table::Policy;
use crate::nr;
use crate::policy::NO_ARGUMENT;

const AT_FDCWD: i32 = -100;
const AT_EMPTY_PATH: u64 = 0x1000;
/// Longer paths are for those who know what is too long.
const LONGEST: usize = 1024;
const LONGEST_DIRECTORY: usize = 512;

/// Returns whether sites of this call are to ask here.
pub(crate) fn supports(policy: Policy, number: u64) -> bool {
    policy.automaton().is_some()
        && policy.shape(number).path[0] != NO_ARGUMENT
        && policy.rules(number).all(|rule| rule.fits != 0)
}

/// Returns whether a call looks at a file by its descriptor alone: an `fstat`, made by another name.
pub(crate) fn is_fstat(number: u64, arguments: &[u64; 6], stack: u64) -> bool {
    let flags = match number {
        nr::newfstatat => arguments[3],
        nr::statx => arguments[2],
        _ => return false,
    };
    let path = arguments[1];
    // From Linux 6.11 on, no path is an empty one.
    flags & AT_EMPTY_PATH != 0 && (path == 0 || readable::bytes_at(path, 1, stack) == Ok(&[0]))
}

/// Returns whether no rule about this call can hold.
#[inline(never)]
pub(crate) fn no_rule_applies(policy: Policy, number: u64, arguments: &[u64; 6], stack: u64) -> bool {
    let Some(automaton) = policy.automaton() else { return false };
    let (mut lists, mut all, mut descriptors) = (0, true, false);
    for rule in policy.rules(number) {
        lists |= rule.fits;
        all &= rule.fits != 0;
        descriptors |= rule.descriptors != 0;
    }
    if !descriptors && is_fstat(number, arguments, stack) {
        return true;
    }
    let shape = policy.shape(number);
    let argument = |index: u8| arguments.get(usize::from(index)).copied();
    let fits_none = |(path, directory)| {
        argument(path).is_none_or(|path| {
            fits(automaton, argument(directory), path, stack).is_some_and(|fits| fits & lists == 0)
        })
    };
    all && shape.path[0] != NO_ARGUMENT && shape.path.into_iter().zip(shape.directory).all(fits_none)
}

/// Returns which lists of patterns a path fits. `None` where that takes the slow way.
fn fits(automaton: Automaton<'_>, directory: Option<u64>, path: u64, stack: u64) -> Option<u64> {
    let (mut at, mut left, mut begun) = (path, LONGEST, None);
    while left > 0 {
        let mut bytes = match readable::bytes_at(at, left, stack) {
            Ok(bytes) => bytes,
            // The kernel will say so.
            Err(error) => return (error == -EFAULT).then_some(0),
        };
        at += bytes.len() as u64;
        left -= bytes.len();
        let walk = match &mut begun {
            Some(walk) => walk,
            none => none.insert(match bytes {
                [b'/', rest @ ..] => {
                    bytes = rest;
                    Walk::from_root(automaton)
                }
                // None at all.
                [0, ..] => return None,
                _ => from_directory(automaton, directory)?,
            }),
        };
        match walk.feed(bytes) {
            Progress::More => {}
            Progress::Fits(fits) => return Some(fits),
            Progress::Upwards => return None,
        }
    }
    None
}

/// Returns the walk of a relative path.
#[inline(never)]
fn from_directory(automaton: Automaton<'_>, directory: Option<u64>) -> Option<Walk<'_>> {
    // The kernel reads an `int`.
    if directory.is_some_and(|directory| directory as i32 != AT_FDCWD) {
        return None;
    }
    let mut room = MaybeUninit::<[u8; LONGEST_DIRECTORY]>::uninit();
    let start = room.as_mut_ptr().cast::<u8>();
    // SAFETY: the kernel writes into the room.
    let length = unsafe { call(nr::getcwd, [start.addr() as u64, LONGEST_DIRECTORY as u64, 0, 0, 0, 0]) };
    if failed(length) || length == 0 {
        return None;
    }
    // SAFETY: so many bytes were written, the last of them a zero.
    let path = unsafe { core::slice::from_raw_parts(start, length as usize - 1) };
    Some(Walk::from(automaton, path))
}
