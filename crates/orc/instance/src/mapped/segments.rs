//! The segments of a library, as the kernel is to map them.

use std::ops::Range;

use object::elf;
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use orrery_sys::PAGE;

use crate::mapped::elf::{Bytes, ENDIAN, Header, Refusal, Result, malformed, size};

/// The largest alignment of a segment that is served: that of huge pages.
const ALIGN_MAX: usize = 2 << 20;
/// The largest thread-local block that is served.
const BLOCK_MAX: usize = 1 << 30;

/// What a file is as a whole: addresses are relative to where it is mapped.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    /// Ascending; no two have a page in common.
    pub(crate) loads: Vec<Segment>,
    /// What `loads` span, in whole pages.
    pub(crate) span: Range<usize>,
    pub(crate) align: usize,
    /// Whole pages that are read only once they are relocated.
    pub(crate) relro: Range<usize>,
    pub(crate) thread_local: Option<ThreadLocal>,
    /// Where the table of frames is announced.
    pub(crate) frame_header: Option<usize>,
    pub(crate) dynamic: Range<usize>,
}

/// A segment that is loaded.
#[derive(Debug)]
pub(crate) struct Segment {
    /// Where its first page begins.
    pub(crate) start: usize,
    /// Where its bytes of the file end; `start` if it has none.
    pub(crate) file_end: usize,
    /// Where its memory ends.
    pub(crate) end: usize,
    /// Where in the file its first page is.
    pub(crate) offset: u64,
    pub(crate) write: bool,
    pub(crate) execute: bool,
}

/// The initial values of thread-local variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ThreadLocal {
    pub(crate) start: usize,
    pub(crate) file_len: usize,
    pub(crate) len: usize,
    pub(crate) align: usize,
}

impl Segments {
    /// Reads the program headers, and checks the header of the file.
    pub(crate) fn read(bytes: &[u8]) -> Result<(Self, Bytes<'_>)> {
        let wrong = |error: object::Error| Refusal::Malformed(error.to_string());
        let header = Header::parse(bytes).map_err(wrong)?;
        header.endian().map_err(wrong)?;
        if header.e_machine(ENDIAN) != elf::EM_X86_64 {
            return malformed("it is for another machine");
        }
        if header.e_type(ENDIAN) != elf::ET_DYN {
            return malformed("it is no shared object");
        }
        let headers = header.program_headers(ENDIAN, bytes).map_err(wrong)?;
        let bytes = Bytes { whole: bytes, headers };
        let mut found = Self { align: PAGE, ..Self::default() };
        let (mut relro, mut dynamic) = (None, None);
        for header in headers {
            let start = size(header.p_vaddr(ENDIAN));
            let Some(end) = start.checked_add(size(header.p_memsz(ENDIAN))).filter(|end| *end < 1 << 46)
            else {
                return malformed("a segment ends past all addresses");
            };
            match header.p_type(ENDIAN) {
                elf::PT_LOAD if start < end => {
                    let align = size(header.p_align(ENDIAN)).max(PAGE);
                    if !align.is_power_of_two() || align > ALIGN_MAX {
                        return malformed(format!("a segment has an alignment of {align} bytes"));
                    }
                    found.align = found.align.max(align);
                    found.loads.push(Segment::read(header, bytes)?);
                }
                elf::PT_DYNAMIC => dynamic = Some(start..end),
                elf::PT_GNU_STACK if header.p_flags(ENDIAN) & elf::PF_X != 0 => {
                    return Err(Refusal::ExecutableStack);
                }
                elf::PT_GNU_RELRO => relro = Some(start..end),
                elf::PT_GNU_EH_FRAME => found.frame_header = Some(start),
                elf::PT_TLS if start < end => {
                    let (file_len, align) =
                        (size(header.p_filesz(ENDIAN)), size(header.p_align(ENDIAN)).max(1));
                    found.thread_local = Some(ThreadLocal { start, file_len, len: end - start, align });
                }
                _ => {}
            }
        }
        let (Some(first), Some(last)) = (found.loads.first(), found.loads.last()) else {
            return malformed("it has no segments to load");
        };
        found.span = first.start..last.end.next_multiple_of(PAGE);
        if found.loads.is_sorted_by(|one, next| one.end.next_multiple_of(PAGE) <= next.start) {
            found.check(relro, dynamic)
        } else {
            malformed("its segments overlap, or are not in the order of their addresses")
        }
        .map(|found| (found, bytes))
    }

