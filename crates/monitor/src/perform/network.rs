//! Connecting, binding and sending to addresses.
//!
//! The socket is the program's own: the monitor fetches a descriptor of it and makes the call on it with the address
//! that it copied. A Unix socket's path is resolved like any other, and reached by the descriptor that came of it.
//!
//! What is decided about is the address that the kernel will use, which is not always the one that is written:
//!
//! | written | used by the kernel |
//! |---|---|
//! | `AF_UNSPEC` with an IPv4 address: bind(2), and messages of an IPv4 socket | that IPv4 address |
//! | `AF_UNSPEC` in connect(2) | none: the connection is undone |
//! | no address (`0.0.0.0`, `::`, `::ffff:0.0.0.0`) as a destination | the socket's own address, or the loopback address |
//! | listen(2) on an internet socket that is not bound | any free port at the socket's address, usually all addresses |
//! | bind(2) of a Unix socket to nothing but the family | a free abstract name |
//!
//! Who receives a message of a Unix socket may ask who sent it (`SO_PASSCRED`, `SO_PASSPIDFD`; unix(7)). That is the
//! program, which the kernel takes from a monitor alone that has `CAP_SYS_ADMIN`; from others it is the monitor, with
//! the program's ids.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::SocketType;
use syscalls::{Sysno, syscall};

use super::stat::by_number;
use crate::answer::{Answer, Outcome};
use crate::caller::Status;
use crate::credentials;
use crate::file::{DirectoryEntry, Location};
use crate::landlock;
use crate::log::Event;
use crate::memory;
use crate::policy::Rights;
use crate::policy::network::{Address, Transport, described, permits};
use crate::syscall::{Syscall, exists};
use orrery_sys::errno;

/// `struct sockaddr_storage` (socket(7)).
const LONGEST: usize = 128;
/// Where a Unix socket's path starts in its address.
const PATH: usize = 2;
/// As many parts as a message may have (IOV_MAX).
const PARTS: usize = 1024;
/// As much of a message as is sent at a time: of streams the rest is sent by the caller's next call.
const MOST: usize = 4 << 20;
/// As long as control data may be.
const CONTROL: usize = 64 << 10;

/// An address, as the kernel takes it, with what keeps it meaning the same.
struct Checked {
    bytes: Vec<u8>,
    _held: Option<OwnedFd>,
}

fn transport(socket: &OwnedFd) -> Option<Transport> {
    match rustix::net::sockopt::socket_type(socket).ok()? {
        SocketType::STREAM => Some(Transport::Tcp),
        SocketType::DGRAM => Some(Transport::Udp),
        _ => None,
    }
}

fn half(bytes: &[u8], at: usize) -> Result<[u8; 2], Errno> {
    bytes.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).ok_or(Errno::INVAL)
}

fn is_unspecified(bytes: &[u8]) -> bool {
    half(bytes, 0).is_ok_and(|family| i32::from(u16::from_ne_bytes(family)) == libc::AF_UNSPEC)
}

/// What an address is for: the kernel does not read it alike everywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Connect,
    Bind,
    Message,
}

/// The family of a socket (socket(7)), if it is known.
fn domain(socket: &OwnedFd) -> Option<i32> {
    rustix::net::sockopt::socket_domain(socket).ok().map(|family| i32::from(family.as_raw()))
}

/// The internet address in a `struct sockaddr_in`, without regard to its family.
fn version_4(bytes: &[u8], socket: &OwnedFd) -> Result<Address, Errno> {
    let ip: [u8; 4] = bytes.get(4..8).and_then(|bytes| bytes.try_into().ok()).ok_or(Errno::INVAL)?;
    let port = u16::from_be_bytes(half(bytes, 2)?);
    Ok(Address::Internet(transport(socket), IpAddr::V4(Ipv4Addr::from(ip)), port))
}

