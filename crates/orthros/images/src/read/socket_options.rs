//! Settings of sockets: what `setsockopt` has set, the filter that drops packets, the interface and the groups of receivers.
//!
//! CRIU restores few of them. They are read here as the values that `getsockopt` returned, and set when the socket exists and
//! nothing has arrived for it yet. A socket with a setting that protects it and that no system call sets again (an eBPF filter, an IPsec
//! policy, keys, encryption by the kernel) is not carried over at all: without it, it would accept what it refused, or send what it
//! encrypted.

use std::net::Ipv4Addr;

use anyhow::{Context as _, Result, bail, ensure};
use orrery_kimage::{Error, Kernel, Object, OpenFile};

use crate::model::{SocketOption, SocketRestrictions, SocketSettings};

/// The word of `struct inet_sock` that has flags of sockets of IPv4 and IPv6, each of which was a member before (Linux 6.6 and 6.7,
/// `INET_FLAGS_*` in `include/net/inet_sock.h`).
const FLAGS: &str = "inet_flags";
const UNIX: u32 = 1;
const INET: u32 = 2;
const INET6: u32 = 10;
const STREAM: u32 = 1;
const TCP: u32 = 6;
const UDP: u32 = 17;
const MPTCP: u32 = 262;
/// `TCP_ESTABLISHED`.
const ESTABLISHED: u32 = 1;
/// The level of the options of IPv6.
const IPV6: i32 = 41;
/// `BPF_MAXINSNS` of `linux/bpf_common.h`, and the size of `struct sock_filter`.
const MOST_INSTRUCTIONS: u64 = 4096;
const INSTRUCTION: u64 = 8;
/// The most groups, and sources of one, that a socket is believed to have.
const MOST_GROUPS: usize = 4096;
const MOST_SOURCES: u64 = 65_536;
/// The most interfaces that are looked at for a name.
const MOST_INTERFACES: usize = 4096;
/// `SOCK_SNDBUF_LOCK` and `SOCK_RCVBUF_LOCK`: the program has set the size of a buffer.
const BUFFER_LOCKS: u32 = 3;
/// `SOCK_PASSCRED`, `SOCK_PASSSEC` and `SOCK_PASSPIDFD` of `linux/net.h`, which are members of the sock since Linux 6.16.
const PASS_CREDENTIALS: u32 = 3;
const PASS_SECURITY: u32 = 4;
const PASS_PIDFD: u32 = 7;
/// `SK_USER_DATA_PSOCK`: the socket is in a map of eBPF.
const IN_A_MAP: u64 = 4;
/// `TCP_NAGLE_OFF` and `TCP_NAGLE_CORK`.
const NAGLE_OFF: u32 = 1;
const NAGLE_CORK: u32 = 2;
/// `TCP_TIMEOUT_INIT` and `TCP_RTO_MAX`, in seconds.
const FIRST_TIMEOUT: u32 = 1;
const LAST_TIMEOUT: u32 = 120;

/// The settings of a socket, and what of them is not known.
pub(super) struct Found {
    pub(super) settings: SocketSettings,
    /// The options that this kernel keeps in another place than the ones that are known.
    pub(super) unknown: Vec<&'static str>,
}

/// Reads the settings of a socket.
///
/// # Errors
///
/// The memory cannot be read; or the socket has a setting that protects it and cannot be made again.
pub(super) fn read(file: &OpenFile<'_>) -> Result<Found> {
    let socket = file.object().required("private_data", "socket")?;
    let sock = socket.required("sk", "sock")?;
    let kernel = sock.kernel();
    let family = sock.u32("__sk_common.skc_family")?;
    let as_inet = |kind| kernel.object(kind, sock.address());
    let mut reader = Reader {
        kernel,
        hertz: hertz(kernel)?,
        flags: sock.u64("__sk_common.skc_flags")?,
        found: Found { settings: SocketSettings::default(), unknown: Vec::new() },
    };
    let protocol = sock.u32("sk_protocol")?;
    refuse_protected(sock, family, protocol)?;
    if [INET, INET6].contains(&family) {
        let (inet, kind) = (as_inet("inet_sock")?, sock.u32("sk_type")?);
        reader.internet(inet, kind, protocol)?;
        if family == INET6
            && let Some(v6) = inet.pointer("pinet6", "ipv6_pinfo")?
        {
            reader.internet_6(v6, inet, kind)?;
        }
        match protocol {
            TCP => reader.tcp(as_inet("tcp_sock")?, as_inet("inet_connection_sock")?)?,
            UDP => reader.udp(as_inet("udp_sock")?)?,
            _ => {}
        }
    }
    // After `IP_TOS`, which sets the priority, too.
    reader.any(socket, sock)?;
    reader.found.settings.restrictions = SocketRestrictions {
        filter: filter(sock)?,
        is_locked: reader.flag("SOCK_FILTER_LOCKED").unwrap_or(false),
        interface: interface(sock)?,
    };
    Ok(reader.found)
}

