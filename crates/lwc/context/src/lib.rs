//! Contexts: isolated memory, descriptors and credentials into which the running thread steps, and back.
//!
//! ```standalone_crate
//! use std::convert::Infallible;
//! use orrery_context::{self as context, Spec, Start};
//!
//! fn serve(start: Start) -> Infallible {
//!     let mut calls = 0;
//!     let mut arrival = start.arrival;
//!     loop {
//!         calls += 1;
//!         arrival = match arrival.caller.switch(arrival.word * 2 + calls, &[]) {
//!             Ok(next) => next,
//!             Err(error) => panic!("{error}"),
//!         };
//!     }
//! }
//!
//! # fn main() -> context::Result<()> {
//! let other = context::create(&Spec::new(), serve)?;
//! assert_eq!(other.switch(10, &[])?.word, 21);
//! assert_eq!(other.switch(10, &[])?.word, 22);
//! other.close()
//! # }
//! ```
//!
//! From "Light-Weight Contexts" (Litton et al., OSDI 2016), sections 3.1 to 3.9, on a stock kernel.
//!
//! # What a context is underneath
//!
//! A process: the only thing to which a stock kernel gives memory, descriptors and credentials of its own. [`create`]
//! copies the calling process, and the copy waits. Its first moment is inside the creator's call, with a copy of the
//! creator's stack, so control transfers have fork's shape: one call, two returns.
//!
//! There is **one thread of control** for each thread of the program, a *logical thread*: exactly one context runs it,
//! in all others it is parked in a switch. From this follows most of the rest:
//!
//! - A switch is a message and a call, then waiting: microseconds between two CPUs, far less on one. So a context
//!   follows its caller's CPU.
//! - A context in which a logical thread is parked can give out parts of its memory when asked, or turn them into
//!   shared memory.
//! - A context that waits for the one that has control notices its death, and gets control back together with an error.
//!   Where that one is dead, too, the one that waits for it does, and so on; the root in the end.
//!
//! The **root** is the program's own process. It is the kernel's parent of all contexts, whoever created them, but
//! gives them no exit signal, so that no wait(2) of the program sees them (`__WCLONE` in waitpid(2)). It ends when any
//! context exits, with that status; and all contexts end when it ends, however that may be (each watches the root's
//! pidfd).
//!
//! # Threads
//!
//! Each (thread, context) pair has a kernel thread in the context's process, with registers, stack and thread-local
//! storage of its own, and a place at which it is called. The root's are the program's own threads. A new context has a
//! *counterpart* of each other thread that its creator has; how it comes by them, and what they begin with, is in
//! `threads/stop_threads.rs`. So threads switch independently, several may be in one context, and the counterparts of
//! one thread never run at the same time. A thread that did not exist in the creator gets [`Error::NoThread`].
//!
//! A thread that ends where it began ends everywhere. One that ends in another context is an error of the switch that
//! waits for it ([`Error::ThreadEnded`]); other contexts keep their counterparts. A time limit kills the context, and
//! so concerns all threads in it: each gets the error.
//!
//! The threads of a context take turns at what the library knows there (`threads/state_lock.rs`), and release it while
//! they wait for another context: no wait for another context ever holds up a context's other threads.
//!
//! # Names and rights
//!
//! A context is named by a descriptor: one end of a socket pair, the other end of which is the context's own. So the
//! kernel counts holders, and tells the context when there are none; then it ends, unless it has control. Descriptors
//! pass on by creation (a new context has copies of its creator's) and by switching (the called context gets one of its
//! caller). Rights to overlay memory belong to such a pair, are kept by the owner of the memory, and only ever narrow
//! ([`Context::restrict`]).
//!
//! Three kinds of memory connect contexts, each with no more trust than it needs:
//!
//! - one page range for all, with who has control and how to call each. Nonsense written there can stop the program; it
//!   tells nothing and grants nothing;
//! - a link for each two that speak: arguments, and who the caller is. The kernel keeps all others out;
//! - what was declared shared.
//!
//! # Where it ends
//!
//! Signal handlers of the root run while another context has
//! control. getpid(2) differs between contexts. A hostile context may compute on while another one has control, and may
//! stop or end the program. The book tells all differences.

mod api;
mod arch;
mod credentials;
mod descriptors;
mod error;
mod exit;
mod fork;
mod id;
mod memory;
mod peers;
mod requests;
mod rights;
mod shared;
mod spawn;
mod spec;
mod state;
mod switch;
mod syscalls;
mod threads;
mod types;

pub use api::{ROOT, create, create_here, fork, remove_overlay, root};
pub use error::{Error, Result};
pub use exit::kill_self;
pub use memory::overlay::Overlay;
pub use rights::Rights;
pub use shared::link::ROOM;
pub use spec::Spec;
pub use syscalls::filter::Calls;
pub use syscalls::remote::FromCaller;
pub use types::{Arrival, Call, Context, Created, Forked, Start};