/// The internet or other address that bytes mean to the kernel; `None` for a Unix socket's path, which has to be
/// resolved.
fn address(bytes: &[u8], socket: &OwnedFd, purpose: Use) -> Result<Option<Address>, Errno> {
    let family = u16::from_ne_bytes(half(bytes, 0)?);
    Ok(Some(match i32::from(family) {
        libc::AF_UNSPEC => match (purpose, domain(socket)) {
            // It undoes a connection; a message of an IPv6 socket goes where the socket is connected to.
            (Use::Connect, _) | (Use::Message, Some(libc::AF_INET6)) => Address::Unspecified,
            // Too short for the kernel, too.
            (Use::Bind | Use::Message, _) => version_4(bytes, socket)?,
        },
        // The kernel's own services, which no policy lists. Who may change what by them is a question of capabilities.
        libc::AF_NETLINK => Address::Unspecified,
        libc::AF_INET => version_4(bytes, socket)?,
        libc::AF_INET6 => {
            let ip: [u8; 16] =
                bytes.get(8..24).and_then(|bytes| bytes.try_into().ok()).ok_or(Errno::INVAL)?;
            let port = u16::from_be_bytes(half(bytes, 2)?);
            Address::Internet(transport(socket), IpAddr::V6(Ipv6Addr::from(ip)), port)
        }
        libc::AF_UNIX if bytes.len() == PATH => match purpose {
            // The kernel picks a name, which nobody can know beforehand.
            Use::Bind => Address::Abstract(Vec::new()),
            Use::Connect | Use::Message => return Err(Errno::INVAL),
        },
        libc::AF_UNIX if bytes[PATH] == 0 => Address::Abstract(bytes[PATH + 1..].to_vec()),
        libc::AF_UNIX => return Ok(None),
        _ => Address::Other(family),
    }))
}

/// Where the kernel sends what is sent to no address: to the socket's own, which is the loopback address where the
/// socket has none (`ip_route_output_key_hash`, `tcp_v6_connect`). With `bytes` changed to say so.
fn destination(address: Address, bytes: &mut [u8], socket: &OwnedFd) -> Address {
    let Address::Internet(transport, ip, port) = address else { return address };
    if !ip.to_canonical().is_unspecified() {
        return address;
    }
    let own = own_address(socket).map(|own| own.ip()).filter(|own| !own.to_canonical().is_unspecified());
    let real = own.map_or_else(
        || match ip.to_canonical() {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        },
        |own| own.to_canonical(),
    );
    match (ip, real) {
        (IpAddr::V4(_), IpAddr::V4(real)) => {
            if let Some(place) = bytes.get_mut(4..8) {
                place.copy_from_slice(&real.octets());
            }
        }
        (_, real) => {
            let octets = match real {
                IpAddr::V4(real) => real.to_ipv6_mapped().octets(),
                IpAddr::V6(real) => real.octets(),
            };
            if let Some(place) = bytes.get_mut(8..24) {
                place.copy_from_slice(&octets);
            }
        }
    }
    Address::Internet(transport, real, port)
}

/// The internet address that a socket has; `None` where it is of another family.
fn own_address(socket: &OwnedFd) -> Option<SocketAddr> {
    rustix::net::getsockname(socket).ok()?.try_into().ok()
}

fn socket_path(bytes: &[u8]) -> &[u8] {
    let path = &bytes[PATH..];
    &path[..path.iter().position(|&byte| byte == 0).unwrap_or(path.len())]
}

fn unix_address(path: &[u8]) -> Vec<u8> {
    let family = u16::try_from(libc::AF_UNIX).unwrap_or(0).to_ne_bytes();
    [family.as_slice(), path, b"\0"].concat()
}

