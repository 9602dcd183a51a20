//! Puts an executive under a program in one go, from the stop at which it has been executed.
//!
//! A word of code is put over the program's first instruction, where the thread goes on: it attaches the image's code below the program's
//! interpreter, and returns to an address that is on top of the stack by then, in that code. What the image's data consists of lies on the
//! stack, too, far enough below what the kernel has put there. The image takes it from there, and drops the page with the word in it, so
//! that it is the file's again (see `orrery_load`).
//!
//! If the code could not be attached, there is nothing where the thread returns to, and it stops by a SIGSEGV. Nothing else has changed
//! then.

use std::io;

use orrery_hijack_image::config::{Loading, NOT_LOADED};
use orrery_sys::process_memory;

use super::puppet::{BELOW, Puppet};
use super::{Home, Load, Placed, Settings, precise};
use crate::image::PAGE;
use crate::maps::Maps;
use crate::shared_code;

/// Most bytes on the stack. The kernel gives a stack 128 KiB at once, unless its limit is lower.
const MOST_BYTES: usize = 64 << 10;
/// `mov eax, 30` (shmat), `syscall`, `ret`.
const WORD: [u8; 8] = [0xb8, 30, 0, 0, 0, 0x0f, 0x05, 0xc3];

/// What became of an attempt.
pub(super) enum Outcome {
    /// Nothing was done: the thread stands where it stood.
    Impossible,
    /// The image has no room there. The thread has left its `execve`, and nothing else has changed.
    Failed,
    /// The image is there, and its beginning has returned this.
    Begun(Placed, io::Result<u64>),
}

/// Has a thread begin with an image that has just executed a program.
///
/// # Errors
/// Where it is not known what is mapped in the process now: it is to go on as the program, without an executive.
pub(super) fn begin(
    puppet: &mut Puppet<'_>,
    maps: &Maps,
    load: &Load<'_>,
    home: &Home<'_>,
    settings: &Settings,
) -> io::Result<Outcome> {
    let Some(code) = &settings.code else { return Ok(Outcome::Impossible) };
    let first = puppet.registers.rip;
    let page = first & !(PAGE - 1);
    let fits = first - page <= PAGE - WORD.len() as u64;
    let Some(base) = room(maps, first, load.length()).filter(|_| fits && puppet.forcible) else {
        return Ok(Outcome::Impossible);
    };
    let placed = load.placed(base, puppet, maps, home, settings);
    let Some(loading) = put_on_stack(puppet, &placed, load, page, precise(settings)) else {
        return Ok(Outcome::Impossible);
    };
    let Ok(word) = puppet.tracee.replace_word(first, u64::from_le_bytes(WORD)) else {
        return Ok(Outcome::Impossible);
    };
    puppet.covered = Some((first, word));
    let mut registers = puppet.registers;
    (registers.rdi, registers.rsi) = (code.id(), base);
    registers.rdx = u64::try_from(shared_code::ATTACH).unwrap_or(0);
    (registers.rbx, registers.rsp) = (loading, loading - ABOVE);
    registers.orig_rax = u64::MAX;
    puppet.tracee.set_registers(&registers)?;
    // What execve(2) returns, and the kernel writes only now.
    puppet.registers.rax = 0;
    puppet.registers.orig_rax = u64::MAX;
    let result = puppet.run_to_end();
    let error = match &result {
        Ok(_) => None,
        Err(error) => error.raw_os_error(),
    };
    if matches!(error, None | Some(libc::EACCES)) {
        // The image's beginning has answered, so the program's first instruction is back.
        puppet.covered = None;
        return Ok(Outcome::Begun(placed, result));
    }
    let never_attached = puppet.tracee.registers()?.rip == placed.entries.load;
    puppet.uncover()?;
    if error == Some(NOT_LOADED) {
        puppet.find_gadget(maps)?;
        puppet.call(libc::SYS_shmdt, [base, 0, 0, 0, 0, 0])?;
        puppet.uncover()?;
    } else if !never_attached {
        return Ok(Outcome::Begun(placed, result));
    }
    Ok(Outcome::Failed)
}

/// Returns where an image may be: directly below the program's interpreter, whose first instruction is at this address, and what the kernel
/// has mapped below that. The kernel would map it there, too. `None`: the program has none.
fn room(maps: &Maps, first: u64, length: u64) -> Option<u64> {
    let program = maps.code.first()?;
    let interpreter = maps.code.last()?;
    let is_its = (interpreter.start..interpreter.end).contains(&first) && interpreter.file != program.file;
    maps.last_begins.checked_sub(length).filter(|base| is_its && *base > program.end)
}

/// Bytes between the return address and what is on the stack.
const ABOVE: u64 = 16;

/// Puts on the stack what the image needs to begin, and returns where that is.
fn put_on_stack(
    puppet: &Puppet<'_>,
    placed: &Placed,
    load: &Load<'_>,
    page: u64,
    options: u64,
) -> Option<u64> {
    let length = size_of::<Loading>() + placed.bytes.len() + load.table.len();
    if length > MOST_BYTES {
        return None;
    }
    let stack = puppet.registers.rsp;
    let at = stack.checked_sub(BELOW + length as u64)? & !15;
    let loading = Loading {
        data: placed.own,
        data_length: placed.base + load.length() - placed.own,
        bytes: placed.bytes.len() as u64,
        table: placed.base + load.image.length,
        table_bytes: load.table.len() as u64,
        page,
        checked: 0,
        options,
        stack,
    };
    let words = [placed.entries.load, 0].into_iter().chain(loading.words());
    let head: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    process_memory::write(puppet.tracee.pid(), at - ABOVE, [&head, &placed.bytes, &load.table]).ok()?;
    Some(at)
}
