//! `orrery/context.h`: contexts, by the paper's names.

use core::cell::{Cell, RefCell};
use core::ffi::{c_char, c_int, c_long, c_uint, c_void};
use core::time::Duration;
use std::os::fd::BorrowedFd;

use orrery_context::{
    self as context, Arrival, Call, Calls, Context, Created, Error, Forked, FromCaller, Overlay, Result,
    Rights, Spec, create_here, remove_overlay,
};
use orrery_sys::PAGE;

use crate::error;

const VM: c_int = 1;
const FD: c_int = 2;
const SYSCALL: c_int = 3;
const CRED: c_int = 4;
const COW: c_uint = 0x1;
const SHARE: c_uint = 0x2;
const UNMAP: c_uint = 0x4;
const MAY_ACCESS: c_uint = 0x8;
const SHARED_SIGNALS: c_uint = 0x1;
const DUMPABLE: c_uint = 0x2;
const SYSTRAP: c_uint = 0x4;
const ALONE: c_uint = 0x8;
const ISOLATED: c_uint = 0x10;
const NOT_ISOLATED: c_uint = 0x20;

/// How many descriptors one specification of orrery_context_overlay names at most.
const MOST_DESCRIPTORS: u32 = 4096;

thread_local! {
    /// The bytes of the last arrival.
    static RECEIVED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// The system call by which control last came.
    static CALLED: Cell<Option<Call>> = const { Cell::new(None) };
}

/// Mirrors `struct orrery_context_spec` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ContextSpec {
    kind: c_int,
    how: c_uint,
    start: usize,
    length: usize,
}

/// Mirrors `struct orrery_context_call` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ContextCall {
    number: c_long,
    args: [u64; 6],
}

/// Creates a context; returns in the creator, and in the context when somebody switches to it.
///
/// # Safety
/// `specs` names `count` specifications, which nobody changes meanwhile, or is null with 0; what they share
/// or unmap is the caller's to share or unmap.
/// `caller` and `args` are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_create(
    specs: *const ContextSpec,
    count: usize,
    options: c_uint,
    caller: *mut c_int,
    args: *mut u64,
) -> c_int {
    if caller.is_null() || args.is_null() {
        return error::fail(invalid("orrery_context_create", 0));
    }
    // SAFETY: `specs` is null with 0 or names `count` specifications that stay as they are for this call
    // (# Safety).
    let created = unsafe { list(specs, count) }.and_then(|specs| {
        // SAFETY: the specifications and the options are valid by the contract of this function.
        let spec = unsafe { specification(specs, options) }?;
        create_here(&spec)
    });
    match created {
        Ok(Created::Creator(context)) => {
            // SAFETY: `caller` was checked against null above, and so is valid for a write (# Safety).
            unsafe { caller.write(-1) };
            context.descriptor()
        }
        Ok(Created::Context(start)) => {
            // SAFETY: `args` was checked against null; the pointer leads to the context's own copy of the
            // caller's frame.
            unsafe {
                args.write(start.arrival.word);
                caller.write(arrived(start.arrival));
            }
            start.creator.descriptor()
        }
        Err(error) => error::fail(error),
    }
}

/// Switches to another context.
///
/// # Safety
/// `result` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_switch(target: c_int, args: u64, result: *mut u64) -> c_int {
    let outcome = named(target).and_then(|context| context.switch(args, &[]));
    // SAFETY: `result` is null or valid for a write (# Safety).
    unsafe { finish(outcome, result) }
}

