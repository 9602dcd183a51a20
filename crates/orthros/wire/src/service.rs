//! The service that a pair runs, as its image describes it.

use serde::{Deserialize, Serialize};

/// The path of the service description in the image, which is JSON.
pub const SERVICE_DESCRIPTION: &str = "/etc/orrery/service";

/// The service that a guest runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceDescription {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// How it is executed.
    pub exec: ExecConfig,
}

/// How a service is executed: by default by root in `/`, with the environment of init; otherwise as its unit says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExecConfig {
    /// The program's `argv[0]`, if that is not its path.
    pub arg0: Option<String>,
    /// Commands that run before the service, in order, each to its exit. What they leave running is killed.
    pub pre_commands: Vec<ExecCommand>,
    /// Commands that run after those, in order, each to its exit. What they leave running is part of the service.
    pub start_commands: Vec<ExecCommand>,
    /// Which process becomes the service's main one.
    pub main_process: MainProcess,
    /// The whole environment, if it is not that of init.
    pub environment: Option<Vec<(String, String)>>,
    /// The working directory, if it is not `/`.
    pub working_directory: Option<WorkingDirectory>,
    /// The user and groups, if they are not root's.
    pub credentials: Option<Credentials>,
    /// Whether the service runs as root although [`credentials`](Self::credentials) are set, which its commands then
    /// have.
    pub as_root: bool,
    /// The file mode creation mask.
    pub umask: Option<u32>,
    /// Resource limits: the `RLIMIT_*` constant, the soft limit and the hard limit.
    pub rlimits: Vec<(u32, u64, u64)>,
    /// The nice value.
    pub nice: Option<i32>,
    /// The capabilities of the ambient set, as a mask (capabilities(7)).
    pub ambient_capabilities: u64,
    /// Whether `no_new_privs` is set.
    pub no_new_privileges: bool,
    /// Whether `SIGPIPE` is ignored.
    pub ignore_sigpipe: bool,
    /// Directories that are created before the service starts.
    pub directories: Vec<Directory>,
}

/// Which process is the service's main one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum MainProcess {
    /// The one that is executed.
    #[default]
    Executed,
    /// The one that is left when the one that is executed has exited with success, as daemons do.
    Left {
        /// The file in which it writes its PID, and which is waited for.
        pid_file: Option<String>,
    },
}

/// A working directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkingDirectory {
    /// The path of the directory.
    pub path: String,
    /// Whether the service starts in `/` if the directory does not exist.
    pub optional: bool,
}

/// A command that runs before the service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExecCommand {
    /// The path of the program.
    pub program: String,
    /// The program's `argv[0]`, if that is not its path.
    pub arg0: Option<String>,
    /// The arguments after `argv[0]`.
    pub arguments: Vec<String>,
    /// Whether the service starts even if the command fails.
    pub ignore_failure: bool,
    /// Whether root runs it, without regard to the service's credentials.
    pub as_root: bool,
}

/// The user and groups of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credentials {
    /// The user ID.
    pub uid: u32,
    /// The group ID.
    pub gid: u32,
    /// The supplementary group IDs.
    pub groups: Vec<u32>,
}

/// A directory that is created before the service starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Directory {
    /// The path of the directory.
    pub path: String,
    /// The permission bits of the directory.
    pub mode: u32,
    /// The user that owns the directory.
    pub uid: u32,
    /// The group that owns the directory.
    pub gid: u32,
    /// Whether an existing directory gets this owner, with everything in it. Otherwise an existing directory is left as
    /// it is, unless the service's disk is mounted there.
    pub chown_existing: bool,
}
