//! Interpreters kept warm: a server starts CPython and imports modules once, then runs one script after another, each in
//! a pristine interpreter, at a small part of what `python3 script.py` costs.
//!
//! ```text
//! orrery warm serve --python --import json,re,sqlite3 --socket /run/user/1000/warm --workers 2 --timeout 2s
//! orrery warm run --socket /run/user/1000/warm script.py args < input
//! ```
//!
//! # How it works
//!
//! ```text
//! client ── connect, send: arguments, environment, descriptors 0 1 2, directory, script ──┐
//!    │                                                                                  queue
//!    │            ┌──────── master: owns the sockets, starts, watches, replaces ────────┐ │
//!    │            │                                                                     │ │
//!    └─ signals ──┼─> worker: CPython, warm ── take one, run it, undo it, answer <──────┼─┘
//!       answer  <─┤   worker: CPython, warm ...                                         │
//!                 └─────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The client passes its own descriptors, so that a script reads and writes the client's terminal, files and pipes
//! themselves; it passes on the signals that it gets, and ends as the script ended. Workers take connections from the one
//! socket without any process in between. What a script did to its worker is undone by
//! [rollback](orrery_rollback), or goes with a forked child (`--isolate fork`): see [`worker`].
//!
//! # How far a script can tell
//!
//! Output, exit status, tracebacks, exit handlers, destructors, threads, signals and buffers are those of `python3`: the
//! tests compare them byte by byte. What differs, by the nature of the thing:
//!
//! - Modules that the server imported are in `sys.modules` from the start, and what they looked at when they were imported
//!   was the server's surroundings.
//! - The seed of `hash()` for strings is that of the worker, the same for all its scripts. Generators of random numbers
//!   that were seeded before are seeded again for every request: `random`, `numpy.random`, OpenSSL's. A library with a
//!   generator of its own that is seeded at import repeats itself.
//! - The process is the worker: its id, parent, session, limits, priority and users are the server's. Processes that a
//!   script leaves behind are killed, where `python3` would leave them.
//! - Variables that `python3` obeys when it starts (`PYTHONHASHSEED` and its like) must be the same for server and client;
//!   `orrery warm run --fallback` starts a `python3` where they are not.
//! - Functions that C libraries registered with `atexit(3)` do not run; objects with destructors that a script hangs into
//!   a module that was imported before are not destroyed. Files left open there are flushed and closed all the same.
//! - Memory that is locked or shared, files, sockets' peers: effects outside of the process are there to stay, as ever.
//!
//! # What keeps scripts apart
//!
//! Scripts may be hostile: the examples hold some fifty that try to be, and the next script finds every trace of them gone.
//! A worker that cannot be put right (a limit was lowered for good, say) tells the result and is replaced. Walls beyond
//! that are described in [`worker::sandbox`], and so is where trust ends: scripts of users who do not trust one another
//! want servers of their own.

pub mod children;
pub mod client;
pub mod config;
pub mod descriptors;
pub mod die;
pub mod protocol;
pub mod server;
pub mod status;
pub mod worker;
