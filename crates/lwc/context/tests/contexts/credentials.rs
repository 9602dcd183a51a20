//! What a new context has of its creator: credentials, of its own or the same.

use orrery_context::{Context, Spec, Start, create};
use rustix::process::{getegid, geteuid, getgroups, getuid};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::support::{
    become_ordinary, end, forked, server, set_further_groups, set_groups, set_users, status_of,
};

const NOBODY: u32 = 65534;
/// Stays as it is.
const SAME: u32 = u32::MAX;

/// Returns whether the superuser runs this, who alone has something to change.
fn is_superuser() -> bool {
    let yes = geteuid().is_root();
    if !yes {
        orrery_testing::skipped!("only root changes its user");
    }
    yes
}

pub(crate) fn credentials_are_its_own() {
    if !geteuid().is_root() {
        orrery_testing::skipped!("only root changes its user");
        return;
    }
    let other = create(
        &Spec::new(),
        server(|_| {
            if geteuid().is_root() {
                assert!(set_users(NOBODY, NOBODY, NOBODY));
            }
            u64::from(geteuid().as_raw())
        }),
    )
    .unwrap();
    for _ in 0..3 {
        assert_eq!(other.switch(0, &[]).unwrap().word, 65534);
        assert!(geteuid().is_root());
    }
}

fn become_effectively(user: u32, group: u32) {
    if user != 0 {
        assert!(set_groups(SAME, group, SAME));
    }
    assert!(set_users(SAME, user, SAME));
    if user == 0 {
        assert!(set_groups(SAME, group, SAME));
    }
}

/// Gives a capability up, for good.
fn give_up(capability: u32) {
    let mut sets = capabilities(None).unwrap();
    for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
        set.remove(CapabilitySet::from_bits_retain(1 << capability));
    }
    set_capabilities(None, sets).unwrap();
}

fn permitted() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("CapPrm:")).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap()
}

fn groups() -> Vec<u32> {
    getgroups().unwrap().into_iter().map(|group| group.as_raw()).collect()
}

const CHROOT: u32 = 18;
const LOOK: u64 = 0;
const BECOME_NOBODY: u64 = 1;
const BECOME_ROOT: u64 = 2;
const JOIN_GROUPS: u64 = 3;
const GIVE_UP: u64 = 4;
const END_AS_NOBODY: u64 = 5;

/// Does as it is told, and tells who it is: user, group, first of the others, whether it may chroot(2).
fn actor() -> impl FnOnce(Start) -> std::convert::Infallible {
    server(|word| {
        match word {
            BECOME_NOBODY => become_effectively(NOBODY, 1234),
            BECOME_ROOT => become_effectively(0, 0),
            JOIN_GROUPS => assert!(set_further_groups(&[70, 80])),
            GIVE_UP => give_up(CHROOT),
            END_AS_NOBODY => {
                assert!(set_groups(NOBODY, NOBODY, NOBODY));
                assert!(set_users(NOBODY, NOBODY, NOBODY));
            }
            _ => {}
        }
        who()
    })
}

fn who() -> u64 {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    let other = groups().first().copied().unwrap_or(0);
    u64::from(user) | u64::from(group) << 16 | u64::from(other) << 32 | (permitted() >> CHROOT & 1) << 48
}

fn told(context: Context, what: u64) -> u64 {
    context.switch(what, &[]).unwrap().word
}

