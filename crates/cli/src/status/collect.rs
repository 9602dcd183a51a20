//! What runs is found, and asked: servers where the default places, the options or `/proc` show a socket, the rest by `/proc` alone.
//!
//! Each question is asked by a thread of its own, all at once, and its answer is waited for until a limit. What hangs is reported, and is
//! not asked again before it has answered, so that `orrery top` does not gather threads.

mod address;
mod describe;
mod guard;
mod http;
mod limit;
mod manager;
mod orbit;
mod orc;
mod orthros;
mod processes;
mod users;
mod vault;
mod warm;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use orrery_manager::client::ClientError;

use limit::{LIMIT, Limited, Task};
use processes::Processes;

use super::model::{Item, Kind, Status, Unreadable};

/// What a question is answered with.
type Answer = Result<Vec<Item>>;

/// What to look for.
#[derive(Clone, Debug)]
pub(crate) struct Selection {
    /// In the order of [`Kind::ALL`].
    pub(crate) kinds: Vec<Kind>,
    /// Places beside those that are found.
    pub(crate) sockets: Vec<(Kind, PathBuf)>,
}

/// Takes one status after another.
pub(crate) struct Collector {
    selection: Selection,
    discovery: Limited<io::Result<Processes>>,
    questions: Limited<Answer>,
}

/// A path at which a server may be.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Endpoint {
    path: PathBuf,
    /// Whether a server must be there: the user has named it, or its process was found.
    is_certain: bool,
}

impl Collector {
    pub(crate) fn new(selection: Selection) -> Self {
        Self { selection, discovery: Limited::default(), questions: Limited::default() }
    }

    /// Finds and asks everything, in [`LIMIT`] for each of the two.
    pub(crate) fn take(&mut self) -> Status {
        let mut unreadable = Vec::new();
        let processes = self.processes(&mut unreadable);
        let mut tasks: Vec<(Task, limit::Work<Answer>)> = Vec::new();
        for kind in self.selection.kinds.clone() {
            let of_proc: Option<fn(&Processes) -> Answer> = match kind {
                Kind::Orbit => Some(orbit::all),
                Kind::Vault => Some(vault::all),
                Kind::Guard => Some(guard::all),
                _ => None,
            };
            if let Some(all) = of_proc {
                let processes = Arc::clone(&processes);
                tasks.push(((kind, PathBuf::from("/proc")), Box::new(move || all(&processes))));
                continue;
            }
            for place in self.places(kind, &processes) {
                let path = place.path.clone();
                let processes = Arc::clone(&processes);
                tasks.push(((kind, path), Box::new(move || ask(kind, &place, &processes))));
            }
        }
        let mut items = Vec::new();
        for ((kind, path), answer) in self.questions.run(tasks, LIMIT) {
            let name = || path.display().to_string();
            match answer {
                Ok(Ok(found)) => items.extend(found),
                Ok(Err(error)) => {
                    unreadable.push(Unreadable { kind, name: name(), reason: format!("{error:#}") });
                }
                Err(silent) => unreadable.push(Unreadable { kind, name: name(), reason: silent.to_string() }),
            }
        }
        for kind in &self.selection.kinds {
            for pid in processes.closed(*kind, &items) {
                let name = format!("process {pid}");
                let reason =
                    "its sockets are not known: permission denied; name one with --socket".to_owned();
                unreadable.push(Unreadable { kind: *kind, name, reason });
            }
        }
        Status::of(without_doubles(items), unreadable)
    }

    fn processes(&mut self, unreadable: &mut Vec<Unreadable>) -> Arc<Processes> {
        let task = ((Kind::Warm, PathBuf::from("/proc")), Box::new(processes::find) as limit::Work<_>);
        let reason = match self.discovery.run(vec![task], LIMIT).pop() {
            Some((_, Ok(Ok(processes)))) => return Arc::new(processes),
            Some((_, Ok(Err(error)))) => error.to_string(),
            Some((_, Err(silent))) => silent.to_string(),
            None => String::new(),
        };
        let all = self.selection.kinds.iter();
        unreadable.extend(all.map(|kind| Unreadable {
            kind: *kind,
            name: "/proc".to_owned(),
            reason: reason.clone(),
        }));
        Arc::default()
    }

    /// Returns where servers of a kind may be, each place once.
    fn places(&self, kind: Kind, processes: &Processes) -> Vec<Endpoint> {
        let named = self.selection.sockets.iter().filter(|(of, _)| *of == kind).map(|(_, path)| path.clone());
        let found = processes.sockets(kind);
        let certain = named.chain(found).map(|path| Endpoint { path: socket(kind, path), is_certain: true });
        let usual = match kind {
            Kind::Warm => warm::usual_sockets(),
            Kind::Orc => orc::usual_sockets(),
            Kind::Manager => manager::usual_sockets(),
            _ => Vec::new(),
        };
        let usual = usual.into_iter().map(|path| Endpoint { path, is_certain: false });
        let mut places: Vec<Endpoint> = Vec::new();
        for mut place in certain.chain(usual) {
            place.path = one_name(kind, place.path);
            if !places.iter().any(|other| other.path == place.path) {
                places.push(place);
            }
        }
        places
    }
}

/// Fails unless a text is the address of an HTTP server, as a place of [`Kind::Http`].
///
/// # Errors
/// How it is written.
pub(crate) fn check_address(text: &str) -> Result<(), String> {
    address::check(text)
}

