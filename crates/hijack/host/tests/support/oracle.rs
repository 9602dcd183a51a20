//! What the kernel saw of a program and all that it starts: each call that was performed, and from which instruction.
//!
//! The kernel's tracepoint of system calls is read through perf(2), which slows a program by next to nothing, changes
//! nothing for it, and is inherited by all that it starts. Syscall user dispatch comes before that tracepoint, so a call
//! that was dispatched is not seen; what is seen was performed. An executive performs calls from the range that it named
//! when it armed dispatch, which was a call, too. A call from anywhere else was missed, whatever thread or process it was
//! made by, and whenever.
//!
//! The few calls that the supervisor has a new program make before its first instruction, and those of `orrery` itself, are
//! told from the others by what the kernel says of `fork` and `execve`, in the order of time.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write, pipe};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::perf::{Attributes, Ring};
use super::tracefs;

const PR_SET_SYSCALL_USER_DISPATCH: u64 = 59;
const ON: u64 = 1;
const SYS_MSEAL: i64 = 462;
/// What is missed where the kernel's buffers were full before they were read.
pub(crate) const LOST: &str = "some of what the kernel saw";

/// What a supervisor has a new program do.
const PREPARING: [i64; 12] = [
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_madvise,
    libc::SYS_mprotect,
    libc::SYS_shmat,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_capget,
    libc::SYS_shmdt,
    libc::SYS_rt_sigaction,
    libc::SYS_prctl,
    SYS_MSEAL,
];
/// How a try to put an executive there ends: with a signal to itself, for the supervisor.
const ENDING: [i64; 3] = [libc::SYS_getpid, libc::SYS_gettid, libc::SYS_rt_tgsigqueueinfo];
/// So many calls that were missed are told.
const TOLD: usize = 10;

/// The events that the kernel reported.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// How often each call was performed by executives.
    pub(crate) performed: BTreeMap<i64, u64>,
    /// Calls that came from elsewhere.
    pub(crate) missed: Vec<String>,
    /// How many programs were given an executive.
    pub(crate) programs: u64,
}

/// Runs a command to its end, and looks at it and all that it starts.
///
/// # Errors
/// Why not: where the kernel has no such tracepoint, or not for us.
pub(crate) fn watch(mut command: Command) -> Result<(Output, Seen), String> {
    let tracepoint = tracefs::tracepoint("raw_syscalls/sys_enter")?;
    let (mut child, told) = pipe().unwrap();
    let (wait, mut go) = pipe().unwrap();
    let (told, wait) = (OwnedFd::from(told), OwnedFd::from(wait));
    let (telling, waiting) = (told.as_raw_fd(), wait.as_raw_fd());
    // SAFETY: the child makes calls only, and allocates nothing. It waits until somebody looks.
    unsafe {
        command.pre_exec(move || {
            let (own, mut byte) = (libc::getpid(), 0_u8);
            libc::write(telling, (&raw const own).cast(), size_of_val(&own));
            libc::read(waiting, (&raw mut byte).cast(), 1);
            Ok(())
        });
    }
    let running = thread::spawn(move || {
        let output = command.output();
        drop((told, wait));
        output
    });
    let mut number = [0; size_of::<libc::pid_t>()];
    child.read_exact(&mut number).unwrap();
    let rings = open(libc::pid_t::from_ne_bytes(number), tracepoint);
    let _sent = go.write(b"x");
    let ended = AtomicBool::new(false);
    let (output, events) = thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut events = Vec::new();
            while let Ok(rings) = &rings {
                let last = ended.load(Ordering::Acquire);
                rings.iter().for_each(|ring| {
                    ring.drain(|kind, miscellaneous, body| {
                        events.extend(Event::read(kind, miscellaneous, body));
                    })
                });
                if last {
                    break;
                }
                thread::sleep(Duration::from_millis(2));
            }
            events
        });
        let output = running.join().unwrap();
        ended.store(true, Ordering::Release);
        (output, reading.join().unwrap())
    });
    rings?;
    Ok((output.map_err(|error| error.to_string())?, judge(events)))
}

/// One ring for each CPU.
fn open(child: libc::pid_t, tracepoint: u64) -> Result<Vec<Ring>, String> {
    let attributes = Attributes::of_calls(tracepoint);
    // SAFETY: the call takes no pointer.
    let processors = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    let rings = (0..processors).filter_map(|processor| {
        // SAFETY: the attributes live while the kernel copies them; the descriptor is new.
        let opened = unsafe {
            let number =
                libc::syscall(libc::SYS_perf_event_open, &raw const attributes, child, processor, -1, 8);
            match i32::try_from(number) {
                Ok(number) if number >= 0 => Ok(OwnedFd::from_raw_fd(number)),
                _ => Err(std::io::Error::last_os_error()),
            }
        };
        match opened {
            // A CPU that is not there.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => None,
            Err(error) => Some(Err(format!("perf_event_open: {error}"))),
            Ok(descriptor) => Some(Ring::map(descriptor)),
        }
    });
    rings.collect()
}

