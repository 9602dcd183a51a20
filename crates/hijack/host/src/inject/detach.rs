//! Takes the executive away from a program that goes on.
//!
//! All threads are stopped, wherever they are. One of them has the image restore the program's code and its handlers, and all of them turn
//! dispatch off. Threads that are in the executive return from it to the program as ever, so the image stays in the process; a later
//! attachment maps another one.

use std::fs;
use std::io;
use std::thread;
use std::time::Duration;

use orrery_hijack_image::config::boot;
use orrery_sys::process_memory;

use super::attach::{STACK, make_stack};
use super::halt::{Halted, Refusal, halt};
use crate::image::{Entries, Image};

/// How often it is tried again where a thread stands in the midst of changing code.
const ATTEMPTS: usize = 100;
const PAUSE: Duration = Duration::from_millis(5);

/// Takes the executive away from all threads of a process; `Ok(false)`: it has none, or that of another version.
///
/// # Errors
/// Why it keeps it.
pub(crate) fn detach(process: libc::pid_t, image: &Image) -> Result<bool, Refusal> {
    for _ in 0..ATTEMPTS {
        let mut threads = Vec::new();
        let result = halt(process, &mut threads).and_then(|()| end(process, &mut threads, image));
        for thread in threads {
            thread.release(process);
        }
        match result {
            Err(Refusal::Failed(error)) if error.raw_os_error() == Some(libc::EAGAIN) => thread::sleep(PAUSE),
            result => return result,
        }
    }
    Err(Refusal::Failed(io::ErrorKind::TimedOut.into()))
}

/// Returns the functions of the image in a process, whose code begins there; `None`: this is not there.
fn entries(process: libc::pid_t, code: u64, image: &Image) -> Option<Entries> {
    let base = code.checked_sub(image.code.start)?;
    let expected = image.first_page();
    let mut found = vec![0; expected.len()];
    process_memory::read(process, base, &mut found).ok()?;
    (found == expected).then(|| image.placed(base, 0).1)
}

fn end(process: libc::pid_t, threads: &mut [Halted], image: &Image) -> Result<bool, Refusal> {
    let code = threads.iter().find_map(|thread| thread.tracee.undispatched_code().ok().flatten());
    let Some(entries) = code.and_then(|(start, _)| entries(process, start, image)) else { return Ok(false) };
    let Some((first, others)) = threads.split_first_mut() else { return Err(Refusal::Absent) };
    let (sigsys, late) = {
        let mut puppet = first.puppet()?;
        // Calls of the image itself are not dispatched.
        puppet.gadget = entries.syscall;
        let stack = make_stack(&mut puppet)?;
        let ended = puppet.run(entries.boot, [0, boot::END]);
        if ended.is_ok() {
            for other in others {
                let ended = other.puppet().and_then(|mut thread| {
                    thread.stack = Some(stack + STACK);
                    let sigsys = thread.run(entries.boot, [0, boot::END | boot::THREAD])?;
                    Ok((sigsys, thread.late))
                });
                // One that has ended needs nothing.
                if let Ok((sigsys, late)) = ended {
                    other.late = late;
                    other.sigsys = sigsys;
                }
            }
        }
        puppet.call(libc::SYS_munmap, [stack, STACK, 0, 0, 0, 0])?;
        (ended?, puppet.late)
    };
    (first.late, first.sigsys) = (late, sigsys);
    Ok(true)
}

/// Returns the processes that have a segment of System V memory attached: the inode of its mapping is the segment's number.
pub(crate) fn attached_to(segment: i32) -> Vec<libc::pid_t> {
    let Ok(segment) = u64::try_from(segment) else { return Vec::new() };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let has = |process: &libc::pid_t| {
        let table = fs::read(format!("/proc/{process}/maps")).unwrap_or_default();
        orrery_sys::maps::entries(&table)
            .any(|entry| entry.inode == segment && entry.name.starts_with(b"/SYSV"))
    };
    numbers.filter(has).collect()
}
