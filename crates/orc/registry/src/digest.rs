//! Names of blobs: the SHA-256 hash of their bytes, as registries write it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The SHA-256 hash of a blob's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Returns the 64 hexadecimal digits.
    pub fn hex(self) -> String {
        use fmt::Write as _;
        self.0.iter().fold(String::with_capacity(64), |mut text, byte| {
            // A string takes all that is written to it.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// A text is not the digest of a blob.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read the digest '{0}': it is not sha256: and 64 hexadecimal digits in lower case")]
pub struct ParseDigestError(String);

impl FromStr for Digest {
    type Err = ParseDigestError;

    fn from_str(text: &str) -> Result<Self, ParseDigestError> {
        let bad = || ParseDigestError(text.chars().take(80).collect());
        let digits = text.strip_prefix("sha256:").ok_or_else(bad)?;
        if digits.len() != 64 || !digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(bad());
        }
        let mut digest = [0; 32];
        for (byte, pair) in digest.iter_mut().zip(digits.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| bad())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| bad())?;
        }
        Ok(Self(digest))
    }
}

impl TryFrom<String> for Digest {
    type Error = ParseDigestError;

    fn try_from(text: String) -> Result<Self, ParseDigestError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_as_they_are_written() {
        let text = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(text.parse::<Digest>().unwrap().to_string(), text);
        let upper = text.to_uppercase().replace("SHA", "sha");
        for bad in ["", "sha256:", &text[1..], &text[..70], &format!("{text}0"), &upper] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }
}
