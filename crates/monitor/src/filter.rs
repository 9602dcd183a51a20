//! The filter that decides which calls leave the program at all: classic BPF, as seccomp(2) takes it.
//!
//! `seccompiler`, which the sandbox of warm interpreters uses, has no user notification, so the few instructions are put
//! together here. The program is a binary search over call numbers; its leaves are the actions. A call that the filter
//! always allows costs nothing: the kernel finds that out when the filter is loaded and remembers it in a bitmap.

use std::collections::BTreeMap;

use linux_raw_sys::ptrace::{
    BPF_ABS, BPF_JA, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, SECCOMP_RET_ALLOW,
    SECCOMP_RET_ERRNO, SECCOMP_RET_USER_NOTIF, sock_filter,
};
use rustix::io::Errno;
use syscalls::Sysno;

/// What the filter does with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// The kernel performs it.
    Allow,
    /// The monitor is asked.
    Ask,
    /// It fails, without the monitor.
    Fail(Errno),
}

/// What a rule knows of a call's arguments. Only values can be looked at, never what a pointer points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// Whatever the arguments.
    Always,
    /// Any of these bits is set in the lower half of an argument.
    AnyBit { argument: u8, bits: u32 },
    /// The lower half of an argument is this.
    Is { argument: u8, value: u32 },
    /// The argument is no null pointer.
    NotNull { argument: u8 },
}

impl When {
    #[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
    fn holds(self, arguments: &[u64; 6]) -> bool {
        let whole = |argument: u8| arguments.get(usize::from(argument)).copied().unwrap_or(0);
        match self {
            Self::Always => true,
            Self::AnyBit { argument, bits } => whole(argument) as u32 & bits != 0,
            Self::Is { argument, value } => whole(argument) as u32 == value,
            Self::NotNull { argument } => whole(argument) != 0,
        }
    }
}

/// Which action a call gets: that of the first rule that applies, and `Allow` where none does.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rules {
    calls: BTreeMap<u32, Vec<(When, Action)>>,
    /// What happens to calls without a rule.
    otherwise: Option<Action>,
    /// Calls above this number fail with `ENOSYS`: nobody knows what they do.
    last: Option<u32>,
}

/// `struct seccomp_data`: where things are.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

/// Calls of the x32 interface have this bit in their number.
const X32: u32 = 0x4000_0000;

#[cfg(target_arch = "x86_64")]
const NATIVE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const NATIVE: u32 = 0xc000_00b7;

impl Rules {
    /// Adds a rule after those that the call has.
    pub(crate) fn add(&mut self, call: Sysno, when: When, action: Action) {
        if let Ok(number) = u32::try_from(call.id()) {
            self.calls.entry(number).or_default().push((when, action));
        }
    }

    /// Replaces what there is for the call.
    pub(crate) fn set(&mut self, call: Sysno, action: Action) {
        if let Ok(number) = u32::try_from(call.id()) {
            self.calls.insert(number, vec![(When::Always, action)]);
        }
    }

    /// Forgets the rules of a call.
    pub(crate) fn clear(&mut self, call: Sysno) {
        if let Ok(number) = u32::try_from(call.id()) {
            self.calls.insert(number, Vec::new());
        }
    }

    /// What the program does with a call.
    pub(crate) fn action(&self, number: i32, arguments: &[u64; 6]) -> Action {
        match u32::try_from(number).ok().and_then(|number| self.calls.get(&number)) {
            None => self.otherwise.unwrap_or(Action::Allow),
            Some(rules) => {
                let first = rules.iter().find(|(when, _)| when.holds(arguments));
                first.map_or(Action::Allow, |(_, action)| *action)
            }
        }
    }

    /// What happens to calls without a rule.
    pub(crate) fn otherwise(&mut self, action: Action) {
        self.otherwise = Some(action);
    }

