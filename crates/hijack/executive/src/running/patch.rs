//! Rewriting of sites: `mov $number,%eax; syscall` becomes `jmp stub; syscall`.
//!
//! Only the five bytes of the mov change. Whoever arrives at the syscall itself (a branch, a thread that had executed the
//! mov already) is dispatched as before. No branch can lead between the mov's bytes if the mov is an instruction, which
//! the steward shows with a decoder; it keeps what it found, by the code's hash.
//!
//! Other threads may be executing the very page. So it is not written to: a copy with the jump in it, already
//! executable, is moved over it in one `mremap`. Threads see the old page or the new one; one that fetches in between
//! faults and waits in the kernel. No page is writable and executable at any time, whatever the alignment of the site.
//! Stubs are added to their pages in the same way.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::count::{board, timed};
use super::gates::{GATES, TARGETS, orrery_gates, orrery_judged, orrery_timed};
use super::kernel::{address, block_signals, call, failed, set_mask};
use super::policy::policy;
use super::requests::ask;
use super::{ranges, services};
use crate::board::{CALLS, CODE, SITE, VERDICTS, YES, code_hash};
use crate::numbers;

const PAGE: u64 = 4096;
/// `mov $imm32,%eax` and `syscall`.
const MOV: u64 = 5;
const SYSCALL: u64 = 2;
const MOV_OPCODE: u8 = 0xb8;
/// Room for one stub.
const STUB: usize = 64;
const STUBS_IN_PAGE: u32 = (PAGE as usize / STUB) as u32;
const STUB_PAGES: usize = 64;
/// How far a jump reaches, less a margin.
const REACH: u64 = (1 << 31) - (1 << 20);
/// Pages for stubs are looked for in steps of this, not to lie in the way of a heap that grows.
const STEP: u64 = 1 << 20;
/// The first pages stay unmapped: a NULL pointer faults, whatever its offset.
const LOWEST: u64 = 1 << 16;

const PROT_READ_WRITE: u64 = 3;
const PROT_READ_EXEC: u64 = 5;
const MAP_PRIVATE_ANONYMOUS: u64 = 0x22;
const MAP_FIXED_NOREPLACE: u64 = 0x10_0000;
const MREMAP_MAYMOVE_FIXED: u64 = 3;

/// What became of an attempt.
pub(crate) enum Outcome {
    /// The site jumps now.
    Done,
    /// It cannot, and never will.
    Refused,
    /// Somebody else is at it, or memory is short.
    Later,
}

struct StubPage {
    start: AtomicU64,
    used: AtomicU32,
}

/// Changed under the lock of `ranges` only.
static STUBS: [StubPage; STUB_PAGES] =
    [const { StubPage { start: AtomicU64::new(0), used: AtomicU32::new(0) } }; STUB_PAGES];
static GATES_USED: AtomicU32 = AtomicU32::new(0);

/// Whether stubs lie in `[start, end)`.
pub(crate) fn stubs_overlap(start: u64, end: u64) -> bool {
    STUBS
        .iter()
        .map(|page| page.start.load(Relaxed))
        .any(|page| page != 0 && page < end && start < page + PAGE)
}

/// Rewrites the site whose call instruction ends at `end` and made this call.
pub(crate) fn rewrite(end: u64, number: u64) -> Outcome {
    let mov = end - SYSCALL - MOV;
    let window = end - CODE as u64;
    if number >= CALLS as u64
        || numbers::is_special(number)
        || mov % PAGE > PAGE - MOV
        || ranges::containing(window, end).is_none()
    {
        return Outcome::Refused;
    }
    // SAFETY: the range is readable code.
    let code =
        unsafe { core::ptr::with_exposed_provenance::<[u64; CODE / 8]>(window as usize).read_unaligned() };
    if !looks_right(&code, number) {
        return Outcome::Refused;
    }
    match verdict(&code, number) {
        Some(true) => {}
        Some(false) => return Outcome::Refused,
        None => return Outcome::Later,
    }
    ranges::try_locked(|| match ranges::containing(window, end) {
        // SAFETY: the window's code is still mapped if it is on the list, which cannot change now.
        Some((start, last)) => unsafe { jump(mov, end, number, start, last) },
        None => Outcome::Refused,
    })
    .unwrap_or(Outcome::Later)
}

