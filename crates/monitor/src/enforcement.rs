//! Who holds what: the cheapest mechanism that enforces a policy.
//!
//! A file that the monitor opens costs a few microseconds; one that the kernel opens under a
//! [Landlock](https://docs.kernel.org/userspace-api/landlock.html) domain costs a tenth of one more than without. But
//! Landlock knows only "beneath this directory", fails silently, and with `EACCES`; and it binds rights to the files
//! that there were when the program started, where the monitor goes by names. So the kernel opens where that makes no
//! difference, and no report of refusals is wanted. All other calls by path stay with the monitor: they are rare, and
//! Landlock does not know most of them (chmod, chown, attributes, times, stat).

use std::path::Path;

use crate::Error;
use crate::guard::Guard;
use crate::landlock;
use crate::log::Log;
use crate::policy::{Opens, Policy, Refusal, Rights};

/// The least interface of Landlock that knows about truncation (Linux 6.2).
const TRUNCATES: i32 = 3;

/// Who holds what.
#[derive(Clone, Debug)]
pub(crate) struct Enforcement {
    /// Why opening files is not left to the kernel; empty where it is.
    by_monitor: Vec<String>,
}

/// Calls, who decides about them, and why: what `orrery guard --explain` tells.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// Which calls.
    pub calls: &'static str,
    /// Who decides.
    pub by: &'static str,
    /// Why.
    pub because: String,
}

impl Enforcement {
    /// The plan for a guard.
    ///
    /// # Errors
    /// Where the policy wants the kernel to decide and that cannot be.
    pub(crate) fn of(guard: &Guard) -> Result<Self, Error> {
        let policy = &guard.policy;
        let mut reasons = Vec::new();
        if policy.learning {
            reasons.push("what the program does is to be learnt".to_owned());
        } else if policy.audited {
            reasons.push("which entries are used is to be reported".to_owned());
        } else if guard.ask.is_some() {
            reasons.push("what the policy does not allow is to be asked about".to_owned());
        } else if policy.opens == Opens::Monitor {
            reasons.push("the policy says mediation = \"always\"".to_owned());
        } else {
            if policy.opens == Opens::Auto && guard.log != Log::Nowhere {
                reasons.push(
                    "refusals are to be reported (--quiet or mediation = \"kernel\" does without)".to_owned(),
                );
            }
            if !guard.landlock || interface() < TRUNCATES {
                reasons.push("there is no Landlock that knows of truncation (Linux 6.2)".to_owned());
            }
            reasons.extend(inexpressible(policy));
        }
        if policy.opens == Opens::Kernel && !policy.learning && !reasons.is_empty() {
            return Err(Error::Kernels(reasons.join("; ")));
        }
        Ok(Self { by_monitor: reasons })
    }

    /// Whether files are opened without the monitor.
    pub(crate) fn kernel_opens(&self) -> bool {
        self.by_monitor.is_empty()
    }
}

impl Guard {
    /// Who decides about which calls under this policy, on this kernel, and why.
    ///
    /// # Errors
    /// Where the policy wants the kernel to decide about opened files and that cannot be.
    pub fn explain(&self) -> Result<Vec<Explanation>, Error> {
        let enforcement = Enforcement::of(self)?;
        let mut all = Vec::new();
        let mut held =
            |calls, by, because: &str| all.push(Explanation { calls, by, because: because.to_owned() });
        const MONITOR: &str = "the monitor";
        const NOBODY: &str = "nobody";
        if enforcement.kernel_opens() {
            held(
                "open, openat, creat",
                "the kernel",
                "Landlock holds the policy, and refusals are not reported",
            );
            held("open with O_PATH, openat2", MONITOR, "Landlock does not know them");
        } else {
            held("open, openat, creat, openat2", MONITOR, &enforcement.by_monitor.join("; "));
        }
        if self.policy.all_visible() && !self.policy.is_recorded() {
            held("stat, access, readlink, statfs ...", NOBODY, "everything may be looked at");
        } else {
            held(
                "stat, access, readlink, statfs ...",
                MONITOR,
                if self.policy.view.is_some() {
                    "the policy has a view, out of which descriptors may lead"
                } else {
                    "the policy limits stat; stat = [\"/\"] does not"
                },
            );
        }
        held(
            "mkdir, unlink, rename, link, chmod, chown, setxattr ...",
            MONITOR,
            "Landlock cannot hold them all",
        );
        if self.policy.trees.all_executable() && !self.policy.learning {
            held("execve", MONITOR, "it has to know what its callers are");
        } else {
            held("execve", "the monitor and the kernel", "the monitor tells, Landlock holds");
        }
        if self.policy.network.is_everything() && !self.policy.is_recorded() {
            held("connect, bind, sendto ...", NOBODY, "all addresses are allowed");
        } else {
            held("connect, bind, sendto ...", MONITOR, "the policy limits addresses");
        }
        held("mount, unshare, io_uring, bpf ...", "the filter", "they lead around the monitor");
        for profile in &self.policy.profiles {
            held("what the seccomp profile refuses", "the filter", profile.name());
        }
        held("read, write, mmap, futex ...", NOBODY, "they name nothing");
        Ok(all)
    }
}

