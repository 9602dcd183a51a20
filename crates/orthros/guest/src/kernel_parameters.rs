//! The parameters that the host passes on the kernel's command line.

use std::fs;

/// Returns the value of a parameter of the kernel's command line.
pub(crate) fn parameter(name: &str) -> Option<String> {
    let line = fs::read_to_string("/proc/cmdline").ok()?;
    line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
}
