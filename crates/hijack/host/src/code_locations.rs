//! Where code is: in which file, at which offset, in which function.
//!
//! What a process has mapped says so for all code but that of pages which an executive has rewritten: see [`rewritten_pages`].

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use object::{Object, ObjectSegment, ObjectSymbol, ReadCache, SymbolKind};
use orrery_sys::maps;

use crate::rewritten_pages;

/// Finds code, and remembers the symbols of files.
#[derive(Debug, Default)]
pub struct CodeLocations {
    symbols: HashMap<PathBuf, Symbols>,
}

/// The functions of a file.
#[derive(Debug, Default)]
struct Symbols {
    /// By address: where each begins, how long it is, and its name.
    functions: Vec<(u64, u64, String)>,
    /// For each piece of the file that is loaded: its offset, its length, and the address that it has.
    segments: Vec<(u64, u64, u64)>,
}

impl CodeLocations {
    /// Describes an address by what a process has mapped (`/proc/PID/maps`): `libc.so.6+0x10d8a4 (getppid+0x4)`; without function if the
    /// file has no symbol for it, and as a number if no file is mapped there. An address behind a call instruction is in the function
    /// that calls.
    #[must_use]
    pub fn describe(&mut self, maps: &[u8], address: u64) -> String {
        let Some((file, offset)) = usize::try_from(address).ok().and_then(|address| place(maps, address))
        else {
            return format!("{address:#x}");
        };
        let name = file.rsplit(|byte| *byte == b'/').next().unwrap_or(file);
        let name = String::from_utf8_lossy(name);
        match self.function(Path::new(OsStr::from_bytes(file)), offset) {
            Some((function, within)) => format!("{name}+{offset:#x} ({function}+{within:#x})"),
            None => format!("{name}+{offset:#x}"),
        }
    }

    /// The function in which the byte before an offset of a file is, and how far behind its beginning the offset is.
    fn function(&mut self, file: &Path, offset: u64) -> Option<(&str, u64)> {
        if !self.symbols.contains_key(file) {
            // What cannot be read has no symbols.
            let symbols =
                if file.is_absolute() { Symbols::read(file).unwrap_or_default() } else { Symbols::default() };
            self.symbols.insert(file.to_owned(), symbols);
        }
        self.symbols.get(file)?.find(offset)
    }
}

impl Symbols {
    fn read(file: &Path) -> Option<Self> {
        let cache = ReadCache::new(File::open(file).ok()?);
        let elf = object::File::parse(&cache).ok()?;
        let segments = elf.segments().map(|segment| {
            let (offset, length) = segment.file_range();
            (offset, length, segment.address())
        });
        let all = elf.symbols().chain(elf.dynamic_symbols());
        let mut functions: Vec<_> = all
            .filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.is_definition() && symbol.size() > 0)
            .filter_map(|symbol| Some((symbol.address(), symbol.size(), symbol.name().ok()?.to_owned())))
            .collect();
        // Of several names for a function, the one that looks least like one of the library's own, and the shortest of these.
        functions.sort_by(|one, other| {
            let key = |name: &str| (name.len() - name.trim_start_matches('_').len(), name.len());
            (one.0, key(&one.2), &one.2).cmp(&(other.0, key(&other.2), &other.2))
        });
        functions.dedup_by_key(|(address, ..)| *address);
        Some(Self { functions, segments: segments.collect() })
    }

    fn find(&self, offset: u64) -> Option<(&str, u64)> {
        let before = offset.checked_sub(1)?;
        let (start, _, address) =
            self.segments.iter().find(|(start, length, _)| (*start..start + length).contains(&before))?;
        let address = before - start + address;
        let behind = self.functions.partition_point(|(start, ..)| *start <= address);
        let (start, length, name) = self.functions.get(behind.checked_sub(1)?)?;
        (address - start < *length).then_some((name.as_str(), address + 1 - start))
    }
}

/// The file whose code an address is in, and the offset there.
fn place(maps: &[u8], address: usize) -> Option<(&[u8], u64)> {
    // Nothing but the table is known of the process.
    let table = rewritten_pages::as_of_files(maps::entries(maps), |_| false);
    let own = table.into_iter().find(|entry| entry.range.contains(address))?;
    if own.name.is_empty() { None } else { Some((own.name, own.offset_of(address)?)) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn describe(maps: &[u8], address: u64) -> String {
        CodeLocations::default().describe(maps, address)
    }

    #[test]
    fn addresses_are_described_by_file_and_offset() {
        let maps = b"1000-2000 r--p 00000000 fe:00 1  /nonexistent/x\n2000-3000 r-xp 00001000 fe:00 1    /nonexistent/x\n\
            4000-5000 rw-p 00000000 00:00 0 \n";
        assert_eq!(describe(maps, 0x2010), "x+0x1010");
        assert_eq!(describe(maps, 0x4010), "0x4010");
        assert_eq!(describe(b"", 0x10), "0x10");
    }

    #[test]
    fn rewritten_pages_are_found_between_others_of_their_file() {
        let maps = b"1000-2000 r--p 00000000 fe:00 1  /n/x\n2000-3000 r-xp 00000000 00:00 0\n3000-4000 r-xp 00002000 fe:00 1  /n/x\n\
            4000-5000 r-xp 00000000 00:00 0\n5000-6000 r-xp 00000000 00:00 0\n6000-7000 r--p 00005000 fe:00 1  /n/x\n\
            7000-8000 r-xp 00000000 00:00 0\n8000-9000 r-xp 00000000 fe:00 2  /n/y\n\
            a000-b000 r-xp 00000000 00:00 0\nb000-c000 rw-p 00000000 00:00 0\n";
        for (address, found) in
            [(0x2010, "x+0x1010"), (0x3010, "x+0x2010"), (0x4010, "x+0x3010"), (0x5010, "x+0x4010")]
        {
            assert_eq!(describe(maps, address), found);
        }
        // Between two files; with nothing before it.
        assert_eq!(
            (describe(maps, 0x7010), describe(maps, 0xa010)),
            ("0x7010".to_owned(), "0xa010".to_owned())
        );
    }

    #[test]
    fn functions_are_found() {
        let maps = fs::read("/proc/self/maps").unwrap();
        let own = describe(&maps, functions_are_found as fn() as usize as u64 + 1);
        assert!(own.contains("functions_are_found") && own.ends_with("+0x1)"), "{own}");
        let library = describe(&maps, libc::getppid as unsafe extern "C" fn() -> i32 as usize as u64 + 4);
        assert!(library.contains("(getppid+0x4)") || !library.contains("libc.so"), "{library}");
    }
}
