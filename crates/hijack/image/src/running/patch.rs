//! Rewriting of sites: instructions before a `syscall` make room for a jump to a stub, where they go on. See
//! [`crate::plan`] for what that does to threads and branches within.
//!
//! The steward says which instructions: a decoder has no place here. It keeps what it found, by the code's hash.
//!
//! Other threads may be executing the very page. So it is not written to: a copy with the jump in it, already
//! executable, is moved over it in one `mremap`. Threads see the old page or the new one; one that fetches in between
//! faults and waits in the kernel. No page is writable and executable at any time, whatever the alignment of the site.
//! Stubs are added to their pages in the same way.

use core::sync::atomic::{AtomicU8, AtomicU32, Ordering::Acquire, Ordering::Relaxed};

use super::count::{board, counted, timed};
use super::gates::{
    GATES, ORRERY_CONFIG, TARGETS, orrery_asked, orrery_counted, orrery_gates, orrery_judged, orrery_timed,
};
use super::kernel::{address, block_signals, call, failed, set_mask};
use super::policy::policy;
use super::requests::ask;
use super::stubs::{self, STUB};
use super::{landings, originals, own, permits, ranges, services};
use crate::board::{CALLS, CODE, SITE, YES, code_hash};
use crate::config::SA_ONSTACK;
use crate::numbers;
use crate::plan::{Plan, RELOCATED, SYSCALL, WORDS};

const PAGE: u64 = 4096;

const PROT_READ_WRITE: u64 = 3;
const PROT_READ_EXEC: u64 = 5;
const MAP_PRIVATE_ANONYMOUS: u64 = 0x22;
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

/// Changed under the lock of `ranges` only.
static GATES_USED: AtomicU32 = AtomicU32::new(0);

/// Rewrites the site whose call instruction ends at `end` and was executed with `made` in all of rax.
#[inline(never)]
pub(crate) fn rewrite(end: u64, made: u64) -> Outcome {
    let Some(start) = end.checked_sub(CODE as u64).filter(|start| ranges::containing(*start, end).is_some())
    else {
        return Outcome::Refused;
    };
    // SAFETY: the range is readable code, each time this is called.
    let read =
        || unsafe { core::ptr::with_exposed_provenance::<[u64; CODE / 8]>(start as usize).read_unaligned() };
    let code = read();
    let plan = match verdict(&code) {
        Some(Some(plan)) => plan,
        Some(None) => return Outcome::Refused,
        None => return Outcome::Later,
    };
    let Some(way) = Way::of(&plan, made) else { return Outcome::Refused };
    ranges::try_locked(|| match ranges::containing(start, end) {
        // Another thread was faster: what is to be said about landings holds for one jump only.
        Some(_) if read() != code => Outcome::Later,
        // SAFETY: the code is still mapped if it is on the list, which cannot change now.
        Some(range) => unsafe { jump(&plan, way, &code, end, range) },
        None => Outcome::Refused,
    })
    .unwrap_or(Outcome::Later)
}

/// What the steward says, or has said, about this code. `None` where it does not answer.
fn verdict(code: &[u64; CODE / 8]) -> Option<Option<Plan>> {
    let hash = code_hash(code);
    let remembered = || {
        let place = board().verdict_places(hash).find(|place| place.hash.load(Acquire) == hash)?;
        let mut words = [0; WORDS];
        for (word, place) in words.iter_mut().zip(&place.plan) {
            *word = place.load(Relaxed);
        }
        Some(Plan::decode(&words))
    };
    if let Some(known) = remembered() {
        return Some(known);
    }
    let mask = block_signals();
    let answer = ask(SITE, |request| {
        for (place, word) in request.code.iter().zip(code) {
            place.store(*word, Relaxed);
        }
    });
    set_mask(mask);
    match answer {
        Some(YES) => Some(remembered().flatten()),
        Some(_) => Some(None),
        None => None,
    }
}

/// How a stub has its call performed.
#[derive(Clone, Copy)]
enum Way {
    /// By a gate; counted before that, or not.
    Gate { number: u16 },
    /// By a function that times it, or asks the policy, or does what the executive does with such calls.
    Function { number: u16, function: unsafe extern "C" fn() },
    /// By a gate, unless rules about paths can hold: then as by a function.
    Asked { number: u16 },
    /// By looking at the word at `answer`, where a service remembers what to return; by a function that asks if there is nothing.
    Answer { number: u16, answer: u64 },
    /// By a gate or a function if it is an ordinary call: only then is its number known. If not, `asked` finds out what it is,
    /// or, in a program with small stacks, dispatch.
    Any { ask: bool },
}

