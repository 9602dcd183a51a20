//! How sessions end, by themselves and by force, and what a pool does about it.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use orrery_sessions::{Ended, Error, Interest, Pool, Step};

use super::client::{Client, pool, tidy_all};
use super::obedient::line_of;

pub(crate) fn every_end_is_told() {
    let mut pool = pool(Pool::builder().ready(1).spare(1));
    let harmless = [("exit 7", Ended::Exited(7)), ("exit 0", Ended::Exited(0)), ("panic", Ended::Panicked)];
    for (command, expected) in harmless {
        let mut client = Client::begin(&mut pool);
        client.ask(&mut pool, "remember this").unwrap();
        assert_eq!(client.ask(&mut pool, command), None);
        assert_eq!(client.ended, Some(expected));
    }
    assert_eq!(pool.statistics().made, 1);
    let harmful = [
        ("crash", Ended::Signaled(libc::SIGSEGV)),
        ("abort", Ended::Signaled(libc::SIGABRT)),
        ("overflow", Ended::Signaled(libc::SIGSEGV)),
        ("kill", Ended::Lost),
    ];
    for (index, (command, expected)) in harmful.into_iter().enumerate() {
        let mut client = Client::begin(&mut pool);
        assert_eq!(client.ask(&mut pool, "recall").unwrap(), "");
        assert_eq!(client.ask(&mut pool, command), None);
        assert_eq!(client.ended, Some(expected), "{command}");
        assert_eq!(pool.statistics().lost, index as u64 + 1, "it does not serve again");
    }
}

pub(crate) fn a_session_that_keeps_control_is_killed() {
    let mut pool = pool(Pool::builder().ready(1).step_limit(Duration::from_millis(100)));
    let mut client = Client::begin(&mut pool);
    let mut other = Client::begin(&mut pool);
    assert_eq!(client.ask(&mut pool, "spin"), None);
    assert_eq!(client.ended, Some(Ended::TimedOut));
    assert_eq!(other.ask(&mut pool, "echo still here").unwrap(), "still here");
    // Waiting is not keeping control.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(other.ask(&mut pool, "echo still here").unwrap(), "still here");
}

pub(crate) fn a_session_can_be_ended() {
    let mut pool = pool(Pool::builder().ready(1).spare(1));
    let mut client = Client::begin(&mut pool);
    client.ask(&mut pool, "remember me").unwrap();
    let session = client.session.unwrap();
    pool.end(session).unwrap();
    assert!(matches!(pool.step(session), Err(Error::NoSession { .. })));
    assert!(matches!(pool.end(session), Err(Error::NoSession { .. })));
    let mut client = Client::begin(&mut pool);
    assert!(matches!(pool.step(session), Err(Error::NoSession { .. })), "a name is used once");
    assert_eq!(client.ask(&mut pool, "recall").unwrap(), "");
    assert_eq!(pool.statistics().made, 1);
}

