//! The dynamic section: where the tables of a library are.

use std::ffi::CString;
use std::ops::Range;

use object::LittleEndian;
use object::elf::{self, Dyn64};
use object::read::elf::Dyn as _;

use crate::mapped::elf::{Bytes, ENDIAN, Refusal, Result, malformed, size};
use crate::mapped::segments::Segments;

/// A table at an address, and its length in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) address: usize,
    pub(crate) len: usize,
}

impl Table {
    pub(crate) fn range(self) -> Range<usize> {
        self.address..self.address.saturating_add(self.len)
    }
}

/// What the dynamic section names.
#[derive(Debug, Default)]
pub(crate) struct Dynamic {
    pub(crate) needed: Vec<CString>,
    /// Directories in which what is needed is looked for, separated by colons.
    pub(crate) search: Option<CString>,
    pub(crate) strings: Table,
    pub(crate) symbols: usize,
    pub(crate) hash: Option<usize>,
    pub(crate) gnu_hash: Option<usize>,
    /// The version of each symbol.
    pub(crate) versions: Option<usize>,
    /// The versions that are needed.
    pub(crate) needed_versions: Option<usize>,
    pub(crate) relocations: Table,
    pub(crate) jumps: Table,
    pub(crate) relative: Table,
    pub(crate) init: Option<usize>,
    pub(crate) init_array: Table,
    pub(crate) fini: Option<usize>,
    pub(crate) fini_array: Table,
}

impl Dynamic {
    pub(crate) fn read(segments: &Segments, bytes: Bytes<'_>) -> Result<Self> {
        let range = &segments.dynamic;
        let entries: &[Dyn64<LittleEndian>] =
            bytes.table(range.start, range.end - range.start, "its dynamic section")?;
        let mut found = Self::default();
        let (mut names, mut runpath, mut rpath) = (Vec::new(), None, None);
        for entry in entries {
            let (tag, value) = (entry.d_tag(ENDIAN), size(entry.d_val(ENDIAN)));
            let Ok(tag) = u32::try_from(tag) else { continue };
            match tag {
                elf::DT_NULL => break,
                elf::DT_NEEDED => names.push(value),
                elf::DT_RUNPATH => runpath = Some(value),
                elf::DT_RPATH => rpath = Some(value),
                elf::DT_STRTAB => found.strings.address = value,
                elf::DT_STRSZ => found.strings.len = value,
                elf::DT_SYMTAB => found.symbols = value,
                elf::DT_HASH => found.hash = Some(value),
                elf::DT_GNU_HASH => found.gnu_hash = Some(value),
                elf::DT_VERSYM => found.versions = Some(value),
                elf::DT_VERNEED => found.needed_versions = Some(value),
                elf::DT_RELA => found.relocations.address = value,
                elf::DT_RELASZ => found.relocations.len = value,
                elf::DT_JMPREL => found.jumps.address = value,
                elf::DT_PLTRELSZ => found.jumps.len = value,
                DT_RELR => found.relative.address = value,
                DT_RELRSZ => found.relative.len = value,
                elf::DT_INIT => found.init = Some(value).filter(|address| *address != 0),
                elf::DT_INIT_ARRAY => found.init_array.address = value,
                elf::DT_INIT_ARRAYSZ => found.init_array.len = value,
                elf::DT_FINI => found.fini = Some(value).filter(|address| *address != 0),
                elf::DT_FINI_ARRAY => found.fini_array.address = value,
                elf::DT_FINI_ARRAYSZ => found.fini_array.len = value,
                elf::DT_REL => return malformed("it has relocations without addends"),
                elf::DT_TEXTREL => return Err(Refusal::TextRelocations),
                elf::DT_FLAGS if value & elf::DF_TEXTREL as usize != 0 => {
                    return Err(Refusal::TextRelocations);
                }
                elf::DT_FLAGS if value & elf::DF_STATIC_TLS as usize != 0 => {
                    return Err(Refusal::InitialExec);
                }
                elf::DT_FLAGS_1 if value & elf::DF_1_PIE as usize != 0 => {
                    return malformed("it is a program");
                }
                _ => {}
            }
        }
        let strings = bytes.at(found.strings.address, found.strings.len, "its string table")?;
        for name in names {
            found.needed.push(string(strings, name)?);
        }
        found.search = runpath.or(rpath).map(|name| string(strings, name)).transpose()?;
        for code in [found.init, found.fini].into_iter().flatten() {
            if !segments.is_code(code) {
                return malformed("its constructor or destructor is outside of its code");
            }
        }
        for array in [found.init_array, found.fini_array] {
            if array.len != 0 && (array.address % 8 != 0 || !segments.is_writable(&array.range())) {
                return malformed("its list of constructors or destructors is outside of its variables");
            }
        }
        Ok(found)
    }
}

/// Packed relative relocations, of the generic ABI.
pub(crate) const DT_RELR: u32 = 36;
pub(crate) const DT_RELRSZ: u32 = 35;

/// Returns the string at an offset of a string table.
pub(crate) fn string(strings: &[u8], offset: usize) -> Result<CString> {
    let text = strings.get(offset..).and_then(|rest| std::ffi::CStr::from_bytes_until_nul(rest).ok());
    text.map_or_else(|| malformed("a name is outside of its string table"), |text| Ok(text.to_owned()))
}
