//! Updates, on both sides.

use core::ffi::{c_int, c_long, c_ulong, c_void};

use orrery_orbit::{Future, OPERATION_ARGUMENTS, Record, Scratch, Update};
use orrery_sys::PageRange;
use orrery_sys::maps::{Access, Maps};

use super::call::future;
use super::{Refused, clear_errno, refuse, status};

/// `orrery_orbit_operation`.
pub type Operation = unsafe extern "C" fn(usize, *mut usize) -> usize;

/// Mirrors `struct orrery_orbit_update` of the header.
#[repr(C)]
#[derive(Debug)]
pub struct COrbitUpdate {
    records: *mut Inside,
}

/// The content of an update: what arrived, or what will be sent.
#[derive(Debug)]
enum Inside {
    /// On its way out, in memory that `orrery_orbit_update_create` gave.
    Outgoing(Scratch),
    /// An update that arrived from an orbit.
    Arrived(Arrived),
}

/// An update with its records as C reads them.
#[derive(Debug)]
struct Arrived {
    update: Update,
    list: Vec<CRecord>,
    /// What the list's arguments are in.
    _words: Vec<Box<[c_ulong]>>,
}

/// Mirrors `struct orrery_orbit_record` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CRecord {
    kind: c_int,
    data: *const c_void,
    size: usize,
    address: *mut c_void,
    operation: Option<Operation>,
    count: usize,
    arguments: *const c_ulong,
}

const DATA: c_int = 1;
const MODIFY: c_int = 2;
const OPERATION: c_int = 3;

/// Calls a function of one pointer: `orrery_orbit_update_add_call` sends this with the function and its argument.
unsafe extern "C" fn call_one(count: usize, arguments: *mut usize) -> usize {
    if count != 2 {
        return 0;
    }
    // SAFETY: called with as many arguments as it is told; the first was found to be code before the update
    // was given out, and the task vouched for its type.
    unsafe {
        let function = core::ptr::with_exposed_provenance::<c_void>(arguments.read());
        let function =
            core::mem::transmute::<*const c_void, unsafe extern "C" fn(*mut c_void) -> c_int>(function);
        let argument = core::ptr::with_exposed_provenance_mut(arguments.add(1).read());
        function(argument).cast_unsigned() as usize
    }
}

/// Returns whether all functions that [`call_one`] is to call are code; what is called directly was checked before.
fn calls_are_sound(update: &Update) -> bool {
    let targets: Vec<usize> = update
        .records()
        .filter_map(|record| match record {
            Record::Operation { function, arguments } if function == call_one as *const () as usize => {
                Some(words_of(arguments).first().map_or(0, |word| usize::try_from(*word).unwrap_or(0)))
            }
            _ => None,
        })
        .collect();
    if targets.is_empty() {
        return true;
    }
    let Ok(maps) = Maps::open() else { return false };
    let mut buffer = vec![0; 8192];
    targets.into_iter().all(|target| {
        let mut is_code = false;
        let looked = maps.for_each_in(PageRange::covering(target, 1), &mut buffer, |line| {
            is_code |= line.range.contains(target) && line.access.contains(Access::EXECUTE);
            Ok(())
        });
        looked.is_ok() && is_code
    })
}

fn words_of(bytes: &[u8]) -> Box<[c_ulong]> {
    bytes.as_chunks().0.iter().map(|word| c_ulong::from_ne_bytes(*word)).collect()
}

/// Implements `orrery_orbit_update_create`.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_orbit_update_create() -> *mut COrbitUpdate {
    if !orrery_orbit::is_orbit() {
        refuse(libc::EPERM, "updates are made by tasks that run in an orbit: this process is none");
        return core::ptr::null_mut();
    }
    let records = Box::into_raw(Box::new(Inside::Outgoing(Scratch::new())));
    Box::into_raw(Box::new(COrbitUpdate { records }))
}

