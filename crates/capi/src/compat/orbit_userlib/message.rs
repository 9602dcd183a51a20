//! What travels from a task to main, and how main receives it.
//!
//! A message is one record of bytes beneath ([`orrery_orbit::Scratch::data`]): three words (what it is, where it was in
//! the orbit, how many records it has) and the bytes.

use core::ffi::{c_int, c_ulong, c_void};
use std::sync::Arc;

use orrery_orbit::{Area, Error, Record};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use super::call::pending;
use super::registry::{Known, lock};
use super::{Outcome, Scratch, Task, Update, fail, records, refuse};

const UPDATE: u64 = 1;
const SCRATCH: u64 = 2;
const HEAD: usize = 24;
const PAGE: usize = 4096;
/// `ORBIT_BUFFER_MAX`.
const BUFFER: usize = 1024;

/// Sends a message.
fn send(kind: u64, address: usize, count: usize, bytes: &[u8]) -> c_int {
    let mut message = Vec::with_capacity(HEAD + bytes.len());
    for word in [kind, address as u64, count as u64] {
        message.extend(word.to_ne_bytes());
    }
    message.extend(bytes);
    let mut scratch = orrery_orbit::Scratch::new();
    scratch.data(&message);
    orrery_orbit::send(&mut scratch).map_or_else(|error| refuse(&error), |()| 0)
}

/// Implements `orbit_send`.
///
/// # Safety
/// The update is null, or is followed by as many bytes as it says, and nobody changes it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_send(update: *const Update) -> c_ulong {
    // SAFETY: the update is null or leads to one that stays as it is for this call (# Safety).
    let Some(known) = (unsafe { update.as_ref() }) else {
        return minus(fail(libc::EINVAL, "an update at a null pointer"));
    };
    // SAFETY: an update is followed by its data, as many bytes as its length says, by the caller's contract.
    let bytes = unsafe { core::slice::from_raw_parts(update.add(1).cast::<u8>(), known.length) };
    minus(send(UPDATE, known.address.addr(), known.length, bytes))
}

/// -1 in the type that these functions have.
fn minus(result: c_int) -> c_ulong {
    i64::from(result).cast_unsigned()
}

/// Implements `orbit_sendv`.
///
/// # Safety
/// The scratch is null or one that was made with the functions for that, and nobody else uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_sendv(scratch: *mut Scratch) -> c_int {
    // SAFETY: the scratch is null or one that was made, and nobody else uses it meanwhile (# Safety).
    let Some(scratch) = (unsafe { scratch.as_mut() }) else {
        return fail(libc::EINVAL, "a scratch at a null pointer");
    };
    // SAFETY: the caller's scratch is valid and not used during this call, by the contract of this function.
    unsafe { super::scratch::orrery_authors_scratch_close_any(scratch) };
    if scratch.start.is_null() {
        return fail(libc::EINVAL, "a scratch that orbit_scratch_create did not make");
    }
    // SAFETY: the scratch has been filled from its start to its cursor.
    let bytes = unsafe { core::slice::from_raw_parts(scratch.start.cast::<u8>(), scratch.cursor) };
    let sent = send(SCRATCH, scratch.start.expose_provenance(), scratch.count, bytes);
    if sent == 0 {
        super::scratch::was_sent(scratch);
    }
    sent
}

/// Implements `orbit_commit`.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_authors_commit() -> c_ulong {
    minus(fail(libc::ENOSYS, "orbit_commit would change main's memory behind its back: send updates instead"))
}

/// A message that arrived from the orbit.
struct Message {
    kind: u64,
    address: usize,
    count: usize,
    bytes: Vec<u8>,
}

impl Message {
    fn parse(update: &orrery_orbit::Update) -> Option<Self> {
        let Some(Record::Data(data)) = update.records().next() else { return None };
        let (head, bytes) = data.split_at_checked(HEAD)?;
        let (words, _) = head.as_chunks::<8>();
        let [kind, address, count] = [0, 1, 2].map(|index| u64::from_ne_bytes(words[index]));
        let number = |word| usize::try_from(word).ok();
        Some(Self { kind, address: number(address)?, count: number(count)?, bytes: bytes.to_vec() })
    }
}

/// How a wait ended.
enum Received {
    Message(Arc<Known>, Message),
    Over(c_ulong),
}

/// Waits for what comes next of a call.
///
/// # Safety
/// The task is null or one that `orbit_call_async` filled in and whose orbit's record was not freed.
unsafe fn receive(task: *const Task) -> Result<Received, c_int> {
    // SAFETY: the task is null or was filled in by `orbit_call_async`, and its orbit's record was not freed
    // (# Safety).
    let found = unsafe { pending(task) };
    let Some((known, number, call)) = found else {
        return Err(fail(libc::EINVAL, "there is no such call, or it was received to its end"));
    };
    match call.future.receive() {
        Ok(Some(update)) => match Message::parse(&update) {
            Some(message) => Ok(Received::Message(known, message)),
            None => Err(fail(libc::EBADMSG, "what arrived is no update of orbit_send or orbit_sendv")),
        },
        Ok(None) => {
            let value = call.future.get();
            lock(&known.calls).open.remove(&number);
            match value {
                Ok(value) => Ok(Received::Over(value.cast_unsigned())),
                Err(error) => Err(refuse(&error)),
            }
        }
        Err(error @ Error::BadUpdate { .. }) => Err(refuse(&error)),
        Err(error) => {
            lock(&known.calls).open.remove(&number);
            Err(refuse(&error))
        }
    }
}

