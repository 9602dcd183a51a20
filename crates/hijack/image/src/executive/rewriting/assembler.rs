//! Writes the code of stubs.

use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

use crate::executive::abi::state::{counted, shared_page, timed};
use crate::executive::abi::syscall::address;
use crate::executive::abi::thread_counters;
use crate::executive::abi::trampoline::{orrery_counted, orrery_stub_call, orrery_stub_filter, orrery_timed};
use crate::executive::memory::stub_pages::STUB;
use crate::executive::policy::table::policy;
use crate::executive::process::mm;
use crate::executive::services;
use crate::nr::{self, CALLS};
use crate::rewrite_plan::SYSCALL;

/// Calls that a stub of any number must not simply pass on, by the last byte of their numbers: a byte is all that can be
/// looked up without touching the flags. So some calls are looked at in vain.
static TREATED: [AtomicU8; 256] = [const { AtomicU8::new(0) }; 256];

fn treated() -> u64 {
    for number in 0..CALLS as u64 {
        let judged = policy().is_some_and(|policy| policy.concerns(number));
        if judged || mm::treats(number) || services::concerns(number) {
            TREATED[(number & 0xff) as usize].store(1, Relaxed);
        }
    }
    address(&TREATED)
}

pub(super) struct Assembler {
    pub(super) bytes: [u8; STUB],
    pub(super) length: usize,
}

/// All of this leaves the flags alone. rax, rcx and r11 are free before a syscall, rax once the number is known.
impl Assembler {
    /// Returns what is not written traps.
    pub(super) fn new() -> Self {
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

    /// Goes through a trampoline, having counted.
    pub(super) fn trampoline(&mut self, number: u16, trampoline: u64) {
        if counted() {
            self.count(number);
        }
        self.push(&[0x48, 0xb9]).word(trampoline); // movabs $trampoline,%rcx
        self.push(&[0xff, 0xe1]); // jmp *%rcx
    }

    fn count(&mut self, number: u16) {
        let row = shared_page().row(u64::from(number));
        if thread_counters::available() {
            let offset = address(&row.patched) - address(&shared_page().calls);
            self.push(&[0xf3, 0x48, 0x0f, 0xae, 0xc1]); // rdfsbase %rcx
            self.push(&[0x41, 0xbb]).half(0); // mov $0,%r11d
            self.push(&[0xf2, 0x4c, 0x0f, 0x38, 0xf1, 0xd9]); // crc32 %rcx,%r11
            self.push(&[0x45, 0x0f, 0xb6, 0xdb]); // movzbl %r11b,%r11d
            self.push(&[0x47, 0x8d, 0x1c, 0x1b]); // lea (%r11,%r11),%r11d
            self.push(&[0x48, 0xb8]).word(address(&thread_counters::TABLE)); // movabs $table,%rax
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

    /// Has a call by the trampoline if no rule can hold about it.
    pub(super) fn filtered(&mut self, number: u16, back: u64, trampoline: u64) {
        self.push(&[0xb8]).half(u32::from(number)); // mov $number,%eax
        self.ask(back, trampoline);
    }

    /// The same, of the call whose number is in eax: 34 bytes.
    fn ask(&mut self, back: u64, trampoline: u64) {
        self.push(&[0x48, 0xb9]).word(back); // movabs $back,%rcx
        self.push(&[0x49, 0xbb]).word(trampoline); // movabs $trampoline,%r11
        self.push(&[0xff, 0x25]).half(0); // jmp *0(%rip): what follows
        self.word((orrery_stub_filter as *const ()).addr() as u64);
    }

    /// Has the call performed by a function that takes its number in eax and where it returns to in rcx.
    pub(super) fn function(&mut self, number: u16, back: u64, function: unsafe extern "C" fn()) {
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
    pub(super) fn cached_answer(&mut self, number: u16, back: u64, answer: u64) {
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
        self.push(&[0x49, 0xbb]).word((orrery_stub_call as *const ()).addr() as u64); // movabs $orrery_stub_call,%r11
        self.push(&[0x41, 0xff, 0xe3]); // jmp *%r11
    }

    /// Looks the call up that is in eax; where it needs treatment, has `asked` see to that, or goes to the `syscall` before
    /// `back`.
    pub(super) fn any(&mut self, stub: u64, back: u64, trampoline: u64, ask: bool) {
        let table = treated();
        // What the treatment takes, below.
        let treatment: u8 = if ask { 34 } else { 5 };
        self.push(&[0x0f, 0xb6, 0xc8]); // movzbl %al,%ecx
        self.push(&[0x49, 0xbb]).word(table); // movabs $table,%r11
        self.push(&[0x41, 0x0f, 0xb6, 0x0c, 0x0b]); // movzbl (%r11,%rcx),%ecx
        let judged = policy().is_some_and(|policy| policy.concerns(nr::epoll_pwait));
        if judged {
            self.push(&[0xe3, treatment]); // jrcxz ordinary
        } else {
            // Go waits with epoll_pwait, without mask: that is an ordinary call.
            self.push(&[0xe3, 15 + treatment]); // jrcxz ordinary
            self.push(&[0x8d, 0x88]).half((nr::epoll_pwait as u32).wrapping_neg()); // lea -nr(%rax),%ecx
            self.push(&[0xe3, 2]); // jrcxz waits
            self.push(&[0xeb, 5]); // jmp treatment
            self.push(&[0x4c, 0x89, 0xc1]); // waits: mov %r8,%rcx
            self.push(&[0xe3, treatment]); // jrcxz ordinary
        }
        if ask {
            self.ask(back, trampoline); // treatment
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
                self.push(&[0x48, 0xb9]).word(trampoline); // movabs $trampoline,%rcx
                self.push(&[0xff, 0xe1]); // jmp *%rcx
            }
        }
    }
}
