//! The CPU service manager: guaranteed shares of CPU time for unmodified programs.
//!
//! Each tick (10 ms) the clock of every tracee is read, the *monitor*; from that a *handler* decides who comes first, and a *guard*
//! admits reservations only as far as all can be met. A tracee that has not had its target in this period runs before all others, the
//! one whose period ends first before the rest (earliest deadline first); one that has had it takes what nobody else wants. Periods
//! are the manager's, from when the reservation was made.
//!
//! | file | idea |
//! |---|---|
//! | `account` | what a tracee had in its period, and how often that was too little: no system call |
//! | `plan` | who comes first: no system call |
//! | `admission` | the guard: which reservations can be met |
//! | `starts` | whether any process or thread was started |
//! | `tree` | the processes and threads of a tracee, and the time that they used |
//! | `placement` | on which CPUs the manager itself runs |
//! | `mechanism` | how the kernel is made to do it: real-time priority, weights of control groups, nice values |
//! | `service` | the monitor and the handler |

mod account;
mod admission;
mod mechanism;
mod placement;
mod plan;
mod service;
mod starts;
mod tree;

pub(crate) use account::Account;
pub use account::Reservation;
pub(crate) use admission::{Admit, Masks};
pub use mechanism::Mechanism;
pub(crate) use placement::{OwnCpus, Placement};
pub use service::CpuReport;
pub(crate) use service::{CpuService, release};
pub(crate) use tree::lives;
