//! What runs on this machine, as plain data: collectors make it, and the table, JSON, Prometheus' text and `orrery top` show it.

use std::time::{SystemTime, UNIX_EPOCH};

use clap::ValueEnum;
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

/// The version of the JSON; it grows when a key changes its meaning or goes.
pub(crate) const SCHEMA: u32 = 1;

/// What a running thing of Orrery's is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Servers of warm interpreters
    Warm,
    /// HTTP servers before warm servers
    Http,
    /// Orbits of programs
    Orbit,
    /// Object stores
    Orc,
    /// Service managers
    Manager,
    /// Pairs of virtual machines
    Orthros,
    /// Vaults of private keys
    Vault,
    /// Guards of programs
    Guard,
}

impl Kind {
    pub(crate) const ALL: [Self; 8] = [
        Self::Warm,
        Self::Http,
        Self::Orbit,
        Self::Orc,
        Self::Manager,
        Self::Orthros,
        Self::Vault,
        Self::Guard,
    ];

    /// Returns the word for it in tables, JSON, metric names and options.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Http => "http",
            Self::Orbit => "orbit",
            Self::Orc => "orc",
            Self::Manager => "manager",
            Self::Orthros => "orthros",
            Self::Vault => "vault",
            Self::Guard => "guard",
        }
    }
}

/// Everything that was found at one time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Status {
    /// [`SCHEMA`].
    pub(crate) schema: u32,
    pub(crate) taken_at_unix_seconds: f64,
    /// By kind, then by name.
    pub(crate) items: Vec<Item>,
    /// What could not be asked.
    pub(crate) unreadable: Vec<Unreadable>,
}

impl Status {
    /// Makes the status of now.
    pub(crate) fn of(mut items: Vec<Item>, mut unreadable: Vec<Unreadable>) -> Self {
        items.sort_by(|a, b| (a.kind, &a.name, a.pid).cmp(&(b.kind, &b.name, b.pid)));
        unreadable.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
        Self { schema: SCHEMA, taken_at_unix_seconds: unix_seconds(SystemTime::now()), items, unreadable }
    }
}

/// Returns a time in seconds since the epoch.
pub(crate) fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// One running thing.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Item {
    pub(crate) kind: Kind,
    /// What distinguishes it: the socket or address of a server, the directory of a pair, the name of an orbit or of a program.
    pub(crate) name: String,
    /// The process that serves, if it is known.
    pub(crate) pid: Option<u32>,
    /// The user that the process has: a name, or the number if it has none.
    pub(crate) user: Option<String>,
    pub(crate) started_at_unix_seconds: Option<f64>,
    /// One word of each kind's own.
    pub(crate) state: &'static str,
    /// The program that has it as a companion: of an orbit and a vault.
    pub(crate) main: Option<Main>,
    pub(crate) command_line: Option<Vec<String>>,
    /// What needs attention, such as the last fault.
    pub(crate) remark: Option<String>,
    pub(crate) figures: Figures,
    /// Workers, trust domains, tracees, machines.
    pub(crate) parts: Vec<Part>,
}

impl Item {
    /// Makes an item of which no more is known.
    pub(crate) fn new(kind: Kind, name: impl Into<String>, state: &'static str) -> Self {
        Self {
            kind,
            name: name.into(),
            pid: None,
            user: None,
            started_at_unix_seconds: None,
            state,
            main: None,
            command_line: None,
            remark: None,
            figures: Figures::default(),
            parts: Vec::new(),
        }
    }
}

/// A program with companions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Main {
    pub(crate) pid: u32,
    pub(crate) name: String,
}

/// A part of an item that has figures of its own.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Part {
    /// What it is: `worker`, `trust_domain`, `tracee` or `machine`.
    pub(crate) role: &'static str,
    pub(crate) name: String,
    pub(crate) pid: Option<u32>,
    pub(crate) state: &'static str,
    pub(crate) figures: Figures,
}

