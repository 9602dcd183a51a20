//! Processes and threads.

use orrery_kimage::{Credentials, PosixTimer as Posix, Registers};

use crate::messages::{
    Core, Creds, Itimer, PosixTimer, Pstree, Rlimit, Rlimits, Rseq, Sigaction, Siginfo, SignalQueue,
    SignalStack, TaskCore, TaskTimers, ThreadCore, ThreadInfoX86, X86Fpregs, X86Regs,
};
use crate::model::{FILE_SIZE, Process, ProcessState, Running, Thread, TimerLeft};

const SECOND: u64 = 1_000_000_000;
/// `CORE_ENTRY__MARCH__X86_64`.
const X86_64: u32 = 1;
/// `TASK_ALIVE`, `TASK_DEAD` and `TASK_STOPPED`.
const ALIVE: u32 = 1;
const DEAD: u32 = 2;
const STOPPED: u32 = 3;
/// The size of `struct robust_list_head`.
const ROBUST_LIST_LENGTH: u32 = 24;

pub(super) fn tree_entry(process: &Process) -> Pstree {
    let &Process { pid, ppid, pgid, sid, ref state } = process;
    let threads = match state {
        ProcessState::Exited { .. } => vec![pid],
        ProcessState::Running(running) => running.threads.iter().map(|thread| thread.tid).collect(),
    };
    Pstree { pid, ppid, pgid, sid, threads }
}

/// Returns the core image of a process that has exited.
pub(super) fn exited(name: &str, status: u32) -> Core {
    let task = TaskCore { task_state: DEAD, exit_code: status, comm: name.to_owned(), ..TaskCore::default() };
    Core { mtype: X86_64, thread_info: None, tc: Some(task), thread_core: None }
}

/// Returns the core image of a thread; that of the leader has what concerns the whole process.
pub(super) fn core(process: &Running, thread: &Thread, is_leader: bool) -> Core {
    let (ss_sp, ss_size, ss_flags) = thread.signal_stack;
    let thread_core = ThreadCore {
        futex_rla: thread.robust_list,
        futex_rla_len: ROBUST_LIST_LENGTH,
        sched_nice: Some(thread.nice),
        sched_policy: Some(thread.policy),
        sched_prio: Some(thread.rt_priority),
        blk_sigset: Some(thread.blocked_signals),
        sas: Some(SignalStack { ss_sp, ss_size, ss_flags }),
        pdeath_sig: thread.parent_death_signal,
        signals_p: Some(signals(&thread.pending_signals)),
        creds: Some(credentials(&thread.credentials)),
        seccomp_mode: Some(thread.seccomp_mode),
        seccomp_filter: thread.seccomp_filter,
        comm: Some(thread.name.clone()),
        rseq_entry: thread.rseq.map(|rseq| Rseq {
            rseq_abi_pointer: rseq.address,
            rseq_abi_size: rseq.size,
            signature: rseq.signature,
        }),
    };
    let thread_info = ThreadInfoX86 {
        clear_tid_addr: thread.clear_tid_address,
        gpregs: general(&thread.registers),
        fpregs: float(&thread.float_state),
    };
    Core {
        mtype: X86_64,
        thread_info: Some(thread_info),
        tc: is_leader.then(|| task(process, thread)),
        thread_core: Some(thread_core),
    }
}

fn task(process: &Running, leader: &Thread) -> TaskCore {
    let timers = &process.timers;
    TaskCore {
        task_state: if process.stopped { STOPPED } else { ALIVE },
        exit_code: 0,
        personality: process.personality,
        flags: process.flags,
        blk_sigset: leader.blocked_signals,
        comm: leader.name.clone(),
        timers: Some(TaskTimers {
            real: itimer(timers.real),
            virt: itimer(timers.virt),
            prof: itimer(timers.prof),
            posix: timers.posix.iter().map(|(timer, left)| posix_timer(timer, *left)).collect(),
        }),
        rlimits: Some(Rlimits { rlimits: (0..).zip(&process.rlimits).map(rlimit).collect() }),
        signals_s: Some(signals(&process.pending_signals)),
        sigactions: process
            .actions
            .iter()
            .map(|action| Sigaction {
                sigaction: action.handler,
                flags: action.flags,
                restorer: action.restorer,
                mask: action.mask,
            })
            .collect(),
    }
}

