//! Orbits: auxiliary tasks (checkers, watchdogs, detectors, snapshot writers) in an address space of their own, with
//! main's state as it was at each call.
//!
//! Main keeps what a task looks at in an [`Area`]. A call takes a snapshot of the areas that it names, by copying the
//! pages written since the last call, and runs the task in the orbit, where main's pointers lead to the snapshot. A task
//! that wants to change something in main sends an [`Update`]; main applies it, or does not. When a task crashes, hangs
//! or eats all memory, the call returns an error that says so, and main goes on.
//!
//! ```
//! use core::alloc::Layout;
//! use orrery_orbit::{Area, AreaOptions, Call, Orbit, Task};
//!
//! let area = Area::new(1 << 20, &AreaOptions::default())?;
//! let number = area.allocate(Layout::new::<i64>())?.cast::<i64>().as_ptr();
//!
//! let doubler = Orbit::builder("doubler")
//!     .entry(|task: &mut Task<'_>| {
//!         // SAFETY: main passes the address of a number in the area that it names.
//!         let number = unsafe { &mut *task.pointer::<i64>().unwrap() };
//!         *number *= 2; // the orbit's own copy
//!         *number
//!     })
//!     .create()?;
//!
//! let address = number.expose_provenance().to_ne_bytes();
//! let areas = [&area];
//! let call = Call::new().areas(&areas).arguments(&address);
//! // SAFETY: here and below: room for a number in main's area; the orbit writes to its own copy.
//! unsafe { number.write(21) };
//! let future = doubler.call_async(&call)?;
//! // SAFETY: room for a number in main's area; the orbit writes to its own copy.
//! unsafe { number.write(50) }; // too late for that call
//! assert_eq!(future.get()?, 42);
//! assert_eq!(doubler.call(&call)?, 100);
//! // SAFETY: as before; a number was written there.
//! assert_eq!(unsafe { number.read() }, 50);
//! # Ok::<_, orrery_orbit::Error>(())
//! ```

mod arguments;
mod builder;
mod call;
mod check;
mod code;
mod control_block;
mod crash;
mod delegate;
mod error;
mod exception;
mod exit;
mod findings;
mod flags;
mod future;
#[doc(hidden)]
pub mod fuzzing;
mod limit;
mod orbit;
mod policy;
mod protocol;
mod records;
mod serve;
mod shared;
mod state;
mod submit;
mod symbol;
mod task;
mod update;
mod update_socket;
mod waiting;

pub use arguments::ARGUMENTS;
pub use builder::Builder;
pub use call::Call;
pub use delegate::{Delegate, DelegateSlot};
pub use error::{Error, Fault, Result};
pub use findings::{Finding, Reason};
pub use flags::Flags;
pub use future::{Finished, Future};
pub use orbit::{Life, Orbit};
pub use orrery_domain::{
    Backoff, Class, Descriptors, Enforcement, Limits, Means, Reaper, Restart, Scheduling, Signals,
};
pub use orrery_memory::area::{Area, AreaBox, AreaOptions, AreaVec, Error as AreaError, Mode};
pub use orrery_orbit_derive::Delegate;
pub use policy::{BackPressure, Placement};
pub use protocol::Function;
pub use task::{Task, current_call, is_orbit, name, send, send_bytes};
pub use update::{OPERATION_ARGUMENTS, Operation, Record, Records, Scratch, Update};
