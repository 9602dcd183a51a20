//! Bytes of a file at the addresses that its segments give them, and what keeps a library from being mapped.

use object::elf::{FileHeader64, ProgramHeader64};
use object::pod::{Pod, slice_from_bytes};
use object::read::elf::ProgramHeader as _;
use object::{LittleEndian, elf};

/// ELF64 of little endian.
pub(crate) type Header = FileHeader64<LittleEndian>;

pub(crate) const ENDIAN: LittleEndian = LittleEndian;

/// Why a library cannot be mapped several times, as its file shows.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The file is not what it should be: a sentence.
    Malformed(String),
    /// Relocations change memory that cannot be written.
    TextRelocations,
    /// It needs an executable stack.
    ExecutableStack,
    /// Thread-local variables have fixed offsets from the thread pointer.
    InitialExec,
    /// A relocation of a type that the loader does not have.
    Relocation(u32),
}

pub(crate) type Result<T> = std::result::Result<T, Refusal>;

pub(crate) fn malformed<T>(what: impl Into<String>) -> Result<T> {
    Err(Refusal::Malformed(what.into()))
}

/// Returns a number of the file as a size or address; 64-bit machines have no larger ones.
pub(crate) fn size(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// The bytes of a file, by address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes<'a> {
    pub(crate) whole: &'a [u8],
    pub(crate) headers: &'a [ProgramHeader64<LittleEndian>],
}

impl<'a> Bytes<'a> {
    /// Returns what the file has from an address to the end of its segment.
    pub(crate) fn from(self, address: usize) -> Option<&'a [u8]> {
        self.headers.iter().filter(|header| header.p_type(ENDIAN) == elf::PT_LOAD).find_map(|header| {
            let bytes = header.data(ENDIAN, self.whole).ok()?;
            let offset = address.checked_sub(size(header.p_vaddr(ENDIAN)))?;
            bytes.get(offset..).filter(|bytes| !bytes.is_empty())
        })
    }

    /// Returns so many bytes at an address; `what` is for the error.
    pub(crate) fn at(self, address: usize, len: usize, what: &str) -> Result<&'a [u8]> {
        match self.from(address).and_then(|bytes| bytes.get(..len)) {
            Some(bytes) => Ok(bytes),
            None if len == 0 => Ok(&[]),
            None => malformed(format!("{what} is outside of its segments")),
        }
    }

    /// Returns the entries of a table of `len` bytes at an address.
    pub(crate) fn table<T: Pod>(self, address: usize, len: usize, what: &str) -> Result<&'a [T]> {
        let bytes = self.at(address, len, what)?;
        match slice_from_bytes(bytes, len / size_of::<T>()) {
            Ok((table, _)) => Ok(table),
            Err(()) => malformed(format!("{what} is not aligned")),
        }
    }
}
