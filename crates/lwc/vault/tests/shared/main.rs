//! Vaults that processes share, with death on either side at any time.
//!
//! One test at a time, on the main thread: vaults are forked off programs with one thread.

#![expect(clippy::unwrap_used, reason = "tests")]

mod faults;
mod hostile;
mod siblings;

use std::io::Read;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use orrery_vault::VaultService;
use orrery_vault::shared::{Errno, Error, LOAD_ROOM, ROOM, SharedVault};

/// Answers a request with what was loaded, or does what its first byte says.
#[derive(Default)]
struct Parrot {
    loaded: Vec<u8>,
}

impl VaultService for Parrot {
    fn load(&mut self, request: &[u8], answer: &mut [u8]) -> Result<usize, Errno> {
        match request {
            b"die" => std::process::abort(),
            b"pid" => return Ok(tell(answer, &std::process::id().to_string())),
            b"refuse" => return Err(Errno::NOKEY),
            _ => {}
        }
        if let Some(what) = request.strip_prefix(b"try ") {
            return attempt(what);
        }
        if let Some(path) = request.strip_prefix(b"file ") {
            let path = std::str::from_utf8(path).map_err(|_| Errno::INVAL)?;
            return std::fs::read_to_string(path).map(|text| tell(answer, &text)).map_err(errno_of);
        }
        self.loaded.extend_from_slice(request);
        answer[..request.len()].copy_from_slice(request);
        Ok(request.len())
    }

    fn serve(&mut self, request: &[u8], answer: &mut [u8]) -> Result<usize, Errno> {
        match request {
            b"die" => std::process::abort(),
            b"pid" => return Ok(tell(answer, &std::process::id().to_string())),
            b"address" => return Ok(tell(answer, &self.loaded.as_ptr().addr().to_string())),
            b"refuse" => return Err(Errno::NOKEY),
            b"echo" => return Ok(answer.len()),
            b"file" => return std::fs::File::open("/dev/null").map(|_| 0).map_err(errno_of),
            b"socket" => return std::net::TcpListener::bind("127.0.0.1:0").map(|_| 0).map_err(errno_of),
            b"program" => return std::process::Command::new("true").spawn().map(|_| 0).map_err(errno_of),
            b"copy" => return copy_by_the_newest_call(),
            b"signal" => return signal_itself(),
            _ => {}
        }
        let length = self.loaded.len() + request.len();
        let answer = answer.get_mut(..length).ok_or(Errno::MSGSIZE)?;
        answer[..self.loaded.len()].copy_from_slice(&self.loaded);
        answer[self.loaded.len()..].copy_from_slice(request);
        Ok(length)
    }
}

/// Tries what only an attacker would do in a keeper.
fn attempt(what: &[u8]) -> Result<usize, Errno> {
    let (open, spawn) = (std::fs::OpenOptions::new, |name| std::process::Command::new(name).spawn());
    let done = match what {
        b"write" => open().write(true).open("/dev/null").map(drop),
        b"create" => open().append(true).create(true).open("/dev/null").map(drop),
        b"socket" => std::net::TcpListener::bind("127.0.0.1:0").map(drop),
        b"program" => spawn("true").map(drop),
        b"copy" => return copy_by_the_newest_call(),
        b"signal" => return signal_itself(),
        // SAFETY: asks to be traced by its parent, which a refusal prevents.
        b"trace" => match unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) } {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        },
        _ => return Err(Errno::INVAL),
    };
    done.map(|()| 0).map_err(errno_of)
}

/// A fork by clone3(2), which knows more than the older calls; the copy ends at once.
fn copy_by_the_newest_call() -> Result<usize, Errno> {
    // `struct clone_args` in its first size: the fifth word is the signal at the copy's end.
    let mut arguments = [0_u64; 8];
    arguments[4] = u64::from(libc::SIGCHLD.cast_unsigned());
    // SAFETY: a fork, whose copy makes one system call; the kernel reads as many bytes as it is told there are.
    match unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of_val(&arguments)) } {
        // SAFETY: the call takes a number and ends the copy, so that nothing of the original's runs in it.
        0 => unsafe { libc::_exit(0) },
        -1 => Err(errno_of(std::io::Error::last_os_error())),
        _ => Ok(0),
    }
}