    fn check(mut self, relro: Option<Range<usize>>, dynamic: Option<Range<usize>>) -> Result<Self> {
        self.dynamic = match dynamic {
            Some(dynamic) if self.loads.iter().any(|load| load.has(&dynamic)) => dynamic,
            Some(_) => return malformed("its dynamic section is outside of its segments"),
            None => return malformed("it has no dynamic section"),
        };
        if let Some(relro) = relro {
            // As the dynamic loader does: a page that ends later stays writable.
            let pages = relro.start / PAGE * PAGE..relro.end / PAGE * PAGE;
            if !pages.is_empty() && !self.loads.iter().any(|load| load.write && load.has(&pages)) {
                return malformed(
                    "what is to be read only after relocation is outside of its writable segments",
                );
            }
            self.relro = if pages.is_empty() { 0..0 } else { pages };
        }
        if let Some(block) = self.thread_local {
            let image = block.start..block.start.saturating_add(block.file_len);
            if block.file_len > block.len || block.len > BLOCK_MAX {
                return malformed("its thread-local variables have a wrong size");
            }
            if !block.align.is_power_of_two() || block.align > ALIGN_MAX {
                return malformed("its thread-local variables have a wrong alignment");
            }
            if !image.is_empty() && !self.loads.iter().any(|load| load.has(&image)) {
                return malformed("its thread-local variables are outside of its segments");
            }
        }
        Ok(self)
    }

    /// Whether all of the range is writable memory before it is made read only.
    pub(crate) fn is_writable(&self, range: &Range<usize>) -> bool {
        self.loads.iter().any(|load| load.write && load.has(range))
    }

    /// Whether there is code at an address.
    pub(crate) fn is_code(&self, address: usize) -> bool {
        self.loads.iter().any(|load| load.execute && (load.start..load.end).contains(&address))
    }
}

impl Segment {
    fn read(header: &elf::ProgramHeader64<object::LittleEndian>, bytes: Bytes<'_>) -> Result<Self> {
        let (address, offset) = (size(header.p_vaddr(ENDIAN)), header.p_offset(ENDIAN));
        let (in_file, in_memory) = (size(header.p_filesz(ENDIAN)), size(header.p_memsz(ENDIAN)));
        let skew = address % PAGE;
        let flags = header.p_flags(ENDIAN);
        let (write, execute) = (flags & elf::PF_W != 0, flags & elf::PF_X != 0);
        if header.data(ENDIAN, bytes.whole).is_err() {
            return malformed("the file ends before its segments do");
        }
        if in_file > in_memory {
            return malformed("a segment has more bytes in the file than in memory");
        }
        if in_file > 0 && size(offset) % PAGE != skew {
            return malformed("a segment is not aligned to pages");
        }
        if write && execute {
            return malformed("a segment is writable and executable");
        }
        if !write && in_file < in_memory {
            return malformed("a segment that cannot be written has variables");
        }
        let start = address - skew;
        let file_end = if in_file == 0 { start } else { address + in_file };
        let offset = if in_file == 0 { 0 } else { offset - skew as u64 };
        Ok(Self { start, file_end, end: address + in_memory, offset, write, execute })
    }

    fn has(&self, range: &Range<usize>) -> bool {
        self.start <= range.start && range.start <= range.end && range.end <= self.end
    }
}
