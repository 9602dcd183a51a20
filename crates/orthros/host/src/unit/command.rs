//! `ExecStart=` and `ExecStartPre=`: a program by its path, with prefixes, arguments and variables, systemd.service(5).

use std::path::{Path, PathBuf};

use orrery_orthros_wire::ExecCommand;

use super::environment::Environment;
use super::specifier::Specifiers;
use super::words::Words;

/// Where a program is that is not named by its path.
pub(super) const SEARCHED: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A command line as a unit has it, its variables not replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    program: String,
    name: Option<String>,
    arguments: Vec<String>,
    ignore_failure: bool,
    as_root: bool,
    plain: bool,
}

/// The command lines of one assignment, which may have several.
pub(super) fn parse(text: &str, specifiers: &Specifiers<'_>) -> Result<Vec<Line>, String> {
    let mut lines = Vec::new();
    let mut words = Words::new(text);
    while !words.rest().is_empty() {
        if words.take_plain(";") {
            continue;
        }
        lines.push(line(&mut words, specifiers)?);
    }
    Ok(lines)
}

fn line(words: &mut Words<'_>, specifiers: &Specifiers<'_>) -> Result<Line, String> {
    let next = |words: &mut Words<'_>| match words.next() {
        Some(word) => specifiers.expand(&word?),
        None => Err("it names no program".to_owned()),
    };
    let first = next(words)?;
    let program = first.trim_start_matches(['@', '-', ':', '+', '!', '|']);
    let prefixes = &first[..first.len() - program.len()];
    if prefixes.contains('|') {
        return Err("a user's shell is not started; name the program without |".to_owned());
    }
    if program.is_empty() || program.starts_with('$') {
        return Err(
            "the program stands before anything else, and not in a variable; write its path".to_owned()
        );
    }
    let name = if prefixes.contains('@') { Some(next(words)?) } else { None };
    let mut arguments = Vec::new();
    while !words.rest().is_empty() && !words.rest().starts_with("; ") && words.rest() != ";" {
        if words.take_plain("\\;") {
            arguments.push(";".to_owned());
        } else {
            arguments.push(next(words)?);
        }
    }
    Ok(Line {
        program: program.to_owned(),
        name,
        arguments,
        ignore_failure: prefixes.contains('-'),
        // What `!!` does is for kernels that lack ambient capabilities.
        as_root: prefixes.contains('+') || prefixes.matches('!').count() == 1,
        plain: prefixes.contains(':'),
    })
}

impl Line {
    /// Returns the command with its variables replaced, its program looked for in these directories.
    pub(super) fn settle(&self, environment: &Environment, searched: &str) -> Result<ExecCommand, String> {
        let program = self.find(searched)?;
        let expand = |word: &String| match self.plain {
            true => vec![word.clone()],
            false => environment.expand(word),
        };
        Ok(ExecCommand {
            program: program.to_string_lossy().into_owned(),
            arg0: self.name.clone(),
            arguments: self.arguments.iter().flat_map(expand).collect(),
            ignore_failure: self.ignore_failure,
            as_root: self.as_root,
        })
    }

    fn find(&self, searched: &str) -> Result<PathBuf, String> {
        let program = Path::new(&self.program);
        if program.is_absolute() {
            let there = program.is_file().then(|| program.to_owned());
            return there.ok_or_else(|| {
                format!("this host has no {}; install the package that has it", self.program)
            });
        }
        if self.program.contains('/') {
            return Err("write the program's absolute path, or its name alone".to_owned());
        }
        let mut places = searched.split(':').map(|directory| Path::new(directory).join(program));
        places.find(|path| path.is_file()).ok_or_else(|| {
            format!(
                "no {} is in {searched}; install the package that has it, or write its path",
                self.program
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::name::Name;
    use super::*;

    fn read(text: &str) -> Result<Vec<Line>, String> {
        let name = Name::parse("t@one").unwrap();
        parse(text, &Specifiers { name: &name, file: Path::new("/u") })
    }

    fn settled(text: &str) -> ExecCommand {
        let mut environment = Environment::default();
        environment.set("OPTIONS", "-a 'b c'");
        read(text).unwrap()[0].settle(&environment, SEARCHED).unwrap()
    }

    #[test]
    fn prefixes_arguments_and_variables_are_understood() {
        let command = settled(r#"/bin/sh -c "echo $$A" $OPTIONS ${OPTIONS} %i \; ';'"#);
        assert_eq!(command.program, "/bin/sh");
        assert_eq!(command.arguments, ["-c", "echo $A", "-a", "b c", "-a 'b c'", "one", ";", ";"]);
        assert_eq!((command.ignore_failure, command.as_root, command.arg0), (false, false, None));
        let command = settled("-@/bin/sh other x");
        assert!(
            command.ignore_failure && command.arg0.as_deref() == Some("other") && command.arguments == ["x"]
        );
        assert_eq!(settled(":/bin/sh $OPTIONS %%").arguments, ["$OPTIONS", "%"]);
        assert!(settled("+/bin/sh").as_root && settled("!/bin/sh").as_root && !settled("!!/bin/sh").as_root);
        let found = settled("sh").program;
        assert!(found.starts_with('/') && found.ends_with("/sh"), "{found}");
        assert_eq!(read("/bin/a x ; /bin/b ;").unwrap().len(), 2);
        assert_eq!(read("").unwrap().len(), 0);
    }

    #[test]
    fn what_is_no_command_is_told() {
        for (bad, way) in [
            ("$PROGRAM", "write its path"),
            ("@/bin/sh", "names no program"),
            ("-", "write its path"),
            ("|/bin/sh", "without |"),
            ("/bin/sh 'x", "not closed"),
            ("/bin/sh %b", "in the guests"),
        ] {
            let message = read(bad).unwrap_err();
            assert!(message.contains(way), "{bad}: {message}");
        }
        for (bad, way) in [("/no/such", "install"), ("a/b", "absolute"), ("no-such-program", "/usr/bin")] {
            let message = read(bad).unwrap()[0].settle(&Environment::default(), SEARCHED).unwrap_err();
            assert!(message.contains(way), "{bad}: {message}");
        }
    }
}
