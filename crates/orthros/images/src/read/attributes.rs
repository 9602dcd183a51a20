//! Attributes of threads and processes that CRIU does not restore. What only a thread can set for itself becomes a system call that it
//! is made to execute.

use anyhow::Result;
use orrery_kimage::{Object, Task};

use super::remarks::Remarks;
use crate::model::{Mapping, ThreadAttributes, ThreadCall};

/// Flags of `task_struct.flags` (`include/linux/sched.h`): `PR_SET_IO_FLUSHER` and `PR_MCE_KILL`.
const IO_FLUSHER: u64 = 0x0008_0000 | 0x0010_0000;
const MCE_PROCESS: u64 = 0x80;
const MCE_EARLY: u64 = 0x0800_0000;
/// The bit `TIF_NOTSC` of a thread's flags: reading the time stamp counter kills it.
const NO_TSC: u32 = 16;
/// Bits of `task_struct.atomic_flags`: speculation is disabled, and whether for ever.
const STORE_BYPASS: (u32, u32) = (3, 4);
const INDIRECT_BRANCH: (u32, u32) = (5, 6);
/// Bits of `mm_struct.flags` (`include/linux/sched/coredump.h`).
const DUMP_FILTER_SHIFT: u32 = 2;
const DUMP_FILTER: u64 = 0x1ff;
const DISABLE_THP: u32 = 24;
const DENY_WRITE_EXECUTE: u32 = 28;
/// What the kernel puts into a core dump by default.
const DEFAULT_DUMP_FILTER: u64 = 0x33;
/// How late timers may fire by default, in nanoseconds.
const DEFAULT_SLACK: u64 = 50_000;
/// `VM_LOCKED` and `VM_LOCKONFAULT` of `include/linux/mm.h`, here of all future mappings.
const LOCKED: u64 = 0x2000;
const LOCK_ON_FAULT: u64 = 0x8_0000;
/// The bits of `mm_struct.membarrier_state`, and the commands of membarrier(2) that set them.
const MEMBARRIERS: [(u32, u64, &str); 4] = [
    (1, 1 << 4, "private expedited"),
    (3, 1 << 2, "global expedited"),
    (5, 1 << 6, "private expedited of serialized instructions"),
    (7, 1 << 8, "private expedited of restartable sequences"),
];
/// `SYSCALL_WORK_BIT_SYSCALL_USER_DISPATCH` of `thread_info.syscall_work`.
const DISPATCHES: u32 = 5;
/// Options of prctl(2) that the `libc` crate does not name.
const PR_SET_IO_FLUSHER: i32 = 57;
const PR_SET_MDWE: i32 = 65;
const PR_SET_SYSCALL_USER_DISPATCH: i32 = 59;

struct Calls(Vec<ThreadCall>);

impl Calls {
    fn call(&mut self, name: &str, number: i64, [one, two, three, four]: [u64; 4]) {
        let arguments = [one, two, three, four, 0];
        self.0.push(ThreadCall { name: name.to_owned(), number, arguments, is_restriction: false });
    }

    fn prctl(&mut self, name: &str, option: i32, arguments: [u64; 3]) {
        let [second, third, fourth] = arguments;
        self.call(name, libc::SYS_prctl, [u64::from(option.cast_unsigned()), second, third, fourth]);
    }

    fn restrict(&mut self, name: &str, option: i32, arguments: [u64; 3]) {
        self.prctl(name, option, arguments);
        if let Some(last) = self.0.last_mut() {
            last.is_restriction = true;
        }
    }
}

/// Reads what a thread has for itself.
pub(super) fn of_thread(thread: &Task<'_>, tid: u32) -> Result<ThreadAttributes> {
    let task = thread.object();
    let mut calls = Calls(Vec::new());
    if thread.no_new_privileges()? {
        calls.restrict("no_new_privs", libc::PR_SET_NO_NEW_PRIVS, [1, 0, 0]);
    }
    let ambient = thread.credentials()?.ambient;
    for capability in (0..64).filter(|bit| ambient >> bit & 1 != 0) {
        let raise = u64::from(libc::PR_CAP_AMBIENT_RAISE.cast_unsigned());
        calls.prctl("an ambient capability", libc::PR_CAP_AMBIENT, [raise, capability, 0]);
    }
    let personality = task.u32("personality")?;
    if personality != 0 {
        calls.call("personality", libc::SYS_personality, [u64::from(personality), 0, 0, 0]);
    }
    let flags = task.u64("flags")?;
    if flags & IO_FLUSHER == IO_FLUSHER {
        calls.prctl("PR_SET_IO_FLUSHER", PR_SET_IO_FLUSHER, [1, 0, 0]);
    }
    if flags & MCE_PROCESS != 0 {
        let set = u64::from(libc::PR_MCE_KILL_SET.cast_unsigned());
        let policy = if flags & MCE_EARLY != 0 { libc::PR_MCE_KILL_EARLY } else { libc::PR_MCE_KILL_LATE };
        calls.prctl("PR_MCE_KILL", libc::PR_MCE_KILL, [set, u64::from(policy.cast_unsigned()), 0]);
    }
    if task.u64("thread_info.flags")? >> NO_TSC & 1 != 0 {
        let denied = u64::from(libc::PR_TSC_SIGSEGV.cast_unsigned());
        calls.restrict("PR_SET_TSC", libc::PR_SET_TSC, [denied, 0, 0]);
    }
    let speculation = task.u64("atomic_flags")?;
    for (misfeature, (disabled, forced)) in
        [(libc::PR_SPEC_STORE_BYPASS, STORE_BYPASS), (libc::PR_SPEC_INDIRECT_BRANCH, INDIRECT_BRANCH)]
    {
        let how = match (speculation >> disabled & 1 != 0, speculation >> forced & 1 != 0) {
            (_, true) => libc::PR_SPEC_FORCE_DISABLE,
            (true, false) => libc::PR_SPEC_DISABLE,
            (false, false) => continue,
        };
        let words = [u64::from(misfeature.cast_unsigned()), u64::from(how), 0];
        calls.restrict("PR_SET_SPECULATION_CTRL", libc::PR_SET_SPECULATION_CTRL, words);
    }
    if task.has("thread_info.syscall_work") && task.u64("thread_info.syscall_work")? >> DISPATCHES & 1 != 0 {
        let state = task.embedded("syscall_dispatch", "syscall_user_dispatch")?;
        let (start, length) = (state.u64("offset")?, state.u64("len")?);
        calls.restrict("PR_SET_SYSCALL_USER_DISPATCH", PR_SET_SYSCALL_USER_DISPATCH, [1, start, length]);
        if let Some(last) = calls.0.last_mut() {
            last.arguments[4] = state.u64("selector")?;
        }
    }
    let resets_on_fork = task.u64("sched_reset_on_fork")? != 0;
    let mut proc_files = Vec::new();
    let slack = task.u64("timer_slack_ns")?;
    if slack != DEFAULT_SLACK && slack != 0 {
        proc_files.push(("timerslack_ns".to_owned(), slack.to_string()));
    }
    let io_priority = match task.pointer("io_context", "io_context")? {
        Some(context) => u16::try_from(context.u64("ioprio")?).unwrap_or(0),
        None => 0,
    };
    let (pid, affinity) = (0, thread.affinity()?);
    Ok(ThreadAttributes { tid, pid, affinity, resets_on_fork, io_priority, proc_files, calls: calls.0 })
}