/// Whether the last seven bytes are those of a mov of that number, and of a syscall.
fn looks_right(code: &[u64; CODE / 8], number: u64) -> bool {
    let [_, opcode, a, b, c, d, e, f] = code[CODE / 8 - 1].to_le_bytes();
    opcode == MOV_OPCODE && u64::from(u32::from_le_bytes([a, b, c, d])) == number && [e, f] == [0x0f, 0x05]
}

/// What the steward says, or has said, about this code.
fn verdict(code: &[u64; CODE / 8], number: u64) -> Option<bool> {
    let hash = code_hash(code);
    let first = (hash >> 8) as usize;
    for probe in 0..8 {
        let found = board().verdicts[(first + probe) % VERDICTS].load(Relaxed);
        if found & !1 == hash {
            return Some(found & 1 != 0);
        }
        if found == 0 {
            break;
        }
    }
    let mask = block_signals();
    let answer = ask(SITE, |request| {
        request.nonce.store(number, Relaxed);
        for (place, word) in request.code.iter().zip(code) {
            place.store(*word, Relaxed);
        }
    });
    set_mask(mask);
    answer.map(|answer| answer == YES)
}

/// Makes the stub, then the jump to it.
///
/// # Safety
/// The lock is held; `mov` is an instruction in a page of the code range `[start, last)`.
unsafe fn jump(mov: u64, end: u64, number: u64, start: u64, last: u64) -> Outcome {
    let gate = GATES_USED.load(Relaxed);
    if gate as usize >= GATES {
        return Outcome::Refused;
    }
    let Some(page) = stub_page(start, last, mov) else {
        return Outcome::Refused;
    };
    let index = page.used.load(Relaxed);
    let stub = page.start.load(Relaxed) + u64::from(index) * STUB as u64;
    TARGETS[gate as usize].store(end, Relaxed);
    let gate_address = (orrery_gates as *const ()).addr() as u64 + 8 * u64::from(gate);
    let ruled = policy().is_some_and(|policy| policy.concerns(number));
    let remembered = services::remembered(number).filter(|_| !ruled && !timed());
    let code = match remembered {
        Some(answer) => answering_stub(number, end, address(answer)),
        None if ruled || services::concerns(number) => calling_stub(number, end, orrery_judged),
        None if timed() => calling_stub(number, end, orrery_timed),
        None => counting_stub(number, gate_address),
    };
    // SAFETY: the stub page is ours; the site's page is code, by the caller.
    unsafe {
        if !with_bytes(page.start.load(Relaxed), stub, &code) {
            return Outcome::Later;
        }
        page.used.store(index + 1, Relaxed);
        GATES_USED.store(gate + 1, Relaxed);
        let distance = stub.wrapping_sub(mov + MOV) as u32;
        let [a, b, c, d] = distance.to_le_bytes();
        if !with_bytes(mov & !(PAGE - 1), mov, &[0xe9, a, b, c, d]) {
            return Outcome::Later;
        }
    }
    Outcome::Done
}

/// A page with room for a stub, near enough.
fn stub_page(start: u64, last: u64, mov: u64) -> Option<&'static StubPage> {
    let near = |page: u64| page.abs_diff(mov) < REACH;
    let with_room = STUBS.iter().find(|page| {
        let at = page.start.load(Relaxed);
        at != 0 && near(at) && page.used.load(Relaxed) < STUBS_IN_PAGE
    });
    if with_room.is_some() {
        return with_room;
    }
    let page = STUBS.iter().find(|page| page.start.load(Relaxed) == 0)?;
    // Below first: above a program lies its heap.
    let below = (1..).map(|k| start.saturating_sub(k * STEP)).take_while(|at| *at >= LOWEST && near(*at));
    let lowest = core::iter::once(LOWEST).filter(|at| near(*at));
    let above = (1..).map(|k| last + k * STEP).take_while(|at| near(*at));
    let at = below.chain(lowest).chain(above).find(|at| map_at(*at & !(PAGE - 1)))? & !(PAGE - 1);
    page.used.store(0, Relaxed);
    page.start.store(at, Relaxed);
    Some(page)
}

