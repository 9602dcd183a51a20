//! How a service is started: by default as its program is, by root in `/`; otherwise as its unit says.
//!
//! All that only the guest can do goes to it with the image, in JSON; `orrery-guest` has the same structures, for reading.

use std::path::PathBuf;

use serde::Serialize;

/// How a service is started.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Manner {
    /// The name that the program is told to have, where that is not its path.
    pub name: Option<String>,
    /// What is run to its end before it, in order.
    pub before: Vec<Invocation>,
    /// All that is in its environment, where it is not the guest's own.
    pub environment: Option<Vec<(String, String)>>,
    /// The folder that it starts in, and whether it may start in `/` where that is not there.
    pub working: Option<(String, bool)>,
    /// Who runs it, where that is not root.
    pub identity: Option<Identity>,
    /// Whether it is root's all the same, as what comes before it may not be.
    pub as_root: bool,
    /// The permissions that its files are not given.
    pub umask: Option<u32>,
    /// The numbers of limits, and what they are: the one that holds, and the one that it may be raised to.
    pub limits: Vec<(u32, u64, u64)>,
    /// Its niceness.
    pub nice: Option<i32>,
    /// Whether it can gain no rights by starting programs.
    pub no_new_privileges: bool,
    /// Whether it does not die of writing where nobody reads.
    pub ignores_pipes: bool,
    /// Folders that it finds.
    pub folders: Vec<Folder>,
    /// Files and folders of this host that come with the image under their own names, with their owners and permissions; a
    /// folder without what is in it.
    #[serde(skip)]
    pub taken: Vec<PathBuf>,
    /// Whether the image has this host's users and groups.
    #[serde(skip)]
    pub knows_users: bool,
}

/// A program that is run to its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Invocation {
    /// Its path.
    pub program: String,
    /// The name that it is told to have, where that is not its path.
    pub name: Option<String>,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Whether it may fail.
    pub may_fail: bool,
    /// Whether root runs it, whoever the service is.
    pub as_root: bool,
}

/// Who runs a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Identity {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
}

/// A folder that is made before the service starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Folder {
    /// Where.
    pub path: String,
    /// Its permissions.
    pub mode: u32,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Whether one that is there already is given this owner, along with what is in it; otherwise only one that is where the disk is
    /// mounted is.
    pub owned: bool,
}
