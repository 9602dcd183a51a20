//! Telling of single calls.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::clock::ticks;
use super::conditions::Facts;
use super::count::board;
use super::kernel::{address, call};
use super::{paths, user};
use crate::journal::{DATA, ENTRIES, Entry, PIECE_LENGTH, PIECE_SHIFT, RESUMED, stamp_of};
use crate::look::{LOOKS, Look, RESULT, extent};
use crate::numbers;
use crate::policy::{NO_ARGUMENT, Rule, log};

/// How long to wait at a time where the ring is full, in nanoseconds, and how often.
const PAUSE: [u64; 2] = [0, 200_000];
const PAUSES: u32 = 50_000;

/// What is known of a call before it is performed.
pub(crate) fn begin(
    number: u64,
    arguments: [u64; 6],
    site: u64,
    rule: &Rule,
    facts: &mut Facts<'_>,
) -> Entry {
    // SAFETY: asks for a number.
    let thread = unsafe { call(numbers::gettid, [0; 6]) } as u32;
    let mut entry = Entry { thread, number: number as u32, rule: rule.counter, arguments, ..Entry::EMPTY };
    if rule.log == log::PLACES {
        entry.callers = *facts.callers();
        entry.site = super::callers::hash(number, &entry.callers);
    }
    entry.callers[0] = site;
    entry
}

/// How a call ended, of which only the beginning is known to the reader.
pub(crate) fn result(number: u64, result: i64) -> Entry {
    // SAFETY: asks for a number.
    let thread = unsafe { call(numbers::gettid, [0; 6]) } as u32;
    Entry { thread, number: number as u32, state: RESUMED, start: ticks(), result, ..Entry::EMPTY }
}

/// Adds memory that arguments point to, as it is before the call.
pub(crate) fn look_before(entry: &mut Entry, looks: &[Look; LOOKS]) {
    for look in looks.iter().filter(|look| look.after == 0) {
        add(entry, look, None);
    }
}

/// Adds what the call has put into memory that arguments point to.
pub(crate) fn look_after(entry: &mut Entry, looks: &[Look; LOOKS]) {
    let Ok(result) = u64::try_from(entry.result) else { return };
    for look in looks.iter().filter(|look| look.after != 0) {
        add(entry, look, Some(result));
    }
}

/// Adds a piece of memory; what cannot be read is not told.
fn add(entry: &mut Entry, look: &Look, result: Option<u64>) {
    let argument = |index: u8| entry.arguments.get(usize::from(index)).copied().unwrap_or(0);
    let from = match look.argument {
        RESULT => result.unwrap_or(u64::MAX),
        index => argument(index),
    };
    let nothing = match look.extent {
        extent::DESCRIPTOR => (from as i32) < 0,
        _ => from == 0,
    };
    if look.argument == NO_ARGUMENT || nothing {
        return;
    }
    let (size, by, most) = (u64::from(look.size), argument(look.by), u64::from(look.most));
    let length = match look.extent {
        extent::ONE => size,
        extent::COUNTED => size.saturating_mul(by),
        extent::RETURNED => size.saturating_mul(result.unwrap_or(0)),
        // SAFETY: an integer is any four bytes.
        extent::POINTED => unsafe { user::read::<u32>(by) }.map_or(0, u64::from),
        extent::BITS => by.div_ceil(u64::from(u64::BITS)).saturating_mul(8),
        _ => most,
    };
    let length = length.min(most).min(result.filter(|_| is_transfer(look.extent)).unwrap_or(u64::MAX));
    let used: usize = entry.pieces.iter().map(|piece| usize::from(piece & PIECE_LENGTH)).sum();
    let end = used.saturating_add(length as usize).min(DATA);
    let Some(room) = entry.data.get_mut(used..end) else { return };
    let Some(piece) = entry.pieces.iter_mut().find(|piece| **piece == 0) else { return };
    let read = match look.extent {
        extent::STRING => user::read_string(from, room),
        extent::STRINGS => read_strings(from, room),
        extent::DESCRIPTOR => paths::of_descriptor(from as i32, room),
        extent::BUFFERS => read_buffers(from, by, room),
        // `msg_iov` and `msg_iovlen` are the third and the fourth word of a `struct msghdr`.
        // SAFETY: integers.
        extent::MESSAGE => match unsafe { user::read::<[u64; 4]>(from) } {
            Ok([.., buffers, count]) => read_buffers(buffers, count, room),
            Err(error) => Err(error),
        },
        _ => user::read_some(from, room),
    };
    if let Ok(length) = read {
        *piece = (u16::from(look.argument) + 1) << PIECE_SHIFT | length as u16;
    }
}

/// Whether the call transfers what is told, so that there is no more of it than the call returns.
fn is_transfer(extent: u8) -> bool {
    matches!(extent, extent::BUFFERS | extent::MESSAGE)
}

/// Reads strings, each with its zero byte, as far as there is room for whole ones.
fn read_strings(list: u64, room: &mut [u8]) -> Result<usize, i64> {
    let mut done = 0;
    for place in 0.. {
        let string = user::read_word(list.wrapping_add(8 * place))?;
        let rest = room.get_mut(done..).unwrap_or(&mut []);
        if string == 0 || rest.is_empty() {
            break;
        }
        let length = user::read_string(string, rest)?;
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
        // SAFETY: integers.
        let [start, length] = unsafe { user::read::<[u64; 2]>(list.wrapping_add(16 * place)) }?;
        let part = rest.len().min(length as usize);
        let part = rest.get_mut(..part).unwrap_or(&mut []);
        done += if part.is_empty() { 0 } else { user::read_some(start, part)? };
    }
    Ok(done)
}

/// Writes an entry.
pub(crate) fn write(entry: &Entry) {
    let journal = &board().journal;
    let mut pauses = 0;
    let (ticket, slot) = loop {
        let ticket = journal.next.load(Acquire);
        let Some(slot) = journal.slots.get(ticket as usize % ENTRIES) else { return };
        let turn = slot.stamp.load(Acquire);
        if turn == stamp_of(ticket) {
            if journal.next.compare_exchange(ticket, ticket + 1, AcqRel, Relaxed).is_ok() {
                break (ticket, slot);
            }
        } else if turn < stamp_of(ticket) {
            // Full.
            if journal.reader.load(Relaxed) == 0 || pauses > PAUSES {
                journal.lost.fetch_add(1, Relaxed);
                return;
            }
            pauses += 1;
            // SAFETY: sleeps; what is left when a signal comes is not asked for.
            unsafe { call(numbers::nanosleep, [address(&PAUSE), 0, 0, 0, 0, 0]) };
        }
    };
    for (place, word) in slot.words.iter().zip(entry.words()) {
        place.store(*word, Relaxed);
    }
    // Not if the reader has given it up meanwhile.
    let turn = stamp_of(ticket);
    let _given_up = slot.stamp.compare_exchange(turn, turn + 1, Release, Relaxed);
}
