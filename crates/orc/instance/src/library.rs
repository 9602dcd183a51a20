//! A library that is loaded once and has many instances.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::abi::{Descriptor, Unit, VERSION};
use crate::claim::Claim;
use crate::dl::{Handle, Object};
use crate::error::{Error, Result};
use crate::image::Image;
use crate::instance::Instance;
use crate::places::{COPY_MAX, Places};
use crate::{dl, file, host, region, words};

/// How instances of a library are made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Whether the state of an instance is mapped from a memory file, so that pages that it does not write are shared with
    /// all others, and its own pages with nobody. By default that depends on its size: up to 256 KiB are copied.
    pub map_state: Option<bool>,
    /// How many bytes of heap an instance may have; 0: no limit but memory.
    pub heap_limit: usize,
}

/// A library that was built with the pass. A clone is another handle of the same library.
#[derive(Clone, Debug)]
pub struct Library {
    pub(crate) loaded: Arc<Loaded>,
}

/// What is known of a loaded library.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) descriptor: &'static Descriptor,
    pub(crate) words: words::Place,
    pub(crate) image: Image,
    pub(crate) places: Places,
    pub(crate) options: Options,
    pub(crate) has_constructors: bool,
    handle: Handle,
    /// Where it finds its instances by GS.
    claim: Option<Claim>,
}

// SAFETY: the descriptor is constant, and its functions may be called from any thread.
unsafe impl Send for Loaded {}
// SAFETY: the descriptor is constant, and its functions may be called from any thread.
unsafe impl Sync for Loaded {}

/// The libraries of this process: one that is loaded again is the same.
static LIBRARIES: Mutex<Option<HashMap<PathBuf, Weak<Loaded>>>> = Mutex::new(None);

impl Library {
    /// Loads a library from a file.
    ///
    /// # Errors
    /// [`Error::Open`], [`Error::Elf`], [`Error::NotBuilt`], [`Error::Mixed`], [`Error::TextRelocations`],
    /// [`Error::ExecutableStack`] before anything of the library runs; [`Error::Load`], [`Error::Version`],
    /// [`Error::Loaded`], [`Error::AddressSpace`], [`Error::BaseTaken`], [`Error::BaseUsed`].
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::load_with(path, Options::default())
    }

    /// Loads a library whose instances are made in a certain way. Where it is loaded already, its options stay.
    ///
    /// # Errors
    /// As [`Library::load`].
    pub fn load_with(path: impl AsRef<Path>, options: Options) -> Result<Self> {
        let path = path.as_ref();
        let open = |cause| Error::Open { path: path.to_owned(), cause };
        let path = path.canonicalize().map_err(open)?;
        let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
        let libraries = libraries.get_or_insert_default();
        if let Some(loaded) = libraries.get(&path).and_then(Weak::upgrade) {
            return Ok(Self { loaded });
        }
        // The library's constructors run when it is loaded, and use the base.
        let claim = file::check(&path)?.uses_gs.then(|| Claim::take(&path)).transpose()?;
        let loaded = Arc::new(Loaded::load(&path, options, claim)?);
        libraries.retain(|_, loaded| loaded.strong_count() > 0);
        libraries.insert(path, Arc::downgrade(&loaded));
        Ok(Self { loaded })
    }

    /// Makes an instance, whose state is that of the library when it was loaded; runs its constructors.
    ///
    /// # Errors
    /// [`Error::AddressSpace`], [`Error::System`].
    pub fn create(&self) -> Result<Instance> {
        Instance::create(&self.loaded)
    }

    /// Returns the address of a function. Called in an instance, it uses the instance's state; outside of all instances,
    /// the library's own. For a variable, this is the address of the library's own: see [`Instance::variable`].
    ///
    /// # Errors
    /// [`Error::Symbol`].
    pub fn symbol(&self, name: &CStr) -> Result<NonNull<c_void>> {
        self.loaded.symbol(name)
    }

    /// Returns how many bytes of state each instance has.
    #[must_use]
    pub fn state_len(&self) -> usize {
        self.loaded.image.len()
    }

    /// Returns how many words of the state are addresses in it, which are adjusted for each instance.
    #[must_use]
    pub fn relocations(&self) -> usize {
        self.loaded.image.relocations()
    }

    /// Returns whether the states of instances are mapped, rather than copied.
    #[must_use]
    pub fn maps_state(&self) -> bool {
        self.loaded.places.is_mapped()
    }

    /// Returns whether accesses to the state are relative to GS, as a unit was built with `ORRERY_CLS_BASE=gs`.
    #[must_use]
    pub fn uses_gs(&self) -> bool {
        self.loaded.claim.is_some()
    }
}

