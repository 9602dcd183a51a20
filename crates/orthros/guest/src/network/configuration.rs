//! The network configuration that a service makes while it runs: addresses, routes, permanent neighbours, and netfilter rules.
//!
//! The guest with the service monitors changes, and saves the configuration after each of them in a file in memory, which a
//! restore carries over like any other. Nothing is saved before something changes. A change in the last milliseconds before a
//! kernel died may be missing.
//!
//! Addresses, routes and neighbours are saved as the kernel dumps them, and sent back to it as they are; `ip address save` and
//! `ip route save` do the same. Addresses must exist before sockets are bound to them, the rest only when the interface is up. The
//! kernel adds its own routes itself.
//!
//! Rules are listed and restored by the image's own `nft`, which a service that has rules needs, too, with counters and sets as they
//! were when the rules last changed. Connection tracking starts again: it takes established connections for new ones until
//! both sides have sent something.

use std::fs;
use std::io::ErrorKind;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result};
use orrery_sys::netlink::{CREATE, Netlink, REPLACE, attribute};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::netlink::NETFILTER;
use serde::{Deserialize, Serialize};

use crate::command;

/// The file with the saved configuration, which a restore carries over.
const SAVED: &str = "/run/orrery.network";
/// Rules to be made.
const RULES: &str = "/run/orrery/rules";
/// `RTMGRP_NEIGH`, and `_IFADDR` and `_ROUTE` of both families, of `linux/rtnetlink.h`.
const CHANGES: u32 = 0x4 | 0x10 | 0x40 | 0x100 | 0x400;
/// `NFNLGRP_NFTABLES` of `linux/netfilter/nfnetlink.h`.
const RULE_CHANGES: u32 = 1 << 6;
/// `NFT_MSG_GETGEN` of `linux/netfilter/nf_tables.h`, asked of `NFNL_SUBSYS_NFTABLES`, and `NFTA_GEN_ID`.
const GENERATION: u16 = 10 << 8 | 16;
const GENERATION_ID: u16 = 1;
/// A kernel in which there never were rules.
const NO_RULES: u32 = 1;
/// Reading the configuration takes a fifth of the time at most.
const REST: u32 = 4;

/// How a kernel lists something, adds it, and where it has its attributes.
struct Kind {
    name: &'static str,
    new: u16,
    list: u16,
    header: usize,
}

const ADDRESS: Kind = Kind { name: "address", new: 20, list: 22, header: 8 };
const ROUTE: Kind = Kind { name: "route", new: 24, list: 26, header: 12 };
const NEIGHBOUR: Kind = Kind { name: "neighbour", new: 28, list: 30, header: 12 };

/// `RTM_DELADDR`.
const DELETE_ADDRESS: u16 = 21;
/// `IFA_ADDRESS` and `IFA_LOCAL`.
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// `RT_SCOPE_LINK`: the kernel makes such addresses itself.
const LINK: u8 = 253;
/// `RTPROT_KERNEL` and `RTPROT_RA`: so are such routes.
const OWN_ROUTES: [u8; 2] = [2, 9];
/// `RTA_GATEWAY`, `RTA_MULTIPATH`, and `RTA_VIA`: those go by other routes.
const BY_OTHERS: [u16; 3] = [5, 9, 18];
/// `RTM_F_CLONED`: such a route is a memory of one.
const CLONED: u32 = 0x200;
/// `RTNH_F_ONLINK`; the other flags tell of the link's state.
const ON_LINK: u8 = 4;
/// `NUD_PERMANENT`.
const PERMANENT: u8 = 0x80;
/// `AF_INET` and `AF_INET6`.
const FAMILIES: [u8; 2] = [2, 10];

/// Rules of netfilter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
enum Rules {
    /// There are no rules.
    #[default]
    None,
    /// As `nft` lists them.
    Listed(String),
    /// There may be some, and nobody who could list them.
    Unknown(String),
}

/// A network configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct NetworkConfiguration {
    /// Bodies of messages.
    addresses: Vec<Vec<u8>>,
    routes: Vec<Vec<u8>>,
    neighbours: Vec<Vec<u8>>,
    rules: Rules,
}

