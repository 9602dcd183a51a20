//! Sessions: what one leaves behind, how it ends, and what a pool bears.
//!
//! Contexts belong to a process, and end with it, so each case is a process of its own: this program runs itself once for
//! each case.

#![expect(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, reason = "tests of system calls")]

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use orrery_lwc::context::{Spec, create};
use orrery_lwc::rollback::{Outcome, Rollback};
use orrery_lwc::sessions::{Builder, Connection, Ended, Error, Interest, Pool, SessionId, Step};

orrery_testing::cases![
    seconds = 60, trackers = &[];
    rollback_works_in_a_context,
    rollback_works_in_a_context_of_an_ordinary_user,
    contexts_outlive_rollbacks_of_the_root,
    a_session_serves,
    sessions_work_for_an_ordinary_user,
    each_session_has_its_own_memory,
    what_sessions_have_in_common_is_there_once,
    nothing_is_left_behind,
    sessions_have_no_other_descriptors,
    every_end_is_told,
    a_session_that_keeps_control_is_killed,
    a_session_can_be_ended,
    any_order_of_events_leaves_the_captured_state,
    killed_sessions_are_replaced,
    a_killed_template_ends_growth_only,
    a_full_pool_says_so,
    used_up_descriptors_harm_nobody,
    the_server_serves_more_than_there_are_sessions,
    greeting_sessions_speak_first,
];

/// Becomes an ordinary user.
fn drop_privileges() {
    unsafe {
        assert_eq!(libc::setgroups(0, core::ptr::null()), 0);
        assert_eq!(libc::setresgid(65_534, 65_534, 65_534), 0);
        assert_eq!(libc::setresuid(65_534, 65_534, 65_534), 0);
        // What changing the user took away.
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1), 0);
    }
}

fn is_superuser() -> bool {
    unsafe { libc::geteuid() == 0 }
}

fn rollback_works_in_a_context() {
    rolls_back_in_a_context();
}

fn rollback_works_in_a_context_of_an_ordinary_user() {
    if is_superuser() {
        drop_privileges();
    }
    rolls_back_in_a_context();
}

/// A context that adds its arguments up in a closure that is rolled back gives back each alone, however often control
/// went back and forth meanwhile.
fn rolls_back_in_a_context() {
    let ballast = vec![7_u8; 40 << 20];
    let adder = create(&Spec::new(), move |start| {
        let root = start.creator;
        let sum = Cell::new(start.arrival.word);
        let result = Rollback::builder().build().unwrap().serve(
            |last| {
                assert!(matches!(last, None | Some(Outcome::Returned | Outcome::Exited(3))), "{last:?}");
                ControlFlow::Continue(root.switch(sum.get(), &[]).unwrap().word)
            },
            |word| {
                sum.set(sum.get() + word);
                let mut memory = ballast.clone();
                memory[0] = 1;
                std::thread::spawn(|| std::thread::sleep(std::time::Duration::from_secs(1000)));
                let file = std::fs::File::open("/dev/null").unwrap();
                core::mem::forget(file);
                for round in 0..5 {
                    sum.set(sum.get() + root.switch(sum.get() + round, &[]).unwrap().word);
                }
                if word % 2 == 0 {
                    std::process::exit(3);
                }
            },
        );
        panic!("{result:?}")
    })
    .unwrap();
    assert_eq!(adder.switch(100, &[]).unwrap().word, 100);
    for round in 1..20 {
        for step in 0..5 {
            assert_eq!(adder.switch(round, &[]).unwrap().word, 100 + round * (1 + step) + step);
        }
        assert_eq!(adder.switch(round, &[]).unwrap().word, 100);
    }
    adder.close().unwrap();
}