impl Syscall<'_> {
    fn address_bytes(&self, pointer: u64, length: u64) -> Result<Vec<u8>, Errno> {
        let length = usize::try_from(length).ok().filter(|length| *length <= LONGEST).ok_or(Errno::INVAL)?;
        let mut bytes = vec![0; length];
        memory::read(self.notification.thread, pointer, &mut bytes)?;
        Ok(bytes)
    }

    /// Whether the policy lets the program reach an address, and the address that is sure to be it.
    fn reachable(&self, bytes: Vec<u8>, socket: &OwnedFd, purpose: Use) -> Result<Checked, Errno> {
        self.ask_about_autobind(socket)?;
        let mut bytes = bytes;
        let meant = |bytes: &mut [u8]| {
            let address = address(bytes, socket, purpose)?;
            Ok::<_, Errno>(address.map(|address| destination(address, bytes, socket)))
        };
        let named = meant(&mut bytes)?.unwrap_or_else(|| Address::Path(socket_path(&bytes).to_vec()));
        let new = self.redirection(&named)?;
        let redirected = new.is_some();
        let mut bytes = new.unwrap_or(bytes);
        // An IPv6 socket may become one of IPv4 (IPV6_ADDRFORM), which would take this for an address.
        if purpose == Use::Message && is_unspecified(&bytes) && domain(socket) == Some(libc::AF_INET6) {
            return Ok(Checked { bytes: Vec::new(), _held: None });
        }
        if let Some(address) = meant(&mut bytes)? {
            self.permit_connect(&address, redirected)?;
            return Ok(Checked { bytes, _held: None });
        }
        let found = self.find(libc::AT_FDCWD, socket_path(&bytes), true)?;
        let Location::Path(path) = &found.location else { return Err(Errno::ACCESS) };
        let own = self.state.policy.trees.owns(path) && self.state.made.contain(path);
        if !own || self.state.policy.learning {
            self.permit_connect(&Address::Path(path.clone()), redirected)?;
        }
        let path = by_number(&found.file);
        Ok(Checked {
            bytes: unix_address(path.strip_suffix(b"\0").unwrap_or(&path)),
            _held: Some(found.file),
        })
    }

    /// A Unix socket for datagrams that wants to receive credentials (`SO_PASSCRED`) gets a name when it first sends
    /// something, and with it becomes reachable.
    fn ask_about_autobind(&self, socket: &OwnedFd) -> Result<(), Errno> {
        let nameless = || own_address_length(socket) == Some(PATH);
        let datagrams = || rustix::net::sockopt::socket_type(socket) == Ok(SocketType::DGRAM);
        if domain(socket) == Some(libc::AF_UNIX) && datagrams() && nameless() && is_told_of_senders(socket) {
            self.permit_bind(&Address::Abstract(Vec::new()))?;
        }
        Ok(())
    }

    fn permit_connect(&self, address: &Address, redirected: bool) -> Result<(), Errno> {
        self.ask_rules_of_address(address, redirected)?;
        let permitted = permits(&self.state.policy.network.connect, address);
        let recorded = self.state.policy.learning || self.state.policy.audited && permitted;
        if recorded && *address != Address::Unspecified {
            self.state.recorder.connect(address);
        }
        if permitted {
            return Ok(());
        }
        self.refuse_or_ask(&Event::Address { text: described(address) })
    }

    fn permit_bind(&self, address: &Address) -> Result<(), Errno> {
        self.ask_rules_of_address(address, false)?;
        let permitted = permits(&self.state.policy.network.bind, address);
        let recorded = self.state.policy.learning || self.state.policy.audited && permitted;
        if recorded && *address != Address::Unspecified {
            self.state.recorder.bind(address);
        }
        if permitted {
            return Ok(());
        }
        self.refuse_or_ask(&Event::Address { text: described(address) })
    }
}

/// Makes a call that may wait: at once where the socket does not wait, else in a thread of its own.
fn waiting(
    socket: OwnedFd,
    never: bool,
    call: impl Fn(&OwnedFd) -> Result<usize, Errno> + Send + 'static,
) -> Outcome {
    let never = never || rustix::fs::fcntl_getfl(&socket)?.contains(OFlags::NONBLOCK);
    let value = |count: usize| Answer::Value(i64::try_from(count).unwrap_or(i64::MAX));
    if never {
        return call(&socket).map(value);
    }
    Ok(Answer::Later(Box::new(move || call(&socket).map(value))))
}

pub(super) fn connect(syscall: &Syscall<'_>) -> Outcome {
    let bytes = syscall.address_bytes(syscall.argument(1), u64::from(syscall.unsigned(2)))?;
    let socket = syscall.caller()?.descriptor(syscall.int(0))?;
    let address = syscall.reachable(bytes, &socket, Use::Connect)?;
    syscall.still_waits()?;
    waiting(socket, false, move |socket| {
        let Checked { bytes, .. } = &address;
        // SAFETY: the address is as long as stated.
        unsafe { syscall!(Sysno::connect, socket.as_raw_fd(), bytes.as_ptr(), bytes.len()) }.map_err(errno)
    })
}

