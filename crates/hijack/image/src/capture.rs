//! Which memory is captured that a call's arguments point to.

/// How many pieces of memory may be captured for one call.
pub const CAPTURES: usize = 6;

/// No argument of the call is this.
pub const NO_ARGUMENT: u8 = u8::MAX;

/// Stands for an argument where a call's result is meant.
pub const RESULT: u8 = 6;
/// Stands for an argument where the control data is meant of the message whose header another argument points to.
pub const CONTROL: u8 = 7;
/// Stands for an argument where the address of such a message is meant.
pub const NAME: u8 = 8;

/// A piece of memory that an argument points to.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArgCapture {
    /// The argument; [`NO_ARGUMENT`]: there is nothing to look at.
    pub argument: u8,
    /// How far it extends: one of [`extent`].
    pub extent: u8,
    /// The argument by which it extends, where the extent speaks of one.
    pub by: u8,
    /// When it is looked at: one of [`when`].
    pub after: u8,
    /// The size of an element, in bytes.
    pub size: u16,
    /// The most that is captured, in bytes.
    pub most: u16,
}

impl ArgCapture {
    /// Nothing to look at.
    pub const NONE: Self = Self { argument: NO_ARGUMENT, extent: 0, by: 0, after: 0, size: 0, most: 0 };
}

/// When memory is looked at: where the kernel has written nothing, there is nothing to look at after the call.
pub mod when {
    /// Captured before the call.
    pub const BEFORE: u8 = 0;
    /// After the call, where it succeeds.
    pub const SUCCEEDED: u8 = 1;
    /// After the call, where it succeeds and returns more than zero.
    pub const FOUND: u8 = 2;
    /// After the call, where a signal has interrupted it.
    pub const INTERRUPTED: u8 = 3;
}

/// How far memory extends.
pub mod extent {
    /// One element.
    pub const ONE: u8 = 0;
    /// Up to a zero byte.
    pub const STRING: u8 = 1;
    /// As many elements as the argument `by` says.
    pub const COUNTED: u8 = 2;
    /// As many elements as the call returns, but not more than the argument `by` says, if there is one: some calls return how many
    /// there are, and not how many they have written.
    pub const RETURNED: u8 = 3;
    /// As many bytes as the integer says to which the argument `by` points.
    pub const POINTED: u8 = 4;
    /// As many bits as the argument `by` says, in whole words.
    pub const BITS: u8 = 5;
    /// The strings of a list of pointers that ends with a null pointer, each with its zero byte.
    pub const STRINGS: u8 = 6;
    /// The buffers of so many `struct iovec` as the argument `by` says; after the call as much of them as it returns.
    pub const BUFFERS: u8 = 7;
    /// The buffers of a `struct msghdr`, likewise.
    pub const MESSAGE: u8 = 8;
    /// No memory: where the descriptor leads that the argument is, or that the call returns ([`RESULT`](super::RESULT)).
    pub const DESCRIPTOR: u8 = 9;
    /// The control data of the `struct msghdr` to which the argument `by` points.
    pub const CONTROL: u8 = 10;
    /// The address in the `struct msghdr` to which the argument `by` points.
    pub const NAME: u8 = 11;
}

const _: () = assert!(size_of::<ArgCapture>() == 8);
