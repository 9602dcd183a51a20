//! A tracer that knows each instruction on the way of a call, and can have a signal arrive at any of them: ptrace(2) with single
//! steps, and the processor's own breakpoints (which are no bytes in the code, and so disturb nothing).

use std::collections::HashMap;
use std::ffi::c_void;
use std::io::{BufRead, BufReader, Read, Write};
use std::mem::{MaybeUninit, offset_of};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::ptr::{null_mut, with_exposed_provenance_mut};

pub(crate) type Registers = libc::user_regs_struct;

/// `si_code` of a breakpoint's trap, and of an `int3`.
const HARDWARE: i32 = 4;
const MARK: i32 = 0x80;
/// From `linux/ptrace.h`.
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
/// An instruction that pushes the flags, with the one that has us step.
const PUSHF: u8 = 0x9c;
const POPF: u8 = 0x9d;
const TRAP_FLAG: u64 = 1 << 8;
/// Breakpoints are not to be passed over.
const RESUME_FLAG: u64 = 1 << 16;

/// Words of the tracee's `state`.
#[derive(Clone, Copy)]
pub(crate) enum Word {
    What,
    Again,
    Busy,
    Lax,
    Wrong,
    Hidden = 6,
}

/// What handlers do: see `steps.c`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    Return,
    Leave,
    Change,
}

/// Where a thread stands: by instruction and stack pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Point {
    pub(crate) rip: u64,
    pub(crate) rsp: u64,
}

impl From<Registers> for Point {
    fn from(registers: Registers) -> Self {
        Self { rip: registers.rip, rsp: registers.rsp }
    }
}

/// Why the tracee stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The thread stopped after an instruction.
    Step,
    /// The thread stopped at a breakpoint.
    Breakpoint,
    /// The tracee's own mark: one where a call begins, two where it has ended.
    Mark(u64),
    /// It is to get a signal.
    Signal(i32),
    Ended,
}

pub(crate) struct Stepper {
    tracee: Child,
    pid: libc::pid_t,
    output: BufReader<ChildStdout>,
    /// Where the tracee's `state` is.
    state: u64,
    /// First bytes of instructions.
    opcodes: HashMap<u64, u8>,
    /// How it ended, as the kernel puts it.
    ended: Option<i32>,
    /// It runs since it was traced, and has to be waited for before anything else.
    runs: bool,
}

fn ptrace(request: libc::c_uint, pid: libc::pid_t, at: u64, data: u64) -> i64 {
    let pointer = |value: u64| with_exposed_provenance_mut::<c_void>(usize::try_from(value).unwrap());
    // SAFETY: requests that take numbers, or addresses of the tracee's; the callers below pass nothing else, but for a place to
    // write to.
    unsafe { libc::ptrace(request, pid, pointer(at), pointer(data)) }
}

