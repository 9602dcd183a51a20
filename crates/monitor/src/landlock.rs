//! The second wall: a [Landlock](https://docs.kernel.org/userspace-api/landlock.html) domain around the program.
//!
//! Everything that a program may do with paths the monitor does, outside of this domain. So the domain need not allow
//! what the policy allows: it allows to execute what the policy lets be executed, which is the one thing that the
//! program's own process does with a path, and nothing else. What gets past the monitor, by a race or by a call that it
//! does not know, ends here. The domain also keeps the program from tracing and signalling processes outside, the
//! monitor included.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};

use rustix::io::Errno;

use crate::Error;
use crate::policy::rules::Executions;
use crate::policy::trees::Trees;
use crate::policy::{Policy, Rights};

/// The newest interface whose rights are asked for; an older kernel gives what it has.
const NEWEST: ABI = ABI::V7;

/// The kernel executes these besides a program that names them, and needs the right for them; the programs then read
/// all else through the monitor.
const LOADERS: [&str; 6] = [
    "/lib64/ld-linux-x86-64.so.2",
    "/lib/ld-linux-aarch64.so.1",
    "/lib/ld-linux.so.2",
    "/lib/ld-musl-x86_64.so.1",
    "/lib/ld-musl-aarch64.so.1",
    "/lib64/ld64.so.2",
];

/// What the wall holds on this kernel.
#[derive(Debug)]
pub(crate) struct LandlockDomain {
    /// The rules, to be enforced by the program's process; `None` where there is no Landlock.
    pub(crate) rules: Option<OwnedFd>,
    /// Whether nothing is executed that the policy does not allow.
    pub(crate) executions: bool,
    /// What the kernel executes.
    pub(crate) executables: Executables,
    /// Whether signals and tracing stay inside.
    pub(crate) processes: bool,
}

impl LandlockDomain {
    /// No wall.
    pub(crate) fn none(policy: &Policy) -> Self {
        Self {
            rules: None,
            executions: policy.learning || policy.trees.all_executable(),
            executables: Executables::All,
            processes: false,
        }
    }

    /// Builds the wall for a policy.
    ///
    /// # Errors
    /// Where the kernel has Landlock but refuses the rules.
    pub(crate) fn new(policy: &Policy, kernel_opens: bool) -> Result<Self, Error> {
        let failed = |error: RulesetError| Error::Kernel {
            operation: "building the Landlock rules (--no-landlock does without)",
            source: std::io::Error::other(error),
        };
        let scoped = Ruleset::default()
            .set_compatibility(CompatLevel::HardRequirement)
            .scope(Scope::Signal)
            .and_then(Ruleset::create)
            .is_ok();
        let mut rules = Ruleset::default().set_compatibility(CompatLevel::BestEffort);
        let mut scope = BitFlags::from(Scope::Signal);
        let executes;
        let policy = match &policy.rules {
            Some(given) => {
                executes = executing(policy, given.0.executions());
                if !executes.trees.all_executable() {
                    rules = rules.handle_access(AccessFs::Execute).map_err(failed)?;
                }
                &executes
            }
            None => policy,
        };
        let by_rules = policy.rules.is_some();
        if !policy.learning && !by_rules {
            rules = rules.handle_access(AccessFs::from_all(NEWEST)).map_err(failed)?;
            if !policy.network.is_everything() {
                rules = rules.handle_access(AccessNet::from_all(NEWEST)).map_err(failed)?;
                scope |= Scope::AbstractUnixSocket;
            }
        }
        let mut executables = Executables::All;
        let mut rules = rules.scope(scope).map_err(failed)?.create().map_err(failed)?;
        if !(policy.learning || by_rules && policy.trees.all_executable()) {
            let access =
                if by_rules { AccessFs::Execute.into() } else { AccessFs::Execute | AccessFs::ReadFile };
            let paths = self::executables(policy);
            for path in &paths {
                rules = allow(rules, path, access).map_err(failed)?;
            }
            executables = Executables::of(&paths);
        }
        if kernel_opens {
            for (path, rights) in policy.trees.allowed() {
                let path = path_of(path);
                let directory = path.is_dir();
                let access = opening(rights, directory);
                if !access.is_empty() {
                    rules = allow(rules, path, access).map_err(failed)?;
                }
            }
        }
        let rules: Option<OwnedFd> = rules.into();
        let none = Self::none(policy);
        Ok(Self {
            executions: rules.is_some() || none.executions,
            executables: if rules.is_some() { executables } else { Executables::All },
            processes: scoped && rules.is_some(),
            rules,
        })
    }
}

/// Lets the calling thread make sockets beneath this directory and nowhere else, for the rest of its life.
///
/// # Errors
/// Where there is no Landlock.
pub(crate) fn sockets_only_in(directory: &OwnedFd) -> Result<(), Errno> {
    let confined = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::MakeSock)
        .and_then(Ruleset::create)
        .and_then(|rules| rules.add_rule(PathBeneath::new(directory, AccessFs::MakeSock)))
        .and_then(RulesetCreated::restrict_self);
    confined.map(drop).map_err(|_| Errno::NOSYS)
}

