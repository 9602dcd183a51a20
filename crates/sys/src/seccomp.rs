//! Seccomp filters: building, installing and simulating them ([seccomp(2)](https://man7.org/linux/man-pages/man2/seccomp.2.html)).
//!
//! A [`Filter`] maps system call numbers to rules, and compiles to a classic BPF program: a binary search over runs of numbers
//! with equal rules, whose leaves test arguments in order. The kernel evaluates such a program once per number when it is
//! installed, and remembers in a bitmap which calls are always allowed; those cost nothing.
//!
//! The crate `seccompiler` is not used, because it has no user notification, one action per filter only, and no runs of
//! numbers, which sets of several thousand unknown numbers need.
//!
//! Building a filter allocates. [`install`] makes two system calls and nothing else, so that it can be called between `fork`
//! and `exec`.

use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, OwnedFd};

pub use linux_raw_sys::ptrace::sock_filter;
use linux_raw_sys::ptrace::{
    BPF_ABS, BPF_ALU, BPF_AND, BPF_JA, BPF_JEQ, BPF_JGE, BPF_JGT, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET,
    BPF_W, SECCOMP_FILTER_FLAG_NEW_LISTENER, SECCOMP_FILTER_FLAG_TSYNC,
    SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO, SECCOMP_RET_KILL_PROCESS,
    SECCOMP_RET_KILL_THREAD, SECCOMP_RET_TRAP, SECCOMP_RET_USER_NOTIF, SECCOMP_SET_MODE_FILTER, sock_fprog,
};
use rustix::io::Errno;
use syscalls::{Sysno, syscall};

/// What the kernel does with a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It performs the call.
    Allow,
    /// The call fails with this error.
    Fail(Errno),
    /// The thread gets `SIGSYS`.
    Trap,
    /// The caller waits until the listener answers ([`crate::notify`]).
    Notify,
    /// The thread is killed, and the process with its last thread.
    KillThread,
    /// The process is killed.
    KillProcess,
}

impl Action {
    /// Returns the value with which a BPF program returns this action (`SECCOMP_RET_*`).
    #[must_use]
    pub fn value(self) -> u32 {
        match self {
            Self::Allow => SECCOMP_RET_ALLOW,
            Self::Fail(errno) => SECCOMP_RET_ERRNO | errno.raw_os_error().unsigned_abs(),
            Self::Trap => SECCOMP_RET_TRAP,
            Self::Notify => SECCOMP_RET_USER_NOTIF,
            Self::KillThread => SECCOMP_RET_KILL_THREAD,
            Self::KillProcess => SECCOMP_RET_KILL_PROCESS,
        }
    }
}

/// A condition on the arguments of a call, numbered 0 to 5. A filter sees values, never what a pointer points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// True for all arguments.
    Always,
    /// Any of these bits is set in the lower half of the argument.
    AnyBit {
        /// Index of the argument.
        argument: u8,
        /// The bits.
        bits: u32,
    },
    /// The lower half of the argument equals the value.
    Equals {
        /// Index of the argument.
        argument: u8,
        /// The value.
        value: u32,
    },
    /// The lower half of the argument differs from the value.
    Differs {
        /// Index of the argument.
        argument: u8,
        /// The value.
        value: u32,
    },
    /// All 64 bits of the argument equal the value.
    EqualsWide {
        /// Index of the argument.
        argument: u8,
        /// The value.
        value: u64,
    },
    /// The argument is not a null pointer: any of its 64 bits is set.
    NotNull {
        /// Index of the argument.
        argument: u8,
    },
    /// Each argument compares as its entry, if it has one, says.
    Compares([Option<Comparison>; 6]),
    /// The call is made by an instruction that ends at one of these addresses. Code that can be jumped to is no boundary.
    /// False where a filter is asked without a program that calls ([`Filter::action`]).
    CalledFrom {
        /// The lowest address.
        start: u64,
        /// The address after the last one.
        end: u64,
    },
}

