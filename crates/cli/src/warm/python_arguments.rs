//! The command line of `python3`, parsed as CPython parses it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, bail};
use orrery_warm::client::Source;

/// The arguments of `python3` that a warm interpreter supports.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PythonArguments {
    pub(super) unbuffered: bool,
    pub(super) no_bytecode: bool,
    pub(super) safe_path: bool,
    pub(super) warnings: Vec<OsString>,
    pub(super) source: Source,
    pub(super) arguments: Vec<OsString>,
}

impl PythonArguments {
    /// Parses options as `python3` does: letters may be joined, a value may follow its letter at once or as the next
    /// word, and `-c` and `-m` end the options.
    pub(super) fn parse(words: &[OsString]) -> anyhow::Result<Self> {
        let mut line = Self {
            unbuffered: false,
            no_bytecode: false,
            safe_path: false,
            warnings: Vec::new(),
            source: Source::Stdin { dash: false },
            arguments: Vec::new(),
        };
        let mut words = words.iter().cloned();
        while let Some(word) = words.next() {
            let letters = match word.as_bytes() {
                b"-" => {
                    line.source = Source::Stdin { dash: true };
                    break;
                }
                b"--" => {
                    line.source = words.next().map_or(line.source, Source::Script);
                    break;
                }
                [b'-', letters @ ..] => letters,
                _ => {
                    line.source = Source::Script(word);
                    break;
                }
            };
            for (index, letter) in letters.iter().enumerate() {
                let rest = &letters[index + 1..];
                let mut value = || {
                    let attached = (!rest.is_empty()).then(|| OsStr::from_bytes(rest).to_owned());
                    let value = attached.or_else(|| words.next());
                    value
                        .with_context(|| format!("argument expected for the -{} option", char::from(*letter)))
                };
                match letter {
                    b'u' => line.unbuffered = true,
                    b'B' => line.no_bytecode = true,
                    b'P' => line.safe_path = true,
                    b'W' => {
                        line.warnings.push(value()?);
                        break;
                    }
                    b'c' => {
                        line.source = Source::Command(value()?);
                        line.arguments = words.collect();
                        return Ok(line);
                    }
                    b'm' => {
                        line.source = Source::Module(value()?);
                        line.arguments = words.collect();
                        return Ok(line);
                    }
                    _ => bail!(
                        "unknown option {}: a warm interpreter supports -u -B -P -W -c -m; run python3 for the others",
                        word.display()
                    ),
                }
            }
        }
        line.arguments = words.collect();
        Ok(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_as_python3_reads_them() {
        let parse = |words: &[&str]| {
            let words: Vec<_> = words.iter().map(OsString::from).collect();
            PythonArguments::parse(&words)
        };
        let line = parse(&["-uBWerror", "-W", "ignore", "-c", "pass", "-u", "x"]).unwrap();
        assert!(line.unbuffered && line.no_bytecode && !line.safe_path);
        assert_eq!(line.warnings, ["error", "ignore"]);
        assert_eq!(
            (line.source, line.arguments),
            (Source::Command("pass".into()), vec!["-u".into(), "x".into()])
        );
        let line = parse(&["-P", "--", "-odd-name.py", "-c"]).unwrap();
        assert_eq!((line.source, line.arguments), (Source::Script("-odd-name.py".into()), vec!["-c".into()]));
        assert_eq!(parse(&["-mjson.tool"]).unwrap().source, Source::Module("json.tool".into()));
        assert_eq!(parse(&[]).unwrap().source, Source::Stdin { dash: false });
        assert_eq!(parse(&["-", "x"]).unwrap().source, Source::Stdin { dash: true });
        assert!(parse(&["-c"]).is_err() && parse(&["-i", "x.py"]).is_err() && parse(&["--version"]).is_err());
    }
}
