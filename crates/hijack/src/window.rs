//! Which instructions before a `syscall` make room for a jump: see [`orrery_executive::plan`].
//!
//! Preferred is the nearest instruction of five bytes or more: the jump takes its place alone, and nothing can be within
//! it. That is `mov $number,%eax` right before most calls of a C library, the `cmpb` before glibc's `read`, the load of
//! the sixth argument in `syscall(3)`. Where there is none before the next branch, several shorter ones serve, as in
//! Go's `Syscall6`.

use iced_x86::{
    Code, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
};
use orrery_executive::board::CODE;
use orrery_executive::plan::{JUMP, Move, Plan, RELOCATED, STEPS, SYSCALL, Step};

use crate::proof::Readings;

/// How far before the `syscall` a window may begin.
const FARTHEST: usize = 48;
/// What a branch becomes.
const BRANCH: usize = 6;

/// How to rewrite the site whose `syscall` ends this code, if that can be shown to be safe.
pub(crate) fn plan(code: &[u8; CODE]) -> Option<Plan> {
    let end = CODE - SYSCALL;
    if code[end..] != [0x0f, 0x05] {
        return None;
    }
    let readings = Readings::of(code);
    let mut shorter = None;
    for start in (end - FARTHEST..=end - JUMP).rev() {
        if !readings.agree_on(start) {
            continue;
        }
        let Some(instructions) = readings.between(start, end) else { continue };
        // What cannot move is in all windows from further up, too.
        let Some(steps) = moves(&instructions) else { break };
        let Some(plan) = Plan::new(number(&instructions), &steps) else { continue };
        if plan.landings() == [None; 2] {
            return Some(plan);
        }
        if shorter.is_none() && bears_landings(&plan, &instructions) {
            shorter = Some(plan);
        }
    }
    shorter
}

/// How each instruction moves. `None` where one must stay, or there are too many.
fn moves(instructions: &[(Instruction, usize)]) -> Option<Vec<Step>> {
    let steps: Option<Vec<Step>> = instructions.iter().map(|(one, offset)| step(one, *offset)).collect();
    let steps = steps.filter(|steps| steps.len() <= STEPS)?;
    let moved = |step: &Step| match step.kind {
        Move::Branch => BRANCH,
        _ => usize::from(step.length),
    };
    (steps.iter().map(moved).sum::<usize>() <= RELOCATED).then_some(steps)
}

fn step(instruction: &Instruction, displacement: usize) -> Option<Step> {
    let length = u8::try_from(instruction.len()).ok()?;
    match instruction.flow_control() {
        FlowControl::Next => {}
        FlowControl::ConditionalBranch if instruction.is_jcc_short_or_near() && matches!(length, 2 | 6) => {
            return Some(Step { length, kind: Move::Branch });
        }
        _ => return None,
    }
    if instruction.is_privileged() {
        return None;
    }
    let memory = (0..instruction.op_count()).any(|operand| instruction.op_kind(operand) == OpKind::Memory);
    if !memory {
        // Strings and the like name memory by registers that are no operands of theirs.
        let implied = (0..instruction.op_count()).any(|operand| {
            !matches!(
                instruction.op_kind(operand),
                OpKind::Register
                    | OpKind::Immediate8
                    | OpKind::Immediate8_2nd
                    | OpKind::Immediate16
                    | OpKind::Immediate32
                    | OpKind::Immediate64
                    | OpKind::Immediate8to16
                    | OpKind::Immediate8to32
                    | OpKind::Immediate8to64
                    | OpKind::Immediate32to64
            )
        });
        return (!implied).then_some(Step { length, kind: Move::Plain });
    }
    if instruction.is_ip_rel_memory_operand() {
        let wide = instruction.memory_base() == Register::RIP;
        let offset = u8::try_from(displacement).ok().filter(|offset| *offset != 0 && wide)?;
        return Some(Step { length, kind: Move::Relative(offset) });
    }
    // A fault is told with the address of the instruction. So what moves must not fault: no memory but the stack, and the
    // thread's own.
    let own = instruction.segment_prefix() == Register::FS
        && (instruction.memory_base(), instruction.memory_index()) == (Register::None, Register::None);
    let stack = instruction.segment_prefix() == Register::None
        && (instruction.memory_base(), instruction.memory_index()) == (Register::RSP, Register::None);
    let unread = matches!(instruction.mnemonic(), Mnemonic::Lea | Mnemonic::Nop);
    (own || stack || unread).then_some(Step { length, kind: Move::Plain })
}

/// The number that these instructions leave in rax, if it is always the same.
fn number(instructions: &[(Instruction, usize)]) -> Option<u16> {
    let mut factory = InstructionInfoFactory::new();
    let mut number = None;
    for (instruction, _) in instructions {
        let writes = factory.info(instruction).used_registers().iter().any(|used| {
            used.register().full_register() == Register::RAX
                && !matches!(used.access(), OpAccess::None | OpAccess::Read | OpAccess::CondRead)
        });
        if writes {
            number = constant(instruction);
        }
    }
    number
}

