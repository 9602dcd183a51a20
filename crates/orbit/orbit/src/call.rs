//! A call in the making.

use core::ffi::{c_long, c_ulong, c_void};
use core::time::Duration;

use orrery_memory::area::Area;

use crate::flags::Flags;
use crate::protocol::Function;
use crate::task::Task;

/// What to call, with what: a borrowed description that can be used for any number of calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Call<'a> {
    pub(crate) areas: &'a [&'a Area],
    pub(crate) arguments: &'a [u8],
    pub(crate) function: Option<Function>,
    pub(crate) flags: Flags,
    pub(crate) time_limit: Option<Duration>,
}

impl<'a> Call<'a> {
    /// A call of the orbit's entry function, without areas and arguments.
    pub fn new() -> Self {
        Self::default()
    }

    /// The areas that the task looks at, as they are when the call is made. What is not named may be older.
    #[must_use]
    pub fn areas(mut self, areas: &'a [&'a Area]) -> Self {
        self.areas = areas;
        self
    }

    /// The argument bytes, fewer than [`crate::ARGUMENTS`].
    #[must_use]
    pub fn arguments(mut self, arguments: &'a [u8]) -> Self {
        self.arguments = arguments;
        self
    }

    /// One plain value as the arguments.
    ///
    /// # Safety
    /// `T` has no padding bytes: they would be read.
    #[must_use]
    pub unsafe fn argument<T: Copy>(self, value: &'a T) -> Self {
        // SAFETY: any initialised value can be read as bytes.
        self.arguments(unsafe {
            core::slice::from_raw_parts(core::ptr::from_ref(value).cast::<u8>(), size_of::<T>())
        })
    }

    /// Another function instead of the entry function.
    #[must_use]
    pub fn function(mut self, function: fn(&mut Task<'_>) -> i64) -> Self {
        self.function = Some(Function::Rust(function));
        self
    }

    /// A C function instead of the entry function. Its address is checked to be code when the call is made.
    ///
    /// # Safety
    /// There is a function of this type.
    #[must_use]
    pub unsafe fn c_function(
        mut self,
        function: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_long,
    ) -> Self {
        self.function = Some(Function::C(function));
        self
    }

    /// Like [`Call::c_function`], for a function that takes the store first.
    ///
    /// # Safety
    /// There is a function of this type.
    #[must_use]
    pub unsafe fn store_first_function(
        mut self,
        function: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_ulong,
    ) -> Self {
        self.function = Some(Function::StoreFirst(function));
        self
    }

    /// How it is to be treated.
    #[must_use]
    pub fn flags(mut self, flags: Flags) -> Self {
        self.flags = flags;
        self
    }

    /// How long the task may run, instead of the orbit's own limit: then the orbit is killed.
    #[must_use]
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }
}
