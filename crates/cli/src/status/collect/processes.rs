//! Which of the machine's processes are Orrery's, and where they listen.

use std::io;
use std::path::{Path, PathBuf};

use orrery_sys::processes::{self, Facts};

use super::address;
use crate::status::model::{Item, Kind};

/// What a process of Orrery's does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Serves at sockets.
    Server(Kind),
    Vault,
    Guard,
}

/// A process of Orrery's.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) facts: Facts,
    pub(super) role: Role,
    pub(super) command_line: Vec<String>,
    /// Where it listens; `None` if it may not be inspected.
    pub(super) sockets: Option<Vec<PathBuf>>,
}

/// All processes, and which are Orrery's.
#[derive(Debug, Default)]
pub(super) struct Processes {
    pub(super) all: Vec<Facts>,
    pub(super) found: Vec<Found>,
}

/// Reads `/proc`.
pub(super) fn find() -> io::Result<Processes> {
    // A process may end meanwhile.
    let all: Vec<Facts> =
        processes::all()?.into_iter().filter_map(|pid| processes::facts(pid).ok()).collect();
    let mut found = Vec::new();
    for facts in all.iter().filter(|facts| may_be_ours(&facts.name) && facts.state != 'Z') {
        let Ok(command_line) = processes::command_line(facts.pid) else { continue };
        let Some(role) = role(&facts.name, &command_line) else { continue };
        let sockets = match role {
            Role::Server(Kind::Http) => {
                let addresses = processes::listening_addresses(facts.pid).ok();
                addresses.map(|addresses| address::places(facts.pid, &addresses))
            }
            Role::Server(_) => {
                processes::listening_paths(facts.pid).ok().map(|paths| from_here(facts.pid, paths))
            }
            Role::Vault | Role::Guard => Some(Vec::new()),
        };
        found.push(Found { facts: facts.clone(), role, command_line, sockets });
    }
    Ok(Processes { all, found })
}

/// Returns paths of a process as this one reaches them: through `/proc` if the process has a mount namespace of its own in which
/// they lead elsewhere, as in a container.
fn from_here(pid: u32, paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    if namespace(&pid.to_string()) == namespace("self") {
        return paths;
    }
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let file = |path: &Path| rustix::fs::stat(path).ok().map(|status| (status.st_dev, status.st_ino));
    let reached = |path: PathBuf| {
        let within = root.join(path.strip_prefix("/").unwrap_or(&path));
        if file(&within).is_some_and(|there| file(&path) == Some(there)) { path } else { within }
    };
    paths.into_iter().map(reached).collect()
}

/// The names of processes of which the command line is read. That of another process may be long to wait for.
fn may_be_ours(name: &str) -> bool {
    matches!(
        name,
        "orrery" | address::PROCESS | "orrery-manager" | "orrery-vault" | "orc-server" | "orc-supervisor"
    )
}

/// Returns what a process does, by its name and arguments.
fn role(name: &str, command_line: &[String]) -> Option<Role> {
    let mut words = words(command_line);
    match name {
        "orrery-vault" => Some(Role::Vault),
        address::PROCESS => Some(Role::Server(Kind::Http)),
        "orrery-manager" => (words.next() == Some("serve")).then_some(Role::Server(Kind::Manager)),
        "orc-server" | "orc-supervisor" => Some(Role::Server(Kind::Orc)),
        "orrery" => match (words.next()?, words.next()) {
            ("warm", Some("serve")) => Some(Role::Server(Kind::Warm)),
            ("orc", Some("serve")) => Some(Role::Server(Kind::Orc)),
            ("orthros", Some("up" | "run")) => Some(Role::Server(Kind::Orthros)),
            ("guard", _) => Some(Role::Guard),
            _ => None,
        },
        _ => None,
    }
}

/// Returns the arguments of `orrery` without its global options.
fn words(command_line: &[String]) -> impl Iterator<Item = &str> {
    let mut is_value = false;
    command_line.iter().skip(1).map(String::as_str).filter(move |word| {
        if std::mem::take(&mut is_value) {
            return false;
        }
        is_value = matches!(*word, "--log-level" | "--log-format");
        !word.starts_with('-')
    })
}

impl Processes {
    /// Returns the processes with a role that are not children of such: the roots of what forks.
    pub(super) fn roots(&self, role: Role) -> impl Iterator<Item = &Found> {
        let is = move |found: &&Found| found.role == role;
        let child =
            move |one: &Found| self.found.iter().filter(is).any(|other| other.facts.pid == one.facts.parent);
        self.found.iter().filter(is).filter(move |one| !child(one))
    }

