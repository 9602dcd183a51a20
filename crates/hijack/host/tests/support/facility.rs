//! What executives need of the kernel, and the program that puts them under others.

use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// The path of the `orrery` program.
pub(crate) static ORRERY: LazyLock<&str> =
    LazyLock::new(|| orrery_testing::built("orrery").to_string_lossy().into_owned().leak());

/// Returns whether programs cannot have executives here, and reports a skipped test if the kernel has no syscall user dispatch.
pub(crate) fn is_missing() -> bool {
    let Ok(output) = Command::new(*ORRERY).args(["run", "--", "true"]).stdin(Stdio::null()).output() else {
        return false;
    };
    let error = String::from_utf8_lossy(&output.stderr);
    // Any other failure is for the test to find.
    let missing = !output.status.success() && error.contains("syscall user dispatch");
    if missing {
        orrery_testing::skipped!("{}", error.trim_end());
    }
    missing
}
