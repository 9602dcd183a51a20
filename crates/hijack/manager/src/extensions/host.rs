//! The manager's side of extensions: the table, while they run, and who subscribed to what.

use std::collections::HashMap;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use orrery_extension::{Host, Id, Notice, Refusal, Subscriber};

use super::object::Object;
use crate::attributes::{AttributeError, Capability, Event, Rights, Table, Topic, TraceeId};

/// How long the name of a tracee's process is taken for its name, in nanoseconds, where it is not the one that is looked for: a process that
/// joins executes its program only then.
const NAME: u64 = 5_000_000;
/// How many names are read for one look-up: those of the tracees that joined last.
const NAMES: usize = 64;

/// A tracee, and the name of its process as it was read last.
struct Known {
    name: String,
    tracee: TraceeId,
    pid: i64,
    read: u64,
}

impl Known {
    fn new(tracee: TraceeId, pid: i64) -> Self {
        Self { name: name_of(pid), tracee, pid, read: 0 }
    }

    /// Returns whether the process has this name.
    fn is(&mut self, name: &str) -> bool {
        let now = crate::time::now();
        if self.name != name && now.saturating_sub(self.read) >= NAME {
            (self.name, self.read) = (name_of(self.pid), now);
        }
        self.name == name
    }
}

/// Returns the name of a process; an empty one where it has ended.
fn name_of(pid: i64) -> String {
    let comm = std::fs::read_to_string(format!("/proc/{pid}/comm"));
    comm.map(|name| name.trim_end().to_owned()).unwrap_or_default()
}

/// How many characters of a message are remembered.
const MESSAGE: usize = 200;

#[derive(Debug)]
struct Subscription {
    topic: Topic,
    by: Option<Arc<Capability>>,
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
    /// The last messages, where they are not for the manager's log.
    messages: Option<HashMap<Id, String>>,
    /// Tracees, in the order in which they joined.
    tracees: Vec<Known>,
}

/// What a handle of an extension stands for, and by which right: the manager's own without one.
#[derive(Debug, Clone)]
pub(super) struct Right {
    object: Object,
    by: Option<Arc<Capability>>,
}

impl Right {
    /// Returns the manager's own.
    pub(super) fn of_manager(object: Object) -> Self {
        Self { object, by: None }
    }

    /// Returns a connection's, which has `rights`: what it could never use is refused when the extension is loaded.
    pub(super) fn of_connection(
        object: Object,
        by: &Arc<Capability>,
        rights: Option<Rights>,
    ) -> Result<Self, Refusal> {
        let rights = rights.ok_or(Refusal::Gone)?;
        let has = match &object {
            Object::Owner => false,
            Object::Event { .. } | Object::Upcall { .. } => rights.emit,
            Object::Source { .. } => rights.subscribe,
            Object::Attribute { .. } => true,
        };
        if has { Ok(Self { object, by: Some(Arc::clone(by)) }) } else { Err(Refusal::Denied) }
    }
}

/// What extensions act on.
#[derive(Default)]
pub(super) struct TableHost(Mutex<State>);

impl TableHost {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns one that has no lines in the manager's log.
    pub(super) fn quiet() -> Self {
        Self(Mutex::new(State { messages: Some(HashMap::new()), ..State::default() }))
    }

    /// Returns the last message of an extension, or about it.
    pub(super) fn last_message(&self, extension: Id) -> String {
        self.state().messages.as_ref().and_then(|all| all.get(&extension).cloned()).unwrap_or_default()
    }

    /// Learns of a tracee.
    pub(super) fn meet(&self, tracee: TraceeId, pid: i64) {
        self.state().tracees.push(Known::new(tracee, pid));
    }

    pub(super) fn name(&self, extension: Id, name: &str) {
        self.state().names.insert(extension, name.to_owned());
    }

    /// Learns which tracees there are.
    pub(super) fn look(&self, event: &Event) {
        let Some(tracee) = event.tracee else { return };
        match event.topic {
            Topic::Joined => self.meet(tracee, event.value),
            Topic::Ended => self.state().tracees.retain(|known| known.tracee != tracee),
            _ => {}
        }
    }

