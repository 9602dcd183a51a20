//! Other processes as `/proc` shows them: who they are, when they started, where they listen.
//!
//! A file of `/proc` is read by the fields that Orrery needs; unknown ones are passed over. Nothing here waits for a process' memory
//! map, which a process that hangs in the kernel may hold, except [`command_line`].

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// `TCP_LISTEN` of `include/net/tcp_states.h`, as the state is written in `/proc/PID/net/tcp`.
const TCP_LISTEN: &str = "0A";
/// `__SO_ACCEPTCON` of `include/linux/net.h`, in the flags of `/proc/PID/net/unix`.
const LISTENS: u32 = 0x1_0000;

/// A process, by proc_pid_stat(5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The PID of the process.
    pub pid: u32,
    /// The PID of its parent.
    pub parent: u32,
    /// The name of its first thread, 15 bytes at most.
    pub name: String,
    /// Its state: `R`, `S`, `D`, `Z` (it has ended, and was not reaped) and others.
    pub state: char,
    /// The time from boot to its start.
    pub started: Duration,
    /// The processor time of its threads, of those that have ended, too.
    pub processor_time: Duration,
    /// Bytes of its memory that are in memory (RSS); kernels may batch its updates.
    pub resident: u64,
}

impl Facts {
    /// Returns the time at which it started.
    #[must_use]
    pub fn started_at(&self) -> SystemTime {
        let now = SystemTime::now();
        let boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let boot = Duration::try_from(boot).unwrap_or_default();
        now.checked_sub(boot.saturating_sub(self.started)).unwrap_or(now)
    }
}