/// Returns the user of a Unix socket's peer as it was connected (`SO_PEERCRED`), if that is another than root: the restored sockets are
/// made by root.
pub(super) fn peer(file: &OpenFile<'_>) -> Result<Option<u32>> {
    let sock = file.object().required("private_data", "socket")?.required("sk", "sock")?;
    if sock.u32("__sk_common.skc_family")? != UNIX {
        return Ok(None);
    }
    let Some(credentials) = sock.pointer("sk_peer_cred", "cred")? else { return Ok(None) };
    Ok(Some(credentials.u32("euid")?).filter(|&uid| uid != 0))
}

/// Refuses a socket with a setting that protects it, and that cannot be made again.
fn refuse_protected(sock: Object<'_>, family: u32, protocol: u32) -> Result<()> {
    let is_set =
        |object: Object<'_>, path| -> Result<bool> { Ok(object.has(path) && object.u64(path)? != 0) };
    // An array of two pointers.
    if sock.has("sk_policy") && sock.bytes("sk_policy")?.iter().any(|&byte| byte != 0) {
        bail!("a socket with an IPsec policy of its own is not carried over");
    }
    if [INET, INET6].contains(&family) && sock.u64("sk_user_data")? & IN_A_MAP != 0 {
        bail!("a socket in an eBPF map is not carried over");
    }
    match protocol {
        MPTCP => bail!(
            "MPTCP is not carried over; its program uses TCP with the kernel parameter sysctl.net.mptcp.enabled=0"
        ),
        TCP if [INET, INET6].contains(&family) => {
            let tcp = sock.kernel().object("tcp_sock", sock.address())?;
            let connection = sock.kernel().object("inet_connection_sock", sock.address())?;
            if is_set(connection, "icsk_ulp_ops")? {
                bail!(
                    "a TCP connection with an upper layer in the kernel (TLS, for example) is not carried over"
                );
            }
            if is_set(tcp, "md5sig_info")? || is_set(tcp, "ao_info")? {
                bail!("a TCP socket with keys for signatures of segments is not carried over");
            }
        }
        UDP if is_set(sock.kernel().object("udp_sock", sock.address())?, "encap_type")? => {
            bail!("a UDP socket that unpacks other packets (IPsec, L2TP) is not carried over");
        }
        _ => {}
    }
    Ok(())
}

/// Returns the program of a classic filter.
fn filter(sock: Object<'_>) -> Result<Option<Vec<u8>>> {
    let Some(filter) = sock.pointer("sk_filter", "sk_filter")? else { return Ok(None) };
    let program = filter.required("prog", "bpf_prog")?;
    let Some(original) = program.pointer("orig_prog", "sock_fprog_kern")? else {
        bail!(
            "a socket with an eBPF filter is not carried over: without it, it would receive what that drops"
        );
    };
    let length = original.u64("len")?;
    ensure!((1..=MOST_INSTRUCTIONS).contains(&length), "its filter has {length} instructions");
    let mut bytes = vec![0; usize::try_from(length * INSTRUCTION)?];
    sock.kernel().read(original.u64("filter")?, &mut bytes)?;
    Ok(Some(bytes))
}

/// Returns the name of the interface that a socket is bound to.
fn interface(sock: Object<'_>) -> Result<Option<String>> {
    let index = sock.u32("__sk_common.skc_bound_dev_if")?;
    if index == 0 {
        return Ok(None);
    }
    let space = sock.required("__sk_common.skc_net.net", "net")?;
    let head = space.embedded("dev_base_head", "list_head")?;
    let mut next = head.required("next", "list_head")?;
    for _ in 0..MOST_INTERFACES {
        if next.address() == head.address() {
            break;
        }
        let device = next.container("net_device", "dev_list")?;
        if device.u32("ifindex")? == index {
            return Ok(Some(device.text("name")?));
        }
        next = next.required("next", "list_head")?;
    }
    bail!("it is bound to interface {index}, which is gone")
}

