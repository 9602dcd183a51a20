//! Which calls are meant by `-e`: words for calls, as strace knows them, too.

use anyhow::{Context, bail};
use orrery_hijack::calls;

/// What a list of expressions asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Selection {
    /// Numbers of calls.
    pub(crate) calls: Vec<u32>,
    /// `status=failed`.
    pub(super) failed: bool,
    /// `status=successful`.
    pub(super) successful: bool,
    /// `abbrev=none`.
    pub(super) verbose: bool,
    /// `decode-fds=path`.
    pub(super) descriptors: bool,
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
        for word in words.split(',').filter(|word| *word != "none") {
            // Behind a question mark, strace takes what it does not know.
            let (word, optional) = word.strip_prefix('?').map_or((word, false), |word| (word, true));
            let Some(group) = calls::group(word) else {
                if optional {
                    continue;
                }
                bail!(calls::no_such_call(word));
            };
            list.extend(group.into_iter().map(|call| call.number));
        }
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

impl Selection {
    fn set(&mut self, setting: &str, value: &str) -> anyhow::Result<()> {
        match (setting, value) {
            ("status" | "st", "failed") => self.failed = true,
            ("status" | "st", "successful") => self.successful = true,
            ("status" | "st", "all") | ("abbrev" | "a", "all") | ("signal" | "s", "none") => {}
            ("abbrev" | "a", "none") | ("verbose" | "v", "all") => self.verbose = true,
            ("decode-fds" | "fd", "path") => self.descriptors = true,
            ("inject" | "fault", _) => {
                return Err(anyhow::anyhow!("-e {setting}= is what rules are for")).context(
                    "write --policy FILE with `deny`, `return`, `delay`, `every`; or try `orrery faults`",
                );
            }
            _ => bail!(
                "-e {setting}={value} is not known here: there are trace=, status=failed, status=successful, abbrev=none, decode-fds=path"
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
    }

    #[test]
    fn settings_are_straces_options() {
        assert!(selection("status=failed").unwrap().failed);
        assert!(selection("status=successful").unwrap().successful);
        assert!(selection("abbrev=none").unwrap().verbose);
        assert!(selection("decode-fds=path").unwrap().descriptors);
        assert_eq!(selection("status=failed").unwrap().calls.len(), calls::all().len());
    }

    #[test]
    fn what_cannot_be_had_is_said_with_a_way_out() {
        for (expression, part) in [
            ("nonsense", "no system call is called \"nonsense\""),
            ("trace=%nonsense", "groups are %file"),
            ("inject=open:error=EIO", "orrery faults"),
            ("read=3", "is not known here"),
            ("decode-fds=all", "is not known here"),
        ] {
            let error = format!("{:#}", selection(expression).unwrap_err());
            assert!(error.contains(part), "{expression}: {error}");
        }
    }
}
