//! How updates travel: a socket that keeps messages apart, made before the fork (unix(7), SOCK_SEQPACKET).
//!
//! What was sent is out of the sender's reach: small updates are copied into the kernel, large ones go as a memfd that
//! is sealed against any change before main looks into it (F_SEAL_WRITE in fcntl(2)). A message arrives whole or not at
//! all, and what was sent before a crash still arrives.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use orrery_sys::descriptors::{self, VerifiedFd};
use orrery_sys::scm;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};

/// Larger updates go as a memfd.
pub(crate) const INLINE: usize = 32 << 10;
const HEAD: usize = 24;
const MAGIC: u64 = 0x6f72_6269_745f_7570;

/// Both ends of the socket. Each side keeps both: main since later instances inherit from it, the orbit because
/// closing takes time.
#[derive(Debug)]
pub(crate) struct UpdateSocket {
    main: VerifiedFd,
    /// A task may close it, too.
    orbit: VerifiedFd,
}

/// A message that arrived.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// The records of an update of this call.
    Update { call: u64, bytes: Vec<u8> },
    /// An update of this call, for which there is no room.
    NoRoom { call: u64 },
    /// Something that is no update.
    Refused { call: u64, reason: String },
}

impl UpdateSocket {
    pub(crate) fn new() -> orrery_sys::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let (main, orbit) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|e| orrery_sys::Error::new("socketpair", 0, e))?;
        let verified =
            |fd| VerifiedFd::new(descriptors::raise(fd)).map_err(|e| orrery_sys::Error::new("fstat", 0, e));
        Ok(Self { main: verified(main)?, orbit: verified(orbit)? })
    }

    /// Returns the orbit's end.
    pub(crate) fn orbit_end(&self) -> BorrowedFd<'_> {
        self.orbit.unverified()
    }

    /// In the orbit: sends. Where the socket is full, `full` is called (to wake main), then it waits. Fails with EBADF where
    /// the task has closed the socket.
    pub(crate) fn send(&self, call: u64, records: &[u8], full: impl Fn()) -> Result<(), Errno> {
        let socket = self.orbit.verified()?;
        let mut head = [0; HEAD];
        head[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        head[8..16].copy_from_slice(&call.to_ne_bytes());
        head[16..].copy_from_slice(&(records.len() as u64).to_ne_bytes());
        let file = if records.len() > INLINE { Some(sealed(records)?) } else { None };
        let parts = [IoSlice::new(&head), IoSlice::new(if file.is_some() { &[] } else { records })];
        let file = file.as_ref().map(AsFd::as_fd);
        loop {
            match scm::send(socket, &parts, file.as_slice(), SendFlags::DONTWAIT) {
                Ok(_) => return Ok(()),
                // ETOOMANYREFS: too many files are under way.
                Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::NOBUFS) => {
                    full();
                    let mut one = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
                    let sleep = rustix::time::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
                    let _ = poll(&mut one, Some(&sleep));
                }
                Err(errno) => return Err(errno),
            }
        }
    }

    /// In main: what has arrived, if anything. Never waits. `room` returns for how many bytes of updates of a call there is
    /// room; what is larger is left unread.
    pub(crate) fn receive(
        &self,
        buffer: &mut Vec<u8>,
        largest: usize,
        room: impl FnOnce(u64) -> usize,
    ) -> Option<Arrival> {
        buffer.resize(HEAD + INLINE, 0);
        let socket = self.main.verified().ok()?;
        let mut received = scm::receive(socket, buffer, 1, RecvFlags::DONTWAIT).ok()?;
        let bytes = &buffer[..received.length];
        let word = |at: usize| -> u64 {
            bytes.get(at..at + 8).and_then(|w| w.try_into().ok()).map_or(0, u64::from_ne_bytes)
        };
        let (call, claimed) = (word(8), usize::try_from(word(16)).unwrap_or(usize::MAX));
        let refuse = |reason: &str| Some(Arrival::Refused { call, reason: reason.to_owned() });
        if received.length == 0 {
            // The peer's end is never closed while we hold it, so this is an empty message.
            return refuse("it is empty");
        }
        if word(0) != MAGIC || received.length < HEAD {
            return refuse("its head makes no sense");
        }
        if claimed > largest {
            return Some(Arrival::Refused {
                call,
                reason: format!("it has {claimed} bytes, and {largest} are the most that is taken"),
            });
        }
        if claimed > room(call) {
            return Some(Arrival::NoRoom { call });
        }
        match received.fds.pop() {
            None if bytes.len() - HEAD == claimed => {
                Some(Arrival::Update { call, bytes: bytes[HEAD..].to_vec() })
            }
            None => refuse("it is cut off"),
            Some(file) => match read_sealed(&file, claimed) {
                Ok(bytes) => Some(Arrival::Update { call, bytes }),
                Err(reason) => refuse(reason),
            },
        }
    }
}

