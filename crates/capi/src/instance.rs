//! `orrery/instance.h`.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::{NonNull, null_mut};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use orrery_orc_instance::{Error, Instance, Library, Options, Snapshot};

use crate::{error, options};

pub mod mapped;

const COPIED: c_int = 1;
const MAPPED: c_int = 2;

/// Mirrors `struct orrery_instance_options` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct InstanceOptions {
    size: usize,
    heap_limit: u64,
    state: c_int,
    reserved: c_int,
}

const DEFAULTS: InstanceOptions =
    InstanceOptions { size: size_of::<InstanceOptions>(), heap_limit: 0, state: 0, reserved: 0 };

/// Mirrors `struct orrery_instance_library` of the header.
#[derive(Debug)]
pub struct LibraryHandle(Library);

/// Mirrors `struct orrery_instance` of the header.
#[derive(Debug)]
pub struct InstanceHandle(Instance);

/// Mirrors `struct orrery_instance_snapshot` of the header.
#[derive(Debug)]
pub struct SnapshotHandle(Snapshot);

fn missing(what: &str) {
    error::fail_with(libc::EINVAL, &format!("cannot use a null pointer: it must be {what}"));
}

fn status(result: Result<(), Error>) -> c_int {
    result.map_or_else(error::fail, |()| 0)
}

fn address(result: Result<NonNull<c_void>, Error>) -> *mut c_void {
    match result {
        Ok(address) => address.as_ptr(),
        Err(error) => {
            error::fail(error);
            null_mut()
        }
    }
}

fn give<T, H>(result: Result<T, Error>, handle: impl FnOnce(T) -> H) -> *mut H {
    match result {
        Ok(made) => Box::into_raw(Box::new(handle(made))),
        Err(error) => {
            error::fail(error);
            null_mut()
        }
    }
}

/// # Safety
/// `handle` is null or was made by this library and not destroyed.
unsafe fn borrow<'a, H>(handle: *const H, what: &str) -> Option<&'a H> {
    // SAFETY: `handle` is null or leads to what `give` made, which lives until it is destroyed (# Safety).
    let handle = unsafe { handle.as_ref() };
    if handle.is_none() {
        missing(what);
    }
    handle
}

/// # Safety
/// As [`borrow`], and no other call uses the instance.
unsafe fn borrow_alone<'a>(instance: *mut InstanceHandle) -> Option<&'a mut Instance> {
    // SAFETY: `instance` is null or leads to what `give` made and is not destroyed, and no other call uses it
    // (# Safety).
    let handle = unsafe { instance.as_mut() };
    if handle.is_none() {
        missing("an instance");
    }
    handle.map(|handle| &mut handle.0)
}

/// # Safety
/// `text` is null or a C string.
unsafe fn text<'a>(text: *const c_char, what: &str) -> Option<&'a CStr> {
    if text.is_null() {
        missing(what);
        return None;
    }
    // SAFETY: `text` was checked against null, and so is a C string that stays for this call (# Safety).
    Some(unsafe { CStr::from_ptr(text) })
}

/// Implements `orrery_instance_load` of `orrery/instance.h`.
///
/// # Safety
/// `path` is null or a C string; `options` is null or leads to a structure that begins with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_load(
    path: *const c_char,
    given: *const InstanceOptions,
) -> *mut LibraryHandle {
    // SAFETY: `path` is null or a C string, and `options` is null or leads to a structure that begins with
    // its size (# Safety); `InstanceOptions` consists of integers.
    let (path, given) = unsafe { (text(path, "a path"), options::read(given, DEFAULTS)) };
    let Some(path) = path else { return null_mut() };
    let given = match given {
        Ok(given) => given,
        Err((errno, text)) => {
            error::fail_with(errno, text);
            return null_mut();
        }
    };
    let map_state = match given.state {
        0 => None,
        COPIED => Some(false),
        MAPPED => Some(true),
        _ => {
            error::fail_with(libc::EINVAL, "cannot load a library: the option state has no such value");
            return null_mut();
        }
    };
    let heap_limit = usize::try_from(given.heap_limit).unwrap_or(usize::MAX);
    let path = Path::new(OsStr::from_bytes(path.to_bytes()));
    give(Library::load_with(path, Options { map_state, heap_limit }), LibraryHandle)
}

