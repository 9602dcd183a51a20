//! A new context has copies of all threads, whatever each was doing at that moment: on its way into a switch, parked
//! there, called already and on its way out, or on its way to where a copy begins.

use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use orrery_context::{self as context, Context, Error, FromCaller, Spec, create};

use crate::support::{call_number, server, shared_words};
use crate::threads::{CREATOR, await_word, is_root, noting, waiting};

const ROUNDS: usize = 12;
const THREADS: usize = 2;
/// What a thread says to its original.
const HERE: u64 = 1 << 40;
const DEEPER: u64 = 2 << 40;

/// The context to and fro which the threads switch all the time, and those that are created meanwhile.
static FIRST: OnceLock<Context> = OnceLock::new();
static NEW: [OnceLock<Context>; ROUNDS] = [const { OnceLock::new() }; ROUNDS];
/// In a new context: one that it has created in turn.
static INNER: OnceLock<Context> = OnceLock::new();
/// A file that the first context has, too.
static FILE: AtomicU64 = AtomicU64::new(0);
/// In how many new contexts each thread has been.
static MET: [AtomicU64; THREADS] = [const { AtomicU64::new(0) }; THREADS];

/// Switches to the next of the new contexts, if it is there; whether all are behind this thread.
fn has_met_all(thread: usize, expected: u64) -> bool {
    let round = usize::try_from(MET[thread].load(SeqCst)).unwrap();
    if let Some(new) = NEW.get(round).and_then(OnceLock::get) {
        let arrival = new.switch(0, &[]).unwrap();
        assert!(is_root());
        assert_eq!(arrival.word, expected, "round {round}");
        MET[thread].store(round as u64 + 1, SeqCst);
    }
    round == ROUNDS
}

/// What a thread does, and its copies.
fn switch_all_the_time(thread: usize, expected: u64) {
    if let Some(creator) = CREATOR.get() {
        // In the first context.
        let mut arrival = creator.switch(1, &[]).unwrap();
        loop {
            arrival = arrival.caller.switch(arrival.word + 1, &[]).unwrap();
        }
    }
    let mut word = 0;
    loop {
        if !is_root() {
            // In a new one, where it may have gone on without knowing that it was called.
            match INNER.get() {
                Some(inner) => inner.switch(0, &[]).unwrap(),
                None => context::root().unwrap().switch(expected, &[]).unwrap(),
            };
            unreachable!("nobody comes twice");
        }
        if has_met_all(thread, expected) {
            return;
        }
        let arrival = FIRST.get().unwrap().switch(word, &[]).unwrap();
        if is_root() {
            assert_eq!(arrival.word, word + 1);
            word += 1;
        }
    }
}

/// Has the first context make a call whose result nobody else asks for: more than one of a process that asked at a time
/// would be given one another's answers. An answer to the original is none to its copy, which is told so.
fn ask(thread: usize, count: u64) {
    let offset = (thread as u64) << 32 | count;
    let all_theirs = FromCaller { memory: false, descriptors: false, credentials: false };
    let seek = [FILE.load(SeqCst), offset, libc::SEEK_SET.unsigned_abs().into(), 0, 0, 0];
    // SAFETY: lseek(2) takes numbers only and moves the position of a file that nobody else uses.
    let got = unsafe { FIRST.get().unwrap().syscall(all_theirs, call_number(libc::SYS_lseek), seek) };
    match got {
        Err(Error::System(error)) if error.errno == rustix::io::Errno::INTR && !is_root() => {}
        got => assert_eq!(got.unwrap(), i64::try_from(offset).unwrap()),
    }
}

/// What a thread does that asks, and its copies.
fn ask_all_the_time(thread: usize, expected: u64) {
    const A_FEW: u64 = 5;
    for count in 1.. {
        ask(thread, count);
        if !is_root() {
            (1..=A_FEW).for_each(|further| ask(thread, count + further));
            context::root().unwrap().switch(expected, &[]).unwrap();
            unreachable!("nobody comes twice");
        }
        if has_met_all(thread, expected) {
            return;
        }
    }
}

fn copied_at_whatever_moment(what: fn(usize, u64), deep: bool) {
    let words = shared_words();
    let expected = if deep { DEEPER } else { HERE };
    let threads: Vec<_> =
        (0..THREADS).map(|thread| waiting(&words[1], move || what(thread, expected))).collect();
    let file = tempfile::tempfile().unwrap();
    FILE.store(file.as_raw_fd().unsigned_abs().into(), SeqCst);
    FIRST.set(noting(&Spec::new())).unwrap();
    words[1].store(1, SeqCst);
    for (round, name) in NEW.iter().enumerate() {
        let context = create(&Spec::new(), move |start| {
            if deep {
                // While the counterparts are on their way.
                INNER.set(create(&Spec::new(), server(|word| word)).unwrap()).unwrap();
            }
            start.arrival.caller.switch(7, &[]).unwrap();
            unreachable!();
        })
        .unwrap();
        if deep {
            assert_eq!(context.switch(0, &[]).unwrap().word, 7);
        }
        name.set(context).unwrap();
        MET.iter().for_each(|met| await_word(met, round as u64 + 1));
        context.close().unwrap();
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

pub(crate) fn threads_are_copied_at_whatever_moment() {
    copied_at_whatever_moment(switch_all_the_time, false);
}

pub(crate) fn copies_of_threads_are_copied_at_whatever_moment() {
    copied_at_whatever_moment(switch_all_the_time, true);
}

pub(crate) fn threads_that_ask_are_copied_at_whatever_moment() {
    copied_at_whatever_moment(ask_all_the_time, false);
}
