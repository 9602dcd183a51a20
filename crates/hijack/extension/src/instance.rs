//! One life of a module: its memory, and calls into it, each with its reservation.

use std::sync::Arc;
use std::time::Duration;

use wasmtime::{InstancePre, ResourceLimiter, Store, Trap, TypedFunc, UpdateDeadline};

use crate::engine::engine;
use crate::error::Abort;
use crate::event::Event;
use crate::expiry::{Expiry, cpu_time};
use crate::handles::Table;
use crate::host::Host;
use crate::id::Id;
use crate::imports;
use crate::interface;
use crate::module::Module;

/// How many entries a module's tables may have.
const TABLE_ENTRIES: usize = 1_024;

/// What host functions know of the extension that calls them.
pub(crate) struct State<H: Host> {
    pub(crate) host: Arc<H>,
    pub(crate) id: Id,
    pub(crate) incarnation: u32,
    pub(crate) handles: Table<H::Capability>,
    pub(crate) subscriptions: u32,
    memory: usize,
    messages_left: u32,
    /// The thread's CPU time at which the run expires, in nanoseconds.
    deadline: u64,
}

impl<H: Host> State<H> {
    pub(crate) fn new(host: Arc<H>, id: Id, memory: usize, handles: Table<H::Capability>) -> Self {
        Self { host, id, incarnation: 0, handles, subscriptions: 0, memory, messages_left: 0, deadline: 0 }
    }

    /// Uses up one message; returns whether there was one.
    pub(crate) fn take_message(&mut self) -> bool {
        let left = self.messages_left.checked_sub(1);
        self.messages_left = left.unwrap_or(0);
        left.is_some()
    }
}

impl<H: Host> ResourceLimiter for State<H> {
    fn memory_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        if desired > self.memory { Err(Abort::Memory.into()) } else { Ok(true) }
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        if desired > TABLE_ENTRIES { Err(Abort::Memory.into()) } else { Ok(true) }
    }

    fn instances(&self) -> usize {
        1
    }

    fn memories(&self) -> usize {
        1
    }

    fn tables(&self) -> usize {
        4
    }
}

/// What a run may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reservation {
    pub(crate) fuel: u64,
    pub(crate) expiry: Duration,
}

/// The parameters of `event`.
type Parameters = (i32, i64, i64, i64);

/// A module that is linked with the host's functions.
pub(crate) struct Linked<H: Host>(InstancePre<State<H>>);

impl<H: Host> Linked<H> {
    /// Links a module.
    ///
    /// # Errors
    /// What the linker finds.
    pub(crate) fn new(module: &Module) -> Result<Self, String> {
        let linker =
            imports::linker::<H>(engine()?, &module.handles).map_err(|error| format!("{error:#}"))?;
        linker.instantiate_pre(&module.compiled).map(Self).map_err(|error| format!("{error:#}"))
    }
}

/// A module with memory of its own.
pub(crate) struct Instance<H: Host> {
    store: Store<State<H>>,
    event: Option<TypedFunc<Parameters, ()>>,
}

impl<H: Host> Instance<H> {
    /// Makes one that has not run yet.
    pub(crate) fn new(linked: &Linked<H>, state: State<H>) -> Self {
        let mut store = Store::new(linked.0.module().engine(), state);
        store.limiter(|state| state);
        // The epoch advances for all threads, and by anybody's SIGVTALRM: only one's own time ends a run.
        store.epoch_deadline_callback(|context| {
            let expired = cpu_time() >= context.data().deadline;
            Ok(if expired { UpdateDeadline::Interrupt } else { UpdateDeadline::Continue(1) })
        });
        Self { store, event: None }
    }

    /// Initializes the memory and calls `start`; returns how many operations that took.
    ///
    /// # Errors
    /// Why it was aborted.
    pub(crate) fn start(
        &mut self,
        linked: &Linked<H>,
        expiry: &Expiry,
        by: Reservation,
    ) -> (u64, Result<(), Abort>) {
        let (fuel, event) = self.bounded(expiry, by, |store| {
            let instance = linked.0.instantiate(&mut *store)?;
            if instance.get_func(&mut *store, interface::START).is_some() {
                instance.get_typed_func::<(), ()>(&mut *store, interface::START)?.call(&mut *store, ())?;
            }
            instance.get_typed_func(&mut *store, interface::EVENT)
        });
        (fuel, event.map(|event| self.event = Some(event)))
    }

    /// Calls `event`; returns how many operations that took.
    ///
    /// # Errors
    /// Why it was aborted.
    pub(crate) fn handle(
        &mut self,
        subscription: u32,
        event: &Event,
        expiry: &Expiry,
        by: Reservation,
    ) -> (u64, Result<(), Abort>) {
        let Some(function) = self.event.clone() else {
            return (0, Err(Abort::Trap("it has not started".to_owned())));
        };
        let parameters = (subscription.cast_signed(), event.time.cast_signed(), event.value, event.detail);
        self.bounded(expiry, by, |store| function.call(store, parameters))
    }

    /// Returns what it knew, for its successor or to change its handles.
    pub(crate) fn into_state(self) -> State<H> {
        self.store.into_data()
    }

    pub(crate) fn handles(&mut self) -> &mut Table<H::Capability> {
        &mut self.store.data_mut().handles
    }

    fn bounded<R>(
        &mut self,
        expiry: &Expiry,
        by: Reservation,
        call: impl FnOnce(&mut Store<State<H>>) -> wasmtime::Result<R>,
    ) -> (u64, Result<R, Abort>) {
        let time = u64::try_from(by.expiry.as_nanos()).unwrap_or(u64::MAX);
        let state = self.store.data_mut();
        state.messages_left = interface::MESSAGES;
        state.deadline = cpu_time().saturating_add(time);
        self.store.set_epoch_deadline(1);
        if let Err(error) = self.store.set_fuel(by.fuel) {
            return (0, Err(Abort::Trap(format!("{error:#}"))));
        }
        let result = expiry.during(by.expiry, || call(&mut self.store));
        let left = self.store.get_fuel().unwrap_or(0);
        (by.fuel.saturating_sub(left), result.map_err(|error| cause(&error)))
    }
}

fn cause(error: &wasmtime::Error) -> Abort {
    if let Some(abort) = error.downcast_ref::<Abort>() {
        return abort.clone();
    }
    match error.downcast_ref::<Trap>() {
        Some(Trap::OutOfFuel) => Abort::Fuel,
        Some(Trap::Interrupt) => Abort::Expired,
        Some(Trap::StackOverflow) => Abort::Stack,
        Some(trap) => Abort::Trap(trap.to_string()),
        None => Abort::Trap(format!("{error:#}")),
    }
}
