//! What the sessions of these tests do: a command a line.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use orrery_sessions::Connection;

use super::scribble::{scribble, state};
use super::secret::{fill, search};

/// What sessions of these tests do with a line each.
pub(crate) fn obey(connection: &mut Connection) {
    while let Some(line) = line_of(connection) {
        let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = command_of(command, argument, connection);
        if connection.write_all(format!("{answer}\n").as_bytes()).is_err() {
            return;
        }
    }
}

pub(crate) fn line_of(connection: &mut Connection) -> Option<String> {
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
    pub(crate) static WORDS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

static mut FIELD: [u8; 64 * 4096] = [0; 64 * 4096];

pub(crate) fn field() -> &'static mut [u8; 64 * 4096] {
    let field = &raw mut FIELD;
    // SAFETY: cases have one thread, and no borrow outlives the expression that it is made for.
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
        "committed" => committed().to_string(),
        "exit" => std::process::exit(argument.parse().unwrap()),
        "panic" => panic!("as ordered"),
        "crash" => {
            // SAFETY: nothing is mapped there: the fault ends the session, as is wanted.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(16).write_volatile(1) };
            "alive".to_owned()
        }
        "abort" => std::process::abort(),
        "overflow" => overflow(argument.len()).to_string(),
        "spin" => loop {
            std::hint::spin_loop();
        },
        // SAFETY: takes numbers, and ends the session, as is wanted.
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
        // SAFETY: closes a number behind everybody's back: what a session does to its own descriptors is the test.
        "close" => unsafe { libc::close(argument.parse().unwrap()).to_string() },
        "attack" => attack(argument),
        other => format!("no command {other}"),
    }
}

/// Returns how many bytes the files in memory have that the session has open.
fn committed() -> u64 {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let in_memory = entries.filter(|path| {
        std::fs::read_link(path).is_ok_and(|target| target.starts_with("/memfd:orrery-images (deleted)"))
    });
    in_memory.map(|path| std::fs::metadata(path).unwrap().blocks() * 512).sum()
}

/// Attacks the process and address of the argument; the ways that were open.
fn attack(argument: &str) -> String {
    let (pid, address) = argument.split_once(' ').unwrap();
    let (pid, address): (i32, usize) = (pid.parse().unwrap(), address.parse().unwrap());
    let mut open = Vec::new();
    let mut bytes = [0_u8; 8];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 8 };
    let remote = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address), iov_len: 8 };
    // SAFETY: writes to the buffer, within its length; what cannot be read is an error.
    if unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) } == 8 {
        open.push("memory");
    }
    // SAFETY: takes numbers, and gives a new descriptor or an error.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    // SAFETY: likewise; the session ends with what it got.
    if pidfd >= 0 && unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd, 0, 0) } >= 0 {
        open.push("descriptors");
    }
    open.join(",")
}

#[expect(unconditional_recursion, reason = "that is the point")]
fn overflow(depth: usize) -> usize {
    let room = std::hint::black_box([depth; 512]);
    overflow(room[17] + 1) + room[3]
}
