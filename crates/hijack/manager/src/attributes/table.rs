//! The values of all tracees, the capabilities to them, and the subscriptions to events.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::AttributeError;
use super::class::{Class, Classes};
use super::event::{Event, Queue, Topic};
use super::guard::{Guard, Proposal};
use super::rights::{Rights, Scope};
use super::tracee::TraceeId;
use super::upcalls::{NotMade, Upcalls};

/// How much a table holds: who asks for more is refused, so that nobody's requests use up the manager's memory.
const MOST_TRACEES: usize = 4096;
const MOST_CAPABILITIES: usize = 16_384;
const MOST_SUBSCRIPTIONS: usize = 1024;
const MOST_QUEUED: usize = 4096;
const MOST_CHANGES: usize = 65_536;

/// A right to attributes. It cannot be made but by a [`Table`], nor copied: its owner can [derive](Table::derive) another one with
/// fewer rights. Other processes hold the other end of a connection instead, and extensions an index that the host checks.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Capability {
    table: u64,
    number: u64,
}

/// A queue of events that somebody asked for.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Subscription {
    table: u64,
    number: u64,
}

/// An attribute that was set, for the service that acts on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// The tracee whose attribute changed.
    pub tracee: TraceeId,
    /// The index of the class.
    pub class: usize,
    /// The value before the change.
    pub before: i64,
    /// The value after the change.
    pub after: i64,
}

struct Held {
    rights: Rights,
    parent: Option<u64>,
}

struct Subscribed {
    topics: Vec<Topic>,
    readable: Scope,
    capability: u64,
    queue: Queue,
}

/// The attributes of all tracees. See the crate's documentation for how it is used.
pub struct Table {
    own: u64,
    classes: Classes,
    guards: Vec<(Vec<usize>, Box<dyn Guard + Send>)>,
    values: BTreeMap<TraceeId, Vec<i64>>,
    upcalls: BTreeMap<TraceeId, Box<dyn Upcalls + Send>>,
    capabilities: HashMap<u64, Held>,
    subscriptions: BTreeMap<u64, Subscribed>,
    changes: Vec<Change>,
    next: u64,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sizes = (self.values.len(), self.capabilities.len(), self.subscriptions.len());
        f.debug_struct("Table").field("sizes", &sizes).finish_non_exhaustive()
    }
}

impl Table {
    /// Makes a table without tracees.
    #[must_use]
    pub fn new(classes: Classes) -> Self {
        static TABLES: AtomicU64 = AtomicU64::new(1);
        Self {
            own: TABLES.fetch_add(1, Relaxed),
            classes,
            guards: Vec::new(),
            values: BTreeMap::new(),
            upcalls: BTreeMap::new(),
            capabilities: HashMap::new(),
            subscriptions: BTreeMap::new(),
            changes: Vec::new(),
            next: 1,
        }
    }

    /// Returns the classes.
    #[must_use]
    pub fn classes(&self) -> &Classes {
        &self.classes
    }

    /// Has a guard asked about changes from now on.
    pub fn add_guard(&mut self, guard: Box<dyn Guard + Send>) {
        self.guards.push((guard.classes(), guard));
    }

    /// Adds a tracee, all of whose values are the classes' defaults.
    ///
    /// # Errors
    /// [`AttributeError::Full`].
    pub fn add_tracee(&mut self) -> Result<TraceeId, AttributeError> {
        if self.values.len() >= MOST_TRACEES {
            return Err(AttributeError::Full("tracee"));
        }
        let tracee = TraceeId(self.number());
        self.values.insert(tracee, self.classes.all().iter().map(|class| class.default).collect());
        Ok(tracee)
    }

    /// Removes a tracee, with the capabilities that are about it alone.
    pub fn remove_tracee(&mut self, tracee: TraceeId) {
        self.values.remove(&tracee);
        self.upcalls.remove(&tracee);
        let about = |held: &Held| held.rights.scope == Scope::One(tracee);
        let gone: Vec<u64> =
            self.capabilities.iter().filter(|(_, held)| about(held)).map(|(number, _)| *number).collect();
        for number in gone {
            self.revoke_number(number);
        }
    }

    /// Returns the tracees.
    pub fn tracees(&self) -> impl Iterator<Item = TraceeId> {
        self.values.keys().copied()
    }