/// Rolled back, the root finds its contexts as they are now, and those that were made meanwhile gone.
fn contexts_outlive_rollbacks_of_the_root() {
    let count = create(&Spec::new(), |start| {
        let mut arrival = start.arrival;
        let mut calls = 0;
        loop {
            calls += 1;
            arrival = arrival.caller.switch(calls, &[]).unwrap();
        }
    })
    .unwrap();
    let mut rollback = Rollback::builder().build().unwrap();
    let mut expected = 0;
    for round in 0..5 {
        let made = Cell::new(0);
        let outcome = rollback
            .run(|| {
                for call in 1..=3 {
                    assert_eq!(count.switch(0, &[]).unwrap().word, expected + call);
                }
                let other = create(&Spec::new(), |start| {
                    let mut arrival = start.arrival;
                    loop {
                        arrival = arrival.caller.switch(arrival.word + 1, &[]).unwrap();
                    }
                })
                .unwrap();
                made.set(other.descriptor());
                assert_eq!(other.switch(41, &[]).unwrap().word, 42);
                if round == 3 {
                    count.close().unwrap();
                }
            })
            .unwrap();
        assert_eq!(outcome, Outcome::Returned);
        assert_eq!(made.get(), 0, "memory is put back");
        expected += 3;
        expected += 1;
        assert_eq!(count.switch(0, &[]).unwrap().word, expected);
    }
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) }, -1, "no plain child is left");
}

/// What sessions of these tests do with a line each.
fn obey(connection: &mut Connection) {
    while let Some(line) = line_of(connection) {
        let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = command_of(command, argument, connection);
        if connection.write_all(format!("{answer}\n").as_bytes()).is_err() {
            return;
        }
    }
}

fn line_of(connection: &mut Connection) -> Option<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    loop {
        match connection.read(&mut byte) {
            Ok(1) if byte[0] == b'\n' => return Some(String::from_utf8(line).unwrap()),
            Ok(1) => line.push(byte[0]),
            _ => return None,
        }
    }
}

thread_local! {
    static WORDS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

static mut FIELD: [u8; 64 * 4096] = [0; 64 * 4096];

fn field() -> &'static mut [u8; 64 * 4096] {
    let field = &raw mut FIELD;
    unsafe { &mut *field }
}

fn command_of(command: &str, argument: &str, connection: &Connection) -> String {
    match command {
        "echo" => argument.to_owned(),
        "remember" => {
            WORDS.with_borrow_mut(|words| words.push(argument.to_owned()));
            "ok".to_owned()
        }
        "recall" => WORDS.with_borrow(|words| words.join(" ")),
        "pid" => std::process::id().to_string(),
        "fds" => {
            let own = connection.as_raw_fd();
            let files = std::fs::read_dir("/proc/self/fd")
                .unwrap()
                .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
            files.map(|path| path.to_string_lossy().into_owned()).collect::<Vec<_>>().join(",")
                + &format!(" own={own}")
        }
        "exit" => std::process::exit(argument.parse().unwrap()),
        "panic" => panic!("as ordered"),
        "crash" => {
            unsafe { core::ptr::with_exposed_provenance_mut::<u8>(16).write_volatile(1) };
            "alive".to_owned()
        }
        "abort" => std::process::abort(),
        "overflow" => overflow(argument.len()).to_string(),
        "spin" => loop {
            core::hint::spin_loop();
        },
        "kill" => unsafe {
            libc::kill(libc::getpid(), libc::SIGKILL);
            "immortal".to_owned()
        },
        "scribble" => {
            scribble(argument.parse().unwrap());
            "ok".to_owned()
        }
        "state" => state().to_string(),
        "fill" => {
            fill(argument);
            "ok".to_owned()
        }
        "search" => search(argument),
        "close" => unsafe { libc::close(argument.parse().unwrap()).to_string() },
        other => format!("no command {other}"),
    }
}

#[expect(unconditional_recursion, reason = "that is the point")]
fn overflow(depth: usize) -> usize {
    let room = core::hint::black_box([depth; 512]);
    overflow(room[17] + 1) + room[3]
}

/// A client's end of a session.
struct Client {
    stream: UnixStream,
    server: Option<UnixStream>,
    session: Option<SessionId>,
    ended: Option<Ended>,
}

impl Client {
    fn begin(pool: &mut Pool) -> Self {
        let (stream, server) = UnixStream::pair().unwrap();
        let (session, step) = pool.begin(server.as_fd()).unwrap();
        let mut client = Self { stream, server: Some(server), session: Some(session), ended: None };
        client.note(step);
        client
    }

    fn note(&mut self, step: Step) {
        match step {
            Step::Waits(interest) => assert_eq!(interest, Interest::Readable),
            Step::Ended(ended) => {
                self.ended = Some(ended);
                self.session = None;
                self.server = None;
            }
        }
    }

