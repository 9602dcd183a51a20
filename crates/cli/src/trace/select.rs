//! Which calls are meant by `-e`: words for calls, as strace knows them, too.

use anyhow::{Context as _, bail};
use orrery_hijack::calls;
use orrery_hijack::decode::signal_number;
use orrery_hijack::policy::Descriptors;
use regex_lite::Regex;

/// What a list of expressions asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Selection {
    /// Numbers of calls.
    pub(crate) calls: Vec<u32>,
    /// `status=failed`.
    pub(super) failed: bool,
    /// `status=successful`.
    pub(super) successful: bool,
    /// `abbrev=none`.
    pub(super) verbose: bool,
    /// What `decode-fds=` says.
    pub(super) descriptors: Descriptors,
    /// Signals, one bit each: what `signal=` says, or all.
    pub(super) signals: u64,
    /// What `inject=` and `fault=` say, in their order.
    pub(super) injections: Vec<Injection>,
}

impl Default for Selection {
    fn default() -> Self {
        Self {
            calls: Vec::new(),
            failed: false,
            successful: false,
            verbose: false,
            descriptors: Descriptors::NONE,
            signals: u64::MAX,
            injections: Vec::new(),
        }
    }
}

/// A tampering with calls that `-e` asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Injection {
    /// `fault=`, in which calls fail with `ENOSYS` unless it says something else.
    pub(super) fails: bool,
    /// What is behind the equals sign.
    pub(super) text: String,
}

/// Reads expressions: `open,close`, `%file`, `!futex,poll`, `trace=...`. What is named adds up, what is named behind a `!` is taken
/// away in the end; nothing named means all calls.
///
/// # Errors
/// What means nothing, or cannot be had here.
pub(crate) fn read(expressions: &[String]) -> anyhow::Result<Selection> {
    let mut selection = Selection::default();
    let (mut wanted, mut unwanted) = (Vec::new(), Vec::new());
    for expression in expressions {
        let words = match expression.split_once('=') {
            None => expression.as_str(),
            Some(("trace" | "t", words)) => words,
            Some((setting, value)) => {
                selection.set(setting, value)?;
                continue;
            }
        };
        let (list, words) = match words.strip_prefix('!') {
            Some(words) => (&mut unwanted, words),
            None => (&mut wanted, words),
        };
        list.extend(named(words)?);
        if words == "none" {
            unwanted.extend(calls::all().iter().map(|call| call.number));
        }
    }
    if wanted.is_empty() {
        wanted.extend(calls::all().iter().map(|call| call.number));
    }
    wanted.retain(|number| !unwanted.contains(number));
    wanted.sort_unstable();
    wanted.dedup();
    selection.calls = wanted;
    Ok(selection)
}

/// Returns the numbers of the calls that a list means.
///
/// # Errors
/// What means nothing.
fn named(words: &str) -> anyhow::Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for word in split(words).filter(|word| *word != "none") {
        // Behind a question mark, strace takes what it does not know.
        let (word, optional) = word.strip_prefix('?').map_or((word, false), |word| (word, true));
        let found = match word.strip_prefix('/') {
            Some(pattern) => matching(pattern.strip_suffix('/').unwrap_or(pattern))?,
            None => calls::group(word).into_iter().flatten().map(|call| call.number).collect(),
        };
        if found.is_empty() && !optional {
            bail!(calls::no_such_call(word));
        }
        numbers.extend(found);
    }
    Ok(numbers)
}

/// Splits a list at its commas; those within a regular expression (`/.../`) are part of it.
fn split(words: &str) -> impl Iterator<Item = &str> {
    let mut within = false;
    words.split(move |character: char| {
        within ^= character == '/';
        character == ',' && !within
    })
}

/// Returns the numbers of the calls whose names match a regular expression somewhere.
fn matching(pattern: &str) -> anyhow::Result<Vec<u32>> {
    let pattern =
        Regex::new(pattern).with_context(|| format!("cannot read the regular expression /{pattern}/"))?;
    Ok(calls::all().iter().filter(|call| pattern.is_match(call.name)).map(|call| call.number).collect())
}

/// Returns the names of the calls that the set of an injection means: a list as behind `trace=`, or behind a `!` all but these.
///
/// # Errors
/// What means nothing, or no call.
pub(super) fn names(set: &str) -> anyhow::Result<Vec<&'static str>> {
    let (set, all_but) = set.strip_prefix('!').map_or((set, false), |set| (set, true));
    let numbers = named(set)?;
    let meant = calls::all().iter().filter(|call| numbers.contains(&call.number) != all_but);
    let names: Vec<_> = meant.map(|call| call.name).collect();
    if names.is_empty() {
        bail!("no system call is meant by {set:?}");
    }
    Ok(names)
}

/// Returns the signals that a list means, one bit each: names with or without `SIG`, numbers, `all`, `none`, or behind a `!` all but these.
///
/// # Errors
/// What means no signal.
fn signals(set: &str) -> anyhow::Result<u64> {
    let (set, all_but) = set.strip_prefix('!').map_or((set, false), |set| (set, true));
    let mut named = 0;
    for word in set.split(',') {
        named |= match word {
            "all" => u64::MAX,
            "none" => 0,
            word => match signal_number(&word.to_ascii_uppercase()) {
                Some(number) => 1 << (number - 1),
                None => bail!("no signal is called {word:?}; `kill -l` lists them"),
            },
        };
    }
    Ok(if all_but { !named } else { named })
}

