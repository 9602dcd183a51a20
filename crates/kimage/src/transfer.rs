//! How far a call that moves bytes had come: the iterator over the program's buffers that it carries on the kernel's
//! stack.
//!
//! Source: Linux `include/linux/uio.h`, `lib/iov_iter.c`.

use crate::error::Result;
use crate::kernel::Kernel;
use crate::object::Object;
use crate::unwind::Frame;

/// `ITER_IOVEC` and `ITER_UBUF` where the kernel does not tell.
const VECTOR: u64 = 0;
const ONE: u64 = 6;
/// `MAX_RW_COUNT`: no call moves more.
const MOST: u64 = 0x7fff_f000;
/// A `struct iovec`.
const VECTOR_SIZE: u64 = 16;
/// A frame that is larger is none.
const LARGEST_FRAME: u64 = 16 << 10;
/// The longest end of a function, in bytes of code, that is looked at.
const LONGEST_END: usize = 64;
/// How many bytes of code are at most between a call's return and what its caller does with what it gave.
const LONGEST_WAY: u64 = 128;
/// What takes the place of `ret` where processors guess it wrong.
const RETURN: &str = "__x86_return_thunk";
/// The bytes of an instruction that calls, and its first one.
const CALL: (u64, u8) = (5, 0xe8);

/// A part of a program's memory that bytes are moved to or from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Where it is in the program.
    pub address: u64,
    /// The length of the buffer in bytes.
    pub length: u64,
}

/// How far a call had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that were copied between the buffers and the kernel.
    pub moved: u64,
    /// Bytes that are left.
    pub left: u64,
}

/// What a function had called last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Called {
    /// The function that begins here.
    Function(u64),
    /// One that only a register held.
    ByPointer,
}

/// What is known of a function that is on its way back to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Returning {
    /// The function returns this result.
    With(u64),
    /// Its result is in a register that is not known.
    Somehow,
}

impl Kernel {
    /// Returns the words of the kernel's stack from one address to another.
    fn words(&self, from: u64, to: u64) -> impl Iterator<Item = u64> {
        (from.next_multiple_of(8)..to.min(from.saturating_add(LARGEST_FRAME))).step_by(8)
    }

    /// The iterators over these buffers between two addresses of the stack, which write to what the call goes to or
    /// read from it; that one which has come farthest.
    #[must_use]
    pub fn progress(&self, from: u64, to: u64, buffers: &[Buffer], writes: bool) -> Option<Progress> {
        let found = self.words(from, to).filter_map(|at| {
            let iterator = self.object("iov_iter", at).ok()?;
            progress(iterator, buffers, writes).ok().flatten()
        });
        found.max_by_key(|progress| progress.moved)
    }

    /// Returns where in its file the call stands that has this file's `kiocb` between two addresses of the stack.
    #[must_use]
    pub fn place_in_file(&self, from: u64, to: u64, file: u64) -> Option<u64> {
        self.words(from, to).find_map(|at| {
            let control = self.object("kiocb", at).ok()?;
            (control.u64("ki_filp").ok()? == file && control.u64("ki_complete").ok()? == 0)
                .then(|| control.u64("ki_pos").ok())?
        })
    }

    /// Returns what a function had called last: who is in a call of it, or who has returned to it last, as the word
    /// below its frame tells.
    #[must_use]
    pub fn called_last(&self, frame: &Frame) -> Option<Called> {
        let own = self.symbols().function(frame.instruction)?;
        let back = if frame.interrupted {
            self.read_u64(frame.start.wrapping_sub(8)).ok()?
        } else {
            frame.instruction
        };
        if self.symbols().function(back.wrapping_sub(1))? != own {
            return None;
        }
        let mut code = [0; 5];
        self.read(back.wrapping_sub(CALL.0), &mut code).ok()?;
        if code[3] == 0xff && code[4] & 0xf8 == 0xd0 {
            return Some(Called::ByPointer);
        }
        if code[0] != CALL.1 {
            return None;
        }
        let distance = i32::from_le_bytes([code[1], code[2], code[3], code[4]]);
        Some(Called::Function(back.wrapping_add(i64::from(distance).cast_unsigned())))
    }