pub(super) fn bind(syscall: &Syscall<'_>) -> Outcome {
    let bytes = syscall.address_bytes(syscall.argument(1), u64::from(syscall.unsigned(2)))?;
    let socket = syscall.caller()?.descriptor(syscall.int(0))?;
    if let Some(address) = address(&bytes, &socket, Use::Bind)? {
        syscall.permit_bind(&address)?;
        syscall.still_waits()?;
        // SAFETY: the address is as long as stated.
        unsafe { syscall!(Sysno::bind, socket.as_raw_fd(), bytes.as_ptr(), bytes.len()) }.map_err(errno)?;
        return Ok(Answer::Value(0));
    }
    let place = syscall.entry(libc::AT_FDCWD, socket_path(&bytes))?;
    let own = syscall.state.policy.trees.owns(&place.path) && !exists(&place);
    if !own || syscall.state.policy.learning {
        syscall.permit_bind(&Address::Path(place.path.clone()))?;
    }
    if syscall.state.policy.learning {
        syscall.check_entry(&place, Rights::CREATE)?;
    }
    syscall.still_waits()?;
    syscall.assume_umask()?;
    if !bind_as_written(syscall, &socket, &place, &bytes)? {
        bind_in(&socket, &place)?;
    }
    syscall.made(&place.path, own);
    Ok(Answer::Value(0))
}

/// Binds to the path that the program wrote, so that the socket is known by it, as getsockname(2) tells. The kernel
/// reads the path once more: so this is done by a thread that a Landlock domain lets make sockets in that directory and
/// nowhere else. Returns whether that could be.
fn bind_as_written(
    syscall: &Syscall<'_>,
    socket: &OwnedFd,
    place: &DirectoryEntry,
    bytes: &[u8],
) -> Result<bool, Errno> {
    let path = socket_path(bytes);
    let directory = crate::perform::directory::parent(&place.path);
    // The domain lets sockets be made in directories beneath, too.
    if path == place.name
        || syscall.state.policy.trees.differ_beneath(directory)
        || syscall.keeps_names(directory)
    {
        return Ok(false);
    }
    let start = if path.first() == Some(&b'/') { None } else { Some(syscall.directory(libc::AT_FDCWD)?) };
    let bind = || {
        landlock::sockets_only_in(&place.directory)?;
        if let Some(start) = &start {
            rustix::process::fchdir(start)?;
        }
        // SAFETY: the address is as long as stated.
        unsafe { syscall!(Sysno::bind, socket.as_raw_fd(), bytes.as_ptr(), bytes.len()) }.map_err(errno)
    };
    // It has the credentials, the umask and the current directory of this one.
    let bound = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(128 << 10).spawn_scoped(scope, bind);
        thread.map_err(|_| Errno::AGAIN).and_then(|thread| thread.join().unwrap_or(Err(Errno::IO)))
    });
    if start.is_some() {
        rustix::process::chdir("/")?;
    }
    match bound {
        Ok(_) => Ok(true),
        Err(Errno::ADDRINUSE) => Err(Errno::ADDRINUSE),
        // The path is another one for the monitor (/proc/self), or there is no Landlock.
        Err(_) => Ok(false),
    }
}

/// Binds to a name in a directory that is held fast, from within it: there is no bindat(2). The thread has a current
/// directory of its own.
fn bind_in(socket: &OwnedFd, place: &DirectoryEntry) -> Outcome {
    let bytes = unix_address(&place.name);
    rustix::process::fchdir(&place.directory)?;
    // SAFETY: the address is as long as stated.
    let bound = unsafe { syscall!(Sysno::bind, socket.as_raw_fd(), bytes.as_ptr(), bytes.len()) };
    let back = rustix::process::chdir("/");
    bound.map_err(errno)?;
    back?;
    Ok(Answer::Value(0))
}

/// Waiting for connections. A socket that was bound may: its address was asked about then. One that was not gets a port
/// of the kernel's choice.
pub(super) fn listen(syscall: &Syscall<'_>) -> Outcome {
    let socket = syscall.caller()?.descriptor(syscall.int(0))?;
    match domain(&socket) {
        Some(libc::AF_INET | libc::AF_INET6) => {
            let own = own_address(&socket).ok_or(Errno::INVAL)?;
            // A port that the kernel chose for a connection under way goes when that fails, even after this look.
            let bound = own.port() != 0 && is_at_rest(&socket);
            if !bound {
                syscall.permit_bind(&Address::Internet(transport(&socket), own.ip(), 0))?;
            }
        }
        // Its name was asked about, unless the kernel picked it.
        Some(libc::AF_UNIX) => {
            if is_autobound(&socket) {
                syscall.permit_bind(&Address::Abstract(Vec::new()))?;
            }
        }
        _ => syscall.permit_bind(&Address::Other(0))?,
    }
    syscall.still_waits()?;
    // SAFETY: the call takes numbers only, and the socket is open.
    unsafe { syscall!(Sysno::listen, socket.as_raw_fd(), syscall.int(1)) }.map_err(errno)?;
    Ok(Answer::Value(0))
}

