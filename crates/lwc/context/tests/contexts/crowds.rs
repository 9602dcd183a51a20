//! As many contexts as there can be, and the ends of what they are made of.
//!
//! `ORRERY_CONTEXTS=4095` is as many as fit beside the root; `make soak` takes that.

use orrery_context::{Context, Error, Spec, create};
use rustix::process::{Resource, Rlimit, Signal, geteuid, getrlimit, setrlimit};

use crate::support::{await_end_of, kill, own_pid, server, set_groups, set_users};

/// How many contexts a program has at most, beside its root.
const MOST: usize = 4095;
/// What each takes of its creator's descriptors: its name, its creator's end of the name that it has, what it is known
/// by.
const DESCRIPTORS: u64 = 3;

/// Returns how long a case may take: thousands take longer, on a machine that is busy with others.
pub(crate) fn seconds() -> u32 {
    let is_set = |name| std::env::var_os(name).is_some();
    if is_set("ORRERY_CONTEXTS") || is_set("ORRERY_REQUESTS") { 1200 } else { 240 }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Adds up what it was told, and tells that and its process.
fn adder() -> Result<Context, Error> {
    create(&Spec::new(), |start| {
        let mut sum = 0;
        let mut arrival = start.arrival;
        loop {
            sum += arrival.word;
            arrival = arrival.caller.switch(sum, &own_pid().to_ne_bytes()).unwrap();
        }
    })
}

pub(crate) fn hundreds_live_at_a_time() {
    let wanted = std::env::var("ORRERY_CONTEXTS").ok().map_or(256, |text| text.parse().unwrap());
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
    let room = usize::try_from(most.unwrap_or(u64::MAX).saturating_sub(800) / DESCRIPTORS).unwrap();
    if room < wanted {
        orrery_testing::skipped!("RLIMIT_NOFILE has room for {room} contexts, not for {wanted}");
        return;
    }
    // Whatever the first one brings along.
    adder().unwrap().close().unwrap();
    let before = open_descriptors();
    let all: Vec<Context> = (0..wanted).map(|_| adder().unwrap()).collect();
    if wanted == MOST {
        assert_eq!(adder().unwrap_err(), Error::Full { most: MOST + 1 });
    }
    let mut processes = Vec::new();
    for (index, context) in all.iter().enumerate() {
        let arrival = context.switch(index as u64, &[]).unwrap();
        assert_eq!((arrival.word, arrival.caller), (index as u64, *context));
        processes.push(u64::from_ne_bytes(arrival.bytes.try_into().unwrap()));
    }
    // In another order; one that is killed concerns nobody else.
    let victim = wanted / 2;
    kill(i32::try_from(processes[victim]).unwrap(), Signal::KILL);
    await_end_of(processes[victim]);
    for (index, context) in all.iter().enumerate().rev() {
        match context.switch(1000, &[]) {
            Ok(arrival) => assert_eq!(arrival.word, 1000 + index as u64),
            Err(Error::Gone { .. } | Error::Died { .. }) => assert_eq!(index, victim),
            Err(odd) => panic!("context {index}: {odd}"),
        }
    }
    for context in all {
        context.close().unwrap();
    }
    // Each has copies of the names of those before it: the last one ends first.
    processes.into_iter().rev().for_each(await_end_of);
    // There is room for as many again, and nothing is left of those.
    let again = adder().unwrap();
    assert_eq!(again.switch(3, &[]).unwrap().word, 3);
    again.close().unwrap();
    let left = (0..50).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        adder().unwrap().close().unwrap();
        open_descriptors() <= before + usize::try_from(2 * DESCRIPTORS).unwrap()
    });
    assert!(left, "{} descriptors, {before} before", open_descriptors());
}

pub(crate) fn without_processes_nothing_is_made() {
    if !geteuid().is_root() {
        orrery_testing::skipped!("only root becomes a user who has nothing else to count");
        return;
    }
    // The superuser is not limited, and others may run processes of the usual ones.
    const NOBODY_ELSE: u32 = 54_321;
    assert!(set_groups(NOBODY_ELSE, NOBODY_ELSE, NOBODY_ELSE));
    assert!(set_users(NOBODY_ELSE, NOBODY_ELSE, NOBODY_ELSE));
    setrlimit(Resource::Nproc, Rlimit { current: Some(12), maximum: Some(12) }).unwrap();
    let mut all = Vec::new();
    let refused = loop {
        match create(&Spec::new(), server(|word| word + 1)) {
            Ok(made) => all.push(made),
            Err(refused) => break refused,
        }
        assert!(all.len() < 20, "the limit holds nobody up");
    };
    assert!(matches!(refused, Error::Birth { errno: rustix::io::Errno::AGAIN, .. }), "{refused}");
    assert!(!all.is_empty());
    // Those that there are go on; in the place of one that ends there is room for another one.
    for context in &all {
        assert_eq!(context.switch(1, &[]).unwrap().word, 2);
    }
    let before = open_descriptors();
    for _ in 0..3 {
        assert!(create(&Spec::new(), server(|word| word)).is_err());
    }
    assert_eq!(open_descriptors(), before, "what could not be made leaves nothing behind");
    all.pop().unwrap().close().unwrap();
    let made = (0..200).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        create(&Spec::new(), server(|word| word)).is_ok()
    });
    assert!(made);
}
