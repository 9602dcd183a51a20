//! Who holds what: the store's book, without any of the things themselves.
//!
//! An object stays while somebody holds it, and for a while after that. Each realm has its own quota and its own objects;
//! the only ones that cross are the public ones. Time is given in seconds, by whoever calls.

use std::collections::{BTreeSet, HashMap};

use crate::trust_domain::Realm;
use orrery_orc_wire::ObjectId;

/// Somebody who holds objects: a connection's number.
pub(crate) type Holder = u64;

/// What each realm may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Bytes.
    pub(crate) bytes: u64,
    /// Objects.
    pub(crate) objects: usize,
}

/// One object.
#[derive(Debug)]
pub(crate) struct Entry<P> {
    /// The thing itself.
    pub(crate) object: P,
    /// What it counts in its realm's quota.
    pub(crate) bytes: u64,
    /// Whether it may be mapped executable.
    pub(crate) executable: bool,
    /// How many holders it has.
    pub(crate) holders: u64,
    /// Since when it has none.
    idle_since: u64,
    /// How often it was handed out.
    pub(crate) served: u64,
}

/// The objects of one realm.
#[derive(Debug)]
pub(crate) struct Objects<P> {
    entries: HashMap<ObjectId, Entry<P>>,
    bytes: u64,
    idle: BTreeSet<(u64, ObjectId)>,
}

impl<P> Default for Objects<P> {
    fn default() -> Self {
        Self { entries: HashMap::new(), bytes: 0, idle: BTreeSet::new() }
    }
}

impl<P> Objects<P> {
    /// All objects.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&ObjectId, &Entry<P>)> {
        self.entries.iter()
    }

    fn remove(&mut self, id: ObjectId) {
        if let Some(entry) = self.entries.remove(&id) {
            self.bytes -= entry.bytes;
            self.idle.remove(&(entry.idle_since, id));
        }
    }
}

/// Something that changed, for the keeper and the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The holder now has so many holds on the object; 0 where it has none any more.
    Held(Holder, Realm, ObjectId, u64),
    /// The object is gone.
    Evicted(Realm, ObjectId),
}

/// The book.
#[derive(Debug)]
pub(crate) struct Table<P> {
    limits: Limits,
    /// Whether somebody uses an object whom the table does not know of.
    in_use: fn(&P) -> bool,
    realms: HashMap<Realm, Objects<P>>,
    held: HashMap<Holder, HashMap<(Realm, ObjectId), u64>>,
    changes: Vec<Change>,
}

/// The realm has no room left that could be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

impl<P> Table<P> {
    /// An empty one.
    pub(crate) fn new(limits: Limits, in_use: fn(&P) -> bool) -> Self {
        Self { limits, in_use, realms: HashMap::new(), held: HashMap::new(), changes: Vec::new() }
    }

    /// Where `realm` sees `id`: among its own objects, else among the public ones.
    fn place(&self, realm: &Realm, id: ObjectId) -> Option<Realm> {
        [realm, &Realm::Public].into_iter().find(|realm| self.of(realm, id).is_some()).cloned()
    }

    /// The object of exactly this realm.
    pub(crate) fn of(&self, realm: &Realm, id: ObjectId) -> Option<&Entry<P>> {
        self.realms.get(realm)?.entries.get(&id)
    }

    /// Whether the realm has an object that takes so many bytes.
    pub(crate) fn has_length(&self, realm: &Realm, bytes: u64) -> bool {
        self.realms.get(realm).is_some_and(|of| of.entries.values().any(|entry| entry.bytes == bytes))
    }

    /// All realms.
    pub(crate) fn realms(&self) -> impl Iterator<Item = (&Realm, &Objects<P>)> {
        self.realms.iter()
    }

    /// What `holder` has, and how often.
    pub(crate) fn holds_of(&self, holder: Holder) -> Vec<(Realm, ObjectId, u64)> {
        let held = self.held.get(&holder).into_iter().flatten();
        held.map(|((realm, id), count)| (realm.clone(), *id, *count)).collect()
    }

    /// Gives `holder` a hold on the object that its realm sees under this name, and the place of the object.
    pub(crate) fn find(&mut self, holder: Holder, realm: &Realm, id: ObjectId) -> Option<(Realm, &Entry<P>)> {
        let place = self.place(realm, id)?;
        self.hold(holder, &place, id, 1)?;
        let entry = self.realms.get_mut(&place)?.entries.get_mut(&id)?;
        entry.served += 1;
        Some((place, entry))
    }

    /// Adds `count` holds.
    pub(crate) fn hold(&mut self, holder: Holder, place: &Realm, id: ObjectId, count: u64) -> Option<()> {
        let objects = self.realms.get_mut(place)?;
        let entry = objects.entries.get_mut(&id)?;
        let holds = self.held.entry(holder).or_default().entry((place.clone(), id)).or_insert(0);
        if *holds == 0 {
            objects.idle.remove(&(entry.idle_since, id));
            entry.holders += 1;
        }
        *holds += count;
        self.changes.push(Change::Held(holder, place.clone(), id, *holds));
        Some(())
    }

