//! A thread's core image: registers, signals, limits, credentials.
//!
//! A thread that was in a system call is not in it any more; [`super::calls`] decides what becomes of it.

use anyhow::{Result, bail};
use orrery_kimage::{Object, Registers, State, Task};

use super::calls::{self, Answer, Outcome, decide};
use super::messages::{
    Core, Creds, Itimer, PosixTimer, Rlimit, Rlimits, Rseq, Sigaction, Siginfo, SignalQueue, SignalStack,
    TaskCore, TaskTimers, ThreadCore, ThreadInfoX86, X86Fpregs, X86Regs,
};
use super::{Context, transfer};

/// `__USER_CS` of x86-64.
const CODE_64: u64 = 0x33;
const SYSCALL_LENGTH: u64 = 2;
const ENOSYS: i64 = 38;
/// `ERESTARTSYS` to `ERESTART_RESTARTBLOCK`: the kernel had decided to begin the call again.
const RESTARTS: std::ops::RangeInclusive<i64> = 512..=516;
const SIGNALS: u64 = 64;
const SECOND: u64 = 1_000_000_000;
/// `TASK_ALIVE`, `TASK_DEAD` and `TASK_STOPPED` of CRIU.
const ALIVE: u32 = 1;
const DEAD: u32 = 2;
const STOPPED: u32 = 3;
/// `SIGNAL_GROUP_EXIT` of `include/linux/sched/signal.h`.
const GROUP_EXIT: u32 = 4;

pub(super) fn core(context: &mut Context<'_>, thread: &Task<'_>, is_leader: bool) -> Result<Core> {
    let task = thread.object();
    let (seccomp_mode, seccomp_filter) = context.filters.add(thread)?;
    let mut registers = match context.frozen.general(context.kernel, thread)? {
        Some(registers) => registers,
        None => thread.registers()?,
    };
    if registers.cs != CODE_64 {
        bail!("it runs code of 32 bits");
    }
    resume(context, thread, &mut registers)?;
    let name = thread.name()?;
    let blocked = task.u64("blocked")?;
    let rseq = task.u64("rseq").unwrap_or(0);
    let thread_core = ThreadCore {
        futex_rla: task.u64("robust_list")?,
        futex_rla_len: 24,
        sched_nice: Some(task.i32("static_prio")? - 120),
        sched_policy: Some(task.u32("policy")?),
        sched_prio: Some(task.u32("rt_priority")?),
        blk_sigset: Some(blocked),
        sas: Some(SignalStack {
            ss_sp: task.u64("sas_ss_sp")?,
            ss_size: task.u64("sas_ss_size")?,
            ss_flags: task.u32("sas_ss_flags")?,
        }),
        pdeath_sig: Some(task.u32("pdeath_signal")?).filter(|&signal| signal != 0),
        signals_p: Some(pending(thread, false)?),
        creds: Some(credentials(thread)?),
        seccomp_mode: Some(seccomp_mode),
        seccomp_filter,
        comm: Some(name.clone()),
        rseq_entry: (rseq != 0).then_some(Rseq {
            rseq_abi_pointer: rseq,
            // The registered length is kept since 6.3; before, it is always the first version's.
            rseq_abi_size: task.u32("rseq_len").unwrap_or(32),
            signature: task.u32("rseq_sig").unwrap_or(0x5305_3053),
        }),
    };
    let tc = if is_leader { Some(process(context, thread, name, blocked)?) } else { None };
    let saved = thread.float_state()?;
    let held = if saved.stale { context.frozen.float(context.kernel, thread)? } else { None };
    let float_state = match held {
        Some(held) => held,
        // A thread that is just leaving a processor, or coming onto it: another one has its registers.
        None if !saved.stale || context.frozen.is_told() => saved.bytes,
        None => bail!(
            "it was on a processor, whose vector registers nobody has told: it cannot be continued exactly"
        ),
    };
    let thread_info = ThreadInfoX86 {
        clear_tid_addr: task.u64("clear_child_tid")?,
        gpregs: general(&registers),
        fpregs: float(&float_state),
    };
    Ok(Core { mtype: 1, thread_info: Some(thread_info), tc, thread_core: Some(thread_core) })
}

