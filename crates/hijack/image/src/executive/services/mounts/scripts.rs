//! Scripts that are in a mount, or whose interpreter is.
//!
//! For a script the kernel executes the interpreter that its first line names, and passes it the script's path. It would look
//! for the interpreter where there is none, and pass a path that the program does not know. So its work is done here: the
//! interpreter is executed, with the arguments that the kernel would have given to it. `execve(2)`.

use super::translate::{moved, within};
use crate::executive::abi::syscall::{call, failed};
use crate::executive::abi::{user_memory, work_areas};
use crate::executive::policy::paths::{PathBuffer, normal};
use crate::executive::policy::table::Policy;
use crate::executive::services::call::ServiceCall;
use crate::nr;
use crate::policy::Mount;

/// As much of a file as the kernel looks at.
const HEAD: usize = 256;
/// Scripts with more arguments are left to the kernel.
const MOST_ARGUMENTS: usize = 250;
/// Interpreter, its argument, script, and the end of the list.
const OWN_ARGUMENTS: usize = 4;
const _: () = assert!(MOST_ARGUMENTS + OWN_ARGUMENTS <= work_areas::LIST);
const O_CLOEXEC: u64 = 0o2_000_000;
const X_OK: u64 = 1;
const AT_EACCESS: u64 = 0x200;
const AT_FDCWD: u64 = -100_i64 as u64;

/// Has an `execve` of a script execute the script's interpreter instead. `None`: it is no script, or can be left to the kernel;
/// then the call is as it was.
#[inline(never)]
pub(super) fn prepare(
    call: &mut ServiceCall<'_>,
    mounts: &[Mount],
    policy: Policy,
    in_mount: bool,
) -> Option<()> {
    let mut head = [0_u8; HEAD];
    let length = read_head(call.arguments[0], &mut head)?;
    let (interpreter, argument) = first_line(head.get(..length)?)?;
    let path = call.room.take(|room| {
        let length = normal(room, 0, interpreter)?;
        let there = within(mounts, policy, room.get(..length).unwrap_or(&[])).is_some();
        if !there && !in_mount {
            return Err(0);
        }
        match moved(mounts, room, length, false, true) {
            Ok(0) | Err(_) => Err(0),
            Ok(length) => Ok(length),
        }
    });
    let path = path.ok()?;
    let name = text(&mut call.room, interpreter)?;
    let argument = argument.map_or(Some(0), |argument| text(&mut call.room, argument))?;
    let first = [name, argument, call.given[0]];
    let mut places = call.list.iter_mut();
    for word in first.into_iter().filter(|word| *word != 0) {
        *places.next()? = word;
    }
    let given = call.arguments[1];
    // The script's name takes the place of the first.
    let empty = given == 0 || user_memory::read_word(given).ok()? == 0;
    for index in 1..=MOST_ARGUMENTS as u64 {
        let word = if empty { 0 } else { user_memory::read_word(given + 8 * index).ok()? };
        *places.next()? = word;
        if word == 0 {
            call.arguments[0] = path.as_ptr().addr() as u64;
            call.arguments[1] = call.list.as_ptr().addr() as u64;
            return Some(());
        }
    }
    None
}

/// The beginning of a file that may be executed.
fn read_head(path: u64, to: &mut [u8; HEAD]) -> Option<usize> {
    // SAFETY: the path is the program's, or ours; the kernel writes into the array.
    unsafe {
        let allowed = call(nr::faccessat2, [AT_FDCWD, path, X_OK, AT_EACCESS, 0, 0]);
        let file = if failed(allowed) { allowed } else { call(nr::open, [path, O_CLOEXEC, 0, 0, 0, 0]) };
        if failed(file) {
            return None;
        }
        let file = file.cast_unsigned();
        let length = call(nr::pread64, [file, to.as_mut_ptr().addr() as u64, HEAD as u64, 0, 0, 0]);
        call(nr::close, [file, 0, 0, 0, 0, 0]);
        usize::try_from(length).ok()
    }
}

/// Returns the interpreter that a script names, and the argument to it.
fn first_line(head: &[u8]) -> Option<(&[u8], Option<&[u8]>)> {
    let blank = |byte: &u8| *byte == b' ' || *byte == b'\t';
    let line = head.strip_prefix(b"#!")?;
    let end = line.iter().position(|byte| *byte == b'\n' || *byte == 0)?;
    let line = line.get(..end)?.trim_ascii();
    let end = line.iter().position(blank).unwrap_or(line.len());
    let (interpreter, rest) = line.split_at_checked(end)?;
    let argument = rest.trim_ascii();
    // Where it is relative is for the kernel to find out.
    (interpreter.first() == Some(&b'/')).then_some((interpreter, (!argument.is_empty()).then_some(argument)))
}

/// Keeps a string, with a zero at its end.
fn text(room: &mut PathBuffer<'_>, bytes: &[u8]) -> Option<u64> {
    let kept = room.take(|room| {
        let place = room.get_mut(..=bytes.len()).ok_or(0_i64)?;
        if let Some((last, rest)) = place.split_last_mut() {
            rest.copy_from_slice(bytes);
            *last = 0;
        }
        Ok(bytes.len() + 1)
    });
    kept.ok().map(|kept| kept.as_ptr().addr() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_lines_are_read_as_the_kernel_does() {
        let sh: Option<(&[u8], Option<&[u8]>)> = Some((b"/bin/sh", None));
        assert_eq!(first_line(b"#!/bin/sh\n"), sh);
        assert_eq!(first_line(b"#! \t/bin/sh \nx"), sh);
        let with: Option<(&[u8], Option<&[u8]>)> = Some((b"/usr/bin/env", Some(b"python3 -s  x")));
        assert_eq!(first_line(b"#!/usr/bin/env  python3 -s  x \n"), with);
        for none in [&b"#!sh\n"[..], b"#!", b"#!\n", b"\x7fELF", b"#!/no/end"] {
            assert_eq!(first_line(none), None);
        }
    }
}