/// Whether a stream socket is neither connected nor about to be (`TCP_CLOSE` or `TCP_LISTEN` of tcp(7)).
fn is_at_rest(socket: &OwnedFd) -> bool {
    const CLOSE: u8 = 7;
    const LISTEN: u8 = 10;
    let mut state = [0_u8; 1];
    let mut length: libc::socklen_t = 1;
    // SAFETY: the kernel writes as much as the length says, the first byte of `struct tcp_info`.
    let asked = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            state.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    asked == 0 && matches!(state[0], CLOSE | LISTEN)
}

/// The bytes of a socket's own address.
fn own_address_bytes(socket: &OwnedFd) -> Option<Vec<u8>> {
    let mut bytes = vec![0_u8; LONGEST];
    let mut length = libc::socklen_t::try_from(LONGEST).ok()?;
    // SAFETY: the kernel writes as much as the length says.
    let asked = unsafe { libc::getsockname(socket.as_raw_fd(), bytes.as_mut_ptr().cast(), &raw mut length) };
    bytes.truncate(usize::try_from(length).ok()?);
    (asked == 0).then_some(bytes)
}

fn own_address_length(socket: &OwnedFd) -> Option<usize> {
    own_address_bytes(socket).map(|bytes| bytes.len())
}

/// Whether a Unix socket's name looks like one that the kernel picks: five digits of base 16 (unix(7)).
fn is_autobound(socket: &OwnedFd) -> bool {
    own_address_bytes(socket).is_some_and(|bytes| {
        let name = bytes.get(PATH..).unwrap_or_default();
        name.len() == 6 && name[0] == 0 && name[1..].iter().all(u8::is_ascii_hexdigit)
    })
}

/// Whether a Unix socket asks for its senders' credentials or processes.
fn is_told_of_senders(socket: &OwnedFd) -> bool {
    const SO_PASSPIDFD: i32 = 76;
    [libc::SO_PASSCRED, SO_PASSPIDFD].into_iter().any(|option| {
        let mut value = 0_i32;
        let mut length: libc::socklen_t = 4;
        // SAFETY: the kernel writes a number of as many bytes as the length says.
        let asked = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw mut value).cast(),
                &raw mut length,
            )
        };
        asked == 0 && value != 0
    })
}

/// Options that send packets elsewhere first than where their address says: source routes of IPv4 (`IP_OPTIONS`) and
/// routing headers of IPv6. The filter knows the number of the option, the level is looked at here; both are values, so
/// the call may go on.
pub(super) fn setsockopt(syscall: &Syscall<'_>) -> Outcome {
    if !is_route(syscall.int(1), syscall.int(2)) {
        return Ok(Answer::GoOn);
    }
    syscall.refuse(&Event::Call { reason: "packets would take a route that no policy lists" });
    Err(Errno::PERM)
}

/// Options of sockets that are asked about, of any level: see [`setsockopt`].
pub(crate) const ROUTES: [i32; 3] = [IP_OPTIONS, IPV6_2292PKTOPTIONS, IPV6_RTHDR];
/// `IP_RETOPTS`, by which a single message has options, is another number.
const IP_OPTIONS: i32 = 4;
const IP_RETOPTS: i32 = 7;
const IPV6_2292RTHDR: i32 = 5;
const IPV6_2292PKTOPTIONS: i32 = 6;
const IPV6_RTHDR: i32 = 57;

fn is_route(level: i32, option: i32) -> bool {
    match level {
        libc::IPPROTO_IP => matches!(option, IP_OPTIONS | IP_RETOPTS),
        libc::IPPROTO_IPV6 => matches!(option, IPV6_2292RTHDR | IPV6_2292PKTOPTIONS | IPV6_RTHDR),
        _ => false,
    }
}

/// A message, copied.
struct Message {
    address: Option<Checked>,
    data: Vec<u8>,
    control: Vec<u8>,
    /// The files whose descriptors the control data has.
    _files: Vec<OwnedFd>,
    /// Of a Unix socket: who sends it.
    sender: Option<libc::ucred>,
    flags: i32,
}

