//! The executive's image: read from the ELF file that the build script made, laid out, relocated.

use std::ops::Range;

use object::elf::{PF_X, PT_LOAD, R_X86_64_RELATIVE};
use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, Object, ObjectSymbol};

use crate::error::{Error, Result};

/// The parser reads structures where they lie.
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

static ALIGNED: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/executive.so")));
pub(crate) static ELF: &[u8] = &ALIGNED.0;
pub(crate) const PAGE: u64 = 4096;
/// The instruction.
pub(crate) const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// An image, as it is in memory that begins at address zero.
#[derive(Debug)]
pub(crate) struct Image {
    /// What is the same wherever it is, in whole pages, with all of its code: parts of the ELF file, and where they are, with zeros
    /// between them.
    shared: Vec<(usize, &'static [u8])>,
    /// How many bytes these are.
    shared_length: usize,
    /// The bytes behind them.
    bytes: Vec<u8>,
    /// With what follows the bytes and is zero: whole pages.
    pub(crate) length: u64,
    /// The pages that are executed.
    pub(crate) code: Range<u64>,
    /// The offset of `ORRERY_CONFIG`.
    pub(crate) config: u64,
    /// Where there is a `syscall` instruction, in the code.
    syscall: u64,
    entries: usize,
    relative: Vec<(usize, u64)>,
}

/// Addresses of functions in an image.
#[derive(Debug)]
pub(crate) struct Entries {
    /// The kernel calls it for each call that is dispatched.
    pub(crate) handler: u64,
    /// What that returns to.
    pub(crate) restorer: u64,
    /// What has to run first.
    pub(crate) boot: u64,
    /// What has to run before that where the code alone is there.
    pub(crate) load: u64,
    /// A `syscall` instruction.
    pub(crate) syscall: u64,
}

fn broken(what: impl ToString) -> Error {
    Error::Image(what.to_string())
}

fn index(value: u64) -> Result<usize> {
    usize::try_from(value).map_err(broken)
}

impl Image {
    /// Returns the image that this program carries.
    pub(crate) fn embedded() -> Result<Self> {
        let elf = ElfFile64::<Endianness>::parse(ELF).map_err(broken)?;
        let endian = elf.endian();
        let (mut parts, mut length, mut code) = (Vec::new(), 0, None);
        for segment in elf.elf_program_headers() {
            if segment.p_type(endian) != PT_LOAD {
                continue;
            }
            let (start, size) = (segment.p_vaddr(endian), segment.p_memsz(endian));
            let data = segment.data(endian, ELF).map_err(|()| broken("a segment is outside of the file"))?;
            if !data.is_empty() {
                parts.push((index(start)?, data));
            }
            length = (start + size).next_multiple_of(PAGE);
            if segment.p_flags(endian) & PF_X != 0 {
                code = Some((start & !(PAGE - 1)..length, start, data));
            }
        }
        let symbol = |name: &str| {
            let mut symbols = elf.dynamic_symbols();
            let found = symbols.find(|symbol| symbol.name() == Ok(name) && symbol.is_definition());
            found.map(|symbol| symbol.address()).ok_or_else(|| broken(format!("no symbol {name}")))
        };
        let mut relative = Vec::new();
        for (offset, relocation) in elf.dynamic_relocations().into_iter().flatten() {
            let object::RelocationFlags::Elf { r_type: R_X86_64_RELATIVE } = relocation.flags() else {
                return Err(broken(format!("it wants a relocation of another kind: {relocation:?}")));
            };
            relative.push((index(offset)?, relocation.addend().cast_unsigned()));
        }
        let entries = index(symbol("ORRERY_ENTRIES")?)?;
        let first = relative.iter().map(|(at, _)| *at).fold(entries, usize::min);
        let shared_length = first / index(PAGE)? * index(PAGE)?;
        let (shared, mut bytes) = (before(&parts, shared_length), Vec::new());
        for (at, part) in &parts {
            let skipped = shared_length.saturating_sub(*at);
            if let Some(part) = part.get(skipped..).filter(|part| !part.is_empty()) {
                bytes.resize(at + skipped - shared_length, 0);
                bytes.extend_from_slice(part);
            }
        }
        let (code, start, executed) = code.ok_or_else(|| broken("it has no code"))?;
        let syscall = executed.windows(SYSCALL.len()).position(|pair| pair == SYSCALL);
        let syscall = start + syscall.ok_or_else(|| broken("it makes no calls"))? as u64;
        let config = symbol("ORRERY_CONFIG")?;
        let image = Self { shared, shared_length, length, code, syscall, config, entries, relative, bytes };
        if index(image.code.end)? > image.shared_length {
            return Err(broken("code and data share a page"));
        }
        let fits = |at: usize| at + 8 <= image.shared_length + image.bytes.len();
        if !image.relative.iter().all(|(at, _)| fits(*at)) || !fits(image.entries + 24) {
            return Err(broken("a relocation is outside of its data"));
        }
        Ok(image)
    }