    /// Makes a capability with these rights. Only the manager itself has the table, and so calls this.
    ///
    /// # Errors
    /// [`AttributeError::Full`].
    pub fn grant(&mut self, rights: Rights) -> Result<Capability, AttributeError> {
        self.hold(rights, None)
    }

    /// Makes a capability from another one, with at most its rights. It ends with that one.
    ///
    /// # Errors
    /// [`AttributeError::Denied`] where the other one may not be delegated, [`AttributeError::Revoked`], [`AttributeError::Full`].
    pub fn derive(&mut self, from: &Capability, rights: Rights) -> Result<Capability, AttributeError> {
        let own = self.rights(from)?;
        if !own.delegate {
            return Err(AttributeError::Denied {
                operation: "delegate",
                object: "the capability".to_owned(),
            });
        }
        self.hold(own.and(rights), Some(from.number))
    }

    /// Makes a capability for an extension from another one, with at most its rights. It ends with that one.
    ///
    /// # Errors
    /// [`AttributeError::Denied`] where no extensions may be loaded with the other one, [`AttributeError::Revoked`],
    /// [`AttributeError::Full`].
    pub fn lend(&mut self, from: &Capability, rights: Rights) -> Result<Capability, AttributeError> {
        let own = self.rights(from)?;
        if !own.load {
            return Err(AttributeError::Denied { operation: "load", object: "the extension".to_owned() });
        }
        self.hold(own.and(rights), Some(from.number))
    }

    /// Ends a capability, and all that were derived from it, with their subscriptions.
    pub fn revoke(&mut self, capability: &Capability) {
        if capability.table == self.own {
            self.revoke_number(capability.number);
        }
    }

    /// Returns what a capability allows.
    ///
    /// # Errors
    /// [`AttributeError::Revoked`].
    pub fn rights(&self, capability: &Capability) -> Result<Rights, AttributeError> {
        let held = self.capabilities.get(&capability.number).filter(|_| capability.table == self.own);
        held.map(|held| held.rights).ok_or(AttributeError::Revoked)
    }

    /// Returns a value.
    ///
    /// # Errors
    /// [`AttributeError::Revoked`], [`AttributeError::Denied`], [`AttributeError::UnknownClass`],
    /// [`AttributeError::UnknownTracee`].
    pub fn get(&self, by: &Capability, tracee: TraceeId, class: &str) -> Result<i64, AttributeError> {
        let rights = self.rights(by)?;
        let (index, _) = self.classes.named(class)?;
        if !rights.readable.has(tracee) || !rights.read.has(index) {
            let object = format!("{class} of tracee {}", tracee.0);
            return Err(AttributeError::Denied { operation: "read", object });
        }
        self.value(tracee, index)
    }

    /// Returns a value to the manager itself, which needs no right.
    ///
    /// # Errors
    /// [`AttributeError::UnknownTracee`].
    pub fn value(&self, tracee: TraceeId, class: usize) -> Result<i64, AttributeError> {
        let values = self.values.get(&tracee);
        values.and_then(|values| values.get(class).copied()).ok_or(AttributeError::UnknownTracee(tracee.0))
    }

    /// Sets values of a tracee: all of them, or none.
    ///
    /// # Errors
    /// Those of [`get`](Self::get), and [`AttributeError::Range`], [`AttributeError::Sum`], [`AttributeError::Refused`].
    pub fn set(
        &mut self,
        by: &Capability,
        tracee: TraceeId,
        values: &[(&str, i64)],
    ) -> Result<(), AttributeError> {
        let rights = self.rights(by)?;
        let mut proposed =
            self.values.get(&tracee).cloned().ok_or(AttributeError::UnknownTracee(tracee.0))?;
        let mut changed = Vec::new();
        for (name, value) in values {
            let (index, class) = self.classes.named(name)?;
            if !rights.scope.has(tracee) || !rights.write.has(index) {
                let object = format!("{name} of tracee {}", tracee.0);
                return Err(AttributeError::Denied { operation: "set", object });
            }
            // The default means "not set", and may be outside of the range.
            if *value != class.default && !(class.lowest..=class.highest).contains(value) {
                let [value, lowest, highest] =
                    [*value, class.lowest, class.highest].map(|v| class.kind.format(v));
                return Err(AttributeError::Range { class: class.name.clone(), value, lowest, highest });
            }
            proposed[index] = *value;
            changed.push(index);
        }
        for &index in &changed {
            self.check_sum(tracee, index, proposed[index])?;
        }
        self.ask_guards(tracee, &proposed, &changed)?;
        let before = self.values.insert(tracee, proposed.clone()).unwrap_or_default();
        for index in changed {
            let change = Change { tracee, class: index, before: before[index], after: proposed[index] };
            if change.before == change.after {
                continue;
            }
            if self.changes.len() < MOST_CHANGES {
                self.changes.push(change);
            }
            let number = u32::try_from(index).unwrap_or(0);
            self.publish(Topic::Attribute, Some(tracee), number, change.after);
        }
        Ok(())
    }

