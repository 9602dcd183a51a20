//! Workers in the hands of an attacker: what they send to the keeper neither ends, stops nor outlives the vault.

use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use orrery_testing::eventually;
use rustix::net::sockopt;

use super::*;

const MAGIC: &[u8] = b"OrV\x03";
pub(super) const TWIN: &[u8] = b"OrV\x03T";

/// Returns the descriptor of the socket on which this process reaches the keeper.
pub(super) fn request_socket() -> RawFd {
    let numbers = std::fs::read_dir("/proc/self/fd").unwrap();
    let mut numbers: Vec<RawFd> =
        numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
        .into_iter()
        .find(|number| {
            // SAFETY: the number is that of a descriptor that was open when it was listed, and is only asked
            // about here.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(*number) };
            sockopt::socket_type(fd) == Ok(rustix::net::SocketType::SEQPACKET)
        })
        .unwrap()
}

/// Asks for so many twins over a socket, and returns our ends of their answer sockets, which keep them.
///
/// It takes the answers: descriptors in flight would count for the vault's user, and so for other cases.
pub(super) fn ask_for_twins(socket: RawFd, count: usize) -> Vec<OwnedFd> {
    let ask = |_| {
        let (ours, theirs) = pair();
        send(socket, TWIN, &[theirs.as_raw_fd()]);
        drop(theirs);
        let _ = rustix::net::recv(&ours, &mut [0; 8], rustix::net::RecvFlags::empty());
        ours
    };
    (0..count).map(ask).collect()
}

pub(super) fn pair() -> (OwnedFd, OwnedFd) {
    let flags = rustix::net::SocketFlags::CLOEXEC;
    rustix::net::socketpair(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET, flags, None)
        .unwrap()
}

/// Sends a datagram with descriptors; waits until there is room for it.
pub(super) fn send(socket: RawFd, bytes: &[u8], fds: &[RawFd]) {
    let mut control = [0_u64; 128];
    let part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: all zeros is a value of the structure; then it names live buffers with their sizes, and the control
    // buffer is aligned for its header and has room for 200 descriptors.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = (&raw const part).cast_mut();
        header.msg_iovlen = 1;
        if !fds.is_empty() {
            let size = u32::try_from(size_of_val(fds)).unwrap();
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = libc::CMSG_SPACE(size) as usize;
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(size) as usize;
            std::ptr::copy_nonoverlapping(fds.as_ptr().cast(), libc::CMSG_DATA(first), size_of_val(fds));
        }
        libc::sendmsg(socket, &raw const header, libc::MSG_NOSIGNAL);
    }
}

/// Runs `attack` in an ordinary user's process, where this one is root's.
pub(super) fn as_worker(attack: impl FnOnce(RawFd)) {
    assert!(in_child(|| {
        let socket = request_socket();
        if rustix::process::geteuid().is_root() {
            become_user(worker_user());
        }
        attack(socket);
        true
    }));
}

/// Returns the living processes of the keeper's session: the vault's.
fn processes_of(session: i32) -> Vec<i32> {
    let numbers = std::fs::read_dir("/proc").unwrap();
    let numbers = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    numbers
        .filter(|pid| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let Some((_, rest)) = stat.rsplit_once(") ") else { return false };
            let mut fields = rest.split(' ');
            let state = fields.next();
            fields.nth(2).and_then(|field| field.parse().ok()) == Some(session)
                && !matches!(state, Some("Z" | "X"))
        })
        .collect()
}

/// Runs a program with a vault, which `attack` attacks from a worker; then nothing of the vault is left.
fn ends_with_its_program(attack: impl FnOnce(RawFd)) {
    let (mut hear, say) = std::io::pipe().unwrap();
    assert!(in_child(move || {
        let vault = vault();
        let keeper = number(vault.load(b"pid").unwrap());
        write!(&say, "{keeper}").unwrap();
        as_worker(attack);
        // The keeper has seen to all of it.
        number(vault.load(b"pid").unwrap()) == keeper
    }));
    let mut text = String::new();
    hear.read_to_string(&mut text).unwrap();
    let keeper = text.parse().unwrap();
    eventually("the vault ends", || processes_of(keeper).is_empty());
}

pub(super) fn no_datagram_ends_the_keeper() {
    let vault = vault();
    vault.load(b"key").unwrap();
    let keeper = number(vault.load(b"pid").unwrap());
    as_worker(|socket| {
        let null = File::open("/dev/null").unwrap();
        let (ours, theirs) = pair();
        let long = vec![0; 100_000];
        for round in 0..20 {
            for bytes in [
                &b""[..],
                b"O",
                MAGIC,
                TWIN,
                b"OrV\x03Tx",
                b"OrV\x03L",
                b"OrV\x03Lmore",
                b"OrV\x01T",
                b"xxxxT",
                &long,
            ] {
                send(socket, bytes, &[]);
                send(socket, bytes, &[null.as_raw_fd()]);
                send(socket, bytes, &[socket]);
                send(socket, bytes, &[null.as_raw_fd(), theirs.as_raw_fd(), socket]);
                if round == 0 {
                    send(socket, bytes, &[ours.as_raw_fd(); 200]);
                }
            }
        }
    });
    assert_eq!(number(vault.load(b"pid").unwrap()), keeper);
    assert_eq!(vault.load(b"+").unwrap(), b"+");
    assert!(in_child(|| {
        if rustix::process::geteuid().is_root() {
            become_user(worker_user());
        }
        // Where all are one user's, the worker may have something loaded.
        let answer = call(&vault, b"x").unwrap();
        answer.starts_with(b"key") && answer.ends_with(b"+x")
    }));
}

