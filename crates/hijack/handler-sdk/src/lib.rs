//! What handlers of system calls written in Rust use. `include/orrery/handler.h` is the same in C; the crate `orrery-handler` compiles
//! the modules.
//!
//! A handler is a WebAssembly module that a rule of a policy names (`handler = "module.wasm"`): it decides, inside the executive,
//! about the calls that the rule is about. It is a crate of type `cdylib`, compiled for `wasm32v1-none` (the first version of
//! WebAssembly) with `no_std`, `panic = "abort"`, `lto = "fat"`, and a panic handler that ends the decision
//! (`core::arch::wasm32::unreachable()`): the call is then refused with `EPERM`. The linker is told to leave the stack some KiB of
//! the 64 that a handler has (`-C link-arg=-zstack-size=16384`).
//!
//! ```
//! use orrery_handler_sdk::{ESRCH, Verdict, argument};
//!
//! fn decide(_call: i32) -> Verdict {
//!     if argument(0) == 1234 { Verdict::Fail(ESRCH) } else { Verdict::Pass }
//! }
//!
//! orrery_handler_sdk::handler!(decide);
//! ```
//!
//! Each decision begins with the memory and the variables that the module says: nothing stays from one call to the next.
//!
//! On other targets the crate compiles, too, so that a handler's own arithmetic can be tested there: arguments are zero then, and
//! whatever can fail fails with [`EFAULT`].

#![no_std]

/// An error of Linux, from 1 to 4095.
pub type Errno = i32;

/// Operation not permitted.
pub const EPERM: Errno = 1;
/// No such file or directory.
pub const ENOENT: Errno = 2;
/// No such process.
pub const ESRCH: Errno = 3;
/// Input/output error.
pub const EIO: Errno = 5;
/// Try again.
pub const EAGAIN: Errno = 11;
/// Out of memory.
pub const ENOMEM: Errno = 12;
/// Permission denied.
pub const EACCES: Errno = 13;
/// Bad address.
pub const EFAULT: Errno = 14;
/// Invalid argument.
pub const EINVAL: Errno = 22;
/// No space left on device.
pub const ENOSPC: Errno = 28;
/// File name too long.
pub const ENAMETOOLONG: Errno = 36;
/// Function not implemented.
pub const ENOSYS: Errno = 38;
/// Message too long.
pub const EMSGSIZE: Errno = 90;
/// Connection refused.
pub const ECONNREFUSED: Errno = 111;

/// The longest report in bytes.
pub const REPORT: usize = 352;

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes on, with its arguments as they are now: later rules are asked.
    Pass,
    /// It is performed, and later rules are not asked.
    Allow,
    /// It returns this, and is not performed.
    Answer(i64),
    /// It fails with this error, and is not performed. A number that is none makes the handler fail.
    Fail(Errno),
}

impl Verdict {
    /// Returns the number that the executive is given: for [`handler!`].
    #[doc(hidden)]
    #[must_use]
    pub fn into_number(self) -> i32 {
        /// What no verdict is.
        const NONE: i32 = i32::MIN;
        match self {
            Self::Pass => 0,
            Self::Allow => 1,
            Self::Answer(value) => {
                imports::answer(value);
                2
            }
            Self::Fail(error @ 1..=4095) => -error,
            Self::Fail(_) => NONE,
        }
    }
}

/// Returns an argument of the call, 0 to 5, as the program gave it.
#[must_use]
pub fn argument(index: i32) -> i64 {
    imports::argument(index)
}

/// Has the call performed with another argument.
pub fn set_argument(index: i32, value: i64) {
    imports::set_argument(index, value);
}

/// Has the call wait before whatever becomes of it: a second at most, and the last one holds.
pub fn delay(nanoseconds: i64) {
    imports::delay(nanoseconds);
}

/// Adds to one of the 64 counters of the process, which all handlers of the policy share; returns what it is then. Threads add in one
/// step, a forked child has a copy, and a program that is executed begins with zeros.
pub fn count(counter: i32, amount: i64) -> i64 {
    imports::count(counter, amount)
}

/// Copies what an argument points to, from `offset` on; returns the bytes that were copied, which are less than there is room for
/// where the program's memory ends.
///
/// # Errors
/// [`EFAULT`]: there is no memory.
pub fn copy_from(index: i32, offset: u32, room: &mut [u8]) -> Result<&mut [u8], Errno> {
    let copied = number(imports::copy_from(index, offset, room))?;
    room.get_mut(..copied).ok_or(EFAULT)
}

/// Copies the string that an argument points to, a path for instance; returns it without the zero at its end.
///
/// Another thread can change what the argument points to afterwards: have the call use what was looked at, by [`replace`].
///
/// # Errors
/// [`EFAULT`]: there is no memory. [`ENAMETOOLONG`]: it is longer than the room.
pub fn copy_string(index: i32, room: &mut [u8]) -> Result<&[u8], Errno> {
    let copied = copy_from(index, 0, room)?;
    let length = copied.iter().position(|byte| *byte == 0).ok_or(ENAMETOOLONG)?;
    copied.get(..length).ok_or(ENAMETOOLONG)
}

