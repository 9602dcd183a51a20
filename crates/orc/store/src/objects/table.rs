//! Which client holds which object, and what each trust domain has: the accounting, without any of the files.
//!
//! An object stays while a client holds it, and for some time after that. Each trust domain has its own quota and its own
//! objects; only public ones are shared between trust domains. Times are seconds, which the caller provides.

use std::collections::{BTreeSet, HashMap};

use crate::objects::accounts::Accounts;
use crate::trust_domain::TrustDomain;
use orrery_orc_wire::ObjectId;

/// A client that holds objects: the number of its connection.
pub(crate) type Holder = u64;

/// The quota of each trust domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// The number of bytes.
    pub(crate) bytes: u64,
    /// The number of objects.
    pub(crate) objects: usize,
}

/// One object, with its accounts.
#[derive(Debug)]
pub(crate) struct Entry<P> {
    /// The object.
    pub(crate) object: P,
    /// Bytes that it takes of its trust domain's quota.
    pub(crate) bytes: u64,
    /// Whether it may be mapped executable.
    pub(crate) executable: bool,
    /// How many clients hold it.
    pub(crate) holders: u64,
    /// Since when no client holds it.
    idle_since: u64,
    /// How often it was handed out.
    pub(crate) served: u64,
}

/// The objects of one trust domain.
#[derive(Debug)]
pub(crate) struct Objects<P> {
    entries: HashMap<ObjectId, Entry<P>>,
    bytes: u64,
    idle: BTreeSet<(u64, ObjectId)>,
    /// How many objects take so many bytes.
    lengths: HashMap<u64, usize>,
}

impl<P> Default for Objects<P> {
    fn default() -> Self {
        Self { entries: HashMap::new(), bytes: 0, idle: BTreeSet::new(), lengths: HashMap::new() }
    }
}

impl<P> Objects<P> {
    /// Returns all objects.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&ObjectId, &Entry<P>)> {
        self.entries.iter()
    }

    fn add(&mut self, id: ObjectId, entry: Entry<P>) {
        self.bytes += entry.bytes;
        self.idle.insert((entry.idle_since, id));
        *self.lengths.entry(entry.bytes).or_insert(0) += 1;
        self.entries.insert(id, entry);
    }

    /// Removes an object; returns how many bytes it took.
    fn remove(&mut self, id: ObjectId) -> u64 {
        let Some(entry) = self.entries.remove(&id) else { return 0 };
        self.bytes -= entry.bytes;
        self.idle.remove(&(entry.idle_since, id));
        if let Some(count) = self.lengths.get_mut(&entry.bytes) {
            *count -= 1;
            if *count == 0 {
                self.lengths.remove(&entry.bytes);
            }
        }
        entry.bytes
    }
}

/// A change, for the supervisor and the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The client now has so many holds on the object; 0 if it has none any more.
    Held(Holder, TrustDomain, ObjectId, u64),
    /// The object was evicted.
    Evicted(TrustDomain, ObjectId),
}

/// The accounts of all objects.
#[derive(Debug)]
pub(crate) struct Table<P> {
    limits: Limits,
    accounts: Accounts,
    /// Returns whether a program uses an object without holding it.
    in_use: fn(&P) -> bool,
    trust_domains: HashMap<TrustDomain, Objects<P>>,
    held: HashMap<Holder, HashMap<(TrustDomain, ObjectId), u64>>,
    changes: Vec<Change>,
}

/// The trust domain has no room left, and all its objects are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuotaExceeded;

impl<P> Table<P> {
    /// Creates an empty table.
    pub(crate) fn new(limits: Limits, accounts: Accounts, in_use: fn(&P) -> bool) -> Self {
        Self {
            limits,
            accounts,
            in_use,
            trust_domains: HashMap::new(),
            held: HashMap::new(),
            changes: Vec::new(),
        }
    }

    /// Returns the accounts of the trust domains.
    pub(crate) fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// Returns the accounts of the trust domains, to admit some or to forget some.
    pub(crate) fn accounts_mut(&mut self) -> &mut Accounts {
        &mut self.accounts
    }

    /// Returns whether a trust domain has any objects.
    pub(crate) fn has_any(&self, domain: &TrustDomain) -> bool {
        self.trust_domains.get(domain).is_some_and(|objects| !objects.entries.is_empty())
    }

