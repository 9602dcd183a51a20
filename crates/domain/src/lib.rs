//! Domains: execution contexts around a program, each with its own address space.
//!
//! - [`Domain`] is a process made from main ([`spawn`]), within [`Limits`] and a [`Scheduling`], that ends when main
//!   does; a restartable one keeps a parked spare.
//! - [`Channel`] carries messages between the two, through a [`Gate`] that hands over in under a microsecond where both
//!   share a CPU, and tells either of the other's death.
//! - [`Restart`] says what happens after a death, [`End`] how it came about.
//! - [`StatisticsPage`] shows a domain to other processes.
//!
//! Nobody trusts the other side: a domain may be corrupted or hostile, and all that it writes is checked.

mod cgroup;
pub mod channel;
pub mod copy;
mod end;
mod enforcement;
mod error;
pub mod forked;
pub mod gate;
pub mod limits;
pub mod post_fork;
pub mod process;
pub mod restart;
pub mod scheduling;
mod setup_step;
pub mod shared;
pub mod spawn;
pub mod statistics;
pub mod time;
pub mod watch;

pub use channel::{Channel, Side};
pub use end::{End, signal_name};
pub use enforcement::{Enforcement, Means};
pub use error::{Error, Result};
pub use gate::{Gate, Partner, Woken};
pub use limits::Limits;
pub use post_fork::{Descriptors, Signals};
pub use process::Process;
pub use restart::{Backoff, Decision, History, Restart};
pub use scheduling::{Class, Scheduling};
pub use setup_step::SetupStep;
pub use shared::SharedMemory;
pub use spawn::{Body, Domain, ForkBy, Reaper, Settings};
pub use statistics::{DomainState, Statistics, StatisticsPage};
pub use time::Moment;
pub use watch::watcher_stack;