    /// Sets a value that the manager has measured: no right, no range and no guard, and no event.
    pub fn record(&mut self, tracee: TraceeId, class: usize, value: i64) {
        if let Some(place) = self.values.get_mut(&tracee).and_then(|values| values.get_mut(class)) {
            *place = value;
        }
    }

    /// Returns what was set since this was called last, oldest first.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Subscribes to events: about the tracees whose attributes the capability may read, and about none. `room` is how many may wait,
    /// 4096 at most; further ones are dropped and [counted](Self::dropped).
    ///
    /// # Errors
    /// [`AttributeError::Revoked`], [`AttributeError::Denied`], [`AttributeError::Full`].
    pub fn subscribe(
        &mut self,
        by: &Capability,
        topics: &[Topic],
        room: usize,
    ) -> Result<Subscription, AttributeError> {
        let rights = self.rights(by)?;
        if !rights.subscribe {
            return Err(AttributeError::Denied { operation: "subscribe to", object: "events".to_owned() });
        }
        if self.subscriptions.len() >= MOST_SUBSCRIPTIONS {
            return Err(AttributeError::Full("subscription"));
        }
        let number = self.number();
        let mut topics = topics.to_vec();
        topics.dedup();
        topics.truncate(64);
        let queue = Queue::new(room.clamp(1, MOST_QUEUED));
        let subscribed = Subscribed { topics, readable: rights.readable, capability: by.number, queue };
        self.subscriptions.insert(number, subscribed);
        Ok(Subscription { table: self.own, number })
    }

    /// Ends a subscription.
    pub fn unsubscribe(&mut self, subscription: &Subscription) {
        if subscription.table == self.own {
            self.subscriptions.remove(&subscription.number);
        }
    }

    /// Returns the next event of a subscription; `None` if there is none, or if its capability was revoked.
    pub fn next_event(&mut self, subscription: &Subscription) -> Option<Event> {
        self.subscribed(subscription)?.queue.pop()
    }

    /// Returns how many events a subscription has lost.
    pub fn dropped(&mut self, subscription: &Subscription) -> u64 {
        self.subscribed(subscription).map_or(0, |subscribed| subscribed.queue.dropped())
    }

    /// Emits an event of topic [`Topic::Custom`], about a tracee whose attributes the capability may set, or about none.
    ///
    /// # Errors
    /// [`AttributeError::Revoked`], [`AttributeError::Denied`].
    pub fn emit(
        &mut self,
        by: &Capability,
        tracee: Option<TraceeId>,
        number: u32,
        value: i64,
    ) -> Result<(), AttributeError> {
        let rights = self.rights(by)?;
        if !rights.emit || tracee.is_some_and(|tracee| !rights.scope.has(tracee)) {
            return Err(AttributeError::Denied { operation: "emit", object: "the event".to_owned() });
        }
        self.publish(Topic::Custom, tracee, number, value);
        Ok(())
    }

    /// Has upcalls of a tracee go here from now on. Only the manager itself has the table, and so calls this.
    pub fn set_upcalls(&mut self, tracee: TraceeId, upcalls: Box<dyn Upcalls + Send>) {
        if self.values.contains_key(&tracee) {
            self.upcalls.insert(tracee, upcalls);
        }
    }