    /// Returns how many processes there are of a root and its descendants with its role.
    pub(super) fn family(&self, root: &Found) -> usize {
        let children =
            self.found.iter().filter(|one| one.role == root.role && one.facts.parent == root.facts.pid);
        1 + children
            .filter(|child| child.facts.pid != root.facts.pid)
            .map(|child| self.family(child))
            .sum::<usize>()
    }

    /// Returns the children of a process.
    pub(super) fn children(&self, pid: u32) -> impl Iterator<Item = &Facts> {
        self.all.iter().filter(move |facts| facts.parent == pid)
    }

    /// Returns a process.
    pub(super) fn get(&self, pid: u32) -> Option<&Facts> {
        self.all.iter().find(|facts| facts.pid == pid)
    }

    /// Returns the arguments of a process of Orrery's.
    pub(super) fn command_line(&self, pid: u32) -> Option<Vec<String>> {
        self.found.iter().find(|found| found.facts.pid == pid).map(|found| found.command_line.clone())
    }

    /// Returns the server of a kind that listens at a socket, also at one that the init process made.
    pub(super) fn server_at(&self, kind: Kind, socket: &Path) -> Option<u32> {
        let listens = |found: &&Found| {
            found.role == Role::Server(kind)
                && found.sockets.as_ref().is_some_and(|sockets| sockets.iter().any(|path| path == socket))
        };
        self.found.iter().find(listens).map(|found| found.facts.pid)
    }

    /// Returns the sockets of servers of a kind. Those of a server that another one has started are the same: a store is two processes.
    pub(super) fn sockets(&self, kind: Kind) -> Vec<PathBuf> {
        let listening =
            self.found.iter().filter(|found| found.role == Role::Server(kind) && found.sockets.is_some());
        let is_second = |server: &Found| listening.clone().any(|one| one.facts.pid == server.facts.parent);
        let first = listening.clone().filter(|server| !is_second(server));
        first.flat_map(|server| main_sockets(kind, server.sockets.as_deref().unwrap_or_default())).collect()
    }

    /// Returns the servers of a kind that belong to this user, or to any for root, cannot be inspected, and have not answered either: the
    /// two processes of a store are one.
    pub(super) fn closed(&self, kind: Kind, answered: &[Item]) -> Vec<u32> {
        let own = rustix::process::geteuid();
        let may_be_seen = |pid| own.is_root() || processes::user(pid).ok() == Some(own.as_raw());
        let parent = |pid| self.get(pid).map(|facts| facts.parent);
        let servers =
            self.found.iter().filter(|found| found.role == Role::Server(kind) && found.sockets.is_none());
        let pids = servers.map(|found| found.facts.pid).filter(|pid| may_be_seen(*pid));
        let has_answered = |pid: u32| {
            let pids = answered.iter().filter(|item| item.kind == kind).filter_map(|item| item.pid);
            pids.into_iter()
                .any(|other| other == pid || Some(other) == parent(pid) || parent(other) == Some(pid))
        };
        pids.filter(|pid| !has_answered(*pid)).collect()
    }
}