/// Returns the PIDs of all processes that this one's `/proc` has.
///
/// # Errors
/// Those of reading `/proc`.
pub fn all() -> io::Result<Vec<u32>> {
    let entries = fs::read_dir("/proc")?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// Returns the facts of a process.
///
/// # Errors
/// `NotFound` if there is no such process; `InvalidData` if the kernel's text is of an unknown form.
pub fn facts(pid: u32) -> io::Result<Facts> {
    // The name may hold any bytes.
    let text = fs::read(format!("/proc/{pid}/stat"))?;
    parse(pid, &String::from_utf8_lossy(&text)).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

fn parse(pid: u32, text: &str) -> Option<Facts> {
    let (head, rest) = text.rsplit_once(')')?;
    let name = head.split_once('(')?.1.to_owned();
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    let ticks =
        |count: u64| Duration::from_secs_f64(to_f64(count) / to_f64(rustix::param::clock_ticks_per_second()));
    Some(Facts {
        pid,
        parent: fields.get(1)?.parse().ok()?,
        name,
        state: fields.first()?.chars().next()?,
        started: ticks(number(19)?),
        processor_time: ticks(number(11)? + number(12)?),
        resident: number(21)? * crate::PAGE as u64,
    })
}

#[expect(clippy::cast_precision_loss, reason = "ticks of a hundredth of a second, less than 2^53 of them")]
fn to_f64(count: u64) -> f64 {
    count as f64
}

/// Returns the effective user ID of a process (proc_pid_status(5)). The owner of `/proc/PID` is root for processes that are closed to
/// debuggers, whoever they belong to.
///
/// # Errors
/// `NotFound` if there is no such process; `InvalidData` if the kernel's text is of an unknown form.
pub fn user(pid: u32) -> io::Result<u32> {
    let text = fs::read(format!("/proc/{pid}/status"))?;
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().find_map(|line| line.strip_prefix("Uid:"));
    let effective = line.and_then(|line| line.split_ascii_whitespace().nth(1)?.parse().ok());
    effective.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Returns the arguments of a process, as it shows them (proc_pid_cmdline(5)); none if it has ended. This waits while the process changes its
/// memory map.
///
/// # Errors
/// `NotFound` if there is no such process.
pub fn command_line(pid: u32) -> io::Result<Vec<String>> {
    let text = fs::read(format!("/proc/{pid}/cmdline"))?;
    let text = text.strip_suffix(b"\0").unwrap_or(&text);
    if text.is_empty() {
        return Ok(Vec::new());
    }
    Ok(text.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect())
}

/// Returns the paths at which a process listens (unix(7)), in the order of its descriptors; each path once. Paths are as the process named
/// them when it bound its sockets; abstract names are left out.
///
/// # Errors
/// `PermissionDenied` if the process may not be inspected; `NotFound` if there is none.
pub fn listening_paths(pid: u32) -> io::Result<Vec<PathBuf>> {
    let sockets = sockets(pid)?;
    Ok(those_of(&sockets, &listening(&fs::read(format!("/proc/{pid}/net/unix"))?)))
}

/// Returns the addresses at which a process listens by TCP (tcp(7)), in the order of its descriptors; each address once. They are of the
/// process' network namespace.
///
/// # Errors
/// `PermissionDenied` if the process may not be inspected; `NotFound` if there is none.
pub fn listening_addresses(pid: u32) -> io::Result<Vec<SocketAddr>> {
    let sockets = sockets(pid)?;
    let mut listening = BTreeMap::new();
    for table in ["tcp", "tcp6"] {
        match fs::read_to_string(format!("/proc/{pid}/net/{table}")) {
            Ok(text) => listening.extend(text.lines().filter_map(listening_address)),
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(those_of(&sockets, &listening))
}

/// Returns the inodes of a process' sockets, in the order of its descriptors.
fn sockets(pid: u32) -> io::Result<Vec<u64>> {
    let mut descriptors: Vec<(u32, u64)> = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor may be closed meanwhile.
        let Ok(entry) = entry else { continue };
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let inode =
            target.to_str().and_then(|text| text.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        descriptors.extend(number.zip(inode));
    }
    descriptors.sort_unstable();
    Ok(descriptors.into_iter().map(|(_, inode)| inode).collect())
}

/// Returns what a table has for these inodes, in their order; each value once.
fn those_of<T: Clone + PartialEq>(sockets: &[u64], listening: &BTreeMap<u64, T>) -> Vec<T> {
    let mut found = Vec::new();
    for one in sockets.iter().filter_map(|inode| listening.get(inode)) {
        if !found.contains(one) {
            found.push(one.clone());
        }
    }
    found
}

/// Parses a line of `/proc/PID/net/tcp` or `tcp6` (proc_pid_net(5)): the inode and address of a socket that listens.
fn listening_address(line: &str) -> Option<(u64, SocketAddr)> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let (address, port) = fields.get(1)?.split_once(':')?;
    if *fields.get(3)? != TCP_LISTEN {
        return None;
    }
    // 32-bit words of eight digits in the machine's order of bytes, which are in the network's.
    if !address.len().is_multiple_of(8) {
        return None;
    }
    let mut bytes = Vec::new();
    for word in address.as_bytes().chunks(8) {
        let word = u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok()?;
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    let address = match bytes.len() {
        4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        _ => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)),
    };
    let inode = fields.get(9)?.parse().ok()?;
    Some((inode, SocketAddr::new(address, u16::from_str_radix(port, 16).ok()?)))
}

/// Parses `/proc/PID/net/unix` (proc_pid_net(5)): the sockets that listen at a path, by inode.
fn listening(text: &[u8]) -> BTreeMap<u64, PathBuf> {
    let mut found = BTreeMap::new();
    for line in text.split(|byte| *byte == b'\n') {
        let mut words = line.splitn(2, |byte| *byte == b'/');
        let head = String::from_utf8_lossy(words.next().unwrap_or_default()).into_owned();
        let Some(path) = words.next() else { continue };
        let fields: Vec<&str> = head.split_ascii_whitespace().collect();
        let flags = fields.get(3).and_then(|flags| u32::from_str_radix(flags, 16).ok()).unwrap_or(0);
        let Some(inode) = fields.get(6).and_then(|inode| inode.parse().ok()) else { continue };
        if flags & LISTENS != 0 {
            let path = [b"/", path].concat();
            found.insert(inode, PathBuf::from(std::ffi::OsStr::from_bytes(&path)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_name_may_hold_parentheses_and_spaces() {
        let rest = "S 7 1 1 0 -1 4194560 9 0 0 0 150 50 0 0 20 0 1 0 1234 4096 3 0";
        let found = parse(9, &format!("9 (a) b (c) {rest}\n")).unwrap();
        assert_eq!((found.name.as_str(), found.parent, found.state), ("a) b (c", 7, 'S'));
        assert_eq!(found.resident, 3 * crate::PAGE as u64);
        let hertz = rustix::param::clock_ticks_per_second();
        assert_eq!(found.processor_time, Duration::from_millis(200 * 1000 / hertz));
        for bad in ["", "9 (a", "9 (a) S", "9 (a) S 7 x"] {
            assert_eq!(parse(9, bad), None, "{bad}");
        }
    }

    #[test]
    fn this_process_is_found() {
        let pid = std::process::id();
        assert!(all().unwrap().contains(&pid));
        let found = facts(pid).unwrap();
        assert!(found.resident > 0 && found.parent > 0);
        let age = found.started_at().elapsed().unwrap();
        assert!(age < Duration::from_secs(3600), "{age:?}");
        assert_eq!(user(pid).unwrap(), rustix::process::geteuid().as_raw());
        let arguments: Vec<String> = std::env::args().collect();
        assert_eq!(command_line(pid).unwrap(), arguments);
        assert_eq!(facts(u32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn addresses_that_listen_are_listed() {
        use std::net::{TcpListener, TcpStream};
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = TcpStream::connect(address).unwrap();
        let (served, _) = listener.accept().unwrap();
        let listed = || listening_addresses(std::process::id()).unwrap();
        assert_eq!(listed().iter().filter(|listed| **listed == address).count(), 1);
        drop(listener);
        assert!(!listed().contains(&address), "an accepted socket has the address, too");
        drop((client, served));
        let line = |address: &str, state: &str| {
            format!("   0: {address} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 77 1 x")
        };
        let of = |address: &str, state| listening_address(&line(address, state));
        let (loopback, ipv6) = match cfg!(target_endian = "little") {
            true => ("0100007F:1F40", "00000000000000000000000001000000:0050"),
            false => ("7F000001:1F40", "00000000000000000000000000000001:0050"),
        };
        assert_eq!(of(loopback, "0A"), Some((77, "127.0.0.1:8000".parse().unwrap())));
        assert_eq!(of(ipv6, "0A"), Some((77, "[::1]:80".parse().unwrap())));
        assert_eq!(of(loopback, "01"), None);
        for bad in ["0100007F", "0100007:1F40", "x:1", "01000:1F40", ":", "0100007F0100007F:1F40"] {
            assert_eq!(of(bad, "0A"), None, "{bad}");
        }
        assert_eq!(listening_address("  sl  local_address rem_address   st"), None);
    }

    #[test]
    fn only_sockets_that_listen_are_listed() {
        let directory = std::env::temp_dir().join(format!("orrery listens {}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("a socket");
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let (served, _) = listener.accept().unwrap();
        let listed = || listening_paths(std::process::id()).unwrap();
        assert_eq!(listed().iter().filter(|listed| **listed == path).count(), 1);
        drop(listener);
        assert!(!listed().contains(&path), "an accepted socket has the path, too");
        drop((client, served));
        fs::remove_dir_all(&directory).unwrap();
    }
}