/// Makes the registers those of a thread that goes on in user space.
fn resume(context: &mut Context<'_>, thread: &Task<'_>, registers: &mut Registers) -> Result<()> {
    let call = registers.orig_ax.cast_signed();
    if call < 0 {
        return Ok(());
    }
    let result = registers.ax.cast_signed();
    let restarts = RESTARTS.contains(&-result);
    if result != -ENOSYS && !restarts {
        return Ok(());
    }
    let answer = context.answers.as_ref().map_or(Answer::Default, |answers| answers.answer(call));
    let goes_to_a_place = || calls::goes_to_a_place(thread, registers);
    // What the kernel had decided to begin again has not been done.
    let moved =
        if restarts || answer != Answer::Default { Ok(None) } else { moved(context, thread, registers) };
    let outcome = match (decide(call, answer, goes_to_a_place), &moved) {
        (Outcome::Fail(_), _) if restarts && answer == Answer::Default => Outcome::Again,
        (_, Ok(Some(0))) => Outcome::Again,
        (_, &Ok(Some(bytes))) => Outcome::Moved(bytes),
        (outcome, _) => outcome,
    };
    if let Err(error) = moved {
        context.summary.remarks.push(format!("thread {}: {error:#}", thread.tid()?));
    }
    match outcome {
        Outcome::Moved(bytes) => registers.ax = bytes,
        Outcome::Again => {
            registers.ax = registers.orig_ax;
            registers.ip -= SYSCALL_LENGTH;
        }
        Outcome::Ask(entry) => {
            // A call overwrites `rcx` and `r11`: the library finds the way back in the one.
            registers.ax = registers.orig_ax;
            registers.cx = registers.ip;
            registers.ip = entry;
        }
        Outcome::Fail(error) => {
            let remark = format!(
                "thread {}: system call {call} was under way and fails with error {error}",
                thread.tid()?
            );
            context.summary.remarks.push(remark);
            registers.ax = (-i64::from(error)).cast_unsigned();
        }
    }
    registers.orig_ax = u64::MAX;
    Ok(())
}

/// How many bytes its call had moved, if it is one that moves bytes.
fn moved(context: &Context<'_>, thread: &Task<'_>, registers: &Registers) -> Result<Option<u64>> {
    let standing = context.frozen.standing(context.kernel, thread)?;
    transfer::moved(thread, registers, standing)
}

fn process(context: &mut Context<'_>, thread: &Task<'_>, comm: String, blk_sigset: u64) -> Result<TaskCore> {
    let task = thread.object();
    let signal = task.required("signal", "signal_struct")?;
    let limits = signal.bytes("rlim")?;
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    let rlimits = limits.chunks_exact(16).map(|pair| Rlimit { cur: word(&pair[..8]), max: word(&pair[8..]) });
    let (virt, prof) = thread.processor_timers()?;
    Ok(TaskCore {
        task_state: if thread.state()? == State::Stopped { STOPPED } else { ALIVE },
        exit_code: 0,
        personality: task.u32("personality")?,
        flags: task.u32("flags")?,
        blk_sigset,
        comm,
        timers: Some(TaskTimers {
            real: real_timer(context, signal)?,
            virt: itimer(virt.interval, virt.left.unwrap_or(0)),
            prof: itimer(prof.interval, prof.left.unwrap_or(0)),
            posix: timers(context, thread)?,
        }),
        rlimits: Some(Rlimits { rlimits: rlimits.collect() }),
        signals_s: Some(pending(thread, true)?),
        sigactions: actions(task)?,
    })
}

/// Signals that were sent and not taken yet.
fn pending(thread: &Task<'_>, of_process: bool) -> Result<SignalQueue> {
    let signals = thread.pending_signals(of_process)?;
    Ok(SignalQueue { signals: signals.into_iter().map(|siginfo| Siginfo { siginfo }).collect() })
}