/// Looks whether it could send itself a signal by its thread's number.
fn signal_itself() -> Result<usize, Errno> {
    let (process, thread) = (std::process::id(), rustix::thread::gettid().as_raw_pid());
    // SAFETY: takes numbers only; signal 0 is none.
    match unsafe { libc::syscall(libc::SYS_tgkill, process, thread, 0) } {
        -1 => Err(errno_of(std::io::Error::last_os_error())),
        _ => Ok(0),
    }
}

fn errno_of(error: std::io::Error) -> Errno {
    Errno::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO))
}

fn tell(answer: &mut [u8], text: &str) -> usize {
    answer[..text.len()].copy_from_slice(text.as_bytes());
    text.len()
}

fn vault() -> SharedVault {
    worker_user();
    SharedVault::fork(Parrot::default()).unwrap()
}

/// The ordinary user of a case: the same in all its processes from the first call on, and no other case's, as the kernel
/// bounds what all processes of a user have under way.
fn worker_user() -> u32 {
    static WORKER: OnceLock<u32> = OnceLock::new();
    *WORKER.get_or_init(|| 100_000 + std::process::id())
}

fn call(vault: &SharedVault, request: &[u8]) -> Result<Vec<u8>, Error> {
    let mut answer = vec![0; ROOM];
    vault.call(request, &mut answer).map(|length| answer[..length].to_vec())
}

fn number(text: Vec<u8>) -> i32 {
    String::from_utf8(text).unwrap().parse().unwrap()
}

fn kill(pid: i32) {
    // SAFETY: a process of our own vault.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
}

fn is_alive(pid: i32) -> bool {
    // A zombie that nobody has reaped yet is dead, too.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn await_death(pid: i32) {
    let begin = Instant::now();
    while is_alive(pid) {
        assert!(begin.elapsed() < Duration::from_secs(20), "{pid} lives on");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Runs `work` in a forked child; true where it returned true.
fn in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the process has one thread, so the child finds no lock held by another one.
    match unsafe { libc::fork() } {
        0 => {
            let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(false);
            // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in it.
            unsafe { libc::_exit(i32::from(!good)) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            status == 0
        }
    }
}

fn calls_and_loads() {
    let vault = vault();
    assert_eq!(call(&vault, b"x").unwrap(), b"x");
    assert_eq!(vault.load(b"one").unwrap(), b"one");
    assert_eq!(call(&vault, b"x").unwrap(), b"onex", "a call after loading meets a twin that has it");
    assert_eq!(vault.load(b"two").unwrap(), b"two");
    let pid = number(call(&vault, b"pid").unwrap());
    for round in 0..2000_u32 {
        let mut expected = b"onetwo".to_vec();
        expected.extend(round.to_le_bytes());
        assert_eq!(call(&vault, &round.to_le_bytes()).unwrap(), expected);
    }
    assert_eq!(number(call(&vault, b"pid").unwrap()), pid, "one twin for all calls");
}

fn errors_come_back() {
    let vault = vault();
    assert_eq!(call(&vault, b"refuse"), Err(Error::Errno(Errno::NOKEY)));
    assert_eq!(vault.load(b"refuse"), Err(Error::Errno(Errno::NOKEY)));
    assert_eq!(vault.load(&[0; LOAD_ROOM + 1]), Err(Error::Errno(Errno::MSGSIZE)));
    assert_eq!(call(&vault, &vec![0; ROOM + 1]), Err(Error::Errno(Errno::MSGSIZE)));
    assert_eq!(vault.call(b"long", &mut [0; 3]), Err(Error::Errno(Errno::MSGSIZE)));
    let long = vec![7; ROOM];
    assert_eq!(call(&vault, &long).unwrap(), long);
    assert_eq!(call(&vault, b"echo").unwrap().len(), ROOM);
    vault.load(&[1; LOAD_ROOM]).unwrap();
    assert_eq!(
        call(&vault, &long),
        Err(Error::Errno(Errno::MSGSIZE)),
        "the answer would be longer than the room"
    );
}

fn forked_processes_have_twins() {
    let vault = vault();
    vault.load(b"key").unwrap();
    let ours = number(call(&vault, b"pid").unwrap());
    assert!(in_child(|| {
        let theirs = number(call(&vault, b"pid").unwrap());
        theirs != ours
            && call(&vault, b"1").unwrap() == b"key1"
            && in_child(|| {
                number(call(&vault, b"pid").unwrap()) != theirs && call(&vault, b"2").unwrap() == b"key2"
            })
    }));
    assert_eq!(number(call(&vault, b"pid").unwrap()), ours);
    assert!(is_alive(ours));
}

fn threads_call_at_once() {
    let vault = vault();
    vault.load(b"key").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8_u8 {
            let vault = &vault;
            scope.spawn(move || {
                for round in 0..300_u16 {
                    let request = [&[thread][..], &round.to_le_bytes()].concat();
                    assert_eq!(call(vault, &request).unwrap(), [b"key", &request[..]].concat());
                }
            });
        }
    });
}

