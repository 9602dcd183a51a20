//! The wait of a caller for a context that asks it, under orders of events that shuttle chooses: whatever the context
//! does after its questions, the wait ends, and one of the two has control.
//!
//! The words are the real ones' likes: who has control changes by [`Controller::pass_control`] itself; what was said is
//! a count, as in a link. The wait is that of [`crate::switch::park`], with a time limit that is a number of looks.

use std::panic::{AssertUnwindSafe, catch_unwind};

use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicU32, Ordering::SeqCst};
use shuttle::{Config, thread};

use crate::shared::control::Controller;

const CALLER: Controller = Controller::new(0, 0);
const ASKER: Controller = Controller::new(1, 0);

/// What the context does after its questions.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    /// Hands control back, and waits.
    Returns,
    /// The same, and dies behind it.
    ReturnsAndDies,
    Dies,
    /// Does nothing any more, as one that is stopped or hangs.
    Hangs,
}

/// What the caller's wait comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    Control,
    Died,
    TimedOut,
}

#[derive(Default)]
struct Words {
    control: AtomicU32,
    dead: AtomicU32,
    /// The context's half of the link: how often it has said something, and whether the last was control.
    sent: AtomicU32,
    is_switch: AtomicU32,
    /// How often the caller has answered.
    answered: AtomicU32,
}

impl Words {
    fn say(&self, is_switch: u32) {
        self.is_switch.store(is_switch, SeqCst);
        self.sent.fetch_add(1, SeqCst);
    }
}

/// The context: whether it came to its ending, or its time was up before.
fn ask(words: &Words, questions: u32, ending: Ending) {
    for question in 1..=questions {
        words.say(0);
        while words.answered.load(SeqCst) < question {
            if Controller::of(&words.control) != ASKER {
                // It is killed where it waits.
                return words.dead.store(1, SeqCst);
            }
            thread::yield_now();
        }
    }
    if matches!(ending, Ending::Returns | Ending::ReturnsAndDies)
        && ASKER.pass_control(&words.control, CALLER).is_ok()
    {
        words.say(1);
    }
    if matches!(ending, Ending::Dies | Ending::ReturnsAndDies) {
        words.dead.store(1, SeqCst);
    }
}

/// Acts as the caller, which looks at most `limit` times. `follows`: expects the next message after each that it
/// took.
fn wait(words: &Words, limit: Option<u32>, follows: bool) -> Outcome {
    let (mut taken, mut expected, mut looks) = (0, 0, 0);
    let mut limit = limit;
    let mut died_silently = false;
    loop {
        let sent = words.sent.load(SeqCst);
        if sent != taken {
            taken = sent;
            if words.is_switch.load(SeqCst) == 1 {
                return Outcome::Control;
            }
            words.answered.fetch_add(1, SeqCst);
        }
        if died_silently {
            return Outcome::Died;
        }
        if follows {
            expected = taken;
        }
        while words.sent.load(SeqCst) == expected {
            looks += 1;
            if words.dead.load(SeqCst) == 1 {
                if words.sent.load(SeqCst) != expected {
                    break;
                }
                if ASKER.pass_control(&words.control, CALLER).is_ok() {
                    return Outcome::Died;
                }
                died_silently = true;
                break;
            }
            if limit.is_some_and(|limit| looks >= limit) {
                limit = None;
                if ASKER.pass_control(&words.control, CALLER).is_ok() {
                    return Outcome::TimedOut;
                }
            }
            thread::yield_now();
        }
    }
}

fn conversation(questions: u32, ending: Ending, limit: Option<u32>, follows: bool) {
    let words = Arc::new(Words::default());
    words.control.store(ASKER.word(), SeqCst);
    let words2 = words.clone();
    let asker = thread::spawn(move || ask(&words2, questions, ending));
    let outcome = wait(&words, limit, follows);
    asker.join().unwrap();
    assert_eq!(Controller::of(&words.control), CALLER, "{outcome:?}");
    let may = match ending {
        Ending::Returns | Ending::ReturnsAndDies => outcome != Outcome::Died,
        Ending::Dies => outcome != Outcome::Control,
        Ending::Hangs => outcome == Outcome::TimedOut,
    };
    assert!(may || limit.is_some() && outcome == Outcome::TimedOut, "{ending:?}: {outcome:?}");
    assert!(limit.is_some() || outcome != Outcome::TimedOut);
}

/// Runs a conversation in many orders; one that does not come to an end fails.
fn run(questions: u32, ending: Ending, limit: Option<u32>, follows: bool) {
    let mut config = Config::new();
    config.max_steps = shuttle::MaxSteps::FailAfter(20_000);
    let scheduler = shuttle::scheduler::RandomScheduler::new(300);
    shuttle::Runner::new(scheduler, config).run(move || conversation(questions, ending, limit, follows));
}

const ENDINGS: [Ending; 4] = [Ending::Returns, Ending::ReturnsAndDies, Ending::Dies, Ending::Hangs];

#[test]
fn a_wait_ends_whatever_was_asked_before() {
    for ending in ENDINGS {
        for questions in 0..4 {
            for limit in [None, Some(1), Some(5), Some(50)] {
                if ending != Ending::Hangs || limit.is_some() {
                    run(questions, ending, limit, true);
                }
            }
        }
    }
}

#[test]
fn a_wait_that_expects_what_was_taken_never_ends() {
    for (ending, limit) in [(Ending::Dies, None), (Ending::Hangs, Some(5))] {
        run(0, ending, limit, false);
        let broken = AssertUnwindSafe(|| run(1, ending, limit, false));
        assert!(catch_unwind(broken).is_err(), "{ending:?}: a question taken before hides nothing");
    }
}
