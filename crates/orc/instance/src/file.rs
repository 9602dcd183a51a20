//! What is wrong with a library is found in its file, before the dynamic loader maps it or runs any of its code.

use std::path::Path;

use object::read::elf::{Dyn as _, ElfFile64, FileHeader as _, ProgramHeader as _, SectionHeader as _};
use object::{Endianness, elf};

use crate::abi::Unit;
use crate::error::{Error, Result};

/// What crt files and the addresses of exception handlers' personality routines take of a library's ordinary sections, in
/// bytes, at most.
const OF_THE_COMPILER: u64 = 40;
/// The thread-local storage of the runtime, in bytes, at most: such a library has no other.
const WORDS: u64 = 64;

/// What of a library is known before it is loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked {
    /// Whether a unit of it has accesses that are relative to GS.
    pub(crate) uses_gs: bool,
}

/// Fails where instances of the library cannot be had.
pub(crate) fn check(path: &Path) -> Result<Checked> {
    let bytes = std::fs::read(path).map_err(|cause| Error::Open { path: path.to_owned(), cause })?;
    let bad = |cause: String| Error::Elf { path: path.to_owned(), cause };
    let file = ElfFile64::<Endianness>::parse(&*bytes).map_err(|cause| bad(cause.to_string()))?;
    let (header, endian) = (file.elf_header(), file.endian());
    if header.e_machine(endian) != elf::EM_X86_64 {
        return Err(bad("it is for another machine".to_owned()));
    }
    if header.e_type(endian) != elf::ET_DYN {
        return Err(bad("it is no shared object".to_owned()));
    }
    for segment in file.elf_program_headers() {
        if segment.p_type(endian) == elf::PT_GNU_STACK && segment.p_flags(endian) & elf::PF_X != 0 {
            return Err(Error::ExecutableStack { path: path.to_owned() });
        }
        let dynamic = segment.dynamic(endian, &*bytes).map_err(|cause| bad(cause.to_string()))?;
        for entry in dynamic.unwrap_or_default() {
            let (tag, value) = (entry.d_tag(endian), entry.d_val(endian));
            let text = u64::from(elf::DF_TEXTREL);
            if tag == u64::from(elf::DT_TEXTREL) || tag == u64::from(elf::DT_FLAGS) && value & text != 0 {
                return Err(Error::TextRelocations { path: path.to_owned() });
            }
        }
    }
    let table = file.elf_section_table();
    let mut units: Option<&[u8]> = None;
    let mut mixed = None;
    for section in table.iter() {
        let name = String::from_utf8_lossy(table.section_name(endian, section).unwrap_or_default());
        if name == "orrery_cls_units" {
            units = Some(section.data(endian, &*bytes).map_err(|cause| bad(cause.to_string()))?);
        }
        let (flags, size) = (section.sh_flags(endian), section.sh_size(endian));
        let writable = u64::from(elf::SHF_ALLOC | elf::SHF_WRITE);
        let allowed = match &*name {
            ".data" | ".bss" => OF_THE_COMPILER,
            ".tdata" | ".tbss" => WORDS,
            other => {
                let harmless = [
                    "orrery_cls_",
                    ".init_array",
                    ".fini_array",
                    ".preinit_array",
                    ".ctors",
                    ".dtors",
                    ".dynamic",
                    ".got",
                    ".data.rel.ro",
                    ".tm_clone_table",
                    ".jcr",
                    ".eh_frame",
                ];
                if harmless.iter().any(|prefix| other.starts_with(prefix)) { u64::MAX } else { 0 }
            }
        };
        if flags & writable == writable && size > allowed {
            mixed = mixed.or(Some((name.into_owned(), size)));
        }
    }
    let Some(units) = units else { return Err(Error::NotBuilt { path: path.to_owned() }) };
    if let Some((section, bytes)) = mixed {
        return Err(Error::Mixed { path: path.to_owned(), section, bytes });
    }
    // The highest bit of the first of the two words that each unit has.
    let uses_gs = units.chunks_exact(size_of::<Unit>()).any(|unit| unit[3] & 0x80 != 0);
    Ok(Checked { uses_gs })
}