fn threads_forbid_a_fork() {
    let (say, hear) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || hear.recv());
    let made = SharedVault::fork(Parrot::default());
    assert!(matches!(made, Err(Error::NotAlone { threads }) if threads > 1), "{made:?}");
    drop(say);
    thread.join().unwrap().unwrap_err();
}

fn a_dead_twin_is_replaced() {
    let vault = vault();
    vault.load(b"key").unwrap();
    for _ in 0..5 {
        let twin = number(call(&vault, b"pid").unwrap());
        kill(twin);
        assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
        assert_ne!(number(call(&vault, b"pid").unwrap()), twin);
    }
    assert_eq!(call(&vault, b"die"), Err(Error::Gone), "what kills two twins is an error");
    assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
}

fn a_dead_keeper_is_replaced() {
    let vault = vault();
    vault.load(b"key").unwrap();
    let mut twin = number(call(&vault, b"pid").unwrap());
    for _ in 0..5 {
        let keeper = number(vault.load(b"pid").unwrap());
        kill(keeper);
        assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
        // Requests wait in the socket until the spare is the keeper.
        let next = number(vault.load(b"pid").unwrap());
        assert_ne!(next, keeper);
        assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
        assert!(in_child(|| call(&vault, b"y").unwrap() == b"keyy"));
        kill(number(call(&vault, b"pid").unwrap()));
        assert_eq!(call(&vault, b"x").unwrap(), b"keyx", "the new keeper makes twins");
        twin = number(call(&vault, b"pid").unwrap());
    }
    assert!(is_alive(twin));
    assert_eq!(vault.load(b"die"), Err(Error::Gone), "the request that it died of");
    assert_eq!(vault.load(b"2").unwrap(), b"2");
    assert_eq!(call(&vault, b"x").unwrap(), b"key2x");
}

fn the_end_of_the_program_ends_all() {
    let (mut hear, say) = std::io::pipe().unwrap();
    let killed = !in_child(move || {
        let vault = vault();
        let mut all = vec![number(vault.load(b"pid").unwrap()), number(call(&vault, b"pid").unwrap())];
        // The spare and the twin are the keeper's children.
        let children = format!("/proc/{0}/task/{0}/children", all[0]);
        let children = std::fs::read_to_string(children).unwrap();
        all.extend(children.split(' ').filter_map(|pid| pid.parse::<i32>().ok()));
        assert!(all.len() == 4 && all.iter().all(|pid| is_alive(*pid)));
        let text: Vec<String> = all.iter().map(ToString::to_string).collect();
        std::io::Write::write_all(&mut &say, text.join(" ").as_bytes()).unwrap();
        kill(i32::try_from(std::process::id()).unwrap());
        true
    });
    assert!(killed);
    let mut text = String::new();
    hear.read_to_string(&mut text).unwrap();
    let all: Vec<i32> = text.split(' ').map(|pid| pid.parse().unwrap()).collect();
    assert_eq!(all.len(), 4);
    all.into_iter().for_each(await_death);
}

fn a_closed_vault_ends() {
    let vault = vault();
    let (keeper, twin) = (number(vault.load(b"pid").unwrap()), number(call(&vault, b"pid").unwrap()));
    drop(vault);
    await_death(keeper);
    await_death(twin);
}

fn signals_of_the_terminal_do_not_reach_it() {
    let vault = vault();
    vault.load(b"key").unwrap();
    let keeper = number(vault.load(b"pid").unwrap());
    let twin = number(call(&vault, b"pid").unwrap());
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGQUIT, libc::SIGUSR1, libc::SIGCHLD] {
        for pid in [keeper, twin] {
            // SAFETY: the call takes numbers only, and signals processes of the case's own vault.
            assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
        }
    }
    assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
    assert_eq!(number(call(&vault, b"pid").unwrap()), twin);
    assert_eq!(number(vault.load(b"pid").unwrap()), keeper);
}

