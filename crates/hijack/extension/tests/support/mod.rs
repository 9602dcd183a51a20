//! A host that records what extensions do.

#![allow(dead_code, reason = "each test program uses a part")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use orrery_extension::{
    Event, Extensions, Host, Id, Limits, LoadError, Manifest, Module, Notice, Posted, Refusal, Request,
    Subscriber,
};

/// What a handle stands for: the names of the manifest's request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Object {
    pub(crate) to: String,
    pub(crate) of: Option<String>,
}

#[derive(Default)]
pub(crate) struct Record {
    pub(crate) attributes: BTreeMap<Object, i64>,
    pub(crate) subscriptions: Vec<(Object, i64, Subscriber)>,
    pub(crate) emitted: Vec<(Object, Vec<u8>)>,
    pub(crate) lines: Vec<String>,
    pub(crate) notices: Vec<(Id, Notice)>,
    /// How many calls arrived.
    pub(crate) calls: u64,
}

/// Attributes have the range 0 to 1000; `sum` is at most 1500; outlets take 4 messages.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) record: Mutex<Record>,
    pub(crate) now: AtomicU64,
}

impl Recorder {
    pub(crate) fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counted(&self) -> MutexGuard<'_, Record> {
        let mut record = self.record();
        record.calls += 1;
        record
    }

    pub(crate) fn set(&self, to: &str, of: Option<&str>, value: i64) {
        self.record().attributes.insert(object(to, of), value);
    }

    pub(crate) fn get(&self, to: &str, of: Option<&str>) -> i64 {
        self.record().attributes[&object(to, of)]
    }

    pub(crate) fn pass(&self, nanoseconds: u64) {
        self.now.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}

pub(crate) fn object(to: &str, of: Option<&str>) -> Object {
    Object { to: to.to_owned(), of: of.map(str::to_owned) }
}

impl Host for Recorder {
    type Capability = Object;

    fn get_attribute(&self, of: &Object) -> Result<i64, Refusal> {
        self.counted().attributes.get(of).copied().ok_or(Refusal::Gone)
    }

    fn set_attribute(&self, of: &Object, value: i64) -> Result<(), Refusal> {
        let mut record = self.counted();
        if !(0..=1000).contains(&value) {
            return Err(Refusal::Range);
        }
        let others: i64 = record
            .attributes
            .iter()
            .filter(|(at, _)| at.to == of.to && *at != of)
            .map(|(_, value)| value)
            .sum();
        if others + value > 1500 {
            return Err(Refusal::Guard);
        }
        record.attributes.insert(of.clone(), value);
        Ok(())
    }

    fn subscribe(&self, source: &Object, parameter: i64, subscriber: Subscriber) -> Result<(), Refusal> {
        if parameter < 0 {
            return Err(Refusal::Invalid);
        }
        self.counted().subscriptions.push((source.clone(), parameter, subscriber));
        Ok(())
    }

    fn unsubscribe(&self, extension: Id) {
        self.record().subscriptions.retain(|(_, _, subscriber)| subscriber.extension != extension);
    }

    fn emit(&self, to: &Object, message: &[u8]) -> Result<(), Refusal> {
        let mut record = self.counted();
        if record.emitted.iter().filter(|(at, _)| at == to).count() == 4 {
            return Err(Refusal::Limit);
        }
        record.emitted.push((to.clone(), message.to_vec()));
        Ok(())
    }

    fn clock(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    fn log(&self, _extension: Id, line: &str) {
        self.counted().lines.push(line.to_owned());
    }

    fn notify(&self, extension: Id, notice: Notice) {
        self.record().notices.push((extension, notice));
    }
}

/// A recorder, its extensions.
pub(crate) struct Bed {
    pub(crate) host: Arc<Recorder>,
    pub(crate) extensions: Extensions<Recorder>,
}

impl Bed {
    pub(crate) fn new() -> Self {
        Self::with(Limits { fuel: u64::MAX, ..Limits::default() })
    }

