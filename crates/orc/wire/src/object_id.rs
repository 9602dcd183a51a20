//! Names of objects: the BLAKE3 hash of their bytes. Only a program that has the bytes, or had them, can know the name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The BLAKE3 hash of an object's bytes (256 bits).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ObjectId(pub [u8; 32]);

impl ObjectId {
    /// Returns the name of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectId({self})")
    }
}

/// A text is not the name of an object.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read the object name '{text}': it is not 64 hexadecimal digits")]
pub struct ParseIdError {
    text: String,
}

impl FromStr for ObjectId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let bad = || ParseIdError { text: text.chars().take(80).collect() };
        if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(bad());
        }
        let mut id = [0; 32];
        for (byte, digits) in id.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| bad())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| bad())?;
        }
        Ok(Self(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        let id = ObjectId::of(b"abc");
        // From the test vectors of BLAKE3's authors.
        assert_eq!(id.to_string(), "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85");
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["", "6437", &"+".repeat(64), &"é".repeat(32), &format!("{id}0")] {
            assert!(bad.parse::<ObjectId>().is_err(), "{bad}");
        }
    }
}
