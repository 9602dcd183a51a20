//! `orrery/session.h`: pools of sessions.

use core::cell::Cell;
use core::ffi::{c_int, c_uint, c_void};
use core::time::Duration;
use std::os::fd::{AsRawFd, BorrowedFd};

use orrery_sessions::{Builder, Connection, Ended, Error, Interest, Pool, SessionId, Step};

use crate::{error, options};

const READ: c_int = 1;
const WRITE: c_int = 2;

thread_local! {
    /// In a session: its connection.
    static CURRENT: Cell<*const Connection> = const { Cell::new(core::ptr::null()) };
}

/// Mirrors `struct orrery_session_pool` of the header.
#[derive(Debug)]
pub struct SessionPool {
    pool: Pool,
}

/// Mirrors `struct orrery_session_options` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SessionOptions {
    size: usize,
    initial: c_uint,
    max_contexts: c_uint,
    spare: c_uint,
    step_limit_ms: c_uint,
    memory_limit: u64,
    fds: *const c_int,
    fd_count: usize,
    start_at_once: c_int,
    not_isolated: c_int,
}

const DEFAULTS: SessionOptions = SessionOptions {
    size: size_of::<SessionOptions>(),
    initial: 0,
    max_contexts: 0,
    spare: 0,
    step_limit_ms: 0,
    memory_limit: 0,
    fds: std::ptr::null(),
    fd_count: 0,
    start_at_once: 0,
    not_isolated: 0,
};

/// Mirrors `struct orrery_session_result` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionResult {
    how: c_int,
    value: c_int,
}

/// Mirrors `struct orrery_session_counts` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionCounts {
    clean: u64,
    busy: u64,
    dirty: u64,
    begun: u64,
    made: u64,
    rolled_back: u64,
    lost: u64,
}

/// Makes a pool.
///
/// # Safety
/// `options` is null or valid, and names as many descriptors as it says; `serve` may be called with `with` in a copy of
/// the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_session_pool_create(
    options: *const SessionOptions,
    serve: Option<unsafe extern "C" fn(c_int, *mut c_void)>,
    with: *mut c_void,
) -> *mut SessionPool {
    let Some(serve) = serve else {
        error::fail(invalid("orrery_session_pool_create", 0));
        return core::ptr::null_mut();
    };
    // SAFETY: the options are null or begin with their size, as the caller promises; they are integers and a pointer.
    let options = match unsafe { options::read(options, DEFAULTS) } {
        Ok(options) => options,
        Err((errno, text)) => {
            error::fail_with(errno, text);
            return core::ptr::null_mut();
        }
    };
    // SAFETY: the options name as many descriptors as they say, as the caller promises.
    let pool = unsafe { builder(&options) }.and_then(|builder| {
        builder.build(|connection: &mut Connection| {
            CURRENT.set(connection);
            // SAFETY: `serve` may be called with `with` in a copy of the process, which is where the pool
            // calls it (# Safety).
            unsafe { serve(connection.as_raw_fd(), with) };
            CURRENT.set(core::ptr::null());
        })
    });
    match pool {
        Ok(pool) => Box::into_raw(Box::new(SessionPool { pool })),
        Err(error) => {
            error::fail(&error);
            core::ptr::null_mut()
        }
    }
}

/// # Safety
/// The options name as many descriptors as they say.
unsafe fn builder(options: &SessionOptions) -> Result<Builder, Error> {
    let mut builder = Pool::builder().greets(options.start_at_once != 0).isolate(options.not_isolated == 0);
    let size = |number: c_uint| usize::try_from(number).unwrap_or(usize::MAX);
    if options.initial != 0 {
        builder = builder.ready(size(options.initial));
    }
    if options.max_contexts != 0 {
        builder = builder.most(size(options.max_contexts));
    }
    if options.spare != 0 {
        builder = builder.spare(size(options.spare));
    }
    if options.step_limit_ms != 0 {
        builder = builder.step_limit(Duration::from_millis(options.step_limit_ms.into()));
    }
    if options.memory_limit != 0 {
        builder = builder.memory_limit(options.memory_limit);
    }
    if options.fd_count > 0 {
        if options.fds.is_null() || options.fd_count > 65_536 {
            return Err(invalid("the descriptors of orrery_session_pool_create", options.fd_count));
        }
        // SAFETY: `fds` was checked against null and names `fd_count` descriptors (# Safety), of which there
        // are no more than 65,536.
        let keep = unsafe { core::slice::from_raw_parts(options.fds, options.fd_count) };
        for fd in keep.iter().filter(|fd| **fd >= 0) {
            // SAFETY: the number is not -1, as the filter saw to that, and `keep_descriptor` notes it without
            // using the descriptor.
            builder = builder.keep_descriptor(unsafe { BorrowedFd::borrow_raw(*fd) });
        }
    }
    Ok(builder)
}

