//! The keeper's ends of all connections, and whose turn it is.
//!
//! A *family* is what one process that the vault's own user runs has forked as somebody else: a worker with its
//! descendants, if it has any. An attacker who owns one of them has as many processes as it likes, so what there is little
//! of is shared among families, not among processes: turns, twins and connections.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::sockopt;

use super::message;

/// Whom a connection counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Family(pub(super) u64);

/// A connection, as the keeper has it.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) socket: OwnedFd,
    /// The cookie of the program's end, which is nobody's answer socket.
    pub(super) program_end: u64,
    pub(super) family: Family,
}

impl Peer {
    /// Makes a connection; its other end is the program's.
    pub(super) fn connect(family: Family) -> Result<(Self, OwnedFd), Errno> {
        let (socket, theirs) = message::pair()?;
        message::name_senders(&socket)?;
        let program_end = sockopt::socket_cookie(&theirs)?;
        Ok((Self { socket, program_end, family }, theirs))
    }
}

/// The connections of a vault.
#[derive(Debug)]
pub(super) struct Connections {
    all: Vec<Peer>,
    last_family: Family,
    /// How many turns there have been: with whom the next one begins.
    turns: usize,
}

impl Connections {
    /// Returns those of a program with one process.
    pub(super) fn new(socket: OwnedFd, program_end: u64) -> Self {
        let family = Family(0);
        Self { all: vec![Peer { socket, program_end, family }], last_family: family, turns: 0 }
    }

    pub(super) fn add(&mut self, peer: Peer) {
        self.last_family = self.last_family.max(peer.family);
        self.all.push(peer);
    }

    pub(super) fn remove(&mut self, program_end: u64) {
        self.all.retain(|peer| peer.program_end != program_end);
    }

    /// Removes those for which `closed`, which has an entry for each, is true.
    pub(super) fn remove_closed(&mut self, closed: &[bool]) {
        let mut closed = closed.iter();
        self.all.retain(|_| closed.next() != Some(&true));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn of_family(&self, family: Family) -> usize {
        self.all.iter().filter(|peer| peer.family == family).count()
    }

    /// Returns a family without members.
    pub(super) fn new_family(&mut self) -> Family {
        self.last_family.0 += 1;
        self.last_family
    }

    pub(super) fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all.iter().map(|peer| peer.socket.as_fd())
    }

    pub(super) fn get(&self, program_end: u64) -> Option<&Peer> {
        self.all.iter().find(|peer| peer.program_end == program_end)
    }

    /// Returns who may make a request now, of those that are `ready`: one of each family, and another one each time.
    pub(super) fn turns(&mut self, ready: &[bool]) -> Vec<u64> {
        let begin = self.turns % self.all.len().max(1);
        self.turns = self.turns.wrapping_add(1);
        let ready = self.all.iter().zip(ready).filter(|(_, ready)| **ready).map(|(peer, _)| peer);
        let mut ready: Vec<(usize, &Peer)> = ready.enumerate().collect();
        let begin = begin % ready.len().max(1);
        ready.rotate_left(begin);
        let mut served = std::collections::BTreeSet::new();
        ready.retain(|(_, peer)| served.insert(peer.family));
        ready.into_iter().map(|(_, peer)| peer.program_end).collect()
    }
}

/// Returns whether a family that has `own` of something may have one more, where there are `used` of `most`: as many as
/// are left for others. One family has half of all at most, two have two thirds, and the next one still finds some.
pub(super) fn is_fair(own: usize, used: usize, most: usize) -> bool {
    own < most.saturating_sub(used)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn connections(families: &[u64]) -> (Connections, Vec<OwnedFd>) {
        let (ours, theirs) = message::pair().unwrap();
        let mut all = Connections::new(ours, sockopt::socket_cookie(&theirs).unwrap());
        let mut ends = vec![theirs];
        for family in families {
            let (peer, end) = Peer::connect(Family(*family)).unwrap();
            all.add(peer);
            ends.push(end);
        }
        (all, ends)
    }

    #[test]
    fn each_family_has_a_turn_and_so_has_each_member() {
        let crowd = [&[1; 40][..], &[2], &[3, 3]].concat();
        let (mut all, _ends) = connections(&crowd);
        let ready: Vec<bool> = (0..all.len()).map(|index| index != 0).collect();
        let mut turns = BTreeMap::<u64, usize>::new();
        for _ in 0..100 {
            let served = all.turns(&ready);
            let families: Vec<u64> = served.iter().map(|end| all.get(*end).unwrap().family.0).collect();
            let mut sorted = families.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [1, 2, 3], "one request of each: {families:?}");
            served.into_iter().for_each(|end| *turns.entry(end).or_default() += 1);
        }
        assert_eq!(turns.len(), crowd.len(), "nobody waits for ever: {turns:?}");
    }

    #[test]
    fn a_family_leaves_something_for_the_next_one() {
        let most = 100;
        let mut used = 0;
        for least in [50, 16, 8, 4, 2] {
            let own = (0..).take_while(|own| is_fair(*own, used + own, most)).count();
            assert!(own >= least, "{own}");
            used += own;
        }
        assert!(used < most);
        assert!(!is_fair(0, most, most));
    }

    #[test]
    fn a_new_family_is_nobody_elses() {
        let (mut all, _ends) = connections(&[7, 3]);
        assert_eq!(all.new_family(), Family(8));
        assert_eq!((all.of_family(Family(8)), all.of_family(Family(7)), all.len()), (0, 1, 3));
    }
}
