//! The targets, by who wrote the bytes.

mod files;
mod messages;
mod policies;

use crate::Target;

/// All targets, by name.
pub const TARGETS: &[Target] = &[
    Target::new("auditor_library", files::library).with_seeds(files::libraries),
    Target::new("compiled_handler", policies::compiled_handler).with_seeds(policies::compiled_handlers),
    Target::new("container_config", files::container_config),
    Target::new("executive_policy", policies::executive),
    Target::new("ext4_block", files::ext4_block).with_seeds(files::ext4_blocks),
    Target::new("guard_policy", policies::guard),
    Target::new("guest_report", messages::guest_report),
    Target::new("guest_request", messages::guest_request),
    Target::new("handler", policies::handler),
    Target::new("kernel_image", files::kernel_image).with_seeds(files::kernel_images).up_to(16 << 10),
    Target::new("kernel_memory", files::kernel_memory)
        .with_seeds(files::kernel_memories)
        .up_to(40 * orrery_kimage::fuzzing::CHANGE),
    Target::new("mapped_library", orrery_orc_instance::fuzzing::mapped_library)
        .with_seeds(orrery_orc_instance::fuzzing::mapped_libraries)
        .up_to(8 << 10),
    Target::new("maps", files::maps),
    Target::new("mount_link", files::mount_link).with_seeds(files::mount_links),
    Target::new("orbit_update", messages::orbit_update),
    Target::new("orc_reply", messages::orc_reply).with_seeds(messages::orc_replies),
    Target::new("orc_request", messages::orc_request),
    Target::new("policy", policies::document),
    Target::new("registry_layer", files::registry_layer),
    Target::new("registry_listing", messages::registry_listing),
    Target::new("rewriting", files::rewriting).up_to(64),
    Target::new("script_answer", messages::script_answer),
    Target::new("seccomp_profile", policies::seccomp_profile),
    Target::new("unit", files::unit),
    Target::new("vault_message", messages::vault_message),
    Target::new("warm_reply", messages::warm_reply).with_seeds(messages::warm_replies),
    Target::new("warm_request", messages::warm_request).with_seeds(messages::warm_requests),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus(target: &Target) -> Vec<Vec<u8>> {
        let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
        let files = std::fs::read_dir(directory).into_iter().flatten();
        let mut inputs: Vec<_> = files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
        inputs.extend((target.seeds)());
        inputs
    }

    #[test]
    fn each_target_has_a_file_and_a_corpus_and_passes_on_that() {
        for target in TARGETS {
            let file =
                std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz_targets").join(target.name);
            let text = std::fs::read_to_string(file.with_extension("rs")).unwrap();
            assert!(text.contains(&format!("run(\"{}\", input)", target.name)), "{}", target.name);
            let inputs = corpus(target);
            assert!(inputs.len() > 1, "{} has no corpus", target.name);
            for input in inputs {
                assert!(input.len() <= target.longest, "{}", target.name);
                (target.run)(&input);
            }
        }
        assert!(TARGETS.is_sorted_by_key(|target| target.name));
    }

    /// Mutations of what is refused at its beginning reach nothing further on.
    #[test]
    fn corpora_hold_what_is_accepted() {
        use orrery_orthros_wire::{Report, Request};
        use orrery_warm::protocol as warm;
        let text = |input: &[u8]| String::from_utf8(input.to_vec()).unwrap();
        let accepted = |name: &str, accepts: &dyn Fn(&[u8]) -> bool| {
            let inputs = corpus(crate::target(name).unwrap());
            (inputs.iter().filter(|input| accepts(input)).count(), inputs.len())
        };
        let all = |name: &str, accepts: &dyn Fn(&[u8]) -> bool| {
            let (count, of) = accepted(name, accepts);
            assert_eq!(count, of, "{name}");
        };
        all("executive_policy", &|input| orrery_hijack::Policy::parse(&text(input), "").is_ok());
        all("guard_policy", &|input| orrery_monitor::Policy::parse(&text(input)).is_ok());
        all("policy", &|input| orrery_policy::Document::parse(&text(input), "").is_ok());
        all("handler", &|input| orrery_handler::compile(input).is_ok());
        all("compiled_handler", &|input| orrery_compiled_handler::decode(input).is_ok());
        all("orc_request", &|input| orrery_orc_wire::protocol::decode_request(input).is_ok());
        all("orc_reply", &|input| orrery_orc_wire::protocol::decode_reply(input).is_some());
        all("guest_report", &|input| orrery_orthros_wire::decode::<Report>(input).is_ok());
        all("guest_request", &|input| orrery_orthros_wire::decode::<Request>(input).is_ok());
        all("warm_reply", &|input| warm::decode::<warm::Reply>(input).is_ok());
        all("script_answer", &|input| matches!(orrery_warm_http::answer::parse(input), Ok(Some(_))));
        all("container_config", &|input| {
            let mut config = serde_json::from_slice(input).unwrap();
            let path = std::path::Path::new("/store");
            orrery_orc_auditor::container::edit(&mut config, path, None, "/auditor.so").is_ok()
        });
        assert!(accepted("warm_request", &|input| warm::decode::<warm::Request<'_>>(input).is_ok()).0 >= 4);
        assert!(accepted("warm_request", &|input| warm::decode::<warm::Question>(input).is_ok()).0 >= 2);
    }
}
