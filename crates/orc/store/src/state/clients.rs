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
pub(crate) struct Clients(HashMap<Holder, Arc<Connection>>);

impl Clients {
    /// Adds a client.
    pub(super) fn insert(&mut self, number: Holder, connection: Arc<Connection>) {
        self.0.insert(number, connection);
    }

    /// Removes a client, and returns its connection if there was one.
    pub(super) fn remove(&mut self, number: Holder) -> Option<Arc<Connection>> {
        self.0.remove(&number)
    }

    /// Returns a client's connection.
    pub(crate) fn get(&self, number: Holder) -> Option<Arc<Connection>> {
        self.0.get(&number).cloned()
    }

    /// Returns how many clients of a trust domain are connected.
    pub(crate) fn count_of(&self, domain: &TrustDomain) -> usize {
        self.0.values().filter(|connection| connection.peer.domain == *domain).count()
    }

    /// Returns all clients.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Holder, &Arc<Connection>)> {
        self.0.iter().map(|(number, connection)| (*number, connection))
    }
}
