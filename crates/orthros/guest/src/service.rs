//! Execution of the service as the image describes it.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, chown, lchown};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use orrery_orthros_wire::{
    Directory, ExecCommand, ExecConfig, MainProcess, SERVICE_DESCRIPTION, ServiceDescription,
};

use orrery_sys::capability::CapabilitySet;
use orrery_sys::seccomp::{Action, Filter, Scope, sock_filter};

use crate::command::run_to_exit;

/// The service that this guest runs.
#[derive(Clone, Debug)]
pub(crate) struct Service(ServiceDescription);

impl Service {
    pub(crate) fn read() -> Result<Self> {
        let read = || -> Result<_> { Ok(serde_json::from_slice(&fs::read(SERVICE_DESCRIPTION)?)?) };
        read().map(Self).with_context(|| format!("cannot read the service description {SERVICE_DESCRIPTION}"))
    }

    /// Creates the service's directories. `disk` is the mount point of its disk.
    pub(crate) fn create_directories(&self, disk: Option<&Path>) -> Result<()> {
        for directory in &self.0.exec.directories {
            create(directory, disk).with_context(|| format!("cannot create {}", directory.path))?;
        }
        Ok(())
    }

    /// Runs the commands that come before the service, each to its exit.
    pub(crate) fn run_pre_commands(&self) -> Result<()> {
        self.run_commands(&self.0.exec.pre_commands, "before the service")
    }

    /// Runs the commands that start the service before its last one does, each to its exit.
    pub(crate) fn run_start_commands(&self) -> Result<()> {
        self.run_commands(&self.0.exec.start_commands, "to start the service")
    }

    /// Returns which process is the service's main one.
    pub(crate) fn main_process(&self) -> &MainProcess {
        &self.0.exec.main_process
    }

    fn run_commands(&self, commands: &[ExecCommand], when: &str) -> Result<()> {
        for step in commands {
            let mut command = Command::new(&step.program);
            command.args(&step.arguments);
            prepare(&self.0.exec, &mut command, step.arg0.as_deref(), step.as_root);
            let (status, output) = run_to_exit(&mut command)?;
            ensure!(
                status.success() || step.ignore_failure,
                "{}, which runs {when}: {status}: {output}",
                step.program
            );
        }
        Ok(())
    }

    /// Returns the command that starts the service.
    pub(crate) fn command(&self) -> Result<Command> {
        let (program, arguments) =
            self.0.argv.split_first().context("the service description names no program")?;
        let mut command = Command::new(program);
        command.args(arguments);
        prepare(&self.0.exec, &mut command, self.0.exec.arg0.as_deref(), self.0.exec.as_root);
        Ok(command)
    }
}

/// Applies the service's configuration to a command.
fn prepare(exec: &ExecConfig, command: &mut Command, arg0: Option<&str>, as_root: bool) {
    if let Some(arg0) = arg0 {
        command.arg0(arg0);
    }
    if let Some(environment) = &exec.environment {
        command.env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
    }
    let working = exec.working_directory.as_ref();
    let working = working.filter(|directory| !directory.optional || Path::new(&directory.path).is_dir());
    command.current_dir(working.map_or("/", |directory| &directory.path));
    let (exec, filter) = (exec.clone(), without_shared_rings());
    // SAFETY: the closure only makes system calls on memory from before the fork, and allocates nothing: it is async-signal-safe.
    unsafe { command.pre_exec(move || apply(&exec, as_root, &filter)) };
}

/// Returns a filter under which io_uring_setup(2) and io_setup(2) do not exist. Their rings are shared with the kernel that dies, and
/// could not be carried over; programs do without where there are none, as in containers.
fn without_shared_rings() -> Vec<sock_filter> {
    let mut filter = Filter::new(Action::Allow).foreign(Action::Allow).x32(Action::Allow);
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_setup] {
        filter.set(call, Action::Fail(rustix::io::Errno::NOSYS));
    }
    filter.program()
}

