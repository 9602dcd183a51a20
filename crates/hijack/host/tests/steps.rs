//! Signals at each single instruction on the way of a call: what luck finds seldom, one by one.
//!
//! A tracee (`sources/steps.c`) makes calls at places of each kind. A tracer steps through each of them: the place, its stub, gates, the
//! executive's assembly and functions, the handler of a dispatch, the rewriting of a place. At every instruction it has a
//! signal arrive, whose handler looks at the registers that it is shown, and then returns, leaves by `siglongjmp`, or has the call return
//! something else. Afterwards the program must have what it had: registers, flags, wide registers, control words, red zone, stack; and
//! the call must have been made once.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/facility.rs"]
mod facility;
#[path = "support/stepper.rs"]
mod stepper;

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use stepper::{Point, Stepper, Stop, What, Word};

use facility::ORRERY;
use orrery_testing::Compiler;

const BEGIN: u64 = 1;
const END: u64 = 2;
/// No call takes more instructions, the copies of a page among them.
const MOST: usize = 200_000;

/// Asked about each call, it fits none: so all that the executive does in a call is stepped through.
const ASKED: &str = "[[rule]]\ncall = '*'\nprogram = 'steps'\ncaller = '/nowhere'\ndelay = '1s'\n";
/// Of the paths in `steps.c`, it fits one.
const PATHS: &str = "[[rule]]\ncall = '%file'\npath = ['/dev/denied', '/nowhere/else/**']\ndeny = 'ENOENT'\n";

struct Steps {
    directory: tempfile::TempDir,
}

