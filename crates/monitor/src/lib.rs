//! A monitor for programs: chosen system calls are decided and performed by a process that the program cannot reach.
//!
//! ```no_run
//! use orrery_monitor::{End, Guard, Log, Policy, block_signals};
//!
//! let policy = Policy::load("policy.toml".as_ref())?;
//! block_signals();
//! let end = Guard::new(policy).log(Log::Words).program("python3").arguments(["script.py"]).start()?.supervise()?;
//! assert_eq!(end, End::Exited(0));
//! # Ok::<(), orrery_monitor::Error>(())
//! ```
//!
//! How a call goes: the kernel's filter ([seccomp(2)]) lets most through at no cost and stops those that name files,
//! programs or addresses. The monitor, a process around which the program has no way, copies what the arguments point
//! to, once; finds the file that a path means, held fast by a descriptor; asks the [`Policy`]; performs the call on
//! what it holds; and has the kernel put the result into the program. What the program's other threads write over the
//! arguments meanwhile, or rename, concerns nobody any more.
//!
//! Underneath lies a second wall: Landlock, made of the same policy.
//!
//! [seccomp(2)]: https://man7.org/linux/man-pages/man2/seccomp.2.html

mod answer;
mod audit;
mod blocking;
mod callback;
mod caller;
pub mod container;
mod credentials;
mod enforcement;
mod error;
mod file;
mod filter_rules;
mod guard;
mod identity;
mod landlock;
mod learning;
mod log;
mod made_files;
mod memory;
mod monitor;
mod needs;
mod perform;
mod policy;
mod policy_recorder;
mod questions;
mod resolve;
mod rule_checks;
mod run;
mod run_closure;
mod seccomp_profile;
mod spawn;
mod state;
mod supervise;
mod syscall;
mod system_files;
mod thread_pool;
mod view;

pub use audit::{Audit, Unused, Usage};
pub use callback::{Decision, Request};
pub use enforcement::Explanation;
pub use error::Error;
pub use guard::Guard;
pub use log::Log;
pub use perform::can_enforce;
pub use policy::rules::{Destination, Executions, Rules, Verdict};
pub use policy::{Policy, Rights};
pub use run::{End, Guarded, Run};
pub use seccomp_profile::SeccompProfile;
pub use supervise::block_signals;