/// Returns the inside of an update.
///
/// # Safety
/// The update is null or one of the library's that was not freed, and no other call uses it meanwhile.
unsafe fn inside<'a>(update: *mut COrbitUpdate) -> Result<&'a mut Inside, Refused> {
    // SAFETY: the update is null or one of the library's that was not freed and that no other call uses
    // (# Safety); its records are null or a box of the library's.
    unsafe { update.as_ref().and_then(|update| update.records.as_mut()) }
        .ok_or_else(|| refuse(libc::EINVAL, "this is no update, or there is nothing in it"))
}

/// # Safety
/// As for [`inside`].
unsafe fn outgoing<'a>(update: *mut COrbitUpdate) -> Result<&'a mut Scratch, Refused> {
    // SAFETY: the update is null or one of the library's that was not freed and that no other call uses
    // (# Safety).
    match unsafe { inside(update)? } {
        Inside::Outgoing(scratch) => Ok(scratch),
        Inside::Arrived(_) => Err(refuse(libc::EINVAL, "an update that arrived cannot be added to or sent")),
    }
}

/// # Safety
/// As for [`inside`].
unsafe fn arrived<'a>(update: *mut COrbitUpdate) -> Result<&'a mut Arrived, Refused> {
    // SAFETY: the update is null or one of the library's that was not freed and that no other call uses
    // (# Safety).
    match unsafe { inside(update)? } {
        Inside::Arrived(arrived) => Ok(arrived),
        Inside::Outgoing(_) => Err(refuse(libc::EINVAL, "this update was not received: it is for sending")),
    }
}

/// # Safety
/// The pointer leads to as many bytes, or there are none.
unsafe fn bytes<'a>(data: *const c_void, size: usize) -> Result<&'a [u8], Refused> {
    match size {
        0 => Ok(&[]),
        _ if data.is_null() => Err(refuse(libc::EINVAL, "a null pointer in place of an update's bytes")),
        // SAFETY: the pointer is not null, so it leads to `size` bytes that stay for this call (# Safety).
        _ => Ok(unsafe { core::slice::from_raw_parts(data.cast(), size) }),
    }
}

/// Implements `orrery_orbit_update_add_data`.
///
/// # Safety
/// The update is null or one of the library's, and no other call uses it meanwhile; the data is as long as is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_update_add_data(
    update: *mut COrbitUpdate,
    data: *const c_void,
    size: usize,
) -> c_int {
    // SAFETY: the update is null or one of the library's that no other call uses meanwhile, and `data` leads
    // to `size` bytes (# Safety).
    status(unsafe {
        outgoing(update).and_then(|scratch| {
            scratch.data(bytes(data, size)?);
            Ok(())
        })
    })
}

/// Implements `orrery_orbit_update_add_modify`.
///
/// # Safety
/// As for [`orrery_orbit_update_add_data`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_update_add_modify(
    update: *mut COrbitUpdate,
    address: *mut c_void,
    data: *const c_void,
    size: usize,
) -> c_int {
    // SAFETY: the update is null or one of the library's that no other call uses meanwhile, and `data` leads
    // to `size` bytes (# Safety).
    status(unsafe {
        outgoing(update).and_then(|scratch| {
            scratch.modify(address.cast_const().cast::<u8>(), bytes(data, size)?);
            Ok(())
        })
    })
}

/// Implements `orrery_orbit_update_add_operation`.
///
/// # Safety
/// As for [`orrery_orbit_update_add_data`], for the arguments; the operation is of its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_update_add_operation(
    update: *mut COrbitUpdate,
    operation: Option<Operation>,
    count: usize,
    arguments: *const c_ulong,
) -> c_int {
    // SAFETY: the update is null or one of the library's that no other call uses meanwhile (# Safety).
    let added = unsafe { outgoing(update) }.and_then(|scratch| {
        let operation = operation.ok_or_else(|| refuse(libc::EINVAL, "an operation without a function"))?;
        if count > OPERATION_ARGUMENTS || count > 0 && arguments.is_null() {
            let text =
                format!("an operation has up to {OPERATION_ARGUMENTS} arguments, and these are not null");
            return Err(refuse(libc::EINVAL, &text));
        }
        // SAFETY: there are `count` arguments (# Safety), and the pointer to them is not null, as was
        // checked.
        let words: Vec<usize> =
            (0..count).map(|at| unsafe { arguments.add(at).cast::<usize>().read() }).collect();
        scratch.operation(operation, &words);
        Ok(())
    });
    status(added)
}

