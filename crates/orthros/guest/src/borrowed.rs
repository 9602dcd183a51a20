//! Addresses that sockets are bound to and that the service's machine has no more: the service has removed them since.
//!
//! Such a socket lives on under its kernel, and speaks again when the address comes back. criu binds it anew, which takes
//! the address; so it is there while criu works, on the loopback, and gone before anything runs.

use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::criu;
use crate::setup;

/// Addresses that are this machine's until this is dropped.
pub(crate) struct Borrowed(Vec<String>);

impl Borrowed {
    /// Those that the sockets in a folder of images have, and this machine has not.
    ///
    /// # Errors
    ///
    /// Where an image is not there or not whole, or an address cannot be had.
    pub(crate) fn for_sockets_in(images: &Path) -> Result<Self> {
        let mut borrowed = Self(Vec::new());
        for address in criu::local_addresses(images)?.into_iter().filter(|address| !is_own(*address)) {
            let address = format!("{address}/32");
            setup::run(&["ip", "address", "add", &address, "dev", "lo"])
                .with_context(|| format!("cannot have the address {address} for a moment"))?;
            borrowed.0.push(address);
        }
        Ok(borrowed)
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        for address in &self.0 {
            if let Err(error) = setup::run(&["ip", "address", "delete", address, "dev", "lo"]) {
                eprintln!("orrery-guest: {address} stays: {error:#}");
            }
        }
    }
}

/// Whether sockets can be bound to it.
fn is_own(address: Ipv4Addr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_told_from_others() {
        assert!(is_own(Ipv4Addr::LOCALHOST));
        // For documentation, and nobody's (RFC 5737).
        assert!(!is_own(Ipv4Addr::new(192, 0, 2, 1)));
    }
}
