//! The engine's helpers may be killed, and its facilities be missing.

use std::os::fd::AsRawFd;

use orrery_rollback::{Error, Leftover};
use orrery_rollback::{Outcome, Rollback};

use super::common::{map, open_descriptors, rollback};

/// Kills every sleeper of this process: what a hostile closure might do.
fn kill_sleepers() {
    let me = std::process::id();
    for entry in std::fs::read_to_string(format!("/proc/self/task/{me}/children")).unwrap().split_whitespace()
    {
        let pid: i32 = entry.parse().unwrap();
        // SAFETY: takes numbers, and writes to the structure, for which zero is a value.
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            // Until it is dead, but leaving its body.
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let how = libc::WEXITED | libc::WNOWAIT | libc::__WALL;
            libc::waitid(libc::P_PID, pid.unsigned_abs(), &raw mut info, how);
        }
    }
}

pub(crate) fn a_killed_keeper_is_survived() {
    let mut rollback = rollback();
    let file = std::fs::File::open("/dev/null").unwrap();
    rollback.run(|| {}).unwrap();
    let before = open_descriptors();
    assert_eq!(rollback.run(kill_sleepers), Ok(Outcome::Returned));
    assert_eq!(open_descriptors(), before);
    // A file that only the keeper knew is lost, which is said; the next run has a new keeper.
    let lost = rollback.run(|| {
        kill_sleepers();
        // SAFETY: nothing uses the file any more; its handle is forgotten.
        unsafe { libc::close(file.as_raw_fd()) };
    });
    assert_eq!(lost, Err(Error::NotUndone(Leftover::Descriptor(file.as_raw_fd()))));
    std::mem::forget(file);
    assert_eq!(rollback.run(|| drop(std::fs::File::open("/dev/zero"))), Ok(Outcome::Returned));
}

pub(crate) fn a_killed_holder_is_fatal() {
    if std::env::var("ORRERY_TRACKER").as_deref() == Ok("compare") {
        orrery_testing::skipped!("nothing is held when contents are compared");
        return;
    }
    let length = 64 << 20;
    let memory = map(length);
    // SAFETY: a part of the test's own mapping, to which nothing else refers.
    unsafe { memory.write_bytes(1, length) };
    // SAFETY: the case has one thread, so the child finds no lock held.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: the string ends with a zero; nobody owns descriptor 2.
        unsafe { libc::dup2(libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY), 2) };
        let _ = rollback().run(|| {
            kill_sleepers();
            // SAFETY: a part of the test's own mapping, to which nothing else refers.
            unsafe { memory.write(2) };
        });
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: writes to the status.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), orrery_rollback::EXIT_BROKEN);
}

/// Makes system call `number` fail with EPERM in this process from now on.
fn forbid(number: i64) {
    let statement =
        |code: u32, jt, jf, k| libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k };
    let number = u32::try_from(number).unwrap();
    let mut program = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs()),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: 4, filter: program.as_mut_ptr() };
    // SAFETY: the kernel copies the filter, which lives.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter), 0);
    }
}

pub(crate) fn without_userfaultfd_it_compares() {
    // SAFETY: the case has one thread.
    unsafe { std::env::remove_var("ORRERY_TRACKER") };
    forbid(libc::SYS_userfaultfd);
    let mut rollback = rollback();
    assert_eq!(rollback.mechanisms(), Ok(("compare", false)));
    let mut heap = vec![1_u8; 1_000_000];
    rollback.run(|| heap.fill(2)).unwrap();
    assert!(heap.iter().all(|&byte| byte == 1));
    let by_name = Rollback::builder().tracker(orrery_memory::tracker::Choice::WpAsync);
    // SAFETY: the case has one thread, so the child finds no lock held.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let error = by_name.build().map(drop).unwrap_err();
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(error.to_string().contains("tracker wp_async does not work here"))) };
    }
    let mut status = 0;
    // SAFETY: writes to the status.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), 1);
}

pub(crate) fn without_perf_it_reads_the_layout() {
    forbid(libc::SYS_perf_event_open);
    let mut rollback = rollback();
    assert!(!rollback.mechanisms().unwrap().1);
    let memory = map(1 << 20);
    for _ in 0..3 {
        rollback
            // SAFETY: within the mappings, of which the first is the run's own; nothing lives in the other.
            .run(|| unsafe {
                map(1 << 20).write(1);
                libc::mprotect(memory.cast(), 4096, libc::PROT_NONE);
            })
            .unwrap();
        // SAFETY: within the mapping, which may be written to again.
        unsafe { memory.write(1) };
    }
}
