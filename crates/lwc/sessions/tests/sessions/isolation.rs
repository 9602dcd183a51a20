//! What a session has, sees, and leaves behind.

use std::collections::HashMap;
use std::os::fd::AsFd;

use orrery_sessions::Pool;

use super::client::{Client, pool, tidy_all};
use super::composition::{drop_privileges, is_superuser};
use super::scribble::numbers;
use super::secret::{FIRST, SECOND};

pub(crate) fn a_session_serves() {
    let mut pool = pool(Pool::builder().ready(1).spare(1));
    for round in 0..20 {
        let mut client = Client::begin(&mut pool);
        assert_eq!(client.ask(&mut pool, "recall").unwrap(), "");
        assert_eq!(client.ask(&mut pool, &format!("remember {round}")).unwrap(), "ok");
        assert_eq!(client.ask(&mut pool, "recall").unwrap(), round.to_string());
        client.end(&mut pool);
    }
    let statistics = pool.statistics();
    assert_eq!(
        (statistics.begun, statistics.made, statistics.lost),
        (20, 1, 0),
        "one context serves them all"
    );
}

pub(crate) fn sessions_work_for_an_ordinary_user() {
    if is_superuser() {
        drop_privileges();
    }
    let ballast = vec![7_u8; 48 << 20];
    a_session_serves();
    nothing_is_left_behind();
    std::hint::black_box(&ballast);
}

/// What an attacker who executes code inside a session reaches of the root: nothing, unless isolation was left out.
pub(crate) fn sessions_reach_nothing_of_the_root() {
    let secret = Box::new(0x5EC2_E75E_C2E7_u64);
    let command = format!("attack {} {}", std::process::id(), (&raw const *secret).expose_provenance());
    for (isolated, expected) in [(false, "memory,descriptors"), (true, "")] {
        let mut pool = pool(Pool::builder().ready(1).isolate(isolated));
        let mut client = Client::begin(&mut pool);
        assert_eq!(client.ask(&mut pool, &command).unwrap(), expected, "isolated: {isolated}");
        client.end(&mut pool);
    }
}

pub(crate) fn each_session_has_its_own_memory() {
    let mut pool = pool(Pool::builder().ready(2));
    let mut clients: Vec<Client> = (0..10).map(|_| Client::begin(&mut pool)).collect();
    for round in 0..5 {
        for (number, client) in clients.iter_mut().enumerate() {
            client.ask(&mut pool, &format!("remember {number}-{round}")).unwrap();
        }
    }
    for (number, client) in clients.iter_mut().enumerate() {
        let expected: Vec<String> = (0..5).map(|round| format!("{number}-{round}")).collect();
        assert_eq!(client.ask(&mut pool, "recall").unwrap(), expected.join(" "));
    }
    for client in clients {
        client.end(&mut pool);
    }
}

