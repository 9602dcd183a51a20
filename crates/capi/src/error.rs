//! Errors as C has them: -1, a number in errno, and a text on request.

use core::cell::{Cell, RefCell};
use core::ffi::{c_char, c_int};
use core::fmt::{self, Write};

use orrery_context::Error as ContextError;
use orrery_memory::Error as MemoryError;
use orrery_rollback::Error;
use orrery_sessions::Error as SessionsError;

/// Room for the longest message.
const ROOM: usize = 512;

thread_local! {
    static LAST: Cell<Option<Failure>> = const { Cell::new(None) };
    static TEXT: RefCell<Text> = const { RefCell::new(Text { bytes: [0; ROOM], length: 0 }) };
}

/// What a call can fail of.
#[derive(Clone, Copy)]
enum Failure {
    Rollback(Error),
    Context(ContextError),
    /// One that is no plain value; its text was written when it was noted.
    Written,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rollback(error) => error.fmt(f),
            Self::Context(error) => error.fmt(f),
            Self::Written => Ok(()),
        }
    }
}

/// A C string of bounded length; what does not fit is cut off.
struct Text {
    bytes: [u8; ROOM],
    length: usize,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // The last byte stays 0.
        let fits = text.len().min(ROOM - 1 - self.length);
        self.bytes[self.length..self.length + fits].copy_from_slice(&text.as_bytes()[..fits]);
        self.length += fits;
        Ok(())
    }
}

/// Notes the error for `lw_error`, sets errno, and returns -1.
pub(crate) fn fail(error: Error) -> c_int {
    note(Failure::Rollback(error), number(&error))
}

/// The same of an error about contexts.
pub(crate) fn fail_context(error: ContextError) -> c_int {
    note(Failure::Context(error), context_number(&error))
}

/// The same of an error about sessions.
pub(crate) fn fail_sessions(error: &SessionsError) -> c_int {
    write_text(error);
    note(Failure::Written, sessions_number(error))
}

fn note(failure: Failure, errno: c_int) -> c_int {
    LAST.set(Some(failure));
    // SAFETY: the C library's errno of this thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Forgets what was noted.
pub(crate) fn forget() {
    LAST.set(None);
}

/// The text of the last failure of this thread, else of `otherwise`; null where there is neither.
pub(crate) fn text(otherwise: Option<Error>) -> *const c_char {
    let Some(error) = LAST.get().or(otherwise.map(Failure::Rollback)) else {
        return core::ptr::null();
    };
    match error {
        Failure::Written => TEXT.with_borrow(|text| text.bytes.as_ptr().cast()),
        error => write_text(&error),
    }
}

fn write_text(what: &dyn fmt::Display) -> *const c_char {
    TEXT.with_borrow_mut(|text| {
        text.bytes = [0; ROOM];
        text.length = 0;
        // It never fails: what does not fit is cut off.
        let _ = write!(text, "{what}");
        text.bytes.as_ptr().cast()
    })
}

/// The errno of an error, as the headers document it.
fn number(error: &Error) -> c_int {
    match error {
        Error::Nested => libc::EBUSY,
        Error::WrongThread { .. } => libc::EPERM,
        Error::OtherProcess { .. } => libc::ECHILD,
        Error::SignalHandler | Error::ShadowStack => libc::ENOTSUP,
        Error::NotAlone { .. } | Error::Threads { .. } => libc::EAGAIN,
        Error::NoSnapshot { .. } => libc::ENOENT,
        Error::Value { .. } => libc::EINVAL,
        Error::System(error) => error.errno.raw_os_error(),
        Error::Memory(error) => memory_number(error),
        _ => libc::EIO,
    }
}

/// The same for contexts.
fn context_number(error: &ContextError) -> c_int {
    match error {
        ContextError::Busy => libc::EBUSY,
        ContextError::NoThread { .. } => libc::EPERM,
        ContextError::ThreadEnded { .. } => libc::EOWNERDEAD,
        ContextError::OtherProcess | ContextError::NotTheRoot => libc::ECHILD,
        ContextError::TooManyThreads { .. } => libc::EAGAIN,
        ContextError::NoContext { .. } => libc::EBADF,
        ContextError::Itself { .. } => libc::EDEADLK,
        ContextError::Gone { .. } => libc::ESRCH,
        ContextError::Died { .. } | ContextError::Orphaned => libc::EOWNERDEAD,
        ContextError::TimedOut | ContextError::Silent { .. } => libc::ETIMEDOUT,
        ContextError::TooLong { .. } => libc::EMSGSIZE,
        ContextError::Full { .. } => libc::ENOSPC,
        ContextError::Denied { .. } | ContextError::CallDenied { .. } => libc::EACCES,
        ContextError::Stopped { .. } => libc::EINPROGRESS,
        ContextError::NoCall { .. } => libc::ENOMSG,
        ContextError::CallUnknown { .. } => libc::ENOSYS,
        ContextError::RootLimit
        | ContextError::Unaligned { .. }
        | ContextError::Overlap { .. }
        | ContextError::Unmet { .. }
        | ContextError::Memory { .. } => libc::EINVAL,
        ContextError::Birth { errno, .. } => errno.raw_os_error(),
        ContextError::System(error) => error.errno.raw_os_error(),
        _ => libc::EIO,
    }
}

/// The same for sessions.
fn sessions_number(error: &SessionsError) -> c_int {
    match error {
        SessionsError::Exhausted { .. } => libc::EAGAIN,
        SessionsError::NoSession { .. } => libc::ENOENT,
        SessionsError::Setup(_) => libc::ENOTSUP,
        SessionsError::NoTemplate(_) => libc::EOWNERDEAD,
        SessionsError::Descriptors => libc::EMFILE,
        SessionsError::Context(error) => context_number(error),
        SessionsError::System(error) => error.errno.raw_os_error(),
        _ => libc::EIO,
    }
}

fn memory_number(error: &MemoryError) -> c_int {
    match error {
        MemoryError::System(error) | MemoryError::Tracker { cause: error, .. } => error.errno.raw_os_error(),
        MemoryError::AddressSpace { .. } | MemoryError::Memory { .. } => libc::ENOMEM,
        MemoryError::Store { .. } => libc::ENOSPC,
        MemoryError::TrackerName | MemoryError::Keep { .. } => libc::EINVAL,
        MemoryError::NoSnapshot { .. } => libc::ENOENT,
        MemoryError::PageSize { .. } => libc::ENOTSUP,
        _ => libc::EIO,
    }
}