/// Applies the session, limits and credentials to the calling process, between fork and exec.
fn apply(exec: &ExecConfig, as_root: bool, filter: &[sock_filter]) -> io::Result<()> {
    let check = |result: libc::c_long| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    rustix::process::setsid()?;
    for &(resource, soft, hard) in &exec.rlimits {
        let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
        // SAFETY: `limit` is a valid rlimit that outlives the call.
        check(unsafe { libc::setrlimit(resource, &raw const limit) }.into())?;
    }
    if let Some(nice) = exec.nice {
        rustix::process::setpriority_process(None, nice)?;
    }
    if let Some(umask) = exec.umask {
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(umask));
    }
    if exec.ignore_sigpipe {
        // SAFETY: SIG_IGN installs no handler, so no code runs in signal context.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    }
    // While this is the superuser, who may do so without `no_new_privs`.
    orrery_sys::seccomp::install(filter, Scope::Thread)?;
    if let Some(credentials) = exec.credentials.as_ref().filter(|_| !as_root) {
        let (groups, gid, uid) = (&credentials.groups, credentials.gid, credentials.uid);
        // SAFETY: `groups` points to as many group IDs as its length says.
        check(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) }.into())?;
        // What the ambient set is to have must stay permitted when the user changes.
        rustix::thread::set_keep_capabilities(exec.ambient_capabilities != 0)?;
        // SAFETY: takes no pointers; the process has one thread after the fork, so glibc synchronizes with no other.
        check(unsafe { libc::setresgid(gid, gid, gid) }.into())?;
        // SAFETY: the same holds as for setresgid.
        check(unsafe { libc::setresuid(uid, uid, uid) }.into())?;
    }
    if !as_root {
        set_ambient(CapabilitySet::from_bits_retain(exec.ambient_capabilities))?;
    }
    if exec.no_new_privileges {
        rustix::thread::set_no_new_privs(true)?;
    }
    Ok(())
}

/// Gives the calling process these capabilities, which it keeps when it executes a program (capabilities(7)).
fn set_ambient(ambient: CapabilitySet) -> io::Result<()> {
    if ambient.is_empty() {
        return Ok(());
    }
    let mut sets = rustix::thread::capabilities(None)?;
    sets.inheritable |= ambient;
    sets.effective |= ambient & sets.permitted;
    rustix::thread::set_capabilities(None, sets)?;
    for one in ambient.iter() {
        rustix::thread::configure_capability_in_ambient_set(one, true)?;
    }
    Ok(())
}

/// Creates a directory, or gives an existing one its owner.
fn create(directory: &Directory, disk: Option<&Path>) -> Result<()> {
    let path = Path::new(&directory.path);
    let existed = path.symlink_metadata().is_ok();
    if !existed {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(path)?;
    }
    ensure!(path.symlink_metadata()?.is_dir(), "it exists and is no directory");
    if existed && !directory.chown_existing && disk != Some(path) {
        return Ok(());
    }
    let metadata = fs::metadata(path)?;
    if existed
        && directory.chown_existing
        && (metadata.uid(), metadata.gid()) != (directory.uid, directory.gid)
    {
        // As systemd does: the contents get the owner, too.
        chown_contents(path, directory.uid, directory.gid)?;
    }
    chown(path, Some(directory.uid), Some(directory.gid))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(directory.mode))?)
}

