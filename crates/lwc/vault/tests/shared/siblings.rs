//! One process of a program in the hands of an attacker, and what it can do to the others' requests.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::net::sockopt;

use super::hostile::{TWIN, as_worker, ask_for_twins, pair, request_socket, send};
use super::*;

/// Returns what the kernel calls the sockets for messages that this process has.
fn cookies() -> BTreeSet<u64> {
    let numbers = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    numbers
        .filter_map(|number| {
            // SAFETY: asked about, and not kept; a number that is closed by now is refused.
            let fd = unsafe { BorrowedFd::borrow_raw(number) };
            let ours = sockopt::socket_type(fd) == Ok(rustix::net::SocketType::SEQPACKET);
            ours.then(|| sockopt::socket_cookie(fd).ok()).flatten()
        })
        .collect()
}

/// Returns whether memory that this process shares with a twin has these bytes in it.
fn lines_hold(secret: &[u8]) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:orrery-vault")).any(|line| {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let address = |text| usize::from_str_radix(text, 16).unwrap();
        let (start, end) = (address(start), address(end));
        // SAFETY: the mapping stays until this process ends, and has a page for each of its addresses; others may write
        // to it meanwhile, upon which any bytes will do.
        let bytes = unsafe {
            std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(start), end - start)
        };
        bytes.windows(secret.len()).any(|window| window == secret)
    })
}

pub(super) fn a_worker_sees_no_requests_of_others() {
    let vault = vault();
    vault.load(b"key").unwrap();
    call(&vault, b"first").unwrap();
    let (mut asked, say_asked) = std::io::pipe().unwrap();
    let (mut made, say_made) = std::io::pipe().unwrap();
    // SAFETY: the process has one thread, so the child finds no lock held by another one.
    let worker = unsafe { libc::fork() };
    if worker == 0 {
        drop((say_asked, made));
        (&say_made).write_all(b"x").unwrap();
        let _ = asked.read(&mut [0]);
        // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in it.
        unsafe { libc::_exit(i32::from(lines_hold(b"the parent's request"))) }
    }
    drop(asked);
    let _ = made.read(&mut [0]);
    call(&vault, b"the parent's request").unwrap();
    assert!(lines_hold(b"the parent's request"), "this is where it would be");
    drop(say_asked);
    let mut status = 0;
    // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
    unsafe { libc::waitpid(worker, &raw mut status, 0) };
    assert_eq!(status, 0, "the worker has read it");
}

pub(super) fn a_worker_has_no_socket_of_others() {
    let vault = vault();
    vault.load(b"key").unwrap();
    call(&vault, b"x").unwrap();
    let ours = cookies();
    assert!(ours.len() >= 2, "the way to the keeper, and one to a twin");
    assert!(in_child(|| {
        let theirs = cookies();
        theirs.is_disjoint(&ours) && theirs.len() == 1 && {
            call(&vault, b"y").unwrap();
            let theirs = cookies();
            in_child(|| cookies().is_disjoint(&theirs) && call(&vault, b"z").unwrap() == b"keyz")
        }
    }));
    assert_eq!(cookies(), ours);
    assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
}

pub(super) fn a_socket_shut_down_by_a_worker_is_its_own() {
    for direction in [libc::SHUT_RD, libc::SHUT_WR, libc::SHUT_RDWR] {
        let vault = vault();
        vault.load(b"key").unwrap();
        let keeper = number(vault.load(b"pid").unwrap());
        as_worker(|socket| {
            // SAFETY: the call takes numbers only.
            assert_eq!(unsafe { libc::shutdown(socket, direction) }, 0);
        });
        assert_eq!(number(vault.load(b"pid").unwrap()), keeper);
        assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
        assert!(in_child(|| call(&vault, b"y") == Ok(b"keyy".to_vec())));
        kill(keeper);
        assert!(in_child(|| call(&vault, b"y") == Ok(b"keyy".to_vec())), "nor is it the spare's");
    }
}

