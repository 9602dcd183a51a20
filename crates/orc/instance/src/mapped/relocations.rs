//! The words of a library that are different in each mapping.

use std::ops::Range;

use object::elf::{self, Rela64};
use object::{LittleEndian, U64};

use crate::mapped::dynamic::Dynamic;
use crate::mapped::elf::{Bytes, ENDIAN, Refusal, Result, malformed, size};
use crate::mapped::segments::Segments;
use crate::mapped::symbols::{Definition, Symbol, Symbols};

/// A word, or two of a TLS descriptor, and what is to be in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Relocation {
    /// Where it is, relative to where the library is mapped.
    pub(crate) at: usize,
    pub(crate) value: Value,
}

/// What a relocated word holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    /// The address of the mapping and a number.
    Base(usize),
    /// A number that is the same in all mappings.
    Same(usize),
    /// The address of an import and a number.
    Import { import: usize, addend: usize },
    /// What the function returns that is so far from the address of the mapping, and a number.
    Resolved { function: usize, addend: usize },
    /// The identifier of the library's own thread-local block.
    Block,
    /// The identifier of the thread-local block that has an import.
    BlockOf { import: usize },
    /// The offset of an import in its thread-local block, and a number.
    OffsetOf { import: usize, addend: usize },
    /// A descriptor of a thread-local variable at an offset in the library's own block.
    Descriptor { offset: usize },
}

/// Reads all relocations. Those whose values functions return come last: the functions may need all others.
pub(crate) fn read(
    segments: &Segments,
    dynamic: &Dynamic,
    symbols: &mut Symbols<'_>,
    bytes: Bytes<'_>,
) -> Result<Vec<Relocation>> {
    let mut found = Vec::new();
    let packed: &[U64<LittleEndian>] =
        bytes.table(dynamic.relative.address, dynamic.relative.len, "its table of relative relocations")?;
    for at in unpacked(packed) {
        let at = at?;
        writable(segments, at, 8)?;
        // Where the file has no bytes, there are zeros.
        let word =
            bytes.from(at).and_then(|bytes| bytes.first_chunk()).map_or(0, |word| u64::from_le_bytes(*word));
        found.push(Relocation { at, value: Value::Base(size(word)) });
    }
    for (table, what) in
        [(dynamic.relocations, "its relocation table"), (dynamic.jumps, "its table of imported functions")]
    {
        let entries: &[Rela64<LittleEndian>] = bytes.table(table.address, table.len, what)?;
        for entry in entries {
            let at = size(entry.r_offset.get(ENDIAN));
            if let Some(value) = value(entry, segments, symbols)? {
                writable(segments, at, if matches!(value, Value::Descriptor { .. }) { 16 } else { 8 })?;
                found.push(Relocation { at, value });
            }
        }
    }
    found.sort_by_key(|relocation| matches!(relocation.value, Value::Resolved { .. }));
    Ok(found)
}

fn writable(segments: &Segments, at: usize, len: usize) -> Result<()> {
    let range: Range<usize> = at..at.saturating_add(len);
    if segments.is_writable(&range) {
        return Ok(());
    }
    match segments.span.contains(&at) {
        true => Err(Refusal::TextRelocations),
        false => malformed("a relocation is outside of its segments"),
    }
}

