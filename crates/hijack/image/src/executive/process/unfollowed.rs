//! Programs and threads to which the policy cannot be applied.
//!
//! Where it denies something, they are refused, or there is a warning: what is let through unseen is no policy. Messages go to standard
//! error if that still is the file which the run began with: a program may have anything else there.

use crate::executive::abi::syscall::{address, address_mut, call, failed};
use crate::executive::policy::table::policy;
use crate::nr;
use crate::policy::unfollowed::{PASS, REFUSE, message};

const STANDARD_ERROR: u64 = 2;

/// Returns whether the policy has something to say about programs and threads that it cannot be applied to.
pub(crate) fn matters() -> bool {
    policy().is_some_and(|policy| policy.unfollowed() != PASS)
}

/// Returns whether something may run that the policy cannot be applied to for this reason.
pub(crate) fn may_run(reason: &str) -> bool {
    let Some(policy) = policy() else { return true };
    let treatment = policy.unfollowed();
    if treatment != PASS {
        write(policy.messages(), message(treatment, reason));
    }
    treatment != REFUSE
}

/// Writes a message to standard error, if that is this file.
fn write(file: [u64; 2], parts: [&str; 3]) {
    // `st_dev` and `st_ino` begin a `struct stat` of 144 bytes.
    let mut status = [0_u64; 18];
    let list = parts.map(|part| [part.as_ptr().addr() as u64, part.len() as u64]);
    // SAFETY: the kernel writes a `struct stat`, and reads a list of three buffers.
    unsafe {
        let found = call(nr::fstat, [STANDARD_ERROR, address_mut(&mut status), 0, 0, 0, 0]);
        if !failed(found) && status[..2] == file {
            call(nr::writev, [STANDARD_ERROR, address(&list), list.len() as u64, 0, 0, 0]);
        }
    }
}
