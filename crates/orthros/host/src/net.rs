//! The pair's network: a bridge, and a port of it for each machine. The bridge is one of its own, in a network
//! namespace of its own, or one that the host has.
//!
//! Each machine has its network card from the start, with the same addresses: what decides who is reached is whose
//! port is on the bridge. So a failover moves a port, which takes a millisecond, instead of plugging in a card. Until
//! the service lives again nobody's port is: packets that came before would find no connection and be answered with
//! resets.
//!
//! A port belongs to its machine's QEMU and goes with it, however it ends: on a host's own bridge nothing is left
//! behind.

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::arp;
use crate::command::{require, run};
use crate::error::{Error, Result, file};

/// The bridge in a network of its own.
const OWN_BRIDGE: &str = "br0";
/// A name of a network device has no more characters; `IFNAMSIZ` of `linux/if.h`, less the one that ends it.
const LONGEST_NAME: usize = 15;

/// A network that is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetworkConfig {
    /// A network namespace of this name with a bridge in it: both go with the pair. The service is at
    /// [`Network::SERVICE`] there.
    Own(String),
    /// A bridge that is there.
    Bridge(BridgeConfig),
}

/// A place on a bridge of the host's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BridgeConfig {
    /// The bridge's name.
    pub bridge: String,
    /// The service's address.
    pub address: Ipv4Addr,
    /// The bits of it that are the network's.
    pub prefix: u8,
    /// Who knows the way to other networks, if anyone does.
    pub gateway: Option<Ipv4Addr>,
}

impl BridgeConfig {
    /// Parses a place on a bridge, of an address as `192.168.1.7/24`.
    ///
    /// # Errors
    ///
    /// What is wrong with which word.
    pub fn parse(bridge: &str, address: &str, gateway: Option<&str>) -> Result<Self, String> {
        let strange = |c: char| c.is_whitespace() || c == '/';
        if bridge.is_empty() || bridge.len() > LONGEST_NAME || bridge.contains(strange) {
            return Err(format!("bridge {bridge:?}: no network device can be called so"));
        }
        let way = || {
            format!("address {address:?}: write one of IPv4 with its network's bits, as in 192.168.1.7/24")
        };
        let (host, bits) = address.split_once('/').ok_or_else(way)?;
        let (address, prefix) = host.parse().ok().zip(bits.parse().ok()).ok_or_else(way)?;
        if !(1..=30).contains(&prefix) {
            return Err(way());
        }
        let parsed =
            gateway.map(|text| text.parse().map_err(|_| format!("gateway {text:?}: no address of IPv4")));
        let gateway: Option<Ipv4Addr> = parsed.transpose()?;
        let network = |address: Ipv4Addr| address.to_bits() >> (32 - u32::from(prefix));
        match gateway {
            Some(gateway) if gateway == address => {
                Err(format!("gateway {gateway}: this is the service's own address"))
            }
            Some(gateway) if network(gateway) != network(address) => {
                Err(format!("gateway {gateway}: it is not in the network of {address}/{prefix}"))
            }
            _ => Ok(Self { bridge: bridge.to_owned(), address, prefix, gateway }),
        }
    }
}

/// A network; dropped, what was made of it is gone.
pub struct Network {
    /// The namespace that was made for it.
    own: Option<(String, OwnedFd)>,
    place: BridgeConfig,
    ip: PathBuf,
}

impl Network {
    /// Where clients are in a network of its own: the bridge's address.
    pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
    /// The service's address there.
    pub const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
    /// The bits of both addresses that are the network's.
    pub const PREFIX: u8 = 24;

    /// Makes the network, or looks at the one that is there.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] without `ip`, [`Error::Command`] where a namespace cannot be made: it takes root;
    /// [`Error::Network`] where the bridge cannot be used, or the address is someone's.
    pub fn obtain(config: &NetworkConfig) -> Result<Self> {
        match config {
            NetworkConfig::Own(name) => Self::create(name),
            NetworkConfig::Bridge(place) => Self::join(place),
        }
    }

