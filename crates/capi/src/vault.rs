//! `orrery/vault.h`: vaults that the processes of a program share.

use core::ffi::{CStr, c_char, c_int, c_long, c_void};
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;

use orrery_vault::shared::{Errno, Error, LOAD_ROOM, SharedVault, become_vault};
use orrery_vault::{Loads, VaultService};

use crate::error;

/// A function of a vault.
pub type Function = unsafe extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void, usize) -> isize;

/// A function of a vault that tidies up.
pub type Tidy = unsafe extern "C" fn(*mut c_void) -> c_long;

/// Whether the keepers that are made from now on are not confined.
static LOADS_ANYTHING: AtomicBool = AtomicBool::new(false);

struct Functions {
    load: Function,
    serve: Function,
    tidy: Option<Tidy>,
    context: *mut c_void,
}

impl Functions {
    fn run(
        function: Function,
        context: *mut c_void,
        request: &[u8],
        answer: &mut [u8],
    ) -> Result<usize, Errno> {
        let (from, to) = (request.as_ptr().cast(), answer.as_mut_ptr().cast());
        // SAFETY: whoever made the vault promised functions that keep to the lengths.
        let length = unsafe { function(context, from, request.len(), to, answer.len()) };
        match usize::try_from(length) {
            Ok(length) if length <= answer.len() => Ok(length),
            Ok(_) => Err(Errno::MSGSIZE),
            Err(_) => {
                let number = i32::try_from(length.wrapping_neg()).unwrap_or(libc::EIO);
                Err(Errno::from_raw_os_error(if (1..4096).contains(&number) { number } else { libc::EIO }))
            }
        }
    }
}

impl VaultService for Functions {
    fn load(&mut self, request: &[u8], answer: &mut [u8]) -> Result<usize, Errno> {
        Self::run(self.load, self.context, request, answer)
    }

    fn serve(&mut self, request: &[u8], answer: &mut [u8]) -> Result<usize, Errno> {
        Self::run(self.serve, self.context, request, answer)
    }

    fn loads(&self) -> Loads {
        if LOADS_ANYTHING.load(Ordering::Relaxed) { Loads::Anything } else { Loads::Files }
    }

    fn tidy(&mut self) -> Option<Duration> {
        // SAFETY: whoever made the vault promised a function that may be called with the context.
        let milliseconds = unsafe { self.tidy?(self.context) };
        u64::try_from(milliseconds).ok().map(Duration::from_millis)
    }
}

/// Leaves the keepers that this process makes, or becomes, unconfined.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_vault_set_load_unconfined(unconfined: c_int) {
    LOADS_ANYTHING.store(unconfined != 0, Ordering::Relaxed);
}

/// Returns whether the vault's memory is locked.
///
/// # Safety
/// `vault` is null, or came from [`orrery_vault_create`] or [`orrery_vault_spawn`] and was not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_vault_is_locked(vault: *const SharedVault) -> c_int {
    // SAFETY: `vault` is null, or came from this library and was not closed (# Safety).
    match unsafe { vault.as_ref() } {
        Some(vault) => c_int::from(vault.is_locked()),
        None => error::fail(Error::Errno(Errno::INVAL)),
    }
}

/// Makes a vault from a copy of the calling process.
///
/// # Safety
/// The functions keep to the lengths that they are given, and may be called with `context` in the copy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_vault_create(
    load: Option<Function>,
    serve: Option<Function>,
    context: *mut c_void,
) -> *mut SharedVault {
    let (Some(load), Some(serve)) = (load, serve) else { return no_vault(&Error::Errno(Errno::INVAL)) };
    handle(SharedVault::fork(Functions { load, serve, tidy: None, context }))
}

/// Starts a program as a vault.
///
/// # Safety
/// `program` and each of `arguments`, up to a null, are strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_vault_spawn(
    program: *const c_char,
    arguments: *const *const c_char,
) -> *mut SharedVault {
    if program.is_null() || arguments.is_null() {
        return no_vault(&Error::Errno(Errno::INVAL));
    }
    let mut list = Vec::new();
    // SAFETY: `program` is a string, and the list of arguments (# Safety) ends with a null, before which
    // there are strings.
    let program = unsafe {
        let mut at = arguments;
        while !(*at).is_null() {
            list.push(CStr::from_ptr(*at));
            at = at.add(1);
        }
        CStr::from_ptr(program)
    };
    handle(SharedVault::exec(program, &list))
}