/// Switches to another context with bytes, and for a limited time.
///
/// # Safety
/// `bytes` names `length` bytes or is null with 0; `result` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_switch_bytes(
    target: c_int,
    args: u64,
    bytes: *const c_void,
    length: usize,
    limit: c_uint,
    result: *mut u64,
) -> c_int {
    if (bytes.is_null() && length != 0) || length > isize::MAX.unsigned_abs() {
        return error::fail(invalid("orrery_context_switch_bytes", length));
    }
    let bytes = if length == 0 {
        &[]
    } else {
        // SAFETY: `length` is not 0, so `bytes` is not null (checked above); it names `length` bytes
        // (# Safety), which are no more than `isize::MAX`.
        unsafe { core::slice::from_raw_parts(bytes.cast::<u8>(), length) }
    };
    let outcome = named(target).and_then(|context| match limit {
        0 => context.switch(args, bytes),
        limit => context.switch_within(args, bytes, Duration::from_millis(limit.into())),
    });
    // SAFETY: `result` is null or valid for a write (# Safety).
    unsafe { finish(outcome, result) }
}

/// Returns the bytes of the last arrival.
///
/// # Safety
/// `buffer` is valid for `room` bytes, or null with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_received(buffer: *mut c_void, room: usize) -> usize {
    RECEIVED.with_borrow(|received| {
        if !buffer.is_null() {
            // SAFETY: `length` is at most `room`, for which `buffer` is valid (# Safety), and `received` is
            // this library's own memory, which the buffer does not overlap.
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
/// `specs` names `count` specifications, which nobody changes meanwhile, or is null with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_restrict(
    target: c_int,
    specs: *const ContextSpec,
    count: usize,
) -> c_int {
    // SAFETY: `specs` is null with 0 or names `count` specifications that stay as they are for this call
    // (# Safety).
    let outcome = unsafe { list(specs, count) }.and_then(|specs| {
        let keep = specs.iter().try_fold(Rights::none(), |rights, spec| match spec.kind {
            VM => rights.memory(spec.start, bytes_of(spec)),
            FD => numbers(spec).map(|(first, last)| rights.descriptors(first, last)),
            SYSCALL => numbers(spec).map(|(first, last)| rights.calls(&Calls::none().with(first, last))),
            kind => Err(invalid("orrery_context_restrict", kind.unsigned_abs() as usize)),
        })?;
        named(target)?.restrict_to(&keep)
    });
    outcome.map_or_else(error::fail, |()| 0)
}

/// Maps memory of another context, or removes it again.
///
/// # Safety
/// `specs` names `count` specifications, which nobody changes meanwhile, or is null with 0; the memory and
/// the descriptors that they name are the caller's to give up, and not in use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_overlay(
    target: c_int,
    specs: *const ContextSpec,
    count: usize,
) -> c_int {
    // SAFETY: `specs` is null with 0 or names `count` specifications that stay as they are for this call
    // (# Safety).
    let outcome = unsafe { list(specs, count) }.and_then(|specs| {
        let known = |spec: &ContextSpec| match spec.kind {
            VM => [COW, SHARE, UNMAP].contains(&spec.how),
            FD => spec.how == COW && numbers(spec).is_ok_and(|(first, last)| last - first < MOST_DESCRIPTORS),
            _ => false,
        };
        if let Some(odd) = specs.iter().find(|spec| !known(spec)) {
            return Err(invalid("orrery_context_overlay", odd.how as usize));
        }
        let context = named(target)?;
        specs.iter().try_for_each(|spec| {
            if spec.kind == FD {
                let (first, last) = numbers(spec)?;
                // SAFETY: the descriptors that the specifications name are the caller's to give up
                // (# Safety).
                return (first..=last).try_for_each(|number| unsafe { context.overlay_descriptor(number) });
            }
            let start = core::ptr::with_exposed_provenance(spec.start);
            // SAFETY: the memory that the specifications name is the caller's to give up and is not in use
            // (# Safety).
            unsafe {
                match spec.how {
                    COW => context.overlay(start, bytes_of(spec), Overlay::Copy),
                    SHARE => context.overlay(start, bytes_of(spec), Overlay::Share),
                    _ => remove_overlay(start, bytes_of(spec)),
                }
            }
        })
    });
    outcome.map_or_else(error::fail, |()| 0)
}

/// The system call by which control last came here; 0 where it came otherwise.
///
/// # Safety
/// `call` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_trapped_call(call: *mut ContextCall) -> c_int {
    let Some(called) = CALLED.get() else { return 0 };
    if !call.is_null() {
        // SAFETY: `call` was checked against null, and so is valid for a write (# Safety).
        unsafe { call.write(ContextCall { number: c_long::from(called.number), args: called.arguments }) };
    }
    1
}

