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

/// Says of a descriptor that `AT_FDCWD` stands for the working directory.
pub const WORKING_DIRECTORY: u8 = 1;

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
    /// No memory: where the descriptor leads that the argument is, or that the call returns ([`RESULT`](super::RESULT)), and what that is:
    /// `size` says what of it ([`details`](super::details)), `by` whether `AT_FDCWD` is one ([`WORKING_DIRECTORY`](super::WORKING_DIRECTORY)). Behind the path there is a zero byte and one of
    /// [`SocketDetails`](super::SocketDetails), [`DeviceDetails`](super::DeviceDetails) or a PID of four bytes, if that was asked for.
    pub const DESCRIPTOR: u8 = 9;
    /// The control data of the `struct msghdr` to which the argument `by` points.
    pub const CONTROL: u8 = 10;
    /// The address in the `struct msghdr` to which the argument `by` points.
    pub const NAME: u8 = 11;
}

/// What is captured of a descriptor, as a set.
pub mod details {
    /// Where it leads, whatever that is.
    pub const PATH: u16 = 1 << 0;
    /// Protocol and addresses of a socket.
    pub const SOCKET: u16 = 1 << 1;
    /// Kind and number of a device.
    pub const DEVICE: u16 = 1 << 2;
    /// The process of a PID file descriptor.
    pub const PROCESS: u16 = 1 << 3;
    /// All of these.
    pub const ALL: u16 = PATH | SOCKET | DEVICE | PROCESS;
}

/// What begins the details of a socket. The address that it is bound to follows, and that of its peer, each of as many bytes as this says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketDetails {
    /// `SO_DOMAIN`.
    pub domain: u16,
    /// `SO_TYPE`.
    pub kind: u16,
    /// `SO_PROTOCOL`.
    pub protocol: u16,
    /// The length of the address that it is bound to.
    pub own: u8,
    /// The length of its peer's address; zero if it is not connected.
    pub peer: u8,
}

impl SocketDetails {
    /// How many bytes it has.
    pub const LENGTH: usize = 8;

    /// Returns it as bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LENGTH] {
        let ([a, b], [c, d], [e, f]) =
            (self.domain.to_ne_bytes(), self.kind.to_ne_bytes(), self.protocol.to_ne_bytes());
        [a, b, c, d, e, f, self.own, self.peer]
    }

    /// Reads it from bytes.
    #[must_use]
    pub fn from_bytes([a, b, c, d, e, f, own, peer]: [u8; Self::LENGTH]) -> Self {
        let number = |bytes: [u8; 2]| u16::from_ne_bytes(bytes);
        Self { domain: number([a, b]), kind: number([c, d]), protocol: number([e, f]), own, peer }
    }
}

/// The details of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceDetails {
    /// `st_mode`, which says of what kind it is.
    pub mode: u32,
    /// The lower half of `st_rdev`, in which the kernel has it whole.
    pub number: u32,
}

impl DeviceDetails {
    /// How many bytes it has.
    pub const LENGTH: usize = 8;

    /// Returns it as bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LENGTH] {
        (u64::from(self.mode) | u64::from(self.number) << 32).to_le_bytes()
    }

    /// Reads it from bytes.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "these are its halves")]
    pub fn from_bytes(bytes: [u8; Self::LENGTH]) -> Self {
        let both = u64::from_le_bytes(bytes);
        Self { mode: both as u32, number: (both >> 32) as u32 }
    }
}

const _: () = assert!(size_of::<ArgCapture>() == 8);