impl Way {
    /// `None` where only dispatch will do.
    fn of(plan: &Plan, made: u64) -> Option<Self> {
        let small_stacks = ORRERY_CONFIG.action.flags.load(Relaxed) & SA_ONSTACK != 0;
        let Some(number) = plan.number else { return Some(Self::Any { ask: !small_stacks }) };
        let wide = u64::from(number);
        if wide != made || wide >= CALLS as u64 || numbers::needs_frame(wide) {
            return None;
        }
        let concerned = policy().filter(|policy| policy.concerns(wide));
        let judged = concerned.is_some();
        // An answer that is remembered is not counted: that would cost more than the answer.
        if let Some(answer) = services::remembered(wide).filter(|_| !judged && !counted()) {
            return Some(Self::Answer { number, answer: address(answer) });
        }
        let treated = ranges::treats(wide) || services::concerns(wide);
        if treated && small_stacks {
            return None;
        }
        if !treated && !timed() && concerned.is_some_and(|policy| permits::knows(policy, wide)) {
            return Some(Self::Asked { number });
        }
        Some(match (judged || treated, timed()) {
            (true, _) => Self::Function { number, function: orrery_judged },
            (false, true) => Self::Function { number, function: orrery_timed },
            (false, false) => Self::Gate { number },
        })
    }
}

impl Way {
    /// The call's number, if it is always the same.
    fn number(self) -> Option<u16> {
        match self {
            Self::Gate { number }
            | Self::Function { number, .. }
            | Self::Asked { number }
            | Self::Answer { number, .. } => Some(number),
            Self::Any { .. } => None,
        }
    }
}

/// Makes the stub, then the jump to it.
///
/// # Safety
/// The lock is held; `code` ends at `end`, in the code range `range`, with the plan's window.
unsafe fn jump(plan: &Plan, way: Way, code: &[u64; CODE / 8], end: u64, range: (u64, u64)) -> Outcome {
    let length = plan.length() + SYSCALL;
    let window = end - length as u64;
    let gate = GATES_USED.load(Relaxed);
    if gate as usize >= GATES {
        return Outcome::Refused;
    }
    let Some(place) = stubs::find(window, plan.wanted(), range.0, range.1) else {
        return Outcome::Refused;
    };
    let distance = place.at.wrapping_sub(window + crate::plan::JUMP as u64).cast_signed();
    let Some((bytes, changed)) = i32::try_from(distance).ok().and_then(|distance| plan.jump(distance)) else {
        return Outcome::Refused;
    };
    if window % PAGE + changed as u64 > PAGE {
        return Outcome::Refused;
    }
    let mut old = [0; CODE];
    for (bytes, word) in old.chunks_exact_mut(8).zip(code) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let mut stub = Assembler::new();
    let moved = old.get(CODE - length..).and_then(|code| {
        let room = stub.bytes.get_mut(..RELOCATED)?;
        plan.relocate(code, window, place.at, room)
    });
    let Some(moved) = moved else { return Outcome::Refused };
    stub.length = moved.length;
    let gate_address = (orrery_gates as *const ()).addr() as u64 + 8 * u64::from(gate);
    TARGETS[gate as usize].store(end, Relaxed);
    match way {
        Way::Gate { number } => stub.gate(number, gate_address),
        Way::Function { number, function } => stub.function(number, end, function),
        Way::Asked { number } => stub.asked(number, end, gate_address),
        Way::Answer { number, answer } => stub.answer(number, end, answer),
        Way::Any { ask } => stub.any(place.at, end, gate_address, ask),
    }
    let Some(code) = stub.bytes.get(..stub.length) else { return Outcome::Refused };
    for (at, target) in plan.landings().into_iter().zip(moved.landings) {
        if let (Some(at), Some(target)) = (at, target) {
            let behind = window + (at + SYSCALL) as u64;
            if !landings::add(behind, window, distance as i32, place.at + target as u64) {
                return Outcome::Refused;
            }
        }
    }
    stubs::note(gate as usize, place.at, stub.length, plan, way.number());
    // SAFETY: the stub's page is ours; the site's page is code, by the caller.
    unsafe {
        if !with_bytes(place.page(), place.at, code) {
            return Outcome::Later;
        }
        place.take(stub.length);
        GATES_USED.store(gate + 1, Relaxed);
        let jump = bytes.get(..changed).unwrap_or(&bytes);
        let before = old.get(CODE - length..CODE - length + changed).unwrap_or_default();
        if !originals::remember(window, before) {
            return Outcome::Refused;
        }
        if !with_bytes(window & !(PAGE - 1), window, jump) {
            return Outcome::Later;
        }
    }
    Outcome::Done
}

