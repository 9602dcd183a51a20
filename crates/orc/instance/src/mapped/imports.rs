//! Finds what a library imports, in the program and in the libraries that it needs.
//!
//! The libraries that it needs are loaded by dlopen(3), once for all instances, and stay the process's. A symbol is looked
//! for where the dynamic loader would: in the program and what that was linked to, then in what the library needs.

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr::NonNull;

use object::elf;

use crate::dl::{self, Handle};
use crate::error::{Error, Result};
use crate::mapped::plan::Plan;
use crate::mapped::symbols::Import;
use crate::mapped::threads;

/// What an import is in this process.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Found {
    /// An address; 0 for a weak symbol that nothing defines.
    Address(usize),
    /// A thread-local variable of a library of the process.
    ThreadLocal { block: usize, offset: usize },
}

/// The libraries that a library needs, in their order.
#[derive(Debug)]
pub(crate) struct Scope {
    needed: Vec<Handle>,
}

impl Scope {
    /// Loads what the library at `path` needs.
    pub(crate) fn load(path: &Path, plan: &Plan) -> Result<Self> {
        let load = |name: &CString| {
            let found = match dl::loaded(name) {
                Some(there) => Ok(there),
                None => match in_search_path(path, plan.search.as_deref(), name) {
                    Some(file) => dl::open(&file),
                    None => dl::open(name),
                },
            };
            found.map_err(|cause| Error::Load { path: path.to_owned(), cause })
        };
        Ok(Self { needed: plan.needed.iter().map(load).collect::<Result<_>>()? })
    }

    /// Finds an import of the library at `path`.
    pub(crate) fn find(&self, path: &Path, import: &Import) -> Result<Found> {
        if let Some(own) = threads::replacement(&import.name) {
            return Ok(Found::Address(own));
        }
        let (name, version) = (import.name.as_c_str(), import.version.as_deref());
        let scopes = std::iter::once(None).chain(self.needed.iter().map(Some));
        let found = scopes.into_iter().find_map(|scope| lookup(scope, name, version));
        match found {
            Some(address) if import.thread_local => {
                thread_local(address).ok_or_else(|| missing(path, import))
            }
            Some(address) => Ok(Found::Address(address.as_ptr().expose_provenance())),
            None if import.weak && !import.thread_local => Ok(Found::Address(0)),
            None => Err(missing(path, import)),
        }
    }

    /// Finds a function of the process's C runtime, which the library would call.
    pub(crate) fn function(&self, name: &CStr) -> Option<NonNull<c_void>> {
        let scopes = self.needed.iter().map(Some).chain(std::iter::once(None));
        scopes.into_iter().find_map(|scope| lookup(scope, name, None))
    }
}

fn missing(path: &Path, import: &Import) -> Error {
    let mut symbol = import.name.to_string_lossy().into_owned();
    if let Some(version) = &import.version {
        symbol.push('@');
        symbol.push_str(&version.to_string_lossy());
    }
    Error::Import { path: path.to_owned(), symbol }
}

/// Returns the file of a needed library in the directories that a library names itself (DT_RUNPATH), if it is there.
fn in_search_path(path: &Path, search: Option<&CStr>, name: &CStr) -> Option<CString> {
    let directory = path.parent()?.as_os_str().as_bytes();
    if name.to_bytes().contains(&b'/') {
        return None;
    }
    search?.to_bytes().split(|byte| *byte == b':').find_map(|part| {
        let part = replaced(&replaced(part, b"${ORIGIN}", directory), b"$ORIGIN", directory);
        let file = Path::new(OsStr::from_bytes(&part)).join(OsStr::from_bytes(name.to_bytes()));
        let file = file.exists().then_some(file)?;
        CString::new(file.into_os_string().as_bytes()).ok()
    })
}

fn replaced(text: &[u8], what: &[u8], with: &[u8]) -> Vec<u8> {
    match text.windows(what.len()).position(|window| window == what) {
        Some(at) => [&text[..at], with, &text[at + what.len()..]].concat(),
        None => text.to_vec(),
    }
}

/// Finds a symbol as the dynamic loader does for a library that was linked to a version of it: that version, or a symbol of
/// an object without versions that comes first, such as another `malloc` that the program was linked to or preloads.
fn lookup(scope: Option<&Handle>, name: &CStr, version: Option<&CStr>) -> Option<NonNull<c_void>> {
    let by_name = dl::symbol(scope, name);
    let Some(version) = version else { return by_name };
    let by_version = dl::versioned(scope, name, version);
    let first = by_name.filter(|by_name| match by_version {
        Some(by_version) => dl::base(*by_name) != dl::base(by_version) && has_no_version(*by_name),
        None => has_no_version(*by_name),
    });
    first.or(by_version)
}

/// Returns whether a symbol at an address has no version in its object.
fn has_no_version(address: NonNull<c_void>) -> bool {
    let Some((object, symbol)) = dl::Object::of_symbol(address) else { return false };
    let (mut symbols, mut versions) = (0, 0);
    // SAFETY: the object has the symbol, which the caller has found in it just now.
    for [tag, value] in unsafe { object.entries() } {
        if tag == elf::DT_SYMTAB as usize {
            symbols = value;
        } else if tag == elf::DT_VERSYM as usize {
            versions = value;
        }
    }
    if versions == 0 {
        return true;
    }
    // The loader leaves offsets in the dynamic section of the vDSO, which it cannot write.
    if symbols < object.base || versions < object.base {
        return false;
    }
    let index = symbol.wrapping_sub(symbols) / size_of::<libc::Elf64_Sym>();
    let version: *const u16 = std::ptr::with_exposed_provenance(versions);
    // SAFETY: the symbol is in the object's symbol table, and the table of versions has an entry for each.
    unsafe { *version.add(index) & 0x7fff <= elf::VER_NDX_GLOBAL }
}

/// Returns what block of thread-local variables has an address, which is this thread's.
fn thread_local(address: NonNull<c_void>) -> Option<Found> {
    struct Search {
        address: usize,
        found: Option<(usize, usize)>,
    }
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: the C library passes a structure of its own, with its headers, and what `thread_local` passed.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search>()) };
        for at in 0..usize::from(info.dlpi_phnum) {
            // SAFETY: the object has so many headers.
            let header = unsafe { &*info.dlpi_phdr.add(at) };
            let len = usize::try_from(header.p_memsz).unwrap_or_default();
            let offset = search.address.wrapping_sub(info.dlpi_tls_data.addr());
            if header.p_type == elf::PT_TLS && !info.dlpi_tls_data.is_null() && offset < len {
                search.found = Some((info.dlpi_tls_modid, offset));
            }
        }
        0
    }
    let mut search = Search { address: address.as_ptr().addr(), found: None };
    // SAFETY: the function has the type that is wanted, and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found.map(|(block, offset)| Found::ThreadLocal { block, offset })
}