/// Returns the sockets at which a server is asked for its status.
fn main_sockets(kind: Kind, listening: &[PathBuf]) -> Vec<PathBuf> {
    let control = |path: &Path| orrery_warm::server::control_path(path);
    match kind {
        Kind::Warm => listening.iter().filter(|path| listening.contains(&control(path))).cloned().collect(),
        Kind::Orthros => {
            listening.iter().filter(|path| path.ends_with(crate::orthros::SOCKET)).cloned().collect()
        }
        // The first one is the store's own, which those of trust domains follow.
        _ => listening.first().cloned().into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn facts(pid: u32, parent: u32) -> Facts {
        let none = Duration::ZERO;
        let name = "orc-server".to_owned();
        Facts { pid, parent, name, state: 'S', started: none, processor_time: none, resident: 0 }
    }

    fn of(name: &str, line: &str) -> Option<Role> {
        let line: Vec<String> = line.split(' ').map(str::to_owned).collect();
        role(name, &line)
    }

    #[test]
    fn processes_are_known_by_name_and_arguments() {
        assert_eq!(of("orrery", "orrery warm serve --python"), Some(Role::Server(Kind::Warm)));
        let logged = "/usr/bin/orrery --log-level debug --log-format=json guard --policy p -- sh";
        assert_eq!(of("orrery", logged), Some(Role::Guard));
        assert_eq!(of("orrery", "orrery orthros up --quiet"), Some(Role::Server(Kind::Orthros)));
        assert_eq!(of("orc-server", "/proc/self/exe orc part server"), Some(Role::Server(Kind::Orc)));
        assert_eq!(of("orrery-manager", "x serve --socket s"), Some(Role::Server(Kind::Manager)));
        assert_eq!(of("orrery-vault", "orrery-vault"), Some(Role::Vault));
        assert_eq!(of("orrery-warm-htt", "orrery-warm-http --script x"), Some(Role::Server(Kind::Http)));
        for (name, line) in [
            ("orrery", "orrery"),
            ("orrery", "orrery warm run x.py"),
            ("orrery", "orrery status --kind guard"),
            ("orrery-manager", "x keep --pid 7"),
            ("sh", "orrery guard"),
        ] {
            assert_eq!(of(name, line), None, "{line}");
        }
    }

    #[test]
    fn a_servers_own_socket_is_asked() {
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let warm = paths(&["/w", "/w.control", "/w.new"]);
        assert_eq!(main_sockets(Kind::Warm, &warm), paths(&["/w"]));
        assert_eq!(main_sockets(Kind::Orc, &paths(&["/a/socket", "/b/socket"])), paths(&["/a/socket"]));
        assert_eq!(main_sockets(Kind::Orthros, &paths(&["/p/qmp", "/p/commands"])), paths(&["/p/commands"]));
        assert_eq!(main_sockets(Kind::Manager, &[]), paths(&[]));
    }

    #[test]
    fn the_root_of_a_family_stands_for_it() {
        let found = |pid, parent| Found {
            facts: facts(pid, parent),
            role: Role::Vault,
            command_line: Vec::new(),
            sockets: None,
        };
        let all = vec![found(10, 1), found(11, 10), found(12, 11), found(20, 9)];
        let processes = Processes { all: Vec::new(), found: all };
        let roots: Vec<_> =
            processes.roots(Role::Vault).map(|root| (root.facts.pid, processes.family(root))).collect();
        assert_eq!(roots, [(10, 3), (20, 1)]);
    }

    #[test]
    fn a_server_that_cannot_be_inspected_and_answers_is_known() {
        let server = |pid, parent| Found {
            facts: facts(pid, parent),
            role: Role::Server(Kind::Orc),
            command_line: Vec::new(),
            sockets: None,
        };
        // They must be there, and this user's.
        let (own, parent) = (std::process::id(), std::os::unix::process::parent_id());
        let found = vec![server(own, parent)];
        let processes = Processes { all: found.iter().map(|one| one.facts.clone()).collect(), found };
        assert_eq!(processes.closed(Kind::Orc, &[]), [own]);
        assert!(processes.closed(Kind::Warm, &[]).is_empty());
        for answered in [own, parent] {
            let mut item = Item::new(Kind::Orc, "/s", "serves");
            item.pid = Some(answered);
            assert!(processes.closed(Kind::Orc, &[item]).is_empty());
        }
    }

    #[test]
    fn a_store_of_two_processes_is_asked_once() {
        let server = |pid, parent, sockets: Option<&str>| Found {
            facts: facts(pid, parent),
            role: Role::Server(Kind::Orc),
            command_line: Vec::new(),
            sockets: sockets.map(|path| vec![path.into()]),
        };
        let of = |found| Processes { all: Vec::new(), found }.sockets(Kind::Orc);
        let both = vec![server(10, 1, Some("/a")), server(11, 10, Some("/proc/11/root/a"))];
        assert_eq!(of(both), [PathBuf::from("/a")]);
        assert_eq!(of(vec![server(10, 1, None), server(11, 10, Some("/a"))]), [PathBuf::from("/a")]);
    }

    #[test]
    fn a_server_is_found_at_sockets_of_the_init_process() {
        let server = |pid, path: &str| Found {
            facts: facts(pid, 1),
            role: Role::Server(Kind::Warm),
            command_line: Vec::new(),
            sockets: Some(vec![path.into(), format!("{path}.control").into()]),
        };
        let processes = Processes { all: Vec::new(), found: vec![server(10, "/a"), server(11, "/b")] };
        assert_eq!(processes.server_at(Kind::Warm, Path::new("/b.control")), Some(11));
        assert_eq!(processes.server_at(Kind::Orc, Path::new("/b")), None);
        assert_eq!(processes.server_at(Kind::Warm, Path::new("/c")), None);
    }

    #[test]
    fn paths_lead_into_other_mount_namespaces() {
        let paths = vec![PathBuf::from("/run/s")];
        assert_eq!(from_here(std::process::id(), paths.clone()), paths);
        // A process that is gone has none.
        assert_eq!(from_here(u32::MAX, paths), [PathBuf::from("/proc/4294967295/root/run/s")]);
    }

    #[test]
    fn this_machine_is_read() {
        let processes = find().unwrap();
        assert!(processes.get(std::process::id()).is_some());
    }
}
