//! Seccomp profiles of containers: the JSON of Docker and Podman, and of the
//! [OCI runtime specification](https://github.com/opencontainers/runtime-spec/blob/main/config-linux.md#seccomp).
//!
//! A profile becomes a filter of its own, beneath which the guard's filter decides as ever: of two filters the kernel does what
//! restricts more. So nothing that a profile says gives a program more than the policy does, and a guard without a profile has no
//! further filter.
//!
//! What becomes of rules is what runc and libseccomp make of them: a rule that says what the default says is left out; the first
//! rule without conditions decides about its call alone; a rule that compares one argument twice is one rule for each comparison.
//! Where several conditions hold, the action that restricts most counts: there libseccomp promises no order.

use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use orrery_sys::capability::CapabilitySet;
use orrery_sys::seccomp::{Action, Comparison, Condition, Filter, sock_filter};
use rustix::io::Errno;
use serde::Deserialize;
use syscalls::Sysno;

use crate::Error;
use crate::policy::capabilities;

/// Longer files are no profiles.
const LONGEST: u64 = 1 << 20;
/// The most instructions that the kernel takes (`BPF_MAXINSNS`).
const MOST_INSTRUCTIONS: usize = 4096;

/// This architecture, as conditions of Docker's profiles name it.
const HERE: &str = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
/// The same, as lists of architectures name it.
const NATIVE: &str = if cfg!(target_arch = "x86_64") { "SCMP_ARCH_X86_64" } else { "SCMP_ARCH_AARCH64" };
/// What can call beside native programs, by another instruction or table of numbers.
const FOREIGN: &str = if cfg!(target_arch = "x86_64") { "SCMP_ARCH_X86" } else { "SCMP_ARCH_ARM" };
const X32: &str = "SCMP_ARCH_X32";

/// Names in `architectures` and `archMap`.
const ARCHITECTURES: [&str; 22] = [
    "SCMP_ARCH_AARCH64",
    "SCMP_ARCH_ARM",
    "SCMP_ARCH_LOONGARCH64",
    "SCMP_ARCH_M68K",
    "SCMP_ARCH_MIPS",
    "SCMP_ARCH_MIPS64",
    "SCMP_ARCH_MIPS64N32",
    "SCMP_ARCH_MIPSEL",
    "SCMP_ARCH_MIPSEL64",
    "SCMP_ARCH_MIPSEL64N32",
    "SCMP_ARCH_PARISC",
    "SCMP_ARCH_PARISC64",
    "SCMP_ARCH_PPC",
    "SCMP_ARCH_PPC64",
    "SCMP_ARCH_PPC64LE",
    "SCMP_ARCH_RISCV64",
    "SCMP_ARCH_S390",
    "SCMP_ARCH_S390X",
    "SCMP_ARCH_SH",
    "SCMP_ARCH_SHEB",
    "SCMP_ARCH_X32",
    "SCMP_ARCH_X86",
];