    /// Returns the owner of the object that `domain` sees as `id`: the trust domain itself, or else the public.
    fn owner(&self, domain: &TrustDomain, id: ObjectId) -> Option<TrustDomain> {
        [domain, &TrustDomain::Public].into_iter().find(|domain| self.get(domain, id).is_some()).cloned()
    }

    /// Returns the object of exactly this trust domain.
    pub(crate) fn get(&self, domain: &TrustDomain, id: ObjectId) -> Option<&Entry<P>> {
        self.trust_domains.get(domain)?.entries.get(&id)
    }

    /// Returns whether the trust domain has an object that takes so many bytes.
    pub(crate) fn has_length(&self, domain: &TrustDomain, bytes: u64) -> bool {
        self.trust_domains.get(domain).is_some_and(|of| of.lengths.contains_key(&bytes))
    }

    /// Returns the objects of all trust domains.
    pub(crate) fn trust_domains(&self) -> impl Iterator<Item = (&TrustDomain, &Objects<P>)> {
        self.trust_domains.iter()
    }

    /// Returns which objects a client holds, and how often.
    pub(crate) fn holds_of(&self, holder: Holder) -> Vec<(TrustDomain, ObjectId, u64)> {
        let held = self.held.get(&holder).into_iter().flatten();
        held.map(|((domain, id), count)| (domain.clone(), *id, *count)).collect()
    }

    /// Gives a client a hold on the object that its trust domain sees under this name; returns it with its owner.
    pub(crate) fn hand_out(
        &mut self,
        holder: Holder,
        domain: &TrustDomain,
        id: ObjectId,
    ) -> Option<(TrustDomain, &Entry<P>)> {
        let owner = self.owner(domain, id)?;
        self.hold(holder, &owner, id, 1)?;
        let entry = self.trust_domains.get_mut(&owner)?.entries.get_mut(&id)?;
        entry.served += 1;
        Some((owner, entry))
    }

    /// Adds `count` holds; returns `None` if there is no such object.
    pub(crate) fn hold(
        &mut self,
        holder: Holder,
        owner: &TrustDomain,
        id: ObjectId,
        count: u64,
    ) -> Option<()> {
        let objects = self.trust_domains.get_mut(owner)?;
        let entry = objects.entries.get_mut(&id)?;
        let holds = self.held.entry(holder).or_default().entry((owner.clone(), id)).or_insert(0);
        if *holds == 0 {
            objects.idle.remove(&(entry.idle_since, id));
            entry.holders += 1;
        }
        *holds += count;
        self.changes.push(Change::Held(holder, owner.clone(), id, *holds));
        Some(())
    }

    /// Makes room for `bytes` more by evicting objects that no client holds, oldest first. Evicts nothing if that would not be
    /// enough.
    ///
    /// # Errors
    /// [`QuotaExceeded`].
    pub(crate) fn make_room(&mut self, domain: &TrustDomain, bytes: u64) -> Result<(), QuotaExceeded> {
        let objects = self.trust_domains.entry(domain.clone()).or_default();
        let (mut left, mut count) = (objects.bytes, objects.entries.len());
        // What other trust domains of the account have stays.
        let most = objects.bytes.saturating_add(self.accounts.left(domain)).min(self.limits.bytes);
        let mut victims = Vec::new();
        let mut idle = objects.idle.iter();
        while left.saturating_add(bytes) > most || count >= self.limits.objects {
            let (_, id) = idle.next().ok_or(QuotaExceeded)?;
            let Some(entry) = objects.entries.get(id).filter(|entry| !(self.in_use)(&entry.object)) else {
                continue;
            };
            left -= entry.bytes;
            count -= 1;
            victims.push(*id);
        }
        for id in victims {
            self.accounts.refund(domain, objects.remove(id));
            self.changes.push(Change::Evicted(domain.clone(), id));
        }
        Ok(())
    }

    /// Returns how many objects of a trust domain no client holds.
    pub(crate) fn idle(&self, domain: &TrustDomain) -> usize {
        self.trust_domains.get(domain).map_or(0, |objects| objects.idle.len())
    }

    /// Evicts the object of a trust domain that no client has held for the longest time.
    ///
    /// # Errors
    /// [`QuotaExceeded`]: all are held.
    pub(crate) fn evict_oldest(&mut self, domain: &TrustDomain) -> Result<(), QuotaExceeded> {
        let objects = self.trust_domains.get_mut(domain).ok_or(QuotaExceeded)?;
        let &(_, id) = objects.idle.first().ok_or(QuotaExceeded)?;
        self.accounts.refund(domain, objects.remove(id));
        self.changes.push(Change::Evicted(domain.clone(), id));
        Ok(())
    }

