//! A file table at rest.
//!
//! Which files a process had open can be remembered only by something that has them open too. A keeper is a process
//! that shares our memory (`CLONE_VM`: making one copies no page table) but has a copy of our file table, and sleeps.
//! From it a descriptor can be compared (kcmp(2)) and fetched back (pidfd_getfd(2)) whatever the program closed or
//! replaced meanwhile. It ends with us, sends no signal when it ends and is invisible to a plain `wait`.

use core::arch::global_asm;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, WaitOptions};

use crate::{Error, Result};

/// Bytes of stack that a keeper needs.
pub const KEEPER_STACK: usize = 4096;

#[cfg(target_arch = "x86_64")]
global_asm!(
    // usize orrery_sys_spawn_keeper(usize stack_top, usize parent)
    ".globl orrery_sys_spawn_keeper",
    ".hidden orrery_sys_spawn_keeper",
    "orrery_sys_spawn_keeper:",
    "    mov r9, rsi",         // the parent's process id
    "    mov rsi, rdi",        // the child's stack
    "    mov edi, 0x00800100", // CLONE_VM | CLONE_UNTRACED, and no signal at exit
    "    xor edx, edx",
    "    xor r10d, r10d",
    "    xor r8d, r8d",
    "    mov eax, 56", // clone
    "    syscall",
    "    test eax, eax",
    "    jz 2f",
    "    ret",
    // The child shares every byte with its parent, so it touches none: registers and system calls only.
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
    "3:  mov eax, 34", // pause
    "    syscall",
    "    jmp 3b",
    "4:  xor edi, edi",
    "    mov eax, 231", // exit_group
    "    syscall",
    "    ud2",
    "5:  .asciz \"orrery-keeper\"",
);

#[cfg(not(target_arch = "x86_64"))]
compile_error!("orrery-sys: keeper.rs has no assembly for this architecture yet; x86_64 is supported");

unsafe extern "C" {
    fn orrery_sys_spawn_keeper(stack_top: usize, parent: usize) -> isize;
}

/// A sleeping process that holds a copy of the file table as it was when the keeper was made.
#[derive(Debug)]
pub struct Keeper {
    pid: Pid,
}

impl Keeper {
    /// Copies the calling process' file table into a new keeper. Signals must be blocked by the caller, because the
    /// keeper inherits the mask and has to stay deaf.
    ///
    /// # Errors
    /// `EAGAIN` where no more processes may be made, `ENOMEM`.
    pub fn spawn() -> Result<Self> {
        let parent = usize::try_from(rustix::process::getpid().as_raw_pid()).unwrap_or(0);
        // The keeper runs on registers alone; the kernel wants a stack pointer all the same.
        let unused_stack = 16;
        // SAFETY: the child touches no memory (see above), so sharing ours with it has no effect on us.
        let result = unsafe { orrery_sys_spawn_keeper(unused_stack, parent) };
        let raw = i32::try_from(result).unwrap_or(0);
        match Pid::from_raw(raw) {
            Some(pid) if raw > 0 => Ok(Self { pid }),
            _ => Err(Error::new(
                "clone(CLONE_VM)",
                0,
                rustix::io::Errno::from_raw_os_error(-raw),
            )),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Whether descriptor `fd` of the calling process is still the file that the keeper has at the same number.
    ///
    /// # Errors
    /// `EBADF` where either is closed, `ESRCH` where the keeper is dead; see [`crate::kcmp::same_file`].
    pub fn holds(&self, fd: i32) -> Result<bool> {
        crate::kcmp::same_file(fd, self.pid, fd)
    }

    /// Fetches the file that the keeper has at number `fd`; the new descriptor has `CLOEXEC`.
    ///
    /// # Errors
    /// `EBADF` where it has none, `EPERM` where a security policy forbids it, `EMFILE`.
    pub fn fetch(&self, fd: i32) -> Result<OwnedFd> {
        let value = usize::try_from(fd).unwrap_or(usize::MAX);
        let pidfd = rustix::process::pidfd_open(self.pid, PidfdFlags::empty())
            .map_err(|e| Error::new("pidfd_open(keeper)", value, e))?;
        rustix::process::pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty())
            .map_err(|e| Error::new("pidfd_getfd(keeper)", value, e))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // It is our unreaped child, so the number cannot have been given to anybody else. Where it is dead already (or
        // the program reaped it with __WALL), there is nothing left to do.
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
        let clone_children = WaitOptions::from_bits_retain(libc::__WALL.cast_unsigned());
        let _ = rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(self.pid), clone_children));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, AsRawFd};

    #[test]
    fn a_closed_file_comes_back() {
        let file = tempfile();
        let number = file.as_raw_fd();
        let identity = rustix::fs::fstat(&file).unwrap().st_ino;
        let keeper = Keeper::spawn().unwrap();
        assert_eq!(keeper.holds(number), Ok(true));
        drop(file);
        let back = keeper.fetch(number).unwrap();
        assert_eq!(rustix::fs::fstat(&back).unwrap().st_ino, identity);
        let pid = keeper.pid();
        drop(keeper);
        assert!(
            rustix::process::test_kill_process(pid).is_err(),
            "the keeper ends with its handle"
        );
    }

    #[test]
    fn plain_wait_does_not_see_it() {
        let _keeper = Keeper::spawn().unwrap();
        let result = rustix::process::wait(WaitOptions::NOHANG);
        assert!(matches!(result, Err(rustix::io::Errno::CHILD) | Ok(None)));
    }

    fn tempfile() -> OwnedFd {
        rustix::fs::memfd_create("keeper-test", rustix::fs::MemfdFlags::CLOEXEC)
            .map(|fd| fd.as_fd().try_clone_to_owned().unwrap())
            .unwrap()
    }
}
