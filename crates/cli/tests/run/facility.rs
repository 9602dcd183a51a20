//! What executives need of the kernel.

/// Returns whether programs cannot have executives here, and reports a skipped test if the kernel has no syscall user dispatch.
pub(crate) fn is_missing() -> bool {
    orrery_testing::executives_are_missing(env!("CARGO_BIN_EXE_orrery"))
}
