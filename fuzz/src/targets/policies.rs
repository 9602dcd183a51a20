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

/// Modules of handlers that a policy of `orrery run` names: what is compiled of them has no instruction that it may not have.
pub(super) fn handler(input: &[u8]) {
    match orrery_handler::Handler::compile(input) {
        Ok(handler) => {
            assert_eq!(orrery_handler::forbidden::find(&handler.code), None);
            assert!((handler.entry as usize) < handler.code.len() && handler.stack >= 0);
            assert!(handler.data.len() <= orrery_hijack_image::handler::MEMORY);
        }
        Err(fault) => assert!(!fault.to_string().is_empty()),
    }
}

/// Policies of `orrery guard`.
pub(super) fn guard(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    if let Err(error) = orrery_monitor::Policy::parse(text) {
        assert!(!error.to_string().is_empty());
    }
}
