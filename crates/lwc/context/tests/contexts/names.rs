//! Names: descriptors of contexts, how they come by ways of the program's own, and what they allow there.

use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::time::Duration;

use orrery_context::{self as context, Context, Error, Overlay, ROOT, Spec, create};

use crate::pages::Pages;
use crate::support::{
    await_end_of, die, end, is_running, lent, named, own_pid, pair, plain_fork, reap, receive, send, server,
};

/// Long enough for a watcher to end a context that nobody holds.
const A_WHILE: Duration = Duration::from_millis(60);

pub(crate) fn the_root_is_known_to_all() {
    let memory = Pages::new(1);
    let outer = create(&Spec::new(), move |_| {
        let inner = create(&Spec::new(), move |_| {
            // It was created by another one, and knows the root all the same.
            let root = context::root().unwrap();
            assert_eq!(root.descriptor(), ROOT);
            let back = root.switch(7, b"from within").unwrap();
            assert_eq!(back.word, 8);
            let denied = memory.overlay(root, Overlay::Copy);
            assert!(matches!(denied, Err(Error::Denied { .. })), "the name carries no rights");
            root.switch(9, &[]).unwrap();
            unreachable!();
        })
        .unwrap();
        inner.switch(0, &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    let arrival = outer.switch(0, &[]).unwrap();
    assert_eq!((arrival.word, &arrival.bytes[..]), (7, &b"from within"[..]));
    assert_eq!(arrival.caller.switch(8, &[]).unwrap().word, 9);
    // It can be taken away like others.
    let poor = create(&Spec::new().close_descriptors(3, u32::MAX), |start| {
        let none = context::root() == Err(Error::NoContext { descriptor: ROOT });
        start.creator.switch(none.into(), &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(poor.switch(0, &[]).unwrap().word, 1);
}

pub(crate) fn nobody_switches_to_itself() {
    let (here, there) = pair();
    let other = create(&Spec::new(), move |start| {
        let mut arrival = start.arrival;
        loop {
            let own = named(receive(&there).into_raw_fd()).unwrap();
            let refused = own.switch(1, &[]).unwrap_err() == Error::Itself { descriptor: own.descriptor() };
            own.close().unwrap();
            arrival = arrival.caller.switch(refused.into(), &[]).unwrap();
        }
    })
    .unwrap();
    assert_eq!(context::root().unwrap().switch(1, &[]).unwrap_err(), Error::Itself { descriptor: ROOT });
    for _ in 0..3 {
        send(&here, &[lent(other)]);
        assert_eq!(other.switch(0, &[]).unwrap().word, 1);
    }
}

pub(crate) fn a_copy_of_a_name_names_the_same() {
    let memory = Pages::new(1);
    let other = create(&Spec::new(), server(|word| if word == 0 { own_pid() } else { word + 1 })).unwrap();
    let pid = other.switch(0, &[]).unwrap().word;
    let copy = rustix::io::dup(lent(other)).unwrap().into_raw_fd();
    let copy = named(copy).unwrap();
    assert_ne!(copy.descriptor(), other.descriptor());
    assert_eq!(copy.switch(4, &[]).unwrap().word, 5);
    // What is given up is given up for all copies, known or not.
    let unknown = rustix::io::dup(lent(copy)).unwrap();
    memory.overlay(copy, Overlay::Copy).unwrap();
    copy.restrict(&[]).unwrap();
    let unknown = named(unknown.into_raw_fd()).unwrap();
    for name in [other, copy, unknown] {
        assert!(matches!(memory.overlay(name, Overlay::Copy), Err(Error::Denied { .. })));
        assert_eq!(name.switch(6, &[]).unwrap().word, 7);
    }
    for name in [other, copy] {
        name.close().unwrap();
        std::thread::sleep(A_WHILE);
        assert!(is_running(pid), "somebody holds it");
    }
    assert_eq!(unknown.switch(8, &[]).unwrap().word, 9);
    unknown.close().unwrap();
    await_end_of(pid);
}

/// Takes names that come over a socket, and tells what may be done by them: 1 a switch, 2 an overlay; 4 closes them.
fn receiver(socket: OwnedFd, memory: Pages) -> Context {
    create(&Spec::new(), move |start| {
        let mut known: Option<Context> = None;
        let mut arrival = start.arrival;
        loop {
            let name = *known.get_or_insert_with(|| named(receive(&socket).into_raw_fd()).unwrap());
            let mut done = 0;
            if name.switch(20, &[]).is_ok_and(|arrival| arrival.word == 21) {
                done |= 1;
            }
            match memory.overlay(name, Overlay::Copy) {
                Ok(()) => done |= 2,
                Err(Error::Denied { .. }) => {}
                Err(odd) => panic!("{odd}"),
            }
            if arrival.word == 1 {
                name.close().unwrap();
                known = None;
                done |= 4;
            }
            arrival = arrival.caller.switch(done, &[]).unwrap();
        }
    })
    .unwrap()
}

pub(crate) fn names_travel_by_sockets() {
    let memory = Pages::new(1);
    let (here, there) = pair();
    let friend = receiver(there, memory);
    // It was created before, and has no name of this one.
    let served = create(&Spec::new(), server(|word| if word == 0 { own_pid() } else { word + 1 })).unwrap();
    let pid = served.switch(0, &[]).unwrap().word;
    send(&here, &[lent(served)]);
    assert_eq!(friend.switch(0, &[]).unwrap().word, 3, "the name carries what the sender's does");
    served.restrict(&[]).unwrap();
    assert_eq!(friend.switch(0, &[]).unwrap().word, 1, "no longer, at once");
    served.close().unwrap();
    std::thread::sleep(A_WHILE);
    assert!(is_running(pid), "the other one holds it");
    assert_eq!(friend.switch(1, &[]).unwrap().word, 1 | 4);
    await_end_of(pid);
    // One that was narrowed before is narrow where it comes, and stays so wherever it goes.
    let served = create(&Spec::new(), server(|word| word + 1)).unwrap();
    served.restrict(&[]).unwrap();
    send(&here, &[lent(served)]);
    assert_eq!(friend.switch(1, &[]).unwrap().word, 1 | 4);
}

pub(crate) fn a_name_under_way_keeps_its_context() {
    let served = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = served.switch(0, &[]).unwrap().word;
    let (here, there) = pair();
    send(&here, &[lent(served)]);
    served.close().unwrap();
    std::thread::sleep(A_WHILE);
    assert!(is_running(pid), "it may still arrive");
    let again = named(receive(&there).into_raw_fd()).unwrap();
    assert_eq!(again.switch(0, &[]).unwrap().word, pid);
    send(&here, &[lent(again)]);
    again.close().unwrap();
    drop((here, there));
    await_end_of(pid);
}

pub(crate) fn a_name_that_comes_late_is_told() {
    let served = create(&Spec::new(), server(|_| die())).unwrap();
    let copy = rustix::io::dup(lent(served)).unwrap();
    assert!(matches!(served.switch(0, &[]), Err(Error::Died { .. })));
    let descriptor = copy.as_raw_fd();
    assert_eq!(named(descriptor).unwrap_err(), Error::Gone { descriptor });
    // Its seat is somebody else's, whom it does not name.
    let fresh = create(&Spec::new(), server(|word| word + 1)).unwrap();
    assert!(matches!(named(descriptor), Err(Error::Gone { .. } | Error::NoContext { .. })));
    assert_eq!(fresh.switch(1, &[]).unwrap().word, 2);
}

pub(crate) fn a_forked_process_holds_names() {
    let served = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = served.switch(0, &[]).unwrap().word;
    let (here, there) = pair();
    let child = plain_fork();
    if child == 0 {
        drop(here);
        // Until its parent says so, by closing its end.
        let mut byte = [0_u8; 1];
        let _ = rustix::io::read(&there, &mut byte);
        end(0);
    }
    drop(there);
    served.close().unwrap();
    std::thread::sleep(A_WHILE);
    assert!(is_running(pid), "the child has a copy");
    drop(here);
    reap(child);
    await_end_of(pid);
}
