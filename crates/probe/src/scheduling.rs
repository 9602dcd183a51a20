//! Facilities that decide where and when a thread runs, and that threads meet through.

use std::ffi::CStr;
use std::mem::zeroed;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use orrery_sys::pressure;
use orrery_sys::scheduling::{self, Policy, Scheduling};
use rustix::thread::{MembarrierCommand, gettid, membarrier, membarrier_query};
use syscalls::{Sysno, syscall};

use crate::child::{self, During, Note, Verdict, expect};
use crate::facility::{Group, State, System};
use crate::row::{Family, Probe, Row};

pub(crate) const FAMILY: Family = Family {
    group: Group::Resources,
    rows: &[
        Row {
            name: "sched_fifo",
            systems: &[System::LwcContexts, System::Orbit, System::Hijack],
            purpose: "a watchdog or a precise sleeper runs although everything else wants to",
            fallback: "nice, and the ordinary scheduler",
            probe: Probe::Child(sched_fifo),
        },
        Row {
            name: "sched_fifo_99",
            systems: &[System::Hijack],
            purpose: "a service manager runs before the programs that it serves, and has these run before all others",
            fallback: "weights of control groups, else nice values: shares of CPU time are no guarantee",
            probe: Probe::Child(sched_fifo_99),
        },
        Row {
            name: "nice_below_zero",
            systems: &[System::Hijack],
            purpose: "a precise sleeper, or a program below its share of CPU time, outweighs the others of its group",
            fallback: "a short slice; weights of control groups",
            probe: Probe::Child(nice_below_zero),
        },
        Row {
            name: "sched_slice",
            systems: &[System::Hijack],
            purpose: "a precise sleeper preempts those with longer slices, which takes no privilege",
            fallback: "it waits for its turn",
            probe: Probe::Child(sched_slice),
        },
        Row {
            name: "sched_deadline",
            systems: &[System::Orbit, System::Hijack],
            purpose: "reserves processor time per period for a task",
            fallback: "a cpu controller's quota, else nice",
            probe: Probe::Child(sched_deadline),
        },
        Row {
            name: "pressure_stall",
            systems: &[System::Hijack],
            purpose: "notifies a service manager when tasks wait for CPUs or memory",
            fallback: "no events of pressure",
            probe: Probe::Child(pressure_stall),
        },
        Row {
            name: "futex_pi",
            systems: &[System::LwcContexts, System::Orbit],
            purpose: "a gate's sleeper lends its priority to the partner that it waits for",
            fallback: "ordinary futexes, and partners of equal priority",
            probe: Probe::Child(futex_pi),
        },
        Row {
            name: "rseq",
            systems: &[System::LwcContexts, System::Orbit],
            purpose: "a gate reads the number of its CPU with one load and follows its caller",
            fallback: "getcpu(2) through the vDSO",
            probe: Probe::Here(rseq),
        },
        Row {
            name: "membarrier",
            systems: &[System::Hijack, System::Orbit],
            purpose: "makes rewritten code and published flags visible to all threads without a cost for readers",
            fallback: "a signal to each thread, and fences on both sides",
            probe: Probe::Child(membarrier_probe),
        },
    ],
};

fn sched_fifo(_: &mut Note) -> Verdict {
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: the kernel reads the parameters; the child ends within microseconds.
    unsafe { syscall!(Sysno::sched_setscheduler, 0, libc::SCHED_FIFO, &raw const parameters) }
        .during("sched_setscheduler(SCHED_FIFO)")?;
    // SAFETY: the call takes no pointer and changes nothing.
    let now = unsafe { syscall!(Sysno::sched_getscheduler, 0) }.during("sched_getscheduler")?;
    expect(i32::try_from(now) == Ok(libc::SCHED_FIFO), "the class does not stick")
}