fn constant(instruction: &Instruction) -> Option<u16> {
    let [first, second] = [instruction.op0_register(), instruction.op1_register()];
    let whole = matches!(first, Register::EAX | Register::RAX);
    match instruction.code() {
        Code::Mov_r32_imm32 | Code::Mov_rm32_imm32 if whole => u16::try_from(instruction.immediate32()).ok(),
        Code::Mov_rm64_imm32 if whole => u16::try_from(instruction.immediate32to64()).ok(),
        Code::Mov_r64_imm64 if whole => u16::try_from(instruction.immediate64()).ok(),
        Code::Xor_r32_rm32 | Code::Xor_rm32_r32 | Code::Xor_r64_rm64 | Code::Xor_rm64_r64
            if whole && first == second =>
        {
            Some(0)
        }
        _ => None,
    }
    .filter(|number| *number != u16::MAX)
}

/// Whether instructions from the first landing on do without what a `syscall` overwrites, and go on to the site.
fn bears_landings(plan: &Plan, instructions: &[(Instruction, usize)]) -> bool {
    let Some(first) = plan.landings()[0] else { return true };
    let mut factory = InstructionInfoFactory::new();
    let mut position = 0;
    instructions.iter().all(|(instruction, _)| {
        let behind = position >= first;
        position += instruction.len();
        let reads = factory.info(instruction).used_registers().iter().any(|used| {
            matches!(used.register().full_register(), Register::RCX | Register::R11)
                && used.access() != OpAccess::Write
        });
        !behind || !(reads || instruction.flow_control() != FlowControl::Next)
    })
}

#[cfg(test)]
mod tests {
    use iced_x86::{Decoder, DecoderOptions};

    use super::*;

    fn code(last: &[u8]) -> [u8; CODE] {
        let mut code = [0x90; CODE];
        code[CODE - last.len()..].copy_from_slice(last);
        code
    }

    fn lengths(plan: &Plan) -> Vec<u8> {
        plan.steps().iter().map(|step| step.length).collect()
    }

    #[test]
    fn a_mov_makes_room_alone() {
        let plan = plan(&code(&[0xb8, 39, 0, 0, 0, 0x0f, 0x05])).unwrap();
        assert_eq!((lengths(&plan), plan.number), (vec![5], Some(39)));
        // mov $39,%rax
        let plan = super::plan(&code(&[0x48, 0xc7, 0xc0, 39, 0, 0, 0, 0x0f, 0x05])).unwrap();
        assert_eq!((lengths(&plan), plan.number), (vec![7], Some(39)));
    }

    #[test]
    fn glibcs_read_gives_its_comparison() {
        let read = [0x80, 0x3d, 0x55, 0x10, 0x0e, 0, 0, 0x74, 0x10, 0x31, 0xc0, 0x0f, 0x05];
        let plan = plan(&code(&read)).unwrap();
        assert_eq!((lengths(&plan), plan.number), (vec![7, 2, 2], Some(0)));
        assert_eq!(plan.steps()[0].kind, Move::Relative(2));
        assert_eq!(plan.steps()[1].kind, Move::Branch);
    }

    #[test]
    fn gos_syscall6_gives_two_loads() {
        let go = [0x48, 0x89, 0xfa, 0x48, 0x89, 0xce, 0x48, 0x89, 0xdf, 0x0f, 0x05];
        let mut before = code(&go);
        // Something that cannot move.
        before[CODE - go.len() - 1] = 0xc3;
        let plan = plan(&before).unwrap();
        assert_eq!((lengths(&plan), plan.number), (vec![3, 3], None));
        assert_eq!(plan.landings(), [Some(3), None]);
    }

    #[test]
    fn what_needs_rcx_bears_no_landing_before_it() {
        // ret; mov %rbx,%rdi; mov %rcx,%rsi; syscall
        assert_eq!(plan(&code(&[0xc3, 0x48, 0x89, 0xdf, 0x48, 0x89, 0xce, 0x0f, 0x05])), None);
        // ret; test %eax,%eax; je +2; xor %eax,%eax; syscall
        assert_eq!(plan(&code(&[0xc3, 0x85, 0xc0, 0x74, 0x02, 0x31, 0xc0, 0x0f, 0x05])), None);
    }

    #[test]
    fn what_may_fault_or_leaves_stays() {
        // mov 0x12345678(%rdi),%eax
        assert_eq!(plan(&code(&[0x8b, 0x87, 0x78, 0x56, 0x34, 0x12, 0x0f, 0x05])), None);
        // call; jmp; syscall; rep movsb; int3
        for stays in [
            &[0xe8, 0, 0, 0, 0][..],
            &[0xe9, 0, 0, 0, 0],
            &[0xb8, 1, 0, 0, 0, 0x0f, 0x05],
            &[0xb8, 1, 0, 0, 0, 0xf3, 0xa4],
            &[0xb8, 1, 0, 0, 0, 0xcc],
        ] {
            let code = code(&[stays, &[0x0f, 0x05]].concat());
            assert_eq!(plan(&code), None, "{stays:x?}");
        }
    }