impl Condition {
    #[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
    fn holds(self, arguments: &[u64; 6]) -> bool {
        let whole = |argument: u8| arguments.get(usize::from(argument)).copied().unwrap_or(0);
        match self {
            Self::Always => true,
            Self::AnyBit { argument, bits } => whole(argument) as u32 & bits != 0,
            Self::Equals { argument, value } => whole(argument) as u32 == value,
            Self::Differs { argument, value } => whole(argument) as u32 != value,
            Self::EqualsWide { argument, value } => whole(argument) == value,
            Self::NotNull { argument } => whole(argument) != 0,
            Self::Compares(all) => {
                all.iter().zip(arguments).all(|(one, value)| one.is_none_or(|one| one.holds(*value)))
            }
            Self::CalledFrom { .. } => false,
        }
    }
}

/// How all 64 bits of an argument compare with a value, as unsigned numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// It equals the value.
    Equal(u64),
    /// It differs from the value.
    NotEqual(u64),
    /// It is less than the value.
    Less(u64),
    /// It is the value, or less.
    LessOrEqual(u64),
    /// It is greater than the value.
    Greater(u64),
    /// It is the value, or greater.
    GreaterOrEqual(u64),
    /// Its bits under the mask equal the value.
    MaskedEqual {
        /// The bits that count.
        mask: u64,
        /// What they equal.
        value: u64,
    },
}

impl Comparison {
    /// Returns whether it holds for an argument.
    #[must_use]
    pub fn holds(self, argument: u64) -> bool {
        match self {
            Self::Equal(value) => argument == value,
            Self::NotEqual(value) => argument != value,
            Self::Less(value) => argument < value,
            Self::LessOrEqual(value) => argument <= value,
            Self::Greater(value) => argument > value,
            Self::GreaterOrEqual(value) => argument >= value,
            Self::MaskedEqual { mask, value } => argument & mask == value,
        }
    }

    /// Returns code that goes on behind itself where the comparison holds, and skips `rest` instructions more where not.
    fn code(self, argument: u8, rest: u8) -> Vec<sock_filter> {
        let low = load(ARGUMENTS + 8 * u32::from(argument));
        let high = load(ARGUMENTS + 8 * u32::from(argument) + 4);
        #[expect(clippy::cast_possible_truncation, reason = "the two halves are taken apart")]
        let halves = |value: u64| ((value >> 32) as u32, value as u32);
        let and = |bits| instruction(BPF_ALU | BPF_AND | BPF_K, bits, 0, 0);
        // The lower halves decide where the upper ones are equal: by `comparison`, which is to hold or not to.
        let ordered = |value, comparison, holds: bool, greater: bool| {
            let (upper, lower) = halves(value);
            let above = if greater { jump(BPF_JGT, upper, 3, 0) } else { jump(BPF_JGT, upper, rest + 3, 0) };
            let below = if greater { rest + 2 } else { 2 };
            let last =
                if holds { jump(comparison, lower, 0, rest) } else { jump(comparison, lower, rest, 0) };
            vec![high, above, jump(BPF_JEQ, upper, 0, below), low, last]
        };
        match self {
            Self::Equal(value) => {
                let (upper, lower) = halves(value);
                vec![high, jump(BPF_JEQ, upper, 0, rest + 2), low, jump(BPF_JEQ, lower, 0, rest)]
            }
            Self::NotEqual(value) => {
                let (upper, lower) = halves(value);
                vec![high, jump(BPF_JEQ, upper, 0, 2), low, jump(BPF_JEQ, lower, rest, 0)]
            }
            Self::Greater(value) => ordered(value, BPF_JGT, true, true),
            Self::GreaterOrEqual(value) => ordered(value, BPF_JGE, true, true),
            Self::Less(value) => ordered(value, BPF_JGE, false, false),
            Self::LessOrEqual(value) => ordered(value, BPF_JGT, false, false),
            Self::MaskedEqual { mask, value } => {
                let ((mask_upper, mask_lower), (upper, lower)) = (halves(mask), halves(value));
                let test = jump(BPF_JEQ, upper, 0, rest + 3);
                vec![high, and(mask_upper), test, low, and(mask_lower), jump(BPF_JEQ, lower, 0, rest)]
            }
        }
    }
}