/// Replaces a page of code by a copy in which other bytes are at `at`.
///
/// # Safety
/// The page is readable and executable, nobody changes it, and `at..` lies in it.
pub(crate) unsafe fn with_bytes(page: u64, at: u64, bytes: &[u8]) -> bool {
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

/// Calls that a stub of any number must not simply pass on, by the last byte of their numbers: a byte is all that can be
/// looked up without touching the flags. So some calls are looked at in vain.
static TREATED: [AtomicU8; 256] = [const { AtomicU8::new(0) }; 256];

fn treated() -> u64 {
    for number in 0..CALLS as u64 {
        let judged = policy().is_some_and(|policy| policy.concerns(number));
        if judged || ranges::treats(number) || services::concerns(number) {
            TREATED[(number & 0xff) as usize].store(1, Relaxed);
        }
    }
    address(&TREATED)
}

struct Assembler {
    bytes: [u8; STUB],
    length: usize,
}

/// All of this leaves the flags alone. rax, rcx and r11 are free before a syscall, rax once the number is known.
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

    /// Goes through a gate, having counted.
    fn gate(&mut self, number: u16, gate: u64) {
        if counted() {
            self.count(number);
        }
        self.push(&[0x48, 0xb9]).word(gate); // movabs $gate,%rcx
        self.push(&[0xff, 0xe1]); // jmp *%rcx
    }

    fn count(&mut self, number: u16) {
        let row = board().row(u64::from(number));
        if own::possible() {
            let offset = address(&row.patched) - address(&board().calls);
            self.push(&[0xf3, 0x48, 0x0f, 0xae, 0xc1]); // rdfsbase %rcx
            self.push(&[0x41, 0xbb]).half(0); // mov $0,%r11d
            self.push(&[0xf2, 0x4c, 0x0f, 0x38, 0xf1, 0xd9]); // crc32 %rcx,%r11
            self.push(&[0x45, 0x0f, 0xb6, 0xdb]); // movzbl %r11b,%r11d
            self.push(&[0x47, 0x8d, 0x1c, 0x1b]); // lea (%r11,%r11),%r11d
            self.push(&[0x48, 0xb8]).word(address(&own::TABLE)); // movabs $table,%rax
            self.push(&[0x4e, 0x8d, 0x1c, 0xd8]); // lea (%rax,%r11,8),%r11
            self.push(&[0x49, 0x8b, 0x03]); // mov (%r11),%rax
            self.push(&[0x48, 0x8d, 0x0c, 0x01]); // lea (%rcx,%rax),%rcx
            self.push(&[0xe3, 20]); // jrcxz own
            self.count_with_lock(address(&row.patched)); // 18 bytes
            self.push(&[0xeb, 15]); // jmp restore
            self.push(&[0x9f]); // own: lahf
            self.push(&[0x0f, 0x90, 0xc0]); // seto %al
            self.push(&[0x4d, 0x8b, 0x5b, 0x08]); // mov 8(%r11),%r11
            self.push(&[0x49, 0xff, 0x83]).half(offset as u32); // incq offset(%r11)
        } else {
            self.count_with_lock(address(&row.patched));
        }
        self.push(&[0x04, 0x7f]); // restore: add $0x7f,%al: overflows if %al is 1
        self.push(&[0x9e]); // sahf
        self.push(&[0xb8]).half(u32::from(number)); // mov $number,%eax
    }

    /// Leaves the flags in al and ah.
    fn count_with_lock(&mut self, counter: u64) {
        self.push(&[0x9f]); // lahf
        self.push(&[0x0f, 0x90, 0xc0]); // seto %al
        self.push(&[0x48, 0xb9]).word(counter); // movabs $counter,%rcx
        self.push(&[0xf0, 0x48, 0xff, 0x01]); // lock incq (%rcx)
    }

    /// Has a call by the gate if no rule can hold about it.
    fn asked(&mut self, number: u16, back: u64, gate: u64) {
        self.push(&[0xb8]).half(u32::from(number)); // mov $number,%eax
        self.ask(back, gate);
    }

    /// The same, of the call whose number is in eax: 34 bytes.
    fn ask(&mut self, back: u64, gate: u64) {
        self.push(&[0x48, 0xb9]).word(back); // movabs $back,%rcx
        self.push(&[0x49, 0xbb]).word(gate); // movabs $gate,%r11
        self.push(&[0xff, 0x25]).half(0); // jmp *0(%rip): what follows
        self.word((orrery_asked as *const ()).addr() as u64);
    }

    /// Has the call performed by a function that takes its number in eax and where it returns to in rcx.
    fn function(&mut self, number: u16, back: u64, function: unsafe extern "C" fn()) {
        self.push(&[0xb8]).half(u32::from(number)); // mov $number,%eax
        self.leave_for(back, function);
    }

    fn leave_for(&mut self, back: u64, function: unsafe extern "C" fn()) {
        self.push(&[0x48, 0xb9]).word(back); // movabs $back,%rcx
        self.push(&[0x49, 0xbb]).word((function as *const ()).addr() as u64); // movabs $function,%r11
        self.push(&[0x41, 0xff, 0xe3]); // jmp *%r11
    }

    /// Returns the answer in the word at `answer`, if the word's highest byte says that there is one; else has the call performed
    /// as by [`Self::function`].
    fn answer(&mut self, number: u16, back: u64, answer: u64) {
        self.push(&[0x49, 0xbb]).word(back); // movabs $back,%r11
        self.push(&[0x48, 0xb9]).word(answer); // movabs $answer,%rcx
        self.push(&[0x48, 0x8b, 0x01]); // mov (%rcx),%rax
        self.push(&[0x48, 0x89, 0xc1]); // mov %rax,%rcx
        self.push(&[0x48, 0x0f, 0xc9]); // bswap %rcx
        self.push(&[0x0f, 0xb6, 0xc9]); // movzbl %cl,%ecx
        self.push(&[0xe3, 0x05]); // jrcxz unknown
        self.push(&[0x89, 0xc0]); // mov %eax,%eax
        self.push(&[0x41, 0xff, 0xe3]); // jmp *%r11
        self.push(&[0x4c, 0x89, 0xd9]); // unknown: mov %r11,%rcx
        self.push(&[0xb8]).half(u32::from(number)); // mov $number,%eax
        self.push(&[0x49, 0xbb]).word((orrery_judged as *const ()).addr() as u64); // movabs $orrery_judged,%r11
        self.push(&[0x41, 0xff, 0xe3]); // jmp *%r11
    }

    /// Looks the call up that is in eax; where it needs treatment, has `asked` see to that, or goes to the `syscall` before
    /// `back`.
    fn any(&mut self, stub: u64, back: u64, gate: u64, ask: bool) {
        let table = treated();
        // What the treatment takes, below.
        let treatment: u8 = if ask { 34 } else { 5 };
        self.push(&[0x0f, 0xb6, 0xc8]); // movzbl %al,%ecx
        self.push(&[0x49, 0xbb]).word(table); // movabs $table,%r11
        self.push(&[0x41, 0x0f, 0xb6, 0x0c, 0x0b]); // movzbl (%r11,%rcx),%ecx
        let told = policy().is_some_and(|policy| policy.concerns(numbers::epoll_pwait));
        if told {
            self.push(&[0xe3, treatment]); // jrcxz ordinary
        } else {
            // Go waits with epoll_pwait, without mask: that is an ordinary call.
            self.push(&[0xe3, 15 + treatment]); // jrcxz ordinary
            self.push(&[0x8d, 0x88]).half((numbers::epoll_pwait as u32).wrapping_neg()); // lea -nr(%rax),%ecx
            self.push(&[0xe3, 2]); // jrcxz waits
            self.push(&[0xeb, 5]); // jmp treatment
            self.push(&[0x4c, 0x89, 0xc1]); // waits: mov %r8,%rcx
            self.push(&[0xe3, treatment]); // jrcxz ordinary
        }
        if ask {
            self.ask(back, gate); // treatment
        } else {
            let next = stub + self.length as u64 + 5;
            let distance = (back - SYSCALL as u64).wrapping_sub(next);
            self.push(&[0xe9]).half(distance as u32); // treatment: jmp to the syscall
        }
        // ordinary:
        match (timed(), counted()) {
            (true, _) => self.leave_for(back, orrery_timed),
            (false, true) => self.leave_for(back, orrery_counted),
            (false, false) => {
                self.push(&[0x48, 0xb9]).word(gate); // movabs $gate,%rcx
                self.push(&[0xff, 0xe1]); // jmp *%rcx
            }
        }
    }
}
