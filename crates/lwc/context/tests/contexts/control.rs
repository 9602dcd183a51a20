//! Control passes from context to context, with arguments.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use orrery_context::{Context, Created, Error, ROOM, Spec, Start, create, create_here};
use rustix::process::Signal;

use crate::support::{await_end_of, kill, own_pid, server, shared_words};

pub(crate) fn control_goes_back_and_forth() {
    let other = create(&Spec::new(), |start| {
        assert_eq!(start.creator, start.arrival.caller);
        let mut arrival = start.arrival;
        let mut sum = 0;
        loop {
            sum += arrival.word;
            arrival = arrival.caller.switch(sum, &[]).unwrap();
        }
    })
    .unwrap();
    let mut sum = 0;
    for word in 0..20_000 {
        sum += word;
        let back = other.switch(word, &[]).unwrap();
        assert_eq!(back.word, sum);
        assert_eq!(back.caller, other);
    }
    other.close().unwrap();
}

pub(crate) fn a_switch_carries_bytes() {
    let other = create(&Spec::new(), |start| {
        let mut arrival = start.arrival;
        loop {
            arrival.bytes.reverse();
            arrival = arrival.caller.switch(0, &arrival.bytes).unwrap();
        }
    })
    .unwrap();
    for length in [0, 1, 5, 4096, ROOM] {
        let sent: Vec<u8> = (0..length).map(|index| u8::try_from(index % 251).unwrap()).collect();
        let mut back = other.switch(0, &sent).unwrap().bytes;
        back.reverse();
        assert_eq!(back, sent);
    }
    let refused = other.switch(0, &vec![0; ROOM + 1]).unwrap_err();
    assert_eq!(refused, Error::TooLong { bytes: ROOM + 1, room: ROOM });
    assert_eq!(other.switch(0, b"ok").unwrap().bytes, b"ko");
}

pub(crate) fn create_returns_in_both() {
    let mut local = 1;
    match create_here(&Spec::new()).unwrap() {
        Created::Creator(other) => {
            local += 10;
            let back = other.switch(5, &[]).unwrap();
            assert_eq!((back.word, local), (106, 11));
        }
        Created::Context(start) => {
            local += 100;
            start.creator.switch(start.arrival.word + local, &[]).unwrap();
            unreachable!();
        }
    }
}

pub(crate) fn callers_are_known() {
    let last = create(&Spec::new(), server(|word| word + 1000)).unwrap();
    // A context that knows `last` by its creator's descriptor: `last` has never heard of it.
    let middle = create(&Spec::new(), move |start| {
        let mut arrival = start.arrival;
        loop {
            let there = last.switch(arrival.word, &[]).unwrap();
            assert_eq!(there.caller, last);
            arrival = start.creator.switch(there.word + 1, &[]).unwrap();
        }
    })
    .unwrap();
    for word in 0..200 {
        let back = middle.switch(word, &[]).unwrap();
        assert_eq!((back.word, back.caller), (word + 1001, middle));
        let back = last.switch(word, &[]).unwrap();
        assert_eq!((back.word, back.caller), (word + 1000, last));
    }
    // Once round: root, first, second, root.
    let second = create(&Spec::new(), |start| {
        let mut arrival = start.arrival;
        loop {
            arrival = start.creator.switch(arrival.word * 2, &[]).unwrap();
        }
    })
    .unwrap();
    let first = create(&Spec::new(), move |start| {
        let mut arrival = start.arrival;
        loop {
            arrival = second.switch(arrival.word + 1, &[]).unwrap();
        }
    })
    .unwrap();
    for word in 0..200 {
        let back = first.switch(word, &[]).unwrap();
        assert_eq!((back.word, back.caller), ((word + 1) * 2, second));
    }
}

