//! In main: what addresses are, for messages about a dead orbit.
//!
//! Main looks in its own table of mappings, since an orbit has main's code at the same addresses, and takes nothing but the
//! number from the orbit.

use core::ffi::{CStr, c_char, c_int};
use std::ffi::{CString, OsStr};
use std::fs::{File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;

use object::read::ReadCache;
use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol, SymbolKind};
use orrery_memory::area::Area;
use orrery_sys::PAGE;
use orrery_sys::maps::{Access, Maps};

/// Larger tables of symbols are not read: main waits meanwhile.
const LARGEST_TABLE: u64 = 32 << 20;

/// A mapping of main's.
struct Mapping {
    start: usize,
    end: usize,
    access: Access,
    offset: u64,
    name: Vec<u8>,
}

fn mapping_at(address: usize) -> Option<Mapping> {
    let mut found = None;
    Maps::open()
        .ok()?
        .for_each(&mut vec![0; 64 << 10], |entry| {
            if entry.range.contains(address) {
                found = Some(Mapping {
                    start: entry.range.start,
                    end: entry.range.end,
                    access: entry.access,
                    offset: entry.offset,
                    name: entry.name.to_vec(),
                });
            }
            Ok(())
        })
        .ok()?;
    found
}

/// Returns module, offset and symbol of the code at `address`: `libcheck.so+0x1139 (find_deadlock+0x9)`. The offset is the
/// address in the module, as addr2line(1) wants it.
pub(crate) fn of_code(address: usize) -> Option<String> {
    let mapping = mapping_at(address)?;
    name_in_module(&mapping, address, |kind| matches!(kind, SymbolKind::Text | SymbolKind::Unknown))
}

fn name_in_module(mapping: &Mapping, address: usize, wanted: fn(SymbolKind) -> bool) -> Option<String> {
    if !mapping.name.starts_with(b"/") {
        let name = if mapping.name.is_empty() { b"anonymous memory" } else { mapping.name.as_slice() };
        return Some(format!("{}+{:#x}", String::from_utf8_lossy(name), address - mapping.start));
    }
    let path = OsStr::from_bytes(&mapping.name);
    let file_offset = mapping.offset + (address - mapping.start) as u64;
    let module = String::from_utf8_lossy(mapping.name.rsplit(|&byte| byte == b'/').next()?).into_owned();
    match symbol(path, file_offset, wanted) {
        Some((offset, Some(Place { name, .. }))) => Some(format!("{module}+{offset:#x} ({name})")),
        Some((offset, None)) => Some(format!("{module}+{offset:#x}")),
        None => Some(format!("{module}, file offset {file_offset:#x}")),
    }
}

/// Returns the address in the module, and the symbol there.
fn symbol(path: &OsStr, file_offset: u64, wanted: fn(SymbolKind) -> bool) -> Option<(u64, Option<Place>)> {
    symbol_at(path, wanted, |segments| {
        segments.iter().find_map(|(start, size, address, _)| {
            let inside = file_offset.checked_sub(*start).filter(|inside| inside < size)?;
            address.checked_add(inside)
        })
    })
}

/// Like [`symbol`], of an address in the module that `find` makes of the segments: offset and size in the file, address and
/// size in memory.
fn symbol_at(
    path: &OsStr,
    wanted: fn(SymbolKind) -> bool,
    find: impl FnOnce(&[(u64, u64, u64, u64)]) -> Option<u64>,
) -> Option<(u64, Option<Place>)> {
    // A device or pipe that has taken the file's place must not hold main up.
    let file: File = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let cache = ReadCache::new(file);
    let elf = object::File::parse(&cache).ok()?;
    let segments: Vec<_> = elf
        .segments()
        .map(|segment| {
            let (start, size) = segment.file_range();
            (start, size, segment.address(), segment.size())
        })
        .collect();
    let address = find(&segments)?;
    let small = |name| elf.section_by_name(name).is_none_or(|section| section.size() <= LARGEST_TABLE);
    let fits = |symbol: &object::Symbol<'_, '_, _>| {
        let from_start = address.checked_sub(symbol.address());
        symbol.is_definition()
            && wanted(symbol.kind())
            && from_start.is_some_and(|from_start| from_start < symbol.size())
    };
    let mut found = None;
    if small(".symtab") && small(".strtab") {
        found = elf.symbols().find(fits);
    }
    if found.is_none() && small(".dynsym") && small(".dynstr") {
        found = elf.dynamic_symbols().find(fits);
    }
    let name = found.and_then(|symbol| {
        let name = demangle(symbol.name().ok()?);
        let bytes = usize::try_from(symbol.size()).unwrap_or(0);
        Some(Place { name: format!("{name}+{:#x}", address - symbol.address()), bytes })
    });
    Some((address, name))
}

/// Something with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) name: String,
    /// The size of the symbol in bytes.
    pub(crate) bytes: usize,
}

