//! An executive under unmodified programs: every system call passes through it.
//!
//! After "Hijack: Taking Control of COTS Systems to Enforce Predictable Service Guarantees" (West and Parmer), on a
//! stock kernel. The executive itself is the crate `orrery-hijack-image`; its documentation draws the path of a call.
//! This crate carries its image, puts it under programs, and reads what it counted:
//!
//! ```no_run
//! use orrery_hijack::{Hijack, Options};
//!
//! let hijack = Hijack::start(Options::default().timed(true))?;
//! let status = hijack.spawn("ls".as_ref(), &["/".into()])?.wait()?;
//! for call in hijack.counts().calls {
//!     println!("{:>8} {}", call.total(), call.name());
//! }
//! # Ok::<(), orrery_hijack::Error>(())
//! ```
//!
//! # How a program becomes a tracee
//!
//! ```text
//!  process that is to execute            supervisor                              kernel
//!  --------------------------            -------                              ------
//!  "trace me" (on the page)  -------->  PTRACE_SEIZE, TRACEEXEC
//!  execve  ------------------------------------------------------------------>  new program
//!                                        exec stop  <-------------------------
//!                                        has it map the image, attach the page,
//!                                        take SIGSYS, arm dispatch
//!                                        PTRACE_DETACH
//!  first instruction of the loader: every call is dispatched to the executive
//! ```
//!
//! The launcher does this for the first program, and the executive for each that a tracee executes. The process calls
//! `execve` itself, so that all that this call means (its errors, the credentials, close-on-exec, other threads) is as
//! ever. The alternatives lose something: starting each program through the launcher again cannot report errors to a
//! caller that is gone by then; loading programs by ourselves would have to imitate the kernel.
//!
//! The supervisor is one process for all tracees of a run; it is not in the path of any other call. A tracee without
//! supervisor (it was killed) goes on; programs that it executes are not followed, which is counted.
//!
//! # What is no boundary
//!
//! The executive shares the program's address space. It sees every call of a program that does not fight it; a program
//! that does can find and unmake it. A policy that must hold against hostile code belongs into a filter of the kernel.

mod archive;
mod arg_names;
mod arg_types;
pub mod calls;
mod code_locations;
mod constants;
pub mod decode;
mod descriptors;
mod error;
mod events;
mod form;
mod futex;
#[doc(hidden)]
pub mod fuzzing;
mod identity;
mod image;
mod inject;
mod instruction_boundaries;
mod launch;
mod maps;
pub mod policy;
mod program;
mod rewrite_window;
mod rewritten_pages;
mod shared_code;
mod shared_segment;
mod structures;
mod supervisor;
pub mod symbols;
mod syscall_counts;
mod unfinished;
mod unfollowed;

pub use code_locations::CodeLocations;
pub use error::{Error, Result};
pub use events::{Event, Events, JournalQuota, State};
pub use launch::{Child, Hijack, Options};
pub use policy::{Policy, PolicyError, Services};
pub use syscall_counts::{Call, Counts, bucket_end};
