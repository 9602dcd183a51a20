//! Connected clients and the sockets that they connect to.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::objects::table::Holder;
use crate::supervisor::records::PeerRecord;
use crate::trust_domain::TrustDomain;

/// A connected client.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: PeerRecord,
}

/// A socket that clients connect to.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: OwnedFd,
    /// The name of its clients' trust domain; `None` if each user is one.
    pub(crate) domain: Option<String>,
}

/// All connected clients, by the number of their connection.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    connections: HashMap<Holder, Arc<Connection>>,
    /// How many clients each trust domain has, and each account.
    of_domain: HashMap<TrustDomain, usize>,
    of_account: HashMap<TrustDomain, usize>,
}

fn subtract(counts: &mut HashMap<TrustDomain, usize>, of: &TrustDomain) {
    if let Some(count) = counts.get_mut(of) {
        *count -= 1;
        if *count == 0 {
            counts.remove(of);
        }
    }
}

impl Clients {
    /// Adds a client.
    pub(super) fn insert(&mut self, number: Holder, connection: Arc<Connection>) {
        *self.of_domain.entry(connection.peer.domain.clone()).or_insert(0) += 1;
        *self.of_account.entry(connection.peer.account.clone()).or_insert(0) += 1;
        self.connections.insert(number, connection);
    }

    /// Removes a client, and returns its connection if there was one.
    pub(super) fn remove(&mut self, number: Holder) -> Option<Arc<Connection>> {
        let removed = self.connections.remove(&number)?;
        subtract(&mut self.of_domain, &removed.peer.domain);
        subtract(&mut self.of_account, &removed.peer.account);
        Some(removed)
    }

    /// Returns a client's connection.
    pub(crate) fn get(&self, number: Holder) -> Option<Arc<Connection>> {
        self.connections.get(&number).cloned()
    }

    /// Returns whether a client of a trust domain is connected.
    pub(crate) fn has_any(&self, domain: &TrustDomain) -> bool {
        self.of_domain.contains_key(domain)
    }

    /// Returns how many clients of an account are connected.
    pub(crate) fn count_of(&self, account: &TrustDomain) -> usize {
        self.of_account.get(account).copied().unwrap_or(0)
    }

    /// Returns all clients.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Holder, &Arc<Connection>)> {
        self.connections.iter().map(|(number, connection)| (*number, connection))
    }
}