/// `timer_create`: what was left of each timer when the kernel died.
fn timers(context: &Context<'_>, thread: &Task<'_>) -> Result<Vec<PosixTimer>> {
    let mut found = Vec::new();
    for timer in thread.posix_timers()? {
        let clock = u32::try_from(timer.clock).unwrap_or(u32::MAX);
        let by_process = timer.clock == libc::CLOCK_PROCESS_CPUTIME_ID;
        if clock > libc::CLOCK_BOOTTIME.cast_unsigned() || timer.clock == libc::CLOCK_THREAD_CPUTIME_ID {
            bail!("its timer {} goes by clock {}, of another thread or process", timer.id, timer.clock);
        }
        let used = if by_process { thread.processor_time()?.2 } else { 0 };
        let left = match timer.expires {
            None => 0,
            Some(expires) if by_process => expires.saturating_sub(used).max(1000),
            Some(expires) => context.left(clock, expires),
        };
        found.push(PosixTimer {
            it_id: timer.id,
            clock_id: clock,
            si_signo: timer.signal,
            it_sigev_notify: timer.notify,
            sival_ptr: timer.value,
            overrun: timer.overrun,
            isec: timer.interval / SECOND,
            insec: timer.interval % SECOND,
            vsec: left / SECOND,
            vnsec: left % SECOND,
            notify_thread_id: timer.thread,
        });
    }
    Ok(found)
}

/// `setitimer(ITIMER_REAL)`: what was left of it when the kernel died.
fn real_timer(context: &Context<'_>, signal: Object<'_>) -> Result<Itimer> {
    let interval = signal.u64("it_real_incr")?;
    let armed = signal.u32("real_timer.state")? & 1 != 0;
    let left = signal.u64("real_timer.node.expires")?.saturating_sub(context.monotonic).max(1000);
    let left = if armed { left } else { 0 };
    Ok(itimer(interval, left))
}

/// An interval timer, from nanoseconds.
fn itimer(interval: u64, left: u64) -> Itimer {
    let split = |time: u64| (time / SECOND, time % SECOND / 1000);
    let ((isec, iusec), (vsec, vusec)) = (split(interval), split(left));
    Itimer { isec, iusec, vsec, vusec }
}

/// The core image of a process that has ended, and that its parent has not asked about.
pub(super) fn ended(comm: String, exit_code: u32) -> Core {
    let tc = TaskCore { task_state: DEAD, exit_code, comm, ..TaskCore::default() };
    Core { mtype: 1, thread_info: None, tc: Some(tc), thread_core: None }
}

/// How a process ended, as `wait` tells it.
pub(super) fn exit_code(process: &Task<'_>) -> Result<u32> {
    let task = process.object();
    let signal = task.required("signal", "signal_struct")?;
    if signal.u32("flags")? & GROUP_EXIT != 0 {
        Ok(signal.u32("group_exit_code")?)
    } else {
        Ok(task.u32("exit_code")?)
    }
}

/// What each signal does, in order, without the two that nobody can change.
fn actions(task: Object<'_>) -> Result<Vec<Sigaction>> {
    let hand = task.required("sighand", "sighand_struct")?;
    let kernel = task.kernel();
    let (first, size) = (hand.address_of("action")?, kernel.types().size("k_sigaction")?);
    let mut actions = Vec::new();
    for signal in 1..=SIGNALS {
        if [libc::SIGKILL, libc::SIGSTOP].contains(&i32::try_from(signal)?) {
            continue;
        }
        let action = kernel.object("sigaction", first + (signal - 1) * size)?;
        actions.push(Sigaction {
            sigaction: action.u64("sa_handler")?,
            flags: action.u64("sa_flags")?,
            restorer: action.u64("sa_restorer")?,
            mask: action.u64("sa_mask")?,
        });
    }
    Ok(actions)
}

fn credentials(thread: &Task<'_>) -> Result<Creds> {
    let c = thread.credentials()?;
    let halves = |set: u64| {
        let (low, high) = (set & 0xffff_ffff, set >> 32);
        [low, high].iter().map(|&half| u32::try_from(half).unwrap_or(0)).collect::<Vec<_>>()
    };
    Ok(Creds {
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
        groups: c.groups,
    })
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

/// The layout of `fxsave` (Intel SDM volume 1, 10.5.1).
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
