//! How a call is to be treated.

/// A set of flags; `|` joins them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Flags(u32);

impl Flags {
    /// The empty set of flags.
    pub const NONE: Self = Self(0);
    /// Nobody will ask for the value: nothing is kept for it.
    pub const NO_RETURN_VALUE: Self = Self(1);
    /// A later call may cancel this one while it waits.
    pub const CANCELLABLE: Self = Self(2);
    /// Make the call only if none with the same function and arguments waits.
    pub const SKIP_SAME_ARGUMENT: Self = Self(4);
    /// Make the call only if none waits at all.
    pub const SKIP_ANY: Self = Self(8);
    /// Cancel waiting calls with the same function and arguments that are cancellable.
    pub const CANCEL_SAME_ARGUMENT: Self = Self(16);
    /// Cancel all waiting calls that are cancellable.
    pub const CANCEL_ANY: Self = Self(32);

    /// Returns whether all of `other` are set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns whether any of `other` is set.
    pub const fn has_any(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns the flags as the C interface has them.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// From bits; `None` where some of them mean nothing.
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits < 64 { Some(Self(bits)) } else { None }
    }
}

impl core::ops::BitOr for Flags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}
