//! What executives need of the kernel, and the program that puts them under others.

use std::sync::LazyLock;

/// The path of the `orrery` program.
pub(crate) static ORRERY: LazyLock<&str> =
    LazyLock::new(|| orrery_testing::built("orrery").to_string_lossy().into_owned().leak());

/// Returns whether programs cannot have executives here, and reports a skipped test if the kernel has no syscall user dispatch.
pub(crate) fn is_missing() -> bool {
    orrery_testing::executives_are_missing(*ORRERY)
}