/// Lets the system call go on in which a context is stopped.
///
/// # Safety
/// `result` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_proceed(target: c_int, result: *mut u64) -> c_int {
    let outcome = named(target).and_then(Context::proceed);
    // SAFETY: `result` is null or valid for a write (# Safety).
    unsafe { finish(outcome, result) }
}

/// Makes a system call for another context.
///
/// # Safety
/// `args` is null or names six values; `result` is null or valid for a write. The call may do to either context
/// whatever such a call can do.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_syscall(
    target: c_int,
    mask: c_uint,
    number: c_long,
    args: *const u64,
    result: *mut i64,
) -> c_int {
    let known = 1 << VM | 1 << FD | 1 << CRED;
    let outcome = match u32::try_from(number) {
        Ok(number) if !args.is_null() && !result.is_null() && mask & !known == 0 => {
            let has = |kind: c_int| mask & 1 << kind != 0;
            let own = FromCaller { memory: has(VM), descriptors: has(FD), credentials: has(CRED) };
            // SAFETY: `args` and `result` were checked against null, so they lead to six values and to room
            // for one (# Safety); what the call does to either context is the caller's to decide (# Safety).
            unsafe {
                let arguments = args.cast::<[u64; 6]>().read_unaligned();
                named(target)
                    .and_then(|context| context.syscall(own, number, arguments))
                    .map(|value| result.write(value))
            }
        }
        _ => Err(invalid("orrery_context_syscall", usize::try_from(number).unwrap_or(usize::MAX))),
    };
    outcome.map_or_else(error::fail, |()| 0)
}

/// Copies memory of a context that is trapped by this one.
///
/// # Safety
/// `buffer` is null or valid for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_copy_in(
    target: c_int,
    address: u64,
    buffer: *mut c_void,
    length: usize,
) -> isize {
    if buffer.is_null() || length > isize::MAX.unsigned_abs() {
        return error::fail(invalid("orrery_context_copy_in", length)) as isize;
    }
    // SAFETY: `buffer` was checked against null, so it is valid for `length` bytes (# Safety), which are no
    // more than `isize::MAX`.
    let buffer = unsafe { core::slice::from_raw_parts_mut(buffer.cast::<u8>(), length) };
    let outcome = named(target).and_then(|context| context.copy_in(address, buffer));
    outcome.map_or_else(|error| error::fail(error) as isize, usize::cast_signed)
}

/// Writes into memory of a context that is trapped by this one.
///
/// # Safety
/// `bytes` is null or names `length` bytes, and the context does not mind that they are written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_copy_out(
    target: c_int,
    address: u64,
    bytes: *const c_void,
    length: usize,
) -> c_int {
    if bytes.is_null() || length > isize::MAX.unsigned_abs() {
        return error::fail(invalid("orrery_context_copy_out", length));
    }
    // SAFETY: `bytes` was checked against null, so it names `length` bytes (# Safety), which are no more than
    // `isize::MAX`; the context does not mind that they are written there (# Safety).
    let outcome = unsafe {
        let bytes = core::slice::from_raw_parts(bytes.cast::<u8>(), length);
        named(target).and_then(|context| context.copy_out(address, bytes))
    };
    outcome.map_or_else(error::fail, |()| 0)
}