/// The number of a system call, from any of the types in which it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Number(pub u32);

impl From<Sysno> for Number {
    fn from(call: Sysno) -> Self {
        Self(call.id().unsigned_abs())
    }
}

impl From<libc::c_long> for Number {
    fn from(call: libc::c_long) -> Self {
        Self(u32::try_from(call).unwrap_or(u32::MAX))
    }
}

impl From<u32> for Number {
    fn from(call: u32) -> Self {
        Self(call)
    }
}

type Rule = (Condition, Action);

/// Rules for system calls: the first rule of a call whose condition holds decides. A call with rules of which none holds is
/// allowed; a call without rules gets the default.
#[derive(Clone, Debug)]
pub struct Filter {
    rules: BTreeMap<u32, Vec<Rule>>,
    default: Action,
    foreign: Action,
    x32: Action,
    unknown: Option<(u32, Action)>,
}

// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const INSTRUCTION_POINTER: u32 = 8;
const ARGUMENTS: u32 = 16;

/// Calls of the x32 interface have this bit in their number.
const X32: u32 = 0x4000_0000;

/// The architecture of this program, as filters see it (`AUDIT_ARCH_*`).
#[cfg(target_arch = "x86_64")]
pub const NATIVE: u32 = 0xc000_003e;
/// The architecture of this program, as filters see it (`AUDIT_ARCH_*`).
#[cfg(target_arch = "aarch64")]
pub const NATIVE: u32 = 0xc000_00b7;

impl Filter {
    /// Makes a filter without rules. Calls by other interfaces (`int 0x80`, x32) fail with `ENOSYS`: their numbers mean
    /// other calls.
    #[must_use]
    pub fn new(default: Action) -> Self {
        let absent = Action::Fail(Errno::NOSYS);
        Self { rules: BTreeMap::new(), default, foreign: absent, x32: absent, unknown: None }
    }

    /// Sets the action for calls of another architecture (`int 0x80` on x86-64).
    #[must_use]
    pub fn foreign(mut self, action: Action) -> Self {
        self.foreign = action;
        self
    }

    /// Sets the action for calls of the x32 interface.
    #[must_use]
    pub fn x32(mut self, action: Action) -> Self {
        self.x32 = action;
        self
    }

    /// Sets the action for calls without rules.
    pub fn set_default(&mut self, action: Action) {
        self.default = action;
    }

    /// Makes calls that are newer than this program fail with `ENOSYS`.
    pub fn fail_unknown(&mut self) {
        let last = Sysno::iter().filter_map(|call| u32::try_from(call.id()).ok()).max();
        self.unknown = last.map(|last| (last + 1, Action::Fail(Errno::NOSYS)));
    }

    /// Adds a rule after those that the call has.
    pub fn add(&mut self, call: impl Into<Number>, condition: Condition, action: Action) {
        self.rules.entry(call.into().0).or_default().push((condition, action));
    }

    /// Replaces the rules of a call by one action.
    pub fn set(&mut self, call: impl Into<Number>, action: Action) {
        self.rules.insert(call.into().0, vec![(Condition::Always, action)]);
    }

    /// Replaces the rules of a call by none: the call is allowed until rules are added.
    pub fn clear(&mut self, call: impl Into<Number>) {
        self.rules.insert(call.into().0, Vec::new());
    }

    /// Returns what the filter does with a call of this architecture.
    #[must_use]
    pub fn action(&self, number: i32, arguments: &[u64; 6]) -> Action {
        let Ok(number) = u32::try_from(number) else { return self.x32 };
        match self.unknown {
            _ if number >= X32 => self.x32,
            Some((first, action)) if number >= first => action,
            _ => match self.rules.get(&number) {
                None => self.default,
                Some(rules) => first_that_holds(rules, arguments),
            },
        }
    }