/// What could not be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Unreadable {
    pub(crate) kind: Kind,
    /// The socket, directory or process.
    pub(crate) name: String,
    pub(crate) reason: String,
}

/// A number with its name and meaning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Figure {
    /// The name ends in the unit: `_bytes`, `_seconds`, `_ratio`; a count has none. What only grows ends in `_total`.
    pub(crate) name: &'static str,
    /// The meaning, in a sentence.
    pub(crate) help: &'static str,
    pub(crate) value: Number,
}

impl Figure {
    /// Returns whether it only grows while the item lives.
    pub(crate) fn is_counter(&self) -> bool {
        self.name.ends_with("_total")
    }
}

/// A figure's value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum Number {
    Count(u64),
    Real(f64),
}

impl Number {
    #[expect(clippy::cast_precision_loss, reason = "for rates, and for people")]
    pub(crate) fn to_f64(self) -> f64 {
        match self {
            Self::Count(count) => count as f64,
            Self::Real(value) => value,
        }
    }
}

impl From<u64> for Number {
    fn from(count: u64) -> Self {
        Self::Count(count)
    }
}

impl From<u32> for Number {
    fn from(count: u32) -> Self {
        Self::Count(u64::from(count))
    }
}

impl From<usize> for Number {
    fn from(count: usize) -> Self {
        Self::Count(count as u64)
    }
}

impl From<bool> for Number {
    fn from(holds: bool) -> Self {
        Self::Count(u64::from(holds))
    }
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        Self::Real(value)
    }
}

/// The figures of an item or part, in the order in which they are shown; an object in JSON.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Figures(Vec<Figure>);

impl Figures {
    pub(crate) fn add(&mut self, name: &'static str, value: impl Into<Number>, help: &'static str) {
        self.0.push(Figure { name, help, value: value.into() });
    }

    /// Adds a value in seconds that is known in nanoseconds.
    pub(crate) fn add_nanoseconds(&mut self, name: &'static str, value: u64, help: &'static str) {
        self.add(name, std::time::Duration::from_nanos(value).as_secs_f64(), help);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Figure> {
        self.0.iter()
    }

    pub(crate) fn get(&self, name: &str) -> Option<Number> {
        self.0.iter().find(|figure| figure.name == name).map(|figure| figure.value)
    }
}

impl Serialize for Figures {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for figure in &self.0 {
            map.serialize_entry(figure.name, &figure.value)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::status::samples;

    #[test]
    fn json_has_figures_by_name_and_null_where_nothing_is_known() {
        let status = samples::status();
        let value = serde_json::to_value(&status).unwrap();
        assert_eq!(value["schema"], SCHEMA);
        assert!(value["taken_at_unix_seconds"].as_f64().unwrap() > 1e9);
        let item = &value["items"][0];
        assert_eq!((&item["kind"], &item["name"]), (&json!("warm"), &json!("/run/a \"b\"\\\nc")));
        assert_eq!(item["figures"]["requests_total"], 17);
        assert_eq!(item["figures"]["uptime_seconds"], 61.5);
        assert_eq!(item["parts"][0]["role"], "worker");
        assert!(item["main"].is_null());
        let unreadable = &value["unreadable"][0];
        assert_eq!(unreadable["reason"], "no answer within 1 s");
    }

    #[test]
    fn items_are_in_order() {
        let item = |kind, name: &str| Item::new(kind, name, "idle");
        let items = vec![item(Kind::Guard, "a"), item(Kind::Warm, "z"), item(Kind::Warm, "b")];
        let names: Vec<String> =
            Status::of(items, Vec::new()).items.into_iter().map(|item| item.name).collect();
        assert_eq!(names, ["b", "z", "a"]);
    }

    #[test]
    fn kinds_have_the_words_of_the_command_line() {
        for kind in Kind::ALL {
            assert_eq!(kind.to_possible_value().unwrap().get_name(), kind.word());
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.word());
        }
    }
}
