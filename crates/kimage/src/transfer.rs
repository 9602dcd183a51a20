//! How far a call that moves bytes had come: the iterator over the program's buffers that it carries on the kernel's stack.
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
/// A frame that is larger is none.
const LARGEST_FRAME: u64 = 16 << 10;
/// The bytes of an instruction that calls, and its first one.
const CALL: (u64, u8) = (5, 0xe8);

/// A part of a program's memory that bytes are moved to or from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Where it is in the program.
    pub address: u64,
    /// How long.
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
    /// One that only a register had told.
    ByPointer,
}

impl Kernel {
    /// The words of the kernel's stack from one address to another.
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

    /// Where in its file the call stands that has this file's `kiocb` between two addresses of the stack.
    #[must_use]
    pub fn place_in_file(&self, from: u64, to: u64, file: u64) -> Option<u64> {
        self.words(from, to).find_map(|at| {
            let control = self.object("kiocb", at).ok()?;
            (control.u64("ki_filp").ok()? == file && control.u64("ki_complete").ok()? == 0)
                .then(|| control.u64("ki_pos").ok())?
        })
    }

    /// What a function had called last: who is in a call of it, or who has returned to it last, as the word below its frame tells.
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
}

/// What an iterator tells, if it is one over these buffers.
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
        return Ok(found.filter(|_| within == moved && ubuf == buffer.address));
    }
    if this != kind("ITER_IOVEC", VECTOR) {
        return Ok(None);
    }
    let rest = iterator.u64("nr_segs")?;
    let Some(passed) = (buffers.len() as u64).checked_sub(rest) else { return Ok(None) };
    let at = iterator.u64(if iterator.has("iov") { "iov" } else { "__iov" })?;
    let first = at.wrapping_sub(passed * 16);
    for (index, buffer) in (0..).zip(buffers) {
        let vector = kernel.object("iovec", first.wrapping_add(index * 16))?;
        if (vector.u64("iov_base")?, vector.u64("iov_len")?) != (buffer.address, buffer.length) {
            return Ok(None);
        }
    }
    let before = buffers.iter().take(usize::try_from(passed).unwrap_or(usize::MAX));
    let before: u64 = before.map(|buffer| buffer.length).fold(0, u64::saturating_add);
    Ok(found.filter(|_| before.saturating_add(within) == moved))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::{DIRECT, Machine, Maker};

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
        assert_eq!(kernel.progress(0x10, 0x20, &one, true), None);
        assert_eq!(kernel.place_in_file(all.0, all.1, 0x77), Some(4711));
        assert_eq!(kernel.place_in_file(all.0, all.1, 0x78), None);
    }
}
