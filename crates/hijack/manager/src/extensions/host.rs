//! The manager's side of extensions: the table, while they run, and who subscribed to what.

use std::collections::HashMap;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use orrery_extension::{Host, Id, Notice, Refusal, Subscriber};

use super::object::Object;
use crate::attributes::{AttributeError, Capability, Event, Rights, Table, Topic, TraceeId};

#[derive(Debug)]
struct Subscription {
    topic: Topic,
    of: Option<String>,
    subscriber: Subscriber,
    /// For timers, in nanoseconds.
    period: u64,
    due: u64,
}

#[derive(Default)]
struct State {
    /// The manager's table, while extensions run.
    table: Option<Table>,
    capability: Option<Capability>,
    subscriptions: Vec<Subscription>,
    names: HashMap<Id, String>,
    /// Tracees by the names of their programs, in the order in which they joined.
    tracees: Vec<(String, TraceeId)>,
}

/// What extensions act on.
#[derive(Default)]
pub(super) struct TableHost(Mutex<State>);

impl TableHost {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn name(&self, extension: Id, name: &str) {
        self.state().names.insert(extension, name.to_owned());
    }

    /// Learns which tracees there are.
    pub(super) fn look(&self, event: &Event) {
        let Some(tracee) = event.tracee else { return };
        match event.topic {
            Topic::Joined => {
                let comm = std::fs::read_to_string(format!("/proc/{}/comm", event.value));
                let name = comm.map(|name| name.trim_end().to_owned()).unwrap_or_default();
                self.state().tracees.push((name, tracee));
            }
            Topic::Ended => self.state().tracees.retain(|(_, known)| *known != tracee),
            _ => {}
        }
    }

    /// Returns whom an event concerns.
    pub(super) fn subscribers(&self, event: &Event) -> Vec<Subscriber> {
        let mut state = self.state();
        let State { subscriptions, tracees, .. } = &mut *state;
        let about =
            |of: &str| tracees.iter().any(|(name, tracee)| name == of && Some(*tracee) == event.tracee);
        let mut found = Vec::new();
        for subscription in subscriptions.iter_mut().filter(|it| it.topic == event.topic) {
            if subscription.topic == Topic::Timer {
                if event.time < subscription.due {
                    continue;
                }
                subscription.due = event.time.saturating_add(subscription.period);
            }
            if subscription.of.as_deref().is_none_or(about) {
                found.push(subscription.subscriber);
            }
        }
        found
    }

    /// Has the table while something runs.
    pub(super) fn with<R>(&self, table: &mut Table, run: impl FnOnce() -> R) -> R {
        self.state().table = Some(mem::replace(table, Table::new(crate::attributes::Classes::none())));
        let result = run();
        if let Some(own) = self.state().table.take() {
            *table = own;
        }
        result
    }
}

impl State {
    /// Returns the tracee of this name that joined last.
    fn tracee(&self, name: &str) -> Result<TraceeId, Refusal> {
        let found = self.tracees.iter().rev().find(|(known, _)| known == name);
        found.map(|(_, tracee)| *tracee).ok_or(Refusal::Gone)
    }

    /// Has the table and the extensions' right to it.
    fn table(&mut self) -> Result<(&mut Table, &Capability), Refusal> {
        let table = self.table.as_mut().ok_or(Refusal::Gone)?;
        if self.capability.is_none() {
            self.capability = Some(table.grant(Rights::ALL).map_err(|error| refusal(&error))?);
        }
        let capability = self.capability.as_ref().ok_or(Refusal::Gone)?;
        Ok((table, capability))
    }
}

fn refusal(error: &AttributeError) -> Refusal {
    match error {
        AttributeError::Denied { .. } => Refusal::Denied,
        AttributeError::Range { .. } => Refusal::Range,
        AttributeError::Sum { .. } | AttributeError::Refused { .. } => Refusal::Guard,
        AttributeError::Revoked | AttributeError::UnknownTracee(_) => Refusal::Gone,
        AttributeError::Full(_) => Refusal::Limit,
        _ => Refusal::Invalid,
    }
}

impl Host for TableHost {
    type Capability = Object;

    fn get_attribute(&self, of: &Object) -> Result<i64, Refusal> {
        let Object::Attribute { class, of } = of else { return Err(Refusal::Invalid) };
        let mut state = self.state();
        let tracee = state.tracee(of)?;
        let (table, capability) = state.table()?;
        table.get(capability, tracee, class).map_err(|error| refusal(&error))
    }

    fn set_attribute(&self, of: &Object, value: i64) -> Result<(), Refusal> {
        let Object::Attribute { class, of } = of else { return Err(Refusal::Invalid) };
        let mut state = self.state();
        let tracee = state.tracee(of)?;
        let (table, capability) = state.table()?;
        table.set(capability, tracee, &[(class.as_str(), value)]).map_err(|error| refusal(&error))
    }

    fn subscribe(&self, source: &Object, parameter: i64, subscriber: Subscriber) -> Result<(), Refusal> {
        let Object::Source { topic, of } = source else { return Err(Refusal::Invalid) };
        let period = u64::try_from(parameter).map_err(|_| Refusal::Invalid)?;
        let subscription = Subscription { topic: *topic, of: of.clone(), subscriber, period, due: 0 };
        self.state().subscriptions.push(subscription);
        Ok(())
    }

    fn unsubscribe(&self, extension: Id) {
        self.state().subscriptions.retain(|it| it.subscriber.extension != extension);
    }

    fn emit(&self, to: &Object, message: &[u8]) -> Result<(), Refusal> {
        let mut state = self.state();
        match to {
            Object::Owner => {
                eprintln!("orrery-manager: an extension reports: {}", printable(message));
                Ok(())
            }
            Object::Event { of } => {
                let tracee = of.as_deref().map(|of| state.tracee(of)).transpose()?;
                let (number, value) = message.split_first_chunk::<4>().ok_or(Refusal::Invalid)?;
                let value = value.try_into().map_err(|_| Refusal::Invalid)?;
                let (number, value) = (u32::from_le_bytes(*number), i64::from_le_bytes(value));
                let (table, capability) = state.table()?;
                table.emit(capability, tracee, number, value).map_err(|error| refusal(&error))
            }
            _ => Err(Refusal::Invalid),
        }
    }

    fn clock(&self) -> u64 {
        crate::time::now()
    }

    fn log(&self, extension: Id, line: &str) {
        self.report(extension, line);
    }

    fn notify(&self, extension: Id, notice: Notice) {
        let text = match notice {
            Notice::Aborted { cause, failures, limit } => {
                format!("a run was aborted: {cause}; failure {failures} of {limit}")
            }
            Notice::Unloaded { cause, failures } => {
                format!("it is unloaded after {failures} failures; the last: {cause}")
            }
            Notice::Dropped { dropped } => format!("its queue is full: {dropped} events were dropped so far"),
            _ => return,
        };
        self.report(extension, &text);
    }
}

impl TableHost {
    fn report(&self, extension: Id, text: &str) {
        let state = self.state();
        let name = state.names.get(&extension).map_or("", String::as_str);
        eprintln!("orrery-manager: extension {name:?}: {text}");
    }
}

fn printable(message: &[u8]) -> String {
    String::from_utf8_lossy(message)
        .chars()
        .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
        .collect()
}
