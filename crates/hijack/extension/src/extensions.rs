//! All extensions of a manager: loading within the limits on their sum, posting events, running, unloading.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Abort, LoadError};
use crate::event::{Event, Posted, Pushed, Queue};
use crate::expiry::Expiry;
use crate::handles::{Grant, Table};
use crate::host::{Host, Notice, Refusal, Subscriber};
use crate::id::Id;
use crate::instance::{Instance, Linked, Reservation, State};
use crate::manifest::{Manifest, Request};
use crate::module::Module;
use crate::period::Allowance;
use crate::status::Status;

/// What all extensions of a manager may use, together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How many there may be.
    pub extensions: usize,
    /// Their memory, in bytes.
    pub memory: usize,
    /// Their operations in one second: `fuel` x `events` / `period`. A processor does some 10^9.
    pub fuel: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { extensions: 64, memory: 64 << 20, fuel: 100_000_000 }
    }
}

/// The extensions of a manager. Runs happen on the thread that calls.
pub struct Extensions<H: Host> {
    host: Arc<H>,
    limits: Limits,
    loaded: BTreeMap<Id, Extension<H>>,
    next: u32,
    expiry: Option<Expiry>,
}

struct Extension<H: Host> {
    linked: Linked<H>,
    /// There is none only while it is replaced.
    instance: Option<Instance<H>>,
    incarnation: u32,
    by: Reservation,
    rate: u64,
    memory: usize,
    allowance: Allowance,
    queue: Queue<(u32, Event)>,
    failures_limit: u32,
    status: Status,
}

impl<H: Host> Extensions<H> {
    /// Returns one without extensions.
    pub fn new(host: Arc<H>, limits: Limits) -> Self {
        Self { host, limits, loaded: BTreeMap::new(), next: 0, expiry: None }
    }

    /// Loads an extension and runs its `start`. `grant` returns what a request of the manifest stands for; the handle has the
    /// rights that the manifest asks for, and the host makes sure that the owner has them.
    ///
    /// # Errors
    /// [`LoadError`]; nothing is loaded then, and no subscription left.
    pub fn load(
        &mut self,
        module: &Module,
        manifest: &Manifest,
        mut grant: impl FnMut(&str, &Request) -> Result<H::Capability, Refusal>,
    ) -> Result<Id, LoadError> {
        let name = || manifest.name.clone();
        self.admit(manifest)?;
        let missing = module.handles.iter().find(|handle| !manifest.handles.contains_key(*handle));
        if let Some(handle) = missing {
            let cause =
                format!("it imports handle {handle:?}, which the manifest does not have; add it to [handle]");
            return Err(LoadError::Module { name: name(), cause });
        }
        let linked = Linked::new(module).map_err(|cause| LoadError::Module { name: name(), cause })?;
        let mut handles = Table::new();
        for (handle, request) in &manifest.handles {
            let refused = |cause| LoadError::Refused { name: name(), handle: handle.clone(), cause };
            let capability = grant(handle, request).map_err(refused)?;
            let right = Grant { rights: request.rights, capability };
            handles.grant(handle, right).ok_or_else(|| refused(Refusal::Limit))?;
        }
        let id = Id(self.next);
        self.next += 1;
        let by = Reservation { fuel: manifest.fuel, expiry: manifest.expiry };
        let state = State::new(Arc::clone(&self.host), id, manifest.memory, handles);
        let mut instance = Instance::new(&linked, state);
        let expiry =
            Self::timer(&mut self.expiry).map_err(|cause| LoadError::Timer { name: name(), cause })?;
        let (fuel, started) = instance.start(&linked, expiry, by);
        if let Err(cause) = started {
            self.host.unsubscribe(id);
            return Err(LoadError::Start { name: name(), cause });
        }
        let period = u64::try_from(manifest.period.as_nanos()).unwrap_or(u64::MAX);
        let extension = Extension {
            linked,
            instance: Some(instance),
            incarnation: 0,
            by,
            rate: manifest.fuel_per_second(),
            memory: manifest.memory,
            allowance: Allowance::new(manifest.events, period, self.host.clock()),
            queue: Queue::new(manifest.queue),
            failures_limit: manifest.failures,
            status: Status { fuel, ..Status::default() },
        };
        self.loaded.insert(id, extension);
        Ok(id)
    }

    /// Posts an event of a subscription. The host calls this between runs, not from within one.
    pub fn post(&mut self, to: Subscriber, event: Event) -> Posted {
        let Some(extension) = self.loaded.get_mut(&to.extension) else { return Posted::Unknown };
        if extension.incarnation != to.incarnation {
            return Posted::Unknown;
        }
        match extension.queue.push((to.subscription, event)) {
            Pushed::Queued => Posted::Queued,
            Pushed::Dropped { first } => {
                if first {
                    let dropped = extension.queue.dropped();
                    self.host.notify(to.extension, Notice::Dropped { dropped });
                }
                Posted::Dropped
            }
        }
    }

    /// Has extensions handle their events, one each in turn, until none waits or each has used up its period. Returns when the
    /// next period with work begins, by the host's clock; nothing where no event waits.
    pub fn run(&mut self) -> Option<u64> {
        let mut next: Option<u64>;
        loop {
            next = None;
            let mut progress = false;
            let waiting: Vec<Id> =
                self.loaded.iter().filter(|(_, it)| it.queue.len() > 0).map(|(id, _)| *id).collect();
            for id in waiting {
                let Some(extension) = self.loaded.get_mut(&id) else { continue };
                match extension.allowance.take(self.host.clock()) {
                    Err(again) => next = Some(next.map_or(again, |next| next.min(again))),
                    Ok(()) => {
                        self.handle_one(id);
                        progress = true;
                    }
                }
            }
            if !progress {
                return next;
            }
        }
    }

