//! Contexts that ask their caller for something, and end, stop or overrun their limit before control is back.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use orrery_context::{Context, Error, FromCaller, Overlay, Spec, create};
use orrery_domain::End;
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};

use crate::pages::{PAGE, Pages};
use crate::support::{call_number, die, in_child, kill, only};

/// What a context may ask its caller for.
#[derive(Clone, Copy, Debug)]
enum Question {
    Copy,
    Share,
    Call,
    Restrict,
}

const QUESTIONS: [Question; 4] = [Question::Copy, Question::Share, Question::Call, Question::Restrict];

/// How a context ends after the answer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    Exit,
    Kill,
    Fault,
    Execute,
    Limit,
    Stop,
}

fn ask(question: Question, caller: Context, page: Pages) {
    match question {
        Question::Copy => page.overlay(caller, Overlay::Copy).unwrap(),
        Question::Share => page.overlay(caller, Overlay::Share).unwrap(),
        Question::Call => {
            // SAFETY: getpid(2) returns a number, and does nothing.
            unsafe { caller.syscall(FromCaller::default(), call_number(libc::SYS_getpid), [0; 6]) }.unwrap();
        }
        Question::Restrict => caller.restrict(&[]).unwrap(),
    }
}

fn finish(ending: Ending) -> ! {
    match ending {
        Ending::Exit => std::process::exit(7),
        Ending::Kill => die(),
        // SAFETY: nothing of this program is at that address. The write faults, as it is meant to.
        Ending::Fault => unsafe { std::ptr::with_exposed_provenance_mut::<u64>(8).write_volatile(1) },
        Ending::Execute => panic!("{}", Command::new("/bin/sleep").arg("100").exec()),
        Ending::Limit => {}
        Ending::Stop => assert!(kill(std::process::id().cast_signed(), Signal::STOP)),
    }
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// A context that asks its creator, and ends.
fn asker(question: Question, ending: Ending, page: Pages) -> Context {
    let spec = Spec::new().may_access(page.address(), PAGE).may_call(&only(libc::SYS_getpid));
    create(&spec, move |start| {
        ask(question, start.creator, page);
        finish(ending)
    })
    .unwrap()
}

fn check(question: Question, ending: Ending) {
    let memory = Pages::new(1);
    let other = asker(question, ending, memory.part(0, 1));
    let error = match ending {
        Ending::Limit | Ending::Stop => other.switch_within(0, &[], Duration::from_millis(200)),
        _ => other.switch(0, &[]),
    }
    .unwrap_err();
    let as_specified = match ending {
        Ending::Kill => matches!(error, Error::Died { end: End::Killed { signal: libc::SIGKILL }, .. }),
        Ending::Fault => matches!(error, Error::Died { end: End::Killed { signal: libc::SIGSEGV }, .. }),
        Ending::Limit | Ending::Stop => error == Error::TimedOut,
        Ending::Exit => false,
        Ending::Execute => matches!(error, Error::Died { .. }),
    };
    assert!(as_specified, "{question:?}, {ending:?}: {error}");
}

pub(crate) fn who_asked_its_caller_may_end() {
    for question in QUESTIONS {
        for ending in [Ending::Kill, Ending::Fault, Ending::Execute, Ending::Limit, Ending::Stop] {
            check(question, ending);
        }
        let status = in_child(|| check(question, Ending::Exit));
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7), "{question:?}");
    }
}

pub(crate) fn who_asked_its_caller_may_end_far_from_the_root() {
    for question in QUESTIONS {
        let middle = create(&Spec::new(), move |start| {
            check(question, Ending::Kill);
            check(question, Ending::Limit);
            start.creator.switch(5, &[]).unwrap();
            unreachable!();
        })
        .unwrap();
        assert_eq!(middle.switch(0, &[]).unwrap().word, 5);
    }
}

pub(crate) fn who_asked_its_caller_may_end_on_each_thread() {
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for question in QUESTIONS {
                    // Which of the two errors is reported varies with what the other thread does.
                    let memory = Pages::new(1);
                    let other = asker(question, Ending::Kill, memory.part(0, 1));
                    let error = other.switch(0, &[]).unwrap_err();
                    assert!(matches!(error, Error::Died { .. } | Error::Orphaned), "{question:?}: {error}");
                    check(question, Ending::Limit);
                }
            });
        }
    });
}

pub(crate) fn a_caller_that_answered_sleeps() {
    let memory = Pages::new(1);
    let page = memory.part(0, 1);
    let spec = Spec::new().may_access(page.address(), PAGE);
    let other = create(&spec, move |start| {
        ask(Question::Copy, start.creator, page);
        std::thread::sleep(Duration::from_secs(2));
        start.creator.switch(0, &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    let time = || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap();
    let before = time();
    other.switch(0, &[]).unwrap();
    let used = time() - before;
    // A caller that spins uses most of two seconds, or its share of a busy processor.
    assert!(used < Duration::from_millis(40), "{used:?} of processor time while parked");
}