/// What the kernel executes. Rights belong to the files that there were when the rules were made: what is made later
/// lies in a directory that has the right, or cannot be executed.
#[derive(Debug)]
pub(crate) enum Executables {
    /// Everything.
    All,
    /// These files and what lies beneath these directories.
    Only {
        /// By device and number.
        files: HashSet<(u64, u64)>,
        /// Without symbolic links.
        directories: Vec<PathBuf>,
    },
}

impl Executables {
    fn of(paths: &[PathBuf]) -> Self {
        let (mut files, mut directories) = (HashSet::new(), Vec::new());
        for path in paths {
            match fs::metadata(path) {
                Ok(known) if known.is_dir() => directories.extend(path.canonicalize()),
                Ok(known) => {
                    files.insert((known.dev(), known.ino()));
                }
                Err(_) => (),
            }
        }
        Self::Only { files, directories }
    }

    /// Whether the kernel executes this file, which is at `path`.
    pub(crate) fn contain(&self, stat: &rustix::fs::Stat, path: &[u8]) -> bool {
        match self {
            Self::All => true,
            Self::Only { files, directories } => {
                let path = Path::new(OsStr::from_bytes(path));
                files.contains(&(stat.st_dev, stat.st_ino))
                    || directories.iter().any(|directory| path.starts_with(directory))
            }
        }
    }
}

/// A policy that lets these be executed, and says nothing else.
fn executing(policy: &Policy, executions: Executions) -> Policy {
    let mut trees = Trees::default();
    match executions {
        Executions::AllBut(paths) => {
            trees.allow(b"/", Rights::all());
            paths.iter().for_each(|path| trees.deny(path.as_os_str().as_bytes()));
        }
        Executions::Only(paths) => {
            paths.iter().for_each(|path| trees.allow(path.as_os_str().as_bytes(), Rights::EXECUTE));
        }
    }
    Policy { trees, ..policy.clone() }
}

/// What is executable, without what is denied beneath: Landlock only allows, so a directory with something denied in it
/// becomes its other entries.
pub(crate) fn executables(policy: &Policy) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = LOADERS.iter().map(PathBuf::from).collect();
    let mut waiting: Vec<PathBuf> = policy.trees.executable().map(|path| path_of(path).to_owned()).collect();
    while let Some(path) = waiting.pop() {
        let bytes = path.as_os_str().as_bytes();
        let excepts = policy.trees.excepts_beneath(bytes);
        if !excepts && !policy.rights(bytes).contains(Rights::EXECUTE) {
            continue;
        }
        if excepts || policy.trees.denies_beneath(bytes, Rights::EXECUTE) {
            // A link leads to something that is listed by itself, or is not to be.
            let entries = fs::read_dir(&path).into_iter().flatten().flatten();
            let real = entries.filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_symlink()));
            waiting.extend(real.map(|entry| entry.path()));
        } else {
            all.push(path);
        }
    }
    all
}

/// An entry's path, of which the root is empty.
pub(crate) fn path_of(entry: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(if entry.is_empty() { b"/" } else { entry }))
}

/// What the kernel is to allow of open(2), where it decides. All else is the monitor's.
fn opening(rights: Rights, directory: bool) -> BitFlags<AccessFs> {
    let mut access = BitFlags::empty();
    for (right, of_files, of_directories) in [
        (Rights::READ, AccessFs::ReadFile | AccessFs::IoctlDev, BitFlags::empty()),
        (Rights::LIST, BitFlags::empty(), AccessFs::ReadDir.into()),
        (Rights::WRITE, AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev, BitFlags::empty()),
        (Rights::CREATE, BitFlags::empty(), AccessFs::MakeReg.into()),
    ] {
        if rights.contains(right) {
            access |= of_files;
            if directory {
                access |= of_directories;
            }
        }
    }
    access
}

fn allow(
    rules: RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, RulesetError> {
    // What does not exist yet cannot be named; what is made later lies in a directory that is.
    let Ok(opened) = PathFd::new(path) else { return Ok(rules) };
    rules.add_rule(PathBeneath::new(opened, access))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_do_not_bring_back_what_is_denied() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        fs::create_dir(base.join("real")).unwrap();
        for name in ["allowed", "denied"] {
            fs::write(base.join("real").join(name), "").unwrap();
        }
        std::os::unix::fs::symlink("real", base.join("link")).unwrap();
        let text = format!("[files]\nexecute = ['{0}']\ndeny = ['{0}/real/denied']", base.display());
        let found = executables(&Policy::parse(&text).unwrap());
        assert!(found.contains(&base.join("real/allowed")));
        assert!(!found.iter().any(|path| path.ends_with("link") || path.ends_with("denied")), "{found:?}");
    }
}
