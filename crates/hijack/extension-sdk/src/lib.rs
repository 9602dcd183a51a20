//! What extensions written in Rust use. `include/orrery/extension.h` is the same in C; the crate `orrery-extension` is the side
//! of the manager.
//!
//! An extension is a crate of type `cdylib`, compiled for `wasm32-unknown-unknown`, with `no_std` and a panic handler that ends
//! the run (`core::arch::wasm32::unreachable()`).
//!
//! ```
//! use orrery_extension_sdk::{Event, handle};
//!
//! handle!(used, "used");
//! handle!(share, "share");
//! handle!(tick, "tick");
//!
//! fn start() {
//!     let _ticks = tick().subscribe(10_000_000);
//! }
//!
//! fn event(event: Event) {
//!     if let Ok(used_now) = used().get() {
//!         let _refused = share().set(used_now + 10);
//!     }
//! }
//!
//! orrery_extension_sdk::extension!(start, event);
//! ```
//!
//! On other targets the crate compiles, too, so that an extension's own arithmetic can be tested there: every call of the manager
//! then fails with [`Error::Invalid`].

#![no_std]

/// Why the manager did not do something; nothing is changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The handle does not have this right.
    Denied,
    /// The value is outside the attribute's range.
    Range,
    /// A guard refuses the value: a sum, or the service of another program, would suffer.
    Guard,
    /// The handle was revoked, or what it stands for does not exist any more.
    Gone,
    /// There is no more room: 64 subscriptions, 16 messages of one event, or a full queue at the receiver.
    Limit,
    /// What the handle stands for has no such operation, or an argument is invalid.
    Invalid,
}

/// The longest message in bytes.
pub const MESSAGE: usize = 256;

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The number of its subscription.
    pub subscription: u32,
    /// When it happened: nanoseconds of [`clock`].
    pub time: u64,
    /// What happened: the event source defines it.
    pub value: i64,
    /// The second number of the event, whose meaning depends on its topic.
    pub detail: i64,
}

/// A right that the manifest asks for: [`handle!`] declares one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle(i32);

impl Handle {
    /// Makes a handle of what an import returned: for [`handle!`].
    #[doc(hidden)]
    #[must_use]
    pub fn from_import(number: i32) -> Self {
        Self(number)
    }

    /// Returns the value of an attribute.
    ///
    /// # Errors
    /// Why not.
    pub fn get(self) -> Result<i64, Error> {
        let mut value = 0;
        done(imports::get_attribute(self.0, &mut value)).map(|_| value)
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// Why not.
    pub fn set(self, value: i64) -> Result<(), Error> {
        done(imports::set_attribute(self.0, value)).map(|_| ())
    }

    /// Has the events of a source handled; `parameter` is the source's own, the period of a timer in nanoseconds for instance.
    /// Returns the subscription's number.
    ///
    /// # Errors
    /// Why not.
    pub fn subscribe(self, parameter: i64) -> Result<u32, Error> {
        done(imports::subscribe(self.0, parameter))
    }

    /// Sends a message of at most [`MESSAGE`] bytes to an outlet.
    ///
    /// # Errors
    /// Why not.
    pub fn emit(self, message: &[u8]) -> Result<(), Error> {
        done(imports::emit(self.0, message)).map(|_| ())
    }
}

/// Returns the monotonic clock in nanoseconds.
#[must_use]
pub fn clock() -> u64 {
    imports::clock().cast_unsigned()
}

/// Logs a line of at most [`MESSAGE`] bytes. Control characters are replaced.
///
/// # Errors
/// [`Error::Limit`], [`Error::Invalid`].
pub fn log(line: &str) -> Result<(), Error> {
    done(imports::log(line.as_bytes())).map(|_| ())
}

fn done(code: i32) -> Result<u32, Error> {
    match code {
        -1 => Err(Error::Denied),
        -2 => Err(Error::Range),
        -3 => Err(Error::Guard),
        -4 => Err(Error::Gone),
        -5 => Err(Error::Limit),
        code => u32::try_from(code).map_err(|_| Error::Invalid),
    }
}

/// Declares a function that returns the handle that the manifest has under a name.
#[macro_export]
macro_rules! handle {
    ($function:ident, $name:literal) => {
        fn $function() -> $crate::Handle {
            #[cfg(target_arch = "wasm32")]
            {
                #[link(wasm_import_module = "handle")]
                unsafe extern "C" {
                    #[link_name = $name]
                    safe fn import() -> i32;
                }
                $crate::Handle::from_import(import())
            }
            #[cfg(not(target_arch = "wasm32"))]
            $crate::Handle::from_import(0)
        }
    };
}

/// Exports the two functions that the manager calls: the first before the first event, and again after a run was aborted; the
/// second for each event.
#[macro_export]
macro_rules! extension {
    ($start:path, $event:path) => {
        #[cfg_attr(target_arch = "wasm32", unsafe(export_name = "start"))]
        #[doc(hidden)]
        pub extern "C" fn orrery_extension_start() {
            $start();
        }

        #[cfg_attr(target_arch = "wasm32", unsafe(export_name = "event"))]
        #[doc(hidden)]
        pub extern "C" fn orrery_extension_event(subscription: i32, time: i64, value: i64, detail: i64) {
            let (subscription, time) = (subscription.cast_unsigned(), time.cast_unsigned());
            $event($crate::Event { subscription, time, value, detail });
        }
    };
}

/// The manager's functions.
#[cfg(target_arch = "wasm32")]
mod imports {
    mod raw {
        #[link(wasm_import_module = "orrery")]
        unsafe extern "C" {
            pub(crate) safe fn set_attribute(handle: i32, value: i64) -> i32;
            pub(crate) safe fn subscribe(handle: i32, parameter: i64) -> i32;
            pub(crate) safe fn clock() -> i64;
            pub(super) fn get_attribute(handle: i32, value: *mut i64) -> i32;
            pub(super) fn emit(handle: i32, bytes: *const u8, length: usize) -> i32;
            pub(super) fn log(bytes: *const u8, length: usize) -> i32;
        }
    }

