//! The kernel's own symbol table, read from its memory.
//!
//! The table behind `/proc/kallsyms` is compressed: each name is a length and that many indices into a table of 256
//! tokens; the first character of the expanded name is the symbol's kind, as `nm` prints it. Addresses are 32-bit
//! offsets from `kallsyms_relative_base`; where per-CPU symbols are absolute, a negative one `-1 - offset` is relative
//! and a positive one absolute. Source: Linux `scripts/kallsyms.c`, `kernel/kallsyms.c`.

use std::collections::HashMap;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// Longest expanded name a kernel makes (`KSYM_NAME_LEN`, 512 since 6.1).
const LONGEST_NAME: usize = 1024;
const TOKENS: usize = 256;

/// The tables as they are in memory.
pub(crate) struct Tables {
    /// `kallsyms_names`, or more than it.
    pub(crate) names: Vec<u8>,
    /// `kallsyms_token_table`, or more than it.
    pub(crate) tokens: Vec<u8>,
    /// `kallsyms_token_index`: where each token begins.
    pub(crate) token_index: Vec<u16>,
    /// `kallsyms_offsets`.
    pub(crate) offsets: Vec<i32>,
    /// `kallsyms_relative_base`.
    pub(crate) base: u64,
}

/// Addresses by name. A name that several files define is listed with all its addresses.
#[derive(Default)]
pub struct Symbols {
    all: HashMap<Box<str>, Vec<u64>>,
    /// All addresses in their order, when they have been asked for.
    sorted: OnceLock<Vec<u64>>,
}

impl Symbols {
    /// Returns the address of the only, or the first, symbol of this name.
    ///
    /// # Errors
    ///
    /// [`Error::NoSymbol`].
    pub fn address(&self, name: &str) -> Result<u64> {
        self.get(name).ok_or_else(|| Error::NoSymbol(name.to_owned()))
    }

    /// The same, where its absence is an answer.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<u64> {
        self.all.get(name)?.first().copied()
    }

    /// Returns where what has this address within it begins: the last symbol that is not above it.
    #[must_use]
    pub fn function(&self, address: u64) -> Option<u64> {
        let sorted = self.sorted.get_or_init(|| {
            let mut all: Vec<u64> = self.all.values().flatten().copied().collect();
            all.sort_unstable();
            all
        });
        sorted[..sorted.partition_point(|&start| start <= address)].last().copied()
    }

    /// The name of what begins there; the first in their order where there are several.
    #[must_use]
    pub fn name(&self, start: u64) -> Option<&str> {
        self.all.iter().filter(|(_, all)| all.contains(&start)).map(|(name, _)| &**name).min()
    }

    /// Returns whether one of the symbols of this name has this address.
    #[must_use]
    pub fn is_at(&self, name: &str, address: u64) -> bool {
        self.all.get(name).is_some_and(|all| all.contains(&address))
    }

    /// Returns how many names there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn insert(&mut self, name: &str, address: u64) {
        self.all.entry(name.into()).or_default().push(address);
    }

    /// Expands the tables. Stops with an error at the first name that they cannot have meant.
    pub(crate) fn parse(tables: &Tables) -> Result<Self> {
        let corrupt = |why: String| Error::Corrupt { kind: "kallsyms table", address: tables.base, why };
        let mut tokens: Vec<&[u8]> = Vec::with_capacity(TOKENS);
        for &start in tables.token_index.iter().take(TOKENS) {
            let rest = tables.tokens.get(usize::from(start)..).unwrap_or(&[]);
            let length = rest.iter().position(|&byte| byte == 0);
            tokens.push(&rest[..length.ok_or_else(|| corrupt(format!("token at {start} has no end")))?]);
        }
        if tokens.len() != TOKENS {
            return Err(corrupt(format!("{} tokens instead of {TOKENS}", tokens.len())));
        }
        // Per-CPU symbols are absolute if any offset is negative: relative ones are all positive otherwise.
        let absolute_percpu = tables.offsets.iter().any(|&offset| offset < 0);
        let mut symbols = Self::default();
        symbols.all.reserve(tables.offsets.len());
        let mut names = tables.names.iter();
        let mut name = Vec::with_capacity(LONGEST_NAME);
        for (index, &offset) in tables.offsets.iter().enumerate() {
            let ends = || corrupt(format!("the names end before number {index}"));
            let mut length = usize::from(*names.next().ok_or_else(ends)?);
            if length >= 0x80 {
                // Since 6.1 a length of 128 and more takes two bytes, the lower seven bits first.
                length = (length & 0x7f) | (usize::from(*names.next().ok_or_else(ends)?) << 7);
            }
            name.clear();
            for _ in 0..length {
                name.extend_from_slice(tokens[usize::from(*names.next().ok_or_else(ends)?)]);
                if name.len() > LONGEST_NAME {
                    return Err(corrupt(format!("name number {index} never ends")));
                }
            }
            let text = name.get(1..).and_then(|name| std::str::from_utf8(name).ok());
            let text = text.ok_or_else(|| corrupt(format!("name number {index} is no text")))?;
            let magnitude = u64::from(offset.cast_unsigned());
            let address = match (absolute_percpu, offset < 0) {
                (true, true) => tables.base.wrapping_add(u64::from((-1 - offset).cast_unsigned())),
                (true, false) => magnitude,
                (false, _) => tables.base.wrapping_add(magnitude),
            };
            symbols.insert(text, address);
        }
        Ok(symbols)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens 0..=255 are the characters themselves, except that 1 means "Tstart_".
    fn tables() -> Tables {
        let mut tokens = Vec::new();
        let mut token_index = Vec::new();
        for value in 0..=255_u8 {
            token_index.push(u16::try_from(tokens.len()).unwrap());
            match value {
                0 => {}
                1 => tokens.extend_from_slice(b"Tstart_"),
                value => tokens.push(value),
            }
            tokens.push(0);
        }
        let mut names = vec![3, 1, b'u', b'p', 2, b'D', b'x', 0x80 | 3, 1, b'T'];
        names.extend_from_slice(&[b'y'; 130]);
        Tables { names, tokens, token_index, offsets: vec![-17, 0x40, -1], base: 0xffff_ffff_8100_0000 }
    }

    #[test]
    fn names_expand_and_offsets_have_two_meanings() {
        let symbols = Symbols::parse(&tables()).unwrap();
        assert_eq!(symbols.get("start_up"), Some(0xffff_ffff_8100_0010));
        assert_eq!(symbols.get("x"), Some(0x40), "a per-CPU symbol is absolute");
        assert_eq!(symbols.get(&"y".repeat(130)), Some(0xffff_ffff_8100_0000), "a length of two bytes");
        assert!(symbols.address("z").is_err());
        assert_eq!(symbols.function(0xffff_ffff_8100_000f), Some(0xffff_ffff_8100_0000));
        assert_eq!(symbols.function(0xffff_ffff_8100_0010), Some(0xffff_ffff_8100_0010));
        assert_eq!(symbols.function(0x3f), None);
        assert!(symbols.is_at("x", 0x40) && !symbols.is_at("x", 0x41));
    }

    #[test]
    fn broken_tables_are_told() {
        for shorten in 1..140 {
            let mut tables = tables();
            tables.names.truncate(tables.names.len() - shorten);
            assert!(Symbols::parse(&tables).is_err());
        }
        let mut endless = tables();
        endless.tokens.iter_mut().for_each(|byte| *byte |= 1);
        assert!(Symbols::parse(&endless).is_err());
        let mut few = tables();
        few.token_index.truncate(200);
        assert!(Symbols::parse(&few).is_err());
    }
}