/// The highest one that a service manager takes for itself; that of programs is one less.
fn sched_fifo_99(_: &mut Note) -> Verdict {
    let highest = Scheduling { policy: Policy::Fifo { priority: 99 }, reset_on_fork: true };
    scheduling::set(0, highest)
        .map_err(|error| error.errno)
        .during("sched_setattr(SCHED_FIFO, 99, SCHED_FLAG_RESET_ON_FORK)")?;
    let now = scheduling::get(0).map_err(|error| error.errno).during("sched_getattr")?;
    expect(now == highest, "the priority does not stick")
}

fn nice_below_zero(_: &mut Note) -> Verdict {
    const HIGHEST: i32 = -20;
    // SAFETY: changes how this child is scheduled, which ends within microseconds.
    unsafe { syscall!(Sysno::setpriority, libc::PRIO_PROCESS, 0, HIGHEST) }
        .during("setpriority(-20)")
        .map(drop)
}

fn sched_slice(note: &mut Note) -> Verdict {
    /// The shortest that Linux 6.12 and later take.
    const SHORTEST: u64 = 100_000;
    let size = u32::try_from(size_of::<libc::sched_attr>()).unwrap_or(0);
    // SAFETY: a `sched_attr` consists of integers, for which all-zero is a valid value.
    let mut attributes: libc::sched_attr = unsafe { zeroed() };
    (attributes.size, attributes.sched_runtime) = (size, SHORTEST);
    // SAFETY: the kernel reads as many bytes of `attributes` as its `size` says, which it has, and they
    // outlive the call.
    unsafe { syscall!(Sysno::sched_setattr, 0, &raw const attributes, 0) }
        .during("sched_setattr(SCHED_OTHER)")?;
    attributes.sched_runtime = 0;
    // SAFETY: the kernel writes so many bytes.
    unsafe { syscall!(Sysno::sched_getattr, 0, &raw mut attributes, size, 0) }.during("sched_getattr")?;
    expect(attributes.sched_runtime == SHORTEST, "the kernel keeps slices of its own")?;
    note.say(format_args!("{} us", SHORTEST / 1000));
    Ok(())
}

fn sched_deadline(_: &mut Note) -> Verdict {
    const SCHED_DEADLINE: u32 = 6;
    // SAFETY: a `sched_attr` consists of integers, for which all-zero is a valid value.
    let mut attributes: libc::sched_attr = unsafe { zeroed() };
    attributes.size = u32::try_from(size_of::<libc::sched_attr>()).unwrap_or(0);
    attributes.sched_policy = SCHED_DEADLINE;
    attributes.sched_runtime = 1_000_000;
    attributes.sched_deadline = 100_000_000;
    attributes.sched_period = 100_000_000;
    // SAFETY: the kernel reads as many bytes of `attributes` as its `size` says, which it has, and they
    // outlive the call.
    unsafe { syscall!(Sysno::sched_setattr, 0, &raw const attributes, 0) }
        .during("sched_setattr(SCHED_DEADLINE)")
        .map(drop)
}

fn pressure_stall(_: &mut Note) -> Verdict {
    let watch = |path, step| pressure::watch(path).map_err(|error| error.errno).during(step).map(drop);
    watch(pressure::CPU, "a trigger at /proc/pressure/cpu")?;
    watch(pressure::MEMORY, "a trigger at /proc/pressure/memory")
}

fn futex_pi(_: &mut Note) -> Verdict {
    let lock = AtomicU32::new(0);
    let futex = |operation: i32| {
        let no_time: *const libc::timespec = ptr::null();
        // SAFETY: the word lives for the call, and nobody else has the lock.
        unsafe { syscall!(Sysno::futex, lock.as_ptr(), operation | libc::FUTEX_PRIVATE_FLAG, 0, no_time) }
    };
    futex(libc::FUTEX_LOCK_PI).during("FUTEX_LOCK_PI")?;
    let me = gettid().as_raw_nonzero().get().unsigned_abs();
    expect(lock.load(Ordering::SeqCst) == me, "the lock has no owner")?;
    futex(libc::FUTEX_UNLOCK_PI).during("FUTEX_UNLOCK_PI").map(drop)
}