fn byte(body: &[u8], at: usize) -> u8 {
    body.get(at).copied().unwrap_or_default()
}

fn is_configured_address(body: &[u8]) -> bool {
    FAMILIES.contains(&byte(body, 0)) && byte(body, 3) != LINK
}

fn is_configured_route(body: &[u8]) -> bool {
    let flags = body.get(8..).and_then(<[u8]>::first_chunk).map_or(0, |flags| u32::from_ne_bytes(*flags));
    FAMILIES.contains(&byte(body, 0)) && !OWN_ROUTES.contains(&byte(body, 5)) && flags & CLONED == 0
}

fn is_configured_neighbour(body: &[u8]) -> bool {
    FAMILIES.contains(&byte(body, 0)) && byte(body, 8) & PERMANENT != 0
}

/// Returns what makes an address this one: its family and its network's bits, its device, itself.
fn identity(body: &[u8]) -> [Option<&[u8]>; 3] {
    let of = |kind| attribute(body, ADDRESS.header, kind);
    [body.get(..2), body.get(4..ADDRESS.header), of(IFA_LOCAL).or_else(|| of(IFA_ADDRESS))]
}

impl NetworkConfiguration {
    /// Reads the current configuration.
    fn read(netlink: &mut Netlink, rules: Rules) -> Result<Self> {
        let mut list = |kind: &Kind, wanted: fn(&[u8]) -> bool| {
            let mut listed = netlink.dump(kind.list, &vec![0; kind.header]).context(kind.name)?;
            listed.retain(|body| wanted(body));
            anyhow::Ok(listed)
        };
        let (addresses, mut routes) =
            (list(&ADDRESS, is_configured_address)?, list(&ROUTE, is_configured_route)?);
        for route in &mut routes {
            // The kernel refuses a route with flags that report the state of its link.
            if let Some(flags) = route.get_mut(8..12) {
                flags.copy_from_slice(&u32::from(byte(flags, 0) & ON_LINK).to_ne_bytes());
            }
        }
        routes.sort_by_key(|route| {
            BY_OTHERS.iter().any(|&kind| attribute(route, ROUTE.header, kind).is_some())
        });
        Ok(Self { addresses, routes, neighbours: list(&NEIGHBOUR, is_configured_neighbour)?, rules })
    }

    fn save(&self) -> Result<()> {
        let aside = format!("{SAVED}.new");
        fs::write(&aside, serde_json::to_vec(self)?).with_context(|| format!("cannot write {aside}"))?;
        fs::rename(&aside, SAVED).with_context(|| format!("cannot write {SAVED}"))
    }

