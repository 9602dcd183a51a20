//! The grammar: a TOML file, section by section. Values keep their positions.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use toml::Spanned;

use crate::error::{Fault, PolicyError, position};

/// Strings with their positions.
pub type Entries = Vec<Spanned<String>>;

/// A policy as it is written.
#[derive(Debug)]
pub struct Document {
    name: String,
    text: String,
    sections: Sections,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sections {
    refusal: Option<Spanned<String>>,
    mediation: Option<Spanned<String>>,
    capabilities: Option<Spanned<Entries>>,
    files: Option<Spanned<Files>>,
    network: Option<Spanned<Addresses>>,
    calls: Option<Spanned<SystemCalls>>,
    limits: Option<Spanned<Limits>>,
    view: Option<Spanned<View>>,
    #[serde(default, rename = "rule")]
    rules: Vec<Spanned<Rule>>,
    services: Option<Spanned<Services>>,
    #[serde(default, rename = "mount")]
    mounts: Vec<Spanned<Mount>>,
    manager: Option<Spanned<Manager>>,
}

/// A part of a policy that a command may not be able to honour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// `refusal = ...`
    Refusal,
    /// `mediation = ...`
    Mediation,
    /// `capabilities = ...`
    Capabilities,
    /// `[files]`
    Files,
    /// `[network]`
    Network,
    /// `[calls]`
    Calls,
    /// `[limits]`
    Limits,
    /// `[view]`
    View,
    /// `[[rule]]`
    Rules,
    /// `[services]`
    Services,
    /// `[[mount]]`
    Mounts,
    /// `[manager]`
    Manager,
}

impl Section {
    /// What is allowed, everything else being refused.
    pub const SANDBOX: [Self; 8] = [
        Self::Refusal,
        Self::Mediation,
        Self::Capabilities,
        Self::Files,
        Self::Network,
        Self::Calls,
        Self::Limits,
        Self::View,
    ];

    /// What becomes of certain calls, all others passing.
    pub const RULES: [Self; 4] = [Self::Rules, Self::Services, Self::Mounts, Self::Manager];
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Refusal => "refusal",
            Self::Mediation => "mediation",
            Self::Capabilities => "capabilities",
            Self::Files => "[files]",
            Self::Network => "[network]",
            Self::Calls => "[calls]",
            Self::Limits => "[limits]",
            Self::View => "[view]",
            Self::Rules => "[[rule]]",
            Self::Services => "[services]",
            Self::Mounts => "[[mount]]",
            Self::Manager => "[manager]",
        })
    }
}

/// The section `[files]`: rights by path.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Files {
    /// Paths whose metadata may be read.
    pub stat: Entries,
    /// Directories that may be listed.
    pub list: Entries,
    /// Paths that may be read and listed.
    pub read: Entries,
    /// Paths that may be written.
    pub write: Entries,
    /// Directories in which files may be created, renamed and removed.
    pub create: Entries,
    /// Directories in which new files may be made, and those then used.
    pub own: Entries,
    /// Paths that may be executed.
    pub execute: Entries,
    /// Paths that may not be used at all, whatever the other entries say.
    pub deny: Entries,
    /// Paths that may not be changed, nor made, even where another entry allows it.
    #[serde(rename = "read-only")]
    pub read_only: Entries,
    /// Paths beneath those of `deny`, about which the other entries decide nevertheless.
    pub except: Entries,
}

/// The section `[network]`: addresses.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Addresses {
    /// Addresses that may be connected to.
    pub connect: Entries,
    /// Addresses that may be bound.
    pub bind: Entries,
}

/// The section `[calls]`: system calls by name.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SystemCalls {
    /// What happens to calls that are not named: `allow`, `deny` or an error's name.
    pub default: Option<Spanned<String>>,
    /// Calls that are allowed.
    pub allow: Entries,
    /// Calls that fail, each with an error if one is named: `open=ENOENT`.
    pub deny: Entries,
    /// Calls that are allowed and logged.
    pub log: Entries,
    /// A file with a container's seccomp profile, which holds, too.
    pub seccomp: Option<Spanned<String>>,
}

