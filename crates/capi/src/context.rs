//! `orrery/context.h`: contexts, by the paper's names.

use core::cell::RefCell;
use core::ffi::{c_int, c_uint, c_void};
use core::time::Duration;

use orrery_lwc::context::{
    self, Arrival, Context, Created, Error, Overlay, Result, Spec, create_here, remove_overlay,
};
use orrery_sys::PAGE;

use crate::error;

const VM: c_int = 1;
const FD: c_int = 2;
const COW: c_uint = 0x1;
const SHARE: c_uint = 0x2;
const UNMAP: c_uint = 0x4;
const MAY_ACCESS: c_uint = 0x8;
const SHARED_SIGNALS: c_uint = 0x1;
const DUMPABLE: c_uint = 0x2;

thread_local! {
    /// The bytes of the last arrival.
    static RECEIVED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// `struct lwc_spec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LwcSpec {
    kind: c_int,
    how: c_uint,
    start: usize,
    length: usize,
}

/// Creates a context; returns in the creator, and in the context when somebody switches to it.
///
/// # Safety
/// `specs` names `count` specifications or is null with 0; what they share or unmap is the caller's to share or unmap.
/// `caller` and `args` are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lwCreate(
    specs: *const LwcSpec,
    count: usize,
    options: c_uint,
    caller: *mut c_int,
    args: *mut u64,
) -> c_int {
    if caller.is_null() || args.is_null() {
        return error::fail_context(invalid("lwCreate", 0));
    }
    // SAFETY: the caller's promise.
    let created = unsafe { list(specs, count) }.and_then(|specs| {
        // SAFETY: as above.
        let spec = unsafe { specification(specs, options) }?;
        create_here(&spec)
    });
    match created {
        Ok(Created::Creator(context)) => {
            // SAFETY: checked above, and the caller's promise.
            unsafe { caller.write(-1) };
            context.descriptor()
        }
        Ok(Created::Context(start)) => {
            // SAFETY: as above; this is the context's copy of the caller's frame.
            unsafe {
                args.write(start.arrival.word);
                caller.write(arrived(start.arrival));
            }
            start.creator.descriptor()
        }
        Err(error) => error::fail_context(error),
    }
}

/// Switches to another context.
///
/// # Safety
/// `result` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lwSwitch(target: c_int, args: u64, result: *mut u64) -> c_int {
    let outcome = Context::of_descriptor(target).and_then(|context| context.switch(args, &[]));
    // SAFETY: the caller's promise.
    unsafe { finish(outcome, result) }
}

/// Switches to another context with bytes, and for a limited time.
///
/// # Safety
/// `bytes` names `length` bytes or is null with 0; `result` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lwSwitchBytes(
    target: c_int,
    args: u64,
    bytes: *const c_void,
    length: usize,
    limit: c_uint,
    result: *mut u64,
) -> c_int {
    if (bytes.is_null() && length != 0) || length > isize::MAX.unsigned_abs() {
        return error::fail_context(invalid("lwSwitchBytes", length));
    }
    let bytes = if length == 0 {
        &[]
    } else {
        // SAFETY: the caller's promise.
        unsafe { core::slice::from_raw_parts(bytes.cast::<u8>(), length) }
    };
    let outcome = Context::of_descriptor(target).and_then(|context| match limit {
        0 => context.switch(args, bytes),
        limit => context.switch_within(args, bytes, Duration::from_millis(limit.into())),
    });
    // SAFETY: the caller's promise.
    unsafe { finish(outcome, result) }
}

/// The bytes of the last arrival.
///
/// # Safety
/// `buffer` is valid for `room` bytes, or null with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lwReceived(buffer: *mut c_void, room: usize) -> usize {
    RECEIVED.with_borrow(|received| {
        if !buffer.is_null() {
            // SAFETY: no more than fits, and the caller's promise.
            unsafe {
                let length = received.len().min(room);
                core::ptr::copy_nonoverlapping(received.as_ptr(), buffer.cast(), length);
            }
        }
        received.len()
    })
}

/// Narrows what a descriptor allows.
///
/// # Safety
/// `specs` names `count` specifications or is null with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lwRestrict(target: c_int, specs: *const LwcSpec, count: usize) -> c_int {
    // SAFETY: the caller's promise.
    let outcome = unsafe { list(specs, count) }.and_then(|specs| {
        let keep = specs.iter().map(|spec| match spec.kind {
            VM => Ok((spec.start, bytes_of(spec))),
            kind => Err(invalid("lwRestrict", kind.unsigned_abs() as usize)),
        });
        let keep = keep.collect::<Result<Vec<_>>>()?;
        Context::of_descriptor(target)?.restrict(&keep)
    });
    outcome.map_or_else(error::fail_context, |()| 0)
}