    /// Makes room for `bytes` more in `realm`, at the price of objects that nobody holds, oldest first. Evicts nothing where
    /// that would not be enough.
    ///
    /// # Errors
    /// [`Full`].
    pub(crate) fn make_room(&mut self, realm: &Realm, bytes: u64) -> Result<(), Full> {
        let objects = self.realms.entry(realm.clone()).or_default();
        let (mut left, mut count) = (objects.bytes, objects.entries.len());
        let mut victims = Vec::new();
        let mut idle = objects.idle.iter();
        while left.saturating_add(bytes) > self.limits.bytes || count >= self.limits.objects {
            let (_, id) = idle.next().ok_or(Full)?;
            let Some(entry) = objects.entries.get(id).filter(|entry| !(self.in_use)(&entry.object)) else {
                continue;
            };
            left -= entry.bytes;
            count -= 1;
            victims.push(*id);
        }
        for id in victims {
            objects.remove(id);
            self.changes.push(Change::Evicted(realm.clone(), id));
        }
        Ok(())
    }

    /// How many objects of `realm` nobody holds.
    pub(crate) fn idle(&self, realm: &Realm) -> usize {
        self.realms.get(realm).map_or(0, |objects| objects.idle.len())
    }

    /// Evicts the object of `realm` that nobody has held for the longest time.
    ///
    /// # Errors
    /// [`Full`]: all are held.
    pub(crate) fn evict_oldest(&mut self, realm: &Realm) -> Result<(), Full> {
        let objects = self.realms.get_mut(realm).ok_or(Full)?;
        let &(_, id) = objects.idle.first().ok_or(Full)?;
        objects.remove(id);
        self.changes.push(Change::Evicted(realm.clone(), id));
        Ok(())
    }

    /// Enters an object that nobody holds yet. Where there is one of that name in exactly this realm it stays, and `object` is
    /// dropped; being executable is added to it.
    ///
    /// # Errors
    /// [`Full`]; nothing was changed.
    pub(crate) fn insert(
        &mut self,
        realm: &Realm,
        id: ObjectId,
        object: P,
        bytes: u64,
        executable: bool,
        now: u64,
    ) -> Result<(), Full> {
        if let Some(entry) = self.realms.get_mut(realm).and_then(|objects| objects.entries.get_mut(&id)) {
            entry.executable |= executable;
            return Ok(());
        }
        self.make_room(realm, bytes)?;
        let objects = self.realms.entry(realm.clone()).or_default();
        objects.bytes += bytes;
        objects.idle.insert((now, id));
        objects
            .entries
            .insert(id, Entry { object, bytes, executable, holders: 0, idle_since: now, served: 0 });
        Ok(())
    }

    /// Takes one hold from `holder`; whether it had one.
    pub(crate) fn release(&mut self, holder: Holder, realm: &Realm, id: ObjectId, now: u64) -> bool {
        for place in [realm, &Realm::Public] {
            let key = (place.clone(), id);
            let Some(holds) = self.held.get_mut(&holder).and_then(|held| held.get_mut(&key)) else {
                continue;
            };
            *holds -= 1;
            let left = *holds;
            if left == 0 {
                if let Some(held) = self.held.get_mut(&holder) {
                    held.remove(&key);
                }
                self.let_go(place, id, now);
            }
            self.changes.push(Change::Held(holder, place.clone(), id, left));
            return true;
        }
        false
    }

    /// Takes all that `holder` has: it is gone.
    pub(crate) fn leave(&mut self, holder: Holder, now: u64) {
        for (place, id) in self.held.remove(&holder).unwrap_or_default().into_keys() {
            self.let_go(&place, id, now);
            self.changes.push(Change::Held(holder, place, id, 0));
        }
    }

    fn let_go(&mut self, place: &Realm, id: ObjectId, now: u64) {
        let Some(objects) = self.realms.get_mut(place) else { return };
        let Some(entry) = objects.entries.get_mut(&id) else { return };
        entry.holders -= 1;
        if entry.holders == 0 {
            entry.idle_since = now;
            objects.idle.insert((now, id));
        }
    }

    /// What nobody has held since `before`.
    pub(crate) fn idle_since(&self, before: u64) -> Vec<(Realm, ObjectId)> {
        let idle = |objects: &Objects<P>| -> Vec<ObjectId> {
            objects.idle.iter().take_while(|(since, _)| *since <= before).map(|(_, id)| *id).collect()
        };
        let of = |(realm, objects): (&Realm, &Objects<P>)| {
            let realm = realm.clone();
            idle(objects).into_iter().map(move |id| (realm.clone(), id))
        };
        self.realms.iter().flat_map(of).collect()
    }

    /// Has an object that nobody holds be idle since now only.
    pub(crate) fn refresh(&mut self, realm: &Realm, id: ObjectId, now: u64) {
        let Some(objects) = self.realms.get_mut(realm) else { return };
        let Some(entry) = objects.entries.get_mut(&id) else { return };
        if objects.idle.remove(&(entry.idle_since, id)) {
            entry.idle_since = now;
            objects.idle.insert((now, id));
        }
    }

    /// Evicts what nobody has held since `before`.
    pub(crate) fn expire(&mut self, before: u64) {
        for (realm, objects) in &mut self.realms {
            while let Some(&(since, id)) = objects.idle.first().filter(|(since, _)| *since <= before) {
                debug_assert!(since <= before);
                objects.remove(id);
                self.changes.push(Change::Evicted(realm.clone(), id));
            }
        }
        self.realms.retain(|_, objects| !objects.entries.is_empty());
    }

    /// What changed since this was last asked, in order.
    pub(crate) fn take_changes(&mut self) -> Vec<Change> {
        core::mem::take(&mut self.changes)
    }
}

#[cfg(test)]
mod tests;
