//! Seccomp user notification: a filter that has a monitor decide about calls.

use std::io;
use std::mem::zeroed;
use std::sync::mpsc;
use std::thread;

use anyhow::{Result, ensure};

const RECEIVE: libc::c_ulong = 0xc050_2100;
const SEND: libc::c_ulong = 0xc018_2101;
const SET_FLAGS: libc::c_ulong = 0x4008_2104;
/// The monitor runs next on the same CPU, where the kernel (6.6 and later) knows how.
const SYNCHRONOUS: libc::c_ulong = 1;
const CONTINUE: u32 = 1;

/// From now on a second thread decides about these calls of the calling thread, and lets each be performed.
///
/// # Errors
/// Where the kernel has no such filters.
pub fn supervise_this_thread(calls: &[libc::c_long]) -> Result<()> {
    let (give, take) = mpsc::channel::<libc::c_int>();
    // Made before the filter, so not under it.
    thread::spawn(move || {
        if let Ok(listener) = take.recv() {
            monitor(listener);
        }
    });
    let statement =
        |code: u32, k: u32| libc::sock_filter { code: u16::try_from(code).unwrap_or(0), jt: 0, jf: 0, k };
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for (left, call) in (0..calls.len()).rev().zip(calls) {
        let matched = u8::try_from(left + 1)?;
        let mut compare = statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, u32::try_from(*call)?);
        compare.jt = matched;
        filter.push(compare);
    }
    filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_USER_NOTIF));
    let program = libc::sock_fprog { len: u16::try_from(filter.len())?, filter: filter.as_mut_ptr() };
    // SAFETY: the program lives while the kernel copies it.
    let listener = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    ensure!(listener >= 0, "install a filter with a listener: {}", io::Error::last_os_error());
    give.send(i32::try_from(listener)?)?;
    Ok(())
}

fn monitor(listener: libc::c_int) {
    // SAFETY: the structures are the kernel's, zeroed as it wants them.
    unsafe {
        libc::ioctl(listener, SET_FLAGS, SYNCHRONOUS);
        loop {
            let mut asked: libc::seccomp_notif = zeroed();
            if libc::ioctl(listener, RECEIVE, &raw mut asked) != 0 {
                match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR | libc::ENOENT) => continue,
                    _ => return,
                }
            }
            let mut answer: libc::seccomp_notif_resp = zeroed();
            answer.id = asked.id;
            answer.flags = CONTINUE;
            libc::ioctl(listener, SEND, &raw mut answer);
        }
    }
}
