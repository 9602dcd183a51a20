//! Makes new inputs of known ones.

use std::ops::Range;

use fastrand::Rng;

/// Values at which parsers go wrong.
const INTERESTING: [u64; 22] = [
    0,
    1,
    2,
    7,
    8,
    16,
    32,
    64,
    100,
    0x7f,
    0x80,
    0xff,
    0x100,
    0xfff,
    0x1000,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    i64::MAX as u64,
    u64::MAX,
];

/// The same as text, with what ends and nests things.
const WORDS: [&str; 16] = [
    "0",
    "-1",
    "1",
    "65535",
    "4294967295",
    "4294967296",
    "18446744073709551615",
    "1e309",
    "\0",
    "\n",
    "\\",
    "\"",
    "%",
    "[[",
    "é",
    "/../",
];

/// Returns a mutation of one of the `corpus`, of at most `longest` bytes. An empty corpus is as one empty input.
pub(crate) fn mutate(corpus: &[Vec<u8>], longest: usize, rng: &mut Rng) -> Vec<u8> {
    let empty = Vec::new();
    let mut input = rng.choice(corpus).unwrap_or(&empty).clone();
    // Mostly few changes: what many changes leave is mostly refused at its beginning.
    for _ in 0..1_usize << rng.usize(..5) {
        step(&mut input, rng.choice(corpus).unwrap_or(&empty), rng);
    }
    input.truncate(longest);
    input
}

fn step(input: &mut Vec<u8>, other: &[u8], rng: &mut Rng) {
    match rng.u8(..16) {
        0 => flip_bit(input, rng),
        1 => replace_byte(input, rng),
        2 | 3 => overwrite_integer(input, rng),
        4 => add_to_integer(input, rng),
        5 => {
            let at = rng.usize(..=input.len());
            input.splice(at..at, (0..rng.usize(1..9)).map(|_| rng.u8(..)).collect::<Vec<_>>());
        }
        6 | 7 => drop(input.drain(part(input.len(), rng))),
        8 => input.truncate(rng.usize(..=input.len())),
        9 => {
            let copied = input[part(input.len(), rng)].to_vec();
            let at = rng.usize(..=input.len());
            input.splice(at..at, copied);
        }
        10 => {
            // A part of it stands elsewhere as well, in the same length.
            let copied = input[part(input.len(), rng)].to_vec();
            let at = rng.usize(..=input.len() - copied.len());
            input[at..at + copied.len()].copy_from_slice(&copied);
        }
        11 | 12 => {
            let (from, to) = (part(other.len(), rng), part(input.len(), rng));
            input.splice(to, other[from].iter().copied());
        }
        13 => {
            let at = rng.usize(..=input.len());
            input.splice(at.., other[rng.usize(..=other.len())..].iter().copied());
        }
        14 => {
            let word = rng.choice(WORDS).unwrap_or_default();
            let at = rng.usize(..=input.len());
            input.splice(at..at, word.bytes());
        }
        _ => replace_number(input, rng),
    }
}

/// Returns a part of `length` bytes, mostly a short one.
fn part(length: usize, rng: &mut Rng) -> Range<usize> {
    let start = rng.usize(..=length);
    let most = if rng.bool() { 16 } else { usize::MAX };
    start..start + rng.usize(..=(length - start).min(most))
}

fn flip_bit(input: &mut [u8], rng: &mut Rng) {
    if let Some(at) = position(input, 1, rng) {
        input[at] ^= 1 << rng.u8(..8);
    }
}

fn replace_byte(input: &mut [u8], rng: &mut Rng) {
    if let Some(at) = position(input, 1, rng) {
        input[at] = rng.u8(..);
    }
}

fn overwrite_integer(input: &mut [u8], rng: &mut Rng) {
    let width = 1_usize << rng.u8(..4);
    let Some(at) = position(input, width, rng) else { return };
    let value = rng.choice(INTERESTING).unwrap_or_default();
    write(&mut input[at..at + width], value, rng.bool());
}

fn add_to_integer(input: &mut [u8], rng: &mut Rng) {
    let width = 1_usize << rng.u8(..4);
    let Some(at) = position(input, width, rng) else { return };
    let mut bytes = [0; 8];
    bytes[..width].copy_from_slice(&input[at..at + width]);
    let change = rng.u64(..33).wrapping_sub(16);
    write(&mut input[at..at + width], u64::from_le_bytes(bytes).wrapping_add(change), false);
}

fn write(to: &mut [u8], value: u64, big_endian: bool) {
    let width = to.len();
    to.copy_from_slice(&value.to_le_bytes()[..width]);
    if big_endian {
        to.reverse();
    }
}

/// Replaces a decimal number of the text.
fn replace_number(input: &mut Vec<u8>, rng: &mut Rng) {
    let Some(at) = position(input, 1, rng) else { return };
    let Some(start) = (at..input.len()).find(|&at| input[at].is_ascii_digit()) else { return };
    let end = (start..input.len()).find(|&at| !input[at].is_ascii_digit()).unwrap_or(input.len());
    let value = rng.choice(INTERESTING).unwrap_or_default();
    input.splice(start..end, value.to_string().into_bytes());
}

fn position(input: &[u8], width: usize, rng: &mut Rng) -> Option<usize> {
    (input.len() >= width).then(|| rng.usize(..=input.len() - width))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_inputs_again_and_all_are_bounded() {
        let corpus = vec![b"key = 12\n".to_vec(), vec![], vec![0; 100]];
        let inputs = |seed| {
            let mut rng = Rng::with_seed(seed);
            (0..20_000).map(|_| mutate(&corpus, 120, &mut rng)).collect::<Vec<_>>()
        };
        assert_eq!(inputs(7), inputs(7));
        assert_ne!(inputs(7), inputs(8));
        assert!(inputs(7).iter().all(|input| input.len() <= 120));
        assert!(inputs(7).iter().any(|input| input.len() > 100));
    }

    #[test]
    fn without_a_corpus_inputs_are_made_of_nothing() {
        let mut rng = Rng::with_seed(1);
        assert!((0..1000).map(|_| mutate(&[], 50, &mut rng)).any(|input| !input.is_empty()));
    }
}