/// Returns the length of a tick: what the kernel counts times in.
fn hertz(kernel: &Kernel) -> Result<u64> {
    let nanoseconds = kernel.read_u64(kernel.symbols().address("tick_nsec")?)?;
    ensure!(nanoseconds > 0, "a tick takes no time");
    Ok((1_000_000_000 + nanoseconds / 2) / nanoseconds)
}

/// Returns a flag of an internet socket: `member` of `object`, where this kernel has that, else the bit `at` of [`FLAGS`].
fn inet_flag(
    inet: Object<'_>,
    at: u32,
    object: Object<'_>,
    member: &'static str,
) -> orrery_kimage::Result<u32> {
    if object.has(member) { object.u32(member) } else { Ok(inet.u32(FLAGS)? >> at & 1) }
}

/// Returns how long a server waits for the first bytes of a connection, from how many answers it sends meanwhile: the kernel's
/// `retrans_to_secs`.
fn seconds_of_answers(answers: u32) -> u32 {
    let (mut timeout, mut sum) = (FIRST_TIMEOUT, 0_u32);
    for _ in 0..answers.min(255) {
        sum = sum.saturating_add(timeout);
        timeout = (timeout * 2).min(LAST_TIMEOUT);
    }
    sum
}

/// Returns a `struct group_filter`, of which each address takes a `struct sockaddr_storage`.
fn source_filter(index: [u8; 4], group: [u8; 4], mode: u32, sources: &[u8]) -> Vec<u8> {
    const ADDRESS: usize = 128;
    let address = |address: &[u8]| {
        let mut bytes = vec![2, 0, 0, 0];
        bytes.extend_from_slice(address);
        bytes.resize(ADDRESS, 0);
        bytes
    };
    let count = u32::try_from(sources.len() / 4).unwrap_or(0);
    let mut filter = [index, [0; 4]].concat();
    filter.extend(address(&group));
    filter.extend([mode.to_le_bytes(), count.to_le_bytes()].concat());
    filter.extend(sources.chunks_exact(4).flat_map(address));
    filter
}

struct Reader<'k> {
    kernel: &'k Kernel,
    hertz: u64,
    /// `enum sock_flags`, one bit each.
    flags: u64,
    found: Found,
}

/// Adds options of one level: their names, and where their values are.
macro_rules! add {
    ($reader:expr, $level:expr; $($name:ident = $value:expr),* $(,)?) => {
        $($reader.number($level, libc::$name, stringify!($name), $value)?;)*
    };
}

