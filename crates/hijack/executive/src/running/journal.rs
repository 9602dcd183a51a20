//! Telling of single calls.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::conditions::Facts;
use super::count::board;
use super::kernel::{address, call, ticks};
use super::user;
use crate::journal::{DATA, ENTRIES, Entry, PIECE_LENGTH, PIECE_SHIFT, RESUMED, stamp_of};
use crate::numbers;
use crate::policy::{NO_ARGUMENT, Rule, Shape, log};

/// How much of a buffer is told.
const BUFFER: usize = 48;
/// How much of a path.
const PATH: usize = 160;
/// How much of the address of a socket: that of a unix socket is longest.
const SOCKET: usize = 110;
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

/// Adds memory that arguments point to, before the call, or what the call has put there.
pub(crate) fn add_pieces(entry: &mut Entry, shape: &Shape, result: Option<i64>) {
    if result.is_none() {
        for path in shape.path {
            add(entry, path, PATH, true);
        }
        let length = entry.arguments.get(usize::from(shape.address.wrapping_add(1))).copied().unwrap_or(0);
        add(entry, shape.address, SOCKET.min(length as usize), false);
    }
    let length = match (shape.fills != 0, result) {
        (true, Some(result)) => usize::try_from(result).unwrap_or(0),
        (false, None) => entry.arguments.get(usize::from(shape.count)).map_or(0, |count| *count as usize),
        _ => 0,
    };
    if shape.count != NO_ARGUMENT && length > 0 {
        add(entry, shape.count.wrapping_sub(1), BUFFER.min(length), false);
    }
}

fn add(entry: &mut Entry, argument: u8, most: usize, string: bool) {
    let Some(from) = entry.arguments.get(usize::from(argument)).copied().filter(|from| *from != 0) else {
        return;
    };
    let used: usize = entry.pieces.iter().map(|piece| usize::from(piece & PIECE_LENGTH)).sum();
    let Some(piece) = entry.pieces.iter_mut().find(|piece| **piece == 0) else { return };
    let end = (used + most).min(DATA);
    let Some(room) = entry.data.get_mut(used..end) else { return };
    let read = if string { user::read_string(from, room) } else { user::read_some(from, room) };
    if let Ok(length) = read {
        *piece = (u16::from(argument) + 1) << PIECE_SHIFT | length as u16;
    }
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
