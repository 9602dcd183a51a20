//! System calls that the executive treats in their own way, or makes itself. `asm/unistd_64.h`.

#![expect(missing_docs, reason = "these are the kernel's names")]
#![allow(non_upper_case_globals, reason = "and written as the kernel writes them")]

pub const fstat: u64 = 5;
pub const mmap: u64 = 9;
pub const mprotect: u64 = 10;
pub const munmap: u64 = 11;
pub const rt_sigaction: u64 = 13;
pub const rt_sigprocmask: u64 = 14;
pub const rt_sigreturn: u64 = 15;
pub const sched_yield: u64 = 24;
pub const nanosleep: u64 = 35;
pub const mremap: u64 = 25;
pub const madvise: u64 = 28;
pub const shmat: u64 = 30;
pub const getpid: u64 = 39;
pub const clone: u64 = 56;
pub const fork: u64 = 57;
pub const vfork: u64 = 58;
pub const execve: u64 = 59;
pub const exit: u64 = 60;
pub const kill: u64 = 62;
pub const shmdt: u64 = 67;
pub const getcwd: u64 = 79;
pub const readlink: u64 = 89;
pub const rt_sigsuspend: u64 = 130;
pub const sigaltstack: u64 = 131;
pub const prctl: u64 = 157;
pub const gettid: u64 = 186;
pub const getxattr: u64 = 191;
pub const futex: u64 = 202;
pub const remap_file_pages: u64 = 216;
pub const clock_gettime: u64 = 228;
pub const clock_nanosleep: u64 = 230;
pub const newfstatat: u64 = 262;
pub const pselect6: u64 = 270;
pub const ppoll: u64 = 271;
pub const epoll_pwait: u64 = 281;
pub const rt_tgsigqueueinfo: u64 = 297;
pub const process_vm_readv: u64 = 310;
pub const process_vm_writev: u64 = 311;
pub const exit_group: u64 = 231;
pub const seccomp: u64 = 317;
pub const execveat: u64 = 322;
pub const pkey_mprotect: u64 = 329;
pub const io_pgetevents: u64 = 333;
pub const io_uring_enter: u64 = 426;
pub const clone3: u64 = 435;
pub const epoll_pwait2: u64 = 441;

/// Whether the executive does anything but pass such a call on.
pub const fn is_special(number: u64) -> bool {
    matches!(
        number,
        mmap | mprotect
            | munmap
            | rt_sigaction
            | rt_sigprocmask
            | rt_sigreturn
            | mremap
            | madvise
            | shmat
            | clone
            | fork
            | vfork
            | execve
            | exit
            | shmdt
            | rt_sigsuspend
            | sigaltstack
            | prctl
            | remap_file_pages
            | pselect6
            | ppoll
            | epoll_pwait
            | seccomp
            | execveat
            | pkey_mprotect
            | io_pgetevents
            | io_uring_enter
            | clone3
            | epoll_pwait2
    )
}

/// Whether what the executive does needs the signal frame of a dispatch: all registers, or none of the stack.
pub const fn needs_frame(number: u64) -> bool {
    matches!(
        number,
        rt_sigreturn | sigaltstack | clone | fork | vfork | clone3 | execve | execveat | exit | exit_group
    )
}
