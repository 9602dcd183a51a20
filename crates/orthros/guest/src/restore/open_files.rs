//! Settings of open files that criu does not restore: options of sockets, receivers of signals, what epolls wait for,
//! and packets in pipes. They are made while the restored processes stand still, on copies of their file descriptors
//! (pidfd_getfd(2)).
//!
//! What fails costs that setting, and is a remark. A socket whose filter or interface cannot be set again is closed to
//! everything.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use anyhow::{Context as _, Result, ensure};
use orrery_orthros_images::{
    Epoll, EpollEntry, FileOwner, Holder, PacketPipe, RestoreState, SocketOption, SocketRestrictions,
    SocketSettings,
};
use rustix::event::epoll;
use rustix::fs::{Mode, OFlags};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, getrlimit, pidfd_getfd, pidfd_open, setrlimit,
};

/// `BPF_RET | BPF_K`: a program that drops every packet.
const DROP_ALL: [libc::sock_filter; 1] = [libc::sock_filter { code: 6, jt: 0, jf: 0, k: 0 }];
/// The size of `struct sock_filter`.
const INSTRUCTION: usize = 8;
const SO_LOCK_FILTER: c_int = 44;
/// `F_SETSIG` and `F_SETOWN_EX` of fcntl(2).
const F_SETSIG: c_int = 10;
const F_SETOWN_EX: c_int = 15;
/// The largest value that `getsockopt` is asked for.
const LARGEST_VALUE: usize = 64;

/// `struct f_owner_ex`.
#[repr(C)]
struct OwnerEx {
    kind: c_int,
    pid: c_int,
}

/// Makes the settings of all open files, and returns remarks about those that cannot be made. To be called in the
/// service's PID namespace.
pub(crate) fn restore(state: &RestoreState) -> Vec<String> {
    let mut remarks = Vec::new();
    for socket in &state.sockets {
        restore_socket(socket, &mut remarks);
    }
    for owner in &state.file_owners {
        if let Err(error) = restore_owner(owner) {
            remarks.push(format!("{}: nobody gets a signal: {error:#}", describe(owner.holder)));
        }
    }
    for pipe in &state.packet_pipes {
        if let Err(error) = restore_packets(pipe) {
            remarks.push(format!("{}: packets in the pipe are lost: {error:#}", describe(pipe.holder)));
        }
    }
    remarks.extend(restore_epolls(&state.epolls));
    remarks
}

fn describe(holder: Holder) -> String {
    format!("descriptor {} of process {}", holder.fd, holder.pid)
}

/// Returns a copy of a process's file descriptor.
fn copy(holder: Holder) -> Result<OwnedFd> {
    let pid = i32::try_from(holder.pid).ok().and_then(Pid::from_raw).context("it has no PID")?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("cannot open the process")?;
    let fd = i32::try_from(holder.fd)?;
    pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty()).context("cannot copy the file descriptor")
}

fn restore_socket(settings: &SocketSettings, remarks: &mut Vec<String>) {
    let holder = settings.holder;
    let socket = match copy(holder) {
        Ok(socket) => socket,
        Err(error) => {
            remarks.push(format!("{}: the options of the socket are lost: {error:#}", describe(holder)));
            return;
        }
    };
    // First, so that it never receives what they keep away.
    if let Err(error) = restrict(&socket, &settings.restrictions) {
        let closed = close(&socket);
        let how =
            closed.map_or_else(|error| format!("cannot be closed: {error:#}"), |()| "is closed".to_owned());
        remarks.push(format!("{}: {error:#}; the socket {how}", describe(holder)));
    }
    for option in &settings.options {
        if let Err(error) = set_option(&socket, option) {
            remarks.push(format!("{}: {} of the socket is lost: {error:#}", describe(holder), option.name));
        }
    }
}

/// Sets a filter and an interface. The interface comes first, and a filter that drops everything before both.
fn restrict(socket: &OwnedFd, restrictions: &SocketRestrictions) -> Result<()> {
    if restrictions.is_empty() {
        return Ok(());
    }
    attach_filter(socket, &DROP_ALL).context("cannot close the socket while it is restored")?;
    if let Some(name) = &restrictions.interface {
        set(socket, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, name.as_bytes())
            .with_context(|| format!("cannot bind the socket to the interface {name}"))?;
    }
    match &restrictions.filter {
        Some(program) => {
            let word =
                |bytes: &[u8]| bytes.iter().rev().fold(0_u32, |word, &byte| word << 8 | u32::from(byte));
            let instruction = |bytes: &[u8]| {
                let code = u16::try_from(word(&bytes[..2])).unwrap_or(0);
                libc::sock_filter { code, jt: bytes[2], jf: bytes[3], k: word(&bytes[4..]) }
            };
            let program: Vec<_> = program.chunks_exact(INSTRUCTION).map(instruction).collect();
            attach_filter(socket, &program).context("cannot attach its filter")?;
        }
        None => set(socket, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &1_i32.to_ne_bytes())
            .context("cannot open the socket again")?,
    }
    if restrictions.is_locked {
        set(socket, libc::SOL_SOCKET, SO_LOCK_FILTER, &1_i32.to_ne_bytes())
            .context("cannot lock its filter")?;
    }
    Ok(())
}