/// Changes the owner of everything in a directory.
fn chown_contents(directory: &Path, uid: u32, gid: u32) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        lchown(&path, Some(uid), Some(gid))?;
        if path.symlink_metadata()?.is_dir() {
            chown_contents(&path, uid, gid)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use orrery_orthros_wire::{Credentials, ExecCommand, WorkingDirectory};

    use super::*;

    fn service(exec: ExecConfig, argv: &[&str]) -> Service {
        Service(ServiceDescription { argv: argv.iter().map(|&word| word.to_owned()).collect(), exec })
    }

    fn output(service: &Service) -> String {
        let output = service.command().unwrap().output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn a_program_is_executed_as_configured() {
        let exec = ExecConfig {
            arg0: Some("other".to_owned()),
            environment: Some(vec![("A".to_owned(), "b c".to_owned())]),
            working_directory: Some(WorkingDirectory { path: "/var".to_owned(), optional: false }),
            umask: Some(0o27),
            rlimits: vec![(libc::RLIMIT_NOFILE, 64, 128)],
            nice: Some(3),
            no_new_privileges: true,
            ignore_sigpipe: true,
            ..ExecConfig::default()
        };
        let script = "echo $0,$A,$(pwd),$(umask),$(ulimit -Sn),$(ulimit -Hn),$(nice); cat /proc/$$/status";
        let printed = output(&service(exec, &["/bin/sh", "-c", script]));
        let (first, status) = printed.split_once('\n').unwrap();
        assert_eq!(first, "other,b c,/var,0027,64,128,3");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim_start_matches(':').trim().to_owned()
        };
        assert_eq!(field("NoNewPrivs"), "1");
        let ignored = u64::from_str_radix(&field("SigIgn"), 16).unwrap();
        assert_eq!(ignored >> (libc::SIGPIPE - 1) & 1, 1);
        let printed = output(&service(ExecConfig::default(), &["/bin/sh", "-c", "echo $0,$A,$(pwd)"]));
        assert!(printed.ends_with("sh,,/\n"), "{printed}");
    }

    #[test]
    fn a_program_has_its_credentials_unless_it_runs_as_root() {
        if !rustix::process::geteuid().is_root() {
            orrery_testing::skipped!("another user: requires root");
            return;
        }
        let credentials = Credentials { uid: 65534, gid: 12345, groups: vec![12345, 4711] };
        let exec =
            |as_root| ExecConfig { credentials: Some(credentials.clone()), as_root, ..ExecConfig::default() };
        let ids =
            |service: &Service| output(service).split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let script = ["/bin/sh", "-c", "id -u; id -g; id -G"];
        assert_eq!(ids(&service(exec(false), &script)), ["65534", "12345", "12345", "4711"]);
        assert_eq!(ids(&service(exec(true), &script))[..2], ["0", "0"]);
    }

    #[test]
    fn a_service_has_no_rings_that_it_shares_with_the_kernel() {
        let program = without_shared_rings();
        let answer = |number: libc::c_long| {
            let number = u32::try_from(number).unwrap();
            orrery_sys::seccomp::simulate(&program, 0xc000_003e, number, [0; 6])
        };
        for call in [libc::SYS_io_uring_setup, libc::SYS_io_setup] {
            assert_eq!(answer(call), Action::Fail(rustix::io::Errno::NOSYS).value());
        }
        assert_eq!(answer(libc::SYS_read), Action::Allow.value());
    }

    #[test]
    fn another_user_keeps_the_ambient_capabilities_alone() {
        if !rustix::process::geteuid().is_root() {
            orrery_testing::skipped!("capabilities: requires root");
            return;
        }
        let mask = (CapabilitySet::NET_BIND_SERVICE | CapabilitySet::KILL).bits();
        let credentials = Credentials { uid: 65534, gid: 65534, groups: vec![] };
        let exec = ExecConfig {
            credentials: Some(credentials),
            ambient_capabilities: mask,
            no_new_privileges: true,
            ..ExecConfig::default()
        };
        let status = output(&service(exec, &["/bin/sh", "-c", "cat /proc/self/status"]));
        for name in ["CapAmb", "CapInh", "CapPrm", "CapEff"] {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            assert_eq!(line, format!(":\t{mask:016x}"), "{name}");
        }
    }

    #[test]
    fn pre_commands_run_in_order_and_a_failure_stops_unless_it_is_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).display().to_string();
        let step = |script: String, ignore_failure| ExecCommand {
            program: "/bin/sh".to_owned(),
            arg0: None,
            arguments: vec!["-c".to_owned(), script],
            ignore_failure,
            as_root: false,
        };
        let pre_commands = vec![
            step(format!("echo 1 > {}; false", at("a")), true),
            step(format!("cp {} {}", at("a"), at("b")), false),
            step("echo no such thing >&2; exit 3".to_owned(), false),
            step(format!("touch {}", at("c")), false),
        ];
        let exec = ExecConfig { pre_commands, ..ExecConfig::default() };
        let error = service(exec, &["true"]).run_pre_commands().unwrap_err().to_string();
        assert!(
            error.contains("/bin/sh") && error.contains("no such thing") && error.contains('3'),
            "{error}"
        );
        assert!(Path::new(&at("b")).exists() && !Path::new(&at("c")).exists());
    }

    #[test]
    fn directories_are_created_and_get_their_owner() {
        if !rustix::process::geteuid().is_root() {
            orrery_testing::skipped!("chown: requires root");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).display().to_string();
        let made = |name: &str, chown_existing: bool| {
            let directory = Directory { path: at(name), mode: 0o2750, uid: 102, gid: 105, chown_existing };
            let disk = name.ends_with("disk").then(|| at(name));
            let exec = ExecConfig { directories: vec![directory], ..ExecConfig::default() };
            service(exec, &["true"]).create_directories(disk.as_deref().map(Path::new)).map(|()| {
                let metadata = fs::metadata(at(name)).unwrap();
                (metadata.mode() & 0o7777, metadata.uid(), metadata.gid())
            })
        };
        let its = (0o2750, 102, 105);
        assert_eq!(made("new/inner", false).unwrap(), its);
        assert_eq!(fs::metadata(at("new")).unwrap().uid(), 0, "what it lies in is nobody's");
        for name in ["old", "disk", "state"] {
            fs::create_dir_all(directory.path().join(name).join("deep")).unwrap();
            fs::write(directory.path().join(name).join("deep/file"), "").unwrap();
        }
        let owner = |name: &str| fs::metadata(directory.path().join(name)).unwrap().uid();
        assert_ne!(made("old", false).unwrap(), its, "one that is there stays as it is");
        assert_eq!((made("disk", false).unwrap(), owner("disk/deep")), (its, 0));
        assert_eq!((made("state", true).unwrap(), owner("state/deep/file")), (its, 102));
        fs::write(at("file"), "").unwrap();
        assert!(made("file", true).is_err());
    }
}
