//! A child process that only pauses until it is killed, or until its parent ends.
//!
//! It is made for what it has: a copy of the parent's descriptor table ([`crate::fd_table_copy`]) or of its memory
//! ([`crate::memory_copy`]). It runs on registers and system calls alone, so it may share the parent's memory and needs no
//! stack. It sends no signal when it ends, and a plain `wait` does not see it.

use core::arch::naked_asm;

use rustix::process::{Pid, Signal, WaitOptions};

use crate::{Error, Result};

/// Spawns the child: `clone(2)` with `clone_flags` and no stack, after which the child runs on registers alone. It is a
/// naked function, not a global symbol: a program may contain two copies of this crate.
///
/// Returns the child's process ID, or the negated error number.
///
/// # Safety
/// All signals must be blocked, because the child may share the caller's memory and stack and must run no handler.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn spawn_paused_child(clone_flags: usize, parent: usize, close_files: usize) -> isize {
    naked_asm!(
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
        "5:  .asciz \"orrery-paused\"",
    )
}

#[cfg(not(target_arch = "x86_64"))]
compile_error!("orrery-sys: paused_child.rs has no assembly for this architecture yet; x86_64 is supported");

/// What the child has a copy of; it shares the rest with its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copied {
    /// The descriptor table. Memory is shared, so no page table is copied.
    FdTable,
    /// The memory, copied on write. The child closes all its descriptors.
    Memory,
}

/// A paused child; dropping the handle kills and reaps it.
#[derive(Debug)]
pub(crate) struct PausedChild {
    pid: Pid,
}

impl PausedChild {
    /// Spawns the child. Signals must be blocked, because it inherits the mask and may not run a handler.
    ///
    /// # Errors
    /// `EAGAIN` if no more processes may be created, `ENOMEM`.
    pub(crate) fn spawn(copied: Copied) -> Result<Self> {
        const CLONE_VM: usize = 0x100;
        const CLONE_UNTRACED: usize = 0x0080_0000;
        let parent = usize::try_from(rustix::process::getpid().as_raw_pid()).unwrap_or(0);
        let (flags, close) = match copied {
            Copied::FdTable => (CLONE_VM | CLONE_UNTRACED, 0),
            Copied::Memory => (CLONE_UNTRACED, 1),
        };
        // SAFETY: the caller has blocked all signals, and the child touches no memory: whether it shares or copies ours has
        // no effect on us.
        let result = unsafe { spawn_paused_child(flags, parent, close) };
        let raw = i32::try_from(result).unwrap_or(0);
        match Pid::from_raw(raw.max(0)) {
            Some(pid) => Ok(Self { pid }),
            None => Err(Error::new("clone", flags, rustix::io::Errno::from_raw_os_error(-raw))),
        }
    }

    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }
}

impl Drop for PausedChild {
    fn drop(&mut self) {
        // It is our unreaped child, so the PID cannot have been reused. If it is dead already (or
        // the program reaped it with __WALL), there is nothing left to do.
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
        let clone_children = WaitOptions::from_bits_retain(libc::__WALL.cast_unsigned());
        let _ = rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(self.pid), clone_children));
    }
}