    /// Sends a command, lets the session go on, and gives the answer; none where it ended instead.
    fn ask(&mut self, pool: &mut Pool, command: &str) -> Option<String> {
        self.stream.write_all(format!("{command}\n").as_bytes()).unwrap();
        let step = pool.step(self.session.unwrap()).unwrap();
        self.note(step);
        if self.ended.is_some() {
            return None;
        }
        let mut answer = Vec::new();
        let mut part = [0; 4096];
        while answer.last() != Some(&b'\n') {
            let length = self.stream.read(&mut part).unwrap();
            assert!(length > 0, "{command} brings an answer");
            answer.extend_from_slice(&part[..length]);
        }
        answer.pop();
        Some(String::from_utf8(answer).unwrap())
    }

    /// Ends the session in good order.
    fn end(mut self, pool: &mut Pool) {
        self.stream.shutdown(std::net::Shutdown::Write).unwrap();
        let step = pool.step(self.session.unwrap()).unwrap();
        assert_eq!(step, Step::Ended(Ended::Returned));
        self.server = None;
        let mut rest = Vec::new();
        assert_eq!(self.stream.read_to_end(&mut rest).unwrap(), 0, "the session has closed its descriptor");
    }
}

fn pool(settings: Builder) -> Pool {
    settings.build(obey).unwrap()
}

fn tidy_all(pool: &mut Pool) {
    while pool.tidy().unwrap() {}
}

