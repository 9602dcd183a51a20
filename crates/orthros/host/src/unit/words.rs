//! Words with quotes and escapes, as in systemd.service(5), "Command lines", and in lists of assignments.

/// The words of a text, one after the other.
pub(super) struct Words<'t> {
    rest: &'t str,
}

impl<'t> Words<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        Self { rest: text }
    }

    /// Returns what has not been taken yet.
    pub(super) fn rest(&mut self) -> &'t str {
        self.rest = self.rest.trim_start();
        self.rest
    }

    /// Takes this word if it comes next as it stands, neither quoted nor escaped.
    pub(super) fn take_plain(&mut self, word: &str) -> bool {
        match self.rest().strip_prefix(word) {
            Some(tail) if tail.is_empty() || tail.starts_with(char::is_whitespace) => {
                self.rest = tail;
                true
            }
            _ => false,
        }
    }
}

impl Iterator for Words<'_> {
    type Item = Result<String, String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest().is_empty() {
            return None;
        }
        let word = take(&mut self.rest);
        if word.is_err() {
            self.rest = "";
        }
        Some(word)
    }
}

/// Returns all words of a text.
pub(super) fn split(text: &str) -> Result<Vec<String>, String> {
    Words::new(text).collect()
}

fn take(rest: &mut &str) -> Result<String, String> {
    let mut word: Vec<u8> = Vec::new();
    let mut quote = None;
    let mut characters = rest.chars();
    loop {
        *rest = characters.as_str();
        let Some(c) = characters.next() else {
            if quote.is_some() {
                return Err("a quote is not closed".to_owned());
            }
            break;
        };
        match c {
            '\\' => unescape(&mut characters, &mut word)?,
            c if quote == Some(c) => quote = None,
            '"' | '\'' if quote.is_none() => quote = Some(c),
            c if quote.is_none() && c.is_whitespace() => break,
            c => word.extend(c.encode_utf8(&mut [0; 4]).bytes()),
        }
    }
    String::from_utf8(word).map_err(|_| "it stands for bytes that are no text".to_owned())
}

/// Returns what comes after a backslash.
fn unescape(characters: &mut std::str::Chars<'_>, word: &mut Vec<u8>) -> Result<(), String> {
    let c = characters.next().ok_or("it ends with a backslash; write two for one")?;
    let mut number = |first: &str, count: usize, radix| {
        let digits: String = first.chars().chain(characters.by_ref().take(count)).collect();
        let number = u32::from_str_radix(&digits, radix).ok().filter(|_| !digits.starts_with('+'));
        let number = number.filter(|&number| number != 0 && digits.len() == first.len() + count);
        number.ok_or_else(|| format!("\\{c}{digits} stands for no character"))
    };
    let byte = match c {
        'a' => 7,
        'b' => 8,
        'f' => 12,
        'n' => b'\n',
        'r' => b'\r',
        't' => b'\t',
        'v' => 11,
        's' => b' ',
        '\\' | '"' | '\'' => u8::try_from(c).unwrap_or_default(),
        'x' => u8::try_from(number("", 2, 16)?).map_err(|error| error.to_string())?,
        '0'..='7' => {
            u8::try_from(number(&c.to_string(), 2, 8)?).map_err(|_| format!("\\{c}.. stands for no byte"))?
        }
        'u' | 'U' => {
            let number = number("", if c == 'u' { 4 } else { 8 }, 16)?;
            let c = char::from_u32(number).ok_or_else(|| format!("{number:x} is no character's number"))?;
            word.extend(c.encode_utf8(&mut [0; 4]).bytes());
            return Ok(());
        }
        c => return Err(format!("\\{c} stands for nothing; write two backslashes for one")),
    };
    word.push(byte);
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quotes_and_escapes_are_undone() {
        let cases: [(&str, &[&str]); 7] = [
            ("", &[]),
            (" a  b ", &["a", "b"]),
            (r#""a b" 'c "d"' e"#, &["a b", r#"c "d""#, "e"]),
            (r#"A="b c"d '' "#, &["A=b cd", ""]),
            (r"\x41\102\u00e9\U0001F600 \s\t\\", &["ABé😀", " \t\\"]),
            (r#""\"" '\''"#, &["\"", "'"]),
            ("$A ${B} %%", &["$A", "${B}", "%%"]),
        ];
        for (text, words) in cases {
            assert_eq!(split(text).unwrap(), words, "{text}");
        }
        for bad in ["'a", "\"a", "a\\", r"\q", r"\x4", r"\x00", r"\777", r"\ud800", r"\xff", r"\x+4"] {
            assert!(split(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_plain_word_is_told_from_a_quoted_one() {
        let mut words = Words::new("; ';' ;a");
        assert!(words.take_plain(";") && !words.take_plain(";"));
        assert_eq!(words.next().unwrap().unwrap(), ";");
        assert!(!words.take_plain(";"));
    }

    proptest! {
        #[test]
        fn what_is_quoted_comes_back(words in proptest::collection::vec("\\PC{0,12}", 0..5), text in any::<String>()) {
            let quoted = words.iter().map(|word| {
                format!("\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\""))
            });
            prop_assert_eq!(split(&quoted.collect::<Vec<_>>().join(" ")).unwrap(), words);
            let _ = split(&text);
        }
    }
}
