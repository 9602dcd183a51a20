//! `orrery/object.h`.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

use orrery_orc_client::{Client, Error, Flags, Mapping, Object, ObjectId, PageRange};

use crate::error;

/// `ORRERY_OBJECT_EXECUTABLE`.
const EXECUTABLE: c_uint = 1;
/// `ORRERY_OBJECT_FREEZE`.
const FREEZE: c_uint = 8;

/// The store that calls go to.
static CLIENT: Mutex<Option<Client>> = Mutex::new(None);

/// Mirrors `struct orrery_object` of the header.
#[derive(Debug)]
pub struct ObjectHandle {
    object: Object,
    data: OnceLock<Mapping>,
    code: OnceLock<Mapping>,
}

/// Mirrors `struct orrery_object_id` of the header.
#[repr(C)]
#[derive(Debug)]
pub struct ObjectName {
    bytes: [u8; 32],
}

fn invalid(text: &str) {
    error::fail_with(libc::EINVAL, text);
}

fn client() -> Result<Client, Error> {
    let mut client = CLIENT.lock().unwrap_or_else(PoisonError::into_inner);
    match &*client {
        Some(client) => Ok(client.clone()),
        None => Ok(client.insert(Client::connect()?).clone()),
    }
}

/// Returns what C gets for an object, or null with the error noted.
fn give(result: Result<Object, Error>) -> *mut ObjectHandle {
    match result {
        Ok(object) => {
            Box::into_raw(Box::new(ObjectHandle { object, data: OnceLock::new(), code: OnceLock::new() }))
        }
        Err(error) => {
            error::fail(&error);
            core::ptr::null_mut()
        }
    }
}

fn flags(bits: c_uint) -> Option<Flags> {
    let flags = Flags::from_bits(bits);
    if flags.is_none() {
        invalid(
            "flags that there are not: ORRERY_OBJECT_EXECUTABLE, ORRERY_OBJECT_PUBLIC and ORRERY_OBJECT_OWN_PAGES are",
        );
    }
    flags
}

/// Implements `orrery_object_connect` of `orrery/object.h`.
///
/// # Safety
/// `directory` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_object_connect(directory: *const c_char) -> c_int {
    if directory.is_null() {
        invalid("no directory was named");
        return -1;
    }
    // SAFETY: `directory` was checked against null, and so is a C string that stays for this call (# Safety).
    let directory = unsafe { CStr::from_ptr(directory) };
    match Client::connect_to(Path::new(OsStr::from_bytes(directory.to_bytes()))) {
        Ok(fresh) => {
            *CLIENT.lock().unwrap_or_else(PoisonError::into_inner) = Some(fresh);
            0
        }
        Err(error) => {
            error::fail(&error);
            -1
        }
    }
}

/// Implements `orrery_object_open` of `orrery/object.h`.
///
/// # Safety
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_object_open(path: *const c_char) -> *mut ObjectHandle {
    if path.is_null() {
        invalid("no file was named");
        return core::ptr::null_mut();
    }
    // SAFETY: `path` was checked against null, and so is a C string that stays for this call (# Safety).
    let path = unsafe { CStr::from_ptr(path) };
    give(client().and_then(|client| client.open(Path::new(OsStr::from_bytes(path.to_bytes())))))
}

/// The caller's bytes; none where the pointer is null.
///
/// # Safety
/// `bytes` is null or points to `length` bytes that stay as they are for the call.
unsafe fn borrow<'a>(bytes: *const c_void, length: usize) -> Option<&'a [u8]> {
    if length == 0 {
        return Some(&[]);
    }
    if bytes.is_null() || isize::try_from(length).is_err() {
        invalid("the bytes are nowhere, or too many");
        return None;
    }
    // SAFETY: `bytes` leads to `length` bytes that stay as they are for the call (# Safety); null pointers
    // and lengths above `isize::MAX` were refused above.
    Some(unsafe { core::slice::from_raw_parts(bytes.cast(), length) })
}

/// Implements `orrery_object_hash` of `orrery/object.h`.
///
/// # Safety
/// `bytes` is null or points to `length` bytes that nobody changes meanwhile; `id` is null or points to room for a
/// name, which does not overlap them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_object_hash(
    bytes: *const c_void,
    length: usize,
    id: *mut ObjectName,
) -> c_int {
    // SAFETY: `bytes` is null or leads to `length` bytes, and `id` is null or leads to room for a name that
    // does not overlap them (# Safety).
    let (Some(bytes), Some(id)) = (unsafe { borrow(bytes, length) }, unsafe { id.as_mut() }) else {
        invalid("there is no room for the name, or the bytes are nowhere");
        return -1;
    };
    id.bytes = ObjectId::of(bytes).0;
    0
}

/// Implements `orrery_object_register` of `orrery/object.h`.
///
/// # Safety
/// `bytes` is null or points to `length` bytes that nobody changes meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_object_register(
    bytes: *const c_void,
    length: usize,
    bits: c_uint,
) -> *mut ObjectHandle {
    // SAFETY: `bytes` is null or leads to `length` bytes that nobody changes meanwhile (# Safety).
    let (Some(bytes), Some(flags)) = (unsafe { borrow(bytes, length) }, flags(bits)) else {
        return core::ptr::null_mut();
    };
    give(client().and_then(|client| client.register(bytes, flags)))
}

