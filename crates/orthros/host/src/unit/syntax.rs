//! The lines of a unit's file, systemd.syntax(7): sections, assignments, comments, continued lines.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// An assignment, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) section: String,
    pub(super) key: String,
    pub(super) value: String,
    pub(super) file: PathBuf,
    pub(super) line: usize,
}

impl Setting {
    /// That it cannot be had, and what to do.
    pub(super) fn refuse(&self, why: impl AsRef<str>) -> Error {
        refuse(&self.file, self.line, &format!("{}={}: {}", self.key, self.value, why.as_ref()))
    }
}

fn refuse(file: &Path, line: usize, why: &str) -> Error {
    Error::Unit { place: format!("{}:{line}", file.display()), why: why.to_owned() }
}

/// Returns all assignments of a file, in order.
pub(super) fn parse(text: &str, file: &Path) -> Result<Vec<Setting>> {
    let mut settings = Vec::new();
    let mut section: Option<String> = None;
    for (line, text) in lines(text) {
        let text = text.trim();
        if text.is_empty() {
            continue;
        }
        if let Some(name) = text.strip_prefix('[') {
            let name =
                name.strip_suffix(']').ok_or_else(|| refuse(file, line, &format!("{text}: write [NAME]")))?;
            section = Some(name.to_owned());
            continue;
        }
        let Some((key, value)) = text.split_once('=') else {
            return Err(refuse(file, line, &format!("{text}: write KEY=VALUE, or # before a comment")));
        };
        let Some(section) = section.clone() else {
            return Err(refuse(
                file,
                line,
                &format!("{text}: no section has begun; write [Service] before it"),
            ));
        };
        let (key, value) = (key.trim().to_owned(), value.trim().to_owned());
        settings.push(Setting { section, key, value, file: file.to_owned(), line });
    }
    Ok(settings)
}

/// Lines without comments, those that a backslash continues put together, each with the number where it begins.
fn lines(text: &str) -> Vec<(usize, String)> {
    let mut lines = Vec::new();
    let mut begun: Option<(usize, String)> = None;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim_start();
        if line.starts_with(['#', ';']) {
            continue;
        }
        let (number, mut whole) = begun.take().unwrap_or((number, String::new()));
        whole.push_str(line);
        let backslashes = whole.bytes().rev().take_while(|&byte| byte == b'\\').count();
        if backslashes % 2 == 1 {
            whole.pop();
            whole.push(' ');
            begun = Some((number, whole));
        } else {
            lines.push((number, whole));
        }
    }
    lines.extend(begun);
    lines
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Vec<(String, String, usize)> {
        let settings = parse(text, Path::new("/u")).unwrap().into_iter();
        settings.map(|it| (format!("{}.{}", it.section, it.key), it.value, it.line)).collect()
    }

    #[test]
    fn assignments_are_read_with_their_lines() {
        let text = "# comment\n[Unit]\nDescription = a = b  \n\n[Service]\nExecStart=/bin/a \\\n# between\n  ; too\n   b \\\n\
                    c\nUser=\nPath=a\\\\\nLast=x \\";
        let said = |key: &str, value: &str, line| (key.to_owned(), value.to_owned(), line);
        assert_eq!(
            read(text),
            [
                said("Unit.Description", "a = b", 3),
                said("Service.ExecStart", "/bin/a  b  c", 6),
                said("Service.User", "", 11),
                said("Service.Path", r"a\\", 12),
                said("Service.Last", "x", 13),
            ]
        );
    }

    #[test]
    fn what_is_none_is_told_with_its_place() {
        let message = |text| parse(text, Path::new("/u")).unwrap_err().to_string();
        assert_eq!(message("[Service]\nnonsense"), "/u:2: nonsense: write KEY=VALUE, or # before a comment");
        assert!(message("[Service\n").starts_with("/u:1: [Service: "));
        assert!(message("A=b").contains("no section has begun"));
    }

    proptest! {
        #[test]
        fn any_text_ends_well_and_an_assignment_comes_back(text in any::<String>(), value in "[a-z =#;\"'%$]{0,20}") {
            let _ = parse(&text, Path::new("/u"));
            prop_assert_eq!(&read(&format!("[S]\nk={value}\n"))[0].1, value.trim());
        }
    }
}
