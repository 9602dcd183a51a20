//! The symbols that a library defines, and those that it imports.

use std::collections::HashMap;
use std::ffi::CString;

use object::LittleEndian;
use object::elf::{self, Sym64, Vernaux, Verneed, Versym};
use object::pod::{from_bytes, slice_from_bytes};
use object::read::elf::{GnuHashTable, HashTable, Sym as _};

use crate::mapped::dynamic::{Dynamic, string};
use crate::mapped::elf::{Bytes, ENDIAN, Header, Refusal, Result, malformed, size};

/// The bit of a symbol's version that says that a name alone does not find it.
const HIDDEN: u16 = 0x8000;
const STB_GNU_UNIQUE: u8 = 10;

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Definition {
    /// An address, relative to where the library is mapped.
    Address(usize),
    /// A number.
    Absolute(usize),
    /// The address of a function that returns the address (STT_GNU_IFUNC).
    Resolver(usize),
    /// An offset in the thread-local block.
    ThreadLocal(usize),
}

/// A symbol that others define.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Import {
    pub(crate) name: CString,
    pub(crate) version: Option<CString>,
    /// Whether it may be missing.
    pub(crate) weak: bool,
    pub(crate) thread_local: bool,
}

/// A symbol that a relocation names.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Symbol {
    /// None: the relocation is about the library as a whole.
    None,
    Own(Definition),
    /// One of [`Symbols::imports`].
    Import(usize),
}

/// The tables of symbols, while relocations are read.
pub(crate) struct Symbols<'a> {
    strings: &'a [u8],
    symbols: &'a [Sym64<LittleEndian>],
    /// How many of them a name may find.
    count: usize,
    versions: &'a [Versym<LittleEndian>],
    /// Names of versions, by index.
    names: HashMap<u16, CString>,
    pub(crate) imports: Vec<Import>,
    /// Which import a symbol is.
    numbers: HashMap<usize, usize>,
}

impl<'a> Symbols<'a> {
    pub(crate) fn read(dynamic: &Dynamic, bytes: Bytes<'a>) -> Result<Self> {
        let strings = bytes.at(dynamic.strings.address, dynamic.strings.len, "its string table")?;
        let outside = |what: &str| Refusal::Malformed(format!("its {what} is outside of its segments"));
        // The dynamic section does not say how many symbols there are; relocations name some past those of the hash table.
        let rest = bytes.from(dynamic.symbols).ok_or_else(|| outside("symbol table"))?;
        let (symbols, _) = slice_from_bytes(rest, rest.len() / size_of::<Sym64<LittleEndian>>())
            .map_err(|()| outside("aligned symbol table"))?;
        let versions = match dynamic.versions {
            Some(at) => {
                let rest = bytes.from(at).ok_or_else(|| outside("table of versions"))?;
                slice_from_bytes(rest, rest.len() / 2).map_err(|()| outside("aligned table of versions"))?.0
            }
            None => &[],
        };
        let names = match dynamic.needed_versions {
            Some(at) => needed_versions(at, bytes, strings)?,
            None => HashMap::new(),
        };
        let count = count(dynamic, bytes)?;
        Ok(Self { strings, symbols, count, versions, names, imports: Vec::new(), numbers: HashMap::new() })
    }

    /// Returns the symbol of an index, as relocations name it.
    pub(crate) fn symbol(&mut self, index: usize) -> Result<Symbol> {
        if index == 0 {
            return Ok(Symbol::None);
        }
        let Some(symbol) = self.symbols.get(index) else {
            return malformed("a relocation names a symbol past the symbol table");
        };
        if symbol.st_shndx(ENDIAN) != elf::SHN_UNDEF {
            return Ok(Symbol::Own(definition(symbol)));
        }
        if let Some(number) = self.numbers.get(&index) {
            return Ok(Symbol::Import(*number));
        }
        let name = string(self.strings, symbol.st_name(ENDIAN) as usize)?;
        let version = self.versions.get(index).map_or(1, |version| version.0.get(ENDIAN)) & !HIDDEN;
        let version = match self.names.get(&version) {
            Some(version) => Some(version.clone()),
            None if version <= elf::VER_NDX_GLOBAL => None,
            None => return malformed(format!("symbol {} has no version", name.to_string_lossy())),
        };
        let (weak, thread_local) = (symbol.st_bind() == elf::STB_WEAK, symbol.st_type() == elf::STT_TLS);
        self.imports.push(Import { name, version, weak, thread_local });
        self.numbers.insert(index, self.imports.len() - 1);
        Ok(Symbol::Import(self.imports.len() - 1))
    }