fn a_session_serves() {
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

fn sessions_work_for_an_ordinary_user() {
    if is_superuser() {
        drop_privileges();
    }
    let ballast = vec![7_u8; 48 << 20];
    a_session_serves();
    nothing_is_left_behind();
    core::hint::black_box(&ballast);
}

fn each_session_has_its_own_memory() {
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
fn what_sessions_have_in_common_is_there_once() {
    let ballast: Vec<u8> = (0..64_usize << 20).map(|at| (at / 4096).to_le_bytes()[at % 2]).collect();
    // Memory that a fork does not copy, as contexts have, must be told apart, and no more.
    let wiped = unsafe {
        let page = libc::mmap(core::ptr::null_mut(), 8192, 3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
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
    core::hint::black_box((&ballast, wiped));
}

/// A secret that is nowhere in the program's text, nor in what is sent: in halves, the second one back to front.
const FIRST: &str = "hidden-0d1f";
const SECOND: &str = "25c79ea3-";

fn secret(argument: &str) -> Vec<u8> {
    let (first, second) = argument.split_once(' ').unwrap();
    first.bytes().chain(second.bytes().rev()).collect()
}

/// Puts the secret wherever a session can.
fn fill(argument: &str) {
    let secret = secret(argument);
    for page in field().chunks_mut(4096) {
        page[100..100 + secret.len()].copy_from_slice(&secret);
    }
    let mut heap: Vec<Vec<u8>> = (0..2000).map(|size| secret.repeat(1 + size % 90)).collect();
    heap.truncate(1000);
    core::mem::forget(heap);
    deep(&secret, 200);
    unsafe {
        let new = libc::mmap(
            core::ptr::null_mut(),
            1 << 20,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        core::ptr::copy_nonoverlapping(secret.as_ptr(), new.cast::<u8>().add(5000), secret.len());
        let name = std::ffi::CString::new(secret.clone()).unwrap();
        libc::setenv(name.as_ptr(), name.as_ptr(), 1);
        let file = libc::memfd_create(name.as_ptr(), 0);
        assert_eq!(libc::write(file, secret.as_ptr().cast(), secret.len()), secret.len().cast_signed());
    }
    let text = String::from_utf8(secret).unwrap();
    WORDS.with_borrow_mut(|words| words.push(text.clone()));
    std::thread::spawn(move || deep(text.as_bytes(), 20)).join().unwrap();
}

fn deep(secret: &[u8], depth: usize) {
    let mut frame = [0_u8; 1000];
    frame[300..300 + secret.len()].copy_from_slice(secret);
    core::hint::black_box(&mut frame);
    if depth > 0 {
        deep(secret, depth - 1);
    }
    core::hint::black_box(&frame);
}

/// How often the secret is in readable memory, where, and how much was looked at.
fn search(argument: &str) -> String {
    let (first, second) = argument.split_once(' ').unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut found = Vec::new();
    let mut looked = 0;
    for line in maps.lines() {
        let mut fields = line.split_whitespace();
        let (range, protection) = (fields.next().unwrap(), fields.next().unwrap());
        if !protection.starts_with('r') || line.ends_with("[vvar]") || line.ends_with("[vvar_vclock]") {
            continue;
        }
        let (start, end) = range.split_once('-').unwrap();
        let (start, end) =
            (usize::from_str_radix(start, 16).unwrap(), usize::from_str_radix(end, 16).unwrap());
        // By the kernel's hand: parts of the engine's arena are files that end before their mapping.
        for page in (start..end).step_by(4096) {
            let mut copy = [0_u8; 4096 + 64];
            let length = read_own(page, &mut copy[..(end - page).min(4096 + 64)]);
            looked += usize::from(length > 0);
            let mut from = 0;
            while let Some(at) = copy[from..length].windows(first.len()).position(|w| w == first.as_bytes()) {
                let behind = from + at + first.len();
                let follows =
                    second.bytes().rev().eq(copy[behind..length].iter().copied().take(second.len()));
                if follows && from + at < 4096 {
                    found.push(format!("{:x}", page + from + at));
                }
                from = behind;
            }
        }
    }
    format!(
        "{} pages={looked} at={}",
        found.len(),
        found.iter().take(8).cloned().collect::<Vec<_>>().join(",")
    )
}

/// Reads the calling process' memory without faulting.
fn read_own(address: usize, buffer: &mut [u8]) -> usize {
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let remote =
        libc::iovec { iov_base: core::ptr::with_exposed_provenance_mut(address), iov_len: buffer.len() };
    let read =
        unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(read).unwrap_or(0)
}

fn nothing_is_left_behind() {
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

fn sessions_have_no_other_descriptors() {
    let kept = std::fs::File::open("/dev/full").unwrap();
    let _not = std::fs::File::open("/dev/zero").unwrap();
    let mut pool = pool(Pool::builder().ready(2).keep_descriptor(kept.as_raw_fd()));
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

fn every_end_is_told() {
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

fn a_session_that_keeps_control_is_killed() {
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

fn a_session_can_be_ended() {
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

/// A generator of numbers, for writes that both sides can work out.
fn numbers(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    }
}

/// Writes at random places, of memory and of what belongs to the process beside it.
fn scribble(seed: u64) {
    let mut next = numbers(seed | 1);
    for _ in 0..next() % 200 {
        let at = usize::try_from(next()).unwrap() % field().len();
        field()[at] = next().to_le_bytes()[0];
    }
    unsafe {
        match next() % 6 {
            0 => {
                let new = libc::mmap(
                    core::ptr::null_mut(),
                    4096 * (1 + usize::try_from(next() % 50).unwrap()),
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                );
                new.cast::<u8>().write(1);
            }
            1 => {
                libc::dup2(1, 200 + i32::try_from(next() % 50).unwrap());
            }
            2 => {
                libc::signal(libc::SIGUSR1, libc::SIG_IGN);
                libc::umask(u32::try_from(next() % 0o777).unwrap());
            }
            3 => {
                assert_eq!(libc::chdir(c"/proc".as_ptr()), 0);
            }
            4 => {
                // The field itself, in part: gone, and another one in its place.
                let at = field().as_mut_ptr().addr().next_multiple_of(4096) + 4096 * 8;
                libc::madvise(core::ptr::with_exposed_provenance_mut(at), 4096 * 3, libc::MADV_DONTNEED);
            }
            _ => {
                WORDS.with_borrow_mut(|words| {
                    words.push("x".repeat(usize::try_from(next() % 10_000).unwrap()))
                });
            }
        }
    }
}

/// What a session can see of itself, as a number.
fn state() -> u64 {
    let mut sum = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |byte: u8| sum = (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    field().iter().copied().for_each(&mut add);
    WORDS.with_borrow(|words| words.concat().bytes().for_each(&mut add));
    let directory = std::env::current_dir().unwrap();
    directory.to_string_lossy().bytes().for_each(&mut add);
    unsafe {
        for fd in 0..300 {
            add(u8::from(libc::fcntl(fd, libc::F_GETFD) >= 0));
        }
        let mut action: libc::sigaction = core::mem::zeroed();
        libc::sigaction(libc::SIGUSR1, core::ptr::null(), &raw mut action);
        add(u8::from(action.sa_sigaction == libc::SIG_IGN));
        let mask = libc::umask(0);
        libc::umask(mask);
        mask.to_le_bytes().into_iter().for_each(&mut add);
    }
    // New mappings show in their number; those of the allocator come and go within the heap.
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').next().unwrap().bytes().for_each(&mut add);
    sum
}

/// Sessions begin, write, end, are ended, exit, and are cleaned in random order. The state of each is a function of its
/// own writes, and none at its beginning.
fn any_order_of_events_leaves_the_captured_state() {
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

fn kill(pid: &str) {
    let pid = pid.parse().unwrap();
    unsafe {
        assert_eq!(libc::kill(pid, libc::SIGKILL), 0);
    }
    // Until it is a zombie: contexts are the root's children, which the pool reaps.
    for _ in 0..2000 {
        let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        if status.is_empty() || status.contains(") Z ") {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{pid} does not die");
}

/// Sessions are killed while they are clean, while they wait, and while they are dirty; and at random moments.
fn killed_sessions_are_replaced() {
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

fn a_killed_template_ends_growth_only() {
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

fn a_full_pool_says_so() {
    let mut pool = pool(Pool::builder().ready(1).most(2));
    let first = Client::begin(&mut pool);
    let mut second = Client::begin(&mut pool);
    let (_keep, server) = UnixStream::pair().unwrap();
    assert!(matches!(pool.begin(server.as_fd()), Err(Error::Exhausted { most: 2 })));
    assert_eq!(second.ask(&mut pool, "echo alive").unwrap(), "alive");
    first.end(&mut pool);
    assert!(pool.begin(server.as_fd()).is_ok());
}

fn used_up_descriptors_harm_nobody() {
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
            core::mem::forget(hoard);
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

/// A server in a process of its own, on a port of the kernel's choice.
struct Server {
    pid: i32,
    port: u16,
}

impl Server {
    fn start(settings: Builder, serve: impl Fn(&mut Connection)) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        match unsafe { libc::fork() } {
            0 => {
                let mut pool = settings.build(serve).unwrap();
                let result = pool.serve(listener.as_fd(), None);
                println!("the server ended: {result:?}");
                std::process::exit(1);
            }
            pid => Self { pid, port },
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, core::ptr::null_mut(), 0);
        }
    }
}

fn answer(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let mut byte = [0];
    while byte[0] != b'\n' {
        assert_eq!(
            stream.read(&mut byte).unwrap(),
            1,
            "an answer after {:?}",
            String::from_utf8_lossy(&text)
        );
        text.push(byte[0]);
    }
    text.pop();
    String::from_utf8(text).unwrap()
}

fn the_server_serves_more_than_there_are_sessions() {
    let server = Server::start(Pool::builder().ready(2).most(4), obey);
    // Some that say nothing do not take a session.
    let _silent: Vec<TcpStream> = (0..10).map(|_| server.connect()).collect();
    for round in 0..4 {
        let mut streams: Vec<TcpStream> = (0..30).map(|_| server.connect()).collect();
        // Four get sessions, the others wait until one of those has ended.
        for (number, stream) in streams.iter_mut().enumerate() {
            stream.write_all(format!("remember {round}.{number}\nrecall\n").as_bytes()).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
        }
        for (number, stream) in streams.iter_mut().enumerate() {
            assert_eq!(answer(stream), "ok");
            assert_eq!(answer(stream), format!("{round}.{number}"));
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        }
        let mut crash = server.connect();
        crash.write_all(b"crash\n").unwrap();
        let ended = crash.read(&mut [0]);
        assert!(!matches!(ended, Ok(1..)), "{ended:?}");
    }
}

fn greeting_sessions_speak_first() {
    let server = Server::start(Pool::builder().ready(1).greets(true), |connection| {
        connection.write_all(b"hello\n").unwrap();
        // More than the socket takes at once.
        let _ = line_of(connection);
        connection.write_all(&[b'x'; 6 << 20]).unwrap();
        connection.write_all(b"\n").unwrap();
    });
    let mut streams: Vec<TcpStream> = (0..3).map(|_| server.connect()).collect();
    for stream in &mut streams {
        assert_eq!(answer(stream), "hello");
        stream.write_all(b"go\n").unwrap();
    }
    for stream in &mut streams {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), (6 << 20) + 1);
    }
}
