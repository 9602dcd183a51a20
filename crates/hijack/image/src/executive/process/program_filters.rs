//! Filters that the program installs: whether they leave its children the calls by which they become tracees.
//!
//! Dispatch is not inherited, so each child arms itself. Where a filter ends who makes one of those calls, a child must not try: it
//! would be the executive that ends it. So each filter that is installed is run here for these calls, as the kernel will run it. The
//! calls of the program itself, and of children that were not armed, are for the kernel to judge.

use core::sync::atomic::Ordering::Relaxed;

use crate::config::Config;
use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::syscall::{SET_BYTES, SIGSYS, failed};
use crate::executive::abi::user_memory;
use crate::executive::signals::upcalls;
use crate::nr;

const PR_SET_SECCOMP: u64 = 22;
const SECCOMP_MODE_FILTER: u64 = 2;
const SECCOMP_SET_MODE_FILTER: u64 = 1;
const PR_SET_SYSCALL_USER_DISPATCH: u64 = 59;
const SIG_SETMASK: u64 = 2;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
/// What a filter says: the upper half of what it returns.
const ACTION: u32 = 0xffff_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
const KILL_THREAD: u32 = 0;
const TRAP: u32 = 0x0003_0000;
/// `struct seccomp_data`, in words of four bytes.
const DATA: usize = 16;
const SCRATCH: usize = 16;
/// `BPF_MAXINSNS`.
const MOST: u16 = 4096;

/// Returns whether a filter of the program's ends, or traps, who arms itself.
pub(crate) fn forbid_arming() -> bool {
    ORRERY_CONFIG.arming_forbidden.load(Relaxed) != 0
}

/// Performs a call of `prctl` or `seccomp`, and remembers what a filter that it installs leaves to children.
pub(crate) fn install(number: u64, arguments: [u64; 6], perform: impl FnOnce() -> i64) -> i64 {
    // Before it is in force: what looks into the program's memory may be forbidden then.
    let forbids = filter(number, arguments).is_some_and(|(start, length)| {
        let fetch = |index: u16| user_memory::read_word(start.wrapping_add(8 * u64::from(index))).ok();
        own_calls().iter().any(|data| run(&fetch, length, data).is_some_and(ends))
    });
    let result = perform();
    if !failed(result) && (number == nr::seccomp || arguments[0] == PR_SET_SECCOMP) {
        if forbids {
            ORRERY_CONFIG.arming_forbidden.store(1, Relaxed);
        }
        ORRERY_CONFIG.filtered.store(1, Relaxed);
        upcalls::after_filter();
    }
    result
}

/// The filter that a call installs: its first instruction, and how many it has.
fn filter(number: u64, [first, second, third, ..]: [u64; 6]) -> Option<(u64, u16)> {
    let program = match number {
        nr::prctl if first == PR_SET_SECCOMP && second == SECCOMP_MODE_FILTER => third,
        // The kernel reads an `int`.
        nr::seccomp if first & 0xffff_ffff == SECCOMP_SET_MODE_FILTER => third,
        _ => return None,
    };
    // SAFETY: any bytes are valid words: `struct sock_fprog`.
    let [length, start] = unsafe { user_memory::read::<[u64; 2]>(program) }.ok()?;
    Some((start, length as u16))
}

/// The calls that a child makes before it goes on as the program. Addresses among their arguments are of the executive.
fn own_calls() -> [[u32; DATA]; 3] {
    let Config { code, code_length, .. } = &ORRERY_CONFIG;
    let (code, length) = (code.load(Relaxed), code_length.load(Relaxed));
    [
        data(nr::prctl, code, [PR_SET_SYSCALL_USER_DISPATCH, 1, code, length, 0, 0]),
        data(nr::rt_sigaction, code, [SIGSYS, code, 0, SET_BYTES, 0, 0]),
        data(nr::rt_sigprocmask, code, [SIG_SETMASK, code, 0, SET_BYTES, 0, 0]),
    ]
}

