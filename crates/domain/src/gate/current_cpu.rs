//! Which CPU the caller runs on, at the price of a read.
//!
//! The kernel keeps the number in the thread's own memory (rseq(2), Linux 4.18), which the C library registers (glibc 2.35). Its
//! sched_getcpu(3) reads it there, too; but called over a table of addresses, it takes a wait at the gate five times as long
//! as the read. Process-wide state, because the C library is: where it has that memory is found once.

use core::sync::atomic::{AtomicIsize, Ordering};

use super::NOWHERE;

/// How far from the thread pointer the number is; or one of these two.
static DISTANCE: AtomicIsize = AtomicIsize::new(UNKNOWN);
const UNKNOWN: isize = isize::MIN;
const NONE: isize = isize::MAX;
/// Where it is in the registered memory (`cpu_id` of `struct rseq`).
const CPU_ID: isize = 4;

/// Returns the CPU that the caller runs on.
#[inline]
pub fn current_cpu() -> u32 {
    let distance = DISTANCE.load(Ordering::Relaxed);
    if distance != UNKNOWN && distance != NONE {
        let cpu = number_at(distance);
        // Above that there are none, but notes that nothing was registered.
        if cpu <= i32::MAX.unsigned_abs() {
            return cpu;
        }
    }
    ask(distance)
}

#[cold]
fn ask(distance: isize) -> u32 {
    if distance == UNKNOWN {
        DISTANCE.store(find().unwrap_or(NONE), Ordering::Relaxed);
    }
    // SAFETY: takes nothing and reads a number that the kernel keeps for the thread.
    u32::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(NOWHERE)
}

/// Finds where the C library has it, for all threads alike.
#[cfg(target_arch = "x86_64")]
fn find() -> Option<isize> {
    let area = orrery_sys::rseq::area()?;
    Some(area.wrapping_sub(orrery_sys::thread::pointer()).cast_signed() + CPU_ID)
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn number_at(distance: isize) -> u32 {
    let number: u32;
    // SAFETY: the C library has the thread's area there, and never takes it away.
    unsafe {
        core::arch::asm!(
            "mov {:e}, fs:[{}]",
            out(reg) number,
            in(reg) distance,
            options(nostack, preserves_flags, readonly)
        );
    }
    number
}

#[cfg(not(target_arch = "x86_64"))]
fn find() -> Option<isize> {
    None
}

#[cfg(not(target_arch = "x86_64"))]
fn number_at(_distance: isize) -> u32 {
    NOWHERE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_the_c_library_says() {
        let mut set = rustix::thread::sched_getaffinity(None).unwrap();
        let all = set;
        for cpu in (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)) {
            set.clear();
            set.set(cpu);
            rustix::thread::sched_setaffinity(None, &set).unwrap();
            // The first time it is asked for, and then it is read.
            assert_eq!([current_cpu(), current_cpu()], [u32::try_from(cpu).unwrap(); 2]);
            // SAFETY: the call takes no pointer.
            assert_eq!(usize::try_from(unsafe { libc::sched_getcpu() }).unwrap(), cpu);
        }
        rustix::thread::sched_setaffinity(None, &all).unwrap();
        std::thread::spawn(|| assert!(current_cpu() != NOWHERE)).join().unwrap();
    }
}