/// Landlock's interface; zero where there is none.
fn interface() -> i32 {
    // SAFETY: with LANDLOCK_CREATE_RULESET_VERSION the kernel takes no attributes: the pointer is null and
    // the size 0.
    let found = unsafe { syscalls::syscall!(syscalls::Sysno::landlock_create_ruleset, 0, 0, 1) };
    found.ok().and_then(|version| i32::try_from(version).ok()).unwrap_or(0)
}

/// What of a policy Landlock cannot say.
fn inexpressible(policy: &Policy) -> Vec<String> {
    let mut reasons = Vec::new();
    if policy.refusal != Refusal::Fails(rustix::io::Errno::ACCESS) {
        reasons.push("the kernel refuses with EACCES only".to_owned());
    }
    for (entry, rights) in policy.trees.allowed() {
        let path = landlock::path_of(entry);
        let shown = path.display();
        let opens = rights.intersects(Rights::READ | Rights::WRITE | Rights::LIST | Rights::CREATE);
        if policy.trees.denies_beneath(entry, Rights::all()) || !policy.rights(entry).contains(rights) {
            reasons.push(format!("something is denied beneath {shown}, which is allowed"));
        } else if opens && !path.exists() {
            reasons.push(format!("{shown} does not exist yet"));
        } else if opens && is_in_processes(path) {
            reasons.push(format!("{shown} is or contains a part of /proc that differs by process"));
        } else if opens && path == Path::new("/dev") {
            reasons.push("/dev contains devices that have to be named one by one".to_owned());
        } else if rights.contains(Rights::CREATE) && !path.is_dir() {
            reasons.push(format!("create names {shown}, which is no directory"));
        }
    }
    if let Some(path) = policy.trees.own().next() {
        let shown = landlock::path_of(path).display();
        reasons.push(format!("which files in {shown} are the program's own only the monitor knows"));
    }
    if policy.view.is_some() {
        reasons.push("which descriptors lead out of the view only the monitor knows".to_owned());
    }
    let unreadable = |path: &&std::path::PathBuf| {
        let real = match path.canonicalize() {
            Ok(real) => real,
            Err(_) if path.exists() => path.to_path_buf(),
            Err(_) => return false,
        };
        let name = std::os::unix::ffi::OsStrExt::as_bytes(real.as_os_str());
        !policy.rights(name).contains(Rights::READ)
    };
    if let Some(path) = landlock::executables(policy).iter().find(unreadable) {
        let shown = path.display();
        reasons.push(format!(
            "{shown} is executed, for which the kernel wants it readable, and read does not list it"
        ));
    }
    reasons
}

/// Whether a path is, or leads to, what procfs has for each process.
fn is_in_processes(path: &Path) -> bool {
    let Ok(rest) = path.strip_prefix("/proc") else { return path == Path::new("/") };
    let first = rest.components().next().map(|name| name.as_os_str().to_string_lossy().into_owned());
    first.is_none_or(|name| {
        matches!(name.as_str(), "self" | "thread-self" | "net" | "mounts")
            || name.bytes().all(|byte| byte.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reasons(files: &str) -> String {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        std::fs::write(base.join("file"), "").unwrap();
        let text = format!("[files]\n{files}").replace("BASE", base.to_str().unwrap());
        inexpressible(&Policy::parse(&text).unwrap()).join("; ")
    }

    #[test]
    fn what_landlock_cannot_say_is_found() {
        const SYSTEM: &str = "read = ['/usr', '/lib', '/lib64', 'BASE', '/proc/meminfo']\n";
        let with = |more: &str| reasons(&format!("{SYSTEM}{more}"));
        assert_eq!(with("write = ['BASE']\ncreate = ['BASE']\nexecute = ['/usr/bin']\nstat = ['/']"), "");
        assert!(with("deny = ['BASE/file']").contains("something is denied beneath"));
        assert!(with("deny = ['BASE']").contains("something is denied beneath"));
        assert!(with("write = ['BASE/other']").contains("does not exist yet"));
        assert!(with("own = ['BASE']").contains("only the monitor knows"));
        assert!(with("create = ['BASE/file']").contains("no directory"));
        assert!(reasons("read = ['/usr', '/dev']").contains("named one by one"));
        assert!(reasons("read = ['/']").contains("differs by process"));
        assert!(reasons("read = ['/usr', '/proc/self']").contains("differs by process"));
        assert!(with("execute = ['/bin/sh', '/etc/hostname']").contains("readable"));
    }

    #[test]
    fn plans_follow_what_is_wanted() {
        let plan = |text: &str, log: Log, landlock: bool| {
            let guard = Guard::new(Policy::parse(text).unwrap()).log(log).landlock(landlock);
            Enforcement::of(&guard).map(|enforcement| enforcement.kernel_opens())
        };
        let text = "[files]\nread = ['/usr', '/lib', '/lib64']";
        assert!(!plan(text, Log::Words, true).unwrap());
        assert!(!plan(text, Log::Nowhere, false).unwrap());
        assert!(!plan(&format!("mediation = 'always'\n{text}"), Log::Nowhere, true).unwrap());
        assert!(plan(&format!("mediation = 'kernel'\n{text}"), Log::Words, false).is_err());
        if interface() < TRUNCATES {
            return orrery_testing::skipped!("there is no Landlock that knows of truncation");
        }
        assert!(plan(text, Log::Nowhere, true).unwrap());
        assert!(plan(&format!("mediation = 'kernel'\n{text}"), Log::Words, true).unwrap());
    }
}
