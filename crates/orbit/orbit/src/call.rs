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
    /// Creates a call of the orbit's entry function, without areas and arguments.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the areas that the task reads, as they are when the call is made. Areas that are not named may be older.
    #[must_use]
    pub fn areas(mut self, areas: &'a [&'a Area]) -> Self {
        self.areas = areas;
        self
    }

    /// Sets the argument bytes, fewer than [`crate::ARGUMENTS`].
    #[must_use]
    pub fn arguments(mut self, arguments: &'a [u8]) -> Self {
        self.arguments = arguments;
        self
    }

    /// Sets the arguments to the bytes of one value; the task reads them with [`Task::argument`].
    #[must_use]
    pub fn argument<T: bytemuck::NoUninit>(self, value: &'a T) -> Self {
        self.arguments(bytemuck::bytes_of(value))
    }

    /// Calls another function instead of the entry function.
    #[must_use]
    pub fn function(mut self, function: fn(&mut Task<'_>) -> i64) -> Self {
        self.function = Some(Function::Rust(function));
        self
    }

    /// Calls a C function instead of the entry function. The call fails if there is no code at its address.
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

    /// Sets the flags of the call.
    #[must_use]
    pub fn flags(mut self, flags: Flags) -> Self {
        self.flags = flags;
        self
    }

    /// Sets how long the task may run before the orbit is killed, instead of the orbit's own limit.
    #[must_use]
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }
}