    /// Compiles the filter.
    #[must_use]
    pub fn program(&self) -> Vec<sock_filter> {
        let mut program = vec![
            load(ARCHITECTURE),
            jump(BPF_JEQ, NATIVE, 1, 0),
            returns(self.foreign),
            load(NUMBER),
            jump(BPF_JGE, X32, 0, 1),
            returns(self.x32),
        ];
        if let Some((first, action)) = self.unknown {
            program.extend([jump(BPF_JGE, first, 0, 1), returns(action)]);
        }
        search(&self.runs(), &mut program);
        program
    }

    /// Returns the runs of numbers with equal rules, from 0 on without gaps: the first number of each, and its rules.
    fn runs(&self) -> Vec<(u32, Vec<Rule>)> {
        let default = vec![(Condition::Always, self.default)];
        let mut runs: Vec<(u32, Vec<Rule>)> = vec![(0, default.clone())];
        let mut push = |first: u32, rules: &[Rule]| {
            if runs.last().is_some_and(|(at, _)| *at == first) {
                runs.pop();
            }
            if runs.last().is_none_or(|(_, last)| last.as_slice() != rules) {
                runs.push((first, rules.to_vec()));
            }
        };
        let mut next = 0;
        for (&number, rules) in &self.rules {
            if number > next {
                push(next, &default);
            }
            push(number, rules);
            next = number + 1;
        }
        push(next, &default);
        runs
    }
}

fn first_that_holds(rules: &[Rule], arguments: &[u64; 6]) -> Action {
    let first = rules.iter().find(|(condition, _)| condition.holds(arguments));
    first.map_or(Action::Allow, |(_, action)| *action)
}

fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: u16::try_from(code).unwrap_or(u16::MAX), jt, jf, k }
}

fn load(offset: u32) -> sock_filter {
    instruction(BPF_LD | BPF_W | BPF_ABS, offset, 0, 0)
}

fn jump(comparison: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    instruction(BPF_JMP | comparison | BPF_K, k, jt, jf)
}

fn returns(action: Action) -> sock_filter {
    instruction(BPF_RET | BPF_K, action.value(), 0, 0)
}

/// Appends code that finds the run of the number in the accumulator, and does what its rules say.
fn search(runs: &[(u32, Vec<Rule>)], program: &mut Vec<sock_filter>) {
    if let [(_, rules)] = runs {
        return decide(rules, program);
    }
    let (low, high) = runs.split_at(runs.len() / 2);
    let mut below = Vec::new();
    search(low, &mut below);
    // Conditional jumps reach 255 instructions, unconditional ones reach all.
    match u8::try_from(below.len()) {
        Ok(length) => program.push(jump(BPF_JGE, high[0].0, length, 0)),
        Err(_) => {
            program.push(jump(BPF_JGE, high[0].0, 0, 1));
            let length = u32::try_from(below.len()).unwrap_or(u32::MAX);
            program.push(instruction(BPF_JMP | BPF_JA, length, 0, 0));
        }
    }
    program.append(&mut below);
    search(high, program);
}

