//! How a site is rewritten: which instructions before its `syscall` move into a stub, and what takes their place.
//!
//! ```text
//!  before                            after
//!  W: mov %rcx,%rsi    48 89 ce      W: jmp stub    e9 x x 0f 05 df     stub: mov %rcx,%rsi
//!     mov %rbx,%rdi    48 89 df         (the same, read from W + 3:           mov %rbx,%rdi
//!  S: syscall          0f 05         W + 3: syscall   0f 05)                  on to the executive, which
//!     cmp ...                        S: syscall     0f 05                     performs the call, and
//!                                       cmp ...                               back to the cmp
//! ```
//!
//! A *window* is a stretch of whole instructions that ends with the `syscall`. All of them but the `syscall` are copied
//! into the stub; five bytes at the window's start become a jump to it. Nothing else changes, and nothing behind the
//! `syscall` does: a thread that sleeps in that very call returns to what it left.
//!
//! Threads may stand anywhere in the window, and branches may lead into it. From the fifth byte on they find the code as
//! it was, run down to the `syscall`, and are dispatched. Where an instruction began within the first five bytes
//! (a *jump pad*), the jump's own bytes are made to be a `syscall`, too: its distance is chosen so, by where the stub
//! is. A thread that arrives there is dispatched, and the handler sends it on to the same instruction in the stub. So no
//! question about branches has to be answered to rewrite a site, and no thread has to be stopped.
//!
//! A jump pad's `syscall` overwrites rcx and r11, which the site's own does as well: an instruction behind a jump pad must
//! not read them, nor branch away.

/// How many instructions a window may have, the `syscall` left out.
pub const INSTRUCTIONS: usize = 12;
/// Words of an encoded plan.
pub const WORDS: usize = 4;
/// What a jump takes.
pub const JUMP: usize = 5;
/// What a `syscall` takes.
pub const SYSCALL: usize = 2;
/// How many jump pads there can be: one in two bytes, from the second on.
pub const JUMP_PADS: usize = 2;
/// The most that relocated instructions can take.
pub const RELOCATED: usize = 96;

/// What has to be done to an instruction that moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Move {
    /// The instruction is copied as it is.
    Plain,
    /// Its 32 bits of displacement, so many bytes behind its start, are relative to its end.
    Relative(u8),
    /// A conditional branch, of two bytes or six: becomes one of six.
    Branch,
}

/// One instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MovedInstruction {
    /// The length of the instruction in bytes.
    pub length: u8,
    /// What it takes to move it.
    pub kind: Move,
}

impl MovedInstruction {
    /// Returns how many bytes it takes once it has moved.
    pub fn moved(&self) -> usize {
        match self.kind {
            Move::Branch => 6,
            _ => usize::from(self.length),
        }
    }
}

/// How to rewrite a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RewritePlan {
    /// The call's number, where the window sets it.
    pub number: Option<u16>,
    steps: [MovedInstruction; INSTRUCTIONS],
    count: usize,
}

const NONE: MovedInstruction = MovedInstruction { length: 0, kind: Move::Plain };
const NO_NUMBER: u16 = u16::MAX;
const MAGIC: u8 = 0xa5;
const BRANCH: u8 = 0xff;

impl RewritePlan {
    /// Returns a plan of these steps, the first at the window's start. `None` where a plan cannot be like that: too
    /// many steps, too few bytes for the jump, or jump pads that do not fit.
    pub fn new(number: Option<u16>, steps: &[MovedInstruction]) -> Option<Self> {
        let mut plan = Self { number, steps: [NONE; INSTRUCTIONS], count: steps.len() };
        plan.steps.get_mut(..steps.len())?.copy_from_slice(steps);
        let fitting = plan.jump_pads().into_iter().flatten().all(|at| !plan.starts(at + 1));
        (plan.length() >= JUMP
            && plan.jump_pads().into_iter().flatten().all(|at| at + 1 < plan.length())
            && fitting)
            .then_some(plan)
    }

    /// Returns the steps, first to last.
    pub fn steps(&self) -> &[MovedInstruction] {
        self.steps.get(..self.count).unwrap_or(&[])
    }

    /// Bytes from the window's start to the `syscall`.
    pub fn length(&self) -> usize {
        self.steps().iter().map(|step| usize::from(step.length)).sum()
    }

    /// Returns whether an instruction starts so many bytes behind the window's start.
    fn starts(&self, at: usize) -> bool {
        let mut position = 0;
        self.steps().iter().any(|step| {
            let here = position == at;
            position += usize::from(step.length);
            here
        })
    }

    /// Returns where instructions begin within the jump.
    pub fn jump_pads(&self) -> [Option<usize>; JUMP_PADS] {
        let mut found = (1..JUMP).filter(|at| self.starts(*at));
        // Adjacent ones are no plan: see `new`.
        [found.next(), found.next()]
    }

