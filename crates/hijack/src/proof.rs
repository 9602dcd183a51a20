//! Is what looks like a mov before a system call one?
//!
//! The bytes `b8 nn nn nn nn` could also be the end of a longer instruction. x86 code cannot be read backwards; so it is
//! read forwards, from *every* byte of a stretch before. One of these readings is what the processor executes: no
//! instruction is longer than 15 bytes, and the stretch is longer than that. If every reading that makes sense arrives at
//! the mov, so does the true one. A reading that meets bytes which are no instruction is not the true one.
//!
//! That the two bytes after it are executed as `syscall` is known: it has been trapped.

use iced_x86::{Code, Decoder, DecoderOptions, Instruction};
use orrery_executive::board::CODE;

const MOV: usize = CODE - 7;
const LONGEST: usize = 15;

/// Whether the last bytes of this code are the instructions `mov $number,%eax` and `syscall`.
pub(crate) fn is_mov_and_syscall(code: &[u8; CODE], number: u64) -> bool {
    let mut arrivals = 0;
    for start in 0..=MOV - LONGEST {
        match read_from(code, start, number) {
            Reading::Arrives => arrivals += 1,
            Reading::MakesNoSense => {}
            Reading::PassesBy => return false,
        }
    }
    arrivals > 0
}

enum Reading {
    Arrives,
    PassesBy,
    MakesNoSense,
}

fn read_from(code: &[u8; CODE], start: usize, number: u64) -> Reading {
    let mut decoder = Decoder::new(64, &code[start..], DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while start + decoder.position() < MOV {
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            return Reading::MakesNoSense;
        }
    }
    if start + decoder.position() != MOV {
        return Reading::PassesBy;
    }
    decoder.decode_out(&mut instruction);
    let is_mov = instruction.code() == Code::Mov_r32_imm32
        && instruction.op0_register() == iced_x86::Register::EAX
        && u64::from(instruction.immediate32()) == number;
    decoder.decode_out(&mut instruction);
    if is_mov && instruction.code() == Code::Syscall { Reading::Arrives } else { Reading::PassesBy }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(before: &[u8], last: &[u8]) -> [u8; CODE] {
        let mut code = [0x90; CODE];
        let start = CODE - before.len() - last.len();
        code[start..start + before.len()].copy_from_slice(before);
        code[CODE - last.len()..].copy_from_slice(last);
        code
    }

    const GETPID: [u8; 7] = [0xb8, 39, 0, 0, 0, 0x0f, 0x05];

    #[test]
    fn a_mov_is_one() {
        assert!(is_mov_and_syscall(&code(&[], &GETPID), 39));
        // endbr64; push %rbx
        assert!(is_mov_and_syscall(&code(&[0xf3, 0x0f, 0x1e, 0xfa, 0x53], &GETPID), 39));
        assert!(!is_mov_and_syscall(&code(&[], &GETPID), 40));
    }

    #[test]
    fn ends_of_longer_instructions_are_none() {
        // mov $39,%r8d
        assert!(!is_mov_and_syscall(&code(&[0x41], &GETPID), 39));
        // movl $39,-0x48(%rbp)
        assert!(!is_mov_and_syscall(&code(&[0xc7, 0x45], &GETPID), 39));
        // movl $39,-0x48(%rsp)
        assert!(!is_mov_and_syscall(&code(&[0xc7, 0x44, 0x24], &GETPID), 39));
    }

    #[test]
    fn most_of_the_c_librarys_calls_are_shown_to_be_safe() {
        let Ok(library) = std::fs::read("/lib/x86_64-linux-gnu/libc.so.6") else {
            orrery_testing::skipped!("no /lib/x86_64-linux-gnu/libc.so.6");
            return;
        };
        let (mut safe, mut candidates) = (0, 0);
        for end in CODE..library.len() {
            let window: &[u8; CODE] = library[end - CODE..end].try_into().unwrap();
            let number = u32::from_le_bytes(window[MOV + 1..MOV + 5].try_into().unwrap());
            if window[MOV] == 0xb8 && window[MOV + 5..] == [0x0f, 0x05] && number < 512 {
                candidates += 1;
                safe += usize::from(is_mov_and_syscall(window, u64::from(number)));
            }
        }
        println!("{safe} of {candidates}");
        assert!(candidates == 0 || safe * 2 > candidates, "{safe} of {candidates}");
    }
}