/// Implements `orrery_object_register_file` of `orrery/object.h`.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_object_register_file(
    memory: c_int,
    length: usize,
    bits: c_uint,
) -> *mut ObjectHandle {
    let Some(flags) = flags(bits) else { return core::ptr::null_mut() };
    // SAFETY: only asked whether it is open.
    if memory < 0 || unsafe { libc::fcntl(memory, libc::F_GETFD) } < 0 {
        error::fail_with(libc::EBADF, "the descriptor is not open");
        return core::ptr::null_mut();
    }
    // SAFETY: it is open, and the caller keeps it so for the call.
    let memory = unsafe { BorrowedFd::borrow_raw(memory) };
    give(client().and_then(|client| client.register_file(memory, length as u64, flags)))
}

/// Implements `orrery_object_request` of `orrery/object.h`.
///
/// # Safety
/// `id` is null or points to a name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_object_request(id: *const ObjectName) -> *mut ObjectHandle {
    // SAFETY: `id` is null or leads to a name (# Safety), which is bytes without alignment.
    let Some(id) = (unsafe { id.as_ref() }) else {
        invalid("no name was given");
        return core::ptr::null_mut();
    };
    give(client().and_then(|client| client.request(ObjectId(id.bytes))))
}

/// Implements `orrery_object_map` of `orrery/object.h`.
///
/// # Safety
/// `object` is null or was given by this library and not released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_object_map(object: *mut ObjectHandle, bits: c_uint) -> *const c_void {
    // SAFETY: `object` is null or was given by this library and not released (# Safety); other threads may
    // have it, too, so it is only borrowed shared.
    let Some(object) = (unsafe { object.as_ref() }).filter(|_| bits & !EXECUTABLE == 0) else {
        invalid("there is no object, or there are flags other than ORRERY_OBJECT_EXECUTABLE");
        return core::ptr::null();
    };
    let (place, made) = if bits & EXECUTABLE == 0 {
        (&object.data, object.data.get().is_none().then(|| object.object.map()))
    } else {
        (&object.code, object.code.get().is_none().then(|| object.object.map_executable()))
    };
    match made {
        Some(Err(error)) => {
            error::fail(&error);
            return core::ptr::null();
        }
        // Where another thread was faster, ours is unmapped again.
        Some(Ok(mapping)) => drop(place.set(mapping)),
        None => {}
    }
    place.get().map_or(core::ptr::null(), |mapping| mapping.as_ptr().cast())
}

/// Implements `orrery_object_length` of `orrery/object.h`.
///
/// # Safety
/// As for [`orrery_object_map`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_object_length(object: *const ObjectHandle) -> usize {
    // SAFETY: `object` is null or was given by this library and not released (# Safety).
    unsafe { object.as_ref() }.map_or(0, |object| object.object.len())
}

/// Implements `orrery_object_identify` of `orrery/object.h`.
///
/// # Safety
/// As for [`orrery_object_map`]; `id` is null or points to room for a name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_object_identify(object: *const ObjectHandle, id: *mut ObjectName) -> c_int {
    // SAFETY: `object` is null or was given by this library and not released, and `id` is null or leads to
    // room for a name (# Safety).
    let (Some(object), Some(id)) = (unsafe { object.as_ref() }, unsafe { id.as_mut() }) else {
        invalid("there is no object, or no room for its name");
        return -1;
    };
    id.bytes = object.object.id().0;
    0
}

/// Implements `orrery_object_fd` of `orrery/object.h`.
///
/// # Safety
/// As for [`orrery_object_map`]; `offset` is null or points to room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_object_fd(object: *const ObjectHandle, offset: *mut usize) -> c_int {
    // SAFETY: `object` is null or was given by this library and not released, and `offset` is null or leads
    // to room for a number (# Safety).
    let (object, offset) = unsafe { (object.as_ref(), offset.as_mut()) };
    let Some(object) = object else {
        invalid("there is no object");
        return -1;
    };
    if let Some(offset) = offset {
        *offset = usize::try_from(object.object.offset()).unwrap_or(usize::MAX);
    }
    object.object.as_fd().as_raw_fd()
}

/// Implements `orrery_object_release` of `orrery/object.h`.
///
/// # Safety
/// `object` is null, or was given by this library and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_object_release(object: *mut ObjectHandle) -> c_int {
    if !object.is_null() {
        // SAFETY: it came from `give`, and this is the last use of it.
        drop(unsafe { Box::from_raw(object) });
    }
    0
}

/// Implements `orrery_object_publish` of `orrery/object.h`.
///
/// # Safety
/// Nobody unmaps, remaps, protects or writes to the range meanwhile; with `ORRERY_OBJECT_FREEZE` nobody writes to it ever again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_object_publish(
    start: *mut c_void,
    length: usize,
    bits: c_uint,
) -> *mut ObjectHandle {
    let end = start.addr().checked_add(length);
    let Some(end) = end.filter(|_| bits & !FREEZE == 0) else {
        invalid("the range ends beyond all addresses, or there are flags other than ORRERY_OBJECT_FREEZE");
        return core::ptr::null_mut();
    };
    let range = PageRange { start: start.expose_provenance(), end };
    // SAFETY: nobody unmaps, remaps, protects or writes to the range meanwhile, nor writes to it ever again
    // where it is frozen (# Safety).
    let published = client().and_then(|client| unsafe { client.publish(range, bits & FREEZE != 0) });
    give(published.map(|published| published.object))
}
