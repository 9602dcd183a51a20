//! What the kernel says about a program.

use std::collections::BTreeMap;

/// What the kernel says, by what was asked.
pub(super) type Listing = BTreeMap<String, String>;

/// Returns bytes in hexadecimal digits, without the zeros at their end.
pub(super) fn hex(bytes: &[u8]) -> String {
    let length = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    bytes[..length].iter().map(|byte| format!("{byte:02x}")).collect()
}
