//! Calls that are under way: what the kernel says of a thread that waits (`/proc/PID/syscall`, proc_pid_syscall(5)).
//!
//! An executive reports a call when it has returned. One that never does, because its program hangs or is killed, is found by looking
//! at the thread, which costs the program nothing.

use std::fs;

use orrery_hijack_image::capture::{ArgCapture, extent, when};
use orrery_hijack_image::journal::{DATA, ENTERED, Entry, PIECE_SHIFT};
use orrery_sys::process_memory;

use crate::arg_types::decoders;
use crate::calls::{self, Signature};
use crate::events::Event;

impl Event {
    /// The call that a thread waits in; `None` if it runs, has ended, or may not be looked at. What its arguments point to is read now,
    /// where the call only reads it.
    #[must_use]
    pub fn of_waiting_thread(thread: u32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{thread}/syscall")).ok()?;
        let (number, arguments) = parsed(&text)?;
        let mut entry = Entry { thread, number, state: ENTERED, arguments, ..Entry::EMPTY };
        if let Some(call) = calls::numbered(number) {
            capture(&mut entry, call);
        }
        Some(Self::of(entry))
    }
}

/// Returns a call's number and arguments. A thread that runs, or waits for something else, has none.
fn parsed(text: &str) -> Option<(u32, [u64; 6])> {
    let mut words = text.split_ascii_whitespace();
    let number = words.next()?.parse().ok()?;
    let mut arguments = [0; 6];
    for argument in &mut arguments {
        *argument = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    Some((number, arguments))
}

/// Reads what the arguments of a call point to.
fn capture(entry: &mut Entry, call: &Signature) {
    let Ok(thread) = libc::pid_t::try_from(entry.thread) else { return };
    let mut used = 0;
    let count = call.arguments.as_deref().map_or(0, <[_]>::len).min(entry.arguments.len());
    let captures = (0..count).filter_map(|index| decoders(call, index)).map(|decoder| decoder.capture);
    let mut pieces = entry.pieces.iter_mut();
    for capture in captures.filter(|capture| capture.after == when::BEFORE) {
        let arguments = &entry.arguments;
        let argument = |index: u8| arguments.get(usize::from(index)).copied().unwrap_or(0);
        let (from, length) = (argument(capture.argument), length(&capture, argument(capture.by)));
        let Some(room) = entry.data.get_mut(used..(used + length).min(DATA)) else { return };
        let is_text = capture.extent == extent::STRING;
        if from == 0 || length == 0 || !read(thread, from, room, is_text) {
            continue;
        }
        let end = room.iter().position(|byte| *byte == 0).filter(|_| is_text).unwrap_or(room.len());
        let (Some(piece), Ok(length)) = (pieces.next(), u16::try_from(end)) else { return };
        *piece = (u16::from(capture.argument) + 1) << PIECE_SHIFT | length;
        used += end;
    }
}

/// Returns how much memory an argument means; none where that takes more than a look.
fn length(capture: &ArgCapture, by: u64) -> usize {
    let (size, most) = (u64::from(capture.size), u64::from(capture.most));
    let length = match capture.extent {
        extent::ONE => size,
        extent::STRING => most,
        extent::COUNTED => size.saturating_mul(by),
        extent::BITS => by.div_ceil(u64::from(u64::BITS)).saturating_mul(8),
        _ => 0,
    };
    usize::try_from(length.min(most)).unwrap_or(0)
}

/// Reads memory of a thread; of a text that ends before memory does, what is there.
fn read(thread: libc::pid_t, from: u64, room: &mut [u8], is_text: bool) -> bool {
    if process_memory::read(thread, from, room).is_ok() {
        return true;
    }
    // Up to the end of the page, behind which there is nothing.
    const PAGE: u64 = 4096;
    let rest = usize::try_from(PAGE - from % PAGE).unwrap_or(0);
    room.fill(0);
    is_text && room.get_mut(..rest).is_some_and(|room| process_memory::read(thread, from, room).is_ok())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_the_kernel_says_is_read() {
        let (number, arguments) = parsed("35 0x1 0x2 0x3 0x4 0x5 0xff 0x7ffd 0x7f12\n").unwrap();
        assert_eq!((number, arguments), (35, [1, 2, 3, 4, 5, 255]));
        for text in ["running\n", "-1 0x7ffd 0x7f12\n", "", "35 0x1"] {
            assert_eq!(parsed(text), None);
        }
    }

    #[test]
    fn a_thread_that_waits_says_for_what() {
        static THREAD: AtomicU32 = AtomicU32::new(0);
        std::thread::spawn(|| {
            // SAFETY: the call takes no pointer.
            THREAD
                .store(u32::try_from(unsafe { libc::syscall(libc::SYS_gettid) }).unwrap(), Ordering::Release);
            std::thread::sleep(Duration::from_secs(3600));
        });
        let found = orrery_testing::until("a thread that sleeps", || {
            Event::of_waiting_thread(THREAD.load(Ordering::Acquire))
                .filter(|event| event.name().ends_with("nanosleep"))
        });
        let arguments: Vec<_> = found
            .describe_given(crate::form::Form::default())
            .into_iter()
            .map(|argument| argument.text)
            .collect();
        assert!(arguments.last().unwrap().starts_with("{tv_sec="), "{arguments:?}");
    }
}
