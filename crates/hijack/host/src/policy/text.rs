//! A policy's text: its grammar, by `serde`, and where in it something is wrong.

use std::ops::Range;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use toml::Spanned;

use super::compile::compile;
use super::{Mount, Policy, PolicyError, Services};

/// The whole.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default, rename = "rule")]
    rules: Vec<Spanned<RuleText>>,
    #[serde(default)]
    services: Services,
    #[serde(default, rename = "mount")]
    mounts: Vec<MountText>,
}

/// A mount as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MountText {
    prefix: Spanned<String>,
    archive: PathBuf,
}

/// A rule as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RuleText {
    pub(crate) call: Spanned<Words>,
    pub(crate) path: Option<Spanned<Words>>,
    pub(crate) descriptor: Option<Spanned<Words>>,
    pub(crate) address: Option<Spanned<String>>,
    pub(crate) caller: Option<Spanned<Words>>,
    pub(crate) program: Option<Spanned<Words>>,
    pub(crate) allow: Option<Spanned<bool>>,
    pub(crate) deny: Option<Spanned<String>>,
    #[serde(rename = "return")]
    pub(crate) answer: Option<Spanned<i64>>,
    pub(crate) rewrite: Option<Spanned<String>>,
    pub(crate) redirect: Option<Spanned<String>>,
    pub(crate) short: Option<Spanned<i64>>,
    pub(crate) delay: Option<Spanned<String>>,
    pub(crate) log: Option<Spanned<bool>>,
    pub(crate) every: Option<Spanned<i64>>,
    pub(crate) after: Option<Spanned<i64>>,
    pub(crate) times: Option<Spanned<i64>>,
}

/// One word or a list of them, each with its place.
pub(crate) struct Words(pub(crate) Vec<(Option<Range<usize>>, String)>);

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Each;
        impl<'de> Visitor<'de> for Each {
            type Value = Words;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a string or a list of strings")
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Words, E> {
                Ok(Words(vec![(None, word.to_owned())]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Words, A::Error> {
                let mut words = Vec::new();
                while let Some(word) = list.next_element::<Spanned<String>>()? {
                    words.push((Some(word.span()), word.into_inner()));
                }
                Ok(Words(words))
            }
        }
        deserializer.deserialize_any(Each)
    }
}

/// A message about a part of the text.
pub(crate) struct Wrong {
    pub(crate) at: Range<usize>,
    pub(crate) message: String,
}

/// Reads and checks.
pub(crate) fn parse(text: &str, name: &str) -> Result<Policy, PolicyError> {
    let error = |at: usize, message: String| {
        let (line, column) = place(text, at);
        PolicyError { name: name.to_owned(), line, column, message }
    };
    let document: Document = toml::from_str(text).map_err(|wrong| {
        let at = wrong.span().map_or(0, |span| span.start);
        error(at, wrong.message().to_owned())
    })?;
    let starts: Vec<usize> = document.rules.iter().map(|rule| place(text, rule.span().start).0).collect();
    let rules = compile(&document.rules).map_err(|wrong| error(wrong.at.start, wrong.message))?;
    let mut services = document.services;
    for text in document.mounts {
        let at = text.prefix.span().start;
        let mount = Mount::new(text.prefix.get_ref(), text.archive).map_err(|message| error(at, message))?;
        services.mounts.push(mount);
        if let Some((inner, outer)) = services.nested() {
            let (inner, outer) = (inner.prefix().display(), outer.prefix().display());
            return Err(error(
                at,
                format!("{inner} is within {outer}, which is mounted, too: mount one archive"),
            ));
        }
    }
    Ok(Policy { rules, lines: starts, services, ..Policy::default() })
}

/// Line and column of a byte, from one.
fn place(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
    (line, column)
}