/// Copies a path of a context that is trapped by this one.
///
/// # Safety
/// `path` is null or valid for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_copy_path(
    target: c_int,
    address: u64,
    path: *mut c_char,
    room: usize,
) -> c_int {
    let outcome = named(target).and_then(|context| context.copy_path(address));
    let outcome = outcome.and_then(|text| {
        let bytes = text.as_bytes_with_nul();
        if path.is_null() || bytes.len() > room {
            return Err(Error::TooLong { bytes: bytes.len(), room });
        }
        // SAFETY: `path` was checked against null and is valid for `room` bytes (# Safety), of which the text
        // takes no more.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), path.cast(), bytes.len()) };
        Ok(())
    });
    outcome.map_or_else(error::fail, |()| 0)
}

/// Puts a descriptor of this context's into one that is stopped in a system call.
///
/// # Safety
/// `target` is a number that is not open, or a descriptor of a context that no Rust value owns; nobody closes `descriptor` meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_install_fd(target: c_int, descriptor: c_int) -> c_int {
    let outcome = named(target).and_then(|context| {
        if descriptor < 0 {
            return Err(invalid("orrery_context_install_fd", descriptor.unsigned_abs() as usize));
        }
        // SAFETY: a number that is no descriptor is an error; it is not kept.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
        context
            .give(file, rustix::io::fcntl_getfd(file).is_ok_and(|f| f.contains(rustix::io::FdFlags::CLOEXEC)))
    });
    outcome.unwrap_or_else(error::fail)
}

/// Has a context keep its state as it is now, for the case that it is killed.
///
/// # Safety
/// `target` is a number that is not open, or a descriptor of a context that no Rust value owns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_checkpoint(target: c_int) -> c_int {
    named(target).and_then(Context::checkpoint).map_or_else(error::fail, |()| 0)
}

/// Forks the program with all its contexts.
///
/// # Safety
/// As for fork(2) in a program with other threads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_fork() -> libc::pid_t {
    // SAFETY: the child needs nothing that another thread may have held at the fork, as with fork(2)
    // (# Safety).
    match unsafe { context::fork() } {
        Ok(Forked::Child) => 0,
        Ok(Forked::Parent(pid)) => libc::pid_t::try_from(pid).unwrap_or(-1),
        Err(error) => error::fail(error),
    }
}

/// Closes a descriptor of a context.
///
/// # Safety
/// `target` is a number that is not open, or a descriptor of a context that no Rust value owns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_context_close(target: c_int) -> c_int {
    named(target).and_then(Context::close).map_or_else(error::fail, |()| 0)
}

/// Notes what arrived; gives the caller's descriptor.
fn arrived(arrival: Arrival) -> c_int {
    RECEIVED.replace(arrival.bytes);
    CALLED.set(arrival.call);
    arrival.caller.descriptor()
}

/// # Safety
/// `result` is null or valid for a write.
unsafe fn finish(outcome: Result<Arrival>, result: *mut u64) -> c_int {
    match outcome {
        Ok(arrival) => {
            if !result.is_null() {
                // SAFETY: `result` was checked against null, and so is valid for a write (# Safety).
                unsafe { result.write(arrival.word) };
            }
            arrived(arrival)
        }
        Err(error) => error::fail(error),
    }
}

/// # Safety
/// `specs` names `count` specifications that stay, or is null with 0.
unsafe fn list<'a>(specs: *const ContextSpec, count: usize) -> Result<&'a [ContextSpec]> {
    match (specs.is_null(), count) {
        (_, 0) => Ok(&[]),
        (false, 1..=65_536) => {
            // SAFETY: `specs` is not null, so it names `count` specifications that stay (# Safety), and
            // 65,536 of them are far below `isize::MAX` bytes.
            Ok(unsafe { core::slice::from_raw_parts(specs, count) })
        }
        _ => Err(invalid("a list of specifications", count)),
    }
}

/// Returns the context that a C program names.
fn named(target: c_int) -> Result<Context> {
    // SAFETY: numbers of descriptors are for a C program to keep apart, as with close(2).
    unsafe { Context::of_descriptor(target) }
}