/// Maps memory of another context, or removes it again.
///
/// # Safety
/// `specs` names `count` specifications or is null with 0; the memory that they name is the caller's to give up.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lwOverlay(target: c_int, specs: *const LwcSpec, count: usize) -> c_int {
    // SAFETY: the caller's promise.
    let outcome = unsafe { list(specs, count) }.and_then(|specs| {
        if let Some(odd) =
            specs.iter().find(|spec| spec.kind != VM || ![COW, SHARE, UNMAP].contains(&spec.how))
        {
            return Err(invalid("lwOverlay", odd.how as usize));
        }
        let context = Context::of_descriptor(target)?;
        specs.iter().try_for_each(|spec| {
            let start = core::ptr::with_exposed_provenance(spec.start);
            // SAFETY: the caller's promise.
            unsafe {
                match spec.how {
                    COW => context.overlay(start, bytes_of(spec), Overlay::Copy),
                    SHARE => context.overlay(start, bytes_of(spec), Overlay::Share),
                    _ => remove_overlay(start, bytes_of(spec)),
                }
            }
        })
    });
    outcome.map_or_else(error::fail_context, |()| 0)
}

/// Closes a descriptor of a context.
#[unsafe(no_mangle)]
pub extern "C" fn lwClose(target: c_int) -> c_int {
    Context::of_descriptor(target).and_then(Context::close).map_or_else(error::fail_context, |()| 0)
}

/// Notes what arrived; gives the caller's descriptor.
fn arrived(arrival: Arrival) -> c_int {
    RECEIVED.replace(arrival.bytes);
    arrival.caller.descriptor()
}

/// # Safety
/// `result` is null or valid for a write.
unsafe fn finish(outcome: Result<Arrival>, result: *mut u64) -> c_int {
    match outcome {
        Ok(arrival) => {
            if !result.is_null() {
                // SAFETY: the caller's promise.
                unsafe { result.write(arrival.word) };
            }
            arrived(arrival)
        }
        Err(error) => error::fail_context(error),
    }
}

/// # Safety
/// `specs` names `count` specifications that stay, or is null with 0.
unsafe fn list<'a>(specs: *const LwcSpec, count: usize) -> Result<&'a [LwcSpec]> {
    match (specs.is_null(), count) {
        (_, 0) => Ok(&[]),
        (false, 1..=65_536) => {
            // SAFETY: the caller's promise.
            Ok(unsafe { core::slice::from_raw_parts(specs, count) })
        }
        _ => Err(invalid("a list of specifications", count)),
    }
}

/// # Safety
/// What the specifications share or unmap is the caller's to share or unmap.
unsafe fn specification(specs: &[LwcSpec], options: c_uint) -> Result<Spec> {
    if options & !(SHARED_SIGNALS | DUMPABLE) != 0 {
        return Err(invalid("the options of lwCreate", options as usize));
    }
    let mut spec =
        Spec::new().shared_signals(options & SHARED_SIGNALS != 0).dumpable(options & DUMPABLE != 0);
    for one in specs {
        let odd = || invalid("a specification of lwCreate", one.how as usize);
        match one.kind {
            VM => {
                let start = core::ptr::with_exposed_provenance(one.start);
                spec = match one.how & !MAY_ACCESS {
                    // SAFETY: the caller's promise.
                    SHARE => unsafe { spec.share(start, bytes_of(one)) },
                    // SAFETY: the caller's promise.
                    UNMAP => unsafe { spec.unmap(start, bytes_of(one)) },
                    COW => spec,
                    0 if one.how != 0 => spec,
                    _ => return Err(odd()),
                };
                if one.how & MAY_ACCESS != 0 {
                    spec = spec.may_access(one.start, bytes_of(one));
                }
            }
            FD => {
                let first = u32::try_from(one.start).map_err(|_| odd())?;
                let count = u32::try_from(one.length).unwrap_or(u32::MAX);
                match one.how {
                    COW => {}
                    UNMAP if count > 0 => {
                        spec = spec.close_descriptors(first, first.saturating_add(count - 1));
                    }
                    _ => return Err(odd()),
                }
            }
            _ => return Err(odd()),
        }
    }
    Ok(spec)
}

/// The length of a range of memory; `LWC_ALL` is up to the last page.
fn bytes_of(spec: &LwcSpec) -> usize {
    match spec.length {
        usize::MAX => (usize::MAX & !(PAGE - 1)).saturating_sub(spec.start),
        length => length,
    }
}

fn invalid(operation: &'static str, value: usize) -> context::Error {
    Error::System(orrery_sys::Error::new(operation, value, rustix::io::Errno::INVAL))
}
