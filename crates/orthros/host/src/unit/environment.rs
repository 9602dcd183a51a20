//! Variables: `Environment=`, files of them, and where a command line names them.

use super::words;

/// In the order in which they were set; each name is there once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Environment(pub(super) Vec<(String, String)>);

impl Environment {
    pub(super) fn set(&mut self, name: &str, value: &str) {
        self.unset(name);
        self.0.push((name.to_owned(), value.to_owned()));
    }

    pub(super) fn unset(&mut self, name: &str) {
        self.0.retain(|(other, _)| other != name);
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    /// The words that a word of a command line becomes, systemd.service(5): `$A` by itself becomes as many as it has, `${A}` is
    /// replaced within its word, `$$` stands for one.
    pub(super) fn expand(&self, word: &str) -> Vec<String> {
        if let Some(name) = word.strip_prefix('$')
            && is_name(name)
        {
            let value = self.get(name).unwrap_or_default();
            // A value of which quotes are no pairs stays as it is, but for the spaces.
            return words::split(value)
                .unwrap_or_else(|_| value.split_whitespace().map(str::to_owned).collect());
        }
        let mut expanded = String::new();
        let mut rest = word;
        while let Some((before, after)) = rest.split_once('$') {
            expanded.push_str(before);
            let braced = after.strip_prefix('{').and_then(|after| after.split_once('}'));
            rest = match braced {
                Some((name, after)) if is_name(name) => {
                    expanded.push_str(self.get(name).unwrap_or_default());
                    after
                }
                _ => {
                    expanded.push('$');
                    after.strip_prefix('$').unwrap_or(after)
                }
            };
        }
        expanded.push_str(rest);
        vec![expanded]
    }
}

/// Returns whether a variable may be called that.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Returns a variable and its value.
pub(super) fn assignment(word: &str) -> Result<(&str, &str), String> {
    word.split_once('=').filter(|(name, _)| is_name(name)).ok_or_else(|| {
        format!("{word:?} is no variable with its value; write NAME=VALUE, as in \"A=one two\" B=three")
    })
}

/// The variables of a file, as `EnvironmentFile=` has them, systemd.exec(5).
pub(super) fn parse_file(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut variables = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return Ok(variables);
        }
        if rest.starts_with(['#', ';']) {
            rest = comment(rest);
            continue;
        }
        let end = rest.find(['=', '\n']).unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        let name = name.trim_end();
        let Some(after) = after.strip_prefix('=') else {
            return Err(format!("{name:?} has no value; write NAME=VALUE"));
        };
        if !is_name(name) {
            return Err(format!("{name:?} is no variable's name; it has letters, digits and _"));
        }
        let (value, after) = value(after).map_err(|why| format!("{name}: {why}"))?;
        variables.push((name.to_owned(), value));
        rest = after;
    }
}

/// Returns what comes after a comment, which a backslash continues.
fn comment(text: &str) -> &str {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        if c == '\n' && !escaped {
            return &text[at..];
        }
        escaped = c == '\\' && !escaped;
    }
    ""
}

/// A value, and what comes after its line.
fn value(text: &str) -> Result<(String, &str), String> {
    let mut value = String::new();
    // How much of it does not go with the spaces at its end.
    let mut kept = 0;
    // Quotes in the middle of what has none stand for themselves.
    let (mut quote, mut bare) = (None, false);
    let mut characters = text.trim_start_matches([' ', '\t']).chars();
    while let Some(c) = characters.next() {
        match (quote, c) {
            (None, '\n') => break,
            (None, '"' | '\'') if !bare => quote = Some(c),
            (None, ' ' | '\t') if !bare => {}
            (None, '\\') => match characters.next() {
                Some('\n') | None => {}
                Some(c) => {
                    value.push(c);
                    (kept, bare) = (value.len(), true);
                }
            },
            (None, c) => {
                value.push(c);
                bare = true;
                if !c.is_whitespace() {
                    kept = value.len();
                }
            }
            (Some(quoted), c) if quoted == c => quote = None,
            (Some('"'), '\\') => {
                match characters.next() {
                    Some('\n') | None => {}
                    Some(c @ ('"' | '\\' | '`' | '$')) => value.push(c),
                    Some(c) => value.extend(['\\', c]),
                }
                kept = value.len();
            }
            (Some(_), c) => {
                value.push(c);
                kept = value.len();
            }
        }
    }
    if quote.is_some() {
        return Err("a quote is not closed".to_owned());
    }
    value.truncate(kept);
    Ok((value, characters.as_str()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn variables_are_put_into_command_lines() {
        let mut environment = Environment::default();
        environment.set("A", "one 'two three'");
        environment.set("B", "x");
        environment.set("B", "y");
        environment.set("E", "");
        let cases: [(&str, &[&str]); 9] = [
            ("$A", &["one", "two three"]),
            ("${A}", &["one 'two three'"]),
            ("-${B}-${C}-", &["-y--"]),
            ("$C", &[]),
            ("$E", &[]),
            ("${E}", &[""]),
            ("a$B", &["a$B"]),
            ("$$B $${B}", &["$B ${B}"]),
            ("${unclosed $", &["${unclosed $"]),
        ];
        for (word, words) in cases {
            assert_eq!(environment.expand(word), words, "{word}");
        }
    }

    #[test]
    fn files_of_variables_are_read() {
        let text = "# comment \\\ncontinued=1\nA=one two  \n\n; another\nB = 'it is' \nC=\"a\\\"b\\n\"\nD=one \\\n two\nE=\n\
                    F=\"one\ntwo\"\nG=a\\ \nH=it's";
        let read = parse_file(text).unwrap();
        let read: Vec<(&str, &str)> =
            read.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(
            read,
            [
                ("A", "one two"),
                ("B", "it is"),
                ("C", "a\"b\\n"),
                ("D", "one  two"),
                ("E", ""),
                ("F", "one\ntwo"),
                ("G", "a "),
                ("H", "it's"),
            ]
        );
        for bad in ["A", "1=2", "a b=c", "A='"] {
            assert!(parse_file(bad).is_err(), "{bad}");
        }
        assert!(assignment("=x").is_err() && assignment("A").is_err());
        assert_eq!(assignment("A=b=c"), Ok(("A", "b=c")));
    }

    proptest! {
        #[test]
        fn any_text_ends_well_and_quoted_values_come_back(text in any::<String>(), value in any::<String>()) {
            let _ = parse_file(&text);
            let quoted = value.replace('\\', "\\\\").replace('"', "\\\"");
            prop_assert_eq!(parse_file(&format!("A=\"{quoted}\"")).unwrap(), [("A".to_owned(), value.clone())]);
            let mut environment = Environment::default();
            environment.set("A", &value);
            prop_assert_eq!(environment.expand("x${A}"), [format!("x{value}")]);
        }
    }
}