    /// Returns what others may find by name: of several versions, the default one.
    pub(crate) fn exports(&self) -> Result<HashMap<CString, Definition>> {
        let mut found = HashMap::new();
        for (index, symbol) in self.symbols.iter().take(self.count).enumerate().skip(1) {
            let version = self.versions.get(index).map_or(1, |version| version.0.get(ENDIAN));
            let bound = matches!(symbol.st_bind(), elf::STB_GLOBAL | elf::STB_WEAK | STB_GNU_UNIQUE);
            let visible = matches!(symbol.st_visibility(), elf::STV_DEFAULT | elf::STV_PROTECTED);
            if bound && visible && version & HIDDEN == 0 && symbol.st_shndx(ENDIAN) != elf::SHN_UNDEF {
                let name = string(self.strings, symbol.st_name(ENDIAN) as usize)?;
                found.entry(name).or_insert(definition(symbol));
            }
        }
        Ok(found)
    }
}

fn definition(symbol: &Sym64<LittleEndian>) -> Definition {
    let value = size(symbol.st_value(ENDIAN));
    match symbol.st_type() {
        elf::STT_TLS => Definition::ThreadLocal(value),
        elf::STT_GNU_IFUNC => Definition::Resolver(value),
        _ if symbol.st_shndx(ENDIAN) == elf::SHN_ABS => Definition::Absolute(value),
        _ => Definition::Address(value),
    }
}

/// Returns up to which symbol there are some that a name may find, which the hash table shows.
fn count(dynamic: &Dynamic, bytes: Bytes<'_>) -> Result<usize> {
    let wrong = |error: object::Error| Refusal::Malformed(error.to_string());
    let outside = || Refusal::Malformed("its hash table is outside of its segments".into());
    if let Some(rest) = dynamic.hash.map(|at| bytes.from(at)) {
        let table = HashTable::<Header>::parse(ENDIAN, rest.ok_or_else(outside)?).map_err(wrong)?;
        return Ok(table.symbol_table_length() as usize);
    }
    let Some(rest) = dynamic.gnu_hash.map(|at| bytes.from(at)) else {
        return malformed("it has no hash table of its symbols");
    };
    let table = GnuHashTable::<Header>::parse(ENDIAN, rest.ok_or_else(outside)?).map_err(wrong)?;
    // An empty table has no length.
    Ok(table.symbol_table_length(ENDIAN).unwrap_or_default() as usize)
}

/// Returns the names of the versions that are needed, by their indices.
fn needed_versions(at: usize, bytes: Bytes<'_>, strings: &[u8]) -> Result<HashMap<u16, CString>> {
    let outside = || Refusal::Malformed("its needed versions are outside of its segments".into());
    let all = bytes.from(at).ok_or_else(outside)?;
    let mut names = HashMap::new();
    let (mut file_at, mut steps) = (0_usize, 0);
    loop {
        let (file, _) = all
            .get(file_at..)
            .and_then(|rest| from_bytes::<Verneed<LittleEndian>>(rest).ok())
            .ok_or_else(outside)?;
        let mut version_at = file_at + file.vn_aux.get(ENDIAN) as usize;
        for _ in 0..file.vn_cnt.get(ENDIAN) {
            steps += 1;
            if steps > STEPS_MAX {
                return malformed("it needs more versions than there can be");
            }
            let rest = all.get(version_at..).ok_or_else(outside)?;
            let (version, _) = from_bytes::<Vernaux<LittleEndian>>(rest).map_err(|()| outside())?;
            let name = string(strings, version.vna_name.get(ENDIAN) as usize)?;
            names.insert(version.vna_other.get(ENDIAN) & !HIDDEN, name);
            version_at += version.vna_next.get(ENDIAN) as usize;
        }
        match file.vn_next.get(ENDIAN) {
            0 => return Ok(names),
            next => file_at += next as usize,
        }
    }
}

/// A version has 15 bits, and no two have the same.
const STEPS_MAX: usize = 1 << 15;