    #[test]
    fn the_number_is_what_was_written_last() {
        // mov $202,%eax; xor $0x80,%sil; syscall
        let futex = [0xb8, 202, 0, 0, 0, 0x40, 0x80, 0xf6, 0x80, 0x0f, 0x05];
        let plan = plan(&code(&futex)).unwrap();
        assert_eq!((lengths(&plan), plan.number), (vec![5, 4], Some(202)));
        // mov $1,%eax; mov %edi,%eax; syscall
        let plan = super::plan(&code(&[0xb8, 1, 0, 0, 0, 0x89, 0xf8, 0x0f, 0x05])).unwrap();
        assert_eq!(plan.number, None);
    }

    /// Each site of a program's code, where an instruction is a `syscall`.
    fn each_site(file: &[u8], mut look: impl FnMut(u64, &[u8; CODE])) {
        for (start, end) in code_of(file) {
            for end in start + CODE..=end {
                let code: &[u8; CODE] = file[end - CODE..end].try_into().unwrap();
                let is_call = || Readings::of(code).agree_on(CODE - SYSCALL) || plan(code).is_some();
                if code[CODE - SYSCALL..] == [0x0f, 0x05] && is_call() {
                    look(end as u64, code);
                }
            }
        }
    }

    fn c_library() -> Option<Vec<u8>> {
        let file = std::env::var("SURVEY").unwrap_or_else(|_| "/lib/x86_64-linux-gnu/libc.so.6".to_owned());
        let read = std::fs::read(&file).ok();
        if read.is_none() {
            orrery_testing::skipped!("no {file}");
        }
        read
    }

    /// Prints what becomes of the sites of a program: `SURVEY=/bin/busybox cargo test -p orrery-hijack survey -- --nocapture`.
    #[test]
    fn survey_most_of_the_c_librarys_sites_can_be_rewritten() {
        let Some(file) = c_library() else { return };
        let [mut alone, mut shorter, mut stay, mut unknown] = [0; 4];
        each_site(&file, |end, code| match plan(code) {
            Some(plan) => {
                *(if plan.landings()[0].is_none() { &mut alone } else { &mut shorter }) += 1;
                unknown += usize::from(plan.number.is_none());
            }
            None => {
                println!("stays: the one before {end:#x} of the file");
                stay += 1;
            }
        });
        println!("{alone} by one instruction, {shorter} by several, {stay} stay; {unknown} of any number");
        assert!((alone + shorter) > 20 * stay, "{alone} + {shorter} against {stay}");
    }

    /// The decoder is the judge: each instruction is the same one, about the same memory or target.
    #[test]
    fn what_moves_is_the_same_instruction_elsewhere() {
        let Some(file) = c_library() else { return };
        let mut moved = 0;
        each_site(&file, |end, code| {
            let Some(plan) = plan(code) else { return };
            let length = plan.length() + SYSCALL;
            let from = end - length as u64;
            for to in [from + 0x1234_5678, from.wrapping_sub(0x7000_0000)] {
                let mut out = [0; RELOCATED];
                let window = &code[CODE - length..CODE - SYSCALL];
                let relocated = plan.relocate(window, from, to, &mut out).unwrap();
                let decode = |bytes: &[u8], at| {
                    let mut decoder = Decoder::with_ip(64, bytes, at, DecoderOptions::NONE);
                    let mut all = Vec::new();
                    while decoder.can_decode() {
                        let one = decoder.decode();
                        let target = one.is_jcc_short_or_near().then(|| one.near_branch_target());
                        let memory = one.is_ip_rel_memory_operand().then(|| one.ip_rel_memory_address());
                        let operands: Vec<_> = (0..one.op_count())
                            .map(|place| (one.op_kind(place), one.op_register(place)))
                            .collect();
                        let operands = if target.is_some() { Vec::new() } else { operands };
                        let fixed = (memory.is_none() && target.is_none()).then(|| {
                            (
                                one.memory_displacement64(),
                                one.memory_base(),
                                one.memory_index(),
                                one.segment_prefix(),
                            )
                        });
                        let immediate = one.try_immediate(one.op_count().saturating_sub(1)).ok();
                        all.push((one.mnemonic(), target, memory, operands, fixed, immediate));
                    }
                    all
                };
                assert_eq!(decode(window, from), decode(&out[..relocated.length], to), "before {end:#x}");
                moved += 1;
            }
        });
        assert!(moved > 0);
    }

    /// The executable segments of a file.
    fn code_of(file: &[u8]) -> Vec<(usize, usize)> {
        use object::read::elf::{FileHeader, ProgramHeader};
        let header = object::elf::FileHeader64::<object::Endianness>::parse(file).unwrap();
        let endian = header.endian().unwrap();
        let headers = header.program_headers(endian, file).unwrap();
        let code = headers.iter().filter(|header| {
            header.p_type(endian) == object::elf::PT_LOAD && header.p_flags(endian) & object::elf::PF_X != 0
        });
        let range = |header: &object::elf::ProgramHeader64<_>| {
            let (start, length) = header.file_range(endian);
            (usize::try_from(start).unwrap(), usize::try_from(start + length).unwrap())
        };
        code.map(range).collect()
    }
}