/// Begins a session.
///
/// # Safety
/// `pool` is null or a pool that no other call uses meanwhile; `connection` is a descriptor that stays open for as long
/// as the session lasts; `session` and `end` are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_session_begin(
    pool: *mut SessionPool,
    connection: c_int,
    session: *mut u64,
    end: *mut SessionResult,
) -> c_int {
    // SAFETY: `pool` is null or a pool that no other call uses meanwhile (# Safety).
    let Some(pool) = (unsafe { pool.as_mut() }) else { return error::fail(invalid("a pool", 0)) };
    if connection < 0 || session.is_null() {
        return error::fail(invalid("orrery_session_begin", connection.unsigned_abs() as usize));
    }
    // SAFETY: `connection` is not negative, and system calls use it only while it is open (# Safety); a
    // closed one is an error.
    let connection = unsafe { BorrowedFd::borrow_raw(connection) };
    match pool.pool.begin(connection) {
        Ok((id, step)) => {
            // SAFETY: `session` was checked against null and is valid for a write, and `end` is null or valid
            // for a write (# Safety).
            unsafe {
                session.write(id.number());
                report(step, end)
            }
        }
        Err(error) => error::fail(&error),
    }
}

/// Lets a session go on.
///
/// # Safety
/// `pool` is null or a pool that no other call uses meanwhile; `end` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_session_step(
    pool: *mut SessionPool,
    session: u64,
    end: *mut SessionResult,
) -> c_int {
    // SAFETY: `pool` is null or a pool that no other call uses meanwhile (# Safety).
    let Some(pool) = (unsafe { pool.as_mut() }) else { return error::fail(invalid("a pool", 0)) };
    match pool.pool.step(SessionId::of_number(session)) {
        // SAFETY: `end` is null or valid for a write (# Safety).
        Ok(step) => unsafe { report(step, end) },
        Err(error) => error::fail(&error),
    }
}

/// Ends a session.
///
/// # Safety
/// `pool` is null or a pool that no other call uses meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_session_abandon(pool: *mut SessionPool, session: u64) -> c_int {
    // SAFETY: `pool` is null or a pool that no other call uses meanwhile (# Safety).
    let Some(pool) = (unsafe { pool.as_mut() }) else { return error::fail(invalid("a pool", 0)) };
    pool.pool.end(SessionId::of_number(session)).map_or_else(|error| error::fail(&error), |()| 0)
}

/// Does one thing that will have to be done.
///
/// # Safety
/// `pool` is null or a pool that no other call uses meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_session_pool_maintain(pool: *mut SessionPool) -> c_int {
    // SAFETY: `pool` is null or a pool that no other call uses meanwhile (# Safety).
    let Some(pool) = (unsafe { pool.as_mut() }) else { return error::fail(invalid("a pool", 0)) };
    pool.pool.tidy().map_or_else(|error| error::fail(&error), c_int::from)
}

/// Serves connections.
///
/// # Safety
/// `pool` is null or a pool that no other call uses meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_session_pool_serve(
    pool: *mut SessionPool,
    listener: c_int,
    stop: c_int,
) -> c_int {
    // SAFETY: `pool` is null or a pool that no other call uses meanwhile (# Safety).
    let Some(pool) = (unsafe { pool.as_mut() }) else { return error::fail(invalid("a pool", 0)) };
    if listener < 0 || stop < -1 {
        return error::fail(invalid("orrery_session_pool_serve", listener.unsigned_abs() as usize));
    }
    // SAFETY: the numbers are not negative, and system calls use them only while they are open (# Safety);
    // closed ones are errors.
    let (listener, stop) =
        unsafe { (BorrowedFd::borrow_raw(listener), (stop >= 0).then(|| BorrowedFd::borrow_raw(stop))) };
    pool.pool.serve(listener, stop).map_or_else(|error| error::fail(&error), |()| 0)
}

