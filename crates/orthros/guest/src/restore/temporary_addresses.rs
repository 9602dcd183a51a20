//! Addresses that sockets are bound to and that the machine does not have: the service has removed them since.
//!
//! Such a socket lives on under its kernel, and works again when the address comes back. criu binds a new socket, which requires
//! the address; so the loopback interface has it while criu runs.

use std::net::{Ipv4Addr, UdpSocket};

use anyhow::{Context as _, Result};

use crate::command::run;

/// Addresses that the loopback interface has until this is dropped.
pub(crate) struct TemporaryAddresses(Vec<String>);

impl TemporaryAddresses {
    /// Adds those of the addresses that this machine does not have.
    ///
    /// # Errors
    ///
    /// An address cannot be added.
    pub(crate) fn add(addresses: &[Ipv4Addr]) -> Result<Self> {
        let mut added = Self(Vec::new());
        for address in addresses.iter().filter(|address| !is_local(**address)) {
            let address = format!("{address}/32");
            run(&["ip", "address", "add", &address, "dev", "lo"])
                .with_context(|| format!("cannot add the address {address}"))?;
            added.0.push(address);
        }
        Ok(added)
    }
}

impl Drop for TemporaryAddresses {
    fn drop(&mut self) {
        for address in &self.0 {
            if let Err(error) = run(&["ip", "address", "delete", address, "dev", "lo"]) {
                eprintln!("orrery-guest: cannot remove the address {address}: {error:#}");
            }
        }
    }
}

/// Returns whether sockets can be bound to an address.
fn is_local(address: Ipv4Addr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_addresses_are_told_from_others() {
        assert!(is_local(Ipv4Addr::LOCALHOST));
        // For documentation, and nobody's (RFC 5737).
        assert!(!is_local(Ipv4Addr::new(192, 0, 2, 1)));
    }
}