pub(crate) fn contexts_nest() {
    fn level(start: Start) -> Infallible {
        let depth = start.arrival.word;
        let below = (depth > 0).then(|| {
            let below = create(&Spec::new(), level).unwrap();
            below.switch(depth - 1, &[]).unwrap();
            below
        });
        let mut arrival = start.creator.switch(depth, &[]).unwrap();
        loop {
            let sum = below.map_or(0, |below| below.switch(arrival.word, &[]).unwrap().word);
            arrival = start.creator.switch(sum + arrival.word, &[]).unwrap();
        }
    }
    let top = create(&Spec::new(), level).unwrap();
    top.switch(5, &[]).unwrap();
    assert_eq!(top.switch(3, &[]).unwrap().word, 18);
    assert_eq!(top.switch(4, &[]).unwrap().word, 24);
}

pub(crate) fn many_come_and_go() {
    let fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let children = || {
        std::fs::read_to_string(format!("/proc/self/task/{}/children", std::process::id()))
            .map_or(0, |text| text.split_whitespace().count())
    };
    create(&Spec::new(), server(|word| word)).unwrap().close().unwrap();
    let before = fds();
    for round in 0..300 {
        let other = create(&Spec::new(), server(|word| word + 1)).unwrap();
        assert_eq!(other.switch(round, &[]).unwrap().word, round + 1);
        other.close().unwrap();
    }
    assert!(fds() < before + 30, "{} descriptors after {before}", fds());
    assert!(children() < 10, "{} children", children());
    let all: Vec<Context> = (0..60).map(|_| create(&Spec::new(), server(|word| word)).unwrap()).collect();
    for (index, context) in all.iter().enumerate() {
        assert_eq!(context.switch(index as u64, &[]).unwrap().word, index as u64);
    }
}

pub(crate) fn time_limits_hold() {
    let other = create(
        &Spec::new(),
        server(|word| {
            if word == 1 {
                loop {
                    std::hint::spin_loop();
                }
            }
            own_pid()
        }),
    )
    .unwrap();
    let limit = Duration::from_millis(60);
    let pid = other.switch_within(0, &[], limit).unwrap().word;
    assert_eq!(other.switch_within(1, &[], limit).unwrap_err(), Error::TimedOut);
    await_end_of(pid);
    // The one that hangs is not the one that was switched to.
    let far = create(&Spec::new(), |start| {
        let inner = create(&Spec::new(), |_| {
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        })
        .unwrap();
        let outcome = inner.switch(0, &[]);
        start.creator.switch(u64::from(outcome.is_ok()), &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(far.switch_within(0, &[], limit).unwrap_err(), Error::TimedOut);
    let back = create(&Spec::new(), |start| {
        let refused = start.creator.switch_within(0, &[], Duration::from_secs(1)).unwrap_err();
        start.creator.switch(u64::from(refused == Error::RootLimit), &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(back.switch(0, &[]).unwrap().word, 1);
}

static HANDLER: AtomicU64 = AtomicU64::new(0);

static OTHER: std::sync::OnceLock<Context> = std::sync::OnceLock::new();

extern "C" fn switch_in_handler(_signal: i32) {
    let refused = OTHER.get().map(|other| other.switch(0, &[]).unwrap_err());
    HANDLER.store(if refused == Some(Error::Busy) { 1 } else { 2 }, Ordering::SeqCst);
}

pub(crate) fn a_handler_may_not_switch_from_within() {
    let root = std::process::id().cast_signed();
    let words = shared_words();
    // SAFETY: the handler runs while the program is parked in a switch, where it interrupts nothing but a wait: it may
    // do as any other code. What it may not, switch, is the test.
    unsafe { libc::signal(libc::SIGUSR1, switch_in_handler as extern "C" fn(i32) as usize) };
    let other = create(
        // It signals the root, which isolated ones may not.
        &Spec::new().isolate(false),
        server(move |_| {
            // The root is parked in its switch.
            kill(root, Signal::USR1);
            std::thread::sleep(Duration::from_millis(50));
            words[0].fetch_add(1, Ordering::SeqCst)
        }),
    )
    .unwrap();
    OTHER.set(other).unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 0);
    assert_eq!(HANDLER.load(Ordering::SeqCst), 1);
    assert_eq!(words[0].load(Ordering::SeqCst), 1);
}
