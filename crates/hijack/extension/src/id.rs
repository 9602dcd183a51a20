//! The numbers of extensions.

/// An extension's number: no other extension of this manager ever has the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(pub(crate) u32);

impl Id {
    /// Returns the number.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }
}