    /// Returns what takes the place of the window's first bytes, and how many that are. `None` where the jump pads
    /// ask for another distance.
    pub fn jump(&self, distance: i32) -> Option<([u8; JUMP + 1], usize)> {
        let [a, b, c, d] = distance.to_le_bytes();
        let mut bytes = [0xe9, a, b, c, d, 0];
        let mut length = JUMP;
        for at in self.jump_pads().into_iter().flatten() {
            for (offset, byte) in [0x0f, 0x05].into_iter().enumerate() {
                if at + offset < JUMP {
                    if bytes[at + offset] != byte {
                        return None;
                    }
                } else {
                    bytes[JUMP] = byte;
                    length = JUMP + 1;
                }
            }
        }
        Some((bytes, length))
    }

    /// Returns which bits of the jump's distance the jump pads want, and how.
    pub fn distance_constraint(&self) -> (u32, u32) {
        let (mut mask, mut value) = (0, 0);
        for at in self.jump_pads().into_iter().flatten() {
            for (offset, byte) in [0x0f_u32, 0x05].into_iter().enumerate() {
                if at + offset < JUMP {
                    let shift = 8 * (at + offset - 1);
                    mask |= 0xff << shift;
                    value |= byte << shift;
                }
            }
        }
        (mask, value)
    }

    /// Writes the moved instructions, as they must be at `to`, into `out`; `code` is the window's bytes, `from` its address.
    /// Gives their length, and where each jump pad's instruction is. `None` where one cannot reach what it refers to.
    pub fn relocate(&self, code: &[u8], from: u64, to: u64, out: &mut [u8]) -> Option<Relocated> {
        let mut relocated = Relocated { length: 0, jump_pads: [None; JUMP_PADS] };
        let jump_pads = self.jump_pads();
        let mut position = 0;
        for step in self.steps() {
            let length = usize::from(step.length);
            let bytes = code.get(position..position + length)?;
            for (place, jump_pad) in relocated.jump_pads.iter_mut().zip(jump_pads) {
                if jump_pad == Some(position) {
                    *place = Some(relocated.length);
                }
            }
            let (old, new) = (from + position as u64, to + relocated.length as u64);
            relocated.length += move_one(*step, bytes, old, new, out.get_mut(relocated.length..)?)?;
            position += length;
        }
        Some(relocated)
    }

    /// Encodes a plan as words.
    pub fn encode(plan: Option<&Self>) -> [u64; WORDS] {
        let mut bytes = [0_u8; WORDS * 8];
        if let Some(plan) = plan {
            bytes[0] = MAGIC;
            bytes[1] = u8::try_from(plan.count).unwrap_or(0);
            [bytes[2], bytes[3]] = plan.number.unwrap_or(NO_NUMBER).to_le_bytes();
            for (pair, step) in bytes[4..].chunks_exact_mut(2).zip(plan.steps()) {
                pair[0] = step.length;
                pair[1] = match step.kind {
                    Move::Plain => 0,
                    Move::Relative(at) => at,
                    Move::Branch => BRANCH,
                };
            }
        }
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = bytes.try_into().map_or(0, u64::from_le_bytes);
        }
        words
    }

    /// Decodes a plan from words; `None` if they hold none.
    pub fn decode(words: &[u64; WORDS]) -> Option<Self> {
        let mut bytes = [0_u8; WORDS * 8];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        if bytes[0] != MAGIC {
            return None;
        }
        let number = u16::from_le_bytes([bytes[2], bytes[3]]);
        let mut steps = [NONE; INSTRUCTIONS];
        for (step, pair) in steps.iter_mut().zip(bytes[4..].chunks_exact(2)) {
            let kind = match pair[1] {
                0 => Move::Plain,
                BRANCH => Move::Branch,
                at => Move::Relative(at),
            };
            *step = MovedInstruction { length: pair[0], kind };
        }
        Self::new((number != NO_NUMBER).then_some(number), steps.get(..usize::from(bytes[1]))?)
    }
}

/// Where things came to be in a stub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relocated {
    /// The length of all instructions in bytes.
    pub length: usize,
    /// For each of [`RewritePlan::jump pads`]: where its instruction is.
    pub jump_pads: [Option<usize>; JUMP_PADS],
}