/// A file with these bytes that nobody can change any more.
fn sealed(bytes: &[u8]) -> Result<OwnedFd, Errno> {
    let file = rustix::fs::memfd_create("orrery-update", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut written = 0;
    while written < bytes.len() {
        match rustix::io::write(&file, &bytes[written..]) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(count) => written += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    rustix::fs::fcntl_add_seals(&file, all_seals())?;
    Ok(file)
}

fn all_seals() -> SealFlags {
    SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

fn read_sealed(file: &OwnedFd, len: usize) -> Result<Vec<u8>, &'static str> {
    let seals = rustix::fs::fcntl_get_seals(file).map_err(|_| "its file is no memory file")?;
    if !seals.contains(all_seals()) {
        return Err("its file is not sealed");
    }
    let size = rustix::fs::fstat(file).map_err(|_| "its file cannot be asked")?.st_size;
    if usize::try_from(size) != Ok(len) {
        return Err("its file has another size than it says");
    }
    let mut bytes = vec![0; len];
    let mut read = 0;
    while read < len {
        match rustix::io::pread(file, &mut bytes[read..], read as u64) {
            Ok(0) => return Err("its file is shorter than it says"),
            Ok(count) => read += count,
            Err(Errno::INTR) => {}
            Err(_) => return Err("its file cannot be read"),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_updates_arrive_in_order() {
        let update_socket = UpdateSocket::new().unwrap();
        let mut buffer = Vec::new();
        assert_eq!(update_socket.receive(&mut buffer, 1 << 30, |_| usize::MAX), None);
        for len in [0, 5, INLINE, INLINE + 1, 3 << 20] {
            let bytes: Vec<u8> = (0..len).map(|i| u8::try_from(i % 251).unwrap()).collect();
            update_socket.send(7, &bytes, || panic!("there is room")).unwrap();
            assert_eq!(
                update_socket.receive(&mut buffer, 1 << 30, |_| usize::MAX),
                Some(Arrival::Update { call: 7, bytes })
            );
        }
    }

    #[test]
    fn a_full_socket_is_waited_for() {
        let update_socket = UpdateSocket::new().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for call in 0..100 {
                    update_socket.send(call, &[1; INLINE], || ()).unwrap();
                }
            });
            let (mut buffer, mut next) = (Vec::new(), 0);
            while next < 100 {
                if let Some(Arrival::Update { call, .. }) =
                    update_socket.receive(&mut buffer, 1 << 20, |_| usize::MAX)
                {
                    assert_eq!(call, next);
                    next += 1;
                }
            }
        });
    }

    #[test]
    fn what_is_no_update_is_refused() {
        let update_socket = UpdateSocket::new().unwrap();
        let mut buffer = Vec::new();
        let mut refused = |what: &str| match update_socket.receive(&mut buffer, 1 << 20, |_| usize::MAX) {
            Some(Arrival::Refused { reason, .. }) => reason,
            other => panic!("{what}: {other:?}"),
        };
        rustix::io::write(update_socket.orbit_end(), b"nonsense").unwrap();
        refused("no head");
        let mut head = Vec::new();
        head.extend(MAGIC.to_ne_bytes());
        head.extend(1_u64.to_ne_bytes());
        head.extend(100_u64.to_ne_bytes());
        head.extend([0; 99]);
        rustix::io::write(update_socket.orbit_end(), &head).unwrap();
        assert!(refused("cut").contains("cut off"));
        update_socket.send(1, &vec![0; 2 << 20], || ()).unwrap();
        assert!(refused("large").contains("2097152"));

        // A file that the sender could still change.
        let file = rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::io::write(&file, &[0; 100]).unwrap();
        let parts = [IoSlice::new(&head[..HEAD])];
        scm::send(update_socket.orbit_end(), &parts, &[file.as_fd()], SendFlags::empty()).unwrap();
        assert!(refused("open").contains("not sealed"));
    }
}
