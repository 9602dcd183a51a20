//! What a service makes of its machine's network while it runs: addresses, routes, permanent neighbours, and rules of netfilter.
//!
//! The guest with the service listens to what the kernel tells of changes, and keeps how it is after each of them in a file in
//! memory, which a rescue carries over as it does any other. Nothing is kept, and nothing runs, before something changes.
//! What was changed in the last milliseconds before a kernel died may be missing.
//!
//! Addresses, routes and neighbours are kept as the kernel lists them, and given back to it as they are; `ip address save` and
//! `ip route save` do the same. Addresses must be there before sockets are bound to them, and the other things only when
//! the card is on. The kernel's own routes come by themselves.
//!
//! Rules are listed and made again by the image's own `nft`, which a service that has rules needs, too, with counters and sets
//! as they were when the rules last changed. Connection tracking begins anew: it takes connections that it finds in the middle for
//! new ones until both sides have sent something.

use std::fs;
use std::io::ErrorKind;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::netlink::NETFILTER;
use serde::{Deserialize, Serialize};

use crate::netlink::{ANSWER, CREATE, Netlink, REPLACE, REQUEST, attribute, message};
use crate::setup;

/// Where it is kept: among the files that a rescue carries over.
const KEPT: &str = "/run/orrery.network";
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
/// What is kept is listed for a fifth of the time at most.
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
    /// There are none.
    #[default]
    None,
    /// As `nft` lists them.
    Listed(String),
    /// There may be some, and nobody who could list them.
    Unknown(String),
}

/// How the network is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Network {
    /// Bodies of messages.
    addresses: Vec<Vec<u8>>,
    routes: Vec<Vec<u8>>,
    neighbours: Vec<Vec<u8>>,
    rules: Rules,
}

fn byte(body: &[u8], at: usize) -> u8 {
    body.get(at).copied().unwrap_or_default()
}

fn is_kept_address(body: &[u8]) -> bool {
    FAMILIES.contains(&byte(body, 0)) && byte(body, 3) != LINK
}

fn is_kept_route(body: &[u8]) -> bool {
    let flags = body.get(8..).and_then(<[u8]>::first_chunk).map_or(0, |flags| u32::from_ne_bytes(*flags));
    FAMILIES.contains(&byte(body, 0)) && !OWN_ROUTES.contains(&byte(body, 5)) && flags & CLONED == 0
}

fn is_kept_neighbour(body: &[u8]) -> bool {
    FAMILIES.contains(&byte(body, 0)) && byte(body, 8) & PERMANENT != 0
}

/// What makes an address this one: its family and its network's bits, its device, itself.
fn identity(body: &[u8]) -> [Option<&[u8]>; 3] {
    let of = |kind| attribute(body, ADDRESS.header, kind);
    [body.get(..2), body.get(4..ADDRESS.header), of(IFA_LOCAL).or_else(|| of(IFA_ADDRESS))]
}

impl Network {
    /// How it is now.
    fn look(netlink: &mut Netlink, rules: Rules) -> Result<Self> {
        let mut list = |kind: &Kind, wanted: fn(&[u8]) -> bool| {
            let mut listed = netlink.list(kind.list, &vec![0; kind.header]).context(kind.name)?;
            listed.retain(|body| wanted(body));
            anyhow::Ok(listed)
        };
        let (addresses, mut routes) = (list(&ADDRESS, is_kept_address)?, list(&ROUTE, is_kept_route)?);
        for route in &mut routes {
            // A route that is given back with what has become of its link is refused.
            if let Some(flags) = route.get_mut(8..12) {
                flags.copy_from_slice(&u32::from(byte(flags, 0) & ON_LINK).to_ne_bytes());
            }
        }
        routes.sort_by_key(|route| {
            BY_OTHERS.iter().any(|&kind| attribute(route, ROUTE.header, kind).is_some())
        });
        Ok(Self { addresses, routes, neighbours: list(&NEIGHBOUR, is_kept_neighbour)?, rules })
    }

    fn keep(&self) -> Result<()> {
        let aside = format!("{KEPT}.new");
        fs::write(&aside, serde_json::to_vec(self)?).with_context(|| format!("cannot write {aside}"))?;
        fs::rename(&aside, KEPT).with_context(|| format!("cannot write {KEPT}"))
    }

