//! What the processor itself offers.

use rustix::pipe::{PipeFlags, pipe_with};
use std::os::fd::AsRawFd;
use syscalls::{Sysno, syscall};

use crate::child::{During, Note, Trouble, Verdict, expect};
use crate::facility::{Group, System};
use crate::row::{Family, Probe, Row};
use crate::tools::{PAGE, Pages};

pub(crate) const FAMILY: Family = Family {
    group: Group::Machine,
    rows: &[
        Row {
            name: "protection_keys",
            systems: &[System::LwcContexts, System::Hijack],
            purpose: "takes access to pages away, and gives it back, without a system call",
            fallback: "mprotect (2.7 us off and on), or another address space",
            probe: Probe::Child(protection_keys),
        },
        Row {
            name: "fsgsbase",
            systems: &[System::LwcRollback, System::Hijack, System::Orc],
            purpose: "switches the thread pointer, and the base of GS of instances, without a system call",
            fallback: "arch_prctl(ARCH_SET_FS), arch_prctl(ARCH_SET_GS)",
            probe: Probe::Child(fsgsbase),
        },
        Row {
            name: "user_shadow_stack",
            systems: &[System::LwcRollback, System::LwcContexts, System::Hijack],
            purpose: "to be known: where a program has it on, code that switches stacks must switch this one, too",
            fallback: "nothing to do: stacks may be switched freely",
            probe: Probe::Child(user_shadow_stack),
        },
    ],
};

fn protection_keys(_: &mut Note) -> Verdict {
    const PKEY_DISABLE_ACCESS: usize = 1;
    let pages = Pages::small(1).during("mmap")?;
    pages.write(0, 7);
    // SAFETY: it gives this thread a key, which no page has yet.
    let key = match unsafe { syscall!(Sysno::pkey_alloc, 0, PKEY_DISABLE_ACCESS) } {
        Err(syscalls::Errno::ENOSPC) => return Err(Trouble::missing("pkey_alloc: the processor has none")),
        other => other.during("pkey_alloc")?,
    };
    // SAFETY: the page is ours, and nothing reads it through a reference after this.
    unsafe { syscall!(Sysno::pkey_mprotect, pages.at(0), PAGE, libc::PROT_READ | libc::PROT_WRITE, key) }
        .during("pkey_mprotect")?;
    // The kernel minds the key of the thread it reads for, and answers instead of raising a signal.
    let (_reader, writer) = pipe_with(PipeFlags::CLOEXEC).during("pipe2")?;
    // SAFETY: the kernel reads one byte, or finds that it may not.
    let written = unsafe { syscall!(Sysno::write, writer.as_raw_fd(), pages.at(0), 1) };
    expect(written == Err(syscalls::Errno::EFAULT), "the key does not take the access away")
}

#[cfg(target_arch = "x86_64")]
fn fsgsbase(_: &mut Note) -> Verdict {
    const AT_HWCAP2: libc::c_ulong = 26;
    const HWCAP2_FSGSBASE: libc::c_ulong = 1 << 1;
    // SAFETY: it reads a table that the kernel handed to the process.
    let capabilities = unsafe { libc::getauxval(AT_HWCAP2) };
    expect(capabilities & HWCAP2_FSGSBASE != 0, "AT_HWCAP2 does not name it")?;
    let (base, first_word): (u64, u64);
    // SAFETY: the kernel has enabled the instruction; the ABI keeps the base at offset 0 of the segment.
    unsafe {
        std::arch::asm!("rdfsbase {}", "mov {}, fs:0", out(reg) base, out(reg) first_word, options(nostack, readonly));
    }
    expect(base == first_word, "rdfsbase does not give the thread pointer")
}

#[cfg(not(target_arch = "x86_64"))]
fn fsgsbase(_: &mut Note) -> Verdict {
    Err(Trouble::missing("an instruction of x86-64"))
}

#[cfg(target_arch = "x86_64")]
fn user_shadow_stack(note: &mut Note) -> Verdict {
    const ARCH_SHSTK_ENABLE: u32 = 0x5001;
    const ARCH_SHSTK_DISABLE: u32 = 0x5002;
    const ARCH_SHSTK_STATUS: u32 = 0x5005;
    const ARCH_SHSTK_SHSTK: u64 = 1;
    let mut status = 0u64;
    // SAFETY: the kernel writes one word to `status`, which outlives the call.
    unsafe { syscall!(Sysno::arch_prctl, ARCH_SHSTK_STATUS, &raw mut status) }.during("ARCH_SHSTK_STATUS")?;
    if status & ARCH_SHSTK_SHSTK != 0 {
        note.say(format_args!("on in this process"));
        return Ok(());
    }
    let (enabled, disabled): (usize, usize);
    // SAFETY: between the two calls there is no call, return or signal that the new shadow stack could contradict.
    unsafe {
        std::arch::asm!(
            "syscall",
            "mov {enabled}, rax",
            "mov eax, {number}",
            "mov edi, {disable}",
            "syscall",
            enabled = out(reg) enabled,
            number = const libc::SYS_arch_prctl,
            disable = const ARCH_SHSTK_DISABLE,
            inlateout("rax") Sysno::arch_prctl as usize => disabled,
            inlateout("rdi") ARCH_SHSTK_ENABLE as usize => _,
            in("rsi") ARCH_SHSTK_SHSTK,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    syscalls::Errno::from_ret(enabled).during("ARCH_SHSTK_ENABLE")?;
    syscalls::Errno::from_ret(disabled).during("ARCH_SHSTK_DISABLE")?;
    note.say(format_args!("off in this process"));
    Ok(())
}

#[cfg(not(target_arch = "x86_64"))]
fn user_shadow_stack(_: &mut Note) -> Verdict {
    Err(Trouble::missing("looked for on x86-64 only"))
}