/// Implements `orrery_instance_close` of `orrery/instance.h`.
///
/// # Safety
/// `library` is null, or was given by this library and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_close(library: *mut LibraryHandle) {
    if !library.is_null() {
        // SAFETY: it came from `give`, and this is its last use.
        drop(unsafe { Box::from_raw(library) });
    }
}

/// Implements `orrery_instance_symbol` of `orrery/instance.h`.
///
/// # Safety
/// `library` is null or was given by this library and not closed; `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_symbol(
    library: *const LibraryHandle,
    name: *const c_char,
) -> *mut c_void {
    // SAFETY: `library` is null or was given by this library and not closed, and `name` is null or a C string
    // (# Safety).
    let (Some(library), Some(name)) = (unsafe { (borrow(library, "a library"), text(name, "a name")) })
    else {
        return null_mut();
    };
    address(library.0.symbol(name))
}

/// Implements `orrery_instance_state_size` of `orrery/instance.h`.
///
/// # Safety
/// As for [`orrery_instance_symbol`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_state_size(library: *const LibraryHandle) -> usize {
    // SAFETY: `library` is null or was given by this library and not closed (# Safety).
    unsafe { library.as_ref() }.map_or(0, |library| library.0.state_len())
}

/// Implements `orrery_instance_create` of `orrery/instance.h`.
///
/// # Safety
/// As for [`orrery_instance_symbol`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_create(library: *const LibraryHandle) -> *mut InstanceHandle {
    // SAFETY: `library` is null or was given by this library and not closed (# Safety).
    let Some(library) = (unsafe { borrow(library, "a library") }) else { return null_mut() };
    give(library.0.create(), InstanceHandle)
}

/// Implements `orrery_instance_enter` of `orrery/instance.h`.
///
/// # Safety
/// `instance` is null, or was given by this library and lives until the thread leaves it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_enter(instance: *mut InstanceHandle) -> c_int {
    // SAFETY: `instance` is null or was given by this library, and it lives during this call (# Safety).
    let Some(instance) = (unsafe { borrow(instance, "an instance") }) else { return -1 };
    // SAFETY: an instance is not destroyed while a thread is in it, and the caller leaves it.
    status(unsafe { instance.0.enter_unguarded() })
}

/// Implements `orrery_instance_leave` of `orrery/instance.h`.
///
/// # Safety
/// `instance` is null, or was given by this library and not destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_leave(instance: *mut InstanceHandle) -> c_int {
    // SAFETY: `instance` is null or was given by this library and not destroyed (# Safety).
    let Some(instance) = (unsafe { borrow(instance, "an instance") }) else { return -1 };
    status(instance.0.leave())
}

/// Implements `orrery_instance_attach` of `orrery/instance.h`.
///
/// # Safety
/// As for [`orrery_instance_leave`]; the library may be used by several threads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_attach(instance: *mut InstanceHandle) -> c_int {
    // SAFETY: `instance` is null or was given by this library and not destroyed (# Safety).
    let Some(instance) = (unsafe { borrow(instance, "an instance") }) else { return -1 };
    // SAFETY: the library may be used by several threads (# Safety). The guard is forgotten:
    // `orrery_instance_detach` ends it.
    status(unsafe { instance.0.attach() }.map(core::mem::forget))
}

/// Implements `orrery_instance_detach` of `orrery/instance.h`.
///
/// # Safety
/// As for [`orrery_instance_leave`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_detach(instance: *mut InstanceHandle) -> c_int {
    // SAFETY: `instance` is null or was given by this library and not destroyed (# Safety).
    let Some(instance) = (unsafe { borrow(instance, "an instance") }) else { return -1 };
    status(instance.0.detach())
}

/// Implements `orrery_instance_variable` of `orrery/instance.h`.
///
/// # Safety
/// As for [`orrery_instance_leave`]; `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_variable(
    instance: *const InstanceHandle,
    name: *const c_char,
) -> *mut c_void {
    // SAFETY: `instance` is null or was given by this library and not destroyed, and `name` is null or a C
    // string (# Safety).
    let found = unsafe { (borrow(instance, "an instance"), text(name, "a name")) };
    let (Some(instance), Some(name)) = found else { return null_mut() };
    address(instance.0.variable(name))
}

