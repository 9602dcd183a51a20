//! Memory in an ELF core of a whole machine: what QEMU's `dump-guest-memory`, `virsh dump --memory-only`, kdump's
//! `/proc/vmcore` (copied) and `makedumpfile -E` write. Each `PT_LOAD` is a run of physical memory.

use std::path::Path;

use object::elf::{ET_CORE, FileHeader64, PT_LOAD};
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::{Endianness, U64};

use crate::error::{Error, Result};
use crate::memory::{Layout, MappedMemory, Segment, map};

/// Opens whatever file holds a machine's memory: an ELF core, or else plain memory laid out as `layout` says.
///
/// # Errors
///
/// [`Error::File`] where it cannot be mapped, [`Error::NotAnImage`] where it is empty or a broken core.
pub fn open_memory(path: &Path, layout: Layout) -> Result<MappedMemory> {
    let map = map(path)?;
    let mut magic = [0; 4];
    if map.len() >= magic.len() {
        // SAFETY: the mapping has at least four bytes.
        unsafe { map.as_ptr().copy_to_nonoverlapping(magic.as_mut_ptr(), magic.len()) };
    }
    if &magic != b"\x7fELF" {
        let segments = layout.segments(map.len() as u64);
        return Ok(MappedMemory::with_segments(map, segments));
    }
    // SAFETY: the mapping is this long and lives until `segments` has returned. A core is a finished file: that
    // nobody writes it meanwhile is what whoever names it here says, as with any file that is mapped and parsed.
    let bytes = unsafe { std::slice::from_raw_parts(map.as_ptr(), map.len()) };
    let segments =
        segments(bytes).map_err(|why| Error::NotAnImage { path: path.to_owned(), why: why.to_owned() })?;
    Ok(MappedMemory::with_segments(map, segments))
}

/// The runs of memory that a core's program headers list.
fn segments(bytes: &[u8]) -> Result<Vec<Segment>, &'static str> {
    let broken = "its ELF headers are broken";
    let header = FileHeader64::<Endianness>::parse(bytes).map_err(|_| "it is no 64-bit ELF file")?;
    let endian = header.endian().map_err(|_| broken)?;
    if header.e_type(endian) != ET_CORE {
        return Err("it is an ELF file, but not a core");
    }
    let headers = header.program_headers(endian, bytes).map_err(|_| broken)?;
    let number = |value: U64<Endianness>| value.get(endian);
    let segments: Vec<Segment> = headers
        .iter()
        .filter(|header| header.p_type(endian) == PT_LOAD && number(header.p_filesz) > 0)
        .map(|header| Segment {
            physical: number(header.p_paddr),
            length: number(header.p_filesz),
            offset: number(header.p_offset),
        })
        .collect();
    if segments.is_empty() { Err("this core holds no memory") } else { Ok(segments) }
}
