//! Seccomp user notification: a filter that makes a monitor decide about calls.

use std::ffi::CStr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::mpsc;
use std::thread;

use anyhow::{Context as _, Result};
use orrery_sys::notify::{Listener, Notification};
use orrery_sys::seccomp::{Action, Filter, Scope, install};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Starts a second thread that decides about these calls of the calling thread, and allows each.
pub fn supervise_this_thread(calls: &[libc::c_long]) -> Result<()> {
    let (sender, receiver) = mpsc::channel();
    // Started before the filter, so not under it.
    thread::spawn(move || {
        if let Ok(listener) = receiver.recv() {
            monitor(listener, |listener, call| listener.proceed(call.id));
        }
    });
    sender.send(filter_this_thread(calls)?)?;
    Ok(())
}

/// Filters the calling thread, irrevocably: each of these calls waits for an answer through the descriptor.
pub fn filter_this_thread(calls: &[libc::c_long]) -> Result<OwnedFd> {
    let mut filter = Filter::new(Action::Allow);
    calls.iter().for_each(|call| filter.set(*call, Action::Notify));
    rustix::thread::set_no_new_privs(true)?;
    let listener = install(&filter.program(), Scope::ThreadWithListener);
    listener.context("cannot install a filter with a listener")?.context("the filter has no listener")
}

/// Does the least that is possible for a call that opens a file: opens this one, whichever was asked for, and passes its
/// descriptor with the answer. Returns when no process is left under the filter.
pub fn open_for_all(listener: OwnedFd, path: &CStr) {
    monitor(listener, |listener, call| {
        let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        match file.and_then(|file| listener.answer_with_descriptor(call.id, file.as_fd(), true)) {
            Ok(()) => Ok(()),
            Err(_) => listener.answer(call.id, Err(Errno::IO)),
        }
    });
}

/// Answers each call until no process is left under the filter. A caller that has gone needs no answer.
fn monitor(listener: OwnedFd, answer: impl Fn(&Listener, &Notification) -> Result<(), Errno>) {
    let listener = Listener::new(listener);
    loop {
        match listener.receive() {
            Ok(call) => drop(answer(&listener, &call)),
            Err(Errno::INTR) => {}
            Err(Errno::NOENT) if !is_over(&listener) => {}
            Err(_) => return,
        }
    }
}

fn is_over(listener: &Listener) -> bool {
    let mut one = [PollFd::new(listener, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut one, Some(&now)).is_ok_and(|ready| ready == 1) && one[0].revents().contains(PollFlags::HUP)
}