/// Implements `orbit_recv`.
///
/// # Safety
/// As for `orbit_recvv`; the update has room for `ORBIT_BUFFER_MAX` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_recv(task: *const Task, update: *mut Update) -> c_ulong {
    if update.is_null() {
        return minus(fail(libc::EINVAL, "no room for an update"));
    }
    // SAFETY: the task is null or was filled in by `orbit_call_async`, and its orbit's record was not freed
    // (# Safety).
    match unsafe { receive(task) } {
        Ok(Received::Message(_, message)) if message.kind == UPDATE => {
            let length = message.bytes.len().min(BUFFER);
            // SAFETY: the update was checked against null and has room for `ORBIT_BUFFER_MAX` bytes behind
            // its head (# Safety), and no more than that are copied.
            unsafe {
                let address = core::ptr::with_exposed_provenance_mut(message.address);
                update.write(Update { address, length });
                update.add(1).cast::<u8>().copy_from_nonoverlapping(message.bytes.as_ptr(), length);
            }
            0
        }
        Ok(Received::Message(..)) => {
            minus(fail(libc::EBADMSG, "a scratch arrived: receive it with orbit_recvv"))
        }
        Ok(Received::Over(_)) => minus(fail(libc::ENODATA, "the task has returned, and there is no more")),
        Err(failed) => minus(failed),
    }
}

/// Implements `orbit_recvv`.
///
/// # Safety
/// The task is null or one that `orbit_call_async` filled in and whose orbit's record was not freed; the result is
/// null or room for one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_recvv(result: *mut Outcome, task: *const Task) -> c_int {
    // SAFETY: the task is null or was filled in by `orbit_call_async`, and its orbit's record was not freed
    // (# Safety).
    let received = match unsafe { receive(task) } {
        Ok(received) => received,
        Err(failed) => return failed,
    };
    let (outcome, status) = match received {
        Received::Over(value) => (Outcome { value }, 0),
        Received::Message(known, message) => match unpack(&known, message) {
            Some(scratch) => (Outcome { scratch }, 1),
            None => return fail(libc::EBADMSG, "a scratch whose records do not add up was refused"),
        },
    };
    if !result.is_null() {
        // SAFETY: the result was checked against null, and so has room for one (# Safety).
        unsafe { result.write(outcome) };
    }
    status
}

/// Puts a message where main can read it.
fn unpack(known: &Known, message: Message) -> Option<Scratch> {
    let Message { kind, address, count, bytes } = message;
    let (bytes, count, address) = match kind {
        UPDATE => (records::update(address, &bytes), 1, None),
        SCRATCH => (bytes, count, Some(address)),
        _ => return None,
    };
    if !records::add_up(&bytes, count) {
        return None;
    }
    let place = address.filter(|address| put_back(*address, &bytes)).unwrap_or_else(|| {
        let mut buffer = vec![0_u64; bytes.len().div_ceil(8)];
        // SAFETY: the buffer has at least as many bytes.
        unsafe { buffer.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        lock(&known.calls).keep(buffer)
    });
    Some(Scratch {
        start: core::ptr::with_exposed_provenance_mut(place),
        cursor: 0,
        limit: bytes.len(),
        count,
        open: core::ptr::null_mut(),
    })
}

/// Puts bytes to the address that they had in the orbit, if that is a place for scratches here, or free.
fn put_back(address: usize, bytes: &[u8]) -> bool {
    let Some(end) = address.checked_add(bytes.len()).filter(|_| !bytes.is_empty()) else { return false };
    let target = core::ptr::with_exposed_provenance_mut::<c_void>(address);
    let area = Area::containing(target.cast_const());
    let free = || {
        let start = address & !(PAGE - 1);
        let Some(len) = end.checked_next_multiple_of(PAGE).map(|end| end - start) else { return false };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let place = core::ptr::with_exposed_provenance_mut(start);
        // SAFETY: with `FIXED_NOREPLACE` the mapping replaces no other one.
        unsafe { mmap_anonymous(place, len, access, MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE) }.is_ok()
            || super::scratch::is_landing(start, len)
    };
    let fits = match &area {
        Some(area) => {
            end <= area.base() + area.capacity() && super::scratch::may_hold_scratches(area, address, end)
        }
        None => free(),
    };
    if fits {
        if area.is_none() {
            super::scratch::note_landing(address & !(PAGE - 1), end.next_multiple_of(PAGE));
        }
        // SAFETY: memory of a pool that holds nothing but scratches, or memory that was mapped for this.
        unsafe { target.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
    fits
}