/// Implements `orrery_orbit_update_add_call`.
///
/// # Safety
/// The update is null or one of the library's, and no other call uses it meanwhile; the function is of its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_update_add_call(
    update: *mut COrbitUpdate,
    function: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: the update is null or one of the library's that no other call uses meanwhile (# Safety).
    let added = unsafe { outgoing(update) }.and_then(|scratch| {
        let function = function.ok_or_else(|| refuse(libc::EINVAL, "a call without a function"))?;
        scratch.operation(call_one, &[function as *const () as usize, argument.expose_provenance()]);
        Ok(())
    });
    status(added)
}

/// Implements `orrery_orbit_push`.
///
/// # Safety
/// The update is null or one of the library's, and no other call uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_push(update: *mut COrbitUpdate) -> c_long {
    // SAFETY: the update is null or one of the library's that no other call uses meanwhile (# Safety).
    let sent = unsafe { outgoing(update) }.and_then(|scratch| Ok(orrery_orbit::send(scratch)?));
    status(sent).into()
}

/// Implements `orrery_orbit_pull`.
///
/// # Safety
/// The future is null or one that was not freed; the update is null or writable, and holds nothing that is still
/// needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_pull(place: *mut Future, update: *mut COrbitUpdate) -> c_long {
    // SAFETY: the future is null or was not freed (# Safety).
    let pulled = unsafe { future(place) }.and_then(|future| {
        if update.is_null() {
            return Err(refuse(libc::EINVAL, "a null pointer in place of an update"));
        }
        match future.receive()? {
            Some(update) if calls_are_sound(&update) => Ok(Some(update)),
            Some(update) => {
                let text =
                    format!("an update of call {} was refused: it calls what is no function", update.call());
                Err(refuse(libc::EBADMSG, &text))
            }
            // Over; how it ended may be an error.
            None => Ok(future.get().map(|_| None)?),
        }
    });
    let (answer, records) = match pulled {
        Ok(Some(arrived)) => (1, Box::into_raw(Box::new(Inside::Arrived(Arrived::new(arrived))))),
        Ok(None) => {
            clear_errno();
            (0, core::ptr::null_mut())
        }
        Err(Refused) => (-1, core::ptr::null_mut()),
    };
    if !update.is_null() {
        // SAFETY: the update was checked against null, and so is writable; what it held is not needed any
        // more (# Safety).
        unsafe { update.write(COrbitUpdate { records }) };
    }
    answer
}

impl Arrived {
    fn new(update: Update) -> Self {
        let empty = CRecord {
            kind: 0,
            data: core::ptr::null(),
            size: 0,
            address: core::ptr::null_mut(),
            operation: None,
            count: 0,
            arguments: core::ptr::null(),
        };
        let mut words = Vec::new();
        let record = |record: Record<'_>| match record {
            Record::Modify { address, bytes } => CRecord {
                kind: MODIFY,
                data: bytes.as_ptr().cast(),
                size: bytes.len(),
                address: core::ptr::with_exposed_provenance_mut(address),
                ..empty
            },
            Record::Operation { function, arguments } => {
                let arguments = words_of(arguments);
                let (count, place) = (arguments.len(), arguments.as_ptr());
                words.push(arguments);
                let function = core::ptr::with_exposed_provenance::<c_void>(function);
                // SAFETY: a pointer that is not null and was found to lead to code; whoever calls it vouches
                // for its type.
                let operation = unsafe { core::mem::transmute::<*const c_void, Option<Operation>>(function) };
                CRecord { kind: OPERATION, operation, count, arguments: place, ..empty }
            }
            Record::Data(bytes) => {
                CRecord { kind: DATA, data: bytes.as_ptr().cast(), size: bytes.len(), ..empty }
            }
            // What is not known here is shown as data without bytes.
            _ => CRecord { kind: DATA, ..empty },
        };
        // The records' bytes stay where they are when the update moves: they are on the heap.
        let list = update.records().map(record).collect();
        Self { update, list, _words: words }
    }
}

