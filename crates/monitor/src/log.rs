//! What was refused, for people and for programs.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::Error;
use crate::policy::Rights;

/// Where refusals are written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Log {
    /// Nowhere.
    Nowhere,
    /// To standard error: each refusal once, in words.
    #[default]
    Words,
    /// To a file, each refusal, one line of JSON each: `time` (seconds since 1970), `process`, `thread`, `call`,
    /// `action` (`refused`, `allowed`, or `granted` by an answer), then `path` and `missing`, or `address`, or `reason`.
    JsonLines(PathBuf),
}

/// What was refused, or is to be written down.
#[derive(Debug)]
pub(crate) enum Event<'a> {
    /// An access to a file.
    File { path: &'a [u8], missing: Rights },
    /// An address.
    Address { text: String },
    /// A call as such.
    Call { reason: &'a str },
    /// What a rule is about: a path or an address.
    Rule { about: &'a [u8] },
}

#[derive(Serialize)]
struct Line<'a> {
    time: f64,
    process: i32,
    thread: i32,
    call: &'a str,
    action: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<Vec<&'static str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

#[derive(Debug)]
enum Sink {
    None,
    Words { seen: HashMap<String, u64> },
    Lines(File),
}

/// How many different refusals are described in words.
const MOST_WORDS: usize = 1000;

/// The open log.
#[derive(Debug)]
pub(crate) struct Writer {
    sink: Mutex<Sink>,
}

/// The names of rights, as policies have them.
pub(crate) fn names(rights: Rights) -> Vec<&'static str> {
    let all = [
        (Rights::STAT, "stat"),
        (Rights::LIST, "list"),
        (Rights::READ, "read"),
        (Rights::WRITE, "write"),
        (Rights::CREATE, "create"),
        (Rights::EXECUTE, "execute"),
    ];
    all.iter().filter(|(right, _)| rights.contains(*right)).map(|(_, name)| *name).collect()
}

impl Writer {
    pub(crate) fn new(log: &Log) -> Result<Self, Error> {
        let sink = match log {
            Log::Nowhere => Sink::None,
            Log::Words => Sink::Words { seen: HashMap::new() },
            Log::JsonLines(path) => Sink::Lines(open(path)?),
        };
        Ok(Self { sink: Mutex::new(sink) })
    }

    pub(crate) fn refused(&self, process: i32, thread: i32, call: &str, event: &Event<'_>) {
        self.write(process, thread, call, event, "refused");
    }

    pub(crate) fn allowed(&self, process: i32, thread: i32, call: &str) {
        self.write(process, thread, call, &Event::Call { reason: "the policy has it logged" }, "allowed");
    }

    /// Writes down what was allowed by an answer. The program that answered knows it: it is not told in words.
    pub(crate) fn granted(&self, process: i32, thread: i32, call: &str, event: &Event<'_>) {
        let is_told = matches!(*self.sink.lock().unwrap_or_else(PoisonError::into_inner), Sink::Lines(_));
        if is_told {
            self.write(process, thread, call, event, "granted");
        }
    }

    fn write(&self, process: i32, thread: i32, call: &str, event: &Event<'_>, action: &str) {
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *sink {
            Sink::None => (),
            Sink::Words { seen } => {
                let text = words(call, event, action);
                let known = seen.len();
                match seen.get_mut(&text) {
                    Some(count) => *count += 1,
                    None if known < MOST_WORDS => {
                        // That it cannot be written is no trouble of the program's. So below.
                        let _ = writeln!(std::io::stderr(), "orrery guard: [{process}] {text}");
                        seen.insert(text, 1);
                    }
                    None => (),
                }
            }
            Sink::Lines(file) => {
                let text;
                let (mut path, mut missing, mut address, mut reason) = (None, None, None, None);
                match event {
                    Event::File { path: at, missing: rights } => {
                        path = Some(String::from_utf8_lossy(at).into_owned());
                        missing = Some(names(*rights));
                    }
                    Event::Address { text: at } => {
                        text = at;
                        address = Some(text.as_str());
                    }
                    Event::Call { reason: why } => reason = Some(*why),
                    Event::Rule { about } => {
                        path = Some(String::from_utf8_lossy(about).into_owned());
                        reason = Some("a rule says so");
                    }
                }
                let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
                let line = Line { time, process, thread, call, action, path, missing, address, reason };
                if let Ok(mut line) = serde_json::to_vec(&line) {
                    line.push(b'\n');
                    // A full disk must not become the program's trouble.
                    let _ = file.write_all(&line);
                }
            }
        }
    }
}

fn open(path: &Path) -> Result<File, Error> {
    std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .map_err(|source| Error::Write { path: path.to_owned(), source })
}

fn words(call: &str, event: &Event<'_>, action: &str) -> String {
    match event {
        Event::File { path, missing } => {
            let missing = names(*missing).join(", ");
            format!(
                "{action} {call} of {}: the policy does not allow {missing}",
                String::from_utf8_lossy(path)
            )
        }
        Event::Address { text } => format!("{action} {call} of {text}: the policy does not allow it"),
        Event::Call { reason } => format!("{action} {call}: {reason}"),
        Event::Rule { about } => {
            format!("{action} {call} of {}: a rule says so", String::from_utf8_lossy(about))
        }
    }
}
