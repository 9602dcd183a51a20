//! Policies, which users write, and learn from programs that they do not know.

use std::str;

use orrery_compiled_handler::Reply;
use orrery_sys::capability::CapabilitySet;
use orrery_sys::seccomp::{self, Action};

/// Seccomp profiles of containers, which whoever makes an image or a chart hands on: the filter of one that is honoured does what
/// the rules say, whether as a program or as a model, and asks nobody.
pub(super) fn seccomp_profile(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    let profile = match orrery_monitor::SeccompProfile::parse(text, "profile") {
        Ok(profile) => profile,
        Err(error) => return assert!(error.to_string().starts_with("profile:"), "{error}"),
    };
    let byte = |at: usize| u64::from(input.get(at % input.len()).copied().unwrap_or(0));
    for capabilities in [CapabilitySet::empty(), CapabilitySet::all()] {
        let filter = profile.filter(capabilities, (6, 1));
        let program = filter.program();
        for number in 0..500_u32 {
            let at = number as usize;
            let arguments = [0, 1, byte(at), u64::MAX - byte(at + 1), byte(at + 2) << 32, byte(at + 3)];
            let action = filter.action(number.cast_signed(), &arguments);
            assert_ne!(action, Action::Notify);
            assert_eq!(seccomp::simulate(&program, seccomp::NATIVE, number, arguments), action.value());
        }
    }
}

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
    match orrery_handler::compile(input) {
        Ok(handler) => {
            assert_eq!(orrery_compiled_handler::forbidden::find(&handler.code), None);
            assert!((handler.entry as usize) < handler.code.len() && handler.stack >= 0);
            assert!(handler.data.len() <= orrery_hijack_image::handler::MEMORY);
            // Whatever is compiled arrives.
            let reply = Reply::Compiled(handler);
            let bytes = orrery_compiled_handler::encode(&reply).unwrap_or_default();
            assert_eq!(orrery_compiled_handler::decode(&bytes), Ok(reply));
        }
        Err(fault) => assert!(!fault.to_string().is_empty()),
    }
}

/// What the compiler of handlers writes: a handler of it is one that the executive can run, and is written as the same again.
pub(super) fn compiled_handler(input: &[u8]) {
    match orrery_compiled_handler::decode(input) {
        Ok(reply) => {
            if let Reply::Compiled(handler) = &reply {
                assert_eq!(orrery_compiled_handler::forbidden::find(&handler.code), None);
                assert!((handler.entry as usize) < handler.code.len() && handler.stack >= 0);
                assert!(handler.data.len() <= orrery_hijack_image::handler::MEMORY);
            }
            let bytes = orrery_compiled_handler::encode(&reply).unwrap_or_default();
            assert_eq!(orrery_compiled_handler::decode(&bytes), Ok(reply));
        }
        Err(invalid) => assert!(!invalid.to_string().is_empty()),
    }
}

/// What the compiler makes of the modules that handlers are fuzzed with, and what it says of one that is none.
pub(super) fn compiled_handlers() -> Vec<Vec<u8>> {
    let refused = Reply::Refused("it exports no function `decide`".to_owned());
    let modules: [&[u8]; 2] = [
        include_bytes!("../../../examples/handlers/secret.wat"),
        include_bytes!("../../corpus/handler/calls"),
    ];
    let compiled = modules.into_iter().filter_map(|module| orrery_handler::compile(module).ok());
    let replies = compiled.map(Reply::Compiled).chain([refused]);
    replies.filter_map(|reply| orrery_compiled_handler::encode(&reply).ok()).collect()
}

/// Policies of `orrery guard`.
pub(super) fn guard(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    if let Err(error) = orrery_monitor::Policy::parse(text) {
        assert!(!error.to_string().is_empty());
    }
}
