//! Writes entries of single calls to the journal.

use core::mem::offset_of;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::fence;

use super::conditions::{Call, Facts};
use super::paths::AT_FDCWD;
use super::table::{Policy, policy};
use super::{call_stack, descriptors};
use crate::capture::{ArgCapture, CONTROL, NAME, RESULT, WORKING_DIRECTORY, extent, when};
use crate::executive::abi::state::journal;
use crate::executive::abi::syscall::{EFAULT, EINTR, address, call};
use crate::executive::abi::tsc::{since, ticks};
use crate::executive::abi::user_memory;
use crate::journal::{
    ANSWERED, DATA, DONE, ENTERED, ENTRIES, EVENT, Entry, INFORMATION, Journal, PIECE_LENGTH, PIECE_SHIFT,
    RESUMED, SIGNAL, Slot, stamp_of,
};
use crate::nr;
use crate::policy::{NO_ARGUMENT, Rule, log};

/// How long to wait at a time where the ring is full, in nanoseconds, and how often.
const PAUSE: [u64; 2] = [0, 200_000];
const PAUSES: u32 = 50_000;
const FUTEX_WAKE: u64 = 1;

/// Begins the entry of a call, before it is performed or answered.
pub(crate) fn begin(entry: &mut Entry, call: &Call, rule: &Rule, facts: &mut Facts<'_>, answered: bool) {
    let Call { policy, number, arguments, site, .. } = *call;
    *entry = Entry::EMPTY;
    (entry.thread, entry.number, entry.rule) = (this_thread(), number as u32, rule.counter);
    entry.arguments = arguments;
    if rule.log == log::PLACES {
        entry.callers = *facts.callers();
        entry.site = call_stack::hash(number, &entry.callers);
    }
    entry.callers[0] = site;
    for capture in policy.captures(number).iter().filter(|capture| capture.after == when::BEFORE) {
        add(entry, capture, None);
    }
    entry.start = ticks();
    if !answered && may_not_return(number) {
        entry.state = ENTERED;
        write(entry);
    }
}

/// Writes what a handler reports while it decides about a call: no more than an entry has room for.
pub(crate) fn event(entry: &mut Entry, call: &Call, rule: &Rule, bytes: &[u8]) {
    *entry = Entry::EMPTY;
    (entry.thread, entry.number, entry.rule, entry.state) =
        (this_thread(), call.number as u32, rule.counter, EVENT);
    (entry.arguments, entry.start) = (call.arguments, ticks());
    if let Some(place) = entry.data.get_mut(..bytes.len()) {
        place.copy_from_slice(bytes);
        entry.pieces[0] = 1 << PIECE_SHIFT | bytes.len() as u16;
    }
    write(entry);
}

/// Notes that a call is in no entry.
pub(crate) fn lose() {
    if let Some(journal) = journal() {
        journal.lost.fetch_add(1, Relaxed);
    }
}

/// Completes the entry of a call that was performed or answered, and writes it.
pub(crate) fn end(entry: &mut Entry, call: &Call, answered: bool, result: i64) {
    if result == 0 && is_clone(call.number) {
        // The child: its parent writes the entry.
        return;
    }
    entry.ticks = since(entry.start).unwrap_or(0);
    entry.result = result;
    entry.state = if answered { ANSWERED } else { DONE };
    let written = |capture: &&ArgCapture| match capture.after {
        when::SUCCEEDED => result >= 0,
        when::FOUND => result > 0,
        when::INTERRUPTED => result == -EINTR,
        _ => false,
    };
    if !answered {
        for capture in call.policy.captures(call.number).iter().filter(written) {
            add(entry, capture, u64::try_from(result).ok());
        }
    }
    write(entry);
}

/// Writes how a call ended that did not return to where its entry was begun.
pub(crate) fn write_result(number: u64, result: i64) {
    let logged = |policy: Policy| policy.rules(number).any(|rule| rule.log != 0);
    if policy().is_some_and(logged) {
        let (thread, start) = (this_thread(), ticks());
        write(&Entry { thread, number: number as u32, state: RESUMED, start, result, ..Entry::EMPTY });
    }
}

fn this_thread() -> u32 {
    // SAFETY: gettid reads and writes no memory.
    unsafe { call(nr::gettid, [0; 6]) as u32 }
}

fn is_clone(number: u64) -> bool {
    matches!(number, nr::fork | nr::vfork | nr::clone | nr::clone3)
}

/// Calls after which the program may be another one, or gone, or on another stack.
fn may_not_return(number: u64) -> bool {
    matches!(number, nr::execve | nr::execveat | nr::exit | nr::exit_group | nr::rt_sigreturn)
        || is_clone(number)
}