/// In a program started as a vault: is it.
///
/// # Safety
/// As for [`orrery_vault_create`]; and nothing in the program owns descriptor 3, which its starter left for this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_vault_run(
    load: Option<Function>,
    serve: Option<Function>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the functions keep to their lengths and may be called with `context`, and nothing owns
    // descriptor 3 (# Safety).
    unsafe { orrery_vault_run_with_cleanup(load, serve, None, context) }
}

/// The same with a function that drops what is not wanted any more.
///
/// # Safety
/// As for [`orrery_vault_run`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_vault_run_with_cleanup(
    load: Option<Function>,
    serve: Option<Function>,
    tidy: Option<Tidy>,
    context: *mut c_void,
) -> c_int {
    let (Some(load), Some(serve)) = (load, serve) else { return error::fail(Error::Errno(Errno::INVAL)) };
    // SAFETY: descriptor 3 is the program's starter's, and left to this (# Safety).
    error::fail(unsafe { become_vault(Functions { load, serve, tidy, context }) })
}

/// Has the vault load something.
///
/// # Safety
/// `vault` is null, or came from [`orrery_vault_create`] or [`orrery_vault_spawn`] and is not closed meanwhile;
/// `request` names `length` bytes that nobody changes meanwhile, `answer` room for `room` that does not overlap them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_vault_load(
    vault: *const SharedVault,
    request: *const c_void,
    length: usize,
    answer: *mut c_void,
    room: usize,
) -> isize {
    // SAFETY: `vault` was not closed, `request` names `length` bytes, and `answer` has room for `room` that
    // do not overlap them (# Safety); the parts are used in this call only.
    let Some((vault, request, answer)) = (unsafe { parts(vault, request, length, answer, room) }) else {
        return minus_one(&Error::Errno(Errno::INVAL));
    };
    match vault.load(request) {
        Ok(bytes) if bytes.len() <= answer.len() => {
            answer[..bytes.len()].copy_from_slice(&bytes);
            isize::try_from(bytes.len()).unwrap_or(LOAD_ROOM.cast_signed())
        }
        Ok(_) => minus_one(&Error::Errno(Errno::MSGSIZE)),
        Err(error) => minus_one(&error),
    }
}

/// Calls the vault.
///
/// # Safety
/// As for [`orrery_vault_load`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_vault_call(
    vault: *const SharedVault,
    request: *const c_void,
    length: usize,
    answer: *mut c_void,
    room: usize,
) -> isize {
    // SAFETY: `vault` was not closed, `request` names `length` bytes, and `answer` has room for `room` that
    // do not overlap them (# Safety); the parts are used in this call only.
    let Some((vault, request, answer)) = (unsafe { parts(vault, request, length, answer, room) }) else {
        return minus_one(&Error::Errno(Errno::INVAL));
    };
    match vault.call(request, answer) {
        Ok(length) => length.cast_signed(),
        Err(error) => minus_one(&error),
    }
}

/// Lets go of a vault.
///
/// # Safety
/// `vault` is null or came from [`orrery_vault_create`] or [`orrery_vault_spawn`]; nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_vault_close(vault: *mut SharedVault) {
    if !vault.is_null() {
        // SAFETY: `vault` was made by `handle` of a box, and nobody uses it any more (# Safety).
        drop(unsafe { Box::from_raw(vault) });
    }
}

/// # Safety
/// As for [`orrery_vault_load`], for as long as the parts are used.
unsafe fn parts<'a>(
    vault: *const SharedVault,
    request: *const c_void,
    length: usize,
    answer: *mut c_void,
    room: usize,
) -> Option<(&'a SharedVault, &'a [u8], &'a mut [u8])> {
    let most = isize::MAX.unsigned_abs();
    if (request.is_null() && length > 0) || (answer.is_null() && room > 0) || length > most || room > most {
        return None;
    }
    // SAFETY: `vault` was not closed, and the pointers lead to as many bytes as is said (# Safety); no slice
    // is made of a null pointer or is longer than `isize::MAX`.
    unsafe {
        let vault = vault.as_ref()?;
        let request = if length == 0 { &[] } else { core::slice::from_raw_parts(request.cast(), length) };
        let answer = if room == 0 { &mut [] } else { core::slice::from_raw_parts_mut(answer.cast(), room) };
        Some((vault, request, answer))
    }
}

fn handle(made: Result<SharedVault, Error>) -> *mut SharedVault {
    made.map_or_else(|error| no_vault(&error), |vault| Box::into_raw(Box::new(vault)))
}

fn no_vault(error: &Error) -> *mut SharedVault {
    error::fail(error);
    core::ptr::null_mut()
}

fn minus_one(error: &Error) -> isize {
    error::fail(error);
    -1
}