pub(super) fn no_answer_socket_keeps_a_vault_alive() {
    ends_with_its_program(|socket| (0..100).for_each(|_| send(socket, TWIN, &[socket])));
    // Descriptors in flight count as open ones.
    ends_with_its_program(|socket| {
        for _ in 0..10 {
            let (ours, theirs) = pair();
            send(ours.as_raw_fd(), b"x", &[socket]);
            send(ours.as_raw_fd(), b"x", &[ours.as_raw_fd()]);
            send(socket, TWIN, &[theirs.as_raw_fd()]);
        }
    });
    ends_with_its_program(|socket| {
        for _ in 0..10 {
            let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::empty()).unwrap();
            send(socket, TWIN, &[epoll.as_raw_fd(), socket]);
            send(socket, TWIN, &[socket, epoll.as_raw_fd()]);
        }
    });
    // A listener has connections that nobody accepts, and these have queues.
    ends_with_its_program(|socket| {
        use rustix::net::{AddressFamily, SocketType, socket as make};
        let listener = make(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        let name = format!("orrery-vault-test-{}", std::process::id());
        let name = rustix::net::SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        rustix::net::bind(&listener, &name).unwrap();
        rustix::net::listen(&listener, 4).unwrap();
        let client = make(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&client, &name).unwrap();
        send(client.as_raw_fd(), b"x", &[socket]);
        send(client.as_raw_fd(), b"x", &[client.as_raw_fd()]);
        send(socket, TWIN, &[listener.as_raw_fd()]);
    });
    // One without a peer.
    ends_with_its_program(|socket| {
        let lone =
            rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET, None);
        send(socket, TWIN, &[lone.unwrap().as_raw_fd()]);
    });
}

/// A socket of the network that close(2) waits for: it has data to deliver, and SO_LINGER.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 65_536]).is_ok() {}
    stream.set_nonblocking(false).unwrap();
    sockopt::set_socket_linger(&stream, Some(Duration::from_secs(3600))).unwrap();
    (stream.into(), peer)
}

pub(super) fn a_descriptor_that_does_not_close_stops_nobody() {
    let vault = vault();
    vault.load(b"key").unwrap();
    let keeper = number(vault.load(b"pid").unwrap());
    let (mut sent, say_sent) = std::io::pipe().unwrap();
    let (mut over, say_over) = std::io::pipe().unwrap();
    let (mut stopped, say_stopped) = std::io::pipe().unwrap();
    // SAFETY: the process has one thread, so the child finds no lock held by another one.
    let worker = unsafe { libc::fork() };
    if worker == 0 {
        drop((sent, say_over, say_stopped));
        let _ = stopped.read(&mut [0]);
        let socket = request_socket();
        let (stream, _peer) = lingering();
        send(socket, MAGIC, &[stream.as_raw_fd()]);
        // The one in flight is the last, for whose close the kernel waits.
        drop(stream);
        let (stream, _peer_too) = lingering();
        send(socket, TWIN, &[stream.as_raw_fd()]);
        drop(stream);
        // One that is an answer socket's, and is closed with it.
        let (stream, _another_peer) = lingering();
        let (ours, theirs) = pair();
        send(ours.as_raw_fd(), b"x", &[stream.as_raw_fd()]);
        drop(stream);
        send(socket, MAGIC, &[theirs.as_raw_fd()]);
        drop((ours, theirs));
        drop(say_sent);
        let _ = over.read(&mut [0]);
        // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in it.
        unsafe { libc::_exit(0) };
    }
    signal(keeper, libc::SIGSTOP);
    drop((stopped, say_stopped));
    drop((over, say_sent));
    let _ = sent.read(&mut [0]);
    signal(keeper, libc::SIGCONT);
    // Only one process with a connection of its own is served in the same turn as the worker's third request.
    std::thread::sleep(Duration::from_secs(1));
    for _ in 0..3 {
        assert!(in_child(|| call(&vault, b"x").unwrap() == b"keyx"));
    }
    assert_eq!(vault.load(b"+").unwrap(), b"+");
    assert_eq!(call(&vault, b"x").unwrap(), b"key+x");
    drop(say_over);
    // SAFETY: our child, which ends by itself.
    unsafe { libc::waitpid(worker, std::ptr::null_mut(), 0) };
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: a process of our own vault.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

fn status_of(pid: i32, name: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
    line.unwrap_or_else(|| panic!("{name}: {status}")).trim().to_owned()
}

/// CAP_DAC_READ_SEARCH and CAP_IPC_LOCK.
const KEPT: u64 = 1 << 2 | 1 << 14;

pub(super) fn keepers_are_confined() {
    let vault = vault();
    let keeper = number(vault.load(b"pid").unwrap());
    let _twin = call(&vault, b"x").unwrap();
    let all = processes_of(keeper);
    assert_eq!(all.len(), 3, "keeper, spare and twin");
    for pid in all {
        assert_eq!(status_of(pid, "Seccomp"), "2");
        assert_eq!(status_of(pid, "NoNewPrivs"), "1");
        let set = |name: &str| u64::from_str_radix(&status_of(pid, name), 16).unwrap();
        assert_eq!(set("CapEff") & !(1 << 14), 0, "process {pid}");
        assert_eq!((set("CapPrm") | set("CapInh") | set("CapAmb")) & !KEPT, 0, "process {pid}");
    }
    // What loading does there: it reads, and nothing else.
    assert_eq!(vault.load(b"read").unwrap(), b"read");
    for request in ["write", "create", "socket", "program", "copy", "signal", "trace"] {
        let done = vault.load(format!("try {request}").as_bytes());
        assert!(matches!(done, Err(Error::Errno(Errno::PERM | Errno::NOSYS))), "{request}: {done:?}");
    }
    // Nor may it once it has taken over.
    kill(keeper);
    let done = vault.load(b"try write");
    assert_eq!(done, Err(Error::Errno(Errno::PERM)));
}

pub(super) fn files_of_others_are_loaded_by_root() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("not root");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("key");
    std::fs::write(&path, "its key").unwrap();
    std::os::unix::fs::chown(&path, Some(65_533), Some(65_533)).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let vault = vault();
    let request = format!("file {}", path.display());
    assert_eq!(vault.load(request.as_bytes()).unwrap(), b"its key");
}

