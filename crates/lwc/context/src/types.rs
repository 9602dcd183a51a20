//! What the functions of [`crate::api`] take and return.

use std::os::fd::RawFd;

/// The name of another context; its descriptor stays open until [`Context::close`].
///
/// A new context knows what its creator knew by the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Context {
    pub(crate) fd: RawFd,
    pub(crate) slot: usize,
    pub(crate) serial: u32,
}

/// What a context learns when control enters it.
#[derive(Debug)]
pub struct Arrival {
    /// The context that switched to this one.
    pub caller: Context,
    /// The argument that is a value.
    pub word: u64,
    /// The argument that is a buffer: a copy of what the caller gave.
    pub bytes: Vec<u8>,
    /// The system call by which control came here: `caller` is stopped in it, and waits for an answer
    /// ([`Spec::trap`](crate::Spec::trap)).
    ///
    /// Control that goes there is the answer: [`Context::switch`] with what the call returns (-4095 to -1 are errors),
    /// or [`Context::proceed`].
    pub call: Option<Call>,
}

/// What a new context learns when control enters it for the first time.
#[derive(Debug)]
pub struct Start {
    /// The context that created this one.
    pub creator: Context,
    /// Who switched to it, and with what.
    pub arrival: Arrival,
}

/// Where a call of [`create_here`](crate::create_here) returns.
#[derive(Debug)]
pub enum Created {
    /// The call returned in the creator.
    Creator(Context),
    /// In the new context, when a context switches to it for the first time.
    Context(Start),
}

/// Where a call of [`fork`](crate::fork) returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forked {
    /// In the program that called it, with the number of the new process.
    Parent(u32),
    /// In the new program.
    Child,
}

/// A system call that a context made, and that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number (`SYS_open` and so on).
    pub number: u32,
    /// Its arguments, as they were in the registers. Pointers are the context's: [`crate::Context::copy_in`].
    pub arguments: [u64; 6],
}