/// The section `[limits]`: setrlimit(2).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Limits {
    /// Processes and threads at one time.
    pub processes: Option<u32>,
    /// Address space of each process, a size.
    pub memory: Option<Spanned<String>>,
    /// File descriptors of each process.
    pub open_files: Option<u64>,
    /// The longest file that may be written, a size.
    pub file_size: Option<Spanned<String>>,
    /// Seconds of CPU time of each process.
    pub cpu_seconds: Option<u64>,
}

/// The section `[view]`: what of the file system is there.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct View {
    /// Directories in whose place the program finds empty ones of its own.
    pub private: Entries,
    /// Files and directories within those that are there nevertheless.
    pub show: Entries,
    /// How much each of the private directories can hold, a size.
    pub size: Option<Spanned<String>>,
}

/// A `[[rule]]`: conditions, and what is done where all of them hold.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Condition: the call is one of these names or groups.
    pub call: Spanned<Words>,
    /// Condition: one of its paths matches one of these patterns.
    pub path: Option<Spanned<Words>>,
    /// Condition: its descriptor is of one of these kinds.
    pub descriptor: Option<Spanned<Words>>,
    /// Condition: it goes to one of these addresses.
    pub address: Option<Spanned<Words>>,
    /// Condition: it comes from the code of one of these files.
    pub caller: Option<Spanned<Words>>,
    /// Condition: the program that was executed is one of these.
    pub program: Option<Spanned<Words>>,
    /// Action: it is performed, and later rules are not consulted.
    pub allow: Option<Spanned<bool>>,
    /// Action: it fails with this error.
    pub deny: Option<Spanned<String>>,
    /// Action: it returns this value.
    #[serde(rename = "return")]
    pub answer: Option<Spanned<i64>>,
    /// Action: the beginning of its path is replaced by this.
    pub rewrite: Option<Spanned<String>>,
    /// Action: it connects to this address instead.
    pub redirect: Option<Spanned<String>>,
    /// Action: it transfers at most so many bytes.
    pub short: Option<Spanned<i64>>,
    /// Action: a module decides, which is read from this file.
    pub handler: Option<Spanned<PathBuf>>,
    /// Action: it waits first, for a duration.
    pub delay: Option<Spanned<String>>,
    /// Action: it is logged.
    pub log: Option<Spanned<bool>>,
    /// The rule applies to every so many-th call only.
    pub every: Option<Spanned<i64>>,
    /// The rule applies after so many calls only.
    pub after: Option<Spanned<i64>>,
    /// The rule applies so many times at most.
    pub times: Option<Spanned<i64>>,
}

/// The section `[services]`: calls that the executive answers in the kernel's place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Services {
    /// How sleeps end.
    pub sleep: Option<Sleep>,
    /// Answers that are cached.
    pub remember: Vec<Remembered>,
    /// How long receive calls look for a datagram before they block: a duration.
    pub poll_receive: Option<Spanned<String>>,
}

/// How `nanosleep` and `clock_nanosleep` end on time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sleep {
    /// By timers without slack, a short slice, and reading the clock for the last microseconds.
    Precise,
    /// The same, and threads that sleep get real-time priority, or the highest nice value, where that is permitted: for as
    /// long as they are busy for a quarter of the time at most.
    Realtime,
}

/// Answers that cannot change without the executive seeing it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Remembered {
    /// `getpid`, and `gettid` in processes that never had a second thread.
    Process,
    /// `getuid`, `geteuid`, `getgid`, `getegid`.
    User,
}

/// A `[[mount]]`: an archive that the program sees as a directory.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// The path of the directory.
    pub prefix: Spanned<String>,
    /// The archive, a tar file.
    pub archive: PathBuf,
}

/// The section `[manager]`: how a service manager is to serve the program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Manager {
    /// The manager's socket; without it, the default one, at which a manager is started if none runs.
    pub socket: Option<PathBuf>,
    /// Guaranteed CPU time, `TARGET/PERIOD`.
    pub cpu: Option<String>,
    /// Further attributes.
    pub attributes: BTreeMap<String, String>,
}