pub(super) fn options_that_a_worker_sets_are_its_own() {
    let vault = vault();
    vault.load(b"key").unwrap();
    as_worker(|socket| {
        // SAFETY: the socket outlives the call; a number is read that lives.
        unsafe {
            let fd = BorrowedFd::borrow_raw(socket);
            rustix::io::ioctl_fionbio(fd, true).unwrap();
            sockopt::set_socket_send_buffer_size(fd, 0).unwrap();
        }
    });
    assert_eq!(vault.load(&[b'x'; LOAD_ROOM]).unwrap().len(), LOAD_ROOM);
}

pub(super) fn descendants_of_a_worker_count_as_one() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("not root: a worker of the vault's user may do what its parent may");
        return;
    }
    assert!(in_child(|| {
        let few = rustix::process::Rlimit { current: Some(200), maximum: Some(200) };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
        let vault = vault();
        vault.load(b"key").unwrap();
        let (mut ready, say_ready) = std::io::pipe().unwrap();
        let (over, say_over) = std::io::pipe().unwrap();
        // SAFETY: the process has one thread, so the child finds no lock held by another one.
        let worker = unsafe { libc::fork() };
        if worker == 0 {
            drop(say_over);
            become_user(worker_user());
            for _ in 0..5 {
                // SAFETY: the process has one thread, so the child may call everything.
                if unsafe { libc::fork() } == 0 {
                    let socket = request_socket();
                    let kept = ask_for_twins(socket, 50);
                    drop(say_ready);
                    let _ = (&over).read(&mut [0]);
                    drop(kept);
                    // SAFETY: the call takes a number and ends the child, so that nothing of the parent's
                    // runs in it.
                    unsafe { libc::_exit(0) };
                }
            }
            drop(say_ready);
            let _ = (&over).read(&mut [0]);
            // SAFETY: ends the child at once, before it runs anything of the test's.
            unsafe { libc::_exit(0) };
        }
        drop((say_ready, over));
        let _ = ready.read(&mut [0]);
        let other = in_child(|| {
            become_user(worker_user());
            assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
            true
        });
        assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
        drop(say_over);
        // SAFETY: our child, which ends by itself.
        unsafe { libc::waitpid(worker, std::ptr::null_mut(), 0) };
        other
    }));
}

pub(super) fn a_worker_that_floods_stops_nobody() {
    let vault = vault();
    vault.load(b"key").unwrap();
    let (over, say_over) = std::io::pipe().unwrap();
    // SAFETY: the process has one thread, so the child finds no lock held by another one.
    let worker = unsafe { libc::fork() };
    if worker == 0 {
        drop(say_over);
        if rustix::process::geteuid().is_root() {
            become_user(worker_user());
        }
        // Each sends as fast as it can: what is refused, what takes the keeper a fork, and for another process.
        for _ in 0..12 {
            // SAFETY: the process has one thread, so the child may call everything.
            if unsafe { libc::fork() } == 0 {
                let socket = request_socket();
                rustix::io::ioctl_fionbio(&over, true).unwrap();
                while (&over).read(&mut [0]).is_err() {
                    let (_ours, theirs) = pair();
                    send(socket, TWIN, &[theirs.as_raw_fd()]);
                    send(socket, b"OrV", &[theirs.as_raw_fd()]);
                }
                // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in
                // it.
                unsafe { libc::_exit(0) };
            }
        }
        // SAFETY: waits for the child's own children and ends it; null asks for no status.
        unsafe {
            while libc::wait(std::ptr::null_mut()) > 0 {}
            libc::_exit(0)
        };
    }
    drop(over);
    let begin = Instant::now();
    for _ in 0..20 {
        assert!(in_child(|| call(&vault, b"x") == Ok(b"keyx".to_vec())));
        vault.load(b"pid").unwrap();
    }
    // Without a share of its own, a request waits behind hundreds of others.
    println!("20 new clients and 20 loads beside a flood: {:?}", begin.elapsed());
    drop(say_over);
    // SAFETY: our child, which ends by itself.
    unsafe { libc::waitpid(worker, std::ptr::null_mut(), 0) };
}

