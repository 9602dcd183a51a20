//! The benchmark harness.
