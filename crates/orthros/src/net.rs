//! The pair's network: a bridge in a network namespace of its own, and a port of it for each machine.
//!
//! Each machine has its network card from the start, with the same addresses: what decides who is reached is whose
//! port is on the bridge. So a failover moves a port, which takes a millisecond, instead of plugging in a card. Until the
//! service lives again nobody's port is: packets that came before would find no connection and be answered with resets.

use std::fs;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::command::{require, run};
use crate::error::{Error, Result, file};

/// The card's address, the same for all generations.
pub(crate) const MAC: &str = "52:54:00:0e:0e:01";

/// A network; dropped, it is gone.
pub struct Network {
    name: String,
    ip: PathBuf,
    handle: OwnedFd,
}

impl Network {
    /// Where clients are: the bridge's own address.
    pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
    /// The service's address.
    pub const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
    /// The bits of both addresses that are the network's.
    pub const PREFIX: u8 = 24;

    /// Makes a network namespace called `name` with a bridge in it.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] without `ip`, [`Error::Command`] where the namespace cannot be made: it takes root.
    pub fn create(name: &str) -> Result<Self> {
        let ip = require("ip", "iproute2")?;
        run(&ip, &["netns", "add", name], None)?;
        let place = Path::new("/run/netns").join(name);
        let handle = match fs::File::open(&place) {
            Ok(handle) => handle.into(),
            Err(error) => {
                let _ = run(&ip, &["netns", "delete", name], None);
                return Err(file("open", &place)(error));
            }
        };
        let network = Self { name: name.to_owned(), ip, handle };
        network.ip(&["link", "set", "lo", "up"])?;
        network.ip(&["link", "add", "br0", "type", "bridge"])?;
        network.ip(&["address", "add", &format!("{}/{}", Self::HOST, Self::PREFIX), "dev", "br0"])?;
        network.ip(&["link", "set", "br0", "up"])?;
        Ok(network)
    }

    fn ip(&self, arguments: &[&str]) -> Result<String> {
        let words: Vec<&str> = ["-n", &self.name].into_iter().chain(arguments.iter().copied()).collect();
        run(&self.ip, &words, None)
    }

    /// Makes a port, which is not on the bridge yet.
    ///
    /// # Errors
    ///
    /// [`Error::Command`].
    pub fn add_port(&self, port: &str) -> Result<()> {
        self.ip(&["tuntap", "add", "dev", port, "mode", "tap"])?;
        self.ip(&["link", "set", port, "up"]).map(drop)
    }

    /// Puts a port on the bridge.
    ///
    /// # Errors
    ///
    /// [`Error::Command`].
    pub fn attach(&self, port: &str) -> Result<()> {
        self.ip(&["link", "set", port, "master", "br0"]).map(drop)
    }

    /// Takes a port off the bridge.
    ///
    /// # Errors
    ///
    /// [`Error::Command`].
    pub fn detach(&self, port: &str) -> Result<()> {
        self.ip(&["link", "set", port, "nomaster"]).map(drop)
    }

    /// The namespace, to move a new process into it.
    pub(crate) fn handle(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }

    /// Moves the calling thread into the network: what it connects to from then on, it reaches from the bridge.
    ///
    /// # Errors
    ///
    /// [`Error::Command`] without the right to do so.
    pub fn enter(&self) -> Result<()> {
        move_into_link_name_space(self.handle(), Some(LinkNameSpaceType::Network))
            .map_err(|error| Error::Command { command: "setns".to_owned(), why: error.to_string() })
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = run(&self.ip, &["netns", "delete", &self.name], None);
    }
}
