//! System calls that the executive treats in their own way, or makes itself. `asm/unistd_64.h`.

#![allow(missing_docs, reason = "these are the kernel's names")]
#![allow(non_upper_case_globals, reason = "and written as the kernel writes them")]

pub const close: u64 = 3;
pub const pread64: u64 = 17;
pub const fstat: u64 = 5;
pub const poll: u64 = 7;
pub const mmap: u64 = 9;
pub const mprotect: u64 = 10;
pub const brk: u64 = 12;
pub const munmap: u64 = 11;
pub const rt_sigaction: u64 = 13;
pub const rt_sigprocmask: u64 = 14;
pub const rt_sigreturn: u64 = 15;
pub const sched_yield: u64 = 24;
pub const nanosleep: u64 = 35;
pub const mremap: u64 = 25;
pub const madvise: u64 = 28;
pub const shmat: u64 = 30;
pub const ioctl: u64 = 16;
pub const writev: u64 = 20;
pub const getpid: u64 = 39;
pub const recvfrom: u64 = 45;
pub const sendmsg: u64 = 46;
pub const recvmsg: u64 = 47;
pub const getsockname: u64 = 51;
pub const getpeername: u64 = 52;
pub const setsockopt: u64 = 54;
pub const getsockopt: u64 = 55;
pub const clone: u64 = 56;
pub const fork: u64 = 57;
pub const vfork: u64 = 58;
pub const execve: u64 = 59;
pub const exit: u64 = 60;
pub const kill: u64 = 62;
pub const fcntl: u64 = 72;
pub const shmdt: u64 = 67;
pub const getcwd: u64 = 79;
pub const readlink: u64 = 89;
pub const rt_sigtimedwait: u64 = 128;
pub const rt_sigsuspend: u64 = 130;
pub const sigaltstack: u64 = 131;
pub const ptrace: u64 = 101;
pub const prctl: u64 = 157;
pub const gettid: u64 = 186;
pub const getxattr: u64 = 191;
pub const futex: u64 = 202;
pub const remap_file_pages: u64 = 216;
pub const clock_gettime: u64 = 228;
pub const epoll_wait: u64 = 232;
pub const tgkill: u64 = 234;
pub const clock_nanosleep: u64 = 230;
pub const newfstatat: u64 = 262;
pub const pselect6: u64 = 270;
pub const ppoll: u64 = 271;
pub const epoll_pwait: u64 = 281;
pub const signalfd: u64 = 282;
pub const signalfd4: u64 = 289;
pub const rt_tgsigqueueinfo: u64 = 297;
pub const process_vm_readv: u64 = 310;
pub const sendmmsg: u64 = 307;
pub const process_vm_writev: u64 = 311;
pub const exit_group: u64 = 231;
pub const seccomp: u64 = 317;
pub const execveat: u64 = 322;
pub const pkey_mprotect: u64 = 329;
pub const io_pgetevents: u64 = 333;
pub const io_uring_enter: u64 = 426;
pub const getuid: u64 = 102;
pub const getgid: u64 = 104;
pub const setuid: u64 = 105;
pub const setgid: u64 = 106;
pub const geteuid: u64 = 107;
pub const getegid: u64 = 108;
pub const setreuid: u64 = 113;
pub const setregid: u64 = 114;
pub const setresuid: u64 = 117;
pub const setresgid: u64 = 119;
pub const getresuid: u64 = 118;
pub const getresgid: u64 = 120;
pub const capget: u64 = 125;
pub const capset: u64 = 126;
pub const rt_sigpending: u64 = 127;
pub const unshare: u64 = 272;
pub const setns: u64 = 308;
pub const sched_getscheduler: u64 = 145;
pub const sched_setattr: u64 = 314;
pub const sched_getattr: u64 = 315;
pub const clone3: u64 = 435;
pub const epoll_pwait2: u64 = 441;
pub const mseal: u64 = 462;
pub const open: u64 = 2;
pub const stat: u64 = 4;
pub const lstat: u64 = 6;
pub const access: u64 = 21;
pub const truncate: u64 = 76;
pub const chdir: u64 = 80;
pub const rename: u64 = 82;
pub const mkdir: u64 = 83;
pub const rmdir: u64 = 84;
pub const creat: u64 = 85;
pub const link: u64 = 86;
pub const unlink: u64 = 87;
pub const symlink: u64 = 88;
pub const chmod: u64 = 90;
pub const chown: u64 = 92;
pub const lchown: u64 = 94;
pub const utime: u64 = 132;
pub const mknod: u64 = 133;
pub const statfs: u64 = 137;
pub const chroot: u64 = 161;
pub const setxattr: u64 = 188;
pub const lsetxattr: u64 = 189;
pub const lgetxattr: u64 = 192;
pub const listxattr: u64 = 194;
pub const llistxattr: u64 = 195;
pub const removexattr: u64 = 197;
pub const lremovexattr: u64 = 198;
pub const utimes: u64 = 235;
pub const inotify_add_watch: u64 = 254;
pub const openat: u64 = 257;
pub const mkdirat: u64 = 258;
pub const mknodat: u64 = 259;
pub const fchownat: u64 = 260;
pub const futimesat: u64 = 261;
pub const unlinkat: u64 = 263;
pub const renameat: u64 = 264;
pub const linkat: u64 = 265;
pub const symlinkat: u64 = 266;
pub const readlinkat: u64 = 267;
pub const fchmodat: u64 = 268;
pub const faccessat: u64 = 269;
pub const utimensat: u64 = 280;
pub const name_to_handle_at: u64 = 303;
pub const renameat2: u64 = 316;
pub const statx: u64 = 332;
pub const openat2: u64 = 437;
pub const faccessat2: u64 = 439;

/// How many system calls have a row of their own in tables; all numbers from here on share one more row.
pub const CALLS: usize = 512;

/// Returns whether the executive does anything but pass such a call on.
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
            | ptrace
            | rt_sigpending
            | rt_sigtimedwait
            | signalfd
            | signalfd4
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
    ) || changes_identity(number)
}

/// Returns whether the thread may act as another user afterwards.
pub const fn changes_identity(number: u64) -> bool {
    matches!(number, setuid | setgid | setreuid | setregid | setresuid | setresgid | capset | unshare | setns)
}

/// Returns whether what the executive does needs the signal frame of a dispatch: all registers, or none of the stack.
pub const fn needs_frame(number: u64) -> bool {
    matches!(
        number,
        rt_sigreturn | sigaltstack | clone | fork | vfork | clone3 | execve | execveat | exit | exit_group
    )
}