impl Reader<'_> {
    /// Returns whether a flag of `enum sock_flags` is set; `None` where the kernel has no such flag.
    fn flag(&self, name: &str) -> Option<bool> {
        let bit = self.kernel.types().constant("sock_flags", name)?;
        Some(self.flags >> bit.min(63) & 1 != 0)
    }

    fn flag_value(&self, name: &'static str) -> orrery_kimage::Result<u32> {
        let missing = || Error::NoMember { kind: "sock_flags".to_owned(), member: name.to_owned() };
        self.flag(name).map(u32::from).ok_or_else(missing)
    }

    fn push(&mut self, level: i32, option: i32, name: &str, value: Vec<u8>, is_readable: bool) {
        let name = name.to_owned();
        self.found.settings.options.push(SocketOption { level, option, name, value, is_readable });
    }

    /// Adds an option that is a number. One that this kernel keeps elsewhere is noted.
    fn number(
        &mut self,
        level: i32,
        option: i32,
        name: &'static str,
        value: orrery_kimage::Result<u32>,
    ) -> Result<()> {
        match value {
            Ok(value) => self.push(level, option, name, value.to_le_bytes().to_vec(), true),
            Err(Error::NoMember { .. }) => self.found.unknown.push(name),
            Err(error) => return Err(error).context(name),
        }
        Ok(())
    }

    /// Adds an option that is a number, unless it has the value that stands for the kernel's default.
    fn number_unless(
        &mut self,
        default: u32,
        (level, option, name): (i32, i32, &'static str),
        value: orrery_kimage::Result<u32>,
    ) -> Result<()> {
        if value.as_ref().is_ok_and(|&value| value == default) {
            return Ok(());
        }
        self.number(level, option, name, value)
    }

    fn seconds(&self, ticks: u32) -> u32 {
        u32::try_from(u64::from(ticks) / self.hertz).unwrap_or(u32::MAX)
    }

    /// Adds the options of all sockets.
    fn any(&mut self, socket: Object<'_>, sock: Object<'_>) -> Result<()> {
        let flags = socket.u64("flags")?;
        let passes = |member: &'static str, at: u32| {
            if sock.has(member) { sock.u32(member) } else { Ok(u32::from(flags >> at & 1 != 0)) }
        };
        let level = libc::SOL_SOCKET;
        add!(self, level;
            SO_REUSEADDR = sock.u32("__sk_common.skc_reuse"),
            SO_REUSEPORT = sock.u32("__sk_common.skc_reuseport"),
            SO_DEBUG = self.flag_value("SOCK_DBG"),
            SO_DONTROUTE = self.flag_value("SOCK_LOCALROUTE"),
            SO_BROADCAST = self.flag_value("SOCK_BROADCAST"),
            SO_KEEPALIVE = self.flag_value("SOCK_KEEPOPEN"),
            SO_OOBINLINE = self.flag_value("SOCK_URGINLINE"),
            SO_RXQ_OVFL = self.flag_value("SOCK_RXQ_OVFL"),
            SO_NOFCS = self.flag_value("SOCK_NOFCS"),
            SO_SELECT_ERR_QUEUE = self.flag_value("SOCK_SELECT_ERR_QUEUE"),
            SO_ZEROCOPY = self.flag_value("SOCK_ZEROCOPY"),
            SO_NO_CHECK = sock.u32("sk_no_check_tx"),
            SO_PRIORITY = sock.u32("sk_priority"),
            SO_MARK = sock.u32("sk_mark"),
            SO_RCVLOWAT = sock.u32("sk_rcvlowat"),
            SO_BUSY_POLL = sock.u32("sk_ll_usec"),
            SO_PASSCRED = passes("sk_scm_credentials", PASS_CREDENTIALS),
            SO_PASSSEC = passes("sk_scm_security", PASS_SECURITY),
        );
        let pidfd = (level, SO_PASSPIDFD, "SO_PASSPIDFD");
        self.number_unless(0, pidfd, passes("sk_scm_pidfd", PASS_PIDFD))?;
        // -1, its default, is all that sockets without it have.
        self.number_unless(u32::MAX, (level, libc::SO_PEEK_OFF, "SO_PEEK_OFF"), sock.u32("sk_peek_off"))?;
        // criu sets the sizes of buffers, and these do not grow any more then.
        let locks = sock.u32("sk_userlocks").map(|locks| locks & BUFFER_LOCKS);
        self.number(level, SO_BUF_LOCK, "SO_BUF_LOCK", locks)?;
        let prefers = (level, libc::SO_PREFER_BUSY_POLL, "SO_PREFER_BUSY_POLL");
        self.number_unless(0, prefers, sock.u32("sk_prefer_busy_poll"))?;
        if self.flag("SOCK_LINGER") == Some(true) {
            let seconds = u32::try_from(sock.u64("sk_lingertime")? / self.hertz).unwrap_or(u32::MAX);
            let value = [1_u32.to_le_bytes(), seconds.to_le_bytes()].concat();
            self.push(level, libc::SO_LINGER, "SO_LINGER", value, true);
        }
        for (option, name, path) in [
            (libc::SO_RCVTIMEO, "SO_RCVTIMEO", "sk_rcvtimeo"),
            (libc::SO_SNDTIMEO, "SO_SNDTIMEO", "sk_sndtimeo"),
        ] {
            let ticks = sock.u64(path)?;
            // `MAX_SCHEDULE_TIMEOUT`: for ever, which is 0 to programs.
            let ticks = if ticks >= i64::MAX.cast_unsigned() { 0 } else { ticks };
            let parts = (ticks / self.hertz, ticks % self.hertz * 1_000_000 / self.hertz);
            let value = [parts.0.to_le_bytes(), parts.1.to_le_bytes()].concat();
            self.push(level, option, name, value, true);
        }
        let rate = sock.u64("sk_max_pacing_rate")?;
        if rate != u64::MAX {
            let value = rate.to_le_bytes().to_vec();
            self.push(level, libc::SO_MAX_PACING_RATE, "SO_MAX_PACING_RATE", value, true);
        }
        self.timestamps(sock)?;
        if self.flag("SOCK_TXTIME") == Some(true) {
            let flags = sock.u32("sk_txtime_deadline_mode")? | sock.u32("sk_txtime_report_errors")? << 1;
            let value = [sock.u32("sk_clockid")?.to_le_bytes(), flags.to_le_bytes()].concat();
            self.push(level, libc::SO_TXTIME, "SO_TXTIME", value, true);
        }
        Ok(())
    }

    /// Adds the options that ask for the times at which packets came. Turning one off turns all off: only those that are on are added.
    fn timestamps(&mut self, sock: Object<'_>) -> Result<()> {
        let level = libc::SOL_SOCKET;
        let is_new = self.flag("SOCK_TSTAMP_NEW") == Some(true);
        let on = 1_u32.to_le_bytes().to_vec();
        if self.flag("SOCK_RCVTSTAMPNS") == Some(true) {
            let option = if is_new { SO_TIMESTAMPNS_NEW } else { libc::SO_TIMESTAMPNS };
            self.push(level, option, "SO_TIMESTAMPNS", on, true);
        } else if self.flag("SOCK_RCVTSTAMP") == Some(true) {
            let option = if is_new { SO_TIMESTAMP_NEW } else { libc::SO_TIMESTAMP };
            self.push(level, option, "SO_TIMESTAMP", on, true);
        }
        let option = if is_new { SO_TIMESTAMPING_NEW } else { libc::SO_TIMESTAMPING };
        self.number_unless(0, (level, option, "SO_TIMESTAMPING"), sock.u32("sk_tsflags"))
    }

    /// Adds the options of `IPPROTO_IP`, which sockets of IPv6 have, too.
    fn internet(&mut self, inet: Object<'_>, kind: u32, protocol: u32) -> Result<()> {
        let level = libc::IPPROTO_IP;
        let flags = inet.u32(if inet.has(FLAGS) { FLAGS } else { "cmsg_flags" })?;
        let bit = |bit: u32| Ok(flags >> bit & 1);
        let flag = |at, member| inet_flag(inet, at, inet, member);
        add!(self, level;
            IP_TOS = inet.u32("tos"),
            IP_MTU_DISCOVER = inet.u32("pmtudisc"),
            IP_RECVERR = flag(9, "recverr"),
            IP_FREEBIND = flag(11, "freebind"),
            IP_TRANSPARENT = flag(15, "transparent"),
            IP_BIND_ADDRESS_NO_PORT = flag(18, "bind_address_no_port"),
            IP_MINTTL = inet.u32("min_ttl"),
            IP_MULTICAST_ALL = flag(14, "mc_all"),
            IP_PKTINFO = bit(0),
            IP_RECVTTL = bit(1),
            IP_RECVTOS = bit(2),
            IP_RECVOPTS = bit(3),
            IP_RETOPTS = bit(4),
            IP_PASSSEC = bit(5),
            IP_RECVORIGDSTADDR = bit(6),
        );
        for (option, name, value) in [
            (IP_CHECKSUM, "IP_CHECKSUM", bit(7)),
            (IP_RECVFRAGSIZE, "IP_RECVFRAGSIZE", bit(8)),
            (IP_RECVERR_RFC4884, "IP_RECVERR_RFC4884", flag(10, "recverr_rfc4884")),
            (libc::IP_NODEFRAG, "IP_NODEFRAG", flag(17, "nodefrag")),
            (libc::IP_UNICAST_IF, "IP_UNICAST_IF", inet.u32("uc_index").map(u32::swap_bytes)),
        ] {
            self.number_unless(0, (level, option, name), value)?;
        }
        // The kernel's default is a setting of its network, -1 here.
        let lives = inet.u32("uc_ttl").map(|lives| lives & 0xffff);
        self.number_unless(0xffff, (level, libc::IP_TTL, "IP_TTL"), lives)?;
        if inet.has("local_port_range") {
            let range = inet.u32("local_port_range");
            self.number_unless(0, (level, IP_LOCAL_PORT_RANGE, "IP_LOCAL_PORT_RANGE"), range)?;
        }
        if kind != STREAM {
            add!(self, level; IP_MULTICAST_TTL = inet.u32("mc_ttl"), IP_MULTICAST_LOOP = flag(13, "mc_loop"));
            let (address, index) = (inet.u32("mc_addr")?, inet.u32("mc_index")?);
            if address != 0 || index != 0 {
                let value = [0, address, index].map(u32::to_le_bytes).concat();
                self.push(level, libc::IP_MULTICAST_IF, "IP_MULTICAST_IF", value, false);
            }
        }
        let options = inet.pointer("inet_opt", "ip_options_rcu")?;
        if options.map(|options| options.u32("opt.optlen")).transpose()?.is_some_and(|length| length > 0) {
            self.found.unknown.push("IP_OPTIONS");
        } else if protocol == TCP && inet.embedded("sk", "sock")?.u32("__sk_common.skc_state")? == ESTABLISHED
        {
            // criu sets the largest segment that the peer takes after the kernel has reckoned with the smallest one: the setting of no
            // options makes it reckon again, and a connection sends in segments of half a kilobyte otherwise.
            self.push(level, libc::IP_OPTIONS, "the size of segments", Vec::new(), false);
        }
        self.groups(inet)
    }

    /// Adds the groups of IPv4 that a socket is a member of, each with the sources that it takes or refuses.
    fn groups(&mut self, inet: Object<'_>) -> Result<()> {
        let mut found = Vec::new();
        let mut next = inet.pointer("mc_list", "ip_mc_socklist")?;
        while let Some(member) = next {
            ensure!(found.len() < MOST_GROUPS, "its list of groups never ends");
            let request = member.bytes("multi")?;
            let mut sources = Vec::new();
            if let Some(list) = member.pointer("sflist", "ip_sf_socklist")? {
                let count = list.u64("sl_count")?;
                ensure!(count <= MOST_SOURCES, "a group of it has {count} sources");
                sources = vec![0; usize::try_from(count * 4)?];
                self.kernel.read(list.address_of("sl_addr")?, &mut sources)?;
            }
            found.push((request, member.u32("sfmode")?, sources));
            next = member.pointer("next_rcu", "ip_mc_socklist")?;
        }
        // The kernel has the newest first.
        for (request, mode, sources) in found.into_iter().rev() {
            // `struct ip_mreqn`: the group, an address of the interface, and its index.
            let [group, _, index] = request.as_chunks().0 else {
                bail!("the kernel's ip_mreqn has {} bytes", request.len())
            };
            let name = format!("the membership of group {}", Ipv4Addr::from(*group));
            let level = libc::IPPROTO_IP;
            self.push(level, libc::IP_ADD_MEMBERSHIP, &name, request.clone(), false);
            // `MCAST_EXCLUDE` of nothing is what a member begins with.
            if !sources.is_empty() || mode != libc::MCAST_EXCLUDE.cast_unsigned() {
                let value = source_filter(*index, *group, mode, &sources);
                self.push(level, libc::MCAST_MSFILTER, &name, value, false);
            }
        }
        Ok(())
    }

    /// Adds the options of `IPPROTO_IPV6`.
    fn internet_6(&mut self, v6: Object<'_>, inet: Object<'_>, kind: u32) -> Result<()> {
        /// Nine bits with a sign: -1 for the kernel's default.
        const DEFAULT: u32 = 0x1ff;
        let flag = |at, object, member| inet_flag(inet, at, object, member);
        add!(self, IPV6;
            IPV6_MTU_DISCOVER = v6.u32("pmtudisc"),
            IPV6_RECVERR = flag(26, v6, "recverr"),
            IPV6_DONTFRAG = flag(25, v6, "dontfrag"),
            IPV6_TCLASS = v6.u32("tclass"),
            IPV6_RECVPKTINFO = v6.u32("rxopt.bits.rxinfo"),
            IPV6_RECVHOPLIMIT = v6.u32("rxopt.bits.rxhlim"),
            IPV6_RECVTCLASS = v6.u32("rxopt.bits.rxtclass"),
            IPV6_RECVHOPOPTS = v6.u32("rxopt.bits.hopopts"),
            IPV6_RECVDSTOPTS = v6.u32("rxopt.bits.dstopts"),
            IPV6_RECVPATHMTU = v6.u32("rxopt.bits.rxpmtu"),
            IPV6_MULTICAST_LOOP = flag(20, v6, "mc_loop"),
        );
        for (option, name, default, value) in [
            (IPV6_FREEBIND, "IPV6_FREEBIND", 0, flag(11, inet, "freebind")),
            (IPV6_TRANSPARENT, "IPV6_TRANSPARENT", 0, flag(15, inet, "transparent")),
            (IPV6_RECVORIGDSTADDR, "IPV6_RECVORIGDSTADDR", 0, v6.u32("rxopt.bits.rxorigdstaddr")),
            (IPV6_MINHOPCOUNT, "IPV6_MINHOPCOUNT", 0, v6.u32("min_hopcount")),
            (IPV6_MULTICAST_ALL, "IPV6_MULTICAST_ALL", 1, flag(22, v6, "mc_all")),
            (IPV6_RECVERR_RFC4884, "IPV6_RECVERR_RFC4884", 0, flag(21, v6, "recverr_rfc4884")),
            (IPV6_UNICAST_IF, "IPV6_UNICAST_IF", 0, v6.u32("ucast_oif").map(u32::swap_bytes)),
            (libc::IPV6_UNICAST_HOPS, "IPV6_UNICAST_HOPS", DEFAULT, v6.u32("hop_limit").map(|n| n & DEFAULT)),
        ] {
            self.number_unless(default, (IPV6, option, name), value)?;
        }
        // A connection notes here where its first packet came from; nobody can set that, and nothing uses it.
        if kind != STREAM {
            let interface = (IPV6, libc::IPV6_MULTICAST_IF, "IPV6_MULTICAST_IF");
            self.number_unless(0, interface, v6.u32("mcast_oif"))?;
            let hops = (IPV6, libc::IPV6_MULTICAST_HOPS, "IPV6_MULTICAST_HOPS");
            self.number_unless(DEFAULT, hops, v6.u32("mcast_hops").map(|n| n & DEFAULT))?;
        }
        let mut next = v6.pointer("ipv6_mc_list", "ipv6_mc_socklist")?;
        let mut found = Vec::new();
        while let Some(member) = next {
            ensure!(found.len() < MOST_GROUPS, "its list of groups never ends");
            if member.u64("sflist")? != 0 {
                bail!("a socket that takes a group of IPv6 from some sources only is not carried over");
            }
            found.push([member.bytes("addr")?, member.u32("ifindex")?.to_le_bytes().to_vec()].concat());
            next = member.pointer("next", "ipv6_mc_socklist")?;
        }
        for request in found.into_iter().rev() {
            self.push(IPV6, libc::IPV6_ADD_MEMBERSHIP, "the membership of a group of IPv6", request, false);
        }
        Ok(())
    }

    /// Adds the options of `IPPROTO_TCP`.
    fn tcp(&mut self, tcp: Object<'_>, connection: Object<'_>) -> Result<()> {
        let level = libc::IPPROTO_TCP;
        let nagle = tcp.u32("nonagle")?;
        add!(self, level;
            TCP_NODELAY = Ok(u32::from(nagle & NAGLE_OFF != 0)),
            TCP_CORK = Ok(u32::from(nagle & NAGLE_CORK != 0)),
            TCP_USER_TIMEOUT = connection.u32("icsk_user_timeout"),
            TCP_NOTSENT_LOWAT = tcp.u32("notsent_lowat"),
            TCP_INQ = tcp.u32("recvmsg_inq"),
            TCP_THIN_LINEAR_TIMEOUTS = tcp.u32("thin_lto"),
            TCP_SAVE_SYN = tcp.u32("save_syn"),
            TCP_WINDOW_CLAMP = tcp.u32("window_clamp"),
        );
        let queue = "icsk_accept_queue.rskq_defer_accept";
        for (option, name, value) in [
            (libc::TCP_KEEPIDLE, "TCP_KEEPIDLE", tcp.u32("keepalive_time").map(|t| self.seconds(t))),
            (libc::TCP_KEEPINTVL, "TCP_KEEPINTVL", tcp.u32("keepalive_intvl").map(|t| self.seconds(t))),
            (libc::TCP_KEEPCNT, "TCP_KEEPCNT", tcp.u32("keepalive_probes")),
            (libc::TCP_SYNCNT, "TCP_SYNCNT", connection.u32("icsk_syn_retries")),
            (libc::TCP_LINGER2, "TCP_LINGER2", tcp.i32("linger2").map(|t| self.linger(t))),
            (libc::TCP_DEFER_ACCEPT, "TCP_DEFER_ACCEPT", connection.u32(queue).map(seconds_of_answers)),
            (libc::TCP_FASTOPEN, "TCP_FASTOPEN", connection.u32("icsk_accept_queue.fastopenq.max_qlen")),
            (libc::TCP_FASTOPEN_CONNECT, "TCP_FASTOPEN_CONNECT", tcp.u32("fastopen_connect")),
            (libc::TCP_FASTOPEN_NO_COOKIE, "TCP_FASTOPEN_NO_COOKIE", tcp.u32("fastopen_no_cookie")),
            (TCP_TX_DELAY, "TCP_TX_DELAY", tcp.u32("tcp_tx_delay")),
        ] {
            self.number_unless(0, (level, option, name), value)?;
        }
        let segment = tcp.u32("rx_opt.user_mss")?;
        if segment != 0 {
            let value = segment.to_le_bytes().to_vec();
            // Of a connection, `getsockopt` returns what it uses now.
            self.push(level, libc::TCP_MAXSEG, "TCP_MAXSEG", value, false);
        }
        if let Some(control) = connection.pointer("icsk_ca_ops", "tcp_congestion_ops")? {
            let mut value = control.text("name")?.into_bytes();
            value.resize(CONGESTION_NAME, 0);
            self.push(level, libc::TCP_CONGESTION, "TCP_CONGESTION", value, true);
        }
        Ok(())
    }

    fn linger(&self, ticks: i32) -> u32 {
        u32::try_from(ticks).map_or(u32::MAX, |ticks| self.seconds(ticks))
    }

    /// Adds the options of `IPPROTO_UDP`.
    fn udp(&mut self, udp: Object<'_>) -> Result<()> {
        let level = libc::IPPROTO_UDP;
        // One word of flags since 6.7, members of their own before.
        let flag = |bit: u32, member| {
            if udp.has("udp_flags") { Ok(udp.u32("udp_flags")? >> bit & 1) } else { udp.u32(member) }
        };
        for (option, name, value) in [
            (libc::UDP_CORK, "UDP_CORK", flag(0, "corkflag")),
            (UDP_NO_CHECK6_TX, "UDP_NO_CHECK6_TX", flag(1, "no_check6_tx")),
            (UDP_NO_CHECK6_RX, "UDP_NO_CHECK6_RX", flag(2, "no_check6_rx")),
            (libc::UDP_GRO, "UDP_GRO", flag(3, "gro_enabled")),
            (libc::UDP_SEGMENT, "UDP_SEGMENT", udp.u32("gso_size")),
        ] {
            self.number_unless(0, (level, option, name), value)?;
        }
        Ok(())
    }
}