pub(crate) fn credentials_are_shared() {
    if !is_superuser() {
        return;
    }
    assert!(set_further_groups(&[]));
    let shared = Spec::new().share_credentials(true);
    let first = create(&shared, actor()).unwrap();
    // It switches to the first one by itself, without the root in between.
    let second = create(&shared, move |start| {
        let mut arrival = start.arrival;
        loop {
            if arrival.word == BECOME_NOBODY {
                become_effectively(NOBODY, 1234);
            }
            let there = told(first, LOOK);
            assert_eq!(there, who());
            arrival = arrival.caller.switch(there, &[]).unwrap();
        }
    })
    .unwrap();
    let apart = create(&Spec::new(), actor()).unwrap();
    let before = who();
    for changer in [first, second] {
        let nobody = told(changer, BECOME_NOBODY);
        assert_ne!(nobody, before);
        assert_eq!((who(), told(first, LOOK), told(second, LOOK)), (nobody, nobody, nobody));
        assert_eq!(told(apart, LOOK), before, "it has its own");
        // The root changes it back, and that is followed, too.
        become_effectively(0, 0);
        assert_eq!((told(first, LOOK), told(second, LOOK)), (before, before));
    }
    let joined = told(first, JOIN_GROUPS);
    assert_eq!((groups(), told(second, LOOK)), (vec![70, 80], joined));
    assert_eq!(told(first, BECOME_NOBODY), who());
    assert_eq!(told(first, BECOME_ROOT), joined);
    assert_eq!((who(), told(apart, LOOK)), (joined, before));
    // One that is created later has what there is then.
    let third = create(&shared, actor()).unwrap();
    assert_eq!(told(third, LOOK), joined);
    let alone = create(&Spec::new(), actor()).unwrap();
    assert_eq!(told(alone, BECOME_NOBODY) & 0xffff, u64::from(NOBODY));
    assert_eq!((who(), told(third, LOOK)), (joined, joined));
}

pub(crate) fn what_one_gives_up_all_have_given_up() {
    if !is_superuser() {
        return;
    }
    let shared = Spec::new().share_credentials(true);
    let (first, second) = (create(&shared, actor()).unwrap(), create(&shared, actor()).unwrap());
    assert_eq!(permitted() >> CHROOT & 1, 1);
    told(first, GIVE_UP);
    assert_eq!((permitted() >> CHROOT & 1, told(second, LOOK) >> 48), (0, 0));
    told(second, END_AS_NOBODY);
    assert_eq!((getuid().as_raw(), permitted()), (NOBODY, 0));
    // SAFETY: the call takes a number only; a change of identity invalidates no memory.
    assert_eq!(unsafe { libc::setuid(0) }, -1, "there is no way back");
    assert_eq!(told(first, LOOK) & 0xffff, u64::from(NOBODY));
}

pub(crate) fn copies_of_shared_credentials_are_apart() {
    if !is_superuser() {
        return;
    }
    let first = create(&Spec::new().share_credentials(true), actor()).unwrap();
    let before = told(first, LOOK);
    let pid = forked(|| {
        let apart = told(first, BECOME_NOBODY) != before && who() == before;
        end(i32::from(!apart))
    });
    assert_eq!((status_of(pid), who(), told(first, LOOK)), (0, before, before));
}

pub(crate) fn threads_share_credentials() {
    if !is_superuser() {
        return;
    }
    let first = create(&Spec::new().share_credentials(true), actor()).unwrap();
    assert_eq!(told(first, LOOK), who());
    let (to, from) = (std::sync::mpsc::channel::<()>(), std::sync::mpsc::channel::<u32>());
    let ((ask, asked), (say, said)) = (to, from);
    let thread = std::thread::spawn(move || {
        while asked.recv().is_ok() {
            say.send(geteuid().as_raw()).unwrap();
        }
    });
    let user_there = || {
        ask.send(()).unwrap();
        said.recv().unwrap()
    };
    assert_eq!(user_there(), 0);
    told(first, BECOME_NOBODY);
    assert_eq!(user_there(), NOBODY, "the user is that of all threads of the program");
    told(first, BECOME_ROOT);
    assert_eq!(user_there(), 0);
    drop(ask);
    thread.join().unwrap();
}

pub(crate) fn an_ordinary_user_shares_what_there_is() {
    assert!(become_ordinary());
    let first = create(&Spec::new().share_credentials(true), actor()).unwrap();
    for _ in 0..3 {
        assert_eq!(told(first, LOOK), who());
    }
}