impl Message {
    fn send(&self, socket: &OwnedFd) -> Result<usize, Errno> {
        let Some(sender) = &self.sender else { return self.send_with(socket, &self.control) };
        let control = [self.control.as_slice(), &sent_by(sender)].concat();
        match credentials::with(NAMES_SENDERS, || self.send_with(socket, &control)) {
            Err(Errno::PERM) => self.send_with(socket, &self.control),
            result => result,
        }
    }

    fn send_with(&self, socket: &OwnedFd, control: &[u8]) -> Result<usize, Errno> {
        let part = libc::iovec { iov_base: self.data.as_ptr().cast_mut().cast(), iov_len: self.data.len() };
        let address = self.address.as_ref().map(|address| address.bytes.as_slice()).unwrap_or_default();
        // SAFETY: the structure consists of numbers and pointers, for which zero is good.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_name =
            if address.is_empty() { std::ptr::null_mut() } else { address.as_ptr().cast_mut().cast() };
        header.msg_namelen = u32::try_from(address.len()).unwrap_or(0);
        header.msg_iov = (&raw const part).cast_mut();
        header.msg_iovlen = 1;
        header.msg_control = control.as_ptr().cast_mut().cast();
        header.msg_controllen = control.len();
        // The monitor is not to die of a broken pipe.
        let flags = self.flags | libc::MSG_NOSIGNAL;
        // SAFETY: everything that the header points to lives, and is as long as stated.
        unsafe { syscall!(Sysno::sendmsg, socket.as_raw_fd(), &raw const header, flags) }.map_err(errno)
    }
}

/// What the kernel wants of whom sends in the name of another process, or of other ids (unix(7)): `CAP_SETGID`,
/// `CAP_SETUID`, `CAP_SYS_ADMIN`.
const NAMES_SENDERS: u64 = 1 << 6 | 1 << 7 | 1 << 21;

/// Returns control data that names a message's sender.
fn sent_by(sender: &libc::ucred) -> Vec<u8> {
    let length = HEADER + size_of::<libc::ucred>();
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend([libc::SOL_SOCKET, libc::SCM_CREDENTIALS].into_iter().flat_map(i32::to_ne_bytes));
    bytes.extend(sender.pid.to_ne_bytes());
    bytes.extend([sender.uid, sender.gid].into_iter().flat_map(u32::to_ne_bytes));
    bytes.resize(length.next_multiple_of(size_of::<usize>()), 0);
    bytes
}

/// Flags that ask for a connection besides (`MSG_FASTOPEN`), or that tie memory which is not the monitor's
/// (`MSG_ZEROCOPY`).
const UNWANTED: i32 = libc::MSG_FASTOPEN | libc::MSG_ZEROCOPY;

fn send(syscall: &Syscall<'_>, socket: OwnedFd, message: Message) -> Outcome {
    if message.flags & UNWANTED != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    syscall.still_waits()?;
    let (never, quiet) = (message.flags & libc::MSG_DONTWAIT != 0, message.flags & libc::MSG_NOSIGNAL != 0);
    let caller = std::sync::Arc::clone(syscall.caller()?);
    waiting(socket, never, move |socket| {
        message.send(socket).inspect_err(|error| {
            if *error == Errno::PIPE && !quiet {
                let _ = rustix::process::pidfd_send_signal(&caller, rustix::process::Signal::PIPE);
            }
        })
    })
}

pub(super) fn sendto(syscall: &Syscall<'_>) -> Outcome {
    let socket = syscall.caller()?.descriptor(syscall.int(0))?;
    let address = match syscall.argument(4) {
        0 => None,
        pointer => {
            let bytes = syscall.address_bytes(pointer, u64::from(syscall.unsigned(5)))?;
            Some(syscall.reachable(bytes, &socket, Use::Message)?)
        }
    };
    let length = usize::try_from(syscall.argument(2)).map_err(|_| Errno::INVAL)?;
    let mut data = vec![0; bounded(length, &socket)?];
    memory::read(syscall.notification.thread, syscall.argument(1), &mut data)?;
    let sender = sender(syscall, &socket, None)?;
    let message =
        Message { address, data, control: Vec::new(), _files: Vec::new(), sender, flags: syscall.int(3) };
    send(syscall, socket, message)
}

