//! What is to be seen of contexts by those who look at processes.

use orrery_context::{Spec, create};
use rustix::process::{Resource, Rlimit, WaitOptions, getrlimit, setrlimit, wait};

use crate::support::{own_pid, server, shared_words};

fn status(pid: u64, name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("{name}: {text}")).trim().to_owned()
}

fn open_files_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap()
}

pub(crate) fn a_context_is_a_process_underneath() {
    use std::sync::atomic::Ordering::SeqCst;
    let (root, words) = (own_pid(), shared_words());
    let limit = open_files_limit();
    let other = create(&Spec::new(), move |start| {
        let nested = create(&Spec::new(), server(|_| own_pid())).unwrap();
        words[0].store(own_pid(), SeqCst);
        words[1].store(nested.switch(0, &[]).unwrap().word, SeqCst);
        let lower = Rlimit { current: Some(limit - 1), maximum: Some(limit - 1) };
        setrlimit(Resource::Nofile, lower).unwrap();
        let mut arrival = start.arrival;
        loop {
            arrival = arrival.caller.switch(open_files_limit(), &[]).unwrap();
        }
    })
    .unwrap();
    // A limit is one's own from the creation on.
    assert_eq!(other.switch(0, &[]).unwrap().word, limit - 1);
    assert_eq!(open_files_limit(), limit);
    let (pid, nested) = (words[0].load(SeqCst), words[1].load(SeqCst));
    assert!(pid != root && nested != root && pid != nested);
    // They look like the program, and are its children, the nested one, too.
    for context in [pid, nested] {
        assert_eq!(status(context, "Name"), status(root, "Name"));
        assert_eq!(status(context, "PPid"), root.to_string());
        let number = i32::try_from(context).unwrap();
        // SAFETY: these take numbers only. (Of a leader in an outer PID namespace they say 0, which rustix does not
        // expect.)
        let ties = |number| unsafe { (libc::getpgid(number), libc::getsid(number)) };
        assert_eq!(ties(number), ties(0));
        let group = |pid: u64| std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        assert_eq!(group(context), group(root));
    }
    let listed = |pid: u64| {
        let threads = std::fs::read_dir(format!("/proc/{root}/task")).unwrap();
        let children = threads.map(|thread| thread.unwrap().path().join("children"));
        children
            .filter_map(|children| std::fs::read_to_string(children).ok())
            .any(|all| all.split_whitespace().any(|child| child == pid.to_string()))
    };
    assert!(listed(pid) && listed(nested));
    // Who waits for the program's children meets none.
    assert!(wait(WaitOptions::NOHANG).is_err());
}

/// Record locks of fcntl(2) are a process', and those of flock(2) the open file's.
pub(crate) fn record_locks_are_not_inherited() {
    use std::os::fd::AsRawFd;
    let file = tempfile::tempfile().unwrap();
    let number = file.as_raw_fd();
    let kind = i16::try_from(libc::F_WRLCK).unwrap();
    let lock = libc::flock { l_type: kind, l_whence: 0, l_start: 0, l_len: 1, l_pid: 0 };
    // SAFETY: reads the lock.
    assert_eq!(unsafe { libc::fcntl(number, libc::F_SETLK, &raw const lock) }, 0);
    // SAFETY: takes numbers only.
    let lock_whole = move || unsafe { libc::flock(number, libc::LOCK_EX | libc::LOCK_NB) };
    assert_eq!(lock_whole(), 0);
    let other = create(
        &Spec::new(),
        server(move |_| {
            let mut found = lock;
            // SAFETY: has room for a lock.
            assert_eq!(unsafe { libc::fcntl(number, libc::F_GETLK, &raw mut found) }, 0);
            assert_eq!(lock_whole(), 0, "it is the same open file");
            if found.l_type == lock.l_type { u64::from(found.l_pid.unsigned_abs()) } else { 0 }
        }),
    )
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, own_pid(), "the root's lock is in its way");
}
