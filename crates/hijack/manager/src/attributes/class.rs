//! What an attribute is: name, type, range, who may read and set it; and the declaration of that in TOML.
//!
//! ```toml
//! [[class]]
//! name = "cpu.target"
//! kind = "duration"           # integer, duration or share
//! range = ["1ms", "60s"]
//! default = "0s"              # what a tracee has that nobody set; may be out of range, and is then "not set"
//! read = "all"                # owner, tracee or all
//! write = "tracee"
//! owner = 0                   # a user ID; without it, the user who runs the manager
//! sum = "95%"                 # what all tracees together may have; without it, there is no bound
//! ```

use serde::Deserialize;

use super::AttributeError;

/// How many classes a table may have: rights are sets of as many bits.
pub(super) const MOST: usize = 64;

/// The type of an attribute. Every value is a 64-bit number, and this says of what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A number.
    Integer,
    /// Nanoseconds, written `40ms`.
    Duration,
    /// Millionths of a whole, written `25%`.
    Share,
}

/// Who may get a right to an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Permission {
    /// The class' owner only.
    Owner,
    /// Also the user whose tracee it is, for that tracee.
    Tracee,
    /// Everybody who may connect, for all tracees.
    All,
}

/// An attribute class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Class {
    /// The name of the class.
    pub name: String,
    /// The type of its values.
    pub kind: Kind,
    /// The lowest value.
    pub lowest: i64,
    /// The highest value.
    pub highest: i64,
    /// What a tracee has that nobody set.
    pub default: i64,
    /// Who may read it.
    pub read: Permission,
    /// Who may set it.
    pub write: Permission,
    /// The user who may do everything with it; `None` for the one who runs the manager.
    pub owner: Option<u32>,
    /// The highest sum over all tracees.
    pub sum: Option<i64>,
}

/// The declared classes. The other parts of a table know a class by its index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Classes(Vec<Class>);

/// The classes of the services that the manager has itself.
const OWN: &str = include_str!("../classes.toml");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    class: Vec<toml::Spanned<Text>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    name: String,
    kind: Kind,
    range: [toml::Value; 2],
    default: Option<toml::Value>,
    #[serde(default = "all")]
    read: Permission,
    #[serde(default = "tracee")]
    write: Permission,
    owner: Option<u32>,
    sum: Option<toml::Value>,
}

fn all() -> Permission {
    Permission::All
}

fn tracee() -> Permission {
    Permission::Tracee
}

impl Kind {
    /// Parses a value.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(self, text: &str) -> Result<i64, String> {
        let text = text.trim();
        match self {
            Self::Integer => text.parse().map_err(|_| "it is no whole number of 64 bits".to_owned()),
            Self::Duration => {
                let time = orrery_policy::values::duration(text)?;
                i64::try_from(time.as_nanos()).map_err(|_| "it is too long".to_owned())
            }
            Self::Share => {
                let (number, factor) = match text.strip_suffix('%') {
                    Some(number) => (number, 1e4),
                    None => (text, 1e6),
                };
                let number: f64 =
                    number.trim().parse().map_err(|_| "a share is written 25% or 0.25".to_owned())?;
                let millionths = (number * factor).round();
                if !(0.0..=1e12).contains(&millionths) {
                    return Err("a share is 0% or more".to_owned());
                }
                #[expect(clippy::cast_possible_truncation, reason = "within the range just checked")]
                Ok(millionths as i64)
            }
        }
    }

    /// Formats a value as [`parse`](Self::parse) reads it.
    #[must_use]
    pub fn format(self, value: i64) -> String {
        match self {
            Self::Integer => value.to_string(),
            Self::Duration => {
                let units = [(1_000_000_000, "s"), (1_000_000, "ms"), (1000, "us"), (1, "ns")];
                let unit = units.iter().find(|(length, _)| value % length == 0);
                let (length, name) = unit.unwrap_or(&(1, "ns"));
                format!("{}{name}", value / length)
            }
            Self::Share => {
                let (whole, rest) = (value / 10_000, (value % 10_000).abs());
                let rest = format!("{rest:04}");
                let rest = rest.trim_end_matches('0');
                if rest.is_empty() { format!("{whole}%") } else { format!("{whole}.{rest}%") }
            }
        }
    }
}