/// Adds a piece of memory; what cannot be read is left out.
fn add(entry: &mut Entry, capture: &ArgCapture, result: Option<u64>) {
    let argument = |index: u8| entry.arguments.get(usize::from(index)).copied().unwrap_or(0);
    let from = match capture.argument {
        RESULT => result.unwrap_or(u64::MAX),
        CONTROL | NAME => argument(capture.by),
        index => argument(index),
    };
    let nothing = match capture.extent {
        extent::DESCRIPTOR => {
            (from as i32) < 0 && !(capture.by == WORKING_DIRECTORY && from as i32 == AT_FDCWD)
        }
        _ => from == 0,
    };
    if capture.argument == NO_ARGUMENT || nothing {
        return;
    }
    let (size, by, most) = (u64::from(capture.size), argument(capture.by), u64::from(capture.most));
    let length = match capture.extent {
        extent::ONE => size,
        extent::COUNTED => size.saturating_mul(by),
        extent::RETURNED => {
            let room = if capture.by == NO_ARGUMENT { u64::MAX } else { by };
            size.saturating_mul(result.unwrap_or(0).min(room))
        }
        // SAFETY: an integer is any four bytes.
        extent::POINTED => unsafe { user_memory::read::<u32>(by) }.map_or(0, u64::from),
        extent::BITS => by.div_ceil(u64::from(u64::BITS)).saturating_mul(8),
        _ => most,
    };
    let length = length.min(most).min(result.filter(|_| is_transfer(capture.extent)).unwrap_or(u64::MAX));
    let used: usize = entry.pieces.iter().map(|piece| usize::from(piece & PIECE_LENGTH)).sum();
    let end = used.saturating_add(length as usize).min(DATA);
    let Some(room) = entry.data.get_mut(used..end) else { return };
    let Some(piece) = entry.pieces.iter_mut().find(|piece| **piece == 0) else { return };
    let read = match capture.extent {
        extent::STRING => user_memory::read_string(from, room),
        extent::STRINGS => read_strings(from, room),
        extent::DESCRIPTOR => descriptors::describe(from as i32, capture.size, room),
        extent::BUFFERS => read_buffers(from, by, room),
        // `msg_iov` and `msg_iovlen` are the third and the fourth word of a `struct msghdr`.
        // SAFETY: any bytes are valid integers.
        extent::MESSAGE => match unsafe { user_memory::read::<[u64; 4]>(from) } {
            Ok([.., buffers, count]) => read_buffers(buffers, count, room),
            Err(error) => Err(error),
        },
        // `msg_name` and `msg_namelen`, of four bytes, are the first and the second; `msg_control` and `msg_controllen`
        // the fifth and the sixth. SAFETY: any bytes are valid integers.
        extent::CONTROL | extent::NAME => match unsafe { user_memory::read::<[u64; 6]>(from) } {
            Ok([name, length, ..]) if capture.extent == extent::NAME => {
                read_at(name, length & 0xffff_ffff, room)
            }
            Ok([.., control, length]) => read_at(control, length, room),
            Err(error) => Err(error),
        },
        _ => user_memory::read_some(from, room),
    };
    if let Ok(length) = read {
        *piece = (u16::from(capture.argument) + 1) << PIECE_SHIFT | length as u16;
    }
}

/// Returns whether the call transfers what is captured, so that there is no more of it than the call returns.
fn is_transfer(extent: u8) -> bool {
    matches!(extent, extent::BUFFERS | extent::MESSAGE)
}

/// Reads so many bytes, or the beginning of them.
fn read_at(start: u64, length: u64, room: &mut [u8]) -> Result<usize, i64> {
    let length = room.len().min(usize::try_from(length).unwrap_or(usize::MAX));
    if start == 0 || length == 0 {
        return Err(-EFAULT);
    }
    user_memory::read_some(start, room.get_mut(..length).unwrap_or(&mut []))
}

/// Reads strings, each with its zero byte, as far as there is room for whole ones.
fn read_strings(list: u64, room: &mut [u8]) -> Result<usize, i64> {
    let mut done = 0;
    for place in 0.. {
        let string = user_memory::read_word(list.wrapping_add(8 * place))?;
        let rest = room.get_mut(done..).unwrap_or(&mut []);
        if string == 0 || rest.is_empty() {
            break;
        }
        let length = user_memory::read_string(string, rest)?;
        let Some(zero) = rest.get_mut(length) else { break };
        *zero = 0;
        done += length + 1;
    }
    Ok(done)
}

