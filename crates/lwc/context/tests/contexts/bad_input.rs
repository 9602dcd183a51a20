//! Descriptors and orders that make no sense: an error says so, and all goes on as before.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use orrery_context::{Error, Spec, create};

use crate::support::{
    await_end_of, end, in_child, lent, named, own_pid, pair, plain_fork, receive, send, server, shared_words,
    status_of,
};

const LIMIT: Duration = Duration::from_secs(20);

fn is_no_name(number: RawFd) {
    let refused = named(number).unwrap_err();
    assert_eq!(refused, Error::NoContext { descriptor: number });
    assert!(refused.to_string().contains(&number.to_string()), "{refused}");
}

pub(crate) fn what_names_no_context_is_refused() {
    is_no_name(7);
    let other = create(&Spec::new(), server(|word| word + 1)).unwrap();
    let (a, b) = pair();
    let file = tempfile::tempfile().unwrap();
    for number in [-1, i32::MAX, 0, a.as_raw_fd(), b.as_raw_fd(), file.as_raw_fd()] {
        is_no_name(number);
    }
    assert_eq!(named(other.descriptor()).unwrap(), other);
    assert_eq!(other.switch(4, &[]).unwrap().word, 5);
}

pub(crate) fn a_context_of_another_program_is_refused() {
    let (here, there) = pair();
    let pid = plain_fork();
    if pid == 0 {
        let own = create(&Spec::new(), server(|word| word + 1)).unwrap();
        send(&there, &[lent(own)]);
        // Until the other program has had its way with it.
        receive(&there);
        for word in 0..100 {
            assert_eq!(own.switch_within(word, &[], LIMIT).unwrap().word, word + 1);
        }
        end(0);
    }
    let own = create(&Spec::new(), server(|word| word + 2)).unwrap();
    let foreign = receive(&here);
    is_no_name(foreign.as_raw_fd());
    // It is a socket, whose other end hears what is sent. It must not believe it.
    let nothing = tempfile::tempfile().unwrap();
    for count in 1..=3 {
        let junk = [nothing.as_fd(), here.as_fd(), foreign.as_fd()];
        send(&foreign, &junk[..count]);
    }
    send(&here, &[nothing.as_fd()]);
    assert_eq!(status_of(pid), 0, "the other program was harmed");
    assert_eq!(own.switch(1, &[]).unwrap().word, 3);
}

pub(crate) fn a_context_gets_no_name_of_itself() {
    let number = shared_words();
    let other = create(&Spec::new().may_fetch(0, u32::MAX), move |start| {
        // Its creator's name of it is not the creator's to give, whatever the rights are.
        let own = u32::try_from(number[0].load(Ordering::SeqCst)).unwrap();
        // SAFETY: it is refused, and leaves what has that number here.
        let refused = unsafe { start.creator.overlay_descriptor(own) }.is_err();
        let is_no_name = named(i32::try_from(own).unwrap()).is_err();
        start.creator.switch((refused && is_no_name).into(), &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    number[0].store(other.descriptor().unsigned_abs().into(), Ordering::SeqCst);
    assert_eq!(other.switch_within(0, &[], LIMIT).unwrap().word, 1);
}

pub(crate) fn contexts_end_when_the_root_becomes_another_program() {
    let words = shared_words();
    let status = in_child(|| {
        let other = create(&Spec::new(), server(|_| own_pid())).unwrap();
        words[0].store(other.switch(0, &[]).unwrap().word, Ordering::SeqCst);
        // What it is told of descriptors: none of a context is left.
        let script = "for fd in /proc/self/fd/*; do readlink $fd; done | grep -c -e orrery -e socket: -e pidfd; exit 7";
        let arguments = [c"/bin/sh".as_ptr(), c"-c".as_ptr()];
        let script = std::ffi::CString::new(script).unwrap();
        let arguments = [arguments[0], arguments[1], script.as_ptr(), std::ptr::null()];
        // SAFETY: two texts that end with 0, and a list of such that ends with a null pointer; all live here.
        unsafe { libc::execv(arguments[0], arguments.as_ptr()) };
    });
    assert_eq!(libc::WEXITSTATUS(status), 7);
    await_end_of(words[0].load(Ordering::SeqCst));
}

pub(crate) fn a_context_that_closes_everything_holds_nobody_up() {
    let words = shared_words();
    in_child(|| {
        let other = create(&Spec::new(), |start| {
            words[0].store(own_pid(), Ordering::SeqCst);
            // SAFETY: takes numbers only. It takes descriptors from under the library, on purpose: that must bear it.
            // Others that this context has a copy of are not used here any more.
            unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
            let _ = start.creator.switch(1, &[]);
            let _ = start.arrival.caller.switch(2, &[]);
            std::process::abort()
        })
        .unwrap();
        // Whether control comes back with a word or as an error, it comes.
        let _ = other.switch_within(0, &[], LIMIT);
        let fresh = create(&Spec::new(), server(|word| word + 1)).unwrap();
        words[1].store(fresh.switch_within(1, &[], LIMIT).unwrap().word, Ordering::SeqCst);
    });
    assert_eq!(words[1].load(Ordering::SeqCst), 2);
    // It cannot see by a descriptor that the root is gone, and must not outlive it.
    await_end_of(words[0].load(Ordering::SeqCst));
}