/// Closes a socket to everything: it receives nothing, and reading it gives the end.
fn close(socket: &OwnedFd) -> Result<()> {
    attach_filter(socket, &DROP_ALL)?;
    set(socket, libc::SOL_SOCKET, SO_LOCK_FILTER, &1_i32.to_ne_bytes())?;
    // A socket that is not connected answers that it is not, and is shut down all the same.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    Ok(())
}

fn attach_filter(socket: &OwnedFd, program: &[libc::sock_filter]) -> Result<()> {
    let head = libc::sock_fprog { len: u16::try_from(program.len())?, filter: program.as_ptr().cast_mut() };
    let length = libc::socklen_t::try_from(size_of_val(&head))?;
    // SAFETY: `head` is a sock_fprog of this length, and points to `len` instructions that live until the call returns;
    // it only reads them.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const head).cast(),
            length,
        )
    };
    ensure!(result == 0, io::Error::last_os_error());
    Ok(())
}

fn set(socket: &OwnedFd, level: c_int, option: c_int, value: &[u8]) -> io::Result<()> {
    let length = libc::socklen_t::try_from(value.len()).unwrap_or(0);
    // SAFETY: `value` is a live slice of the length that is passed, which the call only reads. The options that hold
    // pointers (SO_ATTACH_FILTER) do not come here.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value.as_ptr().cast(), length) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns whether a socket has an option's value.
fn has(socket: &OwnedFd, option: &SocketOption) -> io::Result<bool> {
    let mut value = [0_u8; LARGEST_VALUE];
    let mut length = libc::socklen_t::try_from(option.value.len().min(LARGEST_VALUE)).unwrap_or(0);
    // SAFETY: `value` is a live array that is at least as long as `length` says, which the call writes.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            option.level,
            option.option,
            value.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(value.get(..length as usize).is_some_and(|found| is_same(found, &option.value)))
}

/// Returns whether two values are the same. Some options return fewer bytes than are set; all are little-endian
/// numbers, or strings with zeros after them.
fn is_same(found: &[u8], wanted: &[u8]) -> bool {
    let (shorter, longer) = if found.len() < wanted.len() { (found, wanted) } else { (wanted, found) };
    longer.starts_with(shorter) && longer[shorter.len()..].iter().all(|&byte| byte == 0)
}

/// Sets an option, unless the socket has its value.
fn set_option(socket: &OwnedFd, option: &SocketOption) -> Result<()> {
    if option.is_readable && matches!(has(socket, option), Ok(true)) {
        return Ok(());
    }
    set(socket, option.level, option.option, &option.value)?;
    if option.is_readable {
        ensure!(has(socket, option)?, "the kernel takes another value");
    }
    Ok(())
}

/// Makes a process the receiver of a file's signals, in the name of the user who did.
fn restore_owner(owner: &FileOwner) -> Result<()> {
    let file = copy(owner.holder)?;
    if owner.signal != 0 {
        // SAFETY: F_SETSIG takes an integer, and no pointer.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), F_SETSIG, owner.signal) };
        ensure!(result == 0, "F_SETSIG {}: {}", owner.signal, io::Error::last_os_error());
    }
    if owner.receiver == 0 {
        return Ok(());
    }
    let receiver = OwnerEx { kind: owner.kind, pid: owner.receiver };
    let (real, effective) = owner.uids;
    // The kernel notes the user IDs of the thread that sets the receiver. The saved one stays root's.
    // SAFETY: the calls take integers, and a pointer to a live f_owner_ex.
    let (result, error) = unsafe {
        let ids = libc::syscall(libc::SYS_setresuid, real, effective, 0);
        ensure!(ids == 0, "cannot take the user ID {effective}: {}", io::Error::last_os_error());
        let result = libc::fcntl(file.as_raw_fd(), F_SETOWN_EX, &raw const receiver);
        let error = io::Error::last_os_error();
        let back = libc::syscall(libc::SYS_setresuid, 0, 0, 0);
        ensure!(back == 0, "cannot become root again: {}", io::Error::last_os_error());
        (result, error)
    };
    ensure!(result == 0, "F_SETOWN_EX {}: {error}", owner.receiver);
    Ok(())
}

/// Writes the packets into a pipe again, each by itself.
fn restore_packets(pipe: &PacketPipe) -> Result<()> {
    let end = copy(pipe.holder)?;
    let path = format!("/proc/self/fd/{}", end.as_raw_fd());
    for (bytes, is_packet) in &pipe.packets {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let writer = rustix::fs::open(&path, flags, Mode::empty()).context("cannot open the pipe")?;
        if *is_packet {
            // The flag means something else to `open`.
            rustix::fs::fcntl_setfl(&writer, OFlags::NONBLOCK | OFlags::DIRECT)
                .context("cannot keep packets apart")?;
        }
        let written = rustix::io::write(&writer, bytes)?;
        ensure!(written == bytes.len(), "it takes {written} of {} bytes", bytes.len());
    }
    Ok(())
}

/// Adds to epolls what they wait for.
///
/// An epoll knows a file by its description and the number under which it was added, which may have been closed since.
/// So each file gets this very number here, in a thread with a table of file descriptors of its own.
fn restore_epolls(epolls: &[Epoll]) -> Vec<String> {
    let numbers = || epolls.iter().flat_map(|epoll| &epoll.targets).map(|target| target.number);
    let Some(largest) = numbers().max() else { return Vec::new() };
    let result = std::thread::scope(|scope| scope.spawn(|| restore_epolls_here(epolls, largest)).join());
    match result {
        Ok(Ok(remarks)) => remarks,
        Ok(Err(error)) => vec![format!("epolls wait for nothing: {error:#}")],
        Err(_) => vec!["epolls wait for nothing: the thread that restores them has panicked".to_owned()],
    }
}

fn restore_epolls_here(epolls: &[Epoll], largest: u32) -> Result<Vec<String>> {
    /// How many file descriptors are needed besides.
    const OTHERS: u64 = 64;
    // SAFETY: unshare takes no pointers. From here on this thread has its own table of file descriptors, which goes
    // when it ends.
    let result = unsafe { libc::unshare(libc::CLONE_FILES) };
    ensure!(result == 0, "cannot copy the table of file descriptors: {}", io::Error::last_os_error());
    let (needed, limit) = (u64::from(largest) + OTHERS, getrlimit(Resource::Nofile));
    if limit.current.is_some_and(|current| current < needed) {
        let maximum = limit.maximum.map(|maximum| maximum.max(needed));
        setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum })
            .context("cannot raise the limit of file descriptors")?;
    }
    let above = c_int::try_from(largest)? + 1;
    let mut remarks = Vec::new();
    for epoll in epolls {
        let waits = match copy(epoll.holder).and_then(|file| move_up(file, above)) {
            Ok(waits) => waits,
            Err(error) => {
                remarks.push(format!("{}, an epoll, waits for nothing: {error:#}", describe(epoll.holder)));
                continue;
            }
        };
        for target in &epoll.targets {
            if let Err(error) = add_target(&waits, target, above) {
                remarks.push(format!(
                    "{}, an epoll, does not wait for {} any more: {error:#}",
                    describe(epoll.holder),
                    target.number
                ));
            }
        }
    }
    Ok(remarks)
}

