//! The executive: what sits under a program and receives its system calls.
//!
//! This crate is compiled twice. As an ordinary library it gives [`shared_page`] (the memory that executives and their supervisor
//! share) and [`config`] (what the supervisor writes into an image before it runs) to `orrery-hijack`. With the feature
//! `image` that crate's build script makes a freestanding, position-independent image of it, which is written into every
//! program that is to be a tracee: no C library, no allocation, no thread-local storage.
//!
//! # The path of a call
//!
//! ```text
//!  program                                executive                              kernel
//!  -------                                ---------                              ------
//!  mov $39,%eax
//!  syscall  ------------------------------------------------------------------>  not from the executive's range:
//!                                         sigsys::on_sigsys  <------------------  SIGSYS (syscall user dispatch)
//!                                           performs  ------------------------>  getpid
//!                                           writes rax        <----------------
//!  (goes on behind its syscall)  <------  loads the registers, or rt_sigreturn
//!
//!  after some such calls from one place, `rewriting` has turned the mov into a jump (see `rewrite_plan`):
//!
//!  jmp stub  ------>  stub (near the site):
//!                       mov $39,%eax; counts
//!                       jmp trampoline n  ----->  trampoline n:  syscall  ----------------->  getpid
//!  behind the syscall  <------------------  jmp *target[n]    <----------------
//! ```
//!
//! # What keeps it right
//!
//! - The kernel *kills* a thread whose dispatched call finds SIGSYS blocked or without handler. So the program's masks
//!   never contain SIGSYS (`signals::sigmask`), and its SIGSYS handler is only remembered (`signals::sigaction`).
//! - The handler runs with the program's own mask. A signal that arrives during a blocking call interrupts the
//!   executive's call as it would have interrupted the program's; restarting is done by the kernel, in the executive.
//!   The program's handler may leave with `siglongjmp`: nothing is held across a call that may be interrupted. What it
//!   finds in its `ucontext` is the program at its own call, not the executive (`signals::handlers`).
//! - Nothing in the path of a call allocates or locks. Mapping and unmapping *code*, and rewriting it, exclude one
//!   another (`memory::code_ranges`); these hold a flag with all signals blocked.
//! - Dispatch is a property of a thread and not inherited: `process::clone` arms every new thread and process before it runs
//!   an instruction of the program, `process::exec` has the supervisor put an executive under a new program.
//!
//! - In a program that has registered a function for upcalls ([`upcall`]), the last real-time signal is the executive's as well
//!   (`signals::upcalls`).
//!
//! A handler that answers calls itself is added in `services`.

#![cfg_attr(not(test), no_std)]

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("the executive speaks the system calls of Linux on x86-64 only");

pub mod automaton;
pub mod capture;
pub mod config;
pub mod glob;
pub mod handler;
pub mod journal;
pub mod nr;
pub mod policy;
pub mod request_slots;
pub mod rewrite_plan;
pub mod shared_page;
pub mod upcall;
pub mod users;

#[cfg_attr(not(feature = "image"), expect(dead_code, reason = "only the image uses these"))]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "words and addresses have 64 bits here, and numbers are cut as the kernel cuts them"
)]
mod executive;