impl Class {
    /// Parses a value of this class.
    ///
    /// # Errors
    /// [`AttributeError::Malformed`]; the range is checked where it is set.
    pub fn parse(&self, text: &str) -> Result<i64, AttributeError> {
        self.kind.parse(text).map_err(|message| AttributeError::Malformed {
            class: self.name.clone(),
            text: text.to_owned(),
            message,
        })
    }

    fn of(text: &Text) -> Result<Self, String> {
        let named = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
        if text.name.is_empty() || text.name.len() > 64 || !text.name.chars().all(named) {
            return Err(format!(
                "{:?} is no name of a class: take up to 64 letters, digits, dots, dashes",
                text.name
            ));
        }
        let value = |value: &toml::Value| match value {
            toml::Value::String(word) => text.kind.parse(word).map_err(|error| format!("{word:?}: {error}")),
            toml::Value::Integer(number) if text.kind == Kind::Integer => Ok(*number),
            other => Err(format!("{other} is no value of this kind: write it as a string with its unit")),
        };
        let [lowest, highest] = &text.range;
        let (lowest, highest) = (value(lowest)?, value(highest)?);
        if lowest > highest {
            return Err(format!("the range of {} is empty", text.name));
        }
        Ok(Self {
            name: text.name.clone(),
            kind: text.kind,
            lowest,
            highest,
            default: text.default.as_ref().map_or(Ok(lowest), value)?,
            read: text.read,
            write: text.write,
            owner: text.owner,
            sum: text.sum.as_ref().map(value).transpose()?,
        })
    }
}

impl Classes {
    /// The classes of the services that the manager has itself: `cpu.*`, `net.share`.
    ///
    /// # Errors
    /// None that a test of this crate does not find.
    pub fn own() -> Result<Self, AttributeError> {
        Self(Vec::new()).with(OWN, "classes.toml")
    }

    /// No classes: what stands for a table whose owner has lent it.
    pub(crate) fn none() -> Self {
        Self(Vec::new())
    }

    /// These, and those that `text` declares; `name` is for messages.
    ///
    /// # Errors
    /// [`AttributeError::Declaration`], with line and column; [`AttributeError::Full`] beyond 64 classes.
    pub fn with(mut self, text: &str, name: &str) -> Result<Self, AttributeError> {
        let wrong = |offset: usize, message: &str| {
            let before = text.get(..offset).unwrap_or(text);
            let line = before.matches('\n').count() + 1;
            let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
            let message = format!("{line}:{column}: {message}");
            AttributeError::Declaration { name: name.to_owned(), message }
        };
        let file: File = toml::from_str(text)
            .map_err(|error| wrong(error.span().map_or(0, |span| span.start), error.message()))?;
        for spanned in file.class {
            let start = spanned.span().start;
            let class = Class::of(spanned.get_ref()).map_err(|message| wrong(start, &message))?;
            if self.index(&class.name).is_some() {
                return Err(wrong(start, &format!("there is a class {:?} already", class.name)));
            }
            if self.0.len() == MOST {
                return Err(AttributeError::Full("class"));
            }
            self.0.push(class);
        }
        Ok(self)
    }

