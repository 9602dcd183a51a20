//! How values are put into words: strings, and how much of structures.

use std::fmt::Write as _;

/// How values are put into words.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Form {
    /// With all members of large structures, instead of those that say most.
    pub whole: bool,
    /// Which strings have hexadecimal digits only.
    pub hexadecimal: Hexadecimal,
}

/// Strings of hexadecimal digits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Hexadecimal {
    /// None: bytes that are no characters have digits.
    #[default]
    Bytes,
    /// Those that have bytes which are no characters.
    Binary,
    /// All.
    All,
}

impl Form {
    /// Bytes as a string of C; `whole`: there are no more.
    pub(crate) fn quoted(self, bytes: &[u8], whole: bool) -> String {
        format!("\"{}\"{}", self.escaped(bytes), if whole { "" } else { "..." })
    }

    /// Bytes as between the quotes of C.
    pub(crate) fn escaped(self, bytes: &[u8]) -> String {
        let is_character = |byte: &u8| matches!(byte, 0x20..0x7f | 9..=13);
        match self.hexadecimal {
            Hexadecimal::Bytes => escaped(bytes),
            Hexadecimal::Binary if bytes.iter().all(is_character) => escaped(bytes),
            _ => bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect(),
        }
    }
}

/// Bytes as between the quotes of C.
fn escaped(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match byte {
            b'\n' => text.push_str("\\n"),
            b'\t' => text.push_str("\\t"),
            b'\r' => text.push_str("\\r"),
            b'"' => text.push_str("\\\""),
            b'\\' => text.push_str("\\\\"),
            0x20..0x7f => text.push(char::from(*byte)),
            byte => {
                let _infallible = write!(text, "\\x{byte:02x}");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_quoted() {
        let form = |hexadecimal| Form { hexadecimal, ..Form::default() };
        let quoted = |bytes: &[u8], whole| form(Hexadecimal::Bytes).quoted(bytes, whole);
        assert_eq!(quoted(b"a\"\n\x01", true), "\"a\\\"\\n\\x01\"");
        assert_eq!(quoted(b"a", false), "\"a\"...");
        let binary = |bytes: &[u8]| form(Hexadecimal::Binary).quoted(bytes, true);
        assert_eq!((binary(b"a\n"), binary(b"a\x01")), ("\"a\\n\"".to_owned(), "\"\\x61\\x01\"".to_owned()));
        assert_eq!(form(Hexadecimal::All).quoted(b"a", true), "\"\\x61\"");
    }
}