/// # Safety
/// What the specifications share or unmap is the caller's to share or unmap.
unsafe fn specification(specs: &[ContextSpec], options: c_uint) -> Result<Spec> {
    let both = options & ISOLATED != 0 && options & NOT_ISOLATED != 0;
    if both || options & !(SHARED_SIGNALS | DUMPABLE | SYSTRAP | ALONE | ISOLATED | NOT_ISOLATED) != 0 {
        return Err(invalid("the options of orrery_context_create", options as usize));
    }
    let mut spec =
        Spec::new().shared_signals(options & SHARED_SIGNALS != 0).dumpable(options & DUMPABLE != 0);
    if options & (ISOLATED | NOT_ISOLATED) != 0 {
        spec = spec.isolate(options & ISOLATED != 0);
    }
    spec = spec.trap(options & SYSTRAP != 0).alone(options & ALONE != 0);
    for one in specs {
        let odd = || invalid("a specification of orrery_context_create", one.how as usize);
        match one.kind {
            VM => {
                let start = core::ptr::with_exposed_provenance(one.start);
                spec = match one.how & !MAY_ACCESS {
                    // SAFETY: what the specification shares is the caller's to share (# Safety).
                    SHARE => unsafe { spec.share(start, bytes_of(one)) },
                    // SAFETY: what the specification unmaps is the caller's to unmap (# Safety).
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
                let (first, last) = numbers(one).map_err(|_| odd())?;
                match one.how & !MAY_ACCESS {
                    COW => {}
                    0 if one.how != 0 => {}
                    UNMAP => spec = spec.close_descriptors(first, last),
                    SHARE if first == 0 && one.length == usize::MAX => spec = spec.share_descriptors(true),
                    SHARE => {
                        let why = "a part of a table of descriptors cannot be shared: share all (0, ORRERY_CONTEXT_ALL)";
                        return Err(Error::Unmet { why });
                    }
                    _ => return Err(odd()),
                }
                if one.how & MAY_ACCESS != 0 {
                    spec = spec.may_fetch(first, last);
                }
            }
            SYSCALL => {
                let (first, last) = numbers(one).map_err(|_| odd())?;
                let calls = Calls::none().with(first, last);
                match one.how & !MAY_ACCESS {
                    COW => {}
                    0 if one.how != 0 => {}
                    UNMAP => spec = spec.withhold(&calls),
                    _ => return Err(odd()),
                }
                if one.how & MAY_ACCESS != 0 {
                    spec = spec.may_call(&calls);
                }
            }
            CRED if one.start == 0 && matches!(one.length, 0 | usize::MAX) => match one.how {
                COW => {}
                SHARE => spec = spec.share_credentials(true),
                _ => return Err(odd()),
            },
            CRED => {
                let why = "a part of the credentials cannot be told from the rest: take all (0, ORRERY_CONTEXT_ALL)";
                return Err(Error::Unmet { why });
            }
            _ => return Err(odd()),
        }
    }
    Ok(spec)
}

/// The length of a range of memory; `ORRERY_CONTEXT_ALL` is up to the last page.
fn bytes_of(spec: &ContextSpec) -> usize {
    match spec.length {
        usize::MAX => (usize::MAX & !(PAGE - 1)).saturating_sub(spec.start),
        length => length,
    }
}

/// Numbers of descriptors or system calls, first and last.
fn numbers(spec: &ContextSpec) -> Result<(u32, u32)> {
    let odd = || invalid("a range of numbers", spec.start);
    let first = u32::try_from(spec.start).map_err(|_| odd())?;
    let count = u32::try_from(spec.length).unwrap_or(u32::MAX);
    let last = count.checked_sub(1).ok_or_else(odd)?;
    Ok((first, first.saturating_add(last)))
}

fn invalid(operation: &'static str, value: usize) -> context::Error {
    Error::System(orrery_sys::Error::new(operation, value, rustix::io::Errno::INVAL))
}