    pub(crate) fn with(limits: Limits) -> Self {
        let host = Arc::new(Recorder::default());
        Self { extensions: Extensions::new(Arc::clone(&host), limits), host }
    }

    /// Loads a module in text format under a manifest with these lines.
    pub(crate) fn load(&mut self, lines: &str, wat: &str) -> Result<Id, LoadError> {
        self.load_binary(lines, &wat::parse_str(wat).unwrap())
    }

    pub(crate) fn load_binary(&mut self, lines: &str, wasm: &[u8]) -> Result<Id, LoadError> {
        let manifest = manifest(lines);
        self.extensions.load(&Module::compile("test", wasm)?, &manifest, grant)
    }

    /// Posts an event of the first subscription of an extension, for the incarnation that subscribed.
    pub(crate) fn post(&mut self, id: Id, value: i64) -> Posted {
        let of = |(_, _, subscriber): &(Object, i64, Subscriber)| {
            (subscriber.extension == id).then_some(*subscriber)
        };
        let subscriber = self.host.record().subscriptions.iter().find_map(of);
        let Some(subscriber) = subscriber else { return Posted::Unknown };
        self.extensions.post(subscriber, Event { time: 1, value, detail: 2 })
    }

    /// Posts an event and has it handled, in a period of its own.
    pub(crate) fn send(&mut self, id: Id, value: i64) {
        assert_eq!(self.post(id, value), Posted::Queued);
        self.host.pass(1_000_000_000);
        self.extensions.run();
    }

    pub(crate) fn notices(&self) -> Vec<Notice> {
        self.host.record().notices.iter().map(|(_, notice)| notice.clone()).collect()
    }
}

pub(crate) fn grant(_handle: &str, request: &Request) -> Result<Object, Refusal> {
    if request.to == "forbidden" {
        Err(Refusal::Denied)
    } else {
        Ok(object(&request.to, request.of.as_deref()))
    }
}

/// A manifest with these lines behind the required ones; `fuel` is 100,000 unless they say.
pub(crate) fn manifest(lines: &str) -> Manifest {
    let fuel = if lines.starts_with("fuel") { "" } else { "fuel = 100_000\n" };
    let text = format!("[extension]\nname = \"test\"\nmodule = \"test.wasm\"\n{fuel}{lines}");
    Manifest::parse("test.toml", &text).unwrap()
}

/// The handles of most tests.
pub(crate) const HANDLES: &str = r#"[handle]
used = { to = "used", of = "p1", rights = ["get"] }
share = { to = "share", of = "p1", rights = ["get", "set"] }
tick = { to = "timer", rights = ["subscribe"] }
out = { to = "owner", rights = ["emit"] }
"#;

/// The beginning of most modules: all imports, a memory, and a subscription.
pub(crate) const PRELUDE: &str = r#"
  (import "orrery" "get_attribute" (func $get (param i32 i32) (result i32)))
  (import "orrery" "set_attribute" (func $set (param i32 i64) (result i32)))
  (import "orrery" "subscribe" (func $subscribe (param i32 i64) (result i32)))
  (import "orrery" "emit" (func $emit (param i32 i32 i32) (result i32)))
  (import "orrery" "clock" (func $clock (result i64)))
  (import "orrery" "log" (func $log (param i32 i32) (result i32)))
  (import "handle" "used" (func $used (result i32)))
  (import "handle" "share" (func $share (result i32)))
  (import "handle" "tick" (func $tick (result i32)))
  (import "handle" "out" (func $out (result i32)))
  (memory (export "memory") 1)
  (func (export "start") (drop (call $subscribe (call $tick) (i64.const 10000000))))
"#;

/// A module whose `event` has this body; `$value` is the event's value.
pub(crate) fn module(body: &str) -> String {
    format!(
        "(module {PRELUDE} (func $event (export \"event\") (param $sub i32) (param $time i64) (param $value i64) (param $detail i64) {body}))"
    )
}
