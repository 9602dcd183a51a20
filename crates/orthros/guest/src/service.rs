//! The service as the image describes it: its program, and in which manner it is started.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, chown, lchown};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use crate::setup::to_its_end;

/// Where the image describes it, in JSON.
const DESCRIPTION: &str = "/etc/orrery/service";

/// What runs in the pair; `orrery-orthros-host` has the same, for writing.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Service {
    argv: Vec<String>,
    manner: Manner,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manner {
    name: Option<String>,
    before: Vec<Invocation>,
    environment: Option<Vec<(String, String)>>,
    working: Option<(String, bool)>,
    identity: Option<Identity>,
    as_root: bool,
    umask: Option<u32>,
    limits: Vec<(u32, u64, u64)>,
    nice: Option<i32>,
    no_new_privileges: bool,
    ignores_pipes: bool,
    folders: Vec<Folder>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Invocation {
    program: String,
    name: Option<String>,
    arguments: Vec<String>,
    may_fail: bool,
    as_root: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Folder {
    path: String,
    mode: u32,
    uid: u32,
    gid: u32,
    owned: bool,
}

impl Service {
    pub(crate) fn read() -> Result<Self> {
        let text = fs::read_to_string(DESCRIPTION).with_context(|| format!("cannot read {DESCRIPTION}"))?;
        serde_json::from_str(&text).with_context(|| format!("{DESCRIPTION} describes no service"))
    }

    /// Makes the folders that it finds. `disk` is where its disk is mounted.
    pub(crate) fn make_folders(&self, disk: Option<&Path>) -> Result<()> {
        for folder in &self.manner.folders {
            folder.make(disk).with_context(|| format!("cannot make {}", folder.path))?;
        }
        Ok(())
    }

    /// Runs to their end, one after the other, the commands that come before it.
    pub(crate) fn run_before(&self) -> Result<()> {
        for step in &self.manner.before {
            let mut command = Command::new(&step.program);
            command.args(&step.arguments);
            self.manner.prepare(&mut command, step.name.as_deref(), step.as_root);
            let (status, said) = to_its_end(&mut command)?;
            ensure!(
                status.success() || step.may_fail,
                "{}, which comes before the service: {status}: {said}",
                step.program
            );
        }
        Ok(())
    }

    /// The command that starts it.
    pub(crate) fn command(&self) -> Result<Command> {
        let (program, arguments) = self.argv.split_first().context("nothing to run")?;
        let mut command = Command::new(program);
        command.args(arguments);
        self.manner.prepare(&mut command, self.manner.name.as_deref(), self.manner.as_root);
        Ok(command)
    }
}

impl Manner {
    /// Has a command run as the service is to.
    fn prepare(&self, command: &mut Command, name: Option<&str>, as_root: bool) {
        if let Some(name) = name {
            command.arg0(name);
        }
        if let Some(environment) = &self.environment {
            command.env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
        }
        let working = self.working.as_ref().filter(|(path, may_lack)| !may_lack || Path::new(path).is_dir());
        command.current_dir(working.map_or("/", |(path, _)| path));
        let manner = self.clone();
        // SAFETY: what is called makes system calls only, on memory that was there before the fork, and allocates nothing.
        unsafe { command.pre_exec(move || manner.become_it(as_root)) };
    }

    /// Between fork and exec: a session of its own, limits, and whose process it is from then on.
    fn become_it(&self, as_root: bool) -> io::Result<()> {
        let check = |result: libc::c_long| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
        rustix::process::setsid()?;
        for &(number, soft, hard) in &self.limits {
            let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
            // SAFETY: the limit is readable for the call.
            check(unsafe { libc::setrlimit(number, &raw const limit) }.into())?;
        }
        if let Some(nice) = self.nice {
            // SAFETY: no pointers are involved.
            check(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) }.into())?;
        }
        if let Some(umask) = self.umask {
            // SAFETY: no pointers are involved.
            unsafe { libc::umask(umask) };
        }
        if self.ignores_pipes {
            // SAFETY: no handler is set.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        }
        if let Some(identity) = self.identity.as_ref().filter(|_| !as_root) {
            // SAFETY: the groups are readable, as many as are said.
            check(unsafe { libc::setgroups(identity.groups.len(), identity.groups.as_ptr()) }.into())?;
            // SAFETY: no pointers are involved; this process has one thread.
            check(unsafe { libc::setresgid(identity.gid, identity.gid, identity.gid) }.into())?;
            // SAFETY: as above.
            check(unsafe { libc::setresuid(identity.uid, identity.uid, identity.uid) }.into())?;
        }
        if self.no_new_privileges {
            // SAFETY: no pointers are involved.
            check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1_u64, 0_u64, 0_u64, 0_u64) }.into())?;
        }
        Ok(())
    }
}

impl Folder {
    fn make(&self, disk: Option<&Path>) -> Result<()> {
        let path = Path::new(&self.path);
        let was_there = path.symlink_metadata().is_ok();
        if !was_there {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(path)?;
        }
        ensure!(path.symlink_metadata()?.is_dir(), "something else is there");
        if was_there && !self.owned && disk != Some(path) {
            return Ok(());
        }
        let metadata = fs::metadata(path)?;
        let is_anothers = (metadata.uid(), metadata.gid()) != (self.uid, self.gid);
        if was_there && self.owned && is_anothers {
            // As systemd does: what is in it has one owner with it.
            self.give_all(path)?;
        }
        chown(path, Some(self.uid), Some(self.gid))?;
        Ok(fs::set_permissions(path, fs::Permissions::from_mode(self.mode))?)
    }

