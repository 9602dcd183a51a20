//! Who calls: the call instruction, and return addresses on the stack.
//!
//! Programs keep no frame pointers that could be followed. So words above the stack pointer are taken for return addresses
//! if they point into code from a file, behind a call instruction. That finds all that there are, and some that are none
//! any more: good enough to distinguish places, and no proof of anything.

use crate::executive::abi::user_memory;
use crate::executive::memory::code_ranges;
use crate::journal::CALLERS;

/// How much of the stack is looked at, in words.
const WORDS: usize = 96;

/// The address behind the call instruction, and return addresses.
pub(crate) type Callers = [u64; CALLERS];

/// Finds them.
pub(crate) fn capture(site: u64, stack: u64) -> Callers {
    let mut found = [0; CALLERS];
    let mut places = found.iter_mut();
    if let Some(place) = places.next() {
        *place = site;
    }
    let mut words = [0_u8; WORDS * 8];
    let length = user_memory::read_some(stack, &mut words).unwrap_or(0);
    let read = words.get(..length).unwrap_or(&[]);
    let returns = read
        .chunks_exact(8)
        .map(|word| word.try_into().map_or(0, u64::from_le_bytes))
        .filter(|word| follows_a_call(*word));
    for (place, address) in places.zip(returns) {
        *place = address;
    }
    found
}

/// Returns whether an address is in code, and what is before it may be a call instruction.
fn follows_a_call(address: u64) -> bool {
    const LONGEST: u64 = 7;
    let start = address.wrapping_sub(LONGEST);
    if address < LONGEST || code_ranges::containing(start, address).is_none() {
        return false;
    }
    // SAFETY: code that is mapped; should another thread unmap it just now, the program would have unmapped a function
    // that it has called.
    let code: [u8; 7] =
        unsafe { core::ptr::with_exposed_provenance::<[u8; 7]>(start as usize).read_unaligned() };
    is_call(code)
}

/// Returns whether these bytes end with a call.
fn is_call(code: [u8; 7]) -> bool {
    /// The operation that makes `ff` a call.
    const CALL: u8 = 2;
    let indirect = |at: usize, modes: &[u8]| {
        let (opcode, operand) = (code.get(at), code.get(at + 1).copied().unwrap_or(0));
        opcode == Some(&0xff) && operand >> 3 & 7 == CALL && modes.contains(&(operand >> 6))
    };
    // call relative; register or memory; with eight bits of displacement, without and with index; with 32, likewise.
    code[2] == 0xe8
        || indirect(5, &[3, 0])
        || indirect(4, &[1])
        || indirect(3, &[1])
        || indirect(1, &[0, 2])
        || indirect(0, &[2])
}

/// Returns which patterns for callers fit one of them.
pub(crate) fn marks(callers: &Callers) -> u64 {
    callers.iter().map(|caller| code_ranges::marks(*caller)).fold(0, |all, marks| all | marks)
}

/// A number for the place: what called, and from where that was called. It is the same in each run of a program, wherever
/// its libraries are mapped.
pub(crate) fn hash(number: u64, callers: &Callers) -> u64 {
    hash_words(number, callers.iter().flat_map(|caller| relative(*caller)))
}

/// The size of the range of code that an address ends an instruction of, and its place therein.
fn relative(address: u64) -> [u64; 2] {
    match code_ranges::containing(address.wrapping_sub(1), address) {
        Some((start, end)) => [end - start, address - start],
        None => [0, address],
    }
}

fn hash_words(number: u64, words: impl Iterator<Item = u64>) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325_u64 ^ number;
    let hash = words.fold(start, |hash, word| {
        let hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^ hash >> 29
    });
    hash | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_told_from_other_code() {
        assert!(is_call([0x90, 0x90, 0xe8, 1, 2, 3, 4]));
        // call *%rax; call *8(%rax); call *8(%rsp); call *0x100(%rip); call *0x100(%rax,%rbx)
        assert!(is_call([0x90, 0x90, 0x90, 0x90, 0x90, 0xff, 0xd0]));
        assert!(is_call([0x90, 0x90, 0x90, 0x90, 0xff, 0x50, 8]));
        assert!(is_call([0x90, 0x90, 0x90, 0xff, 0x54, 0x24, 8]));
        assert!(is_call([0x90, 0xff, 0x15, 0, 1, 0, 0]));
        assert!(is_call([0xff, 0x94, 0x18, 0, 1, 0, 0]));
        // jmp *%rax; nothing
        assert!(!is_call([0x90, 0x90, 0x90, 0x90, 0x90, 0xff, 0xe0]));
        assert!(!is_call([0x90; 7]));
    }

    #[test]
    fn places_have_numbers() {
        assert_ne!(hash(1, &[1, 2, 3, 4, 5]), hash(1, &[1, 2, 3, 4, 6]));
        assert_ne!(hash(1, &[0; CALLERS]), hash(2, &[0; CALLERS]));
    }
}
