//! What a script may open: [Landlock](https://docs.kernel.org/userspace-api/landlock.html) rules.
//!
//! Files that the client opened and passed (its streams, the script itself) are not affected: the client had the right
//! to open them.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};

use super::error::{Protections, SandboxError};
use crate::config::Sandbox;

/// The newest interface whose rights are asked for; an older kernel gives what it has.
const NEWEST: ABI = ABI::V7;

/// What programs of the system need to read or execute, where it exists.
const SYSTEM: [&str; 33] = [
    "/bin",
    "/etc/alternatives",
    "/etc/gai.conf",
    "/etc/group",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/inputrc",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/etc/magic",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/os-release",
    "/etc/passwd",
    "/etc/protocols",
    "/etc/python3",
    "/etc/python3.11",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/terminfo",
    "/etc/timezone",
    "/lib",
    "/lib64",
    "/lib/terminfo",
    "/sbin",
    "/sys/devices/system/cpu",
    "/usr",
    "/var/lib/ca-certificates",
];

/// Devices that harm nobody.
const DEVICES: [&str; 6] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"];

/// What of `/proc` may be read where other processes' entries stand there too: of the worker's children not even their
/// own.
const PROC_COMMON: [&str; 11] = [
    "/proc/cpuinfo",
    "/proc/filesystems",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/sys/kernel",
    "/proc/sys/vm",
    "/proc/sys/fs",
    "/proc/uptime",
    "/proc/version",
    "/proc/self",
];

pub(super) fn restrict(
    sandbox: &Sandbox,
    protections: Protections,
    library: &[PathBuf],
) -> Result<(), SandboxError> {
    let read = AccessFs::from_read(NEWEST);
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?;
    if !sandbox.net {
        ruleset = ruleset.handle_access(AccessNet::from_all(NEWEST))?;
    }
    let mut rules = ruleset.create()?;
    let proc: &[&str] = if protections.namespaces { &["/proc"] } else { &PROC_COMMON };
    for path in SYSTEM.iter().chain(proc).map(Path::new).chain(library.iter().map(PathBuf::as_path)) {
        rules = allow_if_there(rules, path, read)?;
    }
    for path in DEVICES {
        rules = allow_if_there(rules, Path::new(path), read | AccessFs::WriteFile | AccessFs::IoctlDev)?;
    }
    for path in &sandbox.read {
        rules = allow(rules, path, read)?;
    }
    for path in &sandbox.write {
        rules = allow(rules, path, AccessFs::from_all(NEWEST))?;
    }
    let status = rules.restrict_self()?;
    match status.ruleset {
        RulesetStatus::NotEnforced => Err(SandboxError::NoLandlock),
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Ok(()),
    }
}

fn allow(
    rules: RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, SandboxError> {
    let opened = PathFd::new(path).map_err(|source| SandboxError::Path { path: path.to_owned(), source })?;
    add(rules, path, opened, access)
}

fn allow_if_there(
    rules: RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, SandboxError> {
    match PathFd::new(path) {
        Ok(opened) => add(rules, path, opened, access),
        Err(_) => Ok(rules),
    }
}

fn add(
    rules: RulesetCreated,
    path: &Path,
    opened: PathFd,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, SandboxError> {
    // Rights that make sense for directories only are refused for files.
    let access = if path.is_dir() { access } else { access & AccessFs::from_file(NEWEST) };
    Ok(rules.add_rule(PathBeneath::new(opened, access))?)
}
