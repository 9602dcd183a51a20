//! What `/proc/PID/net` tells of sockets, by their inodes.

use std::collections::BTreeMap;

use crate::process::Process;

/// What kind of socket an inode is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Socket {
    /// Its state, as in `net/tcp_states.h`, and how much waits: bytes, or connections where it listens.
    Tcp {
        state: u32,
        waiting: u64,
    },
    /// How many bytes of datagrams wait that may not be carried over.
    Udp {
        waiting: u64,
    },
    Unix,
    /// Of a kind that is not carried over.
    Other(&'static str),
}

/// The sockets that a process' network namespace has.
pub(crate) fn of(process: &Process) -> BTreeMap<u64, Socket> {
    let mut found = BTreeMap::new();
    for name in ["tcp", "tcp6"] {
        internet(&process.text(&format!("net/{name}")), &mut found, |state, waiting| Socket::Tcp {
            state,
            waiting,
        });
    }
    // What waits is carried over if it came over IPv4.
    internet(&process.text("net/udp"), &mut found, |_, _| Socket::Udp { waiting: 0 });
    internet(&process.text("net/udp6"), &mut found, |_, waiting| Socket::Udp { waiting });
    for name in ["raw", "raw6", "icmp", "icmp6", "udplite", "udplite6"] {
        internet(&process.text(&format!("net/{name}")), &mut found, |_, _| Socket::Other("a raw socket"));
    }
    column(&process.text("net/unix"), 6, &mut found, Socket::Unix);
    column(&process.text("net/netlink"), 9, &mut found, Socket::Other("a netlink socket"));
    column(&process.text("net/packet"), 8, &mut found, Socket::Other("a packet socket"));
    found
}

/// Tables of Internet sockets: the state is the fourth column, the queues the fifth, the inode the tenth.
fn internet(table: &str, found: &mut BTreeMap<u64, Socket>, make: impl Fn(u32, u64) -> Socket) {
    for line in table.lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, local, _, state, queues, _, _, _, _, inode, ..] = words[..] else { continue };
        let waiting = queues.split_once(':').and_then(|(_, waiting)| u64::from_str_radix(waiting, 16).ok());
        let (Ok(state), Some(waiting), Ok(inode)) = (u32::from_str_radix(state, 16), waiting, inode.parse())
        else {
            continue;
        };
        // Words of the network in this machine's order: `::`, `::1` and those of IPv4 are there in the backup.
        let is_own = |address: &str| {
            address.len() != 32
                || [
                    "0000000000000000FFFF0000",
                    "00000000000000000000000000000000",
                    "00000000000000000000000001000000",
                ]
                .iter()
                .any(|own| address.starts_with(own))
        };
        let elsewhere = Socket::Other("a socket with an address of IPv6 other than ::1");
        let is_elsewhere = local.split_once(':').is_some_and(|(address, _)| !is_own(address));
        found.insert(inode, if is_elsewhere { elsewhere } else { make(state, waiting) });
    }
}

fn column(table: &str, index: usize, found: &mut BTreeMap<u64, Socket>, socket: Socket) {
    for line in table.lines().skip(1) {
        if let Some(Ok(inode)) = line.split_whitespace().nth(index).map(str::parse) {
            found.insert(inode, socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_connections_is_read() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            \x20  0: 0100007F:0CEA 00000000:0000 0A 00000000:00000003 00:00000000 00000000     0        0 4711 1 0\n\
            \x20  1: garbage\n\
            \x20  2: 000080FE00000000FF005450563412FE:0CEA 00000000000000000000000000000000:0000 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0\n\
            \x20  3: 0000000000000000FFFF00000200000A:0CEA 00000000000000000000000000000000:0000 01 00000000:00000000 00:00000000 00000000     0        0 4713 1 0\n";
        let mut found = BTreeMap::new();
        internet(table, &mut found, |state, waiting| Socket::Tcp { state, waiting });
        assert_eq!(found.remove(&4711), Some(Socket::Tcp { state: 10, waiting: 3 }));
        assert!(matches!(found.remove(&4712), Some(Socket::Other(_))), "by an address of the link");
        assert_eq!(found.remove(&4713), Some(Socket::Tcp { state: 1, waiting: 0 }));
        assert!(found.is_empty());
    }
}
