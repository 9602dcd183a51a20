//! Contexts that ask their caller for something, and end, stop or overrun their limit before control is back.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use orrery_context::{Calls, Context, Error, FromCaller, Overlay, Spec, create};
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
    /// A descriptor.
    File,
    /// A piece of memory, for a system call of its own.
    Read,
    /// To write to memory, likewise.
    Write,
    /// To have a descriptor that such a call made.
    Take,
}

const QUESTIONS: [Question; 8] = [
    Question::Copy,
    Question::Share,
    Question::Call,
    Question::Restrict,
    Question::File,
    Question::Read,
    Question::Write,
    Question::Take,
];

/// The context that asks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Asker {
    Plain,
    /// Some of its calls, none of those that questions take, arrive in its creator.
    Trapped,
}

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

const ENDINGS: [Ending; 5] = [Ending::Kill, Ending::Fault, Ending::Execute, Ending::Limit, Ending::Stop];

/// A file that both sides have open, at the same number: zeros without an end.
fn zeros() -> &'static File {
    static ZEROS: OnceLock<File> = OnceLock::new();
    ZEROS.get_or_init(|| File::options().read(true).write(true).open("/dev/zero").unwrap())
}

/// Has a call made with the asking context's own descriptors, and the caller's memory; or the reverse.
fn call(caller: Context, own: FromCaller, number: libc::c_long, arguments: [u64; 4]) -> i64 {
    let [a, b, c, d] = arguments;
    // SAFETY: the calls read and write one byte of a page of the case's, or open a file.
    unsafe { caller.syscall(own, call_number(number), [a, b, c, d, 0, 0]) }.unwrap()
}

fn ask(question: Question, caller: Context, page: Pages) {
    const OWN_FILES: FromCaller = FromCaller { memory: false, descriptors: true, credentials: false };
    const OWN_RIGHTS: FromCaller = FromCaller { memory: true, descriptors: false, credentials: true };
    let zeros = u64::from(zeros().as_raw_fd().unsigned_abs());
    let on_page = [zeros, page.address() as u64, 1, 0];
    match question {
        Question::Copy => page.overlay(caller, Overlay::Copy).unwrap(),
        Question::Share => page.overlay(caller, Overlay::Share).unwrap(),
        Question::Call => assert!(call(caller, FromCaller::default(), libc::SYS_getpid, [0; 4]) > 0),
        Question::Restrict => caller.restrict(&[]).unwrap(),
        Question::File => {
            let number = u32::try_from(zeros).unwrap();
            // SAFETY: a number closes here whose file is not used again, and is that of another file then.
            unsafe { caller.overlay_descriptor(number) }.unwrap();
        }
        Question::Read => assert_eq!(call(caller, OWN_FILES, libc::SYS_write, on_page), 1),
        Question::Write => assert_eq!(call(caller, OWN_FILES, libc::SYS_read, on_page), 1),
        Question::Take => {
            let path = c"/dev/null".as_ptr().addr() as u64;
            let here = libc::AT_FDCWD.cast_unsigned().into();
            assert!(call(caller, OWN_RIGHTS, libc::SYS_openat, [here, path, 0, 0]) >= 0);
        }
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
fn asker(kind: Asker, question: Question, ending: Ending, page: Pages) -> Context {
    let number = zeros().as_raw_fd().unsigned_abs();
    let calls = [libc::SYS_getpid, libc::SYS_read, libc::SYS_write, libc::SYS_openat];
    let calls = calls.iter().fold(Calls::none(), |all, call| all.or(&only(*call)));
    let mut spec = Spec::new().may_access(page.address(), PAGE).may_call(&calls).may_fetch(number, number);
    if kind == Asker::Trapped {
        spec = spec.withhold(&only(libc::SYS_uname)).trap(true);
    }
    create(&spec, move |start| {
        ask(question, start.creator, page);
        finish(ending)
    })
    .unwrap()
}

fn check(kind: Asker, question: Question, ending: Ending) {
    let memory = Pages::new(1);
    let other = asker(kind, question, ending, memory.part(0, 1));
    let error = match ending {
        Ending::Limit | Ending::Stop => other.switch_within(0, &[], Duration::from_millis(100)),
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
    assert!(as_specified, "{kind:?}, {question:?}, {ending:?}: {error}");
    other.close().unwrap();
}

/// The same for one that ends the program.
fn check_exit(kind: Asker, question: Question) {
    let status = in_child(|| check(kind, question, Ending::Exit));
    assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7), "{kind:?}, {question:?}");
}

fn each_question_and_ending(kind: Asker) {
    for question in QUESTIONS {
        ENDINGS.into_iter().for_each(|ending| check(kind, question, ending));
        check_exit(kind, question);
    }
}

pub(crate) fn who_asked_its_caller_may_end() {
    each_question_and_ending(Asker::Plain);
}

pub(crate) fn who_is_trapped_and_asked_its_caller_may_end() {
    each_question_and_ending(Asker::Trapped);
}

pub(crate) fn who_asked_its_caller_may_end_far_from_the_root() {
    for question in [Question::Copy, Question::Share, Question::Call, Question::Restrict] {
        let middle = create(&Spec::new(), move |start| {
            check(Asker::Plain, question, Ending::Kill);
            check(Asker::Plain, question, Ending::Limit);
            start.creator.switch(5, &[]).unwrap();
            unreachable!();
        })
        .unwrap();
        assert_eq!(middle.switch(0, &[]).unwrap().word, 5);
    }
}

pub(crate) fn who_asked_its_caller_may_end_on_each_thread() {
    let work = |kind| {
        for question in QUESTIONS {
            for ending in ENDINGS {
                // Which of these errors is reported varies with what the other thread does.
                let memory = Pages::new(1);
                let other = asker(kind, question, ending, memory.part(0, 1));
                let error = other.switch_within(0, &[], Duration::from_millis(100)).unwrap_err();
                let as_specified = matches!(error, Error::Died { .. } | Error::Orphaned | Error::TimedOut);
                assert!(as_specified, "{kind:?}, {question:?}, {ending:?}: {error}");
                other.close().unwrap();
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| work(Asker::Plain));
        scope.spawn(|| work(Asker::Trapped));
    });
    for question in QUESTIONS {
        let status = in_child(|| {
            std::thread::spawn(move || check(Asker::Plain, question, Ending::Exit)).join().unwrap();
        });
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7), "{question:?}");
    }
}

/// Of 200 ms that a context works after a question, its parked caller uses next to none.
pub(crate) fn a_caller_that_answered_sleeps() {
    for kind in [Asker::Plain, Asker::Trapped] {
        let memory = Pages::new(1);
        let page = memory.part(0, 1);
        let mut spec = Spec::new().may_access(page.address(), PAGE);
        if kind == Asker::Trapped {
            spec = spec.withhold(&only(libc::SYS_uname)).trap(true);
        }
        let other = create(&spec, move |start| {
            loop {
                ask(Question::Copy, start.creator, page);
                std::thread::sleep(Duration::from_millis(200));
                start.creator.switch(0, &[]).unwrap();
            }
        })
        .unwrap();
        let time = || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap();
        let round = || {
            let before = time();
            other.switch(0, &[]).unwrap();
            time() - before
        };
        // The smallest of some: copying the page, going to sleep and waking are in it, and caches are others' meanwhile.
        let used = (0..8).map(|_| round()).min().unwrap();
        assert!(used < Duration::from_millis(1), "{kind:?}: {used:?} of processor time while parked");
    }
}