    /// Makes an upcall into a tracee whose attributes the capability may set.
    ///
    /// # Errors
    /// [`AttributeError::Revoked`], [`AttributeError::Denied`], [`AttributeError::NotRegistered`], [`AttributeError::Full`].
    pub fn upcall(
        &mut self,
        by: &Capability,
        tracee: TraceeId,
        number: u32,
        value: i64,
    ) -> Result<(), AttributeError> {
        let rights = self.rights(by)?;
        if !rights.emit || !rights.scope.has(tracee) {
            let object = format!("an upcall into tracee {}", tracee.0);
            return Err(AttributeError::Denied { operation: "make", object });
        }
        let gone = AttributeError::NotRegistered(tracee.0);
        let upcalls = self.upcalls.get_mut(&tracee).ok_or_else(|| gone.clone())?;
        match upcalls.upcall(number, value) {
            Ok(()) => Ok(()),
            Err(NotMade::Full) => Err(AttributeError::Full("upcall")),
            // It stays: the program may be about to open what it was given.
            Err(NotMade::Gone) => Err(gone),
        }
    }

    /// Puts an event into the queues of all who subscribed to it: for the manager itself.
    pub fn publish(&mut self, topic: Topic, tracee: Option<TraceeId>, number: u32, value: i64) {
        if self.subscriptions.is_empty() {
            return;
        }
        let event = Event { topic, tracee, number, value, time: crate::time::now() };
        for subscribed in self.subscriptions.values_mut() {
            let readable = tracee.is_none_or(|tracee| subscribed.readable.has(tracee));
            if readable && subscribed.topics.contains(&topic) {
                subscribed.queue.push(event);
            }
        }
    }

    fn subscribed(&mut self, subscription: &Subscription) -> Option<&mut Subscribed> {
        self.subscriptions.get_mut(&subscription.number).filter(|_| subscription.table == self.own)
    }

    fn check_sum(&self, tracee: TraceeId, index: usize, value: i64) -> Result<(), AttributeError> {
        let Some(class @ Class { sum: Some(bound), .. }) = self.classes.all().get(index) else {
            return Ok(());
        };
        let others = self.values.iter().filter(|(other, _)| **other != tracee);
        let sum = others.map(|(_, values)| values[index]).fold(value, i64::saturating_add);
        // What lowers a value is admitted at any sum: the manager may have been given a lower bound.
        let before = self.value(tracee, index)?;
        if sum > *bound && value > before {
            let [value, sum, bound] = [value, sum, *bound].map(|value| class.kind.format(value));
            return Err(AttributeError::Sum { class: class.name.clone(), value, sum, bound });
        }
        Ok(())
    }

    fn ask_guards(
        &self,
        tracee: TraceeId,
        proposed: &[i64],
        changed: &[usize],
    ) -> Result<(), AttributeError> {
        let values: Vec<(TraceeId, &[i64])> = self
            .values
            .iter()
            .map(|(other, values)| (*other, if *other == tracee { proposed } else { values.as_slice() }))
            .collect();
        let proposal = Proposal { tracee, values: &values };
        for (classes, guard) in &self.guards {
            if classes.iter().any(|class| changed.contains(class)) {
                guard.admit(&proposal).map_err(|reason| {
                    let set = classes.iter().filter_map(|&index| {
                        let class = self.classes.all().get(index)?;
                        Some(format!("{} = {}", class.name, class.kind.format(proposal.own(index))))
                    });
                    AttributeError::Refused { what: set.collect::<Vec<_>>().join(", "), reason }
                })?;
            }
        }
        Ok(())
    }

    fn hold(&mut self, rights: Rights, parent: Option<u64>) -> Result<Capability, AttributeError> {
        if self.capabilities.len() >= MOST_CAPABILITIES {
            return Err(AttributeError::Full("capability"));
        }
        let number = self.number();
        self.capabilities.insert(number, Held { rights, parent });
        Ok(Capability { table: self.own, number })
    }

    fn revoke_number(&mut self, number: u64) {
        let mut gone = vec![number];
        while let Some(number) = gone.pop() {
            self.capabilities.remove(&number);
            self.subscriptions.retain(|_, subscribed| subscribed.capability != number);
            let children = self.capabilities.iter().filter(|(_, held)| held.parent == Some(number));
            gone.extend(children.map(|(child, _)| *child));
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

#[cfg(test)]
mod tests;