    fn create(name: &str) -> Result<Self> {
        let ip = require("ip", "iproute2")?;
        let there = Path::new("/run/netns").join(name);
        if there.exists() {
            let why = format!("it is there already; if no pair uses it, remove it: ip netns delete {name}");
            return Err(Error::Network { name: name.to_owned(), why });
        }
        run(&ip, &["netns", "add", name], None)?;
        let handle = match fs::File::open(&there) {
            Ok(handle) => handle.into(),
            Err(error) => {
                let _ = run(&ip, &["netns", "delete", name], None);
                return Err(file("open", &there)(error));
            }
        };
        let (address, prefix) = (Self::SERVICE, Self::PREFIX);
        let place = BridgeConfig { bridge: OWN_BRIDGE.to_owned(), address, prefix, gateway: None };
        let network = Self { own: Some((name.to_owned(), handle)), place, ip };
        network.ip(&["link", "set", "lo", "up"])?;
        // A bridge without an address of its own has one of its ports', and another one when that port goes: what the
        // service knows of its clients' card would be wrong after a failover.
        let card = card("52:54", Self::HOST);
        network.ip(&["link", "add", OWN_BRIDGE, "address", &card, "type", "bridge"])?;
        network.ip(&["address", "add", &format!("{}/{prefix}", Self::HOST), "dev", OWN_BRIDGE])?;
        network.ip(&["link", "set", OWN_BRIDGE, "up"])?;
        Ok(network)
    }

    fn join(place: &BridgeConfig) -> Result<Self> {
        let network = Self { own: None, place: place.clone(), ip: require("ip", "iproute2")? };
        let refused = |why: &str| Error::Network { name: place.bridge.clone(), why: why.to_owned() };
        let shown = network.ip(&["-d", "link", "show", "dev", &place.bridge, "type", "bridge"]);
        let shown = shown.unwrap_or_default();
        if shown.is_empty() {
            let way = format!("ip link add {0} type bridge; ip link set {0} up", place.bridge);
            return Err(refused(&format!("this host has no bridge of this name; `{way}` makes one")));
        }
        let words: Vec<&str> = shown.split_whitespace().collect();
        let state = words.iter().position(|&word| word == "stp_state").and_then(|at| words.get(at + 1));
        if state.is_some_and(|&state| state != "0") {
            return Err(refused(
                "it runs the spanning tree protocol, by which a port that is moved carries nothing for half a minute; \
                 turn that off (ip link set BRIDGE type bridge stp_state 0), or use another bridge",
            ));
        }
        // A local address can be bound to; who has it elsewhere is asked.
        if UdpSocket::bind((place.address, 0)).is_ok() {
            return Err(refused(&format!("{} is an address of this host's", place.address)));
        }
        match arp::who_has(&place.bridge, place.address) {
            Ok(None) => Ok(network),
            Ok(Some(card)) => Err(refused(&format!("{} is in use, by the card {card}", place.address))),
            Err(error) => Err(refused(&format!("it cannot be asked who has {}: {error}", place.address))),
        }
    }

    fn ip(&self, arguments: &[&str]) -> Result<String> {
        let space = self.own.iter().flat_map(|(name, _)| ["-n", name]);
        let words: Vec<&str> = space.chain(arguments.iter().copied()).collect();
        run(&self.ip, &words, None)
    }