/// Returns the name that an answer, or its absence, has in a status for a place that the user has named.
pub(crate) fn name_of(kind: Kind, path: PathBuf) -> String {
    one_name(kind, socket(kind, path)).display().to_string()
}

/// Returns one path for all names of a socket. What leads into another mount namespace has no other name here.
fn one_name(kind: Kind, path: PathBuf) -> PathBuf {
    if kind == Kind::Http || path.starts_with("/proc") { path } else { path.canonicalize().unwrap_or(path) }
}

/// Returns the socket of a place that may be named by its directory.
fn socket(kind: Kind, path: PathBuf) -> PathBuf {
    let name = match kind {
        Kind::Orc => orrery_orc_client::SOCKET,
        Kind::Orthros => crate::orthros::SOCKET,
        _ => return path,
    };
    if path.is_dir() { path.join(name) } else { path }
}

fn ask(kind: Kind, place: &Endpoint, processes: &Processes) -> Answer {
    let path = &place.path;
    if !place.is_certain && !path.exists() {
        return Ok(Vec::new());
    }
    let answer = match kind {
        Kind::Warm => warm::ask(path, processes),
        Kind::Http => http::ask(path, processes),
        Kind::Orc => orc::ask(path, processes),
        Kind::Manager => manager::ask(path, processes),
        Kind::Orthros => orthros::ask(path, processes),
        Kind::Orbit | Kind::Vault | Kind::Guard => return Ok(Vec::new()),
    };
    match answer {
        Ok(item) => Ok(vec![item]),
        // A server that was killed leaves its socket.
        Err(error) if !place.is_certain && is_absence(&error) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Returns whether no process listens.
fn is_absence(error: &anyhow::Error) -> bool {
    let absent = |error: &io::Error| {
        matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
    };
    let manager = match error.downcast_ref::<ClientError>() {
        Some(ClientError::Connect { cause, .. }) => absent(cause),
        _ => false,
    };
    manager || error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>()).any(absent)
}

/// Keeps one item of each server: a store listens at several sockets.
fn without_doubles(items: Vec<Item>) -> Vec<Item> {
    let mut kept: Vec<Item> = Vec::new();
    for item in items {
        let is_known =
            matches!(item.kind, Kind::Warm | Kind::Http | Kind::Orc | Kind::Manager | Kind::Orthros)
                && item.pid.is_some()
                && kept.iter().any(|other| (other.kind, other.pid) == (item.kind, item.pid));
        if !is_known {
            kept.push(item);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn collector(kinds: &[Kind], sockets: &[(Kind, PathBuf)]) -> Collector {
        Collector::new(Selection { kinds: kinds.to_vec(), sockets: sockets.to_vec() })
    }

    #[test]
    fn a_server_that_hangs_is_unreadable_and_asked_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("silent");
        // Connections are queued, and never accepted. The client of warm servers asks at the control socket.
        let listener = UnixListener::bind(orrery_warm::server::control_path(&path)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut collector = collector(&[Kind::Warm], &[(Kind::Warm, path.clone())]);
        let silent = |status: &Status| {
            let name = path.display().to_string();
            let found = status.unreadable.iter().find(|one| one.name == name).cloned();
            found.unwrap_or_else(|| panic!("{status:?}"))
        };
        // The client itself waits for ever.
        assert_eq!(silent(&collector.take()).reason, "no answer within 1 s");
        let _asked = orrery_testing::until("it was asked", || listener.accept().ok());
        let again = silent(&collector.take()).reason;
        assert!(again.starts_with("no answer within ") && again != "no answer within 1 s", "{again}");
        assert!(listener.accept().is_err(), "it was asked again");
    }

    #[test]
    fn what_was_named_and_is_not_there_is_unreadable() {
        let directory = tempfile::tempdir().unwrap();
        for kind in [Kind::Warm, Kind::Orc, Kind::Manager, Kind::Orthros] {
            let path = directory.path().join("absent");
            let status = collector(&[kind], &[(kind, path.clone())]).take();
            let name = path.display().to_string();
            assert!(status.unreadable.iter().any(|one| one.kind == kind && one.name == name), "{status:?}");
            let place = Endpoint { path, is_certain: false };
            assert!(ask(kind, &place, &Processes::default()).unwrap().is_empty());
        }
    }

    #[test]
    fn a_socket_that_was_left_is_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("left");
        drop(UnixListener::bind(&path).unwrap());
        drop(UnixListener::bind(orrery_warm::server::control_path(&path)).unwrap());
        for kind in [Kind::Warm, Kind::Orc, Kind::Orthros] {
            let place = Endpoint { path: path.clone(), is_certain: false };
            assert!(ask(kind, &place, &Processes::default()).unwrap().is_empty(), "{kind:?}");
            let place = Endpoint { is_certain: true, ..place };
            assert!(ask(kind, &place, &Processes::default()).is_err(), "{kind:?}");
        }
    }

    #[test]
    fn a_server_with_two_sockets_is_one_item() {
        let mut one = Item::new(Kind::Orc, "/a", "serves");
        one.pid = Some(7);
        let mut other = Item::new(Kind::Orc, "/b", "serves");
        other.pid = Some(7);
        let unknown = Item::new(Kind::Orc, "/c", "serves");
        let names: Vec<String> = without_doubles(vec![one, other, unknown.clone(), unknown])
            .into_iter()
            .map(|item| item.name)
            .collect();
        assert_eq!(names, ["/a", "/c", "/c"]);
    }
}