/// Implements `orrery_instance_reset` of `orrery/instance.h`.
///
/// # Safety
/// As for [`orrery_instance_leave`]; no other thread uses the instance meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_reset(instance: *mut InstanceHandle) -> c_int {
    // SAFETY: `instance` is null or was given by this library and not destroyed, and no other thread uses it
    // meanwhile (# Safety).
    let Some(instance) = (unsafe { borrow_alone(instance) }) else { return -1 };
    status(instance.reset())
}

/// Implements `orrery_instance_snapshot_take` of `orrery/instance.h`.
///
/// # Safety
/// As for [`orrery_instance_reset`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_snapshot_take(instance: *mut InstanceHandle) -> *mut SnapshotHandle {
    // SAFETY: `instance` is null or was given by this library and not destroyed, and no other thread uses it
    // meanwhile (# Safety).
    let Some(instance) = (unsafe { borrow_alone(instance) }) else { return null_mut() };
    give(instance.snapshot(), SnapshotHandle)
}

/// Implements `orrery_instance_restore` of `orrery/instance.h`.
///
/// # Safety
/// As for [`orrery_instance_reset`]; `snapshot` is null, or was given by this library and not destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_restore(
    instance: *mut InstanceHandle,
    snapshot: *const SnapshotHandle,
) -> c_int {
    // SAFETY: `instance` and `snapshot` are null or were given by this library and not destroyed, and no
    // other thread uses the instance meanwhile (# Safety).
    let found = unsafe { (borrow_alone(instance), borrow(snapshot, "a snapshot")) };
    let (Some(instance), Some(snapshot)) = found else { return -1 };
    status(instance.restore(&snapshot.0))
}

/// Implements `orrery_instance_create_from` of `orrery/instance.h`.
///
/// # Safety
/// `snapshot` is null, or was given by this library and not destroyed; the library whose
/// instance it is of stores addresses in its state and heap as whole aligned words, and no number there happens to be one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_create_from(snapshot: *const SnapshotHandle) -> *mut InstanceHandle {
    // SAFETY: `snapshot` is null or was given by this library and not destroyed (# Safety).
    let Some(snapshot) = (unsafe { borrow(snapshot, "a snapshot") }) else { return null_mut() };
    // SAFETY: the library whose instance it is of stores addresses as whole aligned words, and no number
    // there happens to be one (# Safety).
    give(unsafe { snapshot.0.create() }, InstanceHandle)
}

/// Implements `orrery_instance_copy_of` of `orrery/instance.h`.
///
/// # Safety
/// As for [`orrery_instance_leave`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_copy_of(
    copy: *const InstanceHandle,
    of: *const c_void,
) -> *mut c_void {
    // SAFETY: `copy` is null or was given by this library and not destroyed (# Safety).
    let Some(instance) = (unsafe { borrow(copy, "an instance") }) else { return null_mut() };
    instance.0.copy_of(of.cast_mut()).map_or_else(
        || {
            error::fail_with(
                libc::ENOENT,
                &format!(
                    "cannot find the copy of {of:p}: the instance is no copy, or its snapshot has no such memory"
                ),
            );
            null_mut()
        },
        std::ptr::NonNull::as_ptr,
    )
}

/// Implements `orrery_instance_snapshot_destroy` of `orrery/instance.h`.
///
/// # Safety
/// `snapshot` is null, or was given by this library and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_snapshot_destroy(snapshot: *mut SnapshotHandle) {
    if !snapshot.is_null() {
        // SAFETY: it came from `give`, and this is its last use.
        drop(unsafe { Box::from_raw(snapshot) });
    }
}

/// Implements `orrery_instance_destroy` of `orrery/instance.h`.
///
/// # Safety
/// `instance` is null, or was given by this library and, if this succeeds, is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_instance_destroy(instance: *mut InstanceHandle) -> c_int {
    if instance.is_null() {
        return 0;
    }
    // SAFETY: it came from `give`; where it cannot be destroyed, it is restored.
    let handle = unsafe { instance.read() };
    match handle.0.destroy() {
        Ok(()) => {
            // SAFETY: what was in the box has been moved out.
            drop(unsafe { Box::from_raw(instance.cast::<core::mem::MaybeUninit<InstanceHandle>>()) });
            0
        }
        Err((handle, error)) => {
            // SAFETY: the place is as it was before it was read.
            unsafe { instance.write(InstanceHandle(handle)) };
            error::fail(error)
        }
    }
}