/// Adds to its first thread's attributes what a process has once.
pub(super) fn add_of_process(
    process: &Task<'_>,
    mappings: &[Mapping],
    attributes: &mut ThreadAttributes,
) -> Result<()> {
    let task = process.object();
    let signal = task.required("signal", "signal_struct")?;
    let space = task.required("mm", "mm_struct")?;
    // Before those of the thread: once its calls are dispatched to itself, it can be made to execute no others.
    let mut calls = Calls(Vec::new());
    if signal.u64("is_child_subreaper")? != 0 {
        calls.prctl("PR_SET_CHILD_SUBREAPER", libc::PR_SET_CHILD_SUBREAPER, [1, 0, 0]);
    }
    let flags = space.u64("flags")?;
    if flags >> DISABLE_THP & 1 != 0 {
        calls.prctl("PR_SET_THP_DISABLE", libc::PR_SET_THP_DISABLE, [1, 0, 0]);
    }
    if flags >> DENY_WRITE_EXECUTE & 1 != 0 {
        calls.restrict("PR_SET_MDWE", PR_SET_MDWE, [1, 0, 0]);
    }
    for (bit, command, kind) in MEMBARRIERS {
        if space.u64("membarrier_state")? >> bit & 1 != 0 {
            let name = format!("the registration for membarrier(2), {kind}");
            calls.call(&name, libc::SYS_membarrier, [command, 0, 0, 0]);
        }
    }
    for mapping in mappings.iter().filter(|mapping| mapping.locks_on_fault) {
        let length = mapping.end - mapping.start;
        let on_fault = u64::from(libc::MLOCK_ONFAULT);
        calls.call("mlock2", libc::SYS_mlock2, [mapping.start, length, on_fault, 0]);
    }
    let future = space.u64("def_flags")?;
    if future & LOCKED != 0 {
        let on_fault = if future & LOCK_ON_FAULT != 0 { libc::MCL_ONFAULT } else { 0 };
        let which = u64::from((libc::MCL_FUTURE | on_fault).cast_unsigned());
        calls.call("mlockall", libc::SYS_mlockall, [which, 0, 0, 0]);
    }
    attributes.calls.splice(0..0, calls.0);
    let adjustment =
        |path| -> Result<i16> { Ok(i16::from_le_bytes(signal.bytes(path)?.try_into().unwrap_or_default())) };
    let (least, now) = (adjustment("oom_score_adj_min")?, adjustment("oom_score_adj")?);
    if (least, now) != (0, 0) {
        // The kernel notes the last one that a privileged process wrote as the least.
        attributes.proc_files.push(("oom_score_adj".to_owned(), least.to_string()));
        attributes.proc_files.push(("oom_score_adj".to_owned(), now.to_string()));
    }
    let dumped = flags >> DUMP_FILTER_SHIFT & DUMP_FILTER;
    if dumped != DEFAULT_DUMP_FILTER {
        attributes.proc_files.push(("coredump_filter".to_owned(), format!("{dumped:#x}")));
    }
    Ok(())
}

/// Adds remarks about what a process shares or has and no restore gives it.
pub(super) fn remark_on_process(task: Object<'_>, pid: u32, remarks: &mut Remarks) -> Result<()> {
    let credentials = task.required("cred", "cred")?;
    for (path, what) in [
        ("thread_keyring", "thread keyring"),
        ("process_keyring", "process keyring"),
        ("session_keyring", "session keyring"),
    ] {
        if credentials.has(path) && credentials.u64(path)? != 0 {
            remarks.add_loss(format!("process {pid}: its {what} and the keys in it are lost"));
        }
    }
    if task.u64("thread.io_bitmap")? != 0 || task.u64("thread.iopl_emul")? != 0 {
        remarks.add_loss(format!("process {pid} has no access to I/O ports any more (ioperm(2), iopl(2))"));
    }
    if task.has("mempolicy") && task.u64("mempolicy")? != 0 {
        // Every guest has one node.
        remarks.add(format!("process {pid} has no memory policy any more (set_mempolicy(2))"));
    }
    Ok(())
}
