//! Bytes in JSON: names of files need not be text.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What begins the text that stands for bytes which are no text, or begin with it themselves.
const PREFIX: &str = "base64:";

/// Bytes that are mostly text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Text(pub(crate) Vec<u8>);

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(&self.0) {
            Ok(text) if !text.starts_with(PREFIX) => serializer.serialize_str(text),
            _ => serializer.serialize_str(&format!("{PREFIX}{}", STANDARD.encode(&self.0))),
        }
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.strip_prefix(PREFIX) {
            Some(encoded) => STANDARD.decode(encoded).map(Self).map_err(D::Error::custom),
            None => Ok(Self(text.into_bytes())),
        }
    }
}
