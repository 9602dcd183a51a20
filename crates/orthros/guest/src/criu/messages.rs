//! The messages of CRIU's image files that a rescue writes, as far as it writes them. Names and numbers are CRIU's
//! (`images/*.proto`, version 3.17), where they are documented; required fields have no default there.

use prost::Message;

use super::object_messages::{FifoFile, InotifyFile, MemfdFile, UnixSocket};

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct KobjIds {
    #[prost(uint32, required, tag = "1")]
    pub(crate) vm_id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) files_id: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) fs_id: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) sighand_id: u32,
    #[prost(uint32, optional, tag = "5")]
    pub(crate) pid_ns_id: Option<u32>,
    #[prost(uint32, optional, tag = "6")]
    pub(crate) net_ns_id: Option<u32>,
    #[prost(uint32, optional, tag = "7")]
    pub(crate) ipc_ns_id: Option<u32>,
    #[prost(uint32, optional, tag = "8")]
    pub(crate) uts_ns_id: Option<u32>,
    #[prost(uint32, optional, tag = "9")]
    pub(crate) mnt_ns_id: Option<u32>,
    #[prost(uint32, optional, tag = "10")]
    pub(crate) user_ns_id: Option<u32>,
    #[prost(uint32, optional, tag = "11")]
    pub(crate) cgroup_ns_id: Option<u32>,
    #[prost(uint32, optional, tag = "12")]
    pub(crate) time_ns_id: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Inventory {
    #[prost(uint32, required, tag = "1")]
    pub(crate) img_version: u32,
    #[prost(bool, optional, tag = "2")]
    pub(crate) fdinfo_per_id: Option<bool>,
    #[prost(message, optional, tag = "3")]
    pub(crate) root_ids: Option<KobjIds>,
    #[prost(bool, optional, tag = "4")]
    pub(crate) ns_per_id: Option<bool>,
    #[prost(uint32, optional, tag = "6")]
    pub(crate) lsmtype: Option<u32>,
    #[prost(uint64, optional, tag = "8")]
    pub(crate) dump_uptime: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Pstree {
    #[prost(uint32, required, tag = "1")]
    pub(crate) pid: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) ppid: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) pgid: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) sid: u32,
    #[prost(uint32, repeated, packed = "false", tag = "5")]
    pub(crate) threads: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Timespec {
    #[prost(uint64, required, tag = "1")]
    pub(crate) tv_sec: u64,
    #[prost(uint64, required, tag = "2")]
    pub(crate) tv_nsec: u64,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Timens {
    #[prost(message, required, tag = "1")]
    pub(crate) monotonic: Timespec,
    #[prost(message, required, tag = "2")]
    pub(crate) boottime: Timespec,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct X86Regs {
    #[prost(uint64, required, tag = "1")]
    pub(crate) r15: u64,
    #[prost(uint64, required, tag = "2")]
    pub(crate) r14: u64,
    #[prost(uint64, required, tag = "3")]
    pub(crate) r13: u64,
    #[prost(uint64, required, tag = "4")]
    pub(crate) r12: u64,
    #[prost(uint64, required, tag = "5")]
    pub(crate) bp: u64,
    #[prost(uint64, required, tag = "6")]
    pub(crate) bx: u64,
    #[prost(uint64, required, tag = "7")]
    pub(crate) r11: u64,
    #[prost(uint64, required, tag = "8")]
    pub(crate) r10: u64,
    #[prost(uint64, required, tag = "9")]
    pub(crate) r9: u64,
    #[prost(uint64, required, tag = "10")]
    pub(crate) r8: u64,
    #[prost(uint64, required, tag = "11")]
    pub(crate) ax: u64,
    #[prost(uint64, required, tag = "12")]
    pub(crate) cx: u64,
    #[prost(uint64, required, tag = "13")]
    pub(crate) dx: u64,
    #[prost(uint64, required, tag = "14")]
    pub(crate) si: u64,
    #[prost(uint64, required, tag = "15")]
    pub(crate) di: u64,
    #[prost(uint64, required, tag = "16")]
    pub(crate) orig_ax: u64,
    #[prost(uint64, required, tag = "17")]
    pub(crate) ip: u64,
    #[prost(uint64, required, tag = "18")]
    pub(crate) cs: u64,
    #[prost(uint64, required, tag = "19")]
    pub(crate) flags: u64,
    #[prost(uint64, required, tag = "20")]
    pub(crate) sp: u64,
    #[prost(uint64, required, tag = "21")]
    pub(crate) ss: u64,
    #[prost(uint64, required, tag = "22")]
    pub(crate) fs_base: u64,
    #[prost(uint64, required, tag = "23")]
    pub(crate) gs_base: u64,
    #[prost(uint64, required, tag = "24")]
    pub(crate) ds: u64,
    #[prost(uint64, required, tag = "25")]
    pub(crate) es: u64,
    #[prost(uint64, required, tag = "26")]
    pub(crate) fs: u64,
    #[prost(uint64, required, tag = "27")]
    pub(crate) gs: u64,
    /// 1: 64-bit.
    #[prost(uint32, optional, tag = "28")]
    pub(crate) mode: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct X86Fpregs {
    #[prost(uint32, required, tag = "1")]
    pub(crate) cwd: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) swd: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) twd: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) fop: u32,
    #[prost(uint64, required, tag = "5")]
    pub(crate) rip: u64,
    #[prost(uint64, required, tag = "6")]
    pub(crate) rdp: u64,
    #[prost(uint32, required, tag = "7")]
    pub(crate) mxcsr: u32,
    #[prost(uint32, required, tag = "8")]
    pub(crate) mxcsr_mask: u32,
    #[prost(uint32, repeated, packed = "false", tag = "9")]
    pub(crate) st_space: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "10")]
    pub(crate) xmm_space: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ThreadInfoX86 {
    #[prost(uint64, required, tag = "1")]
    pub(crate) clear_tid_addr: u64,
    #[prost(message, required, tag = "2")]
    pub(crate) gpregs: X86Regs,
    #[prost(message, required, tag = "3")]
    pub(crate) fpregs: X86Fpregs,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Itimer {
    #[prost(uint64, required, tag = "1")]
    pub(crate) isec: u64,
    #[prost(uint64, required, tag = "2")]
    pub(crate) iusec: u64,
    #[prost(uint64, required, tag = "3")]
    pub(crate) vsec: u64,
    #[prost(uint64, required, tag = "4")]
    pub(crate) vusec: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TaskTimers {
    #[prost(message, required, tag = "1")]
    pub(crate) real: Itimer,
    #[prost(message, required, tag = "2")]
    pub(crate) virt: Itimer,
    #[prost(message, required, tag = "3")]
    pub(crate) prof: Itimer,
    #[prost(message, repeated, tag = "4")]
    pub(crate) posix: Vec<PosixTimer>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Rlimit {
    #[prost(uint64, required, tag = "1")]
    pub(crate) cur: u64,
    #[prost(uint64, required, tag = "2")]
    pub(crate) max: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Rlimits {
    #[prost(message, repeated, tag = "1")]
    pub(crate) rlimits: Vec<Rlimit>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Siginfo {
    /// What a handler gets, as the kernel lays it out.
    #[prost(bytes = "vec", required, tag = "1")]
    pub(crate) siginfo: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SignalQueue {
    #[prost(message, repeated, tag = "1")]
    pub(crate) signals: Vec<Siginfo>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct PosixTimer {
    #[prost(uint32, required, tag = "1")]
    pub(crate) it_id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) clock_id: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) si_signo: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) it_sigev_notify: u32,
    #[prost(uint64, required, tag = "5")]
    pub(crate) sival_ptr: u64,
    #[prost(uint32, required, tag = "6")]
    pub(crate) overrun: u32,
    #[prost(uint64, required, tag = "7")]
    pub(crate) isec: u64,
    #[prost(uint64, required, tag = "8")]
    pub(crate) insec: u64,
    #[prost(uint64, required, tag = "9")]
    pub(crate) vsec: u64,
    #[prost(uint64, required, tag = "10")]
    pub(crate) vnsec: u64,
    #[prost(int32, optional, tag = "11")]
    pub(crate) notify_thread_id: Option<i32>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Sigaction {
    #[prost(uint64, required, tag = "1")]
    pub(crate) sigaction: u64,
    #[prost(uint64, required, tag = "2")]
    pub(crate) flags: u64,
    #[prost(uint64, required, tag = "3")]
    pub(crate) restorer: u64,
    #[prost(uint64, required, tag = "4")]
    pub(crate) mask: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TaskCore {
    /// 1: alive, 2: dead and not waited for, 3: stopped.
    #[prost(uint32, required, tag = "1")]
    pub(crate) task_state: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) exit_code: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) personality: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) flags: u32,
    #[prost(uint64, required, tag = "5")]
    pub(crate) blk_sigset: u64,
    #[prost(string, required, tag = "6")]
    pub(crate) comm: String,
    #[prost(message, optional, tag = "7")]
    pub(crate) timers: Option<TaskTimers>,
    #[prost(message, optional, tag = "8")]
    pub(crate) rlimits: Option<Rlimits>,
    #[prost(message, optional, tag = "10")]
    pub(crate) signals_s: Option<SignalQueue>,
    #[prost(message, repeated, tag = "15")]
    pub(crate) sigactions: Vec<Sigaction>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct SignalStack {
    #[prost(uint64, required, tag = "1")]
    pub(crate) ss_sp: u64,
    #[prost(uint64, required, tag = "2")]
    pub(crate) ss_size: u64,
    #[prost(uint32, required, tag = "3")]
    pub(crate) ss_flags: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Creds {
    #[prost(uint32, required, tag = "1")]
    pub(crate) uid: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) gid: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) euid: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) egid: u32,
    #[prost(uint32, required, tag = "5")]
    pub(crate) suid: u32,
    #[prost(uint32, required, tag = "6")]
    pub(crate) sgid: u32,
    #[prost(uint32, required, tag = "7")]
    pub(crate) fsuid: u32,
    #[prost(uint32, required, tag = "8")]
    pub(crate) fsgid: u32,
    #[prost(uint32, repeated, packed = "false", tag = "9")]
    pub(crate) cap_inh: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "10")]
    pub(crate) cap_prm: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    pub(crate) cap_eff: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    pub(crate) cap_bnd: Vec<u32>,
    #[prost(uint32, required, tag = "13")]
    pub(crate) secbits: u32,
    #[prost(uint32, repeated, packed = "false", tag = "14")]
    pub(crate) groups: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Rseq {
    #[prost(uint64, required, tag = "1")]
    pub(crate) rseq_abi_pointer: u64,
    #[prost(uint32, required, tag = "2")]
    pub(crate) rseq_abi_size: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) signature: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ThreadCore {
    #[prost(uint64, required, tag = "1")]
    pub(crate) futex_rla: u64,
    #[prost(uint32, required, tag = "2")]
    pub(crate) futex_rla_len: u32,
    #[prost(sint32, optional, tag = "3")]
    pub(crate) sched_nice: Option<i32>,
    #[prost(uint32, optional, tag = "4")]
    pub(crate) sched_policy: Option<u32>,
    #[prost(uint32, optional, tag = "5")]
    pub(crate) sched_prio: Option<u32>,
    #[prost(uint64, optional, tag = "6")]
    pub(crate) blk_sigset: Option<u64>,
    #[prost(message, optional, tag = "7")]
    pub(crate) sas: Option<SignalStack>,
    #[prost(uint32, optional, tag = "8")]
    pub(crate) pdeath_sig: Option<u32>,
    #[prost(message, optional, tag = "9")]
    pub(crate) signals_p: Option<SignalQueue>,
    #[prost(message, optional, tag = "10")]
    pub(crate) creds: Option<Creds>,
    #[prost(uint32, optional, tag = "11")]
    pub(crate) seccomp_mode: Option<u32>,
    #[prost(uint32, optional, tag = "12")]
    pub(crate) seccomp_filter: Option<u32>,
    #[prost(string, optional, tag = "13")]
    pub(crate) comm: Option<String>,
    #[prost(message, optional, tag = "15")]
    pub(crate) rseq_entry: Option<Rseq>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Core {
    /// 1: x86-64.
    #[prost(uint32, required, tag = "1")]
    pub(crate) mtype: u32,
    #[prost(message, optional, tag = "2")]
    pub(crate) thread_info: Option<ThreadInfoX86>,
    #[prost(message, optional, tag = "3")]
    pub(crate) tc: Option<TaskCore>,
    #[prost(message, optional, tag = "5")]
    pub(crate) thread_core: Option<ThreadCore>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Vma {
    #[prost(uint64, required, tag = "1")]
    pub(crate) start: u64,
    #[prost(uint64, required, tag = "2")]
    pub(crate) end: u64,
    /// In bytes.
    #[prost(uint64, required, tag = "3")]
    pub(crate) pgoff: u64,
    /// Of a mapping of a file: the file's number in `files.img`.
    #[prost(uint64, required, tag = "4")]
    pub(crate) shmid: u64,
    #[prost(uint32, required, tag = "5")]
    pub(crate) prot: u32,
    #[prost(uint32, required, tag = "6")]
    pub(crate) flags: u32,
    #[prost(uint32, required, tag = "7")]
    pub(crate) status: u32,
    #[prost(sint64, required, tag = "8")]
    pub(crate) fd: i64,
    #[prost(uint64, optional, tag = "9")]
    pub(crate) madv: Option<u64>,
    #[prost(uint32, optional, tag = "10")]
    pub(crate) fdflags: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Mm {
    #[prost(uint64, required, tag = "1")]
    pub(crate) start_code: u64,
    #[prost(uint64, required, tag = "2")]
    pub(crate) end_code: u64,
    #[prost(uint64, required, tag = "3")]
    pub(crate) start_data: u64,
    #[prost(uint64, required, tag = "4")]
    pub(crate) end_data: u64,
    #[prost(uint64, required, tag = "5")]
    pub(crate) start_stack: u64,
    #[prost(uint64, required, tag = "6")]
    pub(crate) start_brk: u64,
    #[prost(uint64, required, tag = "7")]
    pub(crate) brk: u64,
    #[prost(uint64, required, tag = "8")]
    pub(crate) arg_start: u64,
    #[prost(uint64, required, tag = "9")]
    pub(crate) arg_end: u64,
    #[prost(uint64, required, tag = "10")]
    pub(crate) env_start: u64,
    #[prost(uint64, required, tag = "11")]
    pub(crate) env_end: u64,
    #[prost(uint32, required, tag = "12")]
    pub(crate) exe_file_id: u32,
    #[prost(uint64, repeated, packed = "false", tag = "13")]
    pub(crate) saved_auxv: Vec<u64>,
    #[prost(message, repeated, tag = "14")]
    pub(crate) vmas: Vec<Vma>,
    #[prost(int32, optional, tag = "15")]
    pub(crate) dumpable: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PagemapHead {
    #[prost(uint32, required, tag = "1")]
    pub(crate) pages_id: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Pagemap {
    #[prost(uint64, required, tag = "1")]
    pub(crate) vaddr: u64,
    #[prost(uint32, required, tag = "2")]
    pub(crate) nr_pages: u32,
    #[prost(uint32, optional, tag = "4")]
    pub(crate) flags: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Fs {
    #[prost(uint32, required, tag = "1")]
    pub(crate) cwd_id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) root_id: u32,
    #[prost(uint32, optional, tag = "3")]
    pub(crate) umask: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Fdinfo {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) flags: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) kind: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) fd: u32,
}

/// Who gets a signal when a file is ready; nobody.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Fown {
    #[prost(uint32, required, tag = "1")]
    pub(crate) uid: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) euid: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) signum: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) pid_type: u32,
    #[prost(uint32, required, tag = "5")]
    pub(crate) pid: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RegFile {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) flags: u32,
    #[prost(uint64, required, tag = "3")]
    pub(crate) pos: u64,
    #[prost(message, required, tag = "5")]
    pub(crate) fown: Fown,
    #[prost(string, required, tag = "6")]
    pub(crate) name: String,
    #[prost(sint32, optional, tag = "7")]
    pub(crate) mnt_id: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PipeFile {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) pipe_id: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) flags: u32,
    #[prost(message, required, tag = "4")]
    pub(crate) fown: Fown,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct EventFile {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) flags: u32,
    #[prost(message, required, tag = "3")]
    pub(crate) fown: Fown,
    #[prost(uint64, required, tag = "4")]
    pub(crate) counter: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct EpollTarget {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) tfd: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) events: u32,
    #[prost(uint64, required, tag = "4")]
    pub(crate) data: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct EpollFile {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) flags: u32,
    #[prost(message, required, tag = "3")]
    pub(crate) fown: Fown,
    #[prost(message, repeated, tag = "4")]
    pub(crate) tfd: Vec<EpollTarget>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SocketOptions {
    #[prost(uint32, required, tag = "1")]
    pub(crate) sndbuf: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) rcvbuf: u32,
    #[prost(uint64, required, tag = "3")]
    pub(crate) snd_tmo_sec: u64,
    #[prost(uint64, required, tag = "4")]
    pub(crate) snd_tmo_usec: u64,
    #[prost(uint64, required, tag = "5")]
    pub(crate) rcv_tmo_sec: u64,
    #[prost(uint64, required, tag = "6")]
    pub(crate) rcv_tmo_usec: u64,
    #[prost(bool, optional, tag = "7")]
    pub(crate) reuseaddr: Option<bool>,
    #[prost(bool, optional, tag = "11")]
    pub(crate) passcred: Option<bool>,
    #[prost(bool, optional, tag = "19")]
    pub(crate) keepalive: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct InetSocket {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) ino: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) family: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) kind: u32,
    #[prost(uint32, required, tag = "5")]
    pub(crate) proto: u32,
    #[prost(uint32, required, tag = "6")]
    pub(crate) state: u32,
    #[prost(uint32, required, tag = "7")]
    pub(crate) src_port: u32,
    #[prost(uint32, required, tag = "8")]
    pub(crate) dst_port: u32,
    #[prost(uint32, required, tag = "9")]
    pub(crate) flags: u32,
    #[prost(uint32, required, tag = "10")]
    pub(crate) backlog: u32,
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    pub(crate) src_addr: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    pub(crate) dst_addr: Vec<u32>,
    #[prost(message, required, tag = "13")]
    pub(crate) fown: Fown,
    #[prost(message, required, tag = "14")]
    pub(crate) opts: SocketOptions,
    #[prost(bool, optional, tag = "15")]
    pub(crate) v6only: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TcpStream {
    #[prost(uint32, required, tag = "1")]
    pub(crate) inq_len: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) inq_seq: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) outq_len: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) outq_seq: u32,
    #[prost(uint32, required, tag = "5")]
    pub(crate) opt_mask: u32,
    #[prost(uint32, required, tag = "6")]
    pub(crate) snd_wscale: u32,
    #[prost(uint32, required, tag = "7")]
    pub(crate) mss_clamp: u32,
    #[prost(uint32, optional, tag = "8")]
    pub(crate) rcv_wscale: Option<u32>,
    #[prost(uint32, optional, tag = "9")]
    pub(crate) timestamp: Option<u32>,
    #[prost(bool, optional, tag = "10")]
    pub(crate) cork: Option<bool>,
    #[prost(bool, optional, tag = "11")]
    pub(crate) nodelay: Option<bool>,
    #[prost(uint32, optional, tag = "12")]
    pub(crate) unsq_len: Option<u32>,
    #[prost(uint32, optional, tag = "13")]
    pub(crate) snd_wl1: Option<u32>,
    #[prost(uint32, optional, tag = "14")]
    pub(crate) snd_wnd: Option<u32>,
    #[prost(uint32, optional, tag = "15")]
    pub(crate) max_window: Option<u32>,
    #[prost(uint32, optional, tag = "16")]
    pub(crate) rcv_wnd: Option<u32>,
    #[prost(uint32, optional, tag = "17")]
    pub(crate) rcv_wup: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SignalFile {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) flags: u32,
    #[prost(message, required, tag = "3")]
    pub(crate) fown: Fown,
    #[prost(uint64, required, tag = "4")]
    pub(crate) sigmask: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TimerFile {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) flags: u32,
    #[prost(message, required, tag = "3")]
    pub(crate) fown: Fown,
    #[prost(uint32, required, tag = "4")]
    pub(crate) clockid: u32,
    #[prost(uint64, required, tag = "5")]
    pub(crate) ticks: u64,
    #[prost(uint32, required, tag = "6")]
    pub(crate) settime_flags: u32,
    /// What is left of it.
    #[prost(uint64, required, tag = "7")]
    pub(crate) vsec: u64,
    #[prost(uint64, required, tag = "8")]
    pub(crate) vnsec: u64,
    #[prost(uint64, required, tag = "9")]
    pub(crate) isec: u64,
    #[prost(uint64, required, tag = "10")]
    pub(crate) insec: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TtyFile {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) tty_info_id: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) flags: u32,
    #[prost(message, required, tag = "4")]
    pub(crate) fown: Fown,
    /// The file, by its path, that leads to it.
    #[prost(uint32, optional, tag = "6")]
    pub(crate) regf_id: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Termios {
    #[prost(uint32, required, tag = "1")]
    pub(crate) c_iflag: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) c_oflag: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) c_cflag: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) c_lflag: u32,
    #[prost(uint32, required, tag = "5")]
    pub(crate) c_line: u32,
    #[prost(uint32, required, tag = "6")]
    pub(crate) c_ispeed: u32,
    #[prost(uint32, required, tag = "7")]
    pub(crate) c_ospeed: u32,
    #[prost(uint32, repeated, packed = "false", tag = "8")]
    pub(crate) c_cc: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Winsize {
    #[prost(uint32, required, tag = "1")]
    pub(crate) ws_row: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) ws_col: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) ws_xpixel: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) ws_ypixel: u32,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct TtyPty {
    #[prost(uint32, required, tag = "1")]
    pub(crate) index: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TtyInfo {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    /// 1: a pseudo-terminal.
    #[prost(uint32, required, tag = "2")]
    pub(crate) kind: u32,
    #[prost(bool, required, tag = "3")]
    pub(crate) locked: bool,
    #[prost(bool, required, tag = "4")]
    pub(crate) exclusive: bool,
    #[prost(bool, required, tag = "5")]
    pub(crate) packet_mode: bool,
    #[prost(uint32, required, tag = "6")]
    pub(crate) sid: u32,
    #[prost(uint32, required, tag = "7")]
    pub(crate) pgrp: u32,
    #[prost(uint32, required, tag = "8")]
    pub(crate) rdev: u32,
    #[prost(message, optional, tag = "9")]
    pub(crate) termios: Option<Termios>,
    #[prost(message, optional, tag = "10")]
    pub(crate) termios_locked: Option<Termios>,
    #[prost(message, optional, tag = "11")]
    pub(crate) winsize: Option<Winsize>,
    #[prost(message, optional, tag = "12")]
    pub(crate) pty: Option<TtyPty>,
    #[prost(uint32, optional, tag = "14")]
    pub(crate) uid: Option<u32>,
    #[prost(uint32, optional, tag = "15")]
    pub(crate) gid: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TtyData {
    #[prost(uint32, required, tag = "1")]
    pub(crate) tty_id: u32,
    #[prost(bytes = "vec", required, tag = "2")]
    pub(crate) data: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct GhostFile {
    #[prost(uint32, required, tag = "1")]
    pub(crate) uid: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) gid: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) mode: u32,
}

/// A file whose name leads to something else than it.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct RemapFilePath {
    #[prost(uint32, required, tag = "1")]
    pub(crate) orig_id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) remap_id: u32,
    /// 1: to a file that has no name.
    #[prost(uint32, optional, tag = "3")]
    pub(crate) remap_type: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct File {
    #[prost(uint32, required, tag = "1")]
    pub(crate) kind: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) id: u32,
    #[prost(message, optional, tag = "3")]
    pub(crate) reg: Option<RegFile>,
    #[prost(message, optional, tag = "4")]
    pub(crate) isk: Option<InetSocket>,
    #[prost(message, optional, tag = "8")]
    pub(crate) efd: Option<EventFile>,
    #[prost(message, optional, tag = "9")]
    pub(crate) epfd: Option<EpollFile>,
    #[prost(message, optional, tag = "10")]
    pub(crate) sgfd: Option<SignalFile>,
    #[prost(message, optional, tag = "12")]
    pub(crate) tfd: Option<TimerFile>,
    #[prost(message, optional, tag = "13")]
    pub(crate) ify: Option<InotifyFile>,
    #[prost(message, optional, tag = "16")]
    pub(crate) usk: Option<UnixSocket>,
    #[prost(message, optional, tag = "17")]
    pub(crate) fifo: Option<FifoFile>,
    #[prost(message, optional, tag = "18")]
    pub(crate) pipe: Option<PipeFile>,
    #[prost(message, optional, tag = "19")]
    pub(crate) tty: Option<TtyFile>,
    #[prost(message, optional, tag = "20")]
    pub(crate) memfd: Option<MemfdFile>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PipeData {
    #[prost(uint32, required, tag = "1")]
    pub(crate) pipe_id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) bytes: u32,
    #[prost(uint32, optional, tag = "3")]
    pub(crate) size: Option<u32>,
}