/// As much as is sent at a time; a datagram is sent whole or not at all.
fn bounded(length: usize, socket: &OwnedFd) -> Result<usize, Errno> {
    if length <= MOST {
        Ok(length)
    } else if transport(socket) == Some(Transport::Tcp) {
        Ok(MOST)
    } else {
        Err(Errno::MSGSIZE)
    }
}

pub(super) fn sendmsg(syscall: &Syscall<'_>) -> Outcome {
    let socket = syscall.caller()?.descriptor(syscall.int(0))?;
    let message = copied(syscall, syscall.argument(1), &socket, syscall.int(2))?;
    send(syscall, socket, message)
}

/// Several messages: the first is sent, and the caller gets the count 1, as where the second would have to wait.
pub(super) fn sendmmsg(syscall: &Syscall<'_>) -> Outcome {
    const LENGTH: u64 = size_of::<libc::msghdr>() as u64;
    if syscall.unsigned(2) == 0 {
        return Ok(Answer::Value(0));
    }
    let socket = syscall.caller()?.descriptor(syscall.int(0))?;
    let message = copied(syscall, syscall.argument(1), &socket, syscall.int(3))?;
    syscall.still_waits()?;
    let (thread, at) =
        (syscall.notification.thread, syscall.argument(1).checked_add(LENGTH).ok_or(Errno::FAULT)?);
    waiting(socket, message.flags & libc::MSG_DONTWAIT != 0, move |socket| {
        let sent = message.send(socket)?;
        memory::write(thread, at, &u32::try_from(sent).unwrap_or(u32::MAX).to_ne_bytes())?;
        Ok(1)
    })
}

/// Copies a `struct msghdr` and all that it points to.
fn copied(syscall: &Syscall<'_>, pointer: u64, socket: &OwnedFd, flags: i32) -> Result<Message, Errno> {
    let thread = syscall.notification.thread;
    let mut header = [0_u8; size_of::<libc::msghdr>()];
    memory::read(thread, pointer, &mut header)?;
    let word = |bytes: &[u8], at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[at + byte]));
    let name_length = u64::from(u32::from_ne_bytes(std::array::from_fn(|byte| header[8 + byte])));
    let address = match (word(&header, 0), name_length) {
        (0, _) | (_, 0) => None,
        (pointer, length) => {
            Some(syscall.reachable(syscall.address_bytes(pointer, length)?, socket, Use::Message)?)
        }
    };
    let parts =
        usize::try_from(word(&header, 24)).ok().filter(|parts| *parts <= PARTS).ok_or(Errno::MSGSIZE)?;
    let mut vector = vec![0_u8; parts * 16];
    memory::read(thread, word(&header, 16), &mut vector)?;
    let mut data = Vec::new();
    for part in vector.chunks_exact(16) {
        let length = usize::try_from(word(part, 8)).map_err(|_| Errno::INVAL)?;
        let end = bounded(data.len().checked_add(length).ok_or(Errno::INVAL)?, socket)?;
        let start = data.len();
        data.resize(end, 0);
        memory::read(thread, word(part, 0), &mut data[start..])?;
    }
    let length =
        usize::try_from(word(&header, 40)).ok().filter(|length| *length <= CONTROL).ok_or(Errno::NOBUFS)?;
    let mut control = vec![0_u8; if word(&header, 32) == 0 { 0 } else { length }];
    memory::read(thread, word(&header, 32), &mut control)?;
    let Adopted { control, files, given } = adopt(syscall, &control)?;
    let sender = sender(syscall, socket, given)?;
    Ok(Message { address, data, control, _files: files, sender, flags })
}

/// Returns the sender of a message: the caller, or whom it claims to be, as far as it may.
///
/// # Errors
/// `EPERM`, as unix(7) has it.
fn sender(
    syscall: &Syscall<'_>,
    socket: &OwnedFd,
    given: Option<libc::ucred>,
) -> Result<Option<libc::ucred>, Errno> {
    if domain(socket) != Some(libc::AF_UNIX) {
        return Ok(None);
    }
    let Status { process, own_process, credentials: who, .. } = Status::of(syscall.notification.thread)?;
    let own = libc::ucred { pid: process, uid: who.real_user, gid: who.real_group };
    let Some(given) = given else { return Ok(Some(own)) };
    let may = |capability: u32| who.capabilities & 1 << capability != 0;
    let pid = if given.pid == own_process { process } else { given.pid };
    let permitted = (pid == process || may(21))
        && ([who.real_user, who.user].contains(&given.uid) || may(7))
        && ([who.real_group, who.group].contains(&given.gid) || may(6));
    if permitted { Ok(Some(libc::ucred { pid, ..given })) } else { Err(Errno::PERM) }
}

