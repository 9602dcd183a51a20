//! What of the superuser's power a program keeps (capabilities(7)).
//!
//! The user number 0 says whose files may be changed; that much a policy decides about. Everything else that the
//! superuser may do, the kernel does not ask the monitor about: the clock, network interfaces, limits, devices,
//! modules. So a program has none of that unless the policy names it.

use orrery_sys::capability::CapabilitySet;

/// What a program keeps whose policy names none: what concerns files, users, ports and signals, about which the rest of
/// the policy decides.
pub(crate) const ORDINARY: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::NET_BIND_SERVICE);

/// What leads around every rule, so that it is given up under rules which let pass what they do not name.
const AROUND: CapabilitySet = CapabilitySet::SYS_MODULE
    .union(CapabilitySet::SYS_RAWIO)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_BOOT)
    .union(CapabilitySet::MAC_OVERRIDE)
    .union(CapabilitySet::MAC_ADMIN)
    .union(CapabilitySet::PERFMON)
    .union(CapabilitySet::BPF);

/// What a program keeps under rules that let pass what they do not name.
pub(crate) const UNDER_RULES: CapabilitySet = CapabilitySet::all().difference(AROUND);

/// Finds a capability by its name.
///
/// # Errors
/// That there is none.
pub(crate) fn named(name: &str) -> Result<CapabilitySet, String> {
    orrery_sys::capability::named(name)
        .ok_or_else(|| format!("no capability is called {name:?}; capabilities(7) lists them"))
}

/// The numbers that the bounding set may have.
pub(crate) fn numbers() -> std::ops::Range<u32> {
    0..64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_is_ordinary() {
        assert!(!ORDINARY.intersects(CapabilitySet::SYS_TIME | AROUND));
        assert!(!UNDER_RULES.contains(CapabilitySet::SYS_ADMIN));
        assert!(UNDER_RULES.contains(CapabilitySet::SYS_TIME));
        assert!(named("sys_tiem").unwrap_err().contains("sys_tiem"));
    }
}