    /// Returns whom an event concerns.
    pub(super) fn subscribers(&self, event: &Event, table: &Table) -> Vec<Subscriber> {
        let mut state = self.state();
        let State { subscriptions, tracees, .. } = &mut *state;
        let mut about =
            |of: &str| tracees.iter_mut().any(|known| Some(known.tracee) == event.tracee && known.is(of));
        let mut found = Vec::new();
        for subscription in subscriptions.iter_mut().filter(|it| it.topic == event.topic) {
            let readable = subscription.by.as_ref().is_none_or(|by| {
                let rights = table.rights(by);
                rights.is_ok_and(|own| event.tracee.is_none_or(|tracee| own.readable.has(tracee)))
            });
            if !readable {
                continue;
            }
            if subscription.topic == Topic::Timer {
                if event.time < subscription.due {
                    continue;
                }
                subscription.due = event.time.saturating_add(subscription.period);
            }
            if subscription.of.as_deref().is_none_or(&mut about) {
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
    /// Returns the tracee of this name that joined last, of those that the right is about: others' programs of the same name
    /// change nothing.
    fn tracee(&mut self, name: &str, by: Option<&Capability>) -> Result<TraceeId, Refusal> {
        let rights = match by {
            Some(by) => {
                let table = self.table.as_ref().ok_or(Refusal::Gone)?;
                table.rights(by).map_err(|error| refusal(&error))?
            }
            None => Rights::ALL,
        };
        let about = |tracee: TraceeId| rights.readable.has(tracee) || rights.scope.has(tracee);
        let mut left = NAMES;
        let mut known = self.tracees.iter_mut().rev().filter(|known| about(known.tracee));
        let found = known.find_map(|known| {
            left = left.saturating_sub(1);
            let is = if left == 0 { known.name == name } else { known.is(name) };
            is.then_some(known.tracee)
        });
        found.ok_or(Refusal::Gone)
    }

    /// Has the table and the right to it: `by`, or the manager's own.
    fn table<'a>(
        &'a mut self,
        by: Option<&'a Capability>,
    ) -> Result<(&'a mut Table, &'a Capability), Refusal> {
        let table = self.table.as_mut().ok_or(Refusal::Gone)?;
        if self.capability.is_none() {
            self.capability = Some(table.grant(Rights::ALL).map_err(|error| refusal(&error))?);
        }
        let capability = by.or(self.capability.as_ref()).ok_or(Refusal::Gone)?;
        Ok((table, capability))
    }
}

fn refusal(error: &AttributeError) -> Refusal {
    match error {
        AttributeError::Denied { .. } => Refusal::Denied,
        AttributeError::Range { .. } => Refusal::Range,
        AttributeError::Sum { .. } | AttributeError::Refused { .. } => Refusal::Guard,
        AttributeError::Revoked | AttributeError::UnknownTracee(_) | AttributeError::NotRegistered(_) => {
            Refusal::Gone
        }
        AttributeError::Full(_) => Refusal::Limit,
        _ => Refusal::Invalid,
    }
}

impl Host for TableHost {
    type Capability = Right;

    fn get_attribute(&self, right: &Right) -> Result<i64, Refusal> {
        let Object::Attribute { class, of } = &right.object else { return Err(Refusal::Invalid) };
        let mut state = self.state();
        let tracee = state.tracee(of, right.by.as_deref())?;
        let (table, capability) = state.table(right.by.as_deref())?;
        table.get(capability, tracee, class).map_err(|error| refusal(&error))
    }

    fn set_attribute(&self, right: &Right, value: i64) -> Result<(), Refusal> {
        let Object::Attribute { class, of } = &right.object else { return Err(Refusal::Invalid) };
        let mut state = self.state();
        let tracee = state.tracee(of, right.by.as_deref())?;
        let (table, capability) = state.table(right.by.as_deref())?;
        table.set(capability, tracee, &[(class.as_str(), value)]).map_err(|error| refusal(&error))
    }

    fn subscribe(&self, right: &Right, parameter: i64, subscriber: Subscriber) -> Result<(), Refusal> {
        let Object::Source { topic, of } = &right.object else { return Err(Refusal::Invalid) };
        let period = u64::try_from(parameter).map_err(|_| Refusal::Invalid)?;
        let (of, by) = (of.clone(), right.by.clone());
        let subscription = Subscription { topic: *topic, by, of, subscriber, period, due: 0 };
        self.state().subscriptions.push(subscription);
        Ok(())
    }

    fn unsubscribe(&self, extension: Id) {
        self.state().subscriptions.retain(|it| it.subscriber.extension != extension);
    }

    fn emit(&self, to: &Right, message: &[u8]) -> Result<(), Refusal> {
        let mut state = self.state();
        let by = to.by.as_deref();
        match &to.object {
            Object::Owner => {
                eprintln!("orrery-manager: an extension reports: {}", printable(message));
                Ok(())
            }
            Object::Event { of } => {
                let tracee = of.as_deref().map(|of| state.tracee(of, by)).transpose()?;
                let (number, value) = number_and_value(message)?;
                let (table, capability) = state.table(by)?;
                table.emit(capability, tracee, number, value).map_err(|error| refusal(&error))
            }
            Object::Upcall { of } => {
                let (number, value) = number_and_value(message)?;
                let tracee = state.tracee(of, by)?;
                let (table, capability) = state.table(by)?;
                table.upcall(capability, tracee, number, value).map_err(|error| refusal(&error))
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
        let mut state = self.state();
        if let Some(messages) = &mut state.messages {
            messages.insert(extension, text.chars().take(MESSAGE).collect());
            return;
        }
        let name = state.names.get(&extension).map_or("", String::as_str);
        eprintln!("orrery-manager: extension {name:?}: {text}");
    }
}

/// Reads what is emitted: 4 bytes of number, 8 of value.
fn number_and_value(message: &[u8]) -> Result<(u32, i64), Refusal> {
    let (number, value) = message.split_first_chunk::<4>().ok_or(Refusal::Invalid)?;
    let value = value.try_into().map_err(|_| Refusal::Invalid)?;
    Ok((u32::from_le_bytes(*number), i64::from_le_bytes(value)))
}

fn printable(message: &[u8]) -> String {
    String::from_utf8_lossy(message)
        .chars()
        .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
        .collect()
}