/// A large program is not copied for each session: what none has written, all have together.
pub(crate) fn what_sessions_have_in_common_is_there_once() {
    let ballast: Vec<u8> = (0..64_usize << 20).map(|at| (at / 4096).to_le_bytes()[at % 2]).collect();
    // Memory that a fork does not copy, as contexts have, must be told apart, and no more.
    // SAFETY: a new mapping takes nothing from anybody, and the advice is about its first page.
    let wiped = unsafe {
        let page = libc::mmap(std::ptr::null_mut(), 8192, 3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        assert_eq!(libc::madvise(page, 4096, libc::MADV_WIPEONFORK), 0);
        page
    };
    let mut pool = pool(Pool::builder().ready(2).spare(0));
    for _ in 0..3 {
        let mut client = Client::begin(&mut pool);
        client.ask(&mut pool, "scribble 1").unwrap();
        let pid = client.ask(&mut pool, "pid").unwrap();
        client.end(&mut pool);
        tidy_all(&mut pool);
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let shared = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
        let kibibytes: usize = shared.trim().trim_end_matches(" kB").parse().unwrap();
        if std::env::var("ORRERY_TRACKER").as_deref() != Ok("compare") {
            assert!(kibibytes < 16 << 10, "the images of one session take {kibibytes} KiB");
        }
    }
    std::hint::black_box((&ballast, wiped));
}

/// Each session commits memory for the pages that it writes, not for those that it may write.
pub(crate) fn a_session_commits_what_it_uses() {
    let mut pool = pool(Pool::builder().ready(2).spare(0));
    for _ in 0..3 {
        let mut client = Client::begin(&mut pool);
        client.ask(&mut pool, "scribble 1").unwrap();
        let committed: u64 = client.ask(&mut pool, "committed").unwrap().parse().unwrap();
        assert!(committed > 0 && committed <= 4 << 20, "{committed} bytes");
        client.end(&mut pool);
        tidy_all(&mut pool);
    }
}

pub(crate) fn nothing_is_left_behind() {
    let mut pool = pool(Pool::builder().ready(1).spare(1));
    let mut first = Client::begin(&mut pool);
    let pid = first.ask(&mut pool, "pid").unwrap();
    let found =
        |client: &mut Client, pool: &mut Pool| client.ask(pool, &format!("search {FIRST} {SECOND}")).unwrap();
    for round in 0..3 {
        assert_eq!(first.ask(&mut pool, &format!("fill {FIRST} {SECOND}")).unwrap(), "ok");
        let here = found(&mut first, &mut pool);
        let copies: usize = here.split(' ').next().unwrap().parse().unwrap();
        assert!(copies > 1000, "the search finds what is there: {here}");
        first.end(&mut pool);
        tidy_all(&mut pool);
        first = Client::begin(&mut pool);
        assert_eq!(first.ask(&mut pool, "pid").unwrap(), pid, "the same context");
        let here = found(&mut first, &mut pool);
        assert!(here.starts_with("0 "), "round {round}: {here}");
    }
    // Nor does one see what another one has at the same time.
    let mut second = Client::begin(&mut pool);
    first.ask(&mut pool, &format!("fill {FIRST} {SECOND}")).unwrap();
    assert!(found(&mut second, &mut pool).starts_with("0 "));
}

pub(crate) fn sessions_have_no_other_descriptors() {
    let kept = std::fs::File::open("/dev/full").unwrap();
    let _not = std::fs::File::open("/dev/zero").unwrap();
    let mut pool = pool(Pool::builder().ready(2).keep_descriptor(&kept));
    let mut clients: Vec<Client> = (0..4).map(|_| Client::begin(&mut pool)).collect();
    for client in &mut clients {
        let inode = rustix_inode(&client.stream);
        let files = client.ask(&mut pool, "fds").unwrap();
        assert!(files.contains("/dev/full") && !files.contains("/dev/zero"), "{files}");
        assert!(!files.contains(&format!("socket:[{inode}]")), "a client's end: {files}");
    }
    let mut all: Vec<HashMap<String, usize>> = Vec::new();
    for client in &mut clients {
        let files = client.ask(&mut pool, "fds").unwrap();
        let mut sockets = HashMap::new();
        for socket in files.split([',', ' ']).filter(|file| file.starts_with("socket:")) {
            *sockets.entry(socket.to_owned()).or_insert(0) += 1;
        }
        all.push(sockets);
    }
    for (index, one) in all.iter().enumerate() {
        for other in &all[index + 1..] {
            let common: Vec<_> = one.keys().filter(|socket| other.contains_key(*socket)).collect();
            // The root's name, and nothing else.
            assert!(common.len() <= 1, "{common:?}");
        }
    }
}

fn rustix_inode(fd: &impl AsFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_ino
}

/// Sessions begin, write, end, are ended, exit, and are cleaned in random order. The state of each is a function of its
/// own writes, and none at its beginning.
pub(crate) fn any_order_of_events_leaves_the_captured_state() {
    let seeds: u64 = std::env::var("ORRERY_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(6);
    let mut pool = pool(Pool::builder().ready(2).most(5).spare(1));
    let mut seen: HashMap<Vec<u64>, String> = HashMap::new();
    for seed in 1..=seeds {
        let mut next = numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut live: Vec<(Client, Vec<u64>)> = Vec::new();
        for _ in 0..120 {
            let chosen = usize::try_from(next()).unwrap() % live.len().max(1);
            match next() % 8 {
                0 | 1 if live.len() < 5 => live.push((Client::begin(&mut pool), Vec::new())),
                2 if !live.is_empty() => live.swap_remove(chosen).0.end(&mut pool),
                3 if !live.is_empty() => {
                    let (mut client, _) = live.swap_remove(chosen);
                    match next() % 3 {
                        0 => pool.end(client.session.unwrap()).unwrap(),
                        1 => assert_eq!(client.ask(&mut pool, "exit 1"), None),
                        _ => assert_eq!(client.ask(&mut pool, "crash"), None),
                    }
                }
                4 => {
                    pool.tidy().unwrap();
                }
                _ if !live.is_empty() => {
                    let (client, writes) = &mut live[chosen];
                    // Few different ones, so that equal histories come up.
                    let write = next() % 12;
                    client.ask(&mut pool, &format!("scribble {write}")).unwrap();
                    writes.push(write);
                }
                _ => {}
            }
            for (client, writes) in &mut live {
                if writes.len() > 2 {
                    continue;
                }
                let state = client.ask(&mut pool, "state").unwrap();
                let known = seen.entry(writes.clone()).or_insert_with(|| state.clone());
                assert_eq!(*known, state, "seed {seed}: the state after {writes:?}");
            }
        }
        for (client, _) in live {
            client.end(&mut pool);
        }
    }
    assert!(seen.contains_key(&Vec::new()) && seen.len() > 10, "{} histories", seen.len());
    let statistics = pool.statistics();
    assert!(statistics.rolled_back > 10 * seeds / 2, "{statistics:?}");
}