/// Names in `includes.arches` and `excludes.arches`.
const ARCHES: [&str; 22] = [
    "386",
    "amd64",
    "arm",
    "arm64",
    "loong64",
    "mips",
    "mips64",
    "mips64le",
    "mips64n32",
    "mipsel",
    "mipsel64",
    "mipsel64n32",
    "mipsle",
    "parisc",
    "parisc64",
    "ppc",
    "ppc64",
    "ppc64le",
    "riscv64",
    "s390",
    "s390x",
    "x32",
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Text {
    default_action: String,
    default_errno_ret: Option<u32>,
    default_errno: Option<String>,
    architectures: Option<Vec<String>>,
    arch_map: Option<Vec<ArchitectureText>>,
    flags: Option<Vec<String>>,
    listener_path: Option<String>,
    listener_metadata: Option<String>,
    syscalls: Option<Vec<RuleText>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ArchitectureText {
    architecture: String,
    sub_architectures: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RuleText {
    names: Option<Vec<String>>,
    name: Option<String>,
    action: String,
    errno_ret: Option<u32>,
    errno: Option<String>,
    args: Option<Vec<ArgumentText>>,
    /// For people.
    #[serde(rename = "comment")]
    _comment: Option<String>,
    includes: Option<ConditionText>,
    excludes: Option<ConditionText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ArgumentText {
    index: u8,
    #[serde(default)]
    value: u64,
    #[serde(default)]
    value_two: u64,
    op: String,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct ConditionText {
    caps: Option<Vec<String>>,
    arches: Option<Vec<String>>,
    min_kernel: Option<String>,
}

/// A seccomp profile of a container: which system calls a program may make.
///
/// ```
/// let profile = orrery_monitor::SeccompProfile::parse(
///     r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["ptrace"], "action": "SCMP_ACT_ERRNO"}]}"#,
///     "profile.json",
/// )?;
/// let wrong = orrery_monitor::SeccompProfile::parse(r#"{"defaultAction": "SCMP_ACT_TRACE"}"#, "profile.json");
/// assert!(wrong.unwrap_err().to_string().contains("defaultAction \"SCMP_ACT_TRACE\""));
/// # drop(profile);
/// # Ok::<(), orrery_monitor::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SeccompProfile {
    name: String,
    default: Action,
    rules: Vec<Rule>,
    foreign: bool,
    x32: bool,
}

/// One entry of `syscalls` that concerns this architecture.
#[derive(Clone, Debug)]
struct Rule {
    calls: Vec<Sysno>,
    action: Action,
    /// Any of these conditions has to hold; none: always.
    conditions: Vec<Condition>,
    includes: When,
    excludes: When,
}

/// When a rule is part of a profile.
#[derive(Clone, Debug, Default)]
struct When {
    capabilities: Vec<CapabilitySet>,
    kernel: Option<(u32, u32)>,
}

/// How much an action restricts.
fn strictness(action: Action) -> u8 {
    match action {
        Action::Allow => 0,
        Action::Notify => 1,
        Action::Fail(_) => 2,
        Action::Trap => 3,
        Action::KillThread => 4,
        Action::KillProcess => 5,
    }
}

impl SeccompProfile {
    /// Reads the profile in a file.
    ///
    /// # Errors
    /// Those of reading the file, and those of [`parse`](Self::parse).
    pub fn load(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::ReadProfile { path: path.to_owned(), source };
        // A FIFO is no reason to wait.
        let file = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = file.map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(failed(std::io::Error::other("it is no file")));
        }
        let mut text = String::new();
        file.take(LONGEST + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > LONGEST {
            return Err(failed(std::io::Error::other("it is longer than a MiB")));
        }
        Self::parse(&text, &path.display().to_string())
    }

    /// Reads a profile, which errors call `name`.
    ///
    /// # Errors
    /// What is no profile, with line and column, and what a guard cannot honour, by its name.
    pub fn parse(text: &str, name: &str) -> Result<Self, Error> {
        let text: Text = serde_json::from_str(text).map_err(|error| {
            let said = error.to_string();
            let message = said.rsplit_once(" at line ").map_or(said.as_str(), |(message, _)| message);
            let (line, column) = (error.line(), error.column());
            Error::Profile(format!("{name}:{line}:{column}: cannot honour the seccomp profile: {message}"))
        })?;
        Self::build(text, name).map_err(|message| {
            Error::Profile(format!("{name}: cannot honour the seccomp profile's {message}"))
        })
    }

    fn build(text: Text, name: &str) -> Result<Self, String> {
        let default =
            action("default", &text.default_action, text.default_errno_ret, text.default_errno.as_deref())
                .map_err(|message| message.replace("default.action", "defaultAction"))?;
        for (key, value) in
            [("listenerPath", &text.listener_path), ("listenerMetadata", &text.listener_metadata)]
        {
            if let Some(value) = value.as_ref().filter(|value| !value.is_empty()) {
                return Err(format!(
                    "{key} {value:?}: a guarded program has one listener, which is the guard's"
                ));
            }
        }
        // With one thread there is nothing to synchronize.
        let flags = text.flags.unwrap_or_default();
        if let Some(flag) = flags.iter().find(|flag| *flag != "SECCOMP_FILTER_FLAG_TSYNC") {
            return Err(format!("flags {flag:?}: a guard installs filters without it; leave it out"));
        }
        let others = others(text.architectures, text.arch_map)?;
        let mut rules = Vec::new();
        for (index, rule) in text.syscalls.unwrap_or_default().into_iter().enumerate() {
            rules.extend(Rule::read(rule, &format!("syscalls[{index}]"), default)?);
        }
        let (foreign, x32) =
            (others.iter().any(|name| name == FOREIGN), others.iter().any(|name| name == X32));
        Ok(Self { name: name.to_owned(), default, rules, foreign, x32 })
    }

    /// Returns what errors call the profile.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the filter for a program that has these capabilities, on a kernel of this version.
    #[must_use]
    pub fn filter(&self, capabilities: CapabilitySet, kernel: (u32, u32)) -> Filter {
        // Other interfaces are left to the guard's filter, under which they fail, or are not there.
        let by = |listed| if listed { Action::Allow } else { Action::KillProcess };
        let mut filter = Filter::new(self.default).foreign(by(self.foreign)).x32(by(self.x32));
        let applies = |rule: &&Rule| {
            rule.action != self.default
                && rule.includes.all(capabilities, kernel)
                && !rule.excludes.any(capabilities, kernel)
        };
        let applying: Vec<&Rule> = self.rules.iter().filter(applies).collect();
        for call in Sysno::iter() {
            let about = || applying.iter().filter(|rule| rule.calls.contains(&call));
            if let Some(rule) = about().find(|rule| rule.conditions.is_empty()) {
                filter.set(call, rule.action);
                continue;
            }
            let mut conditions: Vec<(Condition, Action)> = about()
                .flat_map(|rule| rule.conditions.iter().map(|condition| (*condition, rule.action)))
                .collect();
            if conditions.is_empty() {
                continue;
            }
            conditions.sort_by_key(|(_, action)| std::cmp::Reverse(strictness(*action)));
            for (condition, action) in conditions {
                filter.add(call, condition, action);
            }
            filter.add(call, Condition::Always, self.default);
        }
        filter
    }

    /// Compiles the profile for a program that keeps these of the calling thread's capabilities, on this kernel.
    ///
    /// # Errors
    /// Where the filter is longer than the kernel takes.
    pub(crate) fn program(&self, kept: CapabilitySet) -> Result<Vec<sock_filter>, Error> {
        let permitted = rustix::thread::capabilities(None).map(|sets| sets.permitted);
        let permitted = permitted.map_err(Error::kernel("capget"))?;
        let program = self.filter(permitted & kept, running_kernel()).program();
        if program.len() > MOST_INSTRUCTIONS {
            let length = program.len();
            return Err(Error::Profile(format!(
                "{}: cannot honour the seccomp profile: its filter has {length} instructions, and the kernel takes \
                 {MOST_INSTRUCTIONS}; leave out rules",
                self.name
            )));
        }
        Ok(program)
    }
}

/// Returns the version of the running kernel; without `/proc` the oldest one.
fn running_kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let digits =
        |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap_or(0);
    let mut parts = release.split('.').map(digits);
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// Returns which other architectures a profile is about.
fn others(listed: Option<Vec<String>>, map: Option<Vec<ArchitectureText>>) -> Result<Vec<String>, String> {
    let known = |name: &str| name == NATIVE || name == "SCMP_ARCH_X86_64" || ARCHITECTURES.contains(&name);
    let (listed, map) = (listed.unwrap_or_default(), map.unwrap_or_default());
    if !listed.is_empty() && !map.is_empty() {
        return Err("archMap: architectures is there, too; leave one of the two out".to_owned());
    }
    let mapped = map.iter().flat_map(|entry| {
        std::iter::once(&entry.architecture).chain(entry.sub_architectures.iter().flatten())
    });
    if let Some(name) = listed.iter().chain(mapped).find(|name| !known(name)) {
        return Err(format!("architecture {name:?}: no architecture has this name"));
    }
    let native = map.into_iter().filter(|entry| entry.architecture == NATIVE);
    Ok(listed
        .into_iter()
        .chain(native.flat_map(|entry| entry.sub_architectures.unwrap_or_default()))
        .collect())
}

/// Returns what an action means, of which errors name the place.
fn action(place: &str, name: &str, number: Option<u32>, error: Option<&str>) -> Result<Action, String> {
    let by_name = error.filter(|name| !name.is_empty()).map(crate::policy::syscalls::error_named).transpose();
    let by_name = by_name.map_err(|message| format!("{place}: errno {error:?}: {message}"))?;
    let by_number = number
        .map(|number| match i32::try_from(number) {
            Ok(raw @ 1..=4095) => Ok(Errno::from_raw_os_error(raw)),
            _ => Err(format!("{place}: errnoRet {number}: no error has this number")),
        })
        .transpose()?;
    let errno = match (by_number, by_name) {
        (Some(number), Some(name)) if number != name => {
            return Err(format!("{place}: errno {error:?}: errnoRet is another error"));
        }
        (number, name) => number.or(name),
    };
    let action = match name {
        "SCMP_ACT_ERRNO" => return Ok(Action::Fail(errno.unwrap_or(Errno::PERM))),
        "SCMP_ACT_ALLOW" => Action::Allow,
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => Action::KillThread,
        "SCMP_ACT_KILL_PROCESS" => Action::KillProcess,
        "SCMP_ACT_TRAP" => Action::Trap,
        other => {
            let why = match other {
                "SCMP_ACT_TRACE" => "no debugger decides about a guarded program's calls",
                "SCMP_ACT_NOTIFY" => "a guarded program has one listener, which is the guard's",
                "SCMP_ACT_LOG" => {
                    "the kernel does not log calls that the guard decides about; log in [calls] of a policy does"
                }
                _ => "no action has this name",
            };
            return Err(format!("{place}.action {other:?}: {why}"));
        }
    };
    match errno {
        Some(_) => Err(format!("{place}: errnoRet: {name} returns no error")),
        None => Ok(action),
    }
}

impl Rule {
    /// Reads a rule. `None`: it is not about this architecture.
    fn read(text: RuleText, place: &str, default: Action) -> Result<Option<Self>, String> {
        let mut names = text.names.unwrap_or_default();
        match text.name {
            Some(_) if !names.is_empty() => {
                return Err(format!("{place}.name: names is there, too; leave one of the two out"));
            }
            name => names.extend(name),
        }
        if names.is_empty() {
            return Err(format!("{place}: it names no system call"));
        }
        let action = action(place, &text.action, text.errno_ret, text.errno.as_deref())?;
        let (includes, excludes) = (text.includes.unwrap_or_default(), text.excludes.unwrap_or_default());
        for name in includes.arches.iter().chain(&excludes.arches).flatten() {
            if name != "x86" && !ARCHES.contains(&name.as_str()) {
                return Err(format!("{place}: arches {name:?}: no architecture has this name"));
            }
        }
        let conditions = conditions(text.args.unwrap_or_default(), place)?;
        let is_here = |condition: &ConditionText| {
            condition
                .arches
                .as_ref()
                .filter(|all| !all.is_empty())
                .map(|all| all.iter().any(|name| name == HERE))
        };
        let here = is_here(&includes).unwrap_or(true) && !is_here(&excludes).unwrap_or(false);
        let (includes, excludes) = (When::read(includes, place)?, When::read(excludes, place)?);
        if !here {
            return Ok(None);
        }
        let mut calls = Vec::new();
        for name in names {
            match name.parse::<Sysno>() {
                Ok(call) => calls.push(call),
                // Other architectures have it, or later kernels: the default decides about its number.
                Err(_) if strictness(default) >= strictness(action) => (),
                Err(_) => {
                    return Err(format!(
                        "{place}: {name:?}: no system call has this name here, and the profile's default would let \
                         it pass; leave it out"
                    ));
                }
            }
        }
        Ok(Some(Self { calls, action, conditions, includes, excludes }))
    }
}

impl When {
    fn read(text: ConditionText, place: &str) -> Result<Self, String> {
        let capability = |name: String| {
            capabilities::named(&name).map_err(|message| format!("{place}: caps {name:?}: {message}"))
        };
        let capabilities =
            text.caps.unwrap_or_default().into_iter().map(capability).collect::<Result<_, _>>()?;
        let version = |text: String| {
            let parts = text.split_once('.').map(|(major, minor)| (major.parse(), minor.parse()));
            match parts {
                Some((Ok(major), Ok(minor))) => Ok((major, minor)),
                _ => Err(format!("{place}: minKernel {text:?}: it is not of the form MAJOR.MINOR")),
            }
        };
        let kernel = text.min_kernel.filter(|text| !text.is_empty()).map(version).transpose()?;
        Ok(Self { capabilities, kernel })
    }

    /// Whether all of it holds.
    fn all(&self, capabilities: CapabilitySet, kernel: (u32, u32)) -> bool {
        self.capabilities.iter().all(|one| capabilities.contains(*one))
            && self.kernel.is_none_or(|least| kernel >= least)
    }

    /// Whether any of it holds.
    fn any(&self, capabilities: CapabilitySet, kernel: (u32, u32)) -> bool {
        self.capabilities.iter().any(|one| capabilities.contains(*one))
            || self.kernel.is_some_and(|least| kernel >= least)
    }
}

/// Reads what a rule says of arguments: all of it has to hold, but any where an argument is compared twice.
fn conditions(arguments: Vec<ArgumentText>, place: &str) -> Result<Vec<Condition>, String> {
    let mut compared = Vec::new();
    for (number, argument) in arguments.into_iter().enumerate() {
        let place = format!("{place}.args[{number}]");
        let ArgumentText { index, value, value_two, op } = argument;
        if index > 5 {
            return Err(format!("{place}.index {index}: system calls have six arguments, 0 to 5"));
        }
        let comparison = match op.as_str() {
            "SCMP_CMP_EQ" => Comparison::Equal(value),
            "SCMP_CMP_NE" => Comparison::NotEqual(value),
            "SCMP_CMP_LT" => Comparison::Less(value),
            "SCMP_CMP_LE" => Comparison::LessOrEqual(value),
            "SCMP_CMP_GT" => Comparison::Greater(value),
            "SCMP_CMP_GE" => Comparison::GreaterOrEqual(value),
            "SCMP_CMP_MASKED_EQ" if value_two & !value != 0 => {
                return Err(format!(
                    "{place}.valueTwo {value_two}: it has bits that the mask {value} has not"
                ));
            }
            "SCMP_CMP_MASKED_EQ" => Comparison::MaskedEqual { mask: value, value: value_two },
            other => return Err(format!("{place}.op {other:?}: no comparison has this name")),
        };
        compared.push((usize::from(index), comparison));
    }
    let mut all = [None; 6];
    for (index, comparison) in &compared {
        if all[*index].replace(*comparison).is_some() {
            return Ok(compared.into_iter().map(|(index, comparison)| one(index, comparison)).collect());
        }
    }
    Ok(if compared.is_empty() { Vec::new() } else { vec![Condition::Compares(all)] })
}

fn one(index: usize, comparison: Comparison) -> Condition {
    let mut all = [None; 6];
    all[index] = Some(comparison);
    Condition::Compares(all)
}

#[cfg(test)]
mod tests;