    /// Returns the service's address.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.place.address
    }

    /// Returns what the card is called by others: the same for all machines of a pair, another one for each address.
    fn card(&self) -> String {
        card("52:54", self.place.address)
    }

    /// Returns the name of a machine's port.
    pub(crate) fn port(&self, generation: u32) -> String {
        match self.own {
            Some(_) => format!("tap{generation}"),
            None => format!("tap{}-{generation}", std::process::id()),
        }
    }

    /// The arguments that have QEMU make a port and a card at it.
    pub(crate) fn arguments(&self, port: &str) -> [String; 4] {
        let back = format!("tap,id=net,ifname={port},script=no,downscript=no");
        let device = format!("virtio-net-pci,netdev=net,mac={}", self.card());
        ["-netdev".to_owned(), back, "-device".to_owned(), device]
    }

    /// Returns what a machine's kernel learns about it.
    pub(crate) fn append(&self) -> String {
        let gateway = self.place.gateway.map(|gateway| format!(" orrery.gateway={gateway}"));
        format!(" orrery.address={}/{}{}", self.place.address, self.place.prefix, gateway.unwrap_or_default())
    }

    /// Switches on a port that QEMU has made. It is not on the bridge yet.
    pub(crate) fn switch_on(&self, port: &str) -> Result<()> {
        // A host's bridge takes the lowest address of its ports, unless it was given one: this one is higher than any
        // card's that was sold, and the same for all ports of a pair, so that a failover does not change the bridge's.
        let card = card("fe:54", self.place.address);
        self.ip(&["link", "set", port, "address", &card, "up"]).map(drop)
    }

    /// Puts a port on the bridge.
    pub(crate) fn attach(&self, port: &str) -> Result<()> {
        self.ip(&["link", "set", port, "master", &self.place.bridge]).map(drop)
    }

    /// Takes a port off the bridge, if it is still there.
    pub(crate) fn detach(&self, port: &str) -> Result<()> {
        let done = self.ip(&["link", "set", port, "nomaster"]).map(drop);
        let gone = || self.ip(&["link", "show", "dev", port]).is_err();
        if done.is_err() && gone() { Ok(()) } else { done }
    }

    /// The namespace, to move a new process into it; nothing where it is this process' own.
    pub(crate) fn handle(&self) -> Option<BorrowedFd<'_>> {
        self.own.as_ref().map(|(_, handle)| handle.as_fd())
    }

    /// Takes away a network that was made under this name, for a program that ends without dropping it. Nothing where
    /// there is none.
    pub fn remove(name: &str) {
        if let Ok(ip) = require("ip", "iproute2") {
            let _ = run(&ip, &["netns", "delete", name], None);
        }
    }

    /// Moves the calling thread into the network: what it connects to from then on, it reaches from the bridge.
    ///
    /// # Errors
    ///
    /// [`Error::Command`] without the right to do so.
    pub fn enter(&self) -> Result<()> {
        let Some(handle) = self.handle() else { return Ok(()) };
        move_into_link_name_space(handle, Some(LinkNameSpaceType::Network))
            .map_err(|error| Error::Command { command: "setns".to_owned(), why: error.to_string() })
    }
}

/// A card's address that nobody has sold, as the second bit of `first` must say, for an address of IPv4.
fn card(first: &str, address: Ipv4Addr) -> String {
    let octets = address.octets().map(|octet| format!(":{octet:02x}"));
    format!("{first}{}", octets.concat())
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Some((name, _)) = &self.own {
            Self::remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_on_a_bridge_is_described_in_words() {
        let place = BridgeConfig::parse("br0", "192.168.1.7/24", Some("192.168.1.1")).unwrap();
        assert_eq!((place.address, place.prefix), (Ipv4Addr::new(192, 168, 1, 7), 24));
        let network = Network { own: None, place, ip: PathBuf::from("ip") };
        assert_eq!(network.append(), " orrery.address=192.168.1.7/24 orrery.gateway=192.168.1.1");
        assert_eq!(network.card(), "52:54:c0:a8:01:07");
        assert!(network.port(9999).len() <= LONGEST_NAME);
    }

    #[test]
    fn the_bridge_keeps_its_address_when_ports_come_and_go() {
        let name = format!("orrery-card-{}", std::process::id());
        let network = match Network::obtain(&NetworkConfig::Own(name)) {
            Ok(network) => network,
            Err(error) => return orrery_testing::skipped!("a bridge that keeps its address: {error}"),
        };
        let address = || {
            let shown = network.ip(&["-o", "link", "show", "dev", OWN_BRIDGE]).unwrap();
            let words: Vec<&str> = shown.split_whitespace().collect();
            words[words.iter().position(|&word| word == "link/ether").unwrap() + 1].to_owned()
        };
        let before = address();
        for port in ["tap1", "tap2"] {
            network.ip(&["tuntap", "add", port, "mode", "tap"]).unwrap();
            network.switch_on(port).unwrap();
            network.attach(port).unwrap();
            assert_eq!(address(), before, "with {port}");
            network.detach(port).unwrap();
            assert_eq!(address(), before, "without {port}");
        }
    }

    #[test]
    fn mistakes_are_told() {
        let refused = |bridge, address, gateway| BridgeConfig::parse(bridge, address, gateway).unwrap_err();
        assert!(refused("", "192.168.1.7/24", None).contains("bridge"));
        assert!(refused("a-name-of-16-char", "192.168.1.7/24", None).contains("bridge"));
        for address in ["192.168.1.7", "192.168.1.7/31", "192.168.1/24", "::1/64", "192.168.1.7/0"] {
            assert!(refused("br0", address, None).contains("192.168.1.7/24"), "{address}");
        }
        assert!(refused("br0", "192.168.1.7/24", Some("192.168.2.1")).contains("not in the network"));
        assert!(refused("br0", "192.168.1.7/24", Some("192.168.1.7")).contains("own address"));
        assert!(refused("br0", "192.168.1.7/24", Some("x")).contains("no address"));
    }
}