    /// Loads the configuration that was saved in the dead guest; `None` if the service had changed nothing.
    ///
    /// # Errors
    ///
    /// The file is not what was written.
    pub(crate) fn load() -> Result<Option<Self>> {
        match fs::read(SAVED) {
            Ok(bytes) => {
                Ok(Some(serde_json::from_slice(&bytes).with_context(|| format!("cannot read {SAVED}"))?))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {SAVED}")),
        }
    }

    /// Gives this machine the addresses, and no others. Returns remarks about what does not work.
    pub(crate) fn restore_addresses(&self) -> Vec<String> {
        let mut lost = Vec::new();
        let mut replace = || -> Result<()> {
            let mut netlink = Netlink::open(None, 0)?;
            let mut there = netlink.dump(ADDRESS.list, &[0; 8])?;
            there.retain(|body| is_configured_address(body));
            let wanted: Vec<_> = self.addresses.iter().map(|body| identity(body)).collect();
            for body in there.iter().filter(|body| !wanted.contains(&identity(body))) {
                netlink.transact(DELETE_ADDRESS, 0, body).context("cannot remove an address")?;
            }
            // Only now: the first address of a network may take the others along.
            restore(&mut netlink, &ADDRESS, &self.addresses, &mut lost);
            Ok(())
        };
        let replaced = replace();
        lost.extend(replaced.err().map(|error| format!("the service's addresses: {error:#}")));
        lost
    }

    /// Restores the netfilter rules. Called before anything can arrive from elsewhere.
    ///
    /// # Errors
    ///
    /// The rules cannot be loaded, or could not be listed.
    pub(crate) fn restore_rules(&self) -> Result<()> {
        match &self.rules {
            Rules::None => Ok(()),
            Rules::Unknown(why) => {
                Err(anyhow::anyhow!("{why}")).context("the service's netfilter rules are lost")
            }
            Rules::Listed(text) => {
                fs::write(RULES, format!("flush ruleset\n{text}"))
                    .with_context(|| format!("cannot write {RULES}"))?;
                command::run(&["nft", "-f", RULES]).context("the service's netfilter rules are lost")
            }
        }
    }

    /// Restores the routes and neighbours. Returns remarks about what does not work.
    pub(crate) fn restore_routes(&self) -> Vec<String> {
        let mut lost = Vec::new();
        match Netlink::open(None, 0) {
            Ok(mut netlink) => {
                restore(&mut netlink, &ROUTE, &self.routes, &mut lost);
                restore(&mut netlink, &NEIGHBOUR, &self.neighbours, &mut lost);
            }
            Err(error) => lost.push(format!("the service's routes: {error}")),
        }
        lost
    }
}

fn restore(netlink: &mut Netlink, kind: &Kind, bodies: &[Vec<u8>], lost: &mut Vec<String>) {
    for (index, body) in bodies.iter().enumerate() {
        if let Err(error) = netlink.transact(kind.new, CREATE | REPLACE, body) {
            let (name, of) = (kind.name, bodies.len());
            lost.push(format!("{name} {} of {of} that the service had is lost: {error}", index + 1));
        }
    }
}

/// Notifications of changes.
pub(crate) struct ChangeMonitor {
    network: Netlink,
    /// `None` if the kernel has no netfilter.
    rules: Option<Netlink>,
}

impl ChangeMonitor {
    /// Subscribes to notifications.
    ///
    /// # Errors
    ///
    /// The kernel has no such notifications.
    pub(crate) fn open() -> Result<Self> {
        let network = Netlink::open(None, CHANGES).context("cannot monitor the network configuration")?;
        Ok(Self { network, rules: Netlink::open(Some(NETFILTER), RULE_CHANGES).ok() })
    }

    /// Saves the configuration after each change, in a thread of its own, and with `now` at once, too.
    pub(crate) fn start(mut self, now: bool) {
        std::thread::spawn(move || {
            let (mut last, mut generation) = (None, NO_RULES);
            let mut due = now;
            loop {
                if due {
                    let begin = Instant::now();
                    if let Err(error) = update(&mut last, &mut generation) {
                        eprintln!("orrery-guest: cannot save the network configuration: {error:#}");
                    }
                    std::thread::sleep(begin.elapsed() * REST);
                }
                self.wait();
                due = true;
            }
        });
    }