/// The area that the kernel and a thread share: rseq(2), `struct rseq`.
#[repr(C, align(32))]
struct RseqArea {
    cpu_id_start: u32,
    cpu_id: u32,
    rseq_cs: u64,
    flags: u32,
    rest: [u32; 3],
}

fn rseq(limit: Duration) -> State {
    // Symbols must be looked up here: the loader may take locks.
    match (symbol::<isize>(c"__rseq_offset"), symbol::<u32>(c"__rseq_size")) {
        (Some(offset), Some(size)) if size > 0 => child::run(limit, |note| {
            note.say(format_args!("registered by the C library, {size} bytes"));
            follows_the_cpu(thread_pointer::get().wrapping_byte_offset(offset).cast())
        }),
        _ => child::run(limit, |note| {
            note.say(format_args!("not registered by the C library"));
            register_and_follow()
        }),
    }
}

/// Returns the value of a variable of the C library, if it has it.
fn symbol<T: Copy>(name: &CStr) -> Option<T> {
    // SAFETY: the name ends in NUL; a variable that is found has the type that the C library documents.
    unsafe {
        let address = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()).cast::<T>();
        if address.is_null() { None } else { Some(address.read_unaligned()) }
    }
}

fn register_and_follow() -> Verdict {
    const UNINITIALISED: u32 = u32::MAX;
    const SIGNATURE: u32 = 0x5305_3053;
    let mut area = RseqArea { cpu_id_start: 0, cpu_id: UNINITIALISED, rseq_cs: 0, flags: 0, rest: [0; 3] };
    // SAFETY: the area stays in place until the child ends.
    unsafe { syscall!(Sysno::rseq, &raw mut area, size_of::<RseqArea>(), 0, SIGNATURE) }.during("rseq")?;
    follows_the_cpu(&raw mut area)
}

/// Returns whether the area names the CPU that the thread is on. The thread may move at any time, so some tries may
/// fail.
fn follows_the_cpu(area: *mut RseqArea) -> Verdict {
    let read = || {
        // SAFETY: a registered area stays readable; the kernel writes it when this thread is moved.
        unsafe { AtomicU32::from_ptr(&raw mut (*area).cpu_id) }.load(Ordering::Relaxed)
    };
    let agrees = (0..100).any(|_| u32::try_from(rustix::thread::sched_getcpu()) == Ok(read()));
    expect(agrees, "the area does not name the CPU")
}

mod thread_pointer {
    use super::RseqArea;

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn get() -> *mut RseqArea {
        let pointer: usize;
        // SAFETY: the ABI keeps the thread pointer at offset 0 of its segment.
        unsafe {
            std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, readonly, preserves_flags))
        };
        std::ptr::with_exposed_provenance_mut(pointer)
    }

    #[cfg(target_arch = "aarch64")]
    pub(crate) fn get() -> *mut RseqArea {
        let pointer: usize;
        // SAFETY: the ABI keeps the thread pointer in this register.
        unsafe {
            std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nomem, nostack, preserves_flags))
        };
        std::ptr::with_exposed_provenance_mut(pointer)
    }
}

fn membarrier_probe(note: &mut Note) -> Verdict {
    let known = membarrier_query();
    membarrier(MembarrierCommand::RegisterPrivateExpedited)
        .during("MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED")?;
    membarrier(MembarrierCommand::PrivateExpedited).during("MEMBARRIER_CMD_PRIVATE_EXPEDITED")?;
    note.say(format_args!("expedited"));
    if known.contains_command(MembarrierCommand::PrivateExpeditedSyncCore) {
        note.say(format_args!("sync core"));
    }
    if known.contains_command(MembarrierCommand::PrivateExpeditedRseq) {
        note.say(format_args!("rseq"));
    }
    Ok(())
}