    pub(crate) use raw::{clock, set_attribute, subscribe};

    pub(crate) fn get_attribute(handle: i32, value: &mut i64) -> i32 {
        // SAFETY: the manager writes one `i64` there.
        unsafe { raw::get_attribute(handle, value) }
    }

    pub(crate) fn emit(handle: i32, bytes: &[u8]) -> i32 {
        // SAFETY: the manager reads so many bytes.
        unsafe { raw::emit(handle, bytes.as_ptr(), bytes.len()) }
    }

    pub(crate) fn log(bytes: &[u8]) -> i32 {
        // SAFETY: the manager reads `bytes.len()` bytes, which live until the call returns.
        unsafe { raw::log(bytes.as_ptr(), bytes.len()) }
    }
}

/// There is no manager on other targets.
#[cfg(not(target_arch = "wasm32"))]
mod imports {
    const INVALID: i32 = -6;

    pub(crate) fn get_attribute(_handle: i32, _value: &mut i64) -> i32 {
        INVALID
    }

    pub(crate) fn set_attribute(_handle: i32, _value: i64) -> i32 {
        INVALID
    }

    pub(crate) fn subscribe(_handle: i32, _parameter: i64) -> i32 {
        INVALID
    }

    pub(crate) fn emit(_handle: i32, _bytes: &[u8]) -> i32 {
        INVALID
    }

    pub(crate) fn clock() -> i64 {
        0
    }

    pub(crate) fn log(_bytes: &[u8]) -> i32 {
        INVALID
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_errors() {
        assert_eq!(done(0), Ok(0));
        assert_eq!(done(63), Ok(63));
        assert_eq!(
            [-1, -2, -3, -4, -5, -6, -7, i32::MIN].map(done),
            [
                Err(Error::Denied),
                Err(Error::Range),
                Err(Error::Guard),
                Err(Error::Gone),
                Err(Error::Limit),
                Err(Error::Invalid),
                Err(Error::Invalid),
                Err(Error::Invalid)
            ]
        );
    }

    #[test]
    fn there_is_no_manager_here() {
        handle!(share, "share");
        assert_eq!(share().get(), Err(Error::Invalid));
        assert_eq!(share().set(1), Err(Error::Invalid));
        assert_eq!(share().subscribe(1), Err(Error::Invalid));
        assert_eq!(share().emit(b"message"), Err(Error::Invalid));
        assert_eq!((clock(), log("line")), (0, Err(Error::Invalid)));
    }
}