    /// Unloads an extension and ends its subscriptions; returns whether there was one.
    pub fn unload(&mut self, id: Id) -> bool {
        let there = self.loaded.remove(&id).is_some();
        if there {
            self.host.unsubscribe(id);
        }
        there
    }

    /// Grants a right under a name that the manifest has; one that it stood for is revoked.
    ///
    /// # Errors
    /// [`Refusal::Gone`] where there is no such extension, [`Refusal::Invalid`] where its manifest has no such handle.
    pub fn grant(&mut self, id: Id, handle: &str, right: Grant<H::Capability>) -> Result<(), Refusal> {
        let handles = self.handles(id).ok_or(Refusal::Gone)?;
        handles.named(handle).ok_or(Refusal::Invalid)?;
        handles.grant(handle, right).map(|_| ()).ok_or(Refusal::Limit)
    }

    /// Revokes a handle; returns whether it was in force.
    pub fn revoke(&mut self, id: Id, handle: &str) -> bool {
        self.handles(id).is_some_and(|handles| handles.revoke(handle))
    }

    /// Returns the counters of an extension.
    pub fn status(&self, id: Id) -> Option<Status> {
        let extension = self.loaded.get(&id)?;
        let (waiting, dropped) = (extension.queue.len(), extension.queue.dropped());
        Some(Status { waiting, dropped, ..extension.status })
    }

    /// Returns the extensions that are loaded.
    pub fn ids(&self) -> impl Iterator<Item = Id> + '_ {
        self.loaded.keys().copied()
    }

    fn handles(&mut self, id: Id) -> Option<&mut Table<H::Capability>> {
        self.loaded.get_mut(&id)?.instance.as_mut().map(Instance::handles)
    }

    /// Returns the timer of this thread.
    fn timer(slot: &mut Option<Expiry>) -> Result<&Expiry, orrery_sys::Error> {
        if !slot.as_ref().is_some_and(Expiry::is_mine) {
            *slot = Some(Expiry::new()?);
        }
        slot.as_ref().ok_or_else(|| orrery_sys::Error::new("timer_create", 0, rustix::io::Errno::AGAIN))
    }

    fn admit(&self, manifest: &Manifest) -> Result<(), LoadError> {
        let memory: usize = self.loaded.values().map(|it| it.memory).sum();
        let fuel = self.loaded.values().fold(0, |sum: u64, it| sum.saturating_add(it.rate));
        let sums = [
            ("the number", self.loaded.len() as u64 + 1, self.limits.extensions as u64),
            ("the memory in bytes", (memory + manifest.memory) as u64, self.limits.memory as u64),
            ("the operations in a second", fuel.saturating_add(manifest.fuel_per_second()), self.limits.fuel),
        ];
        match sums.into_iter().find(|(_, sum, limit)| sum > limit) {
            Some((what, sum, limit)) => Err(LoadError::Sum { name: manifest.name.clone(), what, sum, limit }),
            None => Ok(()),
        }
    }

    fn handle_one(&mut self, id: Id) {
        let Some(extension) = self.loaded.get_mut(&id) else { return };
        let Some((subscription, event)) = extension.queue.pop() else { return };
        let Some(instance) = extension.instance.as_mut() else { return };
        let result = match Self::timer(&mut self.expiry) {
            Ok(expiry) => {
                let (fuel, result) = instance.handle(subscription, &event, expiry, extension.by);
                extension.status.handled += 1;
                extension.status.fuel += fuel;
                if result.is_ok() {
                    extension.status.longest = extension.status.longest.max(fuel);
                }
                result
            }
            Err(error) => Err(Abort::Trap(format!("cannot make a timer: {error}"))),
        };
        if let Err(cause) = result {
            self.restart(id, cause);
        }
    }

    /// Counts an aborted run, notifies the owner, and has the module start over, or unloads it.
    fn restart(&mut self, id: Id, mut cause: Abort) {
        while let Some(extension) = self.loaded.get_mut(&id) {
            extension.status.failures += 1;
            let (failures, limit) = (extension.status.failures, extension.failures_limit);
            self.host.unsubscribe(id);
            if failures >= limit {
                self.loaded.remove(&id);
                self.host.notify(id, Notice::Unloaded { cause, failures });
                return;
            }
            self.host.notify(id, Notice::Aborted { cause, failures, limit });
            extension.queue.clear();
            extension.incarnation += 1;
            let Some(old) = extension.instance.take() else { return };
            let mut state = old.into_state();
            state.incarnation = extension.incarnation;
            state.subscriptions = 0;
            let mut instance = Instance::new(&extension.linked, state);
            let started = match Self::timer(&mut self.expiry) {
                Ok(expiry) => {
                    let (fuel, started) = instance.start(&extension.linked, expiry, extension.by);
                    extension.status.fuel += fuel;
                    started
                }
                Err(error) => Err(Abort::Trap(format!("cannot make a timer: {error}"))),
            };
            extension.instance = Some(instance);
            match started {
                Ok(()) => return,
                Err(again) => cause = again,
            }
        }
    }
}

impl<H: Host> Drop for Extensions<H> {
    fn drop(&mut self) {
        for id in self.loaded.keys() {
            self.host.unsubscribe(*id);
        }
    }
}