/// A string or a list of strings, which then have positions of their own.
#[derive(Clone, Debug)]
pub struct Words(pub Vec<(Option<Range<usize>>, String)>);

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Each;
        impl<'de> Visitor<'de> for Each {
            type Value = Words;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a string or a list of strings")
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Words, E> {
                Ok(Words(vec![(None, word.to_owned())]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Words, A::Error> {
                let mut words = Vec::new();
                while let Some(word) = list.next_element::<Spanned<String>>()? {
                    words.push((Some(word.span()), word.into_inner()));
                }
                Ok(Words(words))
            }
        }
        deserializer.deserialize_any(Each)
    }
}

impl Document {
    /// Parses `text`, which errors call `name`.
    ///
    /// # Errors
    /// What is no TOML, or not the grammar of policies.
    pub fn parse(text: &str, name: &str) -> Result<Self, PolicyError> {
        let sections = toml::from_str(text).map_err(|error| {
            let offset = error.span().map_or(0, |span| span.start);
            PolicyError::at(name, text, offset, error.message().to_owned())
        })?;
        Ok(Self { name: name.to_owned(), text: text.to_owned(), sections })
    }

    /// Returns the error for a fault in this text.
    #[must_use]
    pub fn error(&self, fault: Fault) -> PolicyError {
        PolicyError::at(&self.name, &self.text, fault.span.start, fault.message)
    }

    /// Returns the line of a byte, counted from 1.
    #[must_use]
    pub fn line(&self, offset: usize) -> usize {
        position(&self.text, offset).0
    }

    /// Refuses the policy if it has one of these sections, because of `reason`.
    ///
    /// # Errors
    /// About the first of the sections in the text.
    pub fn refuse(&self, sections: &[Section], reason: &str) -> Result<(), PolicyError> {
        let found = sections.iter().filter_map(|section| Some((self.start(*section)?, section)));
        match found.min_by_key(|(start, _)| *start) {
            None => Ok(()),
            Some((start, section)) => {
                let message = format!("cannot honour {section}: {reason}");
                Err(PolicyError::at(&self.name, &self.text, start, message))
            }
        }
    }

    fn start(&self, section: Section) -> Option<usize> {
        let sections = &self.sections;
        let span = match section {
            Section::Refusal => sections.refusal.as_ref()?.span(),
            Section::Mediation => sections.mediation.as_ref()?.span(),
            Section::Capabilities => sections.capabilities.as_ref()?.span(),
            Section::Files => sections.files.as_ref()?.span(),
            Section::Network => sections.network.as_ref()?.span(),
            Section::Calls => sections.calls.as_ref()?.span(),
            Section::Limits => sections.limits.as_ref()?.span(),
            Section::View => sections.view.as_ref()?.span(),
            Section::Rules => sections.rules.first()?.span(),
            Section::Services => sections.services.as_ref()?.span(),
            Section::Mounts => sections.mounts.first()?.span(),
            Section::Manager => sections.manager.as_ref()?.span(),
        };
        Some(span.start)
    }

    /// Returns what a refused call ends with, if the policy says so.
    #[must_use]
    pub fn refusal(&self) -> Option<&Spanned<String>> {
        self.sections.refusal.as_ref()
    }

    /// Returns who decides about files that are opened, if the policy says so.
    #[must_use]
    pub fn mediation(&self) -> Option<&Spanned<String>> {
        self.sections.mediation.as_ref()
    }

    /// Returns the capabilities that the program keeps, if the policy names them.
    #[must_use]
    pub fn capabilities(&self) -> Option<&Entries> {
        self.sections.capabilities.as_ref().map(Spanned::get_ref)
    }

    /// Returns the section `[files]`; an empty one if there is none.
    #[must_use]
    pub fn files(&self) -> Files {
        contents(self.sections.files.as_ref())
    }

    /// Returns the section `[network]`; an empty one if there is none.
    #[must_use]
    pub fn network(&self) -> Addresses {
        contents(self.sections.network.as_ref())
    }

    /// Returns the section `[calls]`; an empty one if there is none.
    #[must_use]
    pub fn calls(&self) -> SystemCalls {
        contents(self.sections.calls.as_ref())
    }

    /// Returns the section `[limits]`; an empty one if there is none.
    #[must_use]
    pub fn limits(&self) -> Limits {
        contents(self.sections.limits.as_ref())
    }

    /// Returns the section `[view]`, if there is one.
    #[must_use]
    pub fn view(&self) -> Option<&View> {
        self.sections.view.as_ref().map(Spanned::get_ref)
    }

    /// Returns the rules, in their order.
    #[must_use]
    pub fn rules(&self) -> &[Spanned<Rule>] {
        &self.sections.rules
    }

    /// Returns the section `[services]`; an empty one if there is none.
    #[must_use]
    pub fn services(&self) -> Services {
        contents(self.sections.services.as_ref())
    }

    /// Returns the section `[manager]`, if there is one.
    #[must_use]
    pub fn manager(&self) -> Option<&Spanned<Manager>> {
        self.sections.manager.as_ref()
    }

    /// Returns the mounts, in their order.
    #[must_use]
    pub fn mounts(&self) -> &[Spanned<Mount>] {
        &self.sections.mounts
    }
}

fn contents<T: Clone + Default>(section: Option<&Spanned<T>>) -> T {
    section.map(|section| section.get_ref().clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &str = "# A policy\n[files]\nread = ['/usr']\n\n[[rule]]\ncall = 'open'\ndeny = 'EPERM'\n";

    #[test]
    fn sections_of_both_kinds_stand_side_by_side() {
        let document = Document::parse(BOTH, "p").unwrap();
        assert_eq!(document.files().read[0].get_ref(), "/usr");
        assert_eq!(document.rules().len(), 1);
        assert_eq!(document.line(document.rules()[0].span().start), 5);
    }

    #[test]
    fn what_a_command_cannot_honour_is_refused_with_its_position() {
        let document = Document::parse(BOTH, "p").unwrap();
        let refused = |sections: &[Section]| document.refuse(sections, "why").unwrap_err().to_string();
        assert_eq!(refused(&Section::SANDBOX), "p:2:1: cannot honour [files]: why");
        assert_eq!(refused(&Section::RULES), "p:5:1: cannot honour [[rule]]: why");
        assert_eq!(document.refuse(&[Section::Limits, Section::Mounts], "why"), Ok(()));
    }

    /// The chapter of the book is the reference: what it shows is understood, and what is understood is in it.
    #[test]
    fn the_reference_and_the_grammar_agree() {
        let chapter = include_str!("../../../docs/src/policy.md");
        let examples: Vec<_> =
            chapter.split("```toml\n").skip(1).filter_map(|text| text.split("```").next()).collect();
        assert_eq!(examples.len(), 2);
        for example in &examples {
            Document::parse(example, "docs/src/policy.md").unwrap();
        }
        for (section, keys) in [
            ("", 9),
            ("[files]\n", 8),
            ("[network]\n", 2),
            ("[calls]\n", 4),
            ("[limits]\n", 5),
            ("[view]\n", 3),
            ("[manager]\n", 3),
            ("[[rule]]\ncall = 'x'\n", 17),
        ] {
            let error = Document::parse(&format!("{section}no-such-key = 1"), "p").unwrap_err().to_string();
            let known: Vec<_> = error.split('`').skip(3).step_by(2).collect();
            assert!(known.len() >= keys, "{error}");
            for key in known {
                let named = [format!("`{key}`"), format!("`{key} = "), format!("[{key}]")];
                assert!(
                    named.iter().any(|name| chapter.contains(name.as_str())),
                    "{section}{key} is not in the reference"
                );
            }
        }
    }

    #[test]
    fn unknown_sections_and_keys_are_errors() {
        let error = |text: &str| Document::parse(text, "p").unwrap_err().to_string();
        assert!(error("[filess]").starts_with("p:1:2: unknown field `filess`"), "{}", error("[filess]"));
        assert!(error("[files]\nraed = []").starts_with("p:2:1: unknown field `raed`"));
        assert!(error("[[rule]]\ncall = 'x'\nwhy = 1").starts_with("p:3:1: unknown field `why`"));
        assert!(error("x").starts_with("p:1:2:"));
    }
}