fn value(
    entry: &Rela64<LittleEndian>,
    segments: &Segments,
    symbols: &mut Symbols<'_>,
) -> Result<Option<Value>> {
    let kind = entry.r_type(ENDIAN, false);
    let addend = entry.r_addend.get(ENDIAN).cast_unsigned();
    let addend = usize::try_from(addend).unwrap_or_default();
    let symbol = |symbols: &mut Symbols<'_>| symbols.symbol(entry.r_sym(ENDIAN, false) as usize);
    let resolved = |function: usize, addend| match segments.is_code(function) {
        true => Ok(Value::Resolved { function, addend }),
        false => malformed("a relocation calls what is no code"),
    };
    let value = match kind {
        elf::R_X86_64_NONE => return Ok(None),
        elf::R_X86_64_RELATIVE => Value::Base(addend),
        elf::R_X86_64_IRELATIVE => resolved(addend, 0)?,
        elf::R_X86_64_64 | elf::R_X86_64_GLOB_DAT | elf::R_X86_64_JUMP_SLOT => {
            let addend = if kind == elf::R_X86_64_64 { addend } else { 0 };
            match symbol(symbols)? {
                Symbol::None => Value::Same(addend),
                Symbol::Own(Definition::Address(address)) => Value::Base(address.wrapping_add(addend)),
                Symbol::Own(Definition::Absolute(number)) => Value::Same(number.wrapping_add(addend)),
                Symbol::Own(Definition::Resolver(function)) => resolved(function, addend)?,
                Symbol::Own(Definition::ThreadLocal(_)) => {
                    return malformed("a relocation wants the one address of a thread-local variable");
                }
                Symbol::Import(import) => Value::Import { import, addend },
            }
        }
        elf::R_X86_64_DTPMOD64 => match symbol(symbols)? {
            Symbol::Import(import) => Value::BlockOf { import },
            Symbol::None | Symbol::Own(_) => own_block(segments, Value::Block)?,
        },
        elf::R_X86_64_DTPOFF64 => match symbol(symbols)? {
            Symbol::Import(import) => Value::OffsetOf { import, addend },
            symbol => Value::Same(offset(symbol)?.wrapping_add(addend)),
        },
        elf::R_X86_64_TLSDESC => match symbol(symbols)? {
            // The imported variable is in another library's block.
            Symbol::Import(_) => return Err(Refusal::Relocation(kind)),
            symbol => {
                own_block(segments, Value::Descriptor { offset: offset(symbol)?.wrapping_add(addend) })?
            }
        },
        elf::R_X86_64_TPOFF64 | elf::R_X86_64_TPOFF32 => return Err(Refusal::InitialExec),
        kind => return Err(Refusal::Relocation(kind)),
    };
    Ok(Some(value))
}

fn own_block(segments: &Segments, value: Value) -> Result<Value> {
    match segments.thread_local {
        Some(_) => Ok(value),
        None => malformed("a relocation is about thread-local variables, of which it has none"),
    }
}

fn offset(symbol: Symbol) -> Result<usize> {
    match symbol {
        Symbol::None => Ok(0),
        Symbol::Own(Definition::ThreadLocal(offset)) => Ok(offset),
        Symbol::Own(_) | Symbol::Import(_) => {
            malformed("a relocation of a thread-local variable names another symbol")
        }
    }
}

/// Returns the places of DT_RELR: an address is a place, and a bitmap says which of the 63 words after the last ones are.
fn unpacked(words: &[U64<LittleEndian>]) -> impl Iterator<Item = Result<usize>> {
    let mut next = None;
    words.iter().flat_map(move |word| {
        let word = word.get(ENDIAN);
        if word & 1 == 0 {
            next = size(word).checked_add(8);
            return vec![Ok(size(word))];
        }
        let Some(first) = next else {
            return vec![malformed("its relative relocations begin with a bitmap")];
        };
        next = first.checked_add(63 * 8);
        let bits = (0..63).filter(|bit| word >> (bit + 1) & 1 != 0);
        bits.map(|bit| {
            first.checked_add(bit * 8).map_or_else(|| malformed("a relocation is past all addresses"), Ok)
        })
        .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_relocations_are_an_address_and_bits_of_its_successors() {
        let words = [0x10_u64, 0b1011, 0x11 | 1 << 63, 0x400].map(|word| U64::new(ENDIAN, word));
        let found: Vec<_> = unpacked(&words).map(Result::unwrap).collect();
        assert_eq!(found, [0x10, 0x18, 0x28, 0x18 + 63 * 8 + 3 * 8, 0x18 + 63 * 8 + 62 * 8, 0x400]);
        let bitmap_first = [U64::new(ENDIAN, 3)];
        assert!(unpacked(&bitmap_first).next().unwrap().is_err());
        let past = [U64::new(ENDIAN, u64::MAX - 1), U64::new(ENDIAN, u64::MAX)];
        assert!(unpacked(&past).any(|place| place.is_err()));
    }
}
