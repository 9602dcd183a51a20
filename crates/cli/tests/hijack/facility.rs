//! What executives need of the kernel.

use std::process::{Command, Stdio};

/// Whether programs can have executives here; says that the test is skipped if the kernel has no syscall user dispatch.
pub(crate) fn is_missing() -> bool {
    let orrery = env!("CARGO_BIN_EXE_orrery");
    let Ok(output) = Command::new(orrery).args(["run", "--", "true"]).stdin(Stdio::null()).output() else {
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