/// Maps a page exactly there, if nothing is there.
fn map_at(at: u64) -> bool {
    let flags = MAP_PRIVATE_ANONYMOUS | MAP_FIXED_NOREPLACE;
    // SAFETY: replaces nothing; a kernel that does not know the flag may map elsewhere, which is undone.
    unsafe {
        let result = call(numbers::mmap, [at, PAGE, PROT_READ_EXEC, flags, u64::MAX, 0]);
        if result == at.cast_signed() {
            return true;
        }
        if !failed(result) {
            call(numbers::munmap, [result.cast_unsigned(), PAGE, 0, 0, 0, 0]);
        }
    }
    false
}

/// Replaces a page of code by a copy in which other bytes are at `at`.
///
/// # Safety
/// The page is readable and executable, nobody changes it, and `at..` lies in it.
unsafe fn with_bytes(page: u64, at: u64, bytes: &[u8]) -> bool {
    // SAFETY: the scratch page is ours until it is moved; the move replaces a mapping of the same kind. `mremap` looks
    // for its limits before it unmaps anything.
    unsafe {
        let flags = MAP_PRIVATE_ANONYMOUS;
        let scratch = call(numbers::mmap, [0, PAGE, PROT_READ_WRITE, flags, u64::MAX, 0]);
        if failed(scratch) {
            return false;
        }
        let scratch = scratch.cast_unsigned();
        let from = core::ptr::with_exposed_provenance::<u8>(page as usize);
        let to = core::ptr::with_exposed_provenance_mut::<u8>(scratch as usize);
        core::ptr::copy_nonoverlapping(from, to, PAGE as usize);
        core::ptr::copy_nonoverlapping(bytes.as_ptr(), to.add((at - page) as usize), bytes.len());
        let protected = call(numbers::mprotect, [scratch, PAGE, PROT_READ_EXEC, 0, 0, 0]);
        let moved = if failed(protected) {
            protected
        } else {
            call(numbers::mremap, [scratch, PAGE, PAGE, MREMAP_MAYMOVE_FIXED, page, 0])
        };
        if failed(moved) {
            call(numbers::munmap, [scratch, PAGE, 0, 0, 0, 0]);
        }
        !failed(moved)
    }
}

/// Counts the call, leaving the flags alone, and jumps to a gate. rax, rcx and r11 are free before a syscall.
fn counting_stub(number: u64, gate: u64) -> [u8; STUB] {
    let counter = address(&board().row(number).patched);
    let mut stub = Assembler::new();
    stub.push(&[0x9f]); // lahf
    stub.push(&[0x0f, 0x90, 0xc0]); // seto %al
    stub.push(&[0x41, 0x89, 0xc3]); // mov %eax,%r11d
    stub.push(&[0x48, 0xb9]).word(counter); // movabs $counter,%rcx
    stub.push(&[0xf0, 0x48, 0xff, 0x01]); // lock incq (%rcx)
    stub.push(&[0x44, 0x89, 0xd8]); // mov %r11d,%eax
    stub.push(&[0x04, 0x7f]); // add $0x7f,%al: overflows if %al is 1
    stub.push(&[0x9e]); // sahf
    stub.push(&[0xb8]).half(number as u32); // mov $number,%eax
    stub.push(&[0x48, 0xb9]).word(gate); // movabs $gate,%rcx
    stub.push(&[0xff, 0xe1]); // jmp *%rcx
    stub.bytes
}

