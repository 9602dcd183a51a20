//! Manifests: what an extension is and what it asks for, in TOML.
//!
//! ```toml
//! [extension]
//! name = "shares"
//! module = "shares.wasm"       # looked up from the manifest's directory
//! fuel = 20_000                # operations of one event
//! events = 4                   # in one period
//! period = "10ms"
//! expiry = "2ms"               # CPU time of one event
//! memory = "256KiB"
//! queue = 64                   # events that wait
//! failures = 3                 # aborted runs until it is unloaded
//!
//! [handle]
//! used = { to = "cpu.used", of = "player", rights = ["get"] }
//! target = { to = "cpu.target", of = "player", rights = ["get", "set"] }
//! tick = { to = "timer", rights = ["subscribe"] }
//! ```

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use orrery_policy::{PolicyError, values};
use serde::Deserialize;
use toml::Spanned;

use crate::handles::{Handle, Rights};

/// A manifest, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The extension's name: letters, digits, `-`, `_` and `.`, at most 64.
    pub name: String,
    /// The file of its module.
    pub module: PathBuf,
    /// How many operations an event may take: 1 to 1,000,000,000.
    pub fuel: u64,
    /// How many events are handled in one period: 1 to 1,000.
    pub events: u32,
    /// The period: 1 ms to 10 s.
    pub period: Duration,
    /// How much CPU time an event may take: 1 ms to 1 s.
    pub expiry: Duration,
    /// How much memory it may have, in bytes: 64 KiB to 16 MiB.
    pub memory: usize,
    /// How many events may wait: 1 to 4,096.
    pub queue: usize,
    /// At how many aborted runs it is unloaded: 1 to 100.
    pub failures: u32,
    /// The handles that it asks for, by name.
    pub handles: BTreeMap<String, Request>,
}

/// A right that a manifest asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// An attribute's class, an event source or an outlet, by the host's names.
    pub to: String,
    /// Whose; nothing for what belongs to nobody.
    pub of: Option<String>,
    /// The rights that the extension asks for.
    pub rights: Rights,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    extension: Section,
    #[serde(default)]
    handle: BTreeMap<Spanned<String>, Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Section {
    name: Spanned<String>,
    module: Spanned<PathBuf>,
    fuel: Spanned<u64>,
    events: Option<Spanned<u64>>,
    period: Option<Spanned<String>>,
    expiry: Option<Spanned<String>>,
    memory: Option<Spanned<String>>,
    queue: Option<Spanned<u64>>,
    failures: Option<Spanned<u64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    to: Spanned<String>,
    of: Option<Spanned<String>>,
    rights: Spanned<Vec<Spanned<String>>>,
}

/// Where an error is, and what is wrong.
type Fault = (usize, String);

impl Manifest {
    /// Returns the operations in a second that it reserves.
    #[must_use]
    pub fn fuel_per_second(&self) -> u64 {
        let in_period = u128::from(self.fuel) * u128::from(self.events);
        u64::try_from(in_period * 1_000_000_000 / self.period.as_nanos().max(1)).unwrap_or(u64::MAX)
    }

    /// Parses a manifest; `name` is what its errors call the text.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn parse(name: &str, text: &str) -> Result<Self, PolicyError> {
        let file: File = toml::from_str(text).map_err(|error| {
            let offset = error.span().map_or(0, |span| span.start);
            PolicyError::at(name, text, offset, error.message().to_owned())
        })?;
        read(&file).map_err(|(offset, message)| PolicyError::at(name, text, offset, message))
    }
}

fn read(file: &File) -> Result<Manifest, Fault> {
    let section = &file.extension;
    let module = section.module.get_ref().clone();
    if module.as_os_str().is_empty() {
        return Err((
            section.module.span().start,
            "cannot use an empty path as module; write a file".to_owned(),
        ));
    }
    let mut handles = BTreeMap::new();
    for (name, entry) in &file.handle {
        handles.insert(identifier("handle", name)?, request(entry)?);
    }
    if let Some((name, _)) = file.handle.iter().nth(Handle::MOST) {
        let message = format!("cannot have more than {} handles", Handle::MOST);
        return Err((name.span().start, message));
    }
    Ok(Manifest {
        name: identifier("extension", &section.name)?,
        module,
        fuel: number("fuel", &section.fuel, 1, 1_000_000_000)?,
        events: counted("events", section.events.as_ref(), 4, 1_000)?,
        period: time("period", section.period.as_ref(), 10, 10_000)?,
        expiry: time("expiry", section.expiry.as_ref(), 5, 1_000)?,
        memory: memory(section.memory.as_ref())?,
        queue: counted("queue", section.queue.as_ref(), 64, 4_096)?,
        failures: counted("failures", section.failures.as_ref(), 3, 100)?,
        handles,
    })
}

fn identifier(what: &str, name: &Spanned<String>) -> Result<String, Fault> {
    let text = name.get_ref();
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if text.is_empty() || text.len() > 64 || !text.bytes().all(allowed) {
        let message = format!(
            "cannot name the {what} {text:?}: names have 1 to 64 characters; use letters, digits, `-`, `_` and `.`"
        );
        return Err((name.span().start, message));
    }
    Ok(text.clone())
}