/// Tells the counts.
///
/// # Safety
/// `pool` is null or a pool that no other call uses meanwhile; `counts` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_session_pool_count(
    pool: *const SessionPool,
    counts: *mut SessionCounts,
) -> c_int {
    // SAFETY: `pool` is null or a pool that no other call uses meanwhile (# Safety).
    let (Some(pool), false) = (unsafe { pool.as_ref() }, counts.is_null()) else {
        return error::fail(invalid("orrery_session_pool_count", 0));
    };
    let now = pool.pool.statistics();
    // SAFETY: `counts` was checked against null, and so is valid for a write (# Safety).
    unsafe {
        counts.write(SessionCounts {
            clean: now.clean as u64,
            busy: now.busy as u64,
            dirty: now.dirty as u64,
            begun: now.begun,
            made: now.made,
            rolled_back: now.rolled_back,
            lost: now.lost,
        });
    }
    0
}

/// Ends the pool.
///
/// # Safety
/// `pool` is a pool, not used any more, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_session_pool_destroy(pool: *mut SessionPool) {
    if !pool.is_null() {
        // SAFETY: `orrery_session_pool_create` made it of a box, and it is not used any more (# Safety).
        drop(unsafe { Box::from_raw(pool) });
    }
}

/// In a session: waits for the connection.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_session_wait(events: c_int) -> c_int {
    let interest = match events {
        READ => Interest::Readable,
        WRITE => Interest::Writable,
        3 => Interest::Both,
        other => {
            return error::fail(invalid("the events of orrery_session_wait", other.unsigned_abs() as usize));
        }
    };
    // SAFETY: set while the session's function runs, which is on this thread.
    let Some(connection) = (unsafe { CURRENT.get().as_ref() }) else {
        return error::fail(invalid("orrery_session_wait outside of a session", 0));
    };
    connection.wait(interest);
    0
}

/// In a session: reads, and waits where there is nothing.
///
/// # Safety
/// `buffer` is valid for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_session_read(connection: c_int, buffer: *mut c_void, room: usize) -> isize {
    // SAFETY: `buffer` is valid for `room` bytes, which are the most that the kernel writes (# Safety).
    again(READ, || unsafe { libc::read(connection, buffer, room) })
}

/// In a session: writes all, and waits where there is no room.
///
/// # Safety
/// `bytes` names `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_session_write(
    connection: c_int,
    bytes: *const c_void,
    length: usize,
) -> isize {
    let mut written = 0;
    while written < length {
        let rest = bytes.wrapping_byte_add(written);
        // SAFETY: `rest` leads to the `length - written` bytes that are left of the `length` that `bytes`
        // names (# Safety).
        let more = again(WRITE, || unsafe { libc::write(connection, rest, length - written) });
        match usize::try_from(more) {
            Ok(more) => written += more,
            Err(_) => return -1,
        }
    }
    written.cast_signed()
}

/// Repeats a call until it neither would block nor was interrupted.
fn again(events: c_int, mut call: impl FnMut() -> isize) -> isize {
    loop {
        let result = call();
        if result >= 0 {
            return result;
        }
        // SAFETY: the C library's errno of this thread.
        match unsafe { *libc::__errno_location() } {
            libc::EAGAIN => {
                if orrery_session_wait(events) < 0 {
                    return -1;
                }
            }
            libc::EINTR => {}
            _ => return -1,
        }
    }
}

/// Returns what a session waits for, or writes how it ended.
///
/// # Safety
/// `end` is null or valid for a write.
unsafe fn report(step: Step, end: *mut SessionResult) -> c_int {
    let ended = match step {
        Step::Waits(Interest::Readable) => return READ,
        Step::Waits(Interest::Writable) => return WRITE,
        Step::Waits(Interest::Both) => return READ | WRITE,
        Step::Ended(ended) => ended,
    };
    let (how, value) = match ended {
        Ended::Returned => (1, 0),
        Ended::Panicked => (2, 0),
        Ended::Exited(status) => (3, status),
        Ended::MemoryLimit => (4, 0),
        Ended::Abandoned => (5, 0),
        Ended::Signaled(signal) => (6, signal),
        Ended::TimedOut => (7, 0),
        _ => (8, 0),
    };
    if !end.is_null() {
        // SAFETY: `end` was checked against null, and so is valid for a write (# Safety).
        unsafe { end.write(SessionResult { how, value }) };
    }
    0
}

fn invalid(operation: &'static str, value: usize) -> Error {
    Error::System(orrery_sys::Error::new(operation, value, rustix::io::Errno::INVAL))
}
