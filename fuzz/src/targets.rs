//! The targets, by who wrote the bytes.

mod files;
mod messages;
mod policies;

use crate::Target;

/// All targets, by name.
pub const TARGETS: &[Target] = &[
    Target::new("executive_policy", policies::executive),
    Target::new("guard_policy", policies::guard),
    Target::new("guest_report", messages::guest_report),
    Target::new("guest_request", messages::guest_request),
    Target::new("kernel_image", files::kernel_image).with_seeds(files::kernel_images).up_to(16 << 10),
    Target::new("maps", files::maps),
    Target::new("orbit_update", messages::orbit_update),
    Target::new("orc_reply", messages::orc_reply),
    Target::new("orc_request", messages::orc_request),
    Target::new("policy", policies::document),
    Target::new("rewriting", files::rewriting).up_to(64),
    Target::new("unit", files::unit),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_target_has_a_file_and_a_corpus_and_passes_on_that() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        for target in TARGETS {
            let file = root.join("fuzz_targets").join(target.name).with_extension("rs");
            let text = std::fs::read_to_string(&file).unwrap();
            assert!(text.contains(&format!("run(\"{}\", input)", target.name)), "{}", file.display());
            let corpus = std::fs::read_dir(root.join("corpus").join(target.name)).unwrap();
            let mut inputs: Vec<_> =
                corpus.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect();
            inputs.extend((target.seeds)());
            assert!(inputs.len() > 1, "{} has no corpus", target.name);
            for input in inputs {
                assert!(input.len() <= target.longest, "{}", target.name);
                (target.run)(&input);
            }
        }
        assert!(TARGETS.is_sorted_by_key(|target| target.name));
    }
}
