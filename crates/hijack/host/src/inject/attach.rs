//! Puts an executive under a program that runs already.
//!
//! All threads of the process are stopped (`PTRACE_INTERRUPT`), wherever they are. One of them maps the image and runs its beginning, which
//! takes over the program's signal handlers; then each of the others arms dispatch. They do that on a stack of their own, because the
//! program may be on one that has no room (Go), and have their registers back afterwards, those of the FPU and of vectors as well. A
//! system call that this interrupted is made again, by the kernel's own rules (ptrace(2): as after a SIGSTOP and SIGCONT), and is then
//! dispatched.
//!
//! Nothing of the process has changed if that is refused, but for calls that the kernel does not make again (epoll_wait(2) and its like
//! return EINTR, as for any tracer).

use std::io;
use std::sync::atomic::Ordering::Relaxed;

use orrery_hijack_image::config::boot;

use super::halt::{Halted, Refusal, halt, look_at};
use super::puppet::Puppet;
use super::{Begin, Home, LONG_MODE, Load, SIGSYS_BIT, Settings, arrange};
use crate::image::Image;
use crate::maps::Maps;

/// Bytes of the stack on which the image begins, and ends.
pub(super) const STACK: u64 = 64 << 10;

/// Puts an executive under all threads of a process. `home` says whose memory it is to have.
///
/// # Errors
/// Why it has none.
pub(crate) fn attach(
    process: libc::pid_t,
    image: &Image,
    home: &Home<'_>,
    settings: &Settings,
) -> Result<(), Refusal> {
    look_at(process)?;
    let mut threads = Vec::new();
    // It may have changed as whom it acts before it stood still, as by a set-user-ID program.
    let is_same = |()| match (home.user_of)(process) {
        Some((user, _)) if user == home.user => Ok(()),
        _ => Err(Refusal::Changed),
    };
    let result = halt(process, &mut threads)
        .and_then(is_same)
        .and_then(|()| begin(process, &mut threads, image, home, settings));
    for thread in threads {
        thread.release(process);
    }
    result
}

/// Has the first thread map and begin the image, and all others arm dispatch.
fn begin(
    process: libc::pid_t,
    threads: &mut [Halted],
    image: &Image,
    home: &Home<'_>,
    settings: &Settings,
) -> Result<(), Refusal> {
    if threads.iter().any(|thread| thread.registers.cs != LONG_MODE) {
        return Err(Refusal::Foreign);
    }
    // Kernels before 6.4 do not say so; the image's beginning fails there.
    if threads.iter().any(|thread| matches!(thread.tracee.undispatched_code(), Ok(Some(_)))) {
        return Err(Refusal::Dispatched);
    }
    let maps = Maps::of_running(process)?;
    let Some((first, others)) = threads.split_first_mut() else { return Err(Refusal::Absent) };
    let mut puppet = first.puppet()?;
    puppet.find_gadget(&maps)?;
    let arranged = furnish(&mut puppet, others, &maps, image, home, settings);
    puppet.uncover()?;
    first.late = puppet.late;
    arranged
}

fn furnish(
    puppet: &mut Puppet<'_>,
    others: &mut [Halted],
    maps: &Maps,
    image: &Image,
    home: &Home<'_>,
    settings: &Settings,
) -> Result<(), Refusal> {
    let load = Load::new(puppet.tracee.pid(), image, settings)?;
    let stack = make_stack(puppet)?;
    let arranged = arrange(puppet, maps, &load, home, settings, Begin::Running);
    if let Ok(entries) = &arranged {
        for other in others {
            let blocked = if other.mask & SIGSYS_BIT == 0 { 0 } else { boot::SIGSYS_BLOCKED };
            let (result, late) = match other.puppet() {
                Ok(mut thread) => {
                    thread.stack = Some(stack + STACK);
                    (thread.run(entries.boot, [0, boot::THREAD | blocked]), thread.late)
                }
                Err(error) => (Err(error), other.late),
            };
            other.late = late;
            if result.is_err_and(|error| error.raw_os_error() != Some(libc::ESRCH)) {
                home.page.unarmed.fetch_add(1, Relaxed);
            }
        }
    }
    let arranged = arranged.map(|entries| {
        // From anywhere else, calls are dispatched now.
        puppet.gadget = entries.syscall;
    });
    puppet.call(libc::SYS_munmap, [stack, STACK, 0, 0, 0, 0])?;
    Ok(arranged?)
}

/// Maps a stack for the image's functions, and returns where it begins.
pub(super) fn make_stack(puppet: &mut Puppet<'_>) -> io::Result<u64> {
    let protection = u64::try_from(libc::PROT_READ | libc::PROT_WRITE).unwrap_or(0);
    let flags = u64::try_from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).unwrap_or(0);
    let stack = puppet.call(libc::SYS_mmap, [0, STACK, protection, flags, u64::MAX, 0])?;
    puppet.stack = Some(stack + STACK);
    Ok(stack)
}