/// Becomes the ordinary user `id`.
fn become_user(id: u32) {
    // SAFETY: changes the user of this process, which has one thread.
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setresgid(id, id, id), 0);
        assert_eq!(libc::setresuid(id, id, id), 0);
    }
}

fn other_users_may_call_but_not_load() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("not root");
        return;
    }
    let vault = vault();
    vault.load(b"key").unwrap();
    assert!(in_child(|| {
        become_user(worker_user());
        call(&vault, b"x").unwrap() == b"keyx" && vault.load(b"more") == Err(Error::Errno(Errno::PERM))
    }));
    assert!(in_child(|| {
        become_user(worker_user() - 1);
        call(&vault, b"x") == Err(Error::Errno(Errno::PERM))
    }));
    assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
}

fn nobody_reads_it() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("not root");
        return;
    }
    let vault = vault();
    vault.load(b"the secret").unwrap();
    let keeper = number(vault.load(b"pid").unwrap());
    // Of the same ordinary user, and of root's with the caller an ordinary one.
    assert!(in_child(|| {
        become_user(worker_user());
        let twin = number(call(&vault, b"pid").unwrap());
        let address = number_of_address(&call(&vault, b"address").unwrap());
        [keeper, twin].into_iter().all(|pid| is_closed(pid, address))
    }));
    assert!(in_child(|| {
        become_user(worker_user());
        let vault = SharedVault::fork(Parrot::default()).unwrap();
        vault.load(b"the secret").unwrap();
        let twin = number(call(&vault, b"pid").unwrap());
        let address = number_of_address(&call(&vault, b"address").unwrap());
        is_closed(twin, address)
    }));
}

fn twins_reach_nothing_else() {
    let vault = vault();
    vault.load(b"key").unwrap();
    // Neither needs rights that it has given up: the file is open to all.
    for request in [&b"file"[..], b"socket", b"program", b"copy", b"signal"] {
        assert_eq!(
            call(&vault, request),
            Err(Error::Errno(Errno::PERM)),
            "{}",
            String::from_utf8_lossy(request)
        );
    }
    let twin = number(call(&vault, b"pid").unwrap());
    let status = std::fs::read_to_string(format!("/proc/{twin}/status")).unwrap();
    for line in ["CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(line), "{line}: {status}");
    }
    assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
}

fn number_of_address(text: &[u8]) -> usize {
    std::str::from_utf8(text).unwrap().parse().unwrap()
}

/// Tries all ways into another process.
fn is_closed(pid: i32, address: usize) -> bool {
    let mut byte = 0_u8;
    let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: 1 };
    // SAFETY: reads one byte into a byte, if it may.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) } == -1;
    // SAFETY: it would stop the other process, which the test then notices.
    let trace = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) } == -1;
    // SAFETY: the request takes numbers; it would stop the other process, which the test then notices.
    let attach = unsafe { libc::ptrace(libc::PTRACE_ATTACH, pid, 0, 0) } == -1;
    let files = ["mem", "maps", "environ", "auxv", "fd/0", "map_files", "pagemap", "stack", "syscall"];
    let files = files.iter().all(|file| {
        let path = format!("/proc/{pid}/{file}");
        std::fs::File::open(&path).is_err()
    });
    let number = rustix::process::Pid::from_raw(pid).unwrap();
    let pidfd = rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty()).unwrap();
    let stolen = (0..8).all(|fd| {
        rustix::process::pidfd_getfd(&pidfd, fd, rustix::process::PidfdGetfdFlags::empty()).is_err()
    });
    read && trace && attach && files && stolen
}

fn calls_survive_killing_at_any_moment() {
    let vault = vault();
    vault.load(b"key").unwrap();
    let end = Instant::now() + Duration::from_millis(1500);
    std::thread::scope(|scope| {
        let vault = &vault;
        scope.spawn(move || {
            let mut spread = 1_u64;
            while Instant::now() < end {
                spread = spread.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                std::thread::sleep(Duration::from_micros(spread >> 53));
                if let Ok(keeper) = vault.load(b"pid") {
                    kill(number(keeper));
                }
                std::thread::sleep(Duration::from_millis(120));
            }
        });
        let mut good = 0;
        while Instant::now() < end {
            match call(vault, b"x") {
                Ok(answer) => {
                    assert_eq!(answer, b"keyx");
                    good += 1;
                }
                // One keeper after the other died in the midst of making a twin.
                Err(error) => assert_eq!(error, Error::Gone),
            }
        }
        assert!(good > 0);
    });
    assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
}

