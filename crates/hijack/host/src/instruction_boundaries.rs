//! Where do instructions begin before a system call?
//!
//! x86 code cannot be read backwards: what looks like an instruction could be the end of a longer one. So code is read
//! forwards, from *every* byte of a stretch before the place in question. One of these decodings is what the processor
//! executes: no instruction is longer than 15 bytes, and the stretch is longer than that. If every reading that makes
//! sense arrives at a place, so does the true one. A reading that meets bytes which are no instruction is not the true
//! one.

use iced_x86::{Decoder, DecoderOptions, Instruction};
use orrery_hijack_image::request_slots::CODE;

const LONGEST: usize = 15;

/// Code that ends behind a `syscall` which was executed, read from each of its bytes.
pub(crate) struct Decodings<'a> {
    code: &'a [u8; CODE],
    /// How long an instruction that began here would be; zero where these bytes are none.
    lengths: [usize; CODE],
}

impl<'a> Decodings<'a> {
    pub(crate) fn of(code: &'a [u8; CODE]) -> Self {
        let mut instruction = Instruction::default();
        let lengths = std::array::from_fn(|start| {
            let mut decoder = Decoder::new(64, &code[start..], DecoderOptions::NONE);
            decoder.decode_out(&mut instruction);
            if instruction.is_invalid() { 0 } else { instruction.len() }
        });
        Self { code, lengths }
    }

    /// Returns whether every reading arrives at a place.
    #[cfg(test)]
    pub(crate) fn agree_on(&self, place: usize) -> bool {
        self.agree_unless(place, &|_, _| false)
    }

    /// The same, where a reading is not the true one if it passes the place by an impossible instruction, from here to there.
    pub(crate) fn agree_unless(&self, place: usize, impossible: &dyn Fn(usize, usize) -> bool) -> bool {
        let Some(last) = place.checked_sub(LONGEST) else { return false };
        let mut arrivals = 0;
        for start in 0..=last {
            let (mut before, mut at) = (start, start);
            while at < place && self.lengths[at] != 0 {
                (before, at) = (at, at + self.lengths[at]);
            }
            match at {
                _ if at == place => arrivals += 1,
                _ if at > place && !impossible(before, at) => return false,
                _ => {}
            }
        }
        arrivals > 0
    }

    /// The instructions from a place to another, if one ends there.
    pub(crate) fn between(&self, start: usize, end: usize) -> Option<Vec<(Instruction, usize)>> {
        let mut decoder = Decoder::new(64, &self.code[start..end], DecoderOptions::NONE);
        let mut found = Vec::new();
        while start + decoder.position() < end {
            let at = decoder.position();
            let instruction = decoder.decode();
            // One that is cut off is invalid, too.
            if instruction.is_invalid() {
                return None;
            }
            let displacement = decoder.get_constant_offsets(&instruction).displacement_offset();
            debug_assert_eq!(decoder.position(), at + instruction.len());
            found.push((instruction, displacement));
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agree(before: &[u8], last: &[u8]) -> bool {
        let mut code = [0x90; CODE];
        let start = CODE - before.len() - last.len();
        code[start..start + before.len()].copy_from_slice(before);
        code[CODE - last.len()..].copy_from_slice(last);
        Decodings::of(&code).agree_on(CODE - last.len())
    }

    const GETPID: [u8; 7] = [0xb8, 39, 0, 0, 0, 0x0f, 0x05];

    #[test]
    fn a_mov_is_one() {
        assert!(agree(&[], &GETPID));
        // endbr64; push %rbx
        assert!(agree(&[0xf3, 0x0f, 0x1e, 0xfa, 0x53], &GETPID));
    }

    #[test]
    fn ends_of_longer_instructions_are_none() {
        // mov $39,%r8d
        assert!(!agree(&[0x41], &GETPID));
        // movl $39,-0x48(%rbp)
        assert!(!agree(&[0xc7, 0x45], &GETPID));
        // movl $39,-0x48(%rsp)
        assert!(!agree(&[0xc7, 0x44, 0x24], &GETPID));
    }

    #[test]
    fn instructions_between_places_are_whole() {
        let mut code = [0x90; CODE];
        code[CODE - 7..].copy_from_slice(&GETPID);
        let decodings = Decodings::of(&code);
        let found = decodings.between(CODE - 8, CODE - 2).unwrap();
        assert_eq!(found.iter().map(|(instruction, _)| instruction.len()).collect::<Vec<_>>(), [1, 5]);
        assert!(decodings.between(CODE - 8, CODE - 3).is_none());
    }
}