    /// Returns the bytes that are the same wherever the image is, in whole pages: all of its code is among them.
    pub(crate) fn shared(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.shared_length];
        self.copy_shared(&mut bytes);
        bytes
    }

    /// Returns how many these are.
    pub(crate) fn shared_length(&self) -> usize {
        self.shared_length
    }

    /// Copies them to memory that is zero.
    pub(crate) fn copy_shared(&self, to: &mut [u8]) {
        for (at, part) in &self.shared {
            if let Some(to) = to.get_mut(*at..at + part.len()) {
                to.copy_from_slice(part);
            }
        }
    }

    /// Returns the first page: the ELF header, and what names the build.
    pub(crate) fn first_page(&self) -> Vec<u8> {
        let mut page = vec![0; index(PAGE).unwrap_or(0)];
        for (at, part) in before(&self.shared, page.len()) {
            page[at..at + part.len()].copy_from_slice(part);
        }
        page
    }

    /// Returns what follows the shared bytes at an address, with room behind it up to `end`, and the entries there.
    pub(crate) fn placed(&self, base: u64, end: usize) -> (Vec<u8>, Entries) {
        let length = end.saturating_sub(self.shared_length).max(self.bytes.len());
        let mut bytes = Vec::with_capacity(length);
        bytes.extend_from_slice(&self.bytes);
        bytes.resize(length, 0);
        for (at, addend) in &self.relative {
            let at = at - self.shared_length;
            bytes[at..at + 8].copy_from_slice(&base.wrapping_add(*addend).to_le_bytes());
        }
        let entry = |at: usize| {
            let at = at - self.shared_length;
            bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes)
        };
        let [handler, restorer, boot, load] = [0, 8, 16, 24].map(|offset| entry(self.entries + offset));
        let syscall = base + self.syscall;
        (bytes, Entries { handler, restorer, boot, load, syscall })
    }
}

/// Returns what parts have before an address.
fn before(parts: &[(usize, &'static [u8])], end: usize) -> Vec<(usize, &'static [u8])> {
    let cut = |(at, part): &(usize, &'static [u8])| {
        let part = &part[..part.len().min(end.saturating_sub(*at))];
        (!part.is_empty()).then_some((*at, part))
    };
    parts.iter().filter_map(cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_image_is_whole() {
        let image = Image::embedded().unwrap();
        assert!(image.code.start >= PAGE && image.code.end <= image.length);
        assert!(!image.code.contains(&image.config));
        // It is written into each program.
        let written = image.bytes.len();
        assert!(written < 16 << 10, "{written} bytes are not zero, and not code");
        let end = index(image.config).unwrap() + 100;
        let (bytes, Entries { handler, restorer, boot, load, syscall }) = image.placed(0x10_0000, end);
        assert!(image.shared_length() + bytes.len() >= end);
        assert!([handler, boot, load, syscall].iter().all(|entry| image.code.contains(&(entry - 0x10_0000))));
        // The restorer performs system call 15.
        let at = usize::try_from(restorer - 0x10_0000).unwrap();
        let shared = image.shared();
        assert_eq!(shared[at..at + 9], [0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05]);
        assert_eq!(shared[..image.first_page().len()], image.first_page());
        let at = usize::try_from(syscall - 0x10_0000).unwrap();
        assert_eq!(shared[at..at + 2], SYSCALL);
    }
}
