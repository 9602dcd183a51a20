//! The functions that a module can import and those that it exports; the SDK's crate and header say the same in Rust and C.
//!
//! | import | type | result |
//! |---|---|---|
//! | `orrery.get_attribute` | `(handle: i32, value: i32) -> i32` | writes an `i64` to memory at `value` |
//! | `orrery.set_attribute` | `(handle: i32, value: i64) -> i32` | |
//! | `orrery.subscribe` | `(handle: i32, parameter: i64) -> i32` | the subscription's number, from 0 on |
//! | `orrery.emit` | `(handle: i32, bytes: i32, length: i32) -> i32` | |
//! | `orrery.clock` | `() -> i64` | nanoseconds of the monotonic clock |
//! | `orrery.log` | `(bytes: i32, length: i32) -> i32` | |
//! | `handle.NAME` | `() -> i32` | the handle that the manifest calls NAME |
//!
//! | export | type | |
//! |---|---|---|
//! | `event` | `(subscription: i32, time: i64, value: i64, detail: i64)` | required; called once for each event |
//! | `start` | `()` | called once before the first event |
//! | `memory` | a memory | required for functions that take addresses |

/// The module that the manager's functions are imported from.
pub const IMPORTS: &str = "orrery";
/// The module that handles are imported from.
pub const HANDLES: &str = "handle";
/// The exported function that handles an event.
pub const EVENT: &str = "event";
/// The exported function that is called before the first event.
pub const START: &str = "start";
/// The exported memory.
pub const MEMORY: &str = "memory";

/// The call was done.
pub const OK: i32 = 0;
/// The handle does not have this right.
pub const DENIED: i32 = -1;
/// The value is outside the attribute's range.
pub const RANGE: i32 = -2;
/// A guard refuses the value: a sum or the service of another program would suffer.
pub const GUARD: i32 = -3;
/// The handle was revoked, or what it stands for does not exist any more.
pub const GONE: i32 = -4;
/// There is no more room: too many subscriptions, messages of this event, or a full queue at the receiver.
pub const LIMIT: i32 = -5;
/// What the handle stands for does not have this operation, or the parameter is invalid.
pub const INVALID: i32 = -6;

/// The longest message of `emit` and `log`, in bytes.
pub const MESSAGE: usize = 256;
/// How many messages one event may emit and log, together.
pub const MESSAGES: u32 = 16;
/// How many subscriptions an extension may have.
pub const SUBSCRIPTIONS: usize = 64;