/// Bytes before what an item of control data holds (cmsg(3)).
const HEADER: usize = size_of::<libc::cmsghdr>();

/// Control data, as the monitor sends it.
struct Adopted {
    control: Vec<u8>,
    files: Vec<OwnedFd>,
    /// Whom the caller claims to be.
    given: Option<libc::ucred>,
}

/// Fetches the files that go along with a message, puts the monitor's descriptors in place of the caller's, and takes
/// out whom the caller claims to be.
fn adopt(syscall: &Syscall<'_>, control: &[u8]) -> Result<Adopted, Errno> {
    let mut adopted = Adopted { control: Vec::with_capacity(control.len()), files: Vec::new(), given: None };
    let mut at = 0;
    while let Some(header) = control.get(at..at + HEADER) {
        let length = usize::from_ne_bytes(std::array::from_fn(|byte| header[byte]));
        let number = |from: usize| i32::from_ne_bytes(std::array::from_fn(|byte| header[from + byte]));
        let end = at.checked_add(length).filter(|end| length >= HEADER && *end <= control.len());
        let end = end.ok_or(Errno::INVAL)?;
        let padded = length.next_multiple_of(size_of::<usize>());
        if is_route(number(8), number(12)) {
            syscall.refuse(&Event::Call { reason: "packets would take a route that no policy lists" });
            return Err(Errno::PERM);
        }
        let data = &control[at + HEADER..end];
        if (number(8), number(12)) == (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) {
            adopted.given = Some(claimed(data)?);
        } else {
            adopted.control.extend(header);
            if (number(8), number(12)) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                for place in data.chunks_exact(4) {
                    let theirs = i32::from_ne_bytes(std::array::from_fn(|byte| place[byte]));
                    let file = syscall.caller()?.descriptor(theirs)?;
                    adopted.control.extend(file.as_raw_fd().to_ne_bytes());
                    adopted.files.push(file);
                }
            } else {
                adopted.control.extend(data);
            }
            let whole = adopted.control.len().next_multiple_of(size_of::<usize>());
            adopted.control.resize(whole, 0);
        }
        at += padded;
    }
    Ok(adopted)
}

/// A `struct ucred` in control data.
fn claimed(data: &[u8]) -> Result<libc::ucred, Errno> {
    let word = |at: usize| {
        let bytes = data.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).ok_or(Errno::INVAL)?;
        Ok(u32::from_ne_bytes(bytes))
    };
    if data.len() != size_of::<libc::ucred>() {
        return Err(Errno::INVAL);
    }
    Ok(libc::ucred { pid: word(0)?.cast_signed(), uid: word(4)?, gid: word(8)? })
}

/// Protocols whose sockets go where connect(2) and messages say, and nowhere else: SCTP, for one, takes addresses by
/// setsockopt(2).
const PLAIN: [i32; 6] =
    [0, libc::IPPROTO_TCP, libc::IPPROTO_UDP, libc::IPPROTO_ICMP, libc::IPPROTO_ICMPV6, libc::IPPROTO_MPTCP];

/// What kind of socket may be made: numbers, so that the call goes on by itself.
pub(super) fn socket(syscall: &Syscall<'_>) -> Outcome {
    let kind = syscall.int(1) & 0xf;
    let network = &syscall.state.policy.network;
    let known = match (syscall.int(0), kind) {
        // Protocol 0 of the kind SOCK_SEQPACKET would be SCTP.
        (libc::AF_INET | libc::AF_INET6, _) if !PLAIN.contains(&syscall.int(2)) => false,
        (libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_SEQPACKET)
        | (libc::AF_INET | libc::AF_INET6, libc::SOCK_STREAM) => true,
        (libc::AF_UNIX, libc::SOCK_DGRAM) => network.has_unix(),
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_DGRAM) => network.has_internet_datagrams(),
        (libc::AF_NETLINK, _) => syscall.int(2) == libc::NETLINK_ROUTE,
        _ => false,
    };
    if known {
        return Ok(Answer::GoOn);
    }
    syscall.refuse(&Event::Call { reason: "the policy lists no address that such a socket could reach" });
    Err(Errno::PERM)
}