/// Reads the beginning of what a list of buffers holds.
fn read_buffers(list: u64, count: u64, room: &mut [u8]) -> Result<usize, i64> {
    let mut done = 0;
    for place in 0..count {
        let rest = room.get_mut(done..).unwrap_or(&mut []);
        if rest.is_empty() {
            break;
        }
        // SAFETY: any bytes are valid integers.
        let [start, length] = unsafe { user_memory::read::<[u64; 2]>(list.wrapping_add(16 * place)) }?;
        let part = rest.len().min(length as usize);
        let part = rest.get_mut(..part).unwrap_or(&mut []);
        done += if part.is_empty() { 0 } else { user_memory::read_some(start, part)? };
    }
    Ok(done)
}

/// Writes that a handler of the program's gets a signal, if that is to be told. Where a handler begins there may be no room on the stack for an
/// entry: it is made in its place.
///
/// # Safety
/// `information` points to a `siginfo_t`.
pub(crate) unsafe fn write_signal(signal: i32, information: *const [u64; INFORMATION / 8]) {
    if !policy().is_some_and(|policy| policy.reports_signal(signal)) {
        return;
    }
    let Some(journal) = journal() else { return };
    let start = ticks();
    let Some((ticket, slot)) = claim(journal) else { return };
    let put = |offset: usize, word: u64| {
        if let Some(place) = slot.words.get(offset / 8) {
            place.store(word, Relaxed);
        }
    };
    for place in &slot.words {
        place.store(0, Relaxed);
    }
    let both = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    put(offset_of!(Entry, start), start);
    put(offset_of!(Entry, thread), both(this_thread(), signal.cast_unsigned()));
    put(offset_of!(Entry, state), both(SIGNAL, 0));
    put(offset_of!(Entry, pieces), 1 << PIECE_SHIFT | INFORMATION as u64);
    for index in 0..INFORMATION / 8 {
        // SAFETY: by the caller. The kernel clears what it does not use of a `siginfo_t`.
        put(offset_of!(Entry, data) + 8 * index, unsafe { information.cast::<u64>().add(index).read() });
    }
    publish(journal, ticket, slot);
}

/// Words that are put together from two members.
const _: () = assert!(
    offset_of!(Entry, number) == offset_of!(Entry, thread) + 4
        && offset_of!(Entry, thread).is_multiple_of(8)
        && offset_of!(Entry, rule) == offset_of!(Entry, state) + 4
        && offset_of!(Entry, state).is_multiple_of(8)
        && offset_of!(Entry, pieces).is_multiple_of(8)
        && offset_of!(Entry, data).is_multiple_of(8)
);

/// Writes an entry.
pub(crate) fn write(entry: &Entry) {
    let Some(journal) = journal() else { return };
    let Some((ticket, slot)) = claim(journal) else { return };
    for (place, word) in slot.words.iter().zip(entry.words()) {
        place.store(*word, Relaxed);
    }
    publish(journal, ticket, slot);
}

/// Takes the next place of the ring, for which this may wait; `None` if the entry is lost.
fn claim(journal: &Journal) -> Option<(u64, &Slot)> {
    let mut pauses = 0;
    loop {
        let ticket = journal.next.load(Acquire);
        let slot = journal.slots.get(ticket as usize % ENTRIES)?;
        let turn = slot.stamp.load(Acquire);
        if turn == stamp_of(ticket) {
            if journal.next.compare_exchange(ticket, ticket + 1, AcqRel, Relaxed).is_ok() {
                return Some((ticket, slot));
            }
        } else if turn < stamp_of(ticket) {
            // Full.
            if journal.reader.load(Relaxed) == 0 || pauses > PAUSES {
                lose();
                return None;
            }
            pauses += 1;
            // SAFETY: sleeps; what is left when a signal comes is not asked for.
            unsafe { call(nr::nanosleep, [address(&PAUSE), 0, 0, 0, 0, 0]) };
        } else {
            // Another thread has the ticket, unless a program has written nonsense there.
            pauses += 1;
            if pauses > PAUSES {
                lose();
                return None;
            }
        }
    }
}

/// Has the reader find what was written to a place.
fn publish(journal: &Journal, ticket: u64, slot: &Slot) {
    // Not if the reader has given it up meanwhile.
    let turn = stamp_of(ticket);
    let _given_up = slot.stamp.compare_exchange(turn, turn + 1, Release, Relaxed);
    // The reader says that it sleeps, then looks at the slots once more: one of both sees the other.
    fence(SeqCst);
    if journal.waiting.load(Relaxed) != 0 && journal.waiting.swap(0, Relaxed) != 0 {
        // SAFETY: the word is in the shared page.
        unsafe { call(nr::futex, [address(&journal.waiting), FUTEX_WAKE, 1, 0, 0, 0]) };
    }
}
