//! What is to be seen of contexts by those who look at processes.

use orrery_context::{Spec, create};
use rustix::process::{Resource, Rlimit, WaitOptions, getrlimit, setrlimit, wait};

use crate::support::{own_pid, server, shared_page, shared_words};

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
    // SAFETY: the kernel reads one `flock`, which outlives the call.
    assert_eq!(unsafe { libc::fcntl(number, libc::F_SETLK, &raw const lock) }, 0);
    // SAFETY: the call takes numbers only.
    let lock_whole = move || unsafe { libc::flock(number, libc::LOCK_EX | libc::LOCK_NB) };
    assert_eq!(lock_whole(), 0);
    let other = create(
        &Spec::new(),
        server(move |_| {
            let mut found = lock;
            // SAFETY: the kernel reads and writes one `flock`, which outlives the call.
            assert_eq!(unsafe { libc::fcntl(number, libc::F_GETLK, &raw mut found) }, 0);
            assert_eq!(lock_whole(), 0, "it is the same open file");
            if found.l_type == lock.l_type { u64::from(found.l_pid.unsigned_abs()) } else { 0 }
        }),
    )
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, own_pid(), "the root's lock is in its way");
}

/// Mutexes that note who took them note a thread's number, which it has in one context only; plain ones do not.
pub(crate) fn locks_that_know_their_owner_know_a_context() {
    let page = shared_page().cast::<libc::pthread_mutex_t>();
    let kinds = [libc::PTHREAD_MUTEX_NORMAL, libc::PTHREAD_MUTEX_RECURSIVE, libc::PTHREAD_MUTEX_ERRORCHECK];
    // SAFETY: the mutexes are in a page that stays, one behind the other, and are made before they are used.
    let mutex = move |index: usize| unsafe { page.add(index) };
    for (index, kind) in kinds.into_iter().enumerate() {
        // SAFETY: the attributes are made here, of zeros, and used as pthread_mutexattr_init(3) has it.
        unsafe {
            let mut attributes: libc::pthread_mutexattr_t = std::mem::zeroed();
            libc::pthread_mutexattr_init(&raw mut attributes);
            libc::pthread_mutexattr_setpshared(&raw mut attributes, libc::PTHREAD_PROCESS_SHARED);
            libc::pthread_mutexattr_settype(&raw mut attributes, kind);
            assert_eq!(libc::pthread_mutex_init(mutex(index), &raw const attributes), 0);
        }
    }
    // SAFETY: mutexes that were made above, in memory that both have.
    let unlock = move |index: usize| unsafe { libc::pthread_mutex_unlock(mutex(index)) };
    // SAFETY: the mutexes were made above, in memory that both contexts share.
    let try_lock = move |index: usize| unsafe { libc::pthread_mutex_trylock(mutex(index)) };
    let other = create(
        &Spec::new(),
        server(move |word| {
            let index = usize::try_from(word & 0xff).unwrap();
            u64::from(if word >> 8 == 0 { try_lock(index) } else { unlock(index) }.unsigned_abs())
        }),
    )
    .unwrap();
    let there = |word: u64| i32::try_from(other.switch(word, &[]).unwrap().word).unwrap();
    for (index, unlocked) in [(0, 0), (1, libc::EPERM), (2, libc::EPERM)] {
        assert_eq!(try_lock(index), 0);
        let index = u64::try_from(index).unwrap();
        assert_eq!(there(index), libc::EBUSY, "kind {index}");
        assert_eq!(there(index | 0x100), unlocked, "kind {index}");
    }
    // Released where they were taken, they are free everywhere.
    for index in [1, 2] {
        assert_eq!(unlock(index), 0);
        let index = u64::try_from(index).unwrap();
        assert_eq!((there(index), there(index | 0x100)), (0, 0));
    }
}