    /// Returns whether a function that was interrupted does nothing more but give up its frame and return. What it
    /// had on the stack is below the frame then.
    #[must_use]
    pub fn returning(&self, frame: &Frame) -> Option<Returning> {
        let mut code = [0; LONGEST_END];
        if !frame.interrupted {
            return None;
        }
        self.read(frame.instruction, &mut code).ok()?;
        let ends_elsewhere = |distance: i32, after: usize| {
            let next = frame.instruction.wrapping_add(after as u64);
            self.symbols().is_at(RETURN, next.wrapping_add(i64::from(distance).cast_unsigned()))
        };
        let moves_result = end_of_function(&code, ends_elsewhere)?;
        Some(if moves_result { Returning::Somehow } else { Returning::With(frame.result) })
    }
}

impl Kernel {
    /// Returns whether a function that was interrupted has, since its last call returned, come past no instruction
    /// that adds to the member of a structure with this offset, on a way without jumps: so it has not done that yet.
    #[must_use]
    pub fn has_not_added(&self, frame: &Frame, offset: u64) -> bool {
        let back = frame.interrupted.then(|| self.read_u64(frame.start.wrapping_sub(8)).ok()).flatten();
        let Some(back) = back.filter(|back| frame.instruction.wrapping_sub(*back) <= LONGEST_WAY) else {
            return false;
        };
        let mut code = vec![0; usize::try_from(frame.instruction.wrapping_sub(back)).unwrap_or(0)];
        self.read(back, &mut code).is_ok() && !adds_to(&code, offset)
    }
}

/// Returns whether there is an instruction in code that adds a register to memory with this distance from another
/// one. (Intel SDM volume 2.)
fn adds_to(code: &[u8], offset: u64) -> bool {
    code.windows(3).enumerate().any(|(at, bytes)| {
        let (kind, base) = (bytes[1] >> 6, bytes[1] & 7);
        let from = at + if base == 4 { 3 } else { 2 };
        let is_at = |size: usize| {
            let distance = code.get(from..from + size);
            distance.is_some_and(|distance| distance == &offset.to_le_bytes()[..size])
        };
        bytes[0] == 0x01 && (kind == 1 && is_at(1) || kind == 2 && is_at(4))
    })
}

/// Returns whether code is the end of a function, and if so, whether it moves the result to its place before it
/// returns. (Intel SDM volume 2.)
fn end_of_function(code: &[u8], returns_by: impl Fn(i32, usize) -> bool) -> Option<bool> {
    let (mut at, mut moves_result) = (0, false);
    loop {
        at += match code.get(at..)? {
            // ret, by itself or by what takes its place where processors guess it wrong.
            [0xc3, ..] => return Some(moves_result),
            &[0xe9, a, b, c, d, ..] => {
                return returns_by(i32::from_le_bytes([a, b, c, d]), at + 5).then_some(moves_result);
            }
            // pop, leave, add to the stack pointer, or set it from the frame's.
            [0x58..=0x5f | 0xc9, ..] => 1,
            [0x41, 0x58..=0x5f, ..] => 2,
            [0x48, 0x83, 0xc4, ..] | [0x48, 0x8d, 0x65, ..] => 4,
            [0x48, 0x81, 0xc4, ..] | [0x48, 0x8d, 0xa5, ..] => 7,
            // mov from any register to the one for results.
            [0x48 | 0x4c, 0x89, to, ..] if to & 0xc7 == 0xc0 => {
                moves_result = true;
                3
            }
            [0x89, to, ..] if to & 0xc7 == 0xc0 => {
                moves_result = true;
                2
            }
            [0x44, 0x89, to, ..] if to & 0xc7 == 0xc0 => {
                moves_result = true;
                3
            }
            // xor of a register with itself, so that nothing is left in it.
            [0x31, both, ..] if cleared(*both) && *both != 0xc0 => 2,
            [0x45, 0x31, both, ..] if cleared(*both) => 3,
            _ => return None,
        };
    }
}