    /// Lets calls fail that are newer than this program.
    pub(crate) fn known_only(&mut self) {
        self.last = Sysno::iter().filter_map(|call| u32::try_from(call.id()).ok()).max();
    }

    /// The program. Calls of other architectures (`int 0x80`, x32) fail with `ENOSYS`: their numbers mean other things.
    pub(crate) fn program(&self) -> Vec<sock_filter> {
        let otherwise = value(self.otherwise.unwrap_or(Action::Allow));
        let foreign = SECCOMP_RET_ERRNO | Errno::NOSYS.raw_os_error().unsigned_abs();
        let mut program = vec![
            load(ARCHITECTURE),
            jump(BPF_JEQ, NATIVE, 1, 0),
            give(foreign),
            load(NUMBER),
            jump(BPF_JGE, X32, 0, 1),
            give(foreign),
        ];
        if let Some(last) = self.last {
            program.extend([jump(BPF_JGE, last + 1, 0, 1), give(foreign)]);
        }
        let calls: Vec<_> = self.calls.iter().map(|(&number, rules)| (number, rules.as_slice())).collect();
        search(&calls, otherwise, &mut program);
        program
    }
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

fn give(value: u32) -> sock_filter {
    instruction(BPF_RET | BPF_K, value, 0, 0)
}

fn value(action: Action) -> u32 {
    match action {
        Action::Allow => SECCOMP_RET_ALLOW,
        Action::Ask => SECCOMP_RET_USER_NOTIF,
        Action::Fail(errno) => SECCOMP_RET_ERRNO | errno.raw_os_error().unsigned_abs(),
    }
}

/// Finds the number in the accumulator among `calls`, which are sorted.
fn search(calls: &[(u32, &[(When, Action)])], otherwise: u32, program: &mut Vec<sock_filter>) {
    if calls.len() > 3 {
        let (low, high) = calls.split_at(calls.len() / 2);
        let mut below = Vec::new();
        search(low, otherwise, &mut below);
        // Conditional jumps reach 255 instructions, plain ones reach everywhere.
        program.push(jump(BPF_JGE, high[0].0, 0, 1));
        program.push(instruction(BPF_JMP | BPF_JA, u32::try_from(below.len()).unwrap_or(u32::MAX), 0, 0));
        program.append(&mut below);
        search(high, otherwise, program);
        return;
    }
    for (number, rules) in calls {
        let mut leaf = Vec::new();
        for (when, action) in *rules {
            test(*when, value(*action), &mut leaf);
        }
        if !matches!(rules.last(), Some((When::Always, _))) {
            leaf.push(give(SECCOMP_RET_ALLOW));
        }
        program.push(jump(BPF_JEQ, *number, 0, u8::try_from(leaf.len()).unwrap_or(u8::MAX)));
        program.append(&mut leaf);
    }
    program.push(give(otherwise));
}

/// Returns `value` where the arguments are such; else goes on behind.
fn test(when: When, value: u32, leaf: &mut Vec<sock_filter>) {
    let low = |argument: u8| load(ARGUMENTS + 8 * u32::from(argument));
    match when {
        When::Always => leaf.push(give(value)),
        When::AnyBit { argument, bits } => {
            leaf.extend([low(argument), jump(BPF_JSET, bits, 0, 1), give(value)]);
        }
        When::Is { argument, value: wanted } => {
            leaf.extend([low(argument), jump(BPF_JEQ, wanted, 0, 1), give(value)]);
        }
        When::NotNull { argument } => {
            let high = load(ARGUMENTS + 8 * u32::from(argument) + 4);
            leaf.extend([low(argument), jump(BPF_JEQ, 0, 0, 2), high, jump(BPF_JEQ, 0, 1, 0), give(value)]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program as the kernel would, on a call and its arguments.
    fn run(program: &[sock_filter], architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let mut data = Vec::new();
        data.extend(number.to_le_bytes());
        data.extend(architecture.to_le_bytes());
        data.extend([0; 8]);
        for argument in arguments {
            data.extend(argument.to_le_bytes());
        }
        let (mut at, mut accumulator) = (0, 0_u32);
        loop {
            let now = program[at];
            at += 1;
            let code = u32::from(now.code);
            let branch = |holds: bool| usize::from(if holds { now.jt } else { now.jf });
            if code == BPF_LD | BPF_W | BPF_ABS {
                let from = usize::try_from(now.k).unwrap();
                accumulator = u32::from_le_bytes(data[from..from + 4].try_into().unwrap());
            } else if code == BPF_RET | BPF_K {
                return now.k;
            } else if code == BPF_JMP | BPF_JA {
                at += usize::try_from(now.k).unwrap();
            } else if code == BPF_JMP | BPF_JEQ | BPF_K {
                at += branch(accumulator == now.k);
            } else if code == BPF_JMP | BPF_JGE | BPF_K {
                at += branch(accumulator >= now.k);
            } else if code == BPF_JMP | BPF_JSET | BPF_K {
                at += branch(accumulator & now.k != 0);
            } else {
                panic!("instruction {code:#x}");
            }
        }
    }

    #[test]
    fn every_call_finds_its_action() {
        let mut rules = Rules::default();
        for call in Sysno::iter().step_by(3) {
            rules.set(call, Action::Ask);
        }
        let program = rules.program();
        for (index, call) in Sysno::iter().enumerate() {
            let expected = if index % 3 == 0 { SECCOMP_RET_USER_NOTIF } else { SECCOMP_RET_ALLOW };
            let number = u32::try_from(call.id()).unwrap();
            assert_eq!(run(&program, NATIVE, number, [0; 6]), expected, "{call}");
        }
        assert_eq!(run(&program, NATIVE, 9999, [0; 6]), SECCOMP_RET_ALLOW);
        rules.known_only();
        let refused = value(Action::Fail(Errno::NOSYS));
        assert_eq!(run(&rules.program(), NATIVE, 9999, [0; 6]), refused);
    }

    #[test]
    fn foreign_interfaces_are_refused() {
        let refused = value(Action::Fail(Errno::NOSYS));
        let program = Rules::default().program();
        assert_eq!(run(&program, 0x4000_0003, 5, [0; 6]), refused);
        assert_eq!(run(&program, NATIVE, X32 | 1, [0; 6]), refused);
        assert_eq!(run(&program, NATIVE, 1, [0; 6]), SECCOMP_RET_ALLOW);
    }

    #[test]
    fn arguments_are_looked_at() {
        let mut rules = Rules::default();
        rules.add(Sysno::clone, When::AnyBit { argument: 0, bits: 0x30 }, Action::Fail(Errno::PERM));
        rules.add(Sysno::clone, When::Is { argument: 1, value: 7 }, Action::Ask);
        rules.add(Sysno::sendto, When::NotNull { argument: 4 }, Action::Ask);
        let program = rules.program();
        let with = |call: Sysno, argument: usize, value: u64| {
            let mut arguments = [0; 6];
            arguments[argument] = value;
            let returned = run(&program, NATIVE, u32::try_from(call.id()).unwrap(), arguments);
            assert_eq!(returned, super::value(rules.action(call.id(), &arguments)));
            returned
        };
        assert_eq!(with(Sysno::clone, 0, 0x10), value(Action::Fail(Errno::PERM)));
        assert_eq!(with(Sysno::clone, 0, 0x0f), SECCOMP_RET_ALLOW);
        assert_eq!(with(Sysno::clone, 1, 7), SECCOMP_RET_USER_NOTIF);
        assert_eq!(with(Sysno::sendto, 4, 0), SECCOMP_RET_ALLOW);
        assert_eq!(with(Sysno::sendto, 4, 1), SECCOMP_RET_USER_NOTIF);
        assert_eq!(with(Sysno::sendto, 4, 1 << 40), SECCOMP_RET_USER_NOTIF);
    }
}
