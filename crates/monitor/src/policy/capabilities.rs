//! What of the superuser's power a program keeps (capabilities(7)).
//!
//! The user number 0 says whose files may be changed; that much a policy decides about. Everything else that the superuser
//! may do, the kernel does not ask the monitor about: the clock, network interfaces, limits, devices, modules. So a program
//! has none of that unless the policy names it.

use bitflags::bitflags;

/// Capabilities by name, each with its number being its place.
const NAMES: [&str; 41] = [
    "chown",
    "dac_override",
    "dac_read_search",
    "fowner",
    "fsetid",
    "kill",
    "setgid",
    "setuid",
    "setpcap",
    "linux_immutable",
    "net_bind_service",
    "net_broadcast",
    "net_admin",
    "net_raw",
    "ipc_lock",
    "ipc_owner",
    "sys_module",
    "sys_rawio",
    "sys_chroot",
    "sys_ptrace",
    "sys_pacct",
    "sys_admin",
    "sys_boot",
    "sys_nice",
    "sys_resource",
    "sys_time",
    "sys_tty_config",
    "mknod",
    "lease",
    "audit_write",
    "audit_control",
    "setfcap",
    "mac_override",
    "mac_admin",
    "syslog",
    "wake_alarm",
    "block_suspend",
    "audit_read",
    "perfmon",
    "bpf",
    "checkpoint_restore",
];

bitflags! {
    /// A set of capabilities.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct Capabilities: u64 {
        /// Changes owners.
        const CHOWN = 1;
        /// Passes by file modes.
        const DAC_OVERRIDE = 1 << 1;
        /// Passes by file modes for reading.
        const DAC_READ_SEARCH = 1 << 2;
        /// Is the owner of every file.
        const FOWNER = 1 << 3;
        /// Keeps the setuid bit of files that it changes.
        const FSETID = 1 << 4;
        /// Signals processes of other users.
        const KILL = 1 << 5;
        /// Takes other groups.
        const SETGID = 1 << 6;
        /// Becomes other users.
        const SETUID = 1 << 7;
        /// Gives capabilities up for all that is executed.
        const SETPCAP = 1 << 8;
        /// Binds ports below 1024.
        const NET_BIND_SERVICE = 1 << 10;
        /// Loads modules.
        const SYS_MODULE = 1 << 16;
        /// Reaches devices' memory.
        const SYS_RAWIO = 1 << 17;
        /// Administers the system.
        const SYS_ADMIN = 1 << 21;
        /// Restarts the system.
        const SYS_BOOT = 1 << 22;
        /// Sets the clock.
        const SYS_TIME = 1 << 25;
        /// Passes by mandatory access control.
        const MAC_OVERRIDE = 1 << 32;
        /// Configures mandatory access control.
        const MAC_ADMIN = 1 << 33;
        /// Looks into the kernel by performance counters.
        const PERFMON = 1 << 38;
        /// Loads programs into the kernel.
        const BPF = 1 << 39;

        const _ = !0;
    }
}

impl Capabilities {
    /// What a program keeps whose policy names none: what concerns files, users, ports and signals, about which the rest of
    /// the policy decides.
    pub(crate) const ORDINARY: Self = Self::CHOWN
        .union(Self::DAC_OVERRIDE)
        .union(Self::DAC_READ_SEARCH)
        .union(Self::FOWNER)
        .union(Self::FSETID)
        .union(Self::KILL)
        .union(Self::SETGID)
        .union(Self::SETUID)
        .union(Self::SETPCAP)
        .union(Self::NET_BIND_SERVICE);

    /// What leads around every rule, so that nobody keeps it under rules which let pass whatever they do not name.
    const AROUND: Self = Self::SYS_MODULE
        .union(Self::SYS_RAWIO)
        .union(Self::SYS_ADMIN)
        .union(Self::SYS_BOOT)
        .union(Self::MAC_OVERRIDE)
        .union(Self::MAC_ADMIN)
        .union(Self::PERFMON)
        .union(Self::BPF);

    /// What a program keeps under rules that let pass what they do not name.
    pub(crate) const UNDER_RULES: Self = Self::all().difference(Self::AROUND);

    /// Finds a capability by its name, with or without `CAP_` and in either case.
    ///
    /// # Errors
    /// That there is none.
    pub(crate) fn named(name: &str) -> Result<Self, String> {
        let lower = name.to_ascii_lowercase();
        let plain = lower.strip_prefix("cap_").unwrap_or(&lower);
        NAMES
            .iter()
            .position(|known| *known == plain)
            .map(|number| Self::from_bits_retain(1 << number))
            .ok_or_else(|| format!("no capability is called {name:?}; capabilities(7) lists them"))
    }
}

/// How many there are to be dropped from the bounding set.
pub(crate) fn numbers() -> std::ops::Range<u32> {
    0..64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_manual() {
        assert_eq!(Capabilities::named("CAP_SYS_TIME"), Ok(Capabilities::SYS_TIME));
        assert_eq!(Capabilities::named("bpf"), Ok(Capabilities::BPF));
        assert_eq!(Capabilities::named("cap_kill"), Ok(Capabilities::KILL));
        assert_eq!(Capabilities::named("checkpoint_restore").unwrap().bits(), 1 << 40);
        assert!(Capabilities::named("sys_tiem").unwrap_err().contains("sys_tiem"));
    }

    #[test]
    fn little_is_ordinary() {
        assert!(!Capabilities::ORDINARY.intersects(Capabilities::SYS_TIME | Capabilities::AROUND));
        assert!(!Capabilities::UNDER_RULES.contains(Capabilities::SYS_ADMIN));
        assert!(Capabilities::UNDER_RULES.contains(Capabilities::SYS_TIME));
    }
}