/// Has this thread and what it starts run on one processor: a step is a switch, and not a wake-up across processors.
fn stay_on_one_processor() {
    // SAFETY: a set of the size given; the calls change it, or read it.
    unsafe {
        let mut set = MaybeUninit::<libc::cpu_set_t>::zeroed().assume_init();
        let one = libc::sched_getcpu();
        libc::CPU_SET(usize::try_from(one).unwrap_or(0), &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

impl Stepper {
    /// Starts the tracee by this command, and traces it from where it says its number.
    pub(crate) fn start(command: &mut Command) -> Self {
        stay_on_one_processor();
        let mut tracee = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(tracee.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let pid = line.trim().parse().unwrap_or_else(|_| panic!("{command:?} said {line:?}"));
        let options = u64::try_from(libc::PTRACE_O_EXITKILL).unwrap();
        assert_eq!(ptrace(libc::PTRACE_SEIZE, pid, 0, options), 0, "{}", std::io::Error::last_os_error());
        tracee.stdin.take().unwrap().write_all(b"x").unwrap();
        Self { tracee, pid, output, state: 0, opcodes: HashMap::new(), ended: None, runs: true }
    }

    pub(crate) fn registers(&self) -> Registers {
        let mut registers = MaybeUninit::<Registers>::uninit();
        // SAFETY: the kernel writes the whole structure.
        unsafe {
            let done =
                libc::ptrace(libc::PTRACE_GETREGS, self.pid, null_mut::<c_void>(), registers.as_mut_ptr());
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
            registers.assume_init()
        }
    }

    fn set_register(&self, offset: usize, value: u64) {
        let done = ptrace(libc::PTRACE_POKEUSER, self.pid, offset.try_into().unwrap(), value);
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }

    fn peek(&self, at: u64) -> u64 {
        ptrace(libc::PTRACE_PEEKDATA, self.pid, at, 0).cast_unsigned()
    }

    fn poke(&self, at: u64, value: u64) {
        assert_eq!(ptrace(libc::PTRACE_POKEDATA, self.pid, at, value), 0);
    }

    pub(crate) fn get(&self, word: Word) -> u64 {
        self.peek(self.state + 8 * word as u64)
    }

    pub(crate) fn set(&self, word: Word, value: u64) {
        self.poke(self.state + 8 * word as u64, value);
    }

    /// Returns the tracee's text at an address.
    pub(crate) fn text(&self, mut at: u64) -> String {
        let mut bytes = Vec::new();
        loop {
            for byte in self.peek(at).to_le_bytes() {
                if byte == 0 || bytes.len() > 255 {
                    return String::from_utf8_lossy(&bytes).into_owned();
                }
                bytes.push(byte);
            }
            at += 8;
        }
    }

    /// Returns what the tracee said of the last thing that was wrong.
    pub(crate) fn complaint(&self) -> String {
        self.text(self.state + 8 * 8)
    }

    fn wait(&mut self) -> Stop {
        let mut status = 0;
        // SAFETY: waits for the tracee, and writes to the integer.
        let pid = unsafe { libc::waitpid(self.pid, &raw mut status, libc::__WALL) };
        if pid != self.pid || !libc::WIFSTOPPED(status) {
            self.ended = Some(status);
            return Stop::Ended;
        }
        let signal = libc::WSTOPSIG(status);
        if signal != libc::SIGTRAP {
            return Stop::Signal(signal);
        }
        let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
        // SAFETY: the kernel writes the whole structure.
        let code = unsafe {
            libc::ptrace(libc::PTRACE_GETSIGINFO, self.pid, null_mut::<c_void>(), info.as_mut_ptr());
            info.assume_init().si_code
        };
        match code {
            HARDWARE => Stop::Breakpoint,
            MARK => {
                let registers = self.registers();
                self.state = registers.rdi;
                Stop::Mark(registers.rax)
            }
            _ => Stop::Step,
        }
    }

    /// Runs the tracee on, having it get a signal first (zero: none).
    pub(crate) fn run(&mut self, signal: i32) -> Stop {
        ptrace(libc::PTRACE_CONT, self.pid, 0, signal.try_into().unwrap());
        self.wait()
    }

    /// Runs the tracee to its next mark, with the signals that it gets.
    pub(crate) fn run_to_mark(&mut self) -> Stop {
        self.run_to_mark_with(0)
    }

    /// The same, and it gets this one first.
    pub(crate) fn run_to_mark_with(&mut self, signal: i32) -> Stop {
        let mut stop = if std::mem::take(&mut self.runs) {
            self.wait()
        } else {
            self.stop_at(None);
            self.run(signal)
        };
        loop {
            stop = match stop {
                Stop::Signal(signal) => self.run(signal),
                Stop::Step | Stop::Breakpoint => self.run(0),
                mark => return mark,
            };
        }
    }

    /// Executes one instruction; with a signal, goes to the first one of its handler.
    pub(crate) fn step(&mut self, signal: i32) -> Stop {
        let rip = self.registers().rip;
        let opcode = self.opcode(rip);
        ptrace(libc::PTRACE_SINGLESTEP, self.pid, 0, signal.try_into().unwrap());
        let stop = self.wait();
        if stop == Stop::Step && opcode == PUSHF && signal == 0 {
            // What it pushed says that we step.
            let at = self.registers().rsp;
            self.poke(at, self.peek(at) & !TRAP_FLAG);
        }
        stop
    }

    fn opcode(&mut self, rip: u64) -> u8 {
        let pid = self.pid;
        *self
            .opcodes
            .entry(rip)
            .or_insert_with(|| ptrace(libc::PTRACE_PEEKTEXT, pid, rip, 0).to_le_bytes()[0])
    }

    /// Returns whether a signal with a step would leave the trap flag to the program.
    pub(crate) fn is_at_popf(&mut self) -> bool {
        let rip = self.registers().rip;
        self.opcode(rip) == POPF
    }

    /// Has breakpoints hold where the tracee stands once more: not if a breakpoint has led here, or steps of a string's copy.
    pub(crate) fn come_back(&self) {
        let flags = self.registers().eflags;
        self.set_register(offset_of!(Registers, eflags), flags & !RESUME_FLAG);
    }

    /// Has the tracee stop when it comes to this instruction.
    fn stop_at(&self, rip: Option<u64>) {
        let control = offset_of!(libc::user, u_debugreg) + 7 * 8;
        if let Some(rip) = rip {
            self.set_register(offset_of!(libc::user, u_debugreg), rip);
        }
        self.set_register(control, u64::from(rip.is_some()));
    }

    /// Runs to a point, which the tracee comes to for the `nth` time (from zero): whether it does.
    pub(crate) fn run_to_point(&mut self, point: Point, mut nth: usize) -> bool {
        self.stop_at(Some(point.rip));
        let mut stop = self.run(0);
        loop {
            stop = match stop {
                Stop::Breakpoint if nth == 0 && Point::from(self.registers()) == point => return true,
                Stop::Breakpoint => {
                    nth = nth.saturating_sub(usize::from(Point::from(self.registers()) == point));
                    self.run(0)
                }
                Stop::Signal(signal) => self.run(signal),
                Stop::Step => self.run(0),
                Stop::Mark(_) | Stop::Ended => return false,
            };
        }
    }

    /// Has a signal arrive where the tracee stands, and lets its handler run: whether the tracee then goes on from there.
    pub(crate) fn interrupt(&mut self, signal: i32) -> Result<(), Stop> {
        let registers = self.registers();
        let here = Point::from(registers);
        self.stop_at(Some(here.rip));
        self.come_back();
        let mut stop = self.run(signal);
        loop {
            stop = match stop {
                Stop::Breakpoint if Point::from(self.registers()) == here => {
                    self.stop_at(None);
                    return Ok(());
                }
                Stop::Breakpoint | Stop::Step => self.run(0),
                Stop::Signal(signal) => self.run(signal),
                other => return Err(other),
            };
        }
    }

    /// Returns what is mapped at an address, for messages.
    pub(crate) fn place_of(&self, rip: u64) -> String {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap_or_default();
        let found = maps.lines().find_map(|line| {
            let (range, _) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            let (start, end) = (number(start)?, number(end)?);
            let name = line.split_whitespace().nth(5).unwrap_or("anonymous");
            (start <= rip && rip < end).then(|| format!("{name}+{:#x}", rip - start))
        });
        found.unwrap_or_else(|| format!("{rip:#x}"))
    }

    /// Returns whether a signal could arrive now.
    pub(crate) fn is_blocked(&self, signal: i32) -> bool {
        let mut blocked = 0_u64;
        // SAFETY: the kernel writes so many bytes.
        unsafe {
            let size = with_exposed_provenance_mut::<c_void>(size_of::<u64>());
            libc::ptrace(PTRACE_GETSIGMASK, self.pid, size, &raw mut blocked);
        }
        blocked >> (signal - 1) & 1 != 0
    }

    /// Returns what the tracee said, and how it ended: its status, or that of the signal.
    pub(crate) fn finish(mut self) -> (String, i32) {
        let mut said = String::new();
        self.output.read_to_string(&mut said).unwrap();
        let status = match self.ended {
            Some(status) if u32::try_from(self.pid) == Ok(self.tracee.id()) => status,
            _ => self.tracee.wait().unwrap().into_raw(),
        };
        (said, status)
    }
}
