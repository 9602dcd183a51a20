//! Where upcalls of a tracee go.

/// Why an upcall is not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotMade {
    /// The program has no function registered, or has ended.
    Gone,
    /// As many wait as there is room for.
    Full,
}

/// Makes upcalls into one tracee.
pub trait Upcalls {
    /// Has the tracee's function called, without waiting for it.
    ///
    /// # Errors
    /// [`NotMade`].
    fn upcall(&mut self, number: u32, value: i64) -> Result<(), NotMade>;
}