/// Appends the tests of a call's rules, each of which returns its action where the condition holds.
fn decide(rules: &[Rule], program: &mut Vec<sock_filter>) {
    let low = |argument: u8| load(ARGUMENTS + 8 * u32::from(argument));
    let high = |argument: u8| load(ARGUMENTS + 8 * u32::from(argument) + 4);
    for (condition, action) in rules {
        let action = returns(*action);
        match *condition {
            Condition::Always => return program.push(action),
            Condition::AnyBit { argument, bits } => {
                program.extend([low(argument), jump(BPF_JSET, bits, 0, 1), action]);
            }
            Condition::Equals { argument, value } => {
                program.extend([low(argument), jump(BPF_JEQ, value, 0, 1), action]);
            }
            Condition::Differs { argument, value } => {
                program.extend([low(argument), jump(BPF_JEQ, value, 1, 0), action]);
            }
            #[expect(clippy::cast_possible_truncation, reason = "the two halves are taken apart")]
            Condition::EqualsWide { argument, value } => program.extend([
                low(argument),
                jump(BPF_JEQ, value as u32, 0, 3),
                high(argument),
                jump(BPF_JEQ, (value >> 32) as u32, 0, 1),
                action,
            ]),
            Condition::NotNull { argument } => program.extend([
                low(argument),
                jump(BPF_JEQ, 0, 0, 2),
                high(argument),
                jump(BPF_JEQ, 0, 1, 0),
                action,
            ]),
            Condition::Compares(all) => {
                // From the last to the first, because each skips all behind it. Six at most, of six instructions.
                let mut code = vec![action];
                for (argument, comparison) in (0_u8..6).zip(all).rev() {
                    let Some(comparison) = comparison else { continue };
                    let mut test = comparison.code(argument, u8::try_from(code.len()).unwrap_or(u8::MAX));
                    test.append(&mut code);
                    code = test;
                }
                program.append(&mut code);
            }
            Condition::CalledFrom { start, end } => {
                for (upper, first, last) in pieces(start, end) {
                    program.extend([
                        load(INSTRUCTION_POINTER + 4),
                        jump(BPF_JEQ, upper, 0, 4),
                        load(INSTRUCTION_POINTER),
                        jump(BPF_JGE, first, 0, 2),
                        jump(BPF_JGT, last, 1, 0),
                        action,
                    ]);
                }
            }
        }
    }
    program.push(returns(Action::Allow));
}

/// Returns the parts of a range of addresses with equal upper halves: that half, and the first and the last lower
/// one.
fn pieces(start: u64, end: u64) -> impl Iterator<Item = (u32, u32, u32)> {
    #[expect(clippy::cast_possible_truncation, reason = "the two halves are taken apart")]
    let halves = |address: u64| ((address >> 32) as u32, address as u32);
    let mut at = start;
    std::iter::from_fn(move || {
        let last = (end.checked_sub(1)?).min(at | u64::from(u32::MAX));
        let (upper, first) = halves(at);
        let piece = (at <= last).then_some((upper, first, halves(last).1))?;
        at = last.checked_add(1)?;
        Some(piece)
    })
}

/// To which threads a filter applies, and whether it gets a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The calling thread.
    Thread,
    /// All threads of the process.
    Process,
    /// The calling thread; a listener is returned, which answers [`Action::Notify`].
    ThreadWithListener,
}