/// Options that the `libc` crate does not name: `asm-generic/socket.h`, `linux/in.h`, `linux/in6.h`, `linux/udp.h`.
const SO_BUF_LOCK: i32 = 72;
const SO_TIMESTAMP_NEW: i32 = 63;
const SO_TIMESTAMPNS_NEW: i32 = 64;
const SO_TIMESTAMPING_NEW: i32 = 65;
const SO_PASSPIDFD: i32 = 76;
const IP_CHECKSUM: i32 = 23;
const IP_RECVFRAGSIZE: i32 = 25;
const IP_RECVERR_RFC4884: i32 = 26;
const IP_LOCAL_PORT_RANGE: i32 = 51;
const IPV6_MULTICAST_ALL: i32 = 29;
const IPV6_RECVERR_RFC4884: i32 = 31;
const IPV6_MINHOPCOUNT: i32 = 73;
const IPV6_RECVORIGDSTADDR: i32 = 74;
const IPV6_TRANSPARENT: i32 = 75;
const IPV6_UNICAST_IF: i32 = 76;
const IPV6_FREEBIND: i32 = 78;
const TCP_TX_DELAY: i32 = 37;
const UDP_NO_CHECK6_TX: i32 = 101;
const UDP_NO_CHECK6_RX: i32 = 102;
/// `TCP_CA_NAME_MAX`.
const CONGESTION_NAME: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deferring_takes_as_long_as_its_answers() {
        assert_eq!([0, 1, 2, 3, 6].map(seconds_of_answers), [0, 1, 3, 7, 63]);
        assert_eq!(seconds_of_answers(8), 1 + 2 + 4 + 8 + 16 + 32 + 64 + 120);
    }
}