    /// Waits for a change, and discards all notifications: the configuration that is read next has the changes.
    fn wait(&mut self) {
        let sockets = [Some(&self.network), self.rules.as_ref()];
        let mut all: Vec<_> =
            sockets.into_iter().flatten().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        let _ = poll(&mut all, None);
        self.network.drain();
        if let Some(rules) = &mut self.rules {
            rules.drain();
        }
    }
}

/// Saves the configuration if it has changed.
fn update(last: &mut Option<NetworkConfiguration>, generation: &mut u32) -> Result<()> {
    let now = rules_generation();
    let rules = match last {
        Some(last) if now == *generation => last.rules.clone(),
        _ if now == NO_RULES => Rules::None,
        _ => list_rules(),
    };
    *generation = now;
    let network = NetworkConfiguration::read(&mut Netlink::open(None, 0)?, rules)?;
    if last.as_ref() != Some(&network) {
        network.save()?;
        *last = Some(network);
    }
    Ok(())
}

/// Returns a number that goes up with each change of rules.
fn rules_generation() -> u32 {
    let reply = Netlink::open(Some(NETFILTER), 0).and_then(|mut netlink| netlink.get(GENERATION, &[0; 4]));
    let id = reply.as_ref().ok().and_then(|body| attribute(body, 4, GENERATION_ID)?.first_chunk());
    id.map_or(NO_RULES, |id| u32::from_be_bytes(*id))
}

fn list_rules() -> Rules {
    let listed = Command::new("nft").args(["--numeric", "list", "ruleset"]).output();
    match listed {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            if text.trim().is_empty() { Rules::None } else { Rules::Listed(text) }
        }
        Ok(output) => Rules::Unknown(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) if error.kind() == ErrorKind::NotFound => Rules::Unknown(
            "there is no nft in the guests' image that lists them; `--program nft` adds it".to_owned(),
        ),
        Err(error) => Rules::Unknown(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `what` in a new network namespace with interfaces that are up, after these commands of `ip`.
    fn within<T: Send>(commands: &[&str], what: impl FnOnce() -> T + Send) -> Result<T, String> {
        std::thread::scope(|scope| {
            let done = scope.spawn(|| {
                // SAFETY: unshare takes no pointers; it affects only this thread, which ends with the test.
                if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                    return Err(std::io::Error::last_os_error().to_string());
                }
                let devices = ["link set lo up", "link add v0 type veth peer name v1", "link set v0 up"];
                for command in devices.iter().chain(commands) {
                    let ip = Command::new("ip").args(command.split(' ')).output();
                    match ip {
                        Ok(output) if output.status.success() => {}
                        other => return Err(format!("ip {command}: {other:?}")),
                    }
                }
                Ok(what())
            });
            done.join().unwrap()
        })
    }

    fn look() -> NetworkConfiguration {
        NetworkConfiguration::read(&mut Netlink::open(None, 0).unwrap(), Rules::None).unwrap()
    }

    /// One that is removed first must not take another along that is wanted.
    #[test]
    fn a_saved_configuration_is_restored_and_nothing_else() {
        let made = within(
            &[
                "address add 10.77.0.77/24 dev lo",
                "address add 10.77.0.78/32 dev lo",
                "-6 address add fd77::77/64 dev lo",
                "route add 10.88.0.0/16 via 10.77.0.1",
                "route add unreachable 10.89.0.0/16 metric 7",
                "-6 route add fd88::/64 dev lo",
                "neighbour add 10.77.0.99 lladdr 02:00:00:00:00:99 dev v0 nud permanent",
                "neighbour add 10.77.0.98 lladdr 02:00:00:00:00:98 dev v0 nud reachable",
            ],
            look,
        );
        let made = match made {
            Ok(made) => made,
            Err(why) => {
                orrery_testing::skipped!("this user may not make networks: {why}");
                return;
            }
        };
        let counts = (made.addresses.len(), made.routes.len(), made.neighbours.len());
        // Two of the addresses are the loopback's own.
        assert_eq!(counts, (5, 3, 1), "{made:?}");
        let other = [
            "address add 10.77.0.2/24 dev lo",
            "address add 10.77.0.77/24 dev lo",
            "route add default dev lo",
        ];
        let remade = within(&other, || {
            assert_eq!(made.restore_addresses(), Vec::<String>::new());
            assert_eq!(made.restore_routes(), Vec::<String>::new());
            look()
        });
        let remade = remade.unwrap();
        let own = |network: &NetworkConfiguration| {
            let mut all: Vec<_> = network
                .addresses
                .iter()
                .map(|body| identity(body).map(|it| it.map(<[u8]>::to_vec)))
                .collect();
            all.sort();
            all
        };
        assert_eq!(own(&remade), own(&made));
        assert_eq!(remade.neighbours.len(), 1);
        assert!(made.routes.iter().all(|route| remade.routes.contains(route)), "{made:?} {remade:?}");
    }

    #[test]
    fn routes_and_addresses_of_the_kernel_are_not_saved() {
        assert!(is_configured_route(&[2, 16, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0]));
        assert!(!is_configured_route(&[2, 16, 0, 0, 254, 2, 0, 1, 0, 0, 0, 0]));
        assert!(!is_configured_route(&[2, 16, 0, 0, 254, 3, 0, 1, 0, 2, 0, 0]));
        assert!(
            is_configured_address(&[10, 64, 0, 0])
                && !is_configured_address(&[10, 64, 0, LINK])
                && !is_configured_address(&[])
        );
        assert!(
            is_configured_neighbour(&[2, 0, 0, 0, 2, 0, 0, 0, PERMANENT, 0, 0, 1])
                && !is_configured_neighbour(&[2])
        );
    }
}