    /// Gives away what is in a folder.
    fn give_all(&self, folder: &Path) -> Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            lchown(&path, Some(self.uid), Some(self.gid))?;
            if path.symlink_metadata()?.is_dir() {
                self.give_all(&path)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(manner: serde_json::Value, argv: &[&str]) -> Service {
        let mut whole = serde_json::json!({
            "name": null, "before": [], "environment": null, "working": null, "identity": null, "as_root": false, "umask": null,
            "limits": [], "nice": null, "no_new_privileges": false, "ignores_pipes": false, "folders": [],
        });
        for (key, value) in manner.as_object().unwrap() {
            whole[key] = value.clone();
        }
        serde_json::from_value(serde_json::json!({"argv": argv, "manner": whole})).unwrap()
    }

    fn said(service: &Service) -> String {
        let output = service.command().unwrap().output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn a_program_is_started_in_its_manner() {
        let manner = serde_json::json!({
            "name": "other", "environment": [["A", "b c"]], "working": ["/var", false], "umask": 0o27,
            "limits": [[libc::RLIMIT_NOFILE, 64, 128]], "nice": 3, "no_new_privileges": true, "ignores_pipes": true,
        });
        let script = "echo $0,$A,$(pwd),$(umask),$(ulimit -Sn),$(ulimit -Hn),$(nice); cat /proc/$$/status";
        let told = said(&service(manner, &["/bin/sh", "-c", script]));
        let (first, status) = told.split_once('\n').unwrap();
        assert_eq!(first, "other,b c,/var,0027,64,128,3");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim_start_matches(':').trim().to_owned()
        };
        assert_eq!(field("NoNewPrivs"), "1");
        let ignored = u64::from_str_radix(&field("SigIgn"), 16).unwrap();
        assert_eq!(ignored >> (libc::SIGPIPE - 1) & 1, 1);
        // By default it is as whoever starts it.
        let told = said(&service(serde_json::json!({}), &["/bin/sh", "-c", "echo $0,$A,$(pwd)"]));
        assert!(told.ends_with("sh,,/\n"), "{told}");
    }

    #[test]
    fn a_program_is_its_users_unless_it_is_roots() {
        if !rustix::process::geteuid().is_root() {
            orrery_testing::skipped!("another user: it takes root");
            return;
        }
        let identity = serde_json::json!({"uid": 65534, "gid": 12345, "groups": [12345, 4711]});
        let manner = |as_root: bool| serde_json::json!({"identity": identity, "as_root": as_root});
        let ids = |service: &Service| said(service).split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let script = ["/bin/sh", "-c", "id -u; id -g; id -G"];
        assert_eq!(ids(&service(manner(false), &script)), ["65534", "12345", "12345", "4711"]);
        assert_eq!(ids(&service(manner(true), &script))[..2], ["0", "0"]);
    }

    #[test]
    fn what_comes_before_runs_in_order_and_may_fail_where_it_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let step = |script: String, may_fail| {
            serde_json::json!({
                "program": "/bin/sh", "name": null, "arguments": ["-c", script], "may_fail": may_fail, "as_root": false,
            })
        };
        let steps = [
            step(format!("echo 1 > {}; false", at("a")), true),
            step(format!("cp {} {}", at("a"), at("b")), false),
            step("echo no such thing >&2; exit 3".to_owned(), false),
            step(format!("touch {}", at("c")), false),
        ];
        let told =
            service(serde_json::json!({"before": steps}), &["true"]).run_before().unwrap_err().to_string();
        assert!(told.contains("/bin/sh") && told.contains("no such thing") && told.contains('3'), "{told}");
        assert!(Path::new(&at("b")).exists() && !Path::new(&at("c")).exists());
    }

    #[test]
    fn folders_are_made_and_given_away_with_what_is_in_them() {
        if !rustix::process::geteuid().is_root() {
            orrery_testing::skipped!("giving folders away: it takes root");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let made = |name: &str, owned: bool| {
            let folder =
                serde_json::json!({"path": at(name), "mode": 0o2750, "uid": 102, "gid": 105, "owned": owned});
            let disk = folder["path"].as_str().unwrap().ends_with("disk").then(|| at(name));
            let made = service(serde_json::json!({"folders": [folder]}), &["true"]);
            made.make_folders(disk.as_deref().map(Path::new)).map(|()| {
                let metadata = fs::metadata(at(name)).unwrap();
                (metadata.mode() & 0o7777, metadata.uid(), metadata.gid())
            })
        };
        let its = (0o2750, 102, 105);
        assert_eq!(made("new/inner", false).unwrap(), its);
        assert_eq!(fs::metadata(at("new")).unwrap().uid(), 0, "what it lies in is nobody's");
        for name in ["old", "disk", "state"] {
            fs::create_dir_all(folder.path().join(name).join("deep")).unwrap();
            fs::write(folder.path().join(name).join("deep/file"), "").unwrap();
        }
        let owner = |name: &str| fs::metadata(folder.path().join(name)).unwrap().uid();
        assert_ne!(made("old", false).unwrap(), its, "one that is there stays as it is");
        assert_eq!((made("disk", false).unwrap(), owner("disk/deep")), (its, 0));
        assert_eq!((made("state", true).unwrap(), owner("state/deep/file")), (its, 102));
        fs::write(at("file"), "").unwrap();
        assert!(made("file", true).is_err());
    }
}
