//! What is refused, and what shortage does: an error, and nothing changes.

use std::sync::atomic::{AtomicU32, Ordering};

use orrery_rollback::Error;
use orrery_rollback::{KeptBuffer, Outcome, Rollback};

use super::common::{map, rollback, tell};

pub(crate) fn nesting_is_refused() {
    let kept = KeptBuffer::with_capacity(1000).unwrap();
    let outcome = rollback().run(|| {
        let inner = Rollback::builder().build();
        tell(&kept, &format!("{}", inner.unwrap_err()));
    });
    assert_eq!(outcome, Ok(Outcome::Returned));
    assert_eq!(kept.bytes(), Error::Nested.to_string().as_bytes());
}

pub(crate) fn another_thread_is_refused() {
    let _rollback = rollback();
    let error = std::thread::spawn(|| Rollback::builder().build().map(drop)).join().unwrap().unwrap_err();
    assert!(matches!(error, Error::WrongThread { .. }), "{error}");
}

pub(crate) fn a_forked_process_is_refused() {
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    // SAFETY: the case has one thread, so the child finds no lock held.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // The old handle does not work; a new one does.
        let refused = matches!(rollback.run(|| {}), Err(Error::OtherProcess { .. }));
        let mut number = 1;
        let works = Rollback::builder().build().unwrap().run(|| number = 2) == Ok(Outcome::Returned);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(refused && works && number == 1)) };
    }
    let mut status = 0;
    // SAFETY: writes to the status.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), 1);
    assert_eq!(rollback.run(|| {}), Ok(Outcome::Returned));
}

static REFUSED: AtomicU32 = AtomicU32::new(0);

extern "C" fn try_in_handler(_: i32) {
    if Rollback::builder().build().and_then(|mut rollback| rollback.run(|| {})) == Err(Error::SignalHandler) {
        REFUSED.store(1, Ordering::Relaxed);
    }
}

pub(crate) fn a_signal_handler_is_refused() {
    let _rollback = rollback();
    // SAFETY: the stack is a mapping of that size and lives on; the handler is a function of that kind.
    unsafe {
        let stack = libc::stack_t { ss_sp: map(1 << 18).cast(), ss_flags: 0, ss_size: 1 << 18 };
        libc::sigaltstack(&raw const stack, std::ptr::null_mut());
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = try_in_handler as *const () as usize;
        action.sa_flags = libc::SA_ONSTACK;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
        libc::raise(libc::SIGUSR1);
    }
    assert_eq!(REFUSED.load(Ordering::Relaxed), 1);
}

pub(crate) fn kept_memory_stays() {
    let memory = map(64 << 10);
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    rollback.keep_memory(memory.addr() + 4096, 8192).unwrap();
    for round in 1..4_u8 {
        // SAFETY: a part of the test's own mapping, to which nothing else refers.
        rollback.run(|| unsafe { memory.write_bytes(round, 64 << 10) }).unwrap();
        // SAFETY: within the mapping, to which nobody writes while the slice lives.
        let bytes = unsafe { std::slice::from_raw_parts(memory, 64 << 10) };
        assert!(bytes[4096..12288].iter().all(|&byte| byte == round));
        assert!(bytes[..4096].iter().chain(&bytes[12288..]).all(|&byte| byte == 0));
    }
}

pub(crate) fn the_stack_cannot_be_kept() {
    let mut rollback = rollback();
    let local = 0_u8;
    let page = (&raw const local).addr() & !4095;
    for (start, length) in [(page, 4096), (page - 8192, 4096), (page, 100), (4096, 4096)] {
        let error = rollback.keep_memory(start, length).unwrap_err();
        assert!(matches!(error, Error::Memory(orrery_memory::Error::Keep { .. })), "{error}");
    }
    assert_eq!(rollback.run(|| {}), Ok(Outcome::Returned));
}

pub(crate) fn a_full_buffer_says_so() {
    let buffer = KeptBuffer::with_capacity(10).unwrap();
    let room = buffer.capacity();
    assert!(room >= 10);
    let error = buffer.push(&vec![1; room + 1]).unwrap_err();
    assert_eq!((error.capacity, error.needed), (room, room + 1));
    assert!(buffer.bytes().is_empty());
    buffer.push(&vec![1; room]).unwrap();
    assert!(buffer.push(&[1]).is_err());
}

pub(crate) fn no_address_space_is_an_error() {
    let limit = libc::rlimit { rlim_cur: 512 << 20, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: reads the limit.
    unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) };
    let error = Rollback::builder().build().map(drop).unwrap_err();
    assert!(matches!(error, Error::Memory(orrery_memory::Error::AddressSpace { .. })), "{error}");
    // A limit that leaves some room is enough.
    let limit = libc::rlimit { rlim_cur: 8 << 30, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: reads the limit.
    unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) };
    assert_eq!(rollback().run(|| {}), Ok(Outcome::Returned));
}

pub(crate) fn a_full_store_is_an_error() {
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    // The images' file may not grow any more.
    let limit = |bytes| {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: reads the limit.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    };
    limit(4096);
    let mut pages = vec![0_u64; 64 << 17];
    for (page, first) in pages.iter_mut().step_by(512).enumerate() {
        *first = page as u64 + 1;
    }
    let mut ran = false;
    let error = rollback.run(|| ran = true).unwrap_err();
    assert!(matches!(error, Error::Memory(orrery_memory::Error::Store { .. })), "{error:?}");
    assert!(!ran && pages[512 * 77] == 78, "it has changed nothing");
    limit(libc::RLIM_INFINITY);
    rollback.run(|| pages.fill(0)).unwrap();
    assert!(pages.iter().step_by(512).enumerate().all(|(page, first)| *first == page as u64 + 1));
}

pub(crate) fn no_descriptors_is_an_error() {
    let limit = libc::rlimit { rlim_cur: 6, rlim_max: 1024 };
    // SAFETY: reads the limit.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    let error = Rollback::builder().build().map(drop).unwrap_err();
    assert!(error.to_string().contains("open"), "{error}");
    let limit = libc::rlimit { rlim_cur: 64, rlim_max: 1024 };
    // SAFETY: reads the limit.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(rollback().run(|| {}), Ok(Outcome::Returned));
}