/// Moves an instruction from `old` to `new`.
fn move_one(step: MovedInstruction, bytes: &[u8], old: u64, new: u64, out: &mut [u8]) -> Option<usize> {
    let length = bytes.len();
    let distance = |target: u64, end: u64| i32::try_from(target.wrapping_sub(end).cast_signed()).ok();
    match step.kind {
        Move::Plain => out.get_mut(..length)?.copy_from_slice(bytes),
        Move::Relative(at) => {
            let at = usize::from(at);
            let old_distance = i32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?);
            let target = old.wrapping_add(length as u64).wrapping_add_signed(i64::from(old_distance));
            let new_distance = distance(target, new.wrapping_add(length as u64))?;
            let place = out.get_mut(..length)?;
            place.copy_from_slice(bytes);
            place.get_mut(at..at + 4)?.copy_from_slice(&new_distance.to_le_bytes());
        }
        Move::Branch => {
            let (condition, old_distance) = match *bytes {
                [opcode, distance] => (opcode & 15, i64::from(distance.cast_signed())),
                [0x0f, opcode, a, b, c, d] => (opcode & 15, i64::from(i32::from_le_bytes([a, b, c, d]))),
                _ => return None,
            };
            let target = old.wrapping_add(length as u64).wrapping_add_signed(old_distance);
            let [a, b, c, d] = distance(target, new.wrapping_add(6))?.to_le_bytes();
            out.get_mut(..6)?.copy_from_slice(&[0x0f, 0x80 | condition, a, b, c, d]);
            return Some(6);
        }
    }
    Some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(length: u8) -> MovedInstruction {
        MovedInstruction { length, kind: Move::Plain }
    }

    #[test]
    fn plans_survive_encoding() {
        let steps = [
            MovedInstruction { length: 7, kind: Move::Relative(2) },
            MovedInstruction { length: 2, kind: Move::Branch },
            plain(2),
        ];
        for plan in [
            RewritePlan::new(Some(0), &steps).unwrap(),
            RewritePlan::new(None, &[plain(3); 2]).unwrap(),
            RewritePlan::new(Some(511), &[plain(15); INSTRUCTIONS]).unwrap(),
        ] {
            assert_eq!(RewritePlan::decode(&RewritePlan::encode(Some(&plan))), Some(plan));
        }
        assert_eq!(RewritePlan::decode(&RewritePlan::encode(None)), None);
    }

    #[test]
    fn jump_pads_are_instructions_within_the_jump() {
        let jump_pads = |lengths: &[u8]| {
            let steps: Vec<_> = lengths.iter().copied().map(plain).collect();
            RewritePlan::new(None, &steps).map(|plan| plan.jump_pads())
        };
        assert_eq!(jump_pads(&[5]), Some([None, None]));
        assert_eq!(jump_pads(&[7, 2]), Some([None, None]));
        assert_eq!(jump_pads(&[3, 3]), Some([Some(3), None]));
        assert_eq!(jump_pads(&[2, 2, 2]), Some([Some(2), Some(4)]));
        assert_eq!(jump_pads(&[4, 2]), Some([Some(4), None]));
        // No room for the jump; for a jump pad's second byte; for two jump pads side by side.
        assert_eq!(jump_pads(&[2, 2]), None);
        assert_eq!(jump_pads(&[4, 1]), None);
        assert_eq!(jump_pads(&[4, 1, 3]), None);
        assert_eq!(jump_pads(&[2, 1, 3]), None);
        assert_eq!(jump_pads(&[1, 4]), Some([Some(1), None]));
    }

    #[test]
    fn the_jump_holds_a_syscall_at_each_landing() {
        let plan = |lengths: &[u8]| {
            let steps: Vec<_> = lengths.iter().copied().map(plain).collect();
            RewritePlan::new(None, &steps).unwrap()
        };
        assert_eq!(plan(&[5]).jump(-2), Some(([0xe9, 0xfe, 0xff, 0xff, 0xff, 0], 5)));
        assert_eq!(plan(&[3, 3]).jump(0x050f_1234), Some(([0xe9, 0x34, 0x12, 0x0f, 0x05, 0], 5)));
        assert_eq!(plan(&[3, 3]).jump(0x050e_1234), None);
        assert_eq!(plan(&[4, 2]).jump(0x0f11_2233), Some(([0xe9, 0x33, 0x22, 0x11, 0x0f, 0x05], 6)));
        assert_eq!(plan(&[3, 3]).distance_constraint(), (0xffff_0000, 0x050f_0000));
        assert_eq!(plan(&[4, 2]).distance_constraint(), (0xff00_0000, 0x0f00_0000));
        assert_eq!(plan(&[2, 2, 2]).distance_constraint(), (0xffff_ff00, 0x0f05_0f00));
    }

    #[test]
    fn instructions_refer_to_the_same_from_their_new_place() {
        // cmpb $0,0x1000(%rip); je +0x10; xor %eax,%eax
        let code = [0x80, 0x3d, 0, 0x10, 0, 0, 0, 0x74, 0x10, 0x31, 0xc0];
        let steps = [
            MovedInstruction { length: 7, kind: Move::Relative(2) },
            MovedInstruction { length: 2, kind: Move::Branch },
            plain(2),
        ];
        let plan = RewritePlan::new(Some(0), &steps).unwrap();
        let mut out = [0; RELOCATED];
        let moved = plan.relocate(&code, 0x40_0000, 0x30_0000, &mut out).unwrap();
        assert_eq!(moved, Relocated { length: 15, jump_pads: [None; 2] });
        // 0x401007 from 0x300007, 0x400019 from 0x30000d.
        assert_eq!(out[..7], [0x80, 0x3d, 0, 0x10, 0x10, 0, 0]);
        assert_eq!(out[7..15], [0x0f, 0x84, 0x0c, 0, 0x10, 0, 0x31, 0xc0]);
        assert_eq!(plan.relocate(&code, 0x40_0000, 0x1_0000_0000, &mut out), None, "out of reach");
        assert_eq!(plan.relocate(&code, 0x40_0000, 0x30_0000, &mut out[..14]), None, "no room");
    }
}
