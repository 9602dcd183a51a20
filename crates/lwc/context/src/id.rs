//! Secret names of contexts: by them, the copies of two contexts that knew each other find each other
//! again ([`crate::fork::context_copy`]).

use crate::error::{Error, Result};

/// The ID of a context: 128 random bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id(pub(crate) [u8; 16]);

impl Id {
    /// The name of no context.
    pub(crate) const NONE: Self = Self([0; 16]);

    /// Makes a new one.
    pub(crate) fn new() -> Result<Self> {
        let mut bytes = [0; 16];
        let got = rustix::io::retry_on_intr(|| {
            rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        });
        match got {
            Ok(16) => Ok(Self(bytes)),
            Ok(_) => Err(Error::system("getrandom", 16, rustix::io::Errno::IO)),
            Err(errno) => Err(Error::system("getrandom", 16, errno)),
        }
    }
}
