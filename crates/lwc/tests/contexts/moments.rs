//! A new context has copies of all threads, whatever each was doing at that moment: on its way into a switch, parked there,
//! called already and on its way out, or on its way to where a copy begins.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use orrery_lwc::context::{self, Context, Spec, create};

use crate::support::{server, shared_words};
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
/// In how many new contexts each thread has been.
static MET: [AtomicU64; THREADS] = [const { AtomicU64::new(0) }; THREADS];

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
        let round = usize::try_from(MET[thread].load(SeqCst)).unwrap();
        if let Some(new) = NEW.get(round).and_then(OnceLock::get) {
            let arrival = new.switch(0, &[]).unwrap();
            assert!(is_root());
            assert_eq!(arrival.word, expected, "round {round}");
            MET[thread].store(round as u64 + 1, SeqCst);
        } else if round == ROUNDS {
            return;
        }
        let arrival = FIRST.get().unwrap().switch(word, &[]).unwrap();
        if is_root() {
            assert_eq!(arrival.word, word + 1);
            word += 1;
        }
    }
}

fn copied_at_whatever_moment(deep: bool) {
    let words = shared_words();
    let expected = if deep { DEEPER } else { HERE };
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| waiting(&words[1], move || switch_all_the_time(thread, expected)))
        .collect();
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
    copied_at_whatever_moment(false);
}

pub(crate) fn copies_of_threads_are_copied_at_whatever_moment() {
    copied_at_whatever_moment(true);
}
