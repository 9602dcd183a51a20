//! The interface to the kernel and to the program: system calls, signal frames, memory, and the assembly's functions.

pub(crate) mod areas;
#[cfg(feature = "image")]
pub(crate) mod freestanding;
pub(crate) mod pool;
pub(crate) mod protection_keys;
pub(crate) mod readable;
pub(crate) mod signal_frame;
pub(crate) mod state;
pub(crate) mod supervisor;
pub(crate) mod syscall;
pub(crate) mod thread_counters;
pub(crate) mod trampoline;
pub(crate) mod tsc;
pub(crate) mod unwind_step;
pub(crate) mod user_memory;
pub(crate) mod vfork_slots;
pub(crate) mod work_areas;