/// Returns whether an instruction's second byte says that both its registers are the same.
fn cleared(both: u8) -> bool {
    both >> 6 == 3 && both >> 3 & 7 == both & 7
}

/// Returns what an iterator tells, if it is one over these buffers.
fn progress(iterator: Object<'_>, buffers: &[Buffer], writes: bool) -> Result<Option<Progress>> {
    let kernel = iterator.kernel();
    let kind = |name, otherwise| kernel.types().constant("iter_type", name).unwrap_or(otherwise);
    let total = buffers.iter().map(|buffer| buffer.length).fold(0, u64::saturating_add).min(MOST);
    let (left, within) = (iterator.u64("count")?, iterator.u64("iov_offset")?);
    if left > total || total == 0 || iterator.u64("data_source")? != u64::from(writes) {
        return Ok(None);
    }
    let moved = total - left;
    let found = Some(Progress { moved, left });
    let this = iterator.u64("iter_type")?;
    if this == kind("ITER_UBUF", ONE) {
        let [buffer] = buffers else { return Ok(None) };
        let ubuf = iterator.u64("ubuf")?;
        // Where it is just being moved on, nobody else knows of that yet.
        let moved = within.min(moved);
        return Ok((ubuf == buffer.address).then_some(Progress { moved, left: total - moved }));
    }
    if this != kind("ITER_IOVEC", VECTOR) {
        return Ok(None);
    }
    let at = iterator.u64(if iterator.has("iov") { "iov" } else { "__iov" })?;
    let vector = |at: u64| -> Result<Buffer> {
        let vector = kernel.object("iovec", at)?;
        Ok(Buffer { address: vector.u64("iov_base")?, length: vector.u64("iov_len")? })
    };
    // Its place in the list follows from that alone. How many are left, and how much of this one has been moved, agrees
    // with what is left in all but where it is just being moved on: then what is left in all is noted last.
    let is_list = |passed: usize| {
        let first = at.wrapping_sub(passed as u64 * VECTOR_SIZE);
        let places = (0..).map(|index: u64| first.wrapping_add(index * VECTOR_SIZE));
        places.zip(buffers).all(|(at, buffer)| vector(at).is_ok_and(|vector| vector == *buffer))
    };
    let here = vector(at).ok();
    let may_be = |&passed: &usize| match buffers.get(passed) {
        Some(&buffer) => Some(buffer) == here && within <= buffer.length,
        None => within == 0,
    };
    let mut places = (0..=buffers.len()).filter(may_be);
    Ok(found.filter(|_| places.any(is_list)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::{DIRECT, Machine, Maker};

    #[test]
    fn the_end_of_a_function_is_told_from_its_midst() {
        let end = |code: &[u8]| {
            let mut padded = code.to_vec();
            padded.resize(LONGEST_END, 0xcc);
            end_of_function(&padded, |distance, after| (distance, after) == (0x100, 8))
        };
        // pop rbx; pop r12; pop rbp; ret
        assert_eq!(end(&[0x5b, 0x41, 0x5c, 0x5d, 0xc3]), Some(false));
        // add rsp, 24; mov rax, rbx; pop rbx; ret
        assert_eq!(end(&[0x48, 0x83, 0xc4, 24, 0x48, 0x89, 0xd8, 0x5b, 0xc3]), Some(true));
        // pop rbx; xor edx, edx; jmp
        assert_eq!(end(&[0x5b, 0x31, 0xd2, 0xe9, 0, 1, 0, 0]), Some(false));
        // The same to somewhere else; a result that is made only now; a call; nothing but ends that never end.
        assert_eq!(end(&[0x5b, 0x31, 0xd2, 0xe9, 1, 1, 0, 0]), None);
        assert_eq!(end(&[0x31, 0xc0, 0xc3]), None);
        assert_eq!(end(&[0x5b, 0xe8, 0, 1, 0, 0, 0xc3]), None);
        assert_eq!(end(&[0x5b; LONGEST_END]), None);
    }

    #[test]
    fn additions_to_a_member_are_found_in_code() {
        // add [rbx+0x70], r12d; add [r12+0x70], eax; add [rbx+0x170], eax
        let near: [&[u8]; 2] = [&[0x90, 0x44, 0x01, 0x63, 0x70], &[0x41, 0x01, 0x44, 0x24, 0x70]];
        assert!(near.iter().all(|code| adds_to(code, 0x70) && !adds_to(code, 0x74)));
        assert!(adds_to(&[0x01, 0x83, 0x70, 1, 0, 0], 0x170) && !adds_to(&[0x01, 0x83, 0x70, 1], 0x170));
        // mov [rbx+0x70], eax
        assert!(!adds_to(&[0x89, 0x43, 0x70], 0x70));
    }

    fn iterator(m: &mut Maker, at: u64, members: &[(&'static str, u64)]) {
        for &(name, value) in members {
            m.set(at, "iov_iter", name, value);
        }
    }

    #[test]
    fn how_far_a_call_had_come_is_told_by_its_iterator() {
        let mut m = Maker::new();
        let stack = DIRECT + m.room(4096, 4096);
        // The outer one, the copy that has moved on, and what another call has left.
        for (at, address, within) in [(0, 0x1000, 0), (80, 0x1000, 30), (160, 0x2000, 70)] {
            let members = [("iter_type", ONE), ("data_source", 1), ("iov_offset", within)];
            iterator(&mut m, stack + at, &members);
            iterator(&mut m, stack + at, &[("count", 100 - within), ("ubuf", address)]);
        }
        // Two of three buffers are behind it, and five bytes of the third.
        let buffers =
            [(0x5000, 10), (0x6000, 20), (0x7000, 30)].map(|(address, length)| Buffer { address, length });
        let list = DIRECT + m.room(48, 16);
        for (index, buffer) in (0..).zip(buffers) {
            m.write_u64(list + index * 16, buffer.address);
            m.write_u64(list + index * 16 + 8, buffer.length);
        }
        let members =
            [("iter_type", VECTOR), ("iov_offset", 5), ("count", 25), ("iov", list + 32), ("nr_segs", 1)];
        iterator(&mut m, stack + 512, &members);
        // It has moved on to its end, and says that fifty bytes are left.
        let members =
            [("iter_type", VECTOR), ("iov_offset", 0), ("count", 50), ("iov", list + 48), ("nr_segs", 1)];
        iterator(&mut m, stack + 640, &members);
        // A place in a file.
        m.set(stack + 1024, "kiocb", "ki_filp", 0x77);
        m.set(stack + 1024, "kiocb", "ki_pos", 4711);
        let kernel = Machine::of(m).kernel();
        let one = [Buffer { address: 0x1000, length: 100 }];
        let all = (stack, stack + 2048);
        assert_eq!(kernel.progress(all.0, all.1, &one, true), Some(Progress { moved: 30, left: 70 }));
        assert_eq!(kernel.progress(stack, stack + 80, &one, true), Some(Progress { moved: 0, left: 100 }));
        assert_eq!(kernel.progress(all.0, all.1, &one, false), None, "it goes the other way");
        assert_eq!(kernel.progress(all.0, all.1, &buffers, false), Some(Progress { moved: 35, left: 25 }));
        assert_eq!(kernel.progress(all.0, all.1, &buffers[..2], false), None);
        let torn = Some(Progress { moved: 10, left: 50 });
        assert_eq!(kernel.progress(stack + 640, all.1, &buffers, false), torn, "it is being moved on");
        assert_eq!(kernel.progress(0x10, 0x20, &one, true), None);
        assert_eq!(kernel.place_in_file(all.0, all.1, 0x77), Some(4711));
        assert_eq!(kernel.place_in_file(all.0, all.1, 0x78), None);
    }
}
