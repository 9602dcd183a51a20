//! Symbols of an executive for debuggers: it is in no file that they could read.
//!
//! A debugger finds the callers of a function by what the file of its code says about frames. A thread that sleeps in a call stands in
//! the executive: in a trampoline, or behind the frame of a dispatched call. The image's ELF file says of both how the program's own
//! registers are found from there (`.debug_frame`, by the assembly in `dispatch/assembly`), and is given to the debugger with the address at which the
//! image is: recognized by its first page, which names the build and is the same in every tracee. Its code would do as well, but a core
//! dump lacks code that tracees share; of what begins like an ELF file it has the first page (core(5)).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use object::elf::{ET_CORE, FileHeader64, PT_LOAD};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, ReadCache};

use crate::error::Result;
use crate::image::{self, Image, PAGE};

/// Returns the image as an ELF file, with its symbols, lines and frames.
#[must_use]
pub fn symbols() -> &'static [u8] {
    image::ELF
}

/// Returns where the executive's image is in a process; `None` if there is none.
///
/// # Errors
/// The process cannot be looked at.
pub fn in_process(process: u32) -> io::Result<Option<u64>> {
    let maps = fs::read(format!("/proc/{process}/maps"))?;
    let memory = File::open(format!("/proc/{process}/mem"))?;
    let starts = orrery_sys::maps::entries(&maps).map(|entry| entry.range.start as u64);
    find(&memory, starts.map(|start| (start, start))).map_err(io::Error::other)
}

/// Returns where the executive's image lay in a process, by its core dump; `None` if there was none.
///
/// # Errors
/// The file cannot be read, or is no core dump.
pub fn in_core(core: &Path) -> io::Result<Option<u64>> {
    let file = File::open(core)?;
    let cache = ReadCache::new(file);
    let invalid = |error: object::Error| io::Error::new(io::ErrorKind::InvalidData, error);
    let header = FileHeader64::<Endianness>::parse(&cache).map_err(invalid)?;
    let endian = header.endian().map_err(invalid)?;
    if header.e_type(endian) != ET_CORE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no core dump"));
    }
    let segments = header.program_headers(endian, &cache).map_err(invalid)?;
    let places: Vec<_> = segments
        .iter()
        .filter(|segment| segment.p_type(endian) == PT_LOAD && segment.p_filesz(endian) >= PAGE)
        .map(|segment| (segment.p_vaddr(endian), segment.p_offset(endian)))
        .collect();
    find(&File::open(core)?, places.into_iter()).map_err(io::Error::other)
}

/// Of mappings at these addresses, to be read at these offsets: the one with which the image begins.
fn find(memory: &File, mut places: impl Iterator<Item = (u64, u64)>) -> Result<Option<u64>> {
    let image = Image::embedded()?;
    let first = image.first_page();
    let mut bytes = vec![0; first.len()];
    let is_first =
        |(_, offset): &(u64, u64)| memory.read_exact_at(&mut bytes, *offset).is_ok() && bytes == first;
    Ok(places.find(is_first).map(|(start, _)| start))
}

#[cfg(test)]
mod tests {
    use object::{Object, ObjectSection};

    use super::*;

    #[test]
    fn frames_of_gates_and_functions_are_described() {
        let file = object::File::parse(symbols()).unwrap();
        let frames = file.section_by_name(".debug_frame").unwrap();
        if frames.compressed_file_range().unwrap().format != object::CompressionFormat::None {
            orrery_testing::skipped!("what debuggers read is compressed in builds that are installed");
            return;
        }
        let frames = frames.data().unwrap();
        assert!(frames.len() > 2000, "{}", frames.len());
        // DW_CFA_expression for rip: a trampoline's.
        assert!(frames.windows(5).any(|bytes| bytes == [0x10, 16, 13, 0x80, 0]));
        // DW_CFA_def_cfa_expression, rsp's place in a signal frame: the restorer's.
        assert!(frames.windows(6).any(|bytes| bytes == [0x0f, 4, 0x77, 0xa0, 1, 0x06]));
        assert!(file.symbols().any(|symbol| object::ObjectSymbol::name(&symbol) == Ok("orrery_trampolines")));
    }

    #[test]
    fn a_process_without_executive_has_none() {
        assert_eq!(in_process(std::process::id()).unwrap(), None);
        assert!(in_core(Path::new("/proc/self/exe")).unwrap_err().to_string().contains("no core dump"));
        assert!(in_core(Path::new("/etc/passwd")).is_err());
    }
}
