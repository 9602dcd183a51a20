//! What executives need of the kernel.

use std::process::{Command, Stdio};

/// Returns whether programs cannot have executives here, and reports a skipped test if the kernel has no syscall user dispatch.
pub(crate) fn is_missing() -> bool {
    let Ok(output) =
        Command::new(env!("CARGO_BIN_EXE_orrery")).args(["run", "--", "true"]).stdin(Stdio::null()).output()
    else {
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