/// What of descriptors is printed: `path,socket`, `!pidfd`, `all`.
///
/// # Errors
/// What means nothing.
fn descriptors(set: &str) -> anyhow::Result<Descriptors> {
    const KINDS: [(&str, Descriptors); 4] = [
        ("path", Descriptors::PATHS),
        ("socket", Descriptors::SOCKETS),
        ("dev", Descriptors::DEVICES),
        ("pidfd", Descriptors::PROCESSES),
    ];
    let (words, all_but) = set.strip_prefix('!').map_or((set, false), |words| (words, true));
    let words: Vec<&str> = words.split(',').collect();
    let unknown =
        |word: &&&str| !matches!(**word, "all" | "none") && KINDS.iter().all(|(kind, _)| kind != *word);
    if let Some(word) = words.iter().find(unknown) {
        bail!("cannot decode descriptors as {word:?}: there are path, socket, dev, pidfd, all and none");
    }
    let is_named = |kind: &str| words.contains(&kind) || words.contains(&"all");
    let chosen = KINDS.iter().filter(|(kind, _)| is_named(kind) != all_but);
    Ok(chosen.fold(Descriptors::NONE, |all, (_, kind)| all.with(*kind)))
}

impl Selection {
    fn set(&mut self, setting: &str, value: &str) -> anyhow::Result<()> {
        match (setting, value) {
            ("status" | "st", "failed") => self.failed = true,
            ("status" | "st", "successful") => self.successful = true,
            ("status" | "st", "all") | ("abbrev" | "a", "all") => {}
            ("signal" | "signals" | "s", set) => self.signals = signals(set)?,
            ("abbrev" | "a", "none") | ("verbose" | "v", "all") => self.verbose = true,
            ("decode-fds" | "fd", set) => self.descriptors = descriptors(set)?,
            ("inject" | "fault", _) => {
                self.injections.push(Injection { fails: setting == "fault", text: value.to_owned() });
            }
            _ => bail!(
                "-e {setting}={value} is not known here: there are trace=, signal=, inject=, fault=, status=failed, status=successful, abbrev=none, decode-fds="
            ),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(expressions: &[&str]) -> Vec<&'static str> {
        let expressions: Vec<_> = expressions.iter().map(|text| (*text).to_owned()).collect();
        let calls = read(&expressions).unwrap().calls;
        calls.into_iter().filter_map(|number| Some(calls::numbered(number)?.name)).collect()
    }

    fn selection(expression: &str) -> anyhow::Result<Selection> {
        read(&[expression.to_owned()])
    }

    #[test]
    fn straces_words_are_understood() {
        assert_eq!(names(&["read,write"]), ["read", "write"]);
        assert_eq!(names(&["read", "write"]), ["read", "write"]);
        assert_eq!(names(&["trace=read,?no_such_call"]), ["read"]);
        assert_eq!(names(&["t=%lstat"]), ["lstat"]);
        assert_eq!(names(&[]).len(), calls::all().len());
        assert_eq!(names(&["all"]).len(), calls::all().len());
        assert_eq!(names(&["none"]), [""; 0]);
        assert_eq!(names(&["trace=!%file,read"]).len(), calls::all().len() - names(&["%file,read"]).len());
        assert_eq!(names(&["read,write", "!write"]), ["read"]);
        assert_eq!(names(&["trace=/^(read|write)$/"]), ["read", "write"]);
        assert_eq!(names(&["/^dup[0-9]{1,2}$/,close"]), ["close", "dup2", "dup3"]);
        assert_eq!(names(&["%lstat", "?/no_call_has_this/"]), ["lstat"]);
    }

    #[test]
    fn settings_are_straces_options() {
        assert!(selection("status=failed").unwrap().failed);
        assert!(selection("status=successful").unwrap().successful);
        assert!(selection("abbrev=none").unwrap().verbose);
        let descriptors = |set: &str| selection(&format!("decode-fds={set}")).unwrap().descriptors;
        assert_eq!((descriptors("path"), descriptors("none")), (Descriptors::PATHS, Descriptors::NONE));
        assert_eq!((descriptors("all"), descriptors("!none")), (Descriptors::ALL, Descriptors::ALL));
        assert_eq!(descriptors("dev,socket"), Descriptors::SOCKETS.with(Descriptors::DEVICES));
        assert_eq!(descriptors("!pidfd,path"), descriptors("dev,socket"));
        assert_eq!(selection("status=failed").unwrap().calls.len(), calls::all().len());
        let signals = |expression: &str| selection(expression).unwrap().signals;
        assert_eq!((signals("read"), signals("signal=all"), signals("signal=none")), (u64::MAX, u64::MAX, 0));
        assert_eq!((signals("signal=SIGHUP,int"), signals("s=!2"), signals("signal=!all")), (3, !2, 0));
        assert_eq!(signals("signal=SIGRT_3"), 1 << 34);
        let injections =
            read(&["fault=read".to_owned(), "inject=write:retval=1".to_owned()]).unwrap().injections;
        let injection = |fails, text: &str| Injection { fails, text: text.to_owned() };
        assert_eq!(injections, [injection(true, "read"), injection(false, "write:retval=1")]);
    }

    #[test]
    fn what_cannot_be_had_is_said_with_a_way_out() {
        for (expression, part) in [
            ("nonsense", "no system call is called \"nonsense\""),
            ("trace=%nonsense", "groups are %file"),
            ("/[/", "regular expression /[/"),
            ("/no_call_has_this/", "no system call"),
            ("read=3", "is not known here"),
            ("signal=SIGNONE", "no signal is called \"SIGNONE\""),
            ("decode-fds=path,inode", "cannot decode descriptors as \"inode\""),
        ] {
            let error = format!("{:#}", selection(expression).unwrap_err());
            assert!(error.contains(part), "{expression}: {error}");
        }
    }
}