/// That of the size of files is set last: criu writes its log from within the process.
fn rlimit((place, &(cur, max)): (usize, &(u64, u64))) -> Rlimit {
    if place == FILE_SIZE { Rlimit { cur: u64::MAX, max: u64::MAX } } else { Rlimit { cur, max } }
}

fn signals(pending: &[Vec<u8>]) -> SignalQueue {
    SignalQueue { signals: pending.iter().map(|siginfo| Siginfo { siginfo: siginfo.clone() }).collect() }
}

fn itimer(timer: TimerLeft) -> Itimer {
    let split = |time: u64| (time / SECOND, time % SECOND / 1000);
    let ((isec, iusec), (vsec, vusec)) = (split(timer.interval), split(timer.left));
    Itimer { isec, iusec, vsec, vusec }
}

fn posix_timer(timer: &Posix, left: u64) -> PosixTimer {
    PosixTimer {
        it_id: timer.id,
        clock_id: timer.clock.cast_unsigned(),
        si_signo: timer.signal,
        it_sigev_notify: timer.notify,
        sival_ptr: timer.value,
        overrun: timer.overrun,
        isec: timer.interval / SECOND,
        insec: timer.interval % SECOND,
        vsec: left / SECOND,
        vnsec: left % SECOND,
        notify_thread_id: timer.thread,
    }
}

fn credentials(c: &Credentials) -> Creds {
    let halves = |set: u64| {
        let (low, high) = (set & 0xffff_ffff, set >> 32);
        [low, high].iter().map(|&half| u32::try_from(half).unwrap_or(0)).collect::<Vec<_>>()
    };
    Creds {
        uid: c.uid,
        gid: c.gid,
        euid: c.effective_uid,
        egid: c.effective_gid,
        suid: c.saved_uid,
        sgid: c.saved_gid,
        fsuid: c.file_uid,
        fsgid: c.file_gid,
        cap_inh: halves(c.inheritable),
        cap_prm: halves(c.permitted),
        cap_eff: halves(c.effective),
        cap_bnd: halves(c.bounding),
        secbits: c.secure_bits,
        groups: c.groups.clone(),
    }
}

fn general(r: &Registers) -> X86Regs {
    X86Regs {
        r15: r.r15,
        r14: r.r14,
        r13: r.r13,
        r12: r.r12,
        bp: r.bp,
        bx: r.bx,
        r11: r.r11,
        r10: r.r10,
        r9: r.r9,
        r8: r.r8,
        ax: r.ax,
        cx: r.cx,
        dx: r.dx,
        si: r.si,
        di: r.di,
        orig_ax: r.orig_ax,
        ip: r.ip,
        cs: r.cs,
        flags: r.flags,
        sp: r.sp,
        ss: r.ss,
        fs_base: r.fs_base,
        gs_base: r.gs_base,
        ds: r.ds,
        es: r.es,
        fs: r.fs,
        gs: r.gs,
        mode: Some(1),
    }
}

/// Returns the layout of `fxsave` (Intel SDM volume 1, 10.5.1).
fn float(state: &[u8]) -> X86Fpregs {
    let number = |at: usize, size: usize| {
        let mut bytes = [0; 8];
        bytes[..size].copy_from_slice(&state[at..at + size]);
        u64::from_le_bytes(bytes)
    };
    let narrow = |at, size| u32::try_from(number(at, size)).unwrap_or(0);
    X86Fpregs {
        cwd: narrow(0, 2),
        swd: narrow(2, 2),
        twd: narrow(4, 2),
        fop: narrow(6, 2),
        rip: number(8, 8),
        rdp: number(16, 8),
        mxcsr: narrow(24, 4),
        mxcsr_mask: narrow(28, 4),
        st_space: (0..32).map(|index| narrow(32 + index * 4, 4)).collect(),
        xmm_space: (0..64).map(|index| narrow(160 + index * 4, 4)).collect(),
    }
}