/// Returns the variable at `address`, or the mapping.
pub(crate) fn place(address: usize) -> Place {
    let Some(mapping) = mapping_at(address) else {
        return Place { name: "nothing of main's".to_owned(), bytes: 0 };
    };
    let data: fn(SymbolKind) -> bool = |kind| matches!(kind, SymbolKind::Data);
    if let Some((_, Some(place))) = variable(&mapping, address, data) {
        return place;
    }
    let name = name_in_module(&mapping, address, data).unwrap_or_else(|| "memory of main".to_owned());
    Place { name, bytes: mapping.end - mapping.start }
}

/// The variable at an address of a module's data, of which the zeroed part is in no file.
fn variable(
    mapping: &Mapping,
    address: usize,
    wanted: fn(SymbolKind) -> bool,
) -> Option<(u64, Option<Place>)> {
    let (mut base, mut module) = (0, Vec::new());
    Maps::open()
        .ok()?
        .for_each(&mut vec![0; 64 << 10], |entry| {
            if entry.range.start <= mapping.start && entry.name.starts_with(b"/") && entry.offset == 0 {
                (base, module) = (entry.range.start, entry.name.to_vec());
            }
            Ok(())
        })
        .ok()?;
    if !(mapping.name == module || mapping.name.is_empty()) {
        return None;
    }
    symbol_at(OsStr::from_bytes(&module), wanted, |segments| {
        let first = segments.iter().find(|(start, ..)| *start == 0)?.2;
        let at = (address - base) as u64 + (first & !(PAGE as u64 - 1));
        segments.iter().any(|(_, _, start, size)| at.wrapping_sub(*start) < *size).then_some(at)
    })
}

/// Returns what main has at an address that a task could not access.
pub(crate) fn of_memory(address: usize) -> Option<String> {
    if address < PAGE {
        return Some("a null pointer".to_owned());
    }
    let pointer = core::ptr::without_provenance::<u8>(address);
    if let Some(area) = Area::containing(pointer) {
        let (base, offset) = (area.base(), address - area.base());
        return Some(format!("{offset:#x} bytes into the area at {base:#x}, which no call has named"));
    }
    let Some(mapping) = mapping_at(address) else { return Some("main has nothing there".to_owned()) };
    let place = name_in_module(&mapping, address, |kind| matches!(kind, SymbolKind::Data | SymbolKind::Tls))?;
    let (access, kib) = (mapping.access, (mapping.end - mapping.start) >> 10);
    Some(if access.contains(Access::READ | Access::WRITE) {
        format!("memory of main that was not passed: {place}, in {kib} KiB that the orbit has not")
    } else {
        format!(
            "memory that main may not {} either: {place}",
            if access.contains(Access::READ) { "write" } else { "access" }
        )
    })
}

/// Returns the name as in the source, as far as it can be had.
pub(crate) fn demangle(name: &str) -> String {
    if let Ok(rust) = rustc_demangle::try_demangle(name) {
        return format!("{rust:#}");
    }
    CString::new(name).ok().and_then(|name| demangle_cpp(&name)).unwrap_or_else(|| name.to_owned())
}

/// By the C++ runtime, where the program has one.
pub(crate) fn demangle_cpp(name: &CStr) -> Option<String> {
    type Demangle = unsafe extern "C" fn(*const c_char, *mut c_char, *mut usize, *mut c_int) -> *mut c_char;
    // SAFETY: the name is a C string, and looking it up runs nothing but a resolver of the C++ runtime's.
    let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__cxa_demangle".as_ptr()) };
    if function.is_null() {
        return None;
    }
    let mut status = 0;
    // SAFETY: the C++ ABI has the function of this type; what it returns was made by malloc(3).
    unsafe {
        let function = core::mem::transmute::<*mut core::ffi::c_void, Demangle>(function);
        let text = function(name.as_ptr(), core::ptr::null_mut(), core::ptr::null_mut(), &raw mut status);
        if text.is_null() {
            return None;
        }
        let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
        libc::free(text.cast());
        (status == 0).then_some(copy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static mut WRITABLE: [u64; 4] = [1; 4];

    #[test]
    fn code_has_module_offset_and_symbol() {
        let text = of_code(of_code as *const () as usize + 1).unwrap();
        assert!(text.contains("orbit::symbol::of_code+0x1)"), "{text}");
        assert!(text.starts_with("orrery_orbit-"), "{text}");
        assert_eq!(of_code(8), None);
    }

    #[test]
    fn memory_is_named() {
        assert_eq!(of_memory(16).unwrap(), "a null pointer");
        let data = of_memory((&raw const WRITABLE).addr() + 8).unwrap();
        assert!(data.contains("WRITABLE"), "{data}");
        assert!(of_memory(of_code as *const () as usize).unwrap().contains("may not write"));
        assert_eq!(of_memory(usize::MAX - 100_000).unwrap(), "main has nothing there");
    }

    #[test]
    fn names_are_as_in_the_source() {
        assert_eq!(demangle("main"), "main");
        assert_eq!(demangle("_RNvC6_123foo3bar"), "123foo::bar");
    }
}