/// Implements `orrery_orbit_update_first`.
///
/// # Safety
/// The update is null or one that `orrery_orbit_pull` filled in and that was not destroyed; no other call uses it
/// meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_update_first(update: *mut COrbitUpdate) -> *const CRecord {
    // SAFETY: the update is null or was filled in by `orrery_orbit_pull` and not destroyed (# Safety).
    unsafe { arrived(update) }
        .ok()
        .and_then(|arrived| arrived.list.first())
        .map_or(core::ptr::null(), core::ptr::from_ref)
}

/// Implements `orrery_orbit_update_next`.
///
/// # Safety
/// As for [`orrery_orbit_update_first`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_update_next(
    update: *mut COrbitUpdate,
    record: *const CRecord,
) -> *const CRecord {
    // SAFETY: the update is null or was filled in by `orrery_orbit_pull` and not destroyed (# Safety).
    let next = unsafe { arrived(update) }.and_then(|arrived| {
        let at = index(arrived, record)?;
        Ok(arrived.list.get(at + 1).map_or(core::ptr::null(), core::ptr::from_ref))
    });
    next.unwrap_or(core::ptr::null())
}

/// Returns which record of the update this is.
fn index(arrived: &Arrived, record: *const CRecord) -> Result<usize, Refused> {
    let found = arrived.list.iter().position(|one| core::ptr::eq(one, record));
    found.ok_or_else(|| refuse(libc::EINVAL, "this is no record of this update"))
}

/// Implements `orrery_orbit_apply`.
///
/// # Safety
/// As for [`orrery_orbit_update_first`]; what the task wishes is good for the program, and no function
/// that it has called uses this update.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_apply(update: *mut COrbitUpdate) -> c_int {
    // SAFETY: the update is null or was filled in by `orrery_orbit_pull`, and no function that it has called
    // uses it (# Safety).
    status(unsafe { arrived(update) }.and_then(|arrived| {
        // SAFETY: the areas of the update are not used during this call, by the caller's contract.
        unsafe { arrived.update.apply() }.map_err(|reason| refuse(libc::EBADMSG, &reason))
    }))
}

/// Implements `orrery_orbit_apply_record`.
///
/// # Safety
/// As for [`orrery_orbit_apply`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_apply_record(
    update: *mut COrbitUpdate,
    record: *const CRecord,
) -> c_int {
    // SAFETY: the update is null or was filled in by `orrery_orbit_pull`, and no function that it has called
    // uses it (# Safety).
    status(unsafe { arrived(update) }.and_then(|arrived| {
        let at = index(arrived, record)?;
        let Some(record) = arrived.update.records().nth(at) else {
            return Err(refuse(libc::EINVAL, "this is no record of this update"));
        };
        // SAFETY: the record's destination is not used during this call, by the caller's contract.
        unsafe { record.apply() }.map(drop).map_err(|reason| refuse(libc::EBADMSG, &reason))
    }))
}

/// Implements `orrery_orbit_update_destroy`.
///
/// # Safety
/// The update is null, came from `orrery_orbit_update_create`, or was filled in by `orrery_orbit_pull`; it is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_update_destroy(update: *mut COrbitUpdate) {
    // SAFETY: the update is null or one of this library's, and nobody uses it any more (# Safety).
    let Some(place) = (unsafe { update.as_mut() }) else { return };
    let records = core::mem::replace(&mut place.records, core::ptr::null_mut());
    if records.is_null() {
        return;
    }
    // SAFETY: `orrery_orbit_update_create` or `orrery_orbit_pull` made the records of a box, and nobody uses
    // them any more (# Safety).
    if let Inside::Outgoing(_) = *unsafe { Box::from_raw(records) } {
        // The structure around it is the library's, too.
        // SAFETY: the update was made by `orrery_orbit_update_create` or `orrery_orbit_pull`, and is not used
        // after this call.
        drop(unsafe { Box::from_raw(update) });
    }
}
