//! Which instructions before a `syscall` make room for a jump: see [`orrery_hijack_image::rewrite_plan`].
//!
//! Preferred is the nearest instruction of five bytes or more: the jump takes its place alone, and nothing can be within
//! it. That is `mov $number,%eax` right before most calls of a C library, the `cmpb` before glibc's `read`, the load of
//! the sixth argument in `syscall(3)`. Where there is none before the next branch, several shorter ones serve, as in
//! Go's `Syscall6`.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess,
    OpKind, Register,
};
use orrery_hijack_image::request_slots::CODE;
use orrery_hijack_image::rewrite_plan::{
    INSTRUCTIONS, JUMP, Move, MovedInstruction, RELOCATED, RewritePlan, SYSCALL,
};

use crate::instruction_boundaries::Decodings;

/// How far before the `syscall` a window may begin.
const FARTHEST: usize = 48;
/// What a branch becomes.
const BRANCH: usize = 6;
/// What `mov $number,%eax` takes.
const MOV: usize = 5;
/// Nobody's memory ends there.
const PAGE_ZERO: i64 = 4096;

/// Returns how to rewrite the site whose `syscall` ends this code, if that can be shown to be safe.
pub(crate) fn plan(code: &[u8; CODE]) -> Option<RewritePlan> {
    let end = CODE - SYSCALL;
    if code[end..] != [0x0f, 0x05] {
        return None;
    }
    let decodings = Decodings::of(code);
    let mut shorter = None;
    for start in (end - FARTHEST..=end - JUMP).rev() {
        if !decodings
            .agree_unless(start, &|from, to| start == end - MOV && to == end && faults(code, from, to))
        {
            continue;
        }
        let Some(instructions) = decodings.between(start, end) else { continue };
        // What cannot move is in all windows from further up, too.
        let Some(steps) = moves(&instructions) else { break };
        let Some(plan) = RewritePlan::new(number(&instructions), &steps) else { continue };
        if plan.jump_pads() == [None; 2] {
            return Some(plan);
        }
        if shorter.is_none() && bears_jump_pads(&plan, &instructions) {
            shorter = Some(plan);
        }
    }
    shorter
}

/// Returns whether these bytes, of which the last five are a `mov $number,%eax`, cannot be a longer instruction that
/// ends with them: it would name memory by rax, and leave that register as it is; and with the call's number in it
/// (which is looked at before a site is rewritten) that is memory in page zero. So it looks before glibc's `getuid`
/// and its like, where the zeros of a `nop` and the first byte of the `mov` seem to be an `add` to memory.
fn faults(code: &[u8; CODE], from: usize, to: usize) -> bool {
    let (Some(bytes), Some([0xb8, number @ ..])) = (code.get(from..to), code.get(to - MOV..to)) else {
        return false;
    };
    let Ok(number) = number.try_into().map(i32::from_le_bytes) else { return false };
    let instruction = Decoder::new(64, bytes, DecoderOptions::NONE).decode();
    let memory = (0..instruction.op_count()).any(|operand| instruction.op_kind(operand) == OpKind::Memory);
    let by_rax = (instruction.memory_base(), instruction.memory_index()) == (Register::RAX, Register::None)
        && instruction.segment_prefix() == Register::None;
    let untouched = !matches!(instruction.mnemonic(), Mnemonic::Lea | Mnemonic::Nop)
        && InstructionInfoFactory::new().info(&instruction).used_memory().len() == 1;
    let address = i64::from(number) + instruction.memory_displacement64().cast_signed();
    memory
        && by_rax
        && untouched
        && instruction.flow_control() == FlowControl::Next
        && !writes_rax(&instruction)
        && u16::try_from(number).is_ok()
        && (0..PAGE_ZERO - 64).contains(&address)
}

fn writes_rax(instruction: &Instruction) -> bool {
    InstructionInfoFactory::new().info(instruction).used_registers().iter().any(|used| {
        used.register().full_register() == Register::RAX
            && !matches!(used.access(), OpAccess::None | OpAccess::Read | OpAccess::CondRead)
    })
}

/// Returns how each instruction moves. `None` where one must stay, or there are too many.
fn moves(instructions: &[(Instruction, usize)]) -> Option<Vec<MovedInstruction>> {
    let steps: Option<Vec<MovedInstruction>> =
        instructions.iter().map(|(one, offset)| step(one, *offset)).collect();
    let steps = steps.filter(|steps| steps.len() <= INSTRUCTIONS)?;
    let moved = |step: &MovedInstruction| match step.kind {
        Move::Branch => BRANCH,
        _ => usize::from(step.length),
    };
    (steps.iter().map(moved).sum::<usize>() <= RELOCATED).then_some(steps)
}

fn step(instruction: &Instruction, displacement: usize) -> Option<MovedInstruction> {
    let length = u8::try_from(instruction.len()).ok()?;
    match instruction.flow_control() {
        FlowControl::Next => {}
        FlowControl::ConditionalBranch if instruction.is_jcc_short_or_near() && matches!(length, 2 | 6) => {
            return Some(MovedInstruction { length, kind: Move::Branch });
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
        return (!implied).then_some(MovedInstruction { length, kind: Move::Plain });
    }
    if instruction.is_ip_rel_memory_operand() {
        let wide = instruction.memory_base() == Register::RIP;
        let offset = u8::try_from(displacement).ok().filter(|offset| *offset != 0 && wide)?;
        return Some(MovedInstruction { length, kind: Move::Relative(offset) });
    }
    // A fault is reported with the address of the instruction. So what moves must not fault: no memory but the stack, and the
    // thread's own.
    let own = instruction.segment_prefix() == Register::FS
        && (instruction.memory_base(), instruction.memory_index()) == (Register::None, Register::None);
    let stack = instruction.segment_prefix() == Register::None
        && (instruction.memory_base(), instruction.memory_index()) == (Register::RSP, Register::None);
    let unread = matches!(instruction.mnemonic(), Mnemonic::Lea | Mnemonic::Nop);
    (own || stack || unread).then_some(MovedInstruction { length, kind: Move::Plain })
}

/// The number that these instructions leave in rax, if it is always the same.
fn number(instructions: &[(Instruction, usize)]) -> Option<u16> {
    let mut number = None;
    for (instruction, _) in instructions {
        if writes_rax(instruction) {
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

/// Returns whether instructions from the first jump pad on do without what a `syscall` overwrites, and go on to the
/// site.
fn bears_jump_pads(plan: &RewritePlan, instructions: &[(Instruction, usize)]) -> bool {
    let Some(first) = plan.jump_pads()[0] else { return true };
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
mod tests;