    /// What was kept of the dead guest's; nothing where the service had changed nothing.
    ///
    /// # Errors
    ///
    /// Where it is not what was written.
    pub(crate) fn kept() -> Result<Option<Self>> {
        match fs::read(KEPT) {
            Ok(bytes) => {
                Ok(Some(serde_json::from_slice(&bytes).with_context(|| format!("cannot read {KEPT}"))?))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {KEPT}")),
        }
    }

    /// Gives this machine the addresses, and no others; what does not work is told in words.
    pub(crate) fn put_addresses_back(&self) -> Vec<String> {
        let mut lost = Vec::new();
        let done = Netlink::open(None, 0).and_then(|mut netlink| {
            let mut there = netlink.list(ADDRESS.list, &[0; 8])?;
            there.retain(|body| is_kept_address(body));
            let wanted: Vec<_> = self.addresses.iter().map(|body| identity(body)).collect();
            for body in there.iter().filter(|body| !wanted.contains(&identity(body))) {
                netlink.ask(&message(DELETE_ADDRESS, REQUEST | ANSWER, body)).context("one too many")?;
            }
            // Only now: the first address of a network may take the others along.
            put_back(&mut netlink, &ADDRESS, &self.addresses, &mut lost);
            Ok(())
        });
        lost.extend(done.err().map(|error| format!("the service's addresses: {error:#}")));
        lost
    }

    /// Makes the rules, before anything comes from elsewhere.
    ///
    /// # Errors
    ///
    /// Where they cannot be made, or were not known.
    pub(crate) fn put_rules_back(&self) -> Result<()> {
        match &self.rules {
            Rules::None => Ok(()),
            Rules::Unknown(why) => {
                Err(anyhow::anyhow!("{why}")).context("the service's netfilter rules are lost")
            }
            Rules::Listed(text) => {
                fs::write(RULES, format!("flush ruleset\n{text}"))
                    .with_context(|| format!("cannot write {RULES}"))?;
                setup::run(&["nft", "-f", RULES]).context("the service's netfilter rules are lost")
            }
        }
    }

    /// Gives this machine the routes and neighbours; what does not work is told in words.
    pub(crate) fn put_ways_back(&self) -> Vec<String> {
        let mut lost = Vec::new();
        match Netlink::open(None, 0) {
            Ok(mut netlink) => {
                put_back(&mut netlink, &ROUTE, &self.routes, &mut lost);
                put_back(&mut netlink, &NEIGHBOUR, &self.neighbours, &mut lost);
            }
            Err(error) => lost.push(format!("the service's routes: {error:#}")),
        }
        lost
    }
}

fn put_back(netlink: &mut Netlink, kind: &Kind, bodies: &[Vec<u8>], lost: &mut Vec<String>) {
    for (index, body) in bodies.iter().enumerate() {
        let message = message(kind.new, REQUEST | ANSWER | CREATE | REPLACE, body);
        if let Err(error) = netlink.ask(&message) {
            let (name, of) = (kind.name, bodies.len());
            lost.push(format!("{name} {} of {of} that the service had is lost: {error:#}", index + 1));
        }
    }
}

/// What the kernel tells of changes from now on.
pub(crate) struct Changes {
    network: Netlink,
    /// Nothing where the kernel has no netfilter.
    rules: Option<Netlink>,
}

impl Changes {
    /// Begins to listen.
    ///
    /// # Errors
    ///
    /// Where the kernel tells nothing.
    pub(crate) fn listen() -> Result<Self> {
        let network = Netlink::open(None, CHANGES).context("cannot hear of the network's changes")?;
        Ok(Self { network, rules: Netlink::open(Some(NETFILTER), RULE_CHANGES).ok() })
    }

    /// Keeps how the network is after each change, in a thread of its own, and `now`, too.
    pub(crate) fn keep(mut self, now: bool) {
        std::thread::spawn(move || {
            let (mut last, mut generation) = (None, NO_RULES);
            let mut due = now;
            loop {
                if due {
                    let begin = Instant::now();
                    if let Err(error) = update(&mut last, &mut generation) {
                        eprintln!(
                            "orrery-guest: what the service makes of its network is not kept: {error:#}"
                        );
                    }
                    std::thread::sleep(begin.elapsed() * REST);
                }
                self.wait();
                due = true;
            }
        });
    }

    /// Waits for a change, and forgets all that were told: what is looked at next has them.
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

/// Keeps how the network is, where that has changed.
fn update(last: &mut Option<Network>, generation: &mut u32) -> Result<()> {
    let now = rules_generation();
    let rules = match last {
        Some(last) if now == *generation => last.rules.clone(),
        _ if now == NO_RULES => Rules::None,
        _ => list_rules(),
    };
    *generation = now;
    let network = Network::look(&mut Netlink::open(None, 0)?, rules)?;
    if last.as_ref() != Some(&network) {
        network.keep()?;
        *last = Some(network);
    }
    Ok(())
}

/// A number that goes up with each change of rules.
fn rules_generation() -> u32 {
    let asked =
        Netlink::open(Some(NETFILTER), 0).and_then(|mut netlink| netlink.look_up(GENERATION, &[0; 4]));
    let told = asked.ok();
    let id = told.as_ref().and_then(|body| attribute(body, 4, GENERATION_ID)?.first_chunk());
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

    /// In a network of its own, with devices that are on, after these commands of `ip`.
    fn within<T: Send>(commands: &[&str], what: impl FnOnce() -> T + Send) -> Result<T, String> {
        std::thread::scope(|scope| {
            let done = scope.spawn(|| {
                // SAFETY: no pointers are involved; only this thread's network is another one.
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

    fn look() -> Network {
        Network::look(&mut Netlink::open(None, 0).unwrap(), Rules::None).unwrap()
    }

    /// One that is removed first must not take another along that is wanted.
    #[test]
    fn what_was_made_of_one_network_is_made_of_another_and_nothing_more() {
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
            assert_eq!(made.put_addresses_back(), Vec::<String>::new());
            assert_eq!(made.put_ways_back(), Vec::<String>::new());
            look()
        });
        let remade = remade.unwrap();
        let own = |network: &Network| {
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
    fn what_the_kernel_makes_itself_is_not_kept() {
        assert!(is_kept_route(&[2, 16, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0]));
        assert!(!is_kept_route(&[2, 16, 0, 0, 254, 2, 0, 1, 0, 0, 0, 0]));
        assert!(!is_kept_route(&[2, 16, 0, 0, 254, 3, 0, 1, 0, 2, 0, 0]));
        assert!(
            is_kept_address(&[10, 64, 0, 0]) && !is_kept_address(&[10, 64, 0, LINK]) && !is_kept_address(&[])
        );
        assert!(is_kept_neighbour(&[2, 0, 0, 0, 2, 0, 0, 0, PERMANENT, 0, 0, 1]) && !is_kept_neighbour(&[2]));
    }
}