fn data(number: u64, at: u64, arguments: [u64; 6]) -> [u32; DATA] {
    let halves = |word: u64| [word as u32, (word >> 32) as u32];
    let mut data = [number as u32, AUDIT_ARCH_X86_64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for (place, half) in data.iter_mut().skip(2).zip([at].iter().chain(&arguments).copied().flat_map(halves))
    {
        *place = half;
    }
    data
}

fn ends(verdict: u32) -> bool {
    matches!(verdict & ACTION, KILL_PROCESS | KILL_THREAD | TRAP)
}

/// Runs a filter as the kernel does (`seccomp_check_filter` says which instructions there are). `None`: the kernel would not take it.
#[inline(never)]
fn run(fetch: &dyn Fn(u16) -> Option<u64>, length: u16, data: &[u32; DATA]) -> Option<u32> {
    let (mut a, mut x, mut scratch) = (0_u32, 0_u32, [0_u32; SCRATCH]);
    let mut at = 0_u16;
    // Jumps lead forwards only.
    while at < length.min(MOST) {
        let instruction = fetch(at)?;
        let (code, k) = (instruction as u16, (instruction >> 32) as u32);
        let [_, _, when, otherwise, ..] = instruction.to_le_bytes();
        let word = || (k % 4 == 0).then(|| data.get(k as usize / 4).copied()).flatten();
        let operand = if code & 0x08 == 0 { k } else { x };
        at += 1;
        match code {
            // BPF_LD: ABS, LEN, IMM, MEM.
            0x20 => a = word()?,
            0x80 => a = size_of_val(data) as u32,
            0x00 => a = k,
            0x60 => a = *scratch.get(k as usize)?,
            // BPF_LDX: LEN, IMM, MEM.
            0x81 => x = size_of_val(data) as u32,
            0x01 => x = k,
            0x61 => x = *scratch.get(k as usize)?,
            // BPF_ST, BPF_STX.
            0x02 => *scratch.get_mut(k as usize)? = a,
            0x03 => *scratch.get_mut(k as usize)? = x,
            // BPF_MISC: TAX, TXA.
            0x07 => x = a,
            0x87 => a = x,
            // BPF_RET: K, A.
            0x06 => return Some(k),
            0x16 => return Some(a),
            // BPF_ALU.
            0x04 | 0x0c => a = a.wrapping_add(operand),
            0x14 | 0x1c => a = a.wrapping_sub(operand),
            0x24 | 0x2c => a = a.wrapping_mul(operand),
            // Zero, by which only x can divide, ends the filter with 0.
            0x34 | 0x3c => match a.checked_div(operand) {
                Some(quotient) => a = quotient,
                None => return Some(0),
            },
            0x44 | 0x4c => a |= operand,
            0x54 | 0x5c => a &= operand,
            0x64 | 0x6c => a = a.wrapping_shl(operand),
            0x74 | 0x7c => a = a.wrapping_shr(operand),
            0x84 => a = a.wrapping_neg(),
            0xa4 | 0xac => a ^= operand,
            // BPF_JMP: JA, JEQ, JGT, JGE, JSET.
            0x05 => at = at.checked_add(u16::try_from(k).ok()?)?,
            0x15 | 0x1d => at += u16::from(if a == operand { when } else { otherwise }),
            0x25 | 0x2d => at += u16::from(if a > operand { when } else { otherwise }),
            0x35 | 0x3d => at += u16::from(if a >= operand { when } else { otherwise }),
            0x45 | 0x4d => at += u16::from(if a & operand != 0 { when } else { otherwise }),
            _ => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction(code: u16, when: u8, otherwise: u8, k: u32) -> u64 {
        u64::from(code) | u64::from(when) << 16 | u64::from(otherwise) << 24 | u64::from(k) << 32
    }

    fn verdict(program: &[u64], data: &[u32; DATA]) -> Option<u32> {
        run(&|index| program.get(usize::from(index)).copied(), program.len() as u16, data)
    }

    #[test]
    fn filters_say_what_they_say_to_the_kernel() {
        let call = data(nr::prctl, 0x1234_5678_9abc, [59, 1, 2, 3, 4, 5 << 32 | 6]);
        let kills = [
            instruction(0x20, 0, 0, 0),
            instruction(0x15, 0, 1, nr::prctl as u32),
            instruction(0x06, 0, 0, KILL_PROCESS),
            instruction(0x06, 0, 0, 0x7fff_0000),
        ];
        assert_eq!(verdict(&kills, &call), Some(KILL_PROCESS));
        assert_eq!(verdict(&kills, &data(nr::fork, 0, [0; 6])), Some(0x7fff_0000));
        assert!(ends(KILL_PROCESS) && ends(0) && ends(TRAP | 7) && !ends(0x7fff_0000) && !ends(0x0005_0001));
        // The fields, and what can be done with them.
        let returns = |first: &[u64]| {
            let program: Vec<u64> = first.iter().copied().chain([instruction(0x16, 0, 0, 0)]).collect();
            verdict(&program, &call)
        };
        let field = |offset| instruction(0x20, 0, 0, offset);
        assert_eq!(returns(&[field(4)]), Some(AUDIT_ARCH_X86_64));
        assert_eq!((returns(&[field(8)]), returns(&[field(12)])), (Some(0x5678_9abc), Some(0x1234)));
        assert_eq!((returns(&[field(16)]), returns(&[field(56)])), (Some(59), Some(6)));
        assert_eq!(
            (returns(&[field(60)]), returns(&[field(64)]), returns(&[field(2)])),
            (Some(5), None, None)
        );
        for (code, k, expected) in [
            (0x04, 1, 60),
            (0x14, 60, u32::MAX),
            (0x24, 2, 118),
            (0x34, 2, 29),
            (0x44, 4, 63),
            (0x54, 56, 56),
            (0x64, 1, 118),
            (0x74, 1, 29),
            (0xa4, 59, 0),
        ] {
            assert_eq!(returns(&[field(16), instruction(code, 0, 0, k)]), Some(expected), "{code:#x}");
            let by_x = [field(16), instruction(0x01, 0, 0, k), instruction(code | 8, 0, 0, 0)];
            assert_eq!(returns(&by_x), Some(expected), "{code:#x}, by x");
        }
        assert_eq!(returns(&[field(16), instruction(0x01, 0, 0, 0), instruction(0x3c, 0, 0, 0)]), Some(0));
        assert_eq!(returns(&[field(16), instruction(0x02, 0, 0, 15), instruction(0x61, 0, 0, 15)]), Some(59));
        assert_eq!(returns(&[instruction(0x02, 0, 0, 16)]), None);
        // Jumps, and programs that do not end.
        let jumps = |code, k| returns(&[field(16), instruction(code, 1, 0, k), instruction(0x06, 0, 0, 9)]);
        assert_eq!((jumps(0x25, 58), jumps(0x25, 59), jumps(0x35, 59)), (Some(59), Some(9), Some(59)));
        assert_eq!((jumps(0x45, 1), jumps(0x45, 4), jumps(0x05, 1)), (Some(59), Some(9), Some(59)));
        assert_eq!(
            (jumps(0x05, 9), verdict(&[], &call), returns(&[instruction(0x28, 0, 0, 0)])),
            (None, None, None)
        );
    }
}
