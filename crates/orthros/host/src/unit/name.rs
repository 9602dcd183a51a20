//! Names of units: `NAME.service`, `NAME@INSTANCE.service`.

/// Says that a name is a service's.
pub(super) const SUFFIX: &str = ".service";
const LONGEST: usize = 255;
/// Other kinds of units, systemd.unit(5).
const OTHERS: [&str; 10] =
    ["socket", "device", "mount", "automount", "swap", "target", "path", "timer", "slice", "scope"];

/// The name of a service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    /// The full name.
    pub(super) full: String,
    /// What comes before `@`, or before the suffix.
    pub(super) prefix: String,
    /// What comes after `@`; nothing in a template.
    pub(super) instance: Option<String>,
}

impl Name {
    /// `.service` may be left out.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if let Some((_, kind)) = text.rsplit_once('.')
            && OTHERS.contains(&kind)
        {
            return Err(format!("a {kind} runs no program; name the service (NAME.service)"));
        }
        let stem = text.strip_suffix(SUFFIX).unwrap_or(text);
        let full = format!("{stem}{SUFFIX}");
        let allowed = |c: char| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c);
        if stem.is_empty() || stem.starts_with('@') || full.len() > LONGEST || !stem.chars().all(allowed) {
            return Err("no unit is called that: a name has letters, digits and :-_.\\@; a unit's file is named by its \
                        absolute path"
                .to_owned());
        }
        let (prefix, instance) = match stem.split_once('@') {
            Some((prefix, instance)) => (prefix, Some(instance.to_owned())),
            None => (stem, None),
        };
        let prefix = prefix.to_owned();
        Ok(Self { full, prefix, instance })
    }

    /// Returns whether it stands for instances, and is none.
    pub(super) fn is_template(&self) -> bool {
        self.instance.as_deref() == Some("")
    }

    /// Returns the template's name, of an instance.
    pub(super) fn template(&self) -> Option<String> {
        let instance = self.instance.as_deref()?;
        (!instance.is_empty()).then(|| format!("{}@{SUFFIX}", self.prefix))
    }

    /// Returns the name without its suffix.
    pub(super) fn stem(&self) -> &str {
        self.full.strip_suffix(SUFFIX).unwrap_or(&self.full)
    }

    /// The names whose drop-ins are this one's, the nearest first: its own, those that end with a dash (`a-b-`, `a-`), and the
    /// template's in the same way.
    pub(super) fn relatives(&self) -> Vec<String> {
        let mut names = Vec::new();
        let at = self.instance.as_ref().map(|instance| format!("@{instance}"));
        for at in [at, self.template().is_some().then(|| "@".to_owned())].into_iter().flatten() {
            Self::shorten(&self.prefix, &at, &mut names);
        }
        if self.instance.is_none() {
            Self::shorten(&self.prefix, "", &mut names);
        }
        names
    }

    fn shorten(prefix: &str, at: &str, names: &mut Vec<String>) {
        names.push(format!("{prefix}{at}{SUFFIX}"));
        let mut rest = prefix.trim_end_matches('-');
        while let Some((shorter, _)) = rest.rsplit_once('-') {
            rest = shorter.trim_end_matches('-');
            if rest.is_empty() {
                break;
            }
            names.push(format!("{rest}-{at}{SUFFIX}"));
        }
    }
}

/// Returns what systemd-escape(1) made of a text: `-` stands for `/`, `\x2d` for a byte.
pub(super) fn unescape(text: &str) -> Result<String, String> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        match byte {
            b'-' => bytes.push(b'/'),
            b'\\' => {
                let digit = |at: usize| tail.get(at).and_then(|&digit| char::from(digit).to_digit(16));
                let (Some(b'x'), Some(high), Some(low)) = (tail.first(), digit(1), digit(2)) else {
                    return Err(format!("{text:?} is not escaped as systemd-escape does"));
                };
                bytes.extend(u8::try_from(high << 4 | low));
                rest = &tail[3..];
            }
            byte => bytes.push(byte),
        }
    }
    String::from_utf8(bytes).map_err(|_| format!("{text:?} stands for no text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        let name = Name::parse("redis-server").unwrap();
        assert_eq!((name.full.as_str(), name.stem()), ("redis-server.service", "redis-server"));
        assert_eq!(name, Name::parse("redis-server.service").unwrap());
        let name = Name::parse("a@b.c").unwrap();
        assert_eq!((name.prefix.as_str(), name.instance.as_deref()), ("a", Some("b.c")));
        assert_eq!(name.template().as_deref(), Some("a@.service"));
        assert!(Name::parse("a@").unwrap().is_template());
        for bad in ["", ".service", "@x", "a b", "a/b", "ä", &"x".repeat(300)] {
            assert!(Name::parse(bad).unwrap_err().contains("absolute path"), "{bad}");
        }
        assert!(Name::parse("ssh.socket").unwrap_err().contains("a socket runs no program"));
    }

    #[test]
    fn relatives_come_nearest_first() {
        let relatives = |name| Name::parse(name).unwrap().relatives();
        assert_eq!(relatives("a-b-c"), ["a-b-c.service", "a-b-.service", "a-.service"]);
        assert_eq!(relatives("a-b@x"), ["a-b@x.service", "a-@x.service", "a-b@.service", "a-@.service"]);
        assert_eq!(relatives("-a"), ["-a.service"]);
    }

    #[test]
    fn what_was_escaped_comes_back() {
        assert_eq!(unescape(r"a-b\x2dc").unwrap(), "a/b-c");
        for bad in [r"\x2", r"\", r"\xff", r"\x+f"] {
            assert!(unescape(bad).is_err(), "{bad}");
        }
    }
}