/// Something that happened in a thread.
#[derive(Debug)]
struct Event {
    time: u64,
    thread: u32,
    what: What,
}

#[derive(Debug)]
enum What {
    /// It performs a call; the range is what it names, should it arm dispatch.
    Call { number: i64, from: u64, arms: Option<Range<u64>> },
    /// It was made by another one.
    Born { by: u32 },
    /// It has executed a program.
    Executed { name: String },
    /// Some of this is lost.
    Lost,
}

impl Event {
    /// Reads what the kernel writes: `PERF_RECORD_*`, with thread and time as they were asked for.
    fn read(kind: u32, miscellaneous: u16, body: &[u8]) -> Option<Self> {
        let half =
            |at: usize| body.get(at..at + 4).map_or(0, |bytes| u32::from_ne_bytes(bytes.try_into().unwrap()));
        let word =
            |at: usize| body.get(at..at + 8).map_or(0, |bytes| u64::from_ne_bytes(bytes.try_into().unwrap()));
        match kind {
            Attributes::SAMPLE => {
                // pid, tid, time, size and data of the tracepoint, kind and values of registers
                let data = 20;
                let argument = |index: usize| word(data + 16 + 8 * index);
                let number = word(data + 8).cast_signed();
                let from = word(body.len() - 8);
                let arms = number == libc::SYS_prctl
                    && (argument(0), argument(1)) == (PR_SET_SYSCALL_USER_DISPATCH, ON);
                let arms = arms.then(|| argument(2)..argument(2) + argument(3));
                Some(Self { time: word(8), thread: half(4), what: What::Call { number, from, arms } })
            }
            // pid, ppid, tid, ptid, time
            Attributes::FORK => {
                Some(Self { time: word(16), thread: half(8), what: What::Born { by: half(12) } })
            }
            // pid, tid, name; and behind it pid, tid, time
            Attributes::COMM if miscellaneous & Attributes::BY_EXEC != 0 => {
                let name = body[8..body.len() - 16].iter().take_while(|byte| **byte != 0).copied().collect();
                let name = String::from_utf8(name).unwrap_or_default();
                Some(Self { time: word(body.len() - 8), thread: half(4), what: What::Executed { name } })
            }
            Attributes::LOST => Some(Self { time: 0, thread: 0, what: What::Lost }),
            _ => None,
        }
    }
}

/// What a thread runs.
#[derive(Debug, Clone)]
enum State {
    /// The thread runs `orrery` itself.
    Own,
    /// A program that has no executive yet, and the calls with which a try to put one there may have ended: the first one fails where
    /// the program is another user's, to whom the board is lent for the second.
    New(String, Vec<(i64, u64)>),
    /// A program, and where its executive is.
    Tracee(String, Range<u64>),
}

fn judge(mut events: Vec<Event>) -> Seen {
    events.sort_by_key(|event| event.time);
    let mut seen = Seen::default();
    let mut threads: HashMap<u32, State> = HashMap::new();
    for event in events {
        let state = threads.get(&event.thread).cloned();
        let missed = match (event.what, state) {
            (What::Born { by }, _) => {
                if let Some(state) = threads.get(&by).cloned() {
                    threads.insert(event.thread, state);
                }
                None
            }
            (What::Executed { name }, _) => {
                let state = if name == "orrery" { State::Own } else { State::New(name, Vec::new()) };
                threads.insert(event.thread, state);
                None
            }
            (What::Call { number, from, .. }, Some(State::Tracee(_, code))) if code.contains(&from) => {
                *seen.performed.entry(number).or_default() += 1;
                None
            }
            (What::Call { number, arms, .. }, Some(State::New(name, ended)))
                if PREPARING.contains(&number) =>
            {
                let Some(code) = arms else { continue };
                seen.programs += 1;
                let strange = ended.into_iter().find(|(_, from)| !code.contains(from));
                let missed = strange.map(|(number, from)| {
                    format!(
                        "call {number} from {from:#x}, by {name}, before it had an executive ({})",
                        event.thread
                    )
                });
                threads.insert(event.thread, State::Tracee(name, code));
                missed
            }
            // Who is killed then makes no further call.
            (What::Call { number, from, .. }, Some(State::New(name, mut ended)))
                if ENDING.get(ended.len() % ENDING.len()) == Some(&number) =>
            {
                ended.push((number, from));
                threads.insert(event.thread, State::New(name, ended));
                None
            }
            (What::Call { .. }, Some(State::Own)) => None,
            (What::Call { number, from, .. }, state) => {
                let whose = match state {
                    Some(State::Tracee(name, _)) => name,
                    Some(State::New(name, _)) => format!("{name}, which had no executive"),
                    _ => "a thread that nobody made".to_owned(),
                };
                Some(format!("call {number} from {from:#x}, by {whose} ({})", event.thread))
            }
            (What::Lost, _) => Some(LOST.to_owned()),
        };
        if seen.missed.len() < TOLD {
            seen.missed.extend(missed);
        }
    }
    seen
}