    /// Enters an object that no client holds yet. If the trust domain has one of that name, that one stays and `object` is
    /// dropped; it becomes executable if `executable` is set.
    ///
    /// # Errors
    /// [`QuotaExceeded`]; nothing was changed.
    pub(crate) fn insert(
        &mut self,
        domain: &TrustDomain,
        id: ObjectId,
        object: P,
        bytes: u64,
        executable: bool,
        now: u64,
    ) -> Result<(), QuotaExceeded> {
        if let Some(entry) =
            self.trust_domains.get_mut(domain).and_then(|objects| objects.entries.get_mut(&id))
        {
            entry.executable |= executable;
            return Ok(());
        }
        self.make_room(domain, bytes)?;
        let objects = self.trust_domains.entry(domain.clone()).or_default();
        objects.add(id, Entry { object, bytes, executable, holders: 0, idle_since: now, served: 0 });
        self.accounts.charge(domain, bytes);
        Ok(())
    }

    /// Takes one hold from a client; returns whether it had one.
    pub(crate) fn release(&mut self, holder: Holder, domain: &TrustDomain, id: ObjectId, now: u64) -> bool {
        for owner in [domain, &TrustDomain::Public] {
            let key = (owner.clone(), id);
            let Some(holds) = self.held.get_mut(&holder).and_then(|held| held.get_mut(&key)) else {
                continue;
            };
            *holds -= 1;
            let left = *holds;
            if left == 0 {
                if let Some(held) = self.held.get_mut(&holder) {
                    held.remove(&key);
                }
                self.drop_hold(owner, id, now);
            }
            self.changes.push(Change::Held(holder, owner.clone(), id, left));
            return true;
        }
        false
    }

    /// Takes all holds from a client that is gone.
    pub(crate) fn remove_holder(&mut self, holder: Holder, now: u64) {
        for (owner, id) in self.held.remove(&holder).unwrap_or_default().into_keys() {
            self.drop_hold(&owner, id, now);
            self.changes.push(Change::Held(holder, owner, id, 0));
        }
    }

    fn drop_hold(&mut self, owner: &TrustDomain, id: ObjectId, now: u64) {
        let Some(objects) = self.trust_domains.get_mut(owner) else { return };
        let Some(entry) = objects.entries.get_mut(&id) else { return };
        entry.holders -= 1;
        if entry.holders == 0 {
            entry.idle_since = now;
            objects.idle.insert((now, id));
        }
    }

    /// Returns the objects that no client has held since `before`.
    pub(crate) fn idle_since(&self, before: u64) -> Vec<(TrustDomain, ObjectId)> {
        let idle = |objects: &Objects<P>| -> Vec<ObjectId> {
            objects.idle.iter().take_while(|(since, _)| *since <= before).map(|(_, id)| *id).collect()
        };
        let of = |(domain, objects): (&TrustDomain, &Objects<P>)| {
            let domain = domain.clone();
            idle(objects).into_iter().map(move |id| (domain.clone(), id))
        };
        self.trust_domains.iter().flat_map(of).collect()
    }

    /// Counts an object that no client holds as idle since `now` only.
    pub(crate) fn refresh(&mut self, domain: &TrustDomain, id: ObjectId, now: u64) {
        let Some(objects) = self.trust_domains.get_mut(domain) else { return };
        let Some(entry) = objects.entries.get_mut(&id) else { return };
        if objects.idle.remove(&(entry.idle_since, id)) {
            entry.idle_since = now;
            objects.idle.insert((now, id));
        }
    }

    /// Evicts the objects that no client has held since `before`.
    pub(crate) fn expire(&mut self, before: u64) {
        for (domain, objects) in &mut self.trust_domains {
            while let Some(&(since, id)) = objects.idle.first().filter(|(since, _)| *since <= before) {
                debug_assert!(since <= before);
                self.accounts.refund(domain, objects.remove(id));
                self.changes.push(Change::Evicted(domain.clone(), id));
            }
        }
        self.trust_domains.retain(|_, objects| !objects.entries.is_empty());
    }

    /// Returns the changes since the last call, in order.
    pub(crate) fn take_changes(&mut self) -> Vec<Change> {
        core::mem::take(&mut self.changes)
    }
}

#[cfg(test)]
mod tests;
