//! Capabilities by name (capabilities(7)).

pub use rustix::thread::CapabilitySet;

/// Returns the set of the one capability with this name, with or without `CAP_` and in either case.
#[must_use]
pub fn named(name: &str) -> Option<CapabilitySet> {
    let upper = name.to_ascii_uppercase();
    CapabilitySet::from_name(upper.strip_prefix("CAP_").unwrap_or(&upper))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_manual() {
        assert_eq!(named("CAP_SYS_TIME"), Some(CapabilitySet::SYS_TIME));
        assert_eq!(named("bpf"), Some(CapabilitySet::BPF));
        assert_eq!(named("Cap_Kill"), Some(CapabilitySet::KILL));
        assert_eq!(named("checkpoint_restore").unwrap().bits(), 1 << 40);
        for wrong in ["sys_tiem", "", "cap_", "cap_cap_kill"] {
            assert_eq!(named(wrong), None, "{wrong}");
        }
    }
}