    /// Returns the index of the class of this name.
    #[must_use]
    pub fn index(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|class| class.name == name)
    }

    /// Returns the class of this name, and its index.
    ///
    /// # Errors
    /// [`AttributeError::UnknownClass`].
    pub fn named(&self, name: &str) -> Result<(usize, &Class), AttributeError> {
        let found = self.0.iter().enumerate().find(|(_, class)| class.name == name);
        found.ok_or_else(|| AttributeError::UnknownClass(name.chars().take(80).collect()))
    }

    /// Returns all, in the order of their indices.
    #[must_use]
    pub fn all(&self) -> &[Class] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MINIMAL: &str = "[[class]]\nname = 'a.b'\nkind = 'share'\nrange = ['0%', '100%']\n";

    #[test]
    fn the_managers_own_classes_are_declared() {
        let own = Classes::own().unwrap();
        let (_, target) = own.named("cpu.target").unwrap();
        assert_eq!((target.kind, target.lowest), (Kind::Duration, 100_000));
        assert!(own.named("net.share").is_ok());
        assert_eq!(own.named("nett"), Err(AttributeError::UnknownClass("nett".into())));
    }

    #[test]
    fn declarations_have_defaults() {
        let own = Classes(Vec::new()).with(MINIMAL, "f").unwrap();
        let class = &own.all()[0];
        assert_eq!((class.lowest, class.highest, class.default, class.sum), (0, 1_000_000, 0, None));
        assert_eq!((class.read, class.write, class.owner), (Permission::All, Permission::Tracee, None));
    }

    #[test]
    fn wrong_declarations_name_their_place() {
        let own = || Classes::own().unwrap();
        let message = |text: &str| own().with(text, "f").unwrap_err().to_string();
        let twice = format!("\n{MINIMAL}{MINIMAL}");
        for (text, expected) in [
            ("[[class", "f: 1:"),
            ("[[class]]\nname = 'x'\nknid = 1", "unknown field `knid`"),
            ("[[class]]\nname = 'x y'\nkind = 'integer'\nrange = [1, 2]", "no name of a class"),
            ("[[class]]\nname = 'x'\nkind = 'integer'\nrange = [2, 1]", "the range of x is empty"),
            ("[[class]]\nname = 'x'\nkind = 'duration'\nrange = [1, 2]", "no value of this kind"),
            ("[[class]]\nname = 'x'\nkind = 'share'\nrange = ['many', '1']", "a share is written"),
            ("[[class]]\nname = 'cpu.target'\nkind = 'integer'\nrange = [1, 2]", "f: 1:1: there is a class"),
            (&twice, "f: 6:1: there is a class \"a.b\" already"),
        ] {
            assert!(message(text).contains(expected), "{text}: {}", message(text));
        }
        let many: String = (0..65)
            .map(|i| format!("[[class]]\nname = 'c{i}'\nkind = 'integer'\nrange = [0, 1]\n"))
            .collect();
        assert_eq!(own().with(&many, "f"), Err(AttributeError::Full("class")));
    }

    #[test]
    fn values_are_written_with_units() {
        assert_eq!(Kind::Duration.parse("40ms"), Ok(40_000_000));
        assert_eq!(Kind::Duration.format(40_000_000), "40ms");
        assert_eq!(Kind::Share.parse("25%"), Ok(250_000));
        assert_eq!(Kind::Share.parse("0.5"), Ok(500_000));
        assert_eq!(Kind::Share.format(12_500), "1.25%");
        assert_eq!(Kind::Integer.parse("-3"), Ok(-3));
        for wrong in ["", "nan", "-1%", "inf", "1e300"] {
            assert!(Kind::Share.parse(wrong).is_err(), "{wrong}");
        }
        assert!(Kind::Integer.parse("99999999999999999999").is_err());
        assert!(Kind::Duration.parse("-1s").is_err());
    }

    proptest! {
        #[test]
        fn values_survive_being_text(value in 0_i64..1_000_000_000_000) {
            // Shares and durations pass through floating point, in which greater ones lose their last digits.
            for kind in [Kind::Integer, Kind::Share, Kind::Duration] {
                prop_assert_eq!(kind.parse(&kind.format(value)), Ok(value));
            }
        }

        #[test]
        fn no_text_makes_it_panic(text in ".{0,40}") {
            for kind in [Kind::Integer, Kind::Share, Kind::Duration] {
                let _ = kind.parse(&text);
            }
            let _ = Classes(Vec::new()).with(&text, "f");
        }
    }
}