/// Has the call performed with the argument pointing to a copy of these bytes, with a zero behind them.
///
/// # Errors
/// [`ENAMETOOLONG`]: all copies of one call have 8 KiB together.
pub fn replace(index: i32, bytes: &[u8]) -> Result<(), Errno> {
    number(imports::replace(index, bytes)).map(|_| ())
}

/// Reports up to [`REPORT`] bytes.
///
/// # Errors
/// [`EMSGSIZE`].
pub fn emit(bytes: &[u8]) -> Result<(), Errno> {
    number(imports::emit(bytes)).map(|_| ())
}

/// A result of the executive's: a number, or an error below zero.
fn number(result: i32) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| result.saturating_neg())
}

/// Exports the function that the executive calls for each call, with its number.
#[macro_export]
macro_rules! handler {
    ($decide:path) => {
        #[cfg_attr(target_arch = "wasm32", unsafe(export_name = "decide"))]
        #[doc(hidden)]
        pub extern "C" fn orrery_handler_decide(call: i32) -> i32 {
            let verdict: $crate::Verdict = $decide(call);
            verdict.into_number()
        }
    };
}

/// The executive's functions.
#[cfg(target_arch = "wasm32")]
mod imports {
    mod raw {
        #[link(wasm_import_module = "orrery")]
        unsafe extern "C" {
            pub(crate) safe fn argument(index: i32) -> i64;
            pub(crate) safe fn set_argument(index: i32, value: i64);
            pub(crate) safe fn answer(value: i64);
            pub(crate) safe fn delay(nanoseconds: i64);
            pub(crate) safe fn count(counter: i32, amount: i64) -> i64;
            pub(super) fn copy_from(index: i32, offset: u32, to: *mut u8, length: usize) -> i32;
            pub(super) fn replace(index: i32, from: *const u8, length: usize) -> i32;
            pub(super) fn emit(from: *const u8, length: usize) -> i32;
        }
    }

    pub(crate) use raw::{answer, argument, count, delay, set_argument};

    pub(crate) fn copy_from(index: i32, offset: u32, room: &mut [u8]) -> i32 {
        // SAFETY: the executive writes at most so many bytes there.
        unsafe { raw::copy_from(index, offset, room.as_mut_ptr(), room.len()) }
    }

    pub(crate) fn replace(index: i32, bytes: &[u8]) -> i32 {
        // SAFETY: the executive reads so many bytes.
        unsafe { raw::replace(index, bytes.as_ptr(), bytes.len()) }
    }

    pub(crate) fn emit(bytes: &[u8]) -> i32 {
        // SAFETY: the executive reads so many bytes.
        unsafe { raw::emit(bytes.as_ptr(), bytes.len()) }
    }
}

/// There is no executive on other targets.
#[cfg(not(target_arch = "wasm32"))]
mod imports {
    use super::EFAULT;

    pub(crate) fn argument(_index: i32) -> i64 {
        0
    }

    pub(crate) fn set_argument(_index: i32, _value: i64) {}

    pub(crate) fn answer(_value: i64) {}

    pub(crate) fn delay(_nanoseconds: i64) {}

    pub(crate) fn count(_counter: i32, _amount: i64) -> i64 {
        0
    }

    pub(crate) fn copy_from(_index: i32, _offset: u32, _room: &mut [u8]) -> i32 {
        -EFAULT
    }

    pub(crate) fn replace(_index: i32, _bytes: &[u8]) -> i32 {
        -EFAULT
    }

    pub(crate) fn emit(_bytes: &[u8]) -> i32 {
        -EFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_numbers() {
        let of = |verdict: Verdict| verdict.into_number();
        assert_eq!([of(Verdict::Pass), of(Verdict::Allow), of(Verdict::Answer(7))], [0, 1, 2]);
        assert_eq!(
            [of(Verdict::Fail(1)), of(Verdict::Fail(EACCES)), of(Verdict::Fail(4095))],
            [-1, -13, -4095]
        );
        // None of these would be taken for another verdict.
        for none in [0, -1, -2, 4096, i32::MAX, i32::MIN] {
            assert_eq!(of(Verdict::Fail(none)), i32::MIN, "{none}");
        }
    }

    #[test]
    fn results_are_numbers_or_errors() {
        assert_eq!([0, 5, i32::MAX].map(number), [Ok(0), Ok(5), Ok(0x7fff_ffff)]);
        assert_eq!([-1, -EFAULT, i32::MIN].map(number), [Err(1), Err(EFAULT), Err(i32::MAX)]);
    }

    #[test]
    fn there_is_no_executive_here() {
        let mut room = [1; 8];
        assert_eq!(copy_from(0, 0, &mut room), Err(EFAULT));
        assert_eq!(copy_string(0, &mut room), Err(EFAULT));
        assert_eq!((replace(0, b"x"), emit(b"x"), argument(0)), (Err(EFAULT), Err(EFAULT), 0));
        set_argument(0, 1);
        delay(1);
        assert_eq!(count(0, 1), 0);
    }
}