impl Loaded {
    fn load(path: &Path, options: Options, claim: Option<Claim>) -> Result<Self> {
        // Before the library is loaded: where instances are must not depend on how much it leaves of the address space.
        let mut region = region::region()?;
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|error| Error::Open { path: path.to_owned(), cause: error.into() })?;
        let before = dl::loaded(&name);
        let handle = dl::open(&name).map_err(|cause| Error::Load { path: path.to_owned(), cause })?;
        let descriptor = dl::symbol(Some(&handle), c"orrery_cls_descriptor");
        let descriptor = descriptor.ok_or_else(|| Error::NotBuilt { path: path.to_owned() })?;
        // SAFETY: it is the descriptor that the runtime has under this name; its first word is a version.
        let version = unsafe { descriptor.cast::<u32>().read() };
        if version != VERSION {
            return Err(Error::Version { path: path.to_owned(), version });
        }
        // SAFETY: of this version, it is such a structure, which lives as long as the library does.
        let descriptor: &'static Descriptor = unsafe { descriptor.cast().as_ref() };
        let (mut start, mut end, mut saved_len) = (std::ptr::null_mut::<u8>(), std::ptr::null_mut::<u8>(), 0);
        // SAFETY: the functions store into what they are given.
        let saved = unsafe {
            (descriptor.extent)(&raw mut start, &raw mut end);
            (descriptor.pristine)(&raw mut saved_len)
        };
        let len = end.addr() - start.addr();
        if saved.is_null() && before.is_some() {
            return Err(Error::Loaded { path: path.to_owned() });
        }
        let from = if saved.is_null() { start.cast_const() } else { saved };
        // SAFETY: the library's state, or what its runtime saved of it, has this length.
        let bytes = unsafe { std::slice::from_raw_parts(from, len) }.to_vec();
        // SAFETY: the handle is open, and so the library stays loaded meanwhile.
        let places = unsafe { relocated(&handle) };
        let mut image = Image::new(start.expose_provenance(), bytes, places.into_iter());
        let map = options.map_state.unwrap_or(image.len() > COPY_MAX);
        if map {
            image.make_file()?;
        }
        // SAFETY: the descriptor is that of the library, which stays loaded.
        let alignment = unsafe { units(descriptor) }.iter().map(Unit::alignment).fold(16, usize::max);
        if claim.is_some() {
            region = region::above(end.addr())?;
        }
        let base = claim.as_ref().map(Claim::base);
        // SAFETY: the host lives as long as the process.
        unsafe { (descriptor.set_host)(host::host(base)?) };
        // SAFETY: it returns the words of this thread.
        let words = words::Place::of(unsafe { (descriptor.thread)() }, base);
        let places = Places::new(region, &image, alignment, map);
        let has_constructors = !saved.is_null();
        Ok(Self { descriptor, words, image, places, options, has_constructors, handle, claim })
    }

    pub(crate) fn symbol(&self, name: &CStr) -> Result<NonNull<c_void>> {
        dl::symbol(Some(&self.handle), name).ok_or_else(|| Error::Symbol { name: name.to_owned() })
    }
}

/// Returns what the library's units record.
///
/// # Safety
/// The descriptor is that of a library, which stays loaded as long as the slice is used.
unsafe fn units(descriptor: &Descriptor) -> &[Unit] {
    if descriptor.units.is_null() {
        return &[];
    }
    let bytes = descriptor.units_end.addr().saturating_sub(descriptor.units.addr());
    // SAFETY: the descriptor has the start and the end of the library's list of units, which is constant.
    unsafe { std::slice::from_raw_parts(descriptor.units, bytes / size_of::<Unit>()) }
}

// Tags of the dynamic section.
const DT_RELA: usize = 7;
const DT_RELASZ: usize = 8;
const DT_RELRSZ: usize = 35;
const DT_RELR: usize = 36;

/// Returns the addresses of the words that the dynamic loader relocated, from the library's own tables.
///
/// # Safety
/// The library stays loaded meanwhile.
unsafe fn relocated(handle: &Handle) -> Vec<usize> {
    let mut found = Vec::new();
    let Some(object) = Object::of_handle(handle) else { return found };
    let base = object.base;
    // SAFETY: the library stays loaded (# Safety); its tables have the lengths that its dynamic section says.
    unsafe {
        let (mut rela, mut rela_size, mut relr, mut relr_size) = (0, 0, 0, 0);
        for [tag, value] in object.entries() {
            match tag {
                DT_RELA => rela = value,
                DT_RELASZ => rela_size = value,
                DT_RELR => relr = value,
                DT_RELRSZ => relr_size = value,
                _ => {}
            }
        }
        if rela != 0 {
            let table: *const libc::Elf64_Rela = std::ptr::with_exposed_provenance(rela);
            for at in 0..rela_size / size_of::<libc::Elf64_Rela>() {
                found.push(base.wrapping_add(usize::try_from((*table.add(at)).r_offset).unwrap_or_default()));
            }
        }
        if relr != 0 {
            let table: *const usize = std::ptr::with_exposed_provenance(relr);
            let words = std::slice::from_raw_parts(table, relr_size / size_of::<usize>());
            unpack_relative(base, words, &mut found);
        }
    }
    found
}

/// Reads DT_RELR (the generic ABI's packed relative relocations).
fn unpack_relative(base: usize, words: &[usize], found: &mut Vec<usize>) {
    let mut next = 0_usize;
    for word in words {
        if word & 1 == 0 {
            next = base.wrapping_add(*word);
            found.push(next);
            next = next.wrapping_add(8);
        } else {
            found.extend(
                (0..63).filter(|bit| word >> (bit + 1) & 1 != 0).map(|bit| next.wrapping_add(bit * 8)),
            );
            next = next.wrapping_add(63 * 8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_relocations_are_an_address_and_bits_of_its_successors() {
        let mut found = Vec::new();
        unpack_relative(0x1000, &[0x10, 0b1011, 0x11 | 1 << 63, 0x400], &mut found);
        let wanted = [0x1010, 0x1018, 0x1028, 0x1018 + 63 * 8 + 3 * 8, 0x1018 + 63 * 8 + 62 * 8, 0x1400];
        assert_eq!(found, wanted);
    }
}
