"""The version, which is that of the Rust workspace (a test compares them)."""

VERSION = "0.1.0"