/// Has the call performed by a function that takes its number in eax and where it returns to in rcx.
fn calling_stub(number: u64, back: u64, function: unsafe extern "C" fn()) -> [u8; STUB] {
    let mut stub = Assembler::new();
    stub.push(&[0xb8]).half(number as u32); // mov $number,%eax
    stub.push(&[0x48, 0xb9]).word(back); // movabs $back,%rcx
    stub.push(&[0x49, 0xbb]).word((function as *const ()).addr() as u64); // movabs $function,%r11
    stub.push(&[0x41, 0xff, 0xe3]); // jmp *%r11
    stub.bytes
}

/// Returns the answer that a service remembers in the word at `answer`, if the word's highest byte says that there is one;
/// else has the call performed, as above. Such an answer is not counted: that would cost more than the answer.
fn answering_stub(number: u64, back: u64, answer: u64) -> [u8; STUB] {
    let mut stub = Assembler::new();
    stub.push(&[0x49, 0xbb]).word(back); // movabs $back,%r11
    stub.push(&[0x48, 0xb9]).word(answer); // movabs $answer,%rcx
    stub.push(&[0x48, 0x8b, 0x01]); // mov (%rcx),%rax
    stub.push(&[0x48, 0x89, 0xc1]); // mov %rax,%rcx
    stub.push(&[0x48, 0x0f, 0xc9]); // bswap %rcx
    stub.push(&[0x0f, 0xb6, 0xc9]); // movzbl %cl,%ecx
    stub.push(&[0xe3, 0x05]); // jrcxz 1f
    stub.push(&[0x89, 0xc0]); // mov %eax,%eax
    stub.push(&[0x41, 0xff, 0xe3]); // jmp *%r11
    stub.push(&[0x4c, 0x89, 0xd9]); // 1: mov %r11,%rcx
    stub.push(&[0xb8]).half(number as u32); // mov $number,%eax
    stub.push(&[0x49, 0xbb]).word((orrery_judged as *const ()).addr() as u64); // movabs $orrery_judged,%r11
    stub.push(&[0x41, 0xff, 0xe3]); // jmp *%r11
    stub.bytes
}

struct Assembler {
    bytes: [u8; STUB],
    length: usize,
}

impl Assembler {
    /// What is not written traps.
    fn new() -> Self {
        Self { bytes: [0xcc; STUB], length: 0 }
    }

    fn push(&mut self, bytes: &[u8]) -> &mut Self {
        for byte in bytes {
            if let Some(place) = self.bytes.get_mut(self.length) {
                *place = *byte;
            }
            self.length += 1;
        }
        self
    }

    fn half(&mut self, value: u32) {
        self.push(&value.to_le_bytes());
    }

    fn word(&mut self, value: u64) {
        self.push(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ending(bytes: [u8; 8]) -> [u64; CODE / 8] {
        let mut code = [0; CODE / 8];
        code[CODE / 8 - 1] = u64::from_le_bytes(bytes);
        code
    }

    #[test]
    fn only_a_mov_of_the_number_looks_right() {
        let mov = [0x90, 0xb8, 39, 0, 0, 0, 0x0f, 0x05];
        assert!(looks_right(&ending(mov), 39));
        assert!(!looks_right(&ending(mov), 40));
        assert!(!looks_right(&ending([0x90, 0xb9, 39, 0, 0, 0, 0x0f, 0x05]), 39));
        assert!(!looks_right(&ending([0x90, 0xb8, 39, 0, 0, 0, 0xcd, 0x80]), 39));
    }

    #[test]
    fn a_stub_has_room() {
        let stub = calling_stub(39, 0x1234, orrery_timed);
        assert_eq!(stub[..5], [0xb8, 39, 0, 0, 0]);
        assert_eq!(stub[28..], [0xcc; STUB - 28]);
        let stub = answering_stub(39, 0x1234, 0x5678);
        assert_eq!(stub[57..], [0x41, 0xff, 0xe3, 0xcc, 0xcc, 0xcc, 0xcc]);
    }
}