impl Steps {
    /// Compiles the tracee.
    fn new() -> Option<Self> {
        if facility::is_missing() {
            return None;
        }
        if !std::arch::is_x86_feature_detected!("avx") {
            orrery_testing::skipped!("the processor has no wide registers to look at");
            return None;
        }
        let steps = Self { directory: tempfile::tempdir().unwrap() };
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sources/steps.c");
        Compiler::c().build(&[source], steps.tracee());
        fs::write(steps.path("asked"), ASKED).unwrap();
        fs::write(steps.path("paths"), PATHS).unwrap();
        Some(steps)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn tracee(&self) -> PathBuf {
        self.path("steps")
    }

    /// The tracee, natively or by a way to have an executive, with its handlers on this stack.
    fn start(&self, way: &[&str], stack: &str) -> Stepper {
        let mut words: Vec<PathBuf> = Vec::new();
        if let Some((first, rest)) = way.split_first() {
            words.extend([(*ORRERY).into(), (*first).into()]);
            words.extend(
                rest.iter().map(|word| word.strip_prefix('@').map_or((*word).into(), |name| self.path(name))),
            );
            words.push("--".into());
        }
        words.extend([self.tracee(), stack.into()]);
        let mut command = Command::new("timeout");
        let longest = if is_whole() { "3000" } else { "300" };
        command.args(["--foreground", "--signal=KILL", longest]).args(words);
        Stepper::start(&mut command)
    }
}

/// What went wrong, and where a signal had arrived.
#[derive(Default)]
struct Found {
    problems: Vec<String>,
    wrong: u64,
    hidden: u64,
    arrived: usize,
}

impl Found {
    /// Looks whether handlers or calls complained since last time.
    fn look(&mut self, stepper: &Stepper, about: &str, point: Point) {
        self.arrived += 1;
        let [wrong, hidden] = [Word::Wrong, Word::Hidden].map(|word| stepper.get(word));
        if wrong != self.wrong {
            self.problems.push(format!("{about}, {}: {}", stepper.place_of(point.rip), stepper.complaint()));
        }
        if hidden != self.hidden {
            self.problems
                .push(format!("{about}, {}: the handler saw the executive", stepper.place_of(point.rip)));
        }
        (self.wrong, self.hidden) = (wrong, hidden);
    }
}

/// Steps from mark to mark, and has something done at each instruction.
fn each(stepper: &mut Stepper, mut act: impl FnMut(&mut Stepper, Point, usize)) -> usize {
    let mut pending = 0;
    for step in 0..MOST {
        match stepper.step(pending) {
            Stop::Step => {
                pending = 0;
                act(stepper, stepper.registers().into(), step);
            }
            // What was blocked when it was sent.
            Stop::Signal(signal @ (libc::SIGUSR1 | libc::SIGUSR2)) => {
                stepper.interrupt(signal).unwrap();
                pending = 0;
            }
            Stop::Signal(signal) => pending = signal,
            Stop::Breakpoint => pending = 0,
            Stop::Mark(END) => return step,
            other => panic!("{other:?} at {}", stepper.place_of(stepper.registers().rip)),
        }
    }
    panic!("the call has no end");
}

/// Handlers return: one pass, with a signal at every instruction. In loops, not in each turn.
fn returning(stepper: &mut Stepper, name: &str, found: &mut Found) {
    let turns = if is_whole() { 16 } else { 2 };
    let mut visits: HashMap<u64, usize> = HashMap::new();
    stepper.set(Word::What, What::Return as u64);
    each(stepper, |stepper, point, _| {
        let visit = visits.entry(point.rip).or_default();
        *visit += 1;
        if *visit > turns {
            return;
        }
        // Handlers that make calls as well come through the instruction once more, and often through loops.
        stepper.set(Word::Busy, u64::from(*visit == 1 && is_whole()));
        if let Err(stop) = stepper.interrupt(libc::SIGUSR1) {
            panic!("{name}: interrupted at {}, it went on elsewhere: {stop:?}", stepper.place_of(point.rip));
        }
        found.look(stepper, name, point);
    });
    stepper.set(Word::Again, 0);
}

/// A second signal arrives while the first one's handler is begun, runs, or returns: at another instruction of that each time.
fn nesting(stepper: &mut Stepper, name: &str, found: &mut Found) {
    /// Coprime to whatever a handler's length is.
    const STRIDE: usize = 37;
    /// A context and a siginfo.
    const SMALLEST_FRAME: u64 = 432;
    stepper.set(Word::What, What::Return as u64);
    stepper.set(Word::Busy, 0);
    let every = if is_whole() { 1 } else { 11 };
    let turns = if is_whole() { 16 } else { 1 };
    let mut visits: HashMap<u64, usize> = HashMap::new();
    let (mut length, mut inner) = (STRIDE + 1, 0);
    each(stepper, |stepper, outer, step| {
        let visit = visits.entry(outer.rip).or_default();
        *visit += 1;
        if step % every != 0 || *visit > turns || stepper.is_at_popf() || stepper.is_blocked(libc::SIGUSR1) {
            return;
        }
        stepper.come_back();
        inner = (inner + STRIDE) % length;
        let mut pending = libc::SIGUSR1;
        for gone in 0.. {
            match stepper.step(pending) {
                Stop::Step | Stop::Breakpoint => pending = 0,
                Stop::Signal(signal) => {
                    pending = signal;
                    continue;
                }
                other => panic!("{name}: {other:?}"),
            }
            let point = Point::from(stepper.registers());
            // Where the kernel has just made a signal's frame and says so, it takes no other signal from a tracer.
            if gone == 0 && outer.rsp.wrapping_sub(point.rsp) < SMALLEST_FRAME {
                return;
            }
            if point == outer {
                // The handler had fewer instructions than were wanted: now it is known how many.
                length = gone;
                break;
            }
            if gone == inner {
                length = length.max(gone + STRIDE);
                stepper
                    .interrupt(libc::SIGUSR2)
                    .unwrap_or_else(|stop| panic!("{name}: {stop:?} within {}", stepper.place_of(point.rip)));
                assert!(
                    stepper.run_to_point(outer, 0),
                    "{name}: two signals at {} and {}, and it went on elsewhere",
                    stepper.place_of(outer.rip),
                    stepper.place_of(point.rip)
                );
                found.look(stepper, name, point);
                break;
            }
        }
    });
    stepper.set(Word::Again, 0);
}

/// Handlers leave for good, or change what the call returns: the call is made again for each instruction.
fn leaving(what: What, stepper: &mut Stepper, name: &str, found: &mut Found) {
    /// How many places that were not rewritten the tracee has for all of this.
    const FRESH: usize = 40;
    stepper.set(Word::Busy, 0);
    stepper.set(Word::Again, 1);
    // The second time, all that is remembered is.
    let mut path = Vec::new();
    for _ in 0..2 {
        path.clear();
        each(stepper, |_, point, _| path.push(point));
        assert_eq!(stepper.run_to_mark(), Stop::Mark(BEGIN));
    }
    // Of long ways, not all instructions; and there are only so many places that were not rewritten.
    let most = match name {
        "rewritten" => FRESH,
        _ if is_whole() => path.len(),
        _ => 70,
    };
    let stride = path.len().div_ceil(most);
    let mut before: HashMap<Point, usize> = HashMap::new();
    for (index, point) in path.iter().enumerate() {
        let nth = before.entry(*point).or_default();
        let seen = std::mem::replace(nth, *nth + 1);
        // It would be stopped at all turns of a loop before the one that is meant.
        if index % stride != 0 || (seen > 3 && !is_whole()) {
            continue;
        }
        stepper.set(Word::What, what as u64);
        let stop = if stepper.run_to_point(*point, seen) {
            stepper.run_to_mark_with(libc::SIGUSR1)
        } else {
            Stop::Mark(END)
        };
        assert_eq!(stop, Stop::Mark(END), "{name}: {what:?} at {}", stepper.place_of(point.rip));
        assert_eq!(
            stepper.run_to_mark(),
            Stop::Mark(BEGIN),
            "{name}: {what:?} at {}",
            stepper.place_of(point.rip)
        );
        found.look(stepper, name, *point);
    }
    stepper.set(Word::What, What::Return as u64);
    stepper.set(Word::Again, 0);
    assert_eq!(stepper.run_to_mark(), Stop::Mark(END));
}

/// `ORRERY_STEPS` has more of it done: each turn of a loop, each instruction of a long way.
fn is_whole() -> bool {
    std::env::var_os("ORRERY_STEPS").is_some()
}

/// Does something with each kind of call, and gives how many signals arrived.
fn walk(steps: &Steps, way: &[&str], stack: &str, mut act: impl FnMut(&mut Stepper, &str, &mut Found)) {
    let mut stepper = steps.start(way, stack);
    let mut found = Found::default();
    loop {
        match stepper.run_to_mark() {
            Stop::Mark(BEGIN) => {
                let name = stepper.text(stepper.registers().rsi);
                // While a call is counted, the flags are where only the next instructions know.
                stepper.set(Word::Lax, u64::from(way.contains(&"--untimed")));
                act(&mut stepper, &name, &mut found);
            }
            Stop::Ended => break,
            other => panic!("{way:?}: {other:?}"),
        }
    }
    let (said, status) = stepper.finish();
    let problems = &found.problems;
    let some = problems.iter().take(40).cloned().collect::<Vec<_>>().join("\n");
    assert!(problems.is_empty(), "{way:?}, stack {stack}: {} problems\n{some}\n{said}", problems.len());
    assert_eq!(status, 0, "{way:?}: {said}");
    assert!(found.arrived > 100, "{way:?}: {} signals arrived", found.arrived);
}

const WAYS: [&[&str]; 9] = [
    // Without executive: what this test takes for right is so.
    &[],
    &["run"],
    &["run", "--no-patch"],
    &["run", "--policy", "@asked"],
    &["run", "--policy", "@paths"],
    &["run", "--remember", "process", "--sleep", "precise"],
    &["trace", "-c", "-o", "/dev/null"],
    &["trace", "-c", "--untimed", "-o", "/dev/null"],
    &["trace", "-o", "/dev/null"],
];

#[test]
fn handlers_return_to_each_instruction() {
    let Some(steps) = Steps::new() else { return };
    for way in WAYS {
        walk(&steps, way, "own", returning);
    }
}

#[test]
fn handlers_on_other_stacks_return_to_each_instruction() {
    let Some(steps) = Steps::new() else { return };
    for stack in ["small", "roomy"] {
        for way in [WAYS[0], WAYS[3]] {
            walk(&steps, way, stack, returning);
        }
    }
}

#[test]
fn signals_interrupt_handlers_at_each_instruction() {
    let Some(steps) = Steps::new() else { return };
    let ways = if is_whole() { &WAYS[..] } else { &WAYS[..5] };
    for way in ways {
        walk(&steps, way, "own", nesting);
    }
}

#[test]
fn handlers_leave_each_instruction_for_good() {
    let Some(steps) = Steps::new() else { return };
    for way in WAYS {
        walk(&steps, way, "own", |stepper, name, found| leaving(What::Leave, stepper, name, found));
    }
}

#[test]
fn handlers_change_what_a_call_returns_at_each_instruction() {
    let Some(steps) = Steps::new() else { return };
    for way in WAYS {
        walk(&steps, way, "own", |stepper, name, found| leaving(What::Change, stepper, name, found));
    }
}