/// Moves a file descriptor to a number from `least` on.
fn move_up(file: OwnedFd, least: c_int) -> Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(&file, least)?)
}

fn add_target(waits: &OwnedFd, target: &EpollEntry, above: c_int) -> Result<()> {
    // A file whose number is not above may be overwritten next.
    let file = move_up(copy(target.holder)?, above)?;
    let number = c_int::try_from(target.number)?;
    // SAFETY: dup2 takes integers. What the number was in this thread's own table is used no more: everything needed
    // is above.
    let placed = unsafe { libc::dup2(file.as_raw_fd(), number) };
    ensure!(placed == number, "cannot take the number {number}: {}", io::Error::last_os_error());
    // SAFETY: the number was just made a file descriptor, and nobody else owns it.
    let placed = unsafe { OwnedFd::from_raw_fd(placed) };
    let flags = epoll::EventFlags::from_bits_retain(target.events);
    Ok(epoll::add(waits, &placed, epoll::EventData::new_u64(target.data), flags)?)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::UdpSocket;
    use std::os::fd::AsFd as _;
    use std::time::Duration;

    use super::*;

    fn of(file: &impl std::os::fd::AsFd) -> Holder {
        let fd = file.as_fd().as_raw_fd().cast_unsigned();
        Holder { pid: std::process::id(), fd }
    }

    fn option(name: c_int, value: i32) -> SocketOption {
        let value = value.to_ne_bytes().to_vec();
        SocketOption { name: "x".to_owned(), level: libc::SOL_SOCKET, option: name, value, is_readable: true }
    }

    #[test]
    fn options_are_set_and_those_that_cannot_be_are_remarks() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let options = vec![option(libc::SO_BROADCAST, 1), option(9999, 1), option(libc::SO_RCVLOWAT, 3)];
        let settings = SocketSettings { holder: of(&socket), options, ..SocketSettings::default() };
        let mut remarks = Vec::new();
        restore_socket(&settings, &mut remarks);
        assert_eq!(remarks.len(), 1, "{remarks:?}");
        let copy = copy(of(&socket)).unwrap();
        assert!(settings.options.iter().step_by(2).all(|option| has(&copy, option).unwrap()));
    }

    #[test]
    fn a_filter_keeps_packets_away_and_one_that_cannot_be_set_closes_the_socket() {
        let accept = [6_u16.to_le_bytes().to_vec(), vec![0, 0], 0xffff_u32.to_le_bytes().to_vec()].concat();
        let drop = [6, 0, 0, 0, 0, 0, 0, 0].to_vec();
        // Which program a socket gets, on which interface, and whether a datagram arrives.
        for (program, interface, arrives) in [
            (Some(accept.clone()), None, true),
            (Some(drop), None, false),
            (Some(accept), Some("no-such-interface"), false),
            (Some(vec![0xff; 8]), None, false),
        ] {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            let fails = interface.is_some() || program.as_ref().is_some_and(|program| program[0] == 0xff);
            let interface = interface.map(str::to_owned);
            let restrictions = SocketRestrictions { filter: program, is_locked: false, interface };
            let settings = SocketSettings { holder: of(&socket), restrictions, ..SocketSettings::default() };
            let mut remarks = Vec::new();
            restore_socket(&settings, &mut remarks);
            assert_eq!(!remarks.is_empty(), fails, "{remarks:?}");
            let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
            sender.send_to(b"x", socket.local_addr().unwrap()).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(if arrives { 20_000 } else { 200 }))).unwrap();
            let received = socket.recv(&mut [0; 9]).is_ok_and(|length| length > 0);
            assert_eq!(received, arrives, "{settings:?}");
        }
    }

    #[test]
    fn an_epoll_waits_for_a_file_under_a_number_that_was_closed() {
        let (mut reader, mut writer) = io::pipe().unwrap();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        // Numbers that this program has for something else, and that it does not have.
        let entries = [1, 700].map(|number| EpollEntry {
            holder: of(&reader),
            number,
            events: libc::EPOLLIN.cast_unsigned(),
            data: u64::from(number),
        });
        let gone = EpollEntry { holder: Holder { pid: std::process::id(), fd: 9999 }, ..entries[0] };
        let targets = vec![entries[0], gone, entries[1]];
        let remarks = restore_epolls(&[Epoll { holder: of(&epoll), targets }]);
        assert_eq!(remarks.len(), 1, "{remarks:?}");
        writer.write_all(b"x").unwrap();
        let mut events = Vec::with_capacity(9);
        let patience = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&patience)).unwrap();
        let mut data: Vec<_> = events.iter().map(|event| event.data.u64()).collect();
        data.sort_unstable();
        assert_eq!(data, [1, 700]);
        // Its own files are what they were.
        reader.read_exact(&mut [0]).unwrap();
        assert!(io::stdout().as_fd().try_clone_to_owned().is_ok());
    }

    #[test]
    fn packets_are_read_one_by_one_and_other_bytes_together() {
        let (read, _write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let part = |bytes: &[u8], is_packet| (bytes.to_vec(), is_packet);
        let packets = vec![part(b"ab", true), part(b"cd", true), part(b"ef", false), part(b"gh", false)];
        restore_packets(&PacketPipe { holder: of(&read), packets }).unwrap();
        let next = || {
            let mut bytes = [0; 9];
            let length = rustix::io::read(&read, &mut bytes).unwrap();
            String::from_utf8_lossy(&bytes[..length]).into_owned()
        };
        assert_eq!([next(), next(), next()], ["ab", "cd", "efgh"]);
    }

    #[test]
    fn a_file_gets_its_receiver_back() {
        let (read, _write) = io::pipe().unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        let uid = rustix::process::getuid().as_raw();
        if uid != 0 {
            orrery_testing::skipped!("user IDs: requires root");
            return;
        }
        let owner = FileOwner { holder: of(&read), receiver: pid, kind: 1, signal: 35, uids: (65534, 65534) };
        restore_owner(&owner).unwrap();
        // SAFETY: F_GETOWN and F_GETSIG (11) take no pointer.
        let found =
            unsafe { (libc::fcntl(read.as_raw_fd(), libc::F_GETOWN), libc::fcntl(read.as_raw_fd(), 11)) };
        assert_eq!(found, (pid, 35));
        assert_eq!(rustix::process::geteuid().as_raw(), 0);
    }

    #[test]
    fn values_are_the_same_where_only_zeros_follow() {
        assert!(is_same(b"reno", b"reno\0\0") && is_same(&[1, 0, 0, 0], &[1]));
        assert!(!is_same(&[1], &[1, 1]) && !is_same(&[1, 2], &[1]));
    }
}