fn programs_that_are_no_vaults_are_noticed() {
    let missing = SharedVault::exec(c"/nowhere/vault", &[c"vault"]);
    assert!(matches!(missing, Err(Error::Start { errno: Errno::NOENT, .. })), "{missing:?}");
    assert!(missing.unwrap_err().to_string().contains("/nowhere/vault"));
    assert_eq!(SharedVault::exec(c"/bin/true", &[c"true"]).unwrap_err(), Error::Gone);
    // A path is relative to the caller's directory, although the vault's is the root.
    assert!(in_child(|| {
        std::env::set_current_dir("/bin").unwrap();
        SharedVault::exec(c"./true", &[c"true"]).unwrap_err() == Error::Gone
    }));
}

fn main() {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let tests: [(&str, fn()); 34] = [
        ("calls_and_loads", calls_and_loads),
        ("errors_come_back", errors_come_back),
        ("forked_processes_have_twins", forked_processes_have_twins),
        ("threads_call_at_once", threads_call_at_once),
        ("threads_forbid_a_fork", threads_forbid_a_fork),
        ("a_dead_twin_is_replaced", a_dead_twin_is_replaced),
        ("a_dead_keeper_is_replaced", a_dead_keeper_is_replaced),
        ("the_end_of_the_program_ends_all", the_end_of_the_program_ends_all),
        ("a_closed_vault_ends", a_closed_vault_ends),
        ("signals_of_the_terminal_do_not_reach_it", signals_of_the_terminal_do_not_reach_it),
        ("other_users_may_call_but_not_load", other_users_may_call_but_not_load),
        ("nobody_reads_it", nobody_reads_it),
        ("twins_reach_nothing_else", twins_reach_nothing_else),
        ("calls_survive_killing_at_any_moment", calls_survive_killing_at_any_moment),
        ("programs_that_are_no_vaults_are_noticed", programs_that_are_no_vaults_are_noticed),
        ("keepers_survive_each_failing_call", faults::keepers_survive_each_failing_call),
        ("a_spare_waits_for_a_descriptor", faults::a_spare_waits_for_a_descriptor),
        ("no_datagram_ends_the_keeper", hostile::no_datagram_ends_the_keeper),
        ("no_answer_socket_keeps_a_vault_alive", hostile::no_answer_socket_keeps_a_vault_alive),
        (
            "a_descriptor_that_does_not_close_stops_nobody",
            hostile::a_descriptor_that_does_not_close_stops_nobody,
        ),
        ("keepers_are_confined", hostile::keepers_are_confined),
        ("files_of_others_are_loaded_by_root", hostile::files_of_others_are_loaded_by_root),
        ("memory_is_locked_or_that_it_is_not_is_known", hostile::memory_is_locked_or_that_it_is_not_is_known),
        (
            "an_ordinary_users_memory_that_is_not_locked_is_known",
            hostile::an_ordinary_users_memory_that_is_not_locked_is_known,
        ),
        ("a_crowd_of_twins_leaves_room_for_others", hostile::a_crowd_of_twins_leaves_room_for_others),
        ("a_worker_sees_no_requests_of_others", siblings::a_worker_sees_no_requests_of_others),
        ("a_worker_has_no_socket_of_others", siblings::a_worker_has_no_socket_of_others),
        ("a_socket_shut_down_by_a_worker_is_its_own", siblings::a_socket_shut_down_by_a_worker_is_its_own),
        ("options_that_a_worker_sets_are_its_own", siblings::options_that_a_worker_sets_are_its_own),
        ("descendants_of_a_worker_count_as_one", siblings::descendants_of_a_worker_count_as_one),
        (
            "a_twin_waits_where_too_many_descriptors_are_in_flight",
            siblings::a_twin_waits_where_too_many_descriptors_are_in_flight,
        ),
        ("a_worker_that_floods_stops_nobody", siblings::a_worker_that_floods_stops_nobody),
        ("crowds_that_fork_at_once_are_answered", siblings::crowds_that_fork_at_once_are_answered),
        ("connections_outlive_their_keeper", siblings::connections_outlive_their_keeper),
    ];
    let run = |test: fn()| {
        move || -> Result<(), Failed> {
            test();
            Ok(())
        }
    };
    let trials = tests.into_iter().map(|(name, test)| Trial::test(name, run(test))).collect();
    libtest_mimic::run(&arguments, trials).exit();
}