/// Forks so many children, which all call at once, and each of which does the same once more, `depth` times; how many
/// failed.
fn fork_and_call(vault: &SharedVault, width: usize, depth: usize) -> i32 {
    let children: Vec<i32> = (0..width)
        .map(|_| {
            // SAFETY: the process has one thread, so the child finds no lock held by another one.
            match unsafe { libc::fork() } {
                0 => {
                    let called = call(vault, b"x");
                    let failed = i32::from(called != Ok(b"keyx".to_vec()));
                    if failed != 0 {
                        println!("{called:?}");
                    }
                    let below = if depth > 0 { fork_and_call(vault, width, depth - 1) } else { 0 };
                    // SAFETY: the call takes a number and ends the child, so that nothing of the parent's
                    // runs in it.
                    unsafe { libc::_exit((failed + below).min(100)) }
                }
                pid => pid,
            }
        })
        .collect();
    let failed = children.into_iter().map(|child| {
        let mut status = 0;
        // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 100 }
    });
    failed.sum()
}

pub(super) fn crowds_that_fork_at_once_are_answered() {
    let vault = vault();
    vault.load(b"key").unwrap();
    assert_eq!(fork_and_call(&vault, 6, 2), 0, "258 processes");
    assert_eq!(fork_and_call(&vault, 100, 0), 0);
    let keeper = number(vault.load(b"pid").unwrap());
    assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
    // The processes of a successor are as good.
    kill(keeper);
    assert_eq!(fork_and_call(&vault, 6, 2), 0, "258 processes of the next keeper");
}

pub(super) fn connections_outlive_their_keeper() {
    let vault = vault();
    vault.load(b"key").unwrap();
    for _ in 0..5 {
        let (mut ready, say_ready) = std::io::pipe().unwrap();
        let (killed, say_killed) = std::io::pipe().unwrap();
        let workers: Vec<i32> = (0..10)
            .map(|_| {
                // SAFETY: the process has one thread, so the child finds no lock held by another one.
                let pid = unsafe { libc::fork() };
                if pid == 0 {
                    close(say_killed.as_raw_fd());
                    (&say_ready).write_all(b"x").unwrap();
                    let _ = (&killed).read(&mut [0]);
                    let good = call(&vault, b"x") == Ok(b"keyx".to_vec())
                        && in_child(|| call(&vault, b"y") == Ok(b"keyy".to_vec()));
                    // SAFETY: the call takes a number and ends the child, so that nothing of the parent's
                    // runs in it.
                    unsafe { libc::_exit(i32::from(!good)) }
                }
                pid
            })
            .collect();
        ready.read_exact(&mut [0; 10]).unwrap();
        kill(number(vault.load(b"pid").unwrap()));
        drop(say_killed);
        for worker in workers {
            let mut status = 0;
            // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
            unsafe { libc::waitpid(worker, &raw mut status, 0) };
            assert_eq!(status, 0);
        }
    }
}

fn close(number: RawFd) {
    // SAFETY: in a child that does not use its copy of the handle.
    unsafe { libc::close(number) };
}

/// The kernel bounds the descriptors that a user's processes have sent and others have not received yet.
pub(super) fn a_twin_waits_where_too_many_descriptors_are_in_flight() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("not root: the process that sends them is bound as the vault is");
        return;
    }
    assert!(in_child(|| {
        let few = rustix::process::Rlimit { current: Some(100), maximum: Some(100) };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
        let vault = vault();
        vault.load(b"key").unwrap();
        let (mut ready, say_ready) = std::io::pipe().unwrap();
        // SAFETY: the process has one thread, so the child finds no lock held by another one.
        let sender = unsafe { libc::fork() };
        if sender == 0 {
            let (ours, theirs) = pair();
            let many = [theirs.as_raw_fd(); 50];
            for _ in 0..6 {
                send(ours.as_raw_fd(), b"x", &many);
            }
            drop(say_ready);
            std::thread::sleep(Duration::from_millis(500));
            // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in it.
            unsafe { libc::_exit(0) };
        }
        drop(say_ready);
        let _ = ready.read(&mut [0]);
        let answer = call(&vault, b"x");
        // SAFETY: our child, which ends by itself.
        unsafe { libc::waitpid(sender, std::ptr::null_mut(), 0) };
        answer.unwrap() == b"keyx" && in_child(|| call(&vault, b"y").unwrap() == b"keyy")
    }));
}
