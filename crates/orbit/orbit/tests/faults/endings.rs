//! What is left of an orbit that has ended, and of what it forked.

use std::io::{Read, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use orrery_orbit::{Area, Call, Error, Fault, Orbit, Scratch, Task, is_orbit};

use crate::common::{area, childless, crash, ends, number, read};
use crate::support::{fault, kill, obeying, orbit, restarting};

pub(crate) fn a_killed_orbit_leaves_nothing_behind() {
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let area = area();
    let number = number(&area);
    let round = |area: &Area| {
        let orbit = restarting(Orbit::builder("gone")).entry(read).create().unwrap();
        let areas = [area];
        let bytes = number.address();
        assert!(orbit.call(&Call::new().areas(&areas).arguments(&bytes)).is_ok());
        fault(orbit.call(&obeying(&[1])));
        let waiting: Vec<_> = (0..5)
            .map(|_| {
                number.set(number.get() + 1);
                orbit.call_async(&Call::new().areas(&areas).arguments(&bytes)).unwrap()
            })
            .collect();
        kill(orbit.pid().unwrap());
        drop(orbit);
        drop(waiting);
    };
    for _ in 0..3 {
        round(&area);
    }
    let (files_before, mappings_before) = (files(), mappings());
    for _ in 0..10 {
        round(&area);
    }
    assert_eq!(files(), files_before);
    assert!(mappings() <= mappings_before + 4, "{} and {mappings_before}", mappings());
    assert!(childless(), "no child is left");
}

pub(crate) fn a_fork_of_the_orbit_may_outlive_its_task() {
    let orbit = orbit(|_| {
        // SAFETY: the child only sleeps and ends, and so takes no lock that another thread may have held.
        let child = unsafe { libc::fork() };
        if child == 0 {
            std::thread::sleep(Duration::from_millis(30));
            // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in it.
            unsafe { libc::_exit(0) }
        }
        i64::from(child)
    });
    for _ in 0..5 {
        assert!(orbit.call(&Call::new()).unwrap() > 0);
    }
}

/// Forks; the child returns, panics or crashes by the argument's first byte, and the task returns its wait status.
fn fork_and_return(task: &mut Task<'_>) -> i64 {
    let way = task.arguments()[0];
    // SAFETY: the child returns as the task would, which is what the case is about.
    let child = unsafe { libc::fork() };
    if child == 0 {
        match way {
            0 => return 1_000_000,
            1 => panic!("in the child"),
            _ => return crash(),
        }
    }
    let mut status = 0;
    // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    i64::from(status)
}

pub(crate) fn a_child_that_returns_from_its_task_is_not_the_orbit() {
    let orbit = orbit(fork_and_return);
    let pid = orbit.pid().unwrap();
    for _ in 0..3 {
        for (way, wanted) in [(0, 0), (1, 101 << 8), (2, i64::from(libc::SIGSEGV))] {
            let status = orbit.call(&Call::new().arguments(&[way])).unwrap();
            let core_dumped = 0x80;
            assert_eq!(status & !core_dumped, wanted, "way {way}");
        }
    }
    // What a child noted of its end is not what the orbit dies of.
    kill(pid);
    let error = orbit.call(&Call::new().arguments(&[0])).unwrap_err();
    assert!(error.to_string().contains("SIGKILL"), "{error}");
}

/// Forks a child that sleeps, and spawns a program that does; gives their numbers.
#[expect(clippy::zombie_processes, reason = "who ends it is the case's question")]
fn leave_two_behind(_: &mut Task<'_>) -> i64 {
    // SAFETY: the child sleeps until it is killed.
    let child = unsafe { libc::fork() };
    if child == 0 {
        std::thread::sleep(Duration::from_secs(1000));
        // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in it.
        unsafe { libc::_exit(0) }
    }
    let program = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    i64::from(child) << 32 | i64::from(program.id())
}

fn two(pids: i64) -> [u32; 2] {
    [u32::try_from(pids >> 32).unwrap(), u32::try_from(pids & i64::from(u32::MAX)).unwrap()]
}

pub(crate) fn what_a_task_forked_ends_with_the_orbit() {
    let orbit = restarting(Orbit::builder("forks")).entry(leave_two_behind).create().unwrap();
    let crashed = two(orbit.call(&Call::new()).unwrap());
    fault(orbit.call(&obeying(&[1])));
    let destroyed = two(orbit.call(&Call::new()).unwrap());
    for pid in crashed {
        assert!(ends(pid), "it outlived a crash and the restart");
    }
    drop(orbit);
    for pid in destroyed {
        assert!(ends(pid), "it outlived the orbit");
    }
}

pub(crate) fn what_a_task_forked_ends_with_main() {
    let (reader, writer) = std::io::pipe().unwrap();
    // SAFETY: this process has one thread, so the child finds no lock held by another one.
    let main = unsafe { libc::fork() };
    if main == 0 {
        use std::io::Write as _;
        let orbit = orbit(leave_two_behind);
        let [forked, spawned] = two(orbit.call(&Call::new()).unwrap());
        // Without the orbit's end nobody ends what does not run our fork handlers.
        kill(spawned);
        (&writer).write_all(&forked.to_ne_bytes()).unwrap();
        loop {
            std::thread::park();
        }
    }
    drop(writer);
    let mut forked = [0; 4];
    std::io::Read::read_exact(&mut &reader, &mut forked).unwrap();
    kill(main.cast_unsigned());
    assert!(ends(u32::from_ne_bytes(forked)), "it outlived main");
    assert!(rustix::process::wait(rustix::process::WaitOptions::empty()).is_ok());
}

/// What main registered for its end does not run in an orbit that calls exit(3), what main has not flushed is not printed
/// there, and what the task printed is.
pub(crate) fn an_exit_runs_nothing_and_prints_nothing_of_mains() {
    extern "C" fn at_exit() {
        if is_orbit() {
            // SAFETY: the kernel reads seven bytes, which the literal has.
            unsafe { libc::write(1, c"handler".as_ptr().cast(), 7) };
        }
    }
    let memory = rustix::fs::memfd_create("output", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = std::fs::File::from(memory);
    // SAFETY: the case is alone in its process; the standard output is restored below. Constants are printed.
    let output = unsafe {
        assert_eq!(libc::atexit(at_exit), 0);
        let output = libc::dup(1);
        assert!(libc::dup2(file.as_raw_fd(), 1) == 1);
        libc::printf(c"main".as_ptr());
        output
    };
    let orbit = orbit(|_| {
        // SAFETY: prints a constant, and ends the orbit.
        unsafe {
            libc::printf(c"task".as_ptr());
            libc::exit(3)
        }
    });
    let seen = fault(orbit.call(&Call::new()));
    // SAFETY: flushes all streams; the number is that which was copied above.
    unsafe {
        libc::fflush(std::ptr::null_mut());
        assert_eq!(libc::dup2(output, 1), 1);
    }
    assert_eq!(seen, Fault::Exited { status: 3 });
    let mut text = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "taskmain");
}

/// Becomes another program by the argument 1, else returns 7.
fn become_another(task: &mut Task<'_>) -> i64 {
    if task.arguments()[0] == 1 {
        panic!("{}", Command::new("sleep").arg("1000").exec());
    }
    7
}

/// Main would wait for ever for the answer of a program that knows nothing of it.
pub(crate) fn a_task_that_becomes_another_program_fails() {
    let orbit = restarting(Orbit::builder("exec")).entry(become_another).create().unwrap();
    let pid = orbit.pid().unwrap();
    for limit in [None, Some(Duration::from_mins(10))] {
        let call = limit.map_or(Call::new(), |limit| Call::new().time_limit(limit));
        assert_eq!(fault(orbit.call(&call.arguments(&[1]))), Fault::Replaced);
        assert_eq!(orbit.call(&Call::new().arguments(&[0])), Ok(7));
    }
    assert!(ends(pid), "the other program ends");
    let limit = Duration::from_millis(1);
    let seen = fault(orbit.call(&Call::new().time_limit(limit).arguments(&[1])));
    assert!(matches!(seen, Fault::Replaced | Fault::TimeLimit { .. }), "{seen}");
}

pub(crate) fn a_task_that_ends_its_thread_fails_at_its_limit() {
    let orbit = restarting(Orbit::builder("thread"))
        .entry(|task| {
            if task.arguments()[0] == 0 {
                return 7;
            }
            std::thread::spawn(|| std::thread::sleep(Duration::from_secs(1000)));
            // SAFETY: ends the thread without a return, and so without what Rust would have cleaned up.
            unsafe { libc::syscall(libc::SYS_exit, 0) }
        })
        .create()
        .unwrap();
    let limit = Duration::from_millis(50);
    let seen = fault(orbit.call(&Call::new().time_limit(limit).arguments(&[1])));
    // Which of the two is noticed first varies with when main looks.
    assert!(matches!(seen, Fault::TimeLimit { .. } | Fault::Replaced), "{seen}");
    assert_eq!(orbit.call(&Call::new().arguments(&[0])), Ok(7));
}

/// Closes everything by the argument 1; else returns the number at that address.
fn close_all(task: &mut Task<'_>) -> i64 {
    match *task.arguments() {
        // SAFETY: what of this process's is closed is what the case is about.
        [1] => unsafe { i64::from(libc::close_range(3, u32::MAX, 0)) },
        _ => read(task),
    }
}

/// An orbit without its files answers rightly or fails, and its successor has files.
pub(crate) fn a_task_that_closes_all_files_harms_the_orbit_alone() {
    let area = area();
    let number = number(&area);
    let orbit = restarting(Orbit::builder("closes")).entry(close_all).create().unwrap();
    let (areas, bytes) = ([&area], number.address());
    let seen = || {
        number.set(number.get() + 1);
        orbit.call(&Call::new().areas(&areas).arguments(&bytes)).map(|seen| seen == number.get())
    };
    assert_eq!(seen(), Ok(true));
    for round in 0..3 {
        assert_eq!(orbit.call(&Call::new().arguments(&[1])), Ok(0));
        let after = seen();
        let failed =
            matches!(&after, Err(Error::Fault { fault: Fault::Snapshot { .. }, .. } | Error::NotRun { .. }));
        assert!(after == Ok(true) || failed, "{after:?}");
        let again = (0..3).find_map(|_| seen().ok());
        assert_eq!(again, Some(true), "round {round}");
    }
}

/// Closes every file, opens others in their places by the argument 1, and sends an update: whether that was said to be sent.
fn close_and_send(task: &mut Task<'_>) -> i64 {
    let occupies = task.arguments()[0] == 1;
    // SAFETY: what of this process's is closed is what the case is about.
    assert_eq!(unsafe { libc::close_range(3, u32::MAX, 0) }, 0);
    if occupies {
        // What the program opens next may get any number.
        let (one, other) = std::os::unix::net::UnixDatagram::pair().unwrap();
        // SAFETY: the call takes a number only.
        let limit = unsafe { libc::sysconf(libc::_SC_OPEN_MAX) }.clamp(16, 4096);
        for number in 16..i32::try_from(limit).unwrap() {
            // SAFETY: a number that is open or not is overwritten, which is what the case is about.
            assert_eq!(unsafe { libc::dup2(one.as_raw_fd(), number) }, number);
        }
        std::mem::forget((one, other));
    }
    i64::from(task.send(Scratch::new().data(b"update")).is_ok())
}

pub(crate) fn an_update_of_a_task_that_closed_all_files_is_an_error_or_arrives() {
    let orbit = restarting(Orbit::builder("closes")).entry(close_and_send).create().unwrap();
    for occupies in [0, 1, 0, 1] {
        let future = orbit.call_async(&Call::new().arguments(&[occupies])).unwrap();
        let arrived = matches!(future.receive(), Ok(Some(_)));
        let said = future.get();
        assert!(arrived || said != Ok(1), "occupies {occupies}: {said:?} though nothing arrived");
    }
}

/// A main that closes all descriptors, as those do that become daemons, closes the library's, too; their numbers are then
/// other files'.
pub(crate) fn a_main_that_closed_all_files_keeps_those_that_it_opens_then() {
    const LAST: i32 = 1_200;
    let area = area();
    let number = number(&area);
    let orbits: Vec<Orbit> = (0..3).map(|_| orbit(read)).collect();
    let (areas, bytes) = ([&area], number.address());
    for orbit in &orbits[..2] {
        orbit.call(&Call::new().areas(&areas).arguments(&bytes)).unwrap();
    }
    let pids: Vec<u32> = orbits.iter().map(|orbit| orbit.pid().unwrap()).collect();
    // SAFETY: closes what is the library's too, which this is about.
    assert_eq!(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) }, 0);
    let mut file =
        std::fs::File::from(rustix::fs::memfd_create("program", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    std::io::Write::write_all(&mut file, b"the program's").unwrap();
    for place in file.as_raw_fd() + 1..LAST {
        // SAFETY: nothing but the library's handles names the number, and they lost it.
        assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), place) }, place);
    }
    // Whether calls still work is not said; they return. The area has pages that no mirror has seen.
    let more = area.allocate(std::alloc::Layout::from_size_align(1 << 20, 4096).unwrap()).unwrap();
    // SAFETY: the block is the case's own.
    unsafe { more.cast::<u8>().as_ptr().write_bytes(7, 1 << 20) };
    for orbit in &orbits {
        let _ = orbit.call(&Call::new().areas(&areas).arguments(&bytes));
        let future = orbit.call_async(
            &Call::new().function(|task| task.send(Scratch::new().data(b"x")).map_or(-1, |()| 1)),
        );
        if let Ok(future) = future {
            let _ = future.receive();
        }
    }
    drop(orbits);
    drop(area);
    for place in file.as_raw_fd()..LAST {
        // SAFETY: F_GETFD takes no pointer, and a closed number is an error.
        assert!(unsafe { libc::fcntl(place, libc::F_GETFD) } >= 0, "number {place} is closed");
    }
    file.rewind().unwrap();
    let mut text = Vec::new();
    file.read_to_end(&mut text).unwrap();
    assert_eq!(text, b"the program's");
    for pid in pids {
        let gone =
            || std::fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z"));
        orrery_testing::eventually("the orbit's end", gone);
    }
}
