//! A monitor for programs: chosen system calls are decided and performed by a process that the program cannot reach.
//!
//! ```no_run
//! use orrery_monitor::{End, Guard, Log, Policy, hold_signals};
//!
//! let policy = Policy::load("policy.toml".as_ref())?;
//! hold_signals();
//! let end = Guard::new(policy).log(Log::Words).program("python3").arguments(["script.py"]).start()?.supervise()?;
//! assert_eq!(end, End::Exited(0));
//! # Ok::<(), orrery_monitor::Error>(())
//! ```
//!
//! How a call goes: the kernel's filter ([seccomp(2)]) lets most through at no cost and stops those that name files,
//! programs or addresses. The monitor, a process around which the program has no way, copies what the arguments point to,
//! once; finds the file that a path means, held fast by a descriptor; asks the [`Policy`]; performs the call on what it
//! holds; and has the kernel put the result into the program. Whatever the program's other threads write over the arguments
//! meanwhile, or rename, concerns nobody any more.
//!
//! Underneath lies a second wall: Landlock, made of the same policy.
//!
//! [seccomp(2)]: https://man7.org/linux/man-pages/man2/seccomp.2.html

mod asked;
mod assume;
mod birth;
mod blocking;
mod caller;
mod closure;
mod crew;
mod error;
mod guard;
mod job;
mod learn;
mod log;
mod mediate;
mod memory;
mod monitor;
mod own;
mod perform;
mod plan;
mod policy;
mod resolve;
mod rulings;
mod run;
mod supervise;
mod wall;

pub use error::Error;
pub use guard::Guard;
pub use log::Log;
pub use mediate::{Decision, Request};
pub use plan::Held;
pub use policy::{Policy, Rights};
pub use rulings::{Destination, Executions, Rules, Ruling, holds};
pub use run::{End, Guarded, Run};
pub use supervise::hold_signals;
