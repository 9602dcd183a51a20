//! A child that does nothing: it sleeps until it is killed, and ends when we do.
//!
//! Its worth lies in what it has: a copy of our file table ([`crate::keeper`]) or of our memory ([`crate::holder`]). It
//! runs on registers and system calls alone, so it may share our memory and needs none of its own; it sends no signal
//! when it ends and is invisible to a plain `wait`.

use core::arch::global_asm;

use rustix::process::{Pid, Signal, WaitOptions};

use crate::{Error, Result};

#[cfg(target_arch = "x86_64")]
global_asm!(
    // isize orrery_sys_spawn_sleeper(usize clone_flags, usize parent, usize close_files)
    ".globl orrery_sys_spawn_sleeper",
    ".hidden orrery_sys_spawn_sleeper",
    "orrery_sys_spawn_sleeper:",
    "    mov r9, rsi", // the parent's process id
    "    push rbx",
    "    mov rbx, rdx",
    "    xor esi, esi", // the child's stack pointer: ours, which it never uses
    "    xor edx, edx",
    "    xor r10d, r10d",
    "    xor r8d, r8d",
    "    mov eax, 56", // clone
    "    syscall",
    "    test eax, eax",
    "    jz 2f",
    "    pop rbx",
    "    ret",
    "2:  mov edi, 1", // PR_SET_PDEATHSIG
    "    mov esi, 9", // SIGKILL
    "    mov eax, 157",
    "    syscall",
    "    mov eax, 110", // getppid: did the parent die before that?
    "    syscall",
    "    cmp rax, r9",
    "    jne 4f",
    "    mov edi, 15", // PR_SET_NAME
    "    lea rsi, [rip + 5f]",
    "    mov eax, 157",
    "    syscall",
    "    test ebx, ebx",
    "    jz 3f",
    "    xor edi, edi",
    "    mov esi, -1",
    "    xor edx, edx",
    "    mov eax, 436", // close_range
    "    syscall",
    "3:  mov eax, 34", // pause
    "    syscall",
    "    jmp 3b",
    "4:  xor edi, edi",
    "    mov eax, 231", // exit_group
    "    syscall",
    "    ud2",
    "5:  .asciz \"orrery-sleeper\"",
);

#[cfg(not(target_arch = "x86_64"))]
compile_error!("orrery-sys: sleeper.rs has no assembly for this architecture yet; x86_64 is supported");

unsafe extern "C" {
    fn orrery_sys_spawn_sleeper(clone_flags: usize, parent: usize, close_files: usize) -> isize;
}

/// What a sleeper has of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Having {
    /// A copy of the file table; memory is shared, which makes no page table.
    Files,
    /// A copy-on-write copy of memory, and no files.
    Memory,
}

/// A sleeping child; it is killed and reaped when the handle goes.
#[derive(Debug)]
pub(crate) struct Sleeper {
    pid: Pid,
}

impl Sleeper {
    /// Makes one. Signals must be blocked: it inherits the mask and has to stay deaf.
    ///
    /// # Errors
    /// `EAGAIN` where no more processes may be made, `ENOMEM`.
    pub(crate) fn spawn(having: Having) -> Result<Self> {
        const CLONE_VM: usize = 0x100;
        const CLONE_UNTRACED: usize = 0x0080_0000;
        let parent = usize::try_from(rustix::process::getpid().as_raw_pid()).unwrap_or(0);
        let (flags, close) = match having {
            Having::Files => (CLONE_VM | CLONE_UNTRACED, 0),
            Having::Memory => (CLONE_UNTRACED, 1),
        };
        // SAFETY: the child touches no memory, so whether it shares ours or copies it has no effect on us.
        let result = unsafe { orrery_sys_spawn_sleeper(flags, parent, close) };
        let raw = i32::try_from(result).unwrap_or(0);
        match Pid::from_raw(raw.max(0)) {
            Some(pid) => Ok(Self { pid }),
            None => Err(Error::new("clone", flags, rustix::io::Errno::from_raw_os_error(-raw))),
        }
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // It is our unreaped child, so the number cannot have been given to anybody else. Where it is dead already (or
        // the program reaped it with __WALL), there is nothing left to do.
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
        let clone_children = WaitOptions::from_bits_retain(libc::__WALL.cast_unsigned());
        let _ = rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(self.pid), clone_children));
    }
}
