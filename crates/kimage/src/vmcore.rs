//! Memory in an ELF core of a whole machine: what QEMU's `dump-guest-memory`, `virsh dump --memory-only`, kdump's
//! `/proc/vmcore` (copied, or in place) and `makedumpfile -E` write. Each `PT_LOAD` is a run of physical memory. kdump
//! and makedumpfile add VMCOREINFO as a note: the copy that the dying kernel used is in the memory reserved for the
//! crash kernel, which its core leaves out.

use std::path::Path;

use object::elf::{ET_CORE, FileHeader64, PT_LOAD};
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::{Endianness, U64};

use crate::error::{Error, Result};
use crate::memory::{Layout, MappedMemory, Segment, map};

/// Opens a file that holds a machine's memory: an ELF core, or else plain memory laid out as `layout` says.
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
    // no one writes it meanwhile is the caller's promise, as with any file that is mapped and parsed.
    let bytes = unsafe { std::slice::from_raw_parts(map.as_ptr(), map.len()) };
    let Core { segments, vmcoreinfo } =
        core(bytes).map_err(|why| Error::NotAnImage { path: path.to_owned(), why: why.to_owned() })?;
    Ok(MappedMemory::with_segments(map, segments).with_vmcoreinfo(vmcoreinfo))
}

/// What a core's program headers list.
#[derive(Debug)]
struct Core {
    /// The runs of memory.
    segments: Vec<Segment>,
    /// The note of the name `VMCOREINFO`, where there is one.
    vmcoreinfo: Option<Vec<u8>>,
}

fn core(bytes: &[u8]) -> Result<Core, &'static str> {
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
    if segments.is_empty() {
        return Err("this core holds no memory");
    }
    // Broken notes are none: the note is looked for in the memory then.
    let notes = headers.iter().filter_map(|header| header.notes(endian, bytes).ok().flatten());
    let vmcoreinfo = notes
        .flat_map(|notes| notes.map_while(Result::ok))
        .find(|note| note.name() == b"VMCOREINFO")
        .map(|note| note.desc().to_owned());
    Ok(Core { segments, vmcoreinfo })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a core of one page at 1 MiB, with `notes` before it.
    fn made(notes: &[(&str, &[u8])]) -> Vec<u8> {
        let mut note = Vec::new();
        for (name, content) in notes {
            let padded = |bytes: &[u8]| {
                let mut bytes = bytes.to_owned();
                bytes.resize(bytes.len().next_multiple_of(4), 0);
                bytes
            };
            let name = [name.as_bytes(), b"\0"].concat();
            for word in [name.len(), content.len(), 0] {
                note.extend(u32::try_from(word).unwrap().to_le_bytes());
            }
            note.extend(padded(&name));
            note.extend(padded(content));
        }
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(16, 0);
        let header = |kind: u32, offset: usize, physical: u64, length: usize| {
            let mut bytes = [kind.to_le_bytes(), 0_u32.to_le_bytes()].concat();
            for value in [offset as u64, 0, physical, length as u64, length as u64, 0] {
                bytes.extend(value.to_le_bytes());
            }
            bytes
        };
        bytes.extend([4_u16, 62].map(u16::to_le_bytes).concat());
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend([0_u64, 64, 0].map(u64::to_le_bytes).concat());
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend([64_u16, 56, 2, 0, 0, 0].map(u16::to_le_bytes).concat());
        let notes_at = 64 + 2 * 56;
        bytes.extend(header(4, notes_at, 0, note.len()));
        bytes.extend(header(PT_LOAD, notes_at + note.len(), 1 << 20, 4096));
        bytes.extend(note);
        bytes.resize(bytes.len() + 4096, 7);
        bytes
    }

    #[test]
    fn the_note_of_a_core_is_found_behind_others() {
        let bytes = made(&[("CORE", &[9; 13]), ("VMCOREINFO", b"OSRELEASE=6.1\n"), ("LINUX", &[1])]);
        let core = core(&bytes).unwrap();
        assert_eq!(core.vmcoreinfo.unwrap(), b"OSRELEASE=6.1\n");
        assert_eq!(core.segments.len(), 1);
        let segment = core.segments[0];
        assert_eq!((segment.physical, segment.length), (1 << 20, 4096));
        assert_eq!(segment.offset + 4096, bytes.len() as u64);
    }

    #[test]
    fn a_core_without_the_note_or_with_broken_notes_has_its_memory() {
        assert!(core(&made(&[("CORE", b"")])).unwrap().vmcoreinfo.is_none());
        let mut bytes = made(&[("CORE", b"x"), ("VMCOREINFO", b"y")]);
        // The first note claims to be longer than all of them.
        bytes[64 + 2 * 56 + 4] = 0xff;
        let core = core(&bytes).unwrap();
        assert!(core.vmcoreinfo.is_none() && core.segments.len() == 1);
    }
}