fn kill(pid: &str) {
    let pid = pid.parse().unwrap();
    // SAFETY: takes numbers; the process is one of this case's sessions.
    unsafe {
        assert_eq!(libc::kill(pid, libc::SIGKILL), 0);
    }
    // Until it is a zombie: contexts are the root's children, which the pool reaps. Its first thread may be one before
    // its watcher has ended, whose end is what tells the pool: who is given work meanwhile is lost, and not passed
    // over.
    for _ in 0..2000 {
        let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
        if status.is_empty() || status.contains(") Z ") && threads <= 1 {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{pid} does not die");
}

/// Sessions are killed while they are clean, while they wait, and while they are dirty; and at random moments.
pub(crate) fn killed_sessions_are_replaced() {
    let mut pool = pool(Pool::builder().ready(1).spare(1).most(4));
    for round in 0..6 {
        let mut client = Client::begin(&mut pool);
        let pid = client.ask(&mut pool, "pid").unwrap();
        match round % 3 {
            0 => {
                kill(&pid);
                client.stream.write_all(b"echo 1\n").unwrap();
                let step = pool.step(client.session.unwrap()).unwrap();
                assert_eq!(step, Step::Ended(Ended::Lost));
            }
            1 => {
                client.end(&mut pool);
                kill(&pid);
                tidy_all(&mut pool);
            }
            _ => {
                client.end(&mut pool);
                tidy_all(&mut pool);
                kill(&pid);
            }
        }
        let mut client = Client::begin(&mut pool);
        assert_eq!(client.ask(&mut pool, "echo alive").unwrap(), "alive", "round {round}");
        assert_eq!(client.ask(&mut pool, "recall").unwrap(), "");
        client.end(&mut pool);
    }
    // By another process, whenever it happens to.
    for delay in 0..20 {
        let mut client = Client::begin(&mut pool);
        let pid = client.ask(&mut pool, "pid").unwrap();
        let mut killer = Command::new("sh")
            .args(["-c", &format!("sleep 0.00{}; kill -9 {pid}", delay % 10)])
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while client.ended.is_none() {
            client.ask(&mut pool, "scribble 3");
        }
        assert_eq!(client.ended, Some(Ended::Lost));
        killer.wait().unwrap();
        let mut next = Client::begin(&mut pool);
        assert_eq!(next.ask(&mut pool, "recall").unwrap(), "");
        next.end(&mut pool);
    }
}

pub(crate) fn a_killed_template_ends_growth_only() {
    let mut pool = pool(Pool::builder().ready(1).spare(0));
    let mut client = Client::begin(&mut pool);
    // A session's parent is the root; the template is the root's child that no session is.
    let pid = client.ask(&mut pool, "pid").unwrap();
    let own = std::process::id();
    let children = std::fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap();
    let template = children.split_whitespace().find(|child| *child != pid).unwrap();
    kill(template);
    let (_keep, server) = UnixStream::pair().unwrap();
    assert!(matches!(pool.begin(server.as_fd()), Err(Error::NoTemplate(_))));
    assert!(matches!(pool.begin(server.as_fd()), Err(Error::NoTemplate(_))));
    assert_eq!(client.ask(&mut pool, "echo alive").unwrap(), "alive");
    client.end(&mut pool);
    let mut client = Client::begin(&mut pool);
    assert_eq!(client.ask(&mut pool, "echo alive").unwrap(), "alive");
}

pub(crate) fn a_full_pool_says_so() {
    let mut pool = pool(Pool::builder().ready(1).most(2));
    let first = Client::begin(&mut pool);
    let mut second = Client::begin(&mut pool);
    let (_keep, server) = UnixStream::pair().unwrap();
    assert!(matches!(pool.begin(server.as_fd()), Err(Error::Exhausted { most: 2 })));
    assert_eq!(second.ask(&mut pool, "echo alive").unwrap(), "alive");
    first.end(&mut pool);
    assert!(pool.begin(server.as_fd()).is_ok());
}

pub(crate) fn used_up_descriptors_harm_nobody() {
    let few = rustix::process::Rlimit { current: Some(1024), maximum: Some(1024) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    let mut pool = pool(Pool::builder().ready(1).spare(0));
    let mut first = Client::begin(&mut pool);
    let (_keep, server) = UnixStream::pair().unwrap();
    let mut all: Vec<OwnedFd> = Vec::new();
    while let Ok(more) = server.as_fd().try_clone_to_owned() {
        all.push(more);
    }
    assert!(pool.begin(server.as_fd()).is_err(), "a new context needs descriptors");
    assert_eq!(first.ask(&mut pool, "echo alive").unwrap(), "alive");
    all.clear();
    let (id, step) = pool.begin(server.as_fd()).unwrap();
    assert_eq!(step, Step::Waits(Interest::Readable));
    pool.end(id).unwrap();
    first.end(&mut pool);
    // And in a session.
    drop(pool);
    let settings = Pool::builder().ready(1).spare(0);
    let mut pool = settings
        .build(|connection| {
            let _ = line_of(connection);
            let mut hoard = Vec::new();
            while let Ok(more) = connection.as_fd().try_clone_to_owned() {
                hoard.push(more);
            }
            let _ = connection.write_all(b"all\n");
            let _ = line_of(connection);
            std::mem::forget(hoard);
        })
        .unwrap();
    for _ in 0..3 {
        let mut client = Client::begin(&mut pool);
        assert_eq!(client.ask(&mut pool, "hoard").unwrap(), "all");
        client.stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(pool.step(client.session.unwrap()).unwrap(), Step::Ended(Ended::Returned));
        client.server = None;
        // Its copies of the connection go when it is rolled back.
        tidy_all(&mut pool);
        assert_eq!(client.stream.read(&mut [0]).unwrap(), 0);
    }
    assert_eq!(pool.statistics().made, 1, "what it opened is closed again");
}
