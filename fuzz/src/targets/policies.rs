//! Policies, which users write, and learn from programs that they do not know.

use std::str;

/// The grammar that all policies share.
pub(super) fn document(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    if let Err(error) = orrery_policy::Document::parse(text, "policy") {
        assert!(error.to_string().starts_with("policy:"), "{error}");
    }
}

/// Policies of `orrery run`.
pub(super) fn executive(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    if let Err(error) = orrery_hijack::Policy::parse(text, "policy") {
        assert!(!error.to_string().is_empty());
    }
}

/// Policies of `orrery guard`.
pub(super) fn guard(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    if let Err(error) = orrery_monitor::Policy::parse(text) {
        assert!(!error.to_string().is_empty());
    }
}