fn request(entry: &Entry) -> Result<Request, Fault> {
    let mut rights = Rights::empty();
    for right in entry.rights.get_ref() {
        rights |= match right.get_ref().as_str() {
            "get" => Rights::GET,
            "set" => Rights::SET,
            "subscribe" => Rights::SUBSCRIBE,
            "emit" => Rights::EMIT,
            other => {
                let message =
                    format!("cannot ask for right {other:?}: use `get`, `set`, `subscribe` or `emit`");
                return Err((right.span().start, message));
            }
        };
    }
    if rights.is_empty() {
        let message = "cannot ask for no right: use `get`, `set`, `subscribe` or `emit`".to_owned();
        return Err((entry.rights.span().start, message));
    }
    let of = entry.of.as_ref().map(|of| identifier("owner", of)).transpose()?;
    Ok(Request { to: identifier("object", &entry.to)?, of, rights })
}

fn number(what: &str, value: &Spanned<u64>, least: u64, most: u64) -> Result<u64, Fault> {
    let number = *value.get_ref();
    if (least..=most).contains(&number) {
        return Ok(number);
    }
    Err((value.span().start, format!("cannot set {what} to {number}: use {least} to {most}")))
}

fn counted<N: TryFrom<u64>>(
    what: &str,
    value: Option<&Spanned<u64>>,
    default: u64,
    most: u64,
) -> Result<N, Fault> {
    let count = value.map_or(Ok(default), |value| number(what, value, 1, most))?;
    // The most of each fits.
    N::try_from(count).map_err(|_| (0, format!("cannot set {what} to {count}")))
}

fn time(what: &str, value: Option<&Spanned<String>>, default: u64, most: u64) -> Result<Duration, Fault> {
    let Some(value) = value else { return Ok(Duration::from_millis(default)) };
    let fault = |message| (value.span().start, message);
    let time = values::duration(value.get_ref()).map_err(fault)?;
    if time < Duration::from_millis(1) || time > Duration::from_millis(most) {
        return Err(fault(format!("cannot set {what} to {}: use 1ms to {most}ms", value.get_ref())));
    }
    Ok(time)
}

fn memory(value: Option<&Spanned<String>>) -> Result<usize, Fault> {
    let Some(value) = value else { return Ok(256 << 10) };
    let fault = |message| (value.span().start, message);
    let size = values::size(value.get_ref()).map_err(fault)?;
    match usize::try_from(size) {
        Ok(size) if (64 << 10..=16 << 20).contains(&size) => Ok(size),
        _ => Err(fault(format!("cannot set memory to {}: use 64KiB to 16MiB", value.get_ref()))),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GOOD: &str = "[extension]\nname = \"a\"\nmodule = \"a.wasm\"\nfuel = 10\n";

    fn error(text: &str) -> String {
        Manifest::parse("a.toml", text).unwrap_err().to_string()
    }

    #[test]
    fn defaults_and_values_are_read() {
        let manifest = Manifest::parse("a.toml", GOOD).unwrap();
        assert_eq!((manifest.fuel, manifest.events, manifest.queue), (10, 4, 64));
        assert_eq!((manifest.memory, manifest.expiry), (256 << 10, Duration::from_millis(5)));
        let text = format!(
            "{GOOD}memory = \"1MiB\"\n[handle]\nx = {{ to = \"cpu.target\", of = \"p1\", rights = [\"get\", \"set\"] }}\n"
        );
        let manifest = Manifest::parse("a.toml", &text).unwrap();
        assert_eq!(manifest.memory, 1 << 20);
        assert_eq!(manifest.handles["x"].rights, Rights::GET | Rights::SET);
        assert_eq!(manifest.handles["x"].of.as_deref(), Some("p1"));
    }

    #[test]
    fn each_error_has_its_position() {
        for (text, expected) in [
            (GOOD.replace("10", "0"), "a.toml:4:8: cannot set fuel to 0: use 1 to 1000000000"),
            (GOOD.replace("10", "-1"), "a.toml:4:8: "),
            (GOOD.replace("\"a\"", "\"a b\""), "a.toml:2:8: cannot name the extension \"a b\""),
            (GOOD.replace("a.wasm", ""), "a.toml:3:10: cannot use an empty path"),
            (format!("{GOOD}queue = 4097\n"), "a.toml:5:9: cannot set queue to 4097: use 1 to 4096"),
            (format!("{GOOD}expiry = \"0ms\"\n"), "a.toml:5:10: cannot set expiry to 0ms"),
            (format!("{GOOD}memory = \"1GiB\"\n"), "a.toml:5:10: cannot set memory to 1GiB"),
            (format!("{GOOD}speed = 1\n"), "a.toml:5:1: unknown field `speed`"),
            (
                format!("{GOOD}[handle]\nx = {{ to = \"t\", rights = [\"own\"] }}\n"),
                "a.toml:6:27: cannot ask for right \"own\"",
            ),
            (
                format!("{GOOD}[handle]\nx = {{ to = \"t\", rights = [] }}\n"),
                "a.toml:6:26: cannot ask for no right",
            ),
            (String::new(), "a.toml:1:1: missing field `extension`"),
            ("[extension".to_owned(), "a.toml:1:"),
        ] {
            let error = error(&text);
            assert!(error.starts_with(expected), "{error} for {text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,200}", at in 0..60_usize, byte in any::<char>()) {
            let _any = Manifest::parse("a.toml", &text);
            let mut damaged: Vec<char> = GOOD.chars().collect();
            let at = at.min(damaged.len() - 1);
            damaged[at] = byte;
            let _any = Manifest::parse("a.toml", &damaged.into_iter().collect::<String>());
        }
    }
}
