//! Mapped libraries of `orrery/instance.h`.

use core::ffi::{c_char, c_int, c_void};
use core::ptr::null_mut;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use orrery_orc_instance::{MappedInstance, MappedLibrary, MappedOptions};

use super::{address, borrow, give, text};
use crate::{error, options};

const ALWAYS: c_int = 1;
const NEVER: c_int = 2;

/// Mirrors `struct orrery_instance_mapped_options` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct InstanceMappedOptions {
    size: usize,
    unwind: c_int,
    reserved: c_int,
}

const DEFAULTS: InstanceMappedOptions =
    InstanceMappedOptions { size: size_of::<InstanceMappedOptions>(), unwind: 0, reserved: 0 };

/// Mirrors `struct orrery_instance_mapped_library` of the header.
#[derive(Debug)]
pub struct MappedLibraryHandle(MappedLibrary);

/// Mirrors `struct orrery_instance_mapped` of the header.
#[derive(Debug)]
pub struct MappedInstanceHandle(MappedInstance);

/// Implements `orrery_instance_mapped_load` of `orrery/instance.h`.
///
/// # Safety
/// `path` is null or a C string; `given` is null or leads to a structure that begins with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_mapped_load(
    path: *const c_char,
    given: *const InstanceMappedOptions,
) -> *mut MappedLibraryHandle {
    // SAFETY: `path` is null or a C string, and `given` is null or leads to a structure that begins with its size
    // (# Safety); `InstanceMappedOptions` consists of integers.
    let (path, given) = unsafe { (text(path, "a path"), options::read(given, DEFAULTS)) };
    let Some(path) = path else { return null_mut() };
    let unwind = match given {
        Ok(InstanceMappedOptions { unwind: 0, reserved: 0, .. }) => None,
        Ok(InstanceMappedOptions { unwind: ALWAYS, reserved: 0, .. }) => Some(true),
        Ok(InstanceMappedOptions { unwind: NEVER, reserved: 0, .. }) => Some(false),
        Ok(_) => {
            error::fail_with(
                libc::EINVAL,
                "cannot load a library: the options unwind or reserved have no such value",
            );
            return null_mut();
        }
        Err((errno, text)) => {
            error::fail_with(errno, text);
            return null_mut();
        }
    };
    let path = Path::new(OsStr::from_bytes(path.to_bytes()));
    give(MappedLibrary::load_with(path, MappedOptions { unwind }), MappedLibraryHandle)
}

/// Implements `orrery_instance_mapped_close` of `orrery/instance.h`.
///
/// # Safety
/// `library` is null, or was given by this library and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_mapped_close(library: *mut MappedLibraryHandle) {
    if !library.is_null() {
        // SAFETY: it came from `give`, and this is its last use.
        drop(unsafe { Box::from_raw(library) });
    }
}

/// Implements `orrery_instance_mapped_create` of `orrery/instance.h`.
///
/// # Safety
/// `library` is null or was given by this library and not closed. Once the instance is destroyed, nothing uses its functions
/// and variables.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_mapped_create(
    library: *const MappedLibraryHandle,
) -> *mut MappedInstanceHandle {
    // SAFETY: `library` is null or was given by this library and not closed (# Safety).
    let Some(library) = (unsafe { borrow(library, "a library") }) else { return null_mut() };
    // SAFETY: nothing uses the instance once it is destroyed (# Safety).
    give(unsafe { library.0.create() }, MappedInstanceHandle)
}

/// Implements `orrery_instance_mapped_symbol` of `orrery/instance.h`.
///
/// # Safety
/// `instance` is null, or was given by this library and not destroyed; `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_mapped_symbol(
    instance: *const MappedInstanceHandle,
    name: *const c_char,
) -> *mut c_void {
    // SAFETY: `instance` is null or was given by this library and not destroyed, and `name` is null or a C string (# Safety).
    let found = unsafe { (borrow(instance, "an instance"), text(name, "a name")) };
    let (Some(instance), Some(name)) = found else { return null_mut() };
    address(instance.0.symbol(name))
}

/// Implements `orrery_instance_mapped_base` of `orrery/instance.h`.
///
/// # Safety
/// `instance` is null, or was given by this library and not destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_mapped_base(instance: *const MappedInstanceHandle) -> *mut c_void {
    // SAFETY: `instance` is null or was given by this library and not destroyed (# Safety).
    unsafe { instance.as_ref() }.map_or(null_mut(), |instance| instance.0.base().cast_mut())
}

/// Implements `orrery_instance_mapped_destroy` of `orrery/instance.h`.
///
/// # Safety
/// `instance` is null, or was given by this library and, if this succeeds, is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_mapped_destroy(instance: *mut MappedInstanceHandle) -> c_int {
    if instance.is_null() {
        return 0;
    }
    // SAFETY: it came from `give`; where it cannot be destroyed, it is restored.
    let handle = unsafe { instance.read() };
    match handle.0.destroy() {
        Ok(()) => {
            // SAFETY: what was in the box has been moved out.
            drop(unsafe { Box::from_raw(instance.cast::<core::mem::MaybeUninit<MappedInstanceHandle>>()) });
            0
        }
        Err((handle, error)) => {
            // SAFETY: the place is as it was before it was read.
            unsafe { instance.write(MappedInstanceHandle(handle)) };
            error::fail(error)
        }
    }
}