pub(super) fn memory_is_locked_or_that_it_is_not_is_known() {
    let vault = vault();
    let keeper = number(vault.load(b"pid").unwrap());
    vault.load(b"key").unwrap();
    let _twin = call(&vault, b"x").unwrap();
    let locked = |pid| status_of(pid, "VmLck") != "0 kB";
    let privileged = status_of(i32::try_from(std::process::id()).unwrap(), "CapEff");
    let privileged = u64::from_str_radix(&privileged, 16).unwrap() & (1 << 14) != 0;
    assert!(vault.is_locked() || !privileged, "CAP_IPC_LOCK is enough, whatever RLIMIT_MEMLOCK is");
    for pid in processes_of(keeper) {
        assert_eq!(locked(pid), vault.is_locked(), "process {pid}");
    }
    // A twin that may lock no more than it has can work all the same.
    let long = vec![7; ROOM - 3];
    assert_eq!(call(&vault, &long).unwrap().len(), ROOM);
}

pub(super) fn an_ordinary_users_memory_that_is_not_locked_is_known() {
    assert!(in_child(|| {
        if rustix::process::geteuid().is_root() {
            become_user(worker_user());
        }
        let little = rustix::process::Rlimit { current: Some(65_536), maximum: Some(65_536) };
        rustix::process::setrlimit(rustix::process::Resource::Memlock, little).unwrap();
        let vault = vault();
        vault.load(b"key").unwrap();
        !vault.is_locked() && call(&vault, b"x").unwrap() == b"keyx"
    }));
}

pub(super) fn a_crowd_of_twins_leaves_room_for_others() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("not root: descriptors in flight are counted by user, and all are of one");
        return;
    }
    assert!(in_child(|| {
        let few = rustix::process::Rlimit { current: Some(100), maximum: Some(100) };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
        let vault = vault();
        let keeper = number(vault.load(b"pid").unwrap());
        let (mut ready, say_ready) = std::io::pipe().unwrap();
        let (over, say_over) = std::io::pipe().unwrap();
        // SAFETY: the process has one thread, so the children find no lock held by another one.
        let workers: Vec<i32> = (0..4).map(|_| unsafe { libc::fork() }).take_while(|pid| *pid != 0).collect();
        if workers.len() < 4 {
            drop(say_over);
            let socket = request_socket();
            become_user(worker_user());
            let kept = ask_for_twins(socket, 40);
            drop(say_ready);
            let _ = (&over).read(&mut [0]);
            drop(kept);
            // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in it.
            unsafe { libc::_exit(0) };
        }
        drop((say_ready, over));
        let _ = ready.read(&mut [0]);
        // Requests are still understood, and there are twins left for others.
        let same = number(vault.load(b"pid").unwrap()) == keeper;
        let answered = call(&vault, b"x") == Ok(b"x".to_vec());
        drop(say_over);
        for worker in workers {
            // SAFETY: our child, which ends by itself.
            unsafe { libc::waitpid(worker, std::ptr::null_mut(), 0) };
        }
        eventually("twins end with their clients", || call(&vault, b"x").is_ok());
        same && answered
    }));
}