/// Installs a compiled filter for good. The caller has set `no_new_privs` ([`rustix::thread::set_no_new_privs`]) or has
/// CAP_SYS_ADMIN. Makes at most two system calls, and nothing else.
///
/// Returns the listener for [`Scope::ThreadWithListener`], else `None`.
///
/// # Errors
/// `EACCES` without `no_new_privs`; `EINVAL` for a program of more than 4,096 instructions; `EBUSY` if there is a listener
/// already; others of seccomp(2).
pub fn install(program: &[sock_filter], scope: Scope) -> Result<Option<OwnedFd>, Errno> {
    let length = u16::try_from(program.len()).map_err(|_| Errno::INVAL)?;
    let program = sock_fprog { len: length, filter: program.as_ptr().cast_mut() };
    let install = |flags: u32| {
        // SAFETY: the kernel copies the program, whose pointer and length are those of a live slice.
        let result = unsafe { syscall!(Sysno::seccomp, SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
        result.map_err(crate::errno)
    };
    let result = match scope {
        Scope::Thread => return install(0).map(|_| None),
        Scope::Process => {
            return match install(SECCOMP_FILTER_FLAG_TSYNC)? {
                0 => Ok(None),
                // The PID of a thread with another filter.
                _ => Err(Errno::SRCH),
            };
        }
        // Before Linux 5.19 a signal could interrupt a call that the listener had received.
        Scope::ThreadWithListener => {
            match install(SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV) {
                Err(Errno::INVAL) => install(SECCOMP_FILTER_FLAG_NEW_LISTENER),
                other => other,
            }
        }
    };
    let listener = i32::try_from(result?).map_err(|_| Errno::BADF)?;
    // SAFETY: the kernel made the descriptor for this caller.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(listener) }))
}

/// Runs a program as the kernel would, on one call, and returns the value that it returns (`SECCOMP_RET_*`). For tests.
///
/// # Panics
/// If the program has an instruction that this module does not emit, or ends without returning.
#[must_use]
pub fn simulate(program: &[sock_filter], architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
    simulate_at(program, architecture, number, arguments, 0)
}

/// As [`simulate`], with the address after the instruction that calls.
///
/// # Panics
/// As [`simulate`].
#[must_use]
pub fn simulate_at(
    program: &[sock_filter],
    architecture: u32,
    number: u32,
    arguments: [u64; 6],
    instruction: u64,
) -> u32 {
    let mut data = Vec::new();
    data.extend(number.to_le_bytes());
    data.extend(architecture.to_le_bytes());
    data.extend(instruction.to_le_bytes());
    arguments.iter().for_each(|argument| data.extend(argument.to_le_bytes()));
    let (mut at, mut accumulator) = (0, 0_u32);
    loop {
        let now = program[at];
        at += 1;
        let code = u32::from(now.code);
        let branch = |holds: bool| usize::from(if holds { now.jt } else { now.jf });
        let offset = now.k as usize;
        if code == BPF_LD | BPF_W | BPF_ABS {
            let word = [data[offset], data[offset + 1], data[offset + 2], data[offset + 3]];
            accumulator = u32::from_le_bytes(word);
        } else if code == BPF_RET | BPF_K {
            return now.k;
        } else if code == BPF_ALU | BPF_AND | BPF_K {
            accumulator &= now.k;
        } else if code == BPF_JMP | BPF_JA {
            at += offset;
        } else if code == BPF_JMP | BPF_JEQ | BPF_K {
            at += branch(accumulator == now.k);
        } else if code == BPF_JMP | BPF_JGT | BPF_K {
            at += branch(accumulator > now.k);
        } else if code == BPF_JMP | BPF_JGE | BPF_K {
            at += branch(accumulator >= now.k);
        } else if code == BPF_JMP | BPF_JSET | BPF_K {
            at += branch(accumulator & now.k != 0);
        } else {
            panic!("cannot simulate instruction {code:#x}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(filter: &Filter, number: u32, arguments: [u64; 6]) -> u32 {
        simulate(&filter.program(), NATIVE, number, arguments)
    }

    #[test]
    fn callers_are_told_apart_by_their_address() {
        for (start, end) in [(0x5555_0000_1000, 0x5555_0000_3000), (0x5554_ffff_f000, 0x5556_0000_2000)] {
            let mut filter = Filter::new(Action::Allow);
            filter.add(libc::SYS_ioctl, Condition::CalledFrom { start, end }, Action::Allow);
            filter.add(
                libc::SYS_ioctl,
                Condition::Equals { argument: 1, value: 7 },
                Action::Fail(Errno::PERM),
            );
            let program = filter.program();
            let call = |at: u64, request: u64| {
                simulate_at(&program, NATIVE, 16, [0, request, 0, 0, 0, 0], at) == Action::Allow.value()
            };
            for inside in [start, start + 1, 0x5555_0000_2000, end - 1] {
                assert!(call(inside, 7), "{inside:#x}");
            }
            for outside in [0, 0x1000, start - 1, end, end + 1, start + (5 << 32), u64::MAX] {
                assert!(!call(outside, 7) && call(outside, 8), "{outside:#x}");
            }
        }
    }

    #[test]
    fn every_call_finds_its_action() {
        let mut filter = Filter::new(Action::Allow);
        for call in Sysno::iter().step_by(3) {
            filter.set(call, Action::Notify);
        }
        for (index, call) in Sysno::iter().enumerate() {
            let expected = if index % 3 == 0 { Action::Notify } else { Action::Allow };
            assert_eq!(run(&filter, Number::from(call).0, [0; 6]), expected.value(), "{call}");
        }
        assert_eq!(run(&filter, 9999, [0; 6]), Action::Allow.value());
        filter.fail_unknown();
        assert_eq!(run(&filter, 9999, [0; 6]), Action::Fail(Errno::NOSYS).value());
        assert_eq!(filter.action(9999, &[0; 6]), Action::Fail(Errno::NOSYS));
    }

    #[test]
    fn other_interfaces_have_their_actions() {
        let absent = Action::Fail(Errno::NOSYS).value();
        let filter = Filter::new(Action::Allow);
        assert_eq!(simulate(&filter.program(), 0x4000_0003, 5, [0; 6]), absent);
        assert_eq!(run(&filter, X32 | 1, [0; 6]), absent);
        assert_eq!(run(&filter, 1, [0; 6]), Action::Allow.value());
        let filter = filter.foreign(Action::KillProcess).x32(Action::Fail(Errno::PERM));
        assert_eq!(simulate(&filter.program(), 0x4000_0003, 5, [0; 6]), Action::KillProcess.value());
        assert_eq!(run(&filter, X32 | 1, [0; 6]), Action::Fail(Errno::PERM).value());
    }

    #[test]
    fn conditions_mean_the_same_in_the_model_and_in_the_program() {
        let one = Condition::Always;
        let conditions = [
            one,
            Condition::AnyBit { argument: 0, bits: 0x30 },
            Condition::Equals { argument: 1, value: 7 },
            Condition::Differs { argument: 1, value: 7 },
            Condition::EqualsWide { argument: 2, value: 7 << 32 | 5 },
            Condition::NotNull { argument: 4 },
        ];
        let values = [0, 5, 7, 0x10, 0x0f, 7 << 32, 7 << 32 | 5, 1 << 40, u64::MAX];
        for condition in conditions {
            let mut filter = Filter::new(Action::Trap);
            filter.add(56_u32, condition, Action::Notify);
            for (value, argument) in values.iter().flat_map(|value| (0..6).map(move |index| (*value, index)))
            {
                let mut arguments = [0; 6];
                arguments[argument] = value;
                let expected = if condition.holds(&arguments) { Action::Notify } else { Action::Allow };
                assert_eq!(filter.action(56, &arguments), expected, "{condition:?} {arguments:?}");
                assert_eq!(run(&filter, 56, arguments), expected.value(), "{condition:?} {arguments:?}");
            }
            assert_eq!(run(&filter, 55, [0; 6]), Action::Trap.value());
            assert_eq!(run(&filter, 57, [0; 6]), Action::Trap.value());
        }
    }

    #[test]
    fn comparisons_mean_the_same_in_the_model_and_in_the_program() {
        let edges =
            [0, 1, 7, u64::from(u32::MAX), 1 << 32, 1 << 32 | 7, 7 << 32, 7 << 32 | 7, 1 << 63, u64::MAX];
        let around = |value: u64| [value.wrapping_sub(1), value, value.wrapping_add(1)];
        let values: Vec<u64> = edges.into_iter().flat_map(around).collect();
        let each = |value: u64| {
            [
                Comparison::Equal(value),
                Comparison::NotEqual(value),
                Comparison::Less(value),
                Comparison::LessOrEqual(value),
                Comparison::Greater(value),
                Comparison::GreaterOrEqual(value),
                Comparison::MaskedEqual { mask: 0xf000_0000_0000_000f, value },
                Comparison::MaskedEqual { mask: value, value: value & 7 },
            ]
        };
        let refuse = Action::Fail(Errno::PERM);
        let check = |all: [Option<Comparison>; 6], arguments: [u64; 6]| {
            let mut filter = Filter::new(Action::Trap);
            filter.add(56_u32, Condition::Compares(all), Action::KillThread);
            filter.add(56_u32, Condition::Always, refuse);
            let holds = all.iter().zip(arguments).all(|(one, value)| one.is_none_or(|one| one.holds(value)));
            let expected = if holds { Action::KillThread } else { refuse };
            assert_eq!(filter.action(56, &arguments), expected, "{all:?} {arguments:x?}");
            assert_eq!(run(&filter, 56, arguments), expected.value(), "{all:?} {arguments:x?}");
            assert_eq!(run(&filter, 57, arguments), Action::Trap.value());
        };
        for comparison in edges.into_iter().flat_map(each) {
            for value in &values {
                check([None, None, Some(comparison), None, None, None], [5, 5, *value, 5, 5, 5]);
            }
        }
        // All six at once, of which one may not hold.
        for (first, second) in edges.into_iter().flat_map(|value| each(value).into_iter().zip(each(7))) {
            let all = [first, second, first, second, first, second].map(Some);
            for value in edges {
                let mut arguments = [7, value, 7, 7, value, 7];
                check(all, arguments);
                arguments[usize::try_from(value % 6).unwrap()] = value;
                check(all, arguments);
            }
        }
    }

    #[test]
    fn the_first_rule_that_holds_decides() {
        let mut filter = Filter::new(Action::Allow);
        filter.add(Sysno::clone, Condition::AnyBit { argument: 0, bits: 1 }, Action::Fail(Errno::PERM));
        filter.add(Sysno::clone, Condition::AnyBit { argument: 0, bits: 3 }, Action::Notify);
        filter.add(Sysno::clone, Condition::Always, Action::KillProcess);
        let with = |first| run(&filter, Number::from(Sysno::clone).0, [first, 0, 0, 0, 0, 0]);
        assert_eq!(with(1), Action::Fail(Errno::PERM).value());
        assert_eq!(with(2), Action::Notify.value());
        assert_eq!(with(4), Action::KillProcess.value());
        filter.clear(Sysno::clone);
        assert_eq!(run(&filter, Number::from(Sysno::clone).0, [1; 6]), Action::Allow.value());
    }

    #[test]
    fn thousands_of_numbers_fit_where_they_form_runs() {
        let mut filter = Filter::new(Action::Allow);
        for number in 0..4096_u32 {
            filter.set(number, if number % 100 == 0 { Action::Allow } else { Action::Notify });
        }
        let program = filter.program();
        assert!(program.len() < 300, "{}", program.len());
        for number in 0..5000_u32 {
            let expected = if number % 100 == 0 || number >= 4096 { Action::Allow } else { Action::Notify };
            assert_eq!(simulate(&program, NATIVE, number, [0; 6]), expected.value(), "{number}");
        }
    }

    #[test]
    fn large_filters_jump_further_than_conditional_jumps_reach() {
        let mut filter = Filter::new(Action::Allow);
        let refuse = Action::Fail(Errno::PERM);
        // No two neighbors have equal rules, so each number is a run of its own.
        for number in 0..600_u32 {
            if number % 2 == 0 {
                filter.set(number, Action::Notify);
            } else {
                filter.add(number, Condition::Equals { argument: 0, value: number }, refuse);
            }
        }
        let program = filter.program();
        let unconditional = u16::try_from(BPF_JMP | BPF_JA).unwrap();
        assert!(program.iter().any(|step| step.code == unconditional), "no long jump was needed");
        for number in 0..700_u32 {
            for first in [0, u64::from(number)] {
                let arguments = [first, 0, 0, 0, 0, 0];
                let expected = filter.action(number.cast_signed(), &arguments).value();
                assert_eq!(simulate(&program, NATIVE, number, arguments), expected, "{number} {first}");
            }
        }
        let absent = Action::Fail(Errno::NOSYS).value();
        assert_eq!(simulate(&program, NATIVE, X32 | 1, [0; 6]), absent);
    }
}
