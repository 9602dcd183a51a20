//! Extensions that connections load: they have the rights of the connection and no more, and each user has limits.
//!
//! A thread of ordinary priority reads the manifest and compiles the module; the manager's own thread loads the result. An
//! extension stays when its connection is closed, as a delegated connection does; it is unloaded when its right is revoked, which a
//! tracee's end does to those that were loaded by the tracee's connection.

use std::collections::{BTreeMap, HashMap};
use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::time::Duration;

use orrery_extension::{Id, Limits, Manifest, Module};
use rustix::event::EventfdFlags;
use rustix::fs::SealFlags;
use rustix::io::Errno;

use super::state::Process;
use crate::attributes::{Capability, Rights, Subscription, Table, TraceeId};
use crate::cpu::OwnCpus;
use crate::extensions::ExtensionHandler;
use crate::protocol::ExtensionReport;

/// What extensions that connections load may use together: half of what those of the manager's owner may.
const ALL: Limits = Limits { extensions: 32, memory: 32 << 20, fuel: 50_000_000 };
/// What those of one ordinary user may use, besides their number.
const MEMORY: usize = 4 << 20;
const FUEL: u64 = 10_000_000;
/// What one event of an ordinary user's may take: it delays the tick.
const FUEL_OF_EVENT: u64 = 1_000_000;
const EXPIRY: Duration = Duration::from_millis(5);
/// How many extensions that have ended are remembered.
const MOST_ENDED: usize = 64;
/// How many modules may wait to be compiled, and how many of one user.
const MOST_WAITING: usize = 16;
const MOST_WAITING_OF_USER: usize = 4;

/// Who loads an extension.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loader {
    pub(super) uid: u32,
    /// How many extensions this user may have; `None` for the superuser and the one who runs the manager.
    pub(super) most: Option<usize>,
    pub(super) tracee: Option<TraceeId>,
}

struct Entry {
    name: String,
    loader: Loader,
    memory: usize,
    fuel: u64,
    capability: Arc<Capability>,
    id: Id,
    /// What it last reported, or was reported of it.
    ended: Option<String>,
}

/// The extensions that connections have loaded.
pub(super) struct Loaded {
    handler: ExtensionHandler,
    heard: Subscription,
    entries: BTreeMap<u64, Entry>,
}

impl Loaded {
    /// Makes a place for them; `own` is the manager's right to all events.
    pub(super) fn new(
        table: &mut Table,
        own: &Capability,
        processes: &HashMap<TraceeId, Process>,
    ) -> Result<Self, String> {
        let handler = ExtensionHandler::for_connections(ALL);
        let mut known: Vec<_> = processes.iter().map(|(tracee, process)| (*tracee, process.pid)).collect();
        known.sort_unstable();
        known.into_iter().for_each(|(tracee, pid)| handler.meet(tracee, pid));
        let topics = crate::server::Handler::topics(&handler);
        let heard = table.subscribe(own, &topics, 1024).map_err(|error| error.to_string())?;
        Ok(Self { handler, heard, entries: BTreeMap::new() })
    }

    /// Returns whether one of them runs.
    pub(super) fn is_active(&self) -> bool {
        self.entries.values().any(|entry| entry.ended.is_none())
    }

    /// Handles the next event; returns whether there was one.
    pub(super) fn handle_next(&mut self, table: &mut Table) -> bool {
        let Some(event) = table.next_event(&self.heard) else { return false };
        crate::server::Handler::handle(&mut self.handler, &event, table);
        true
    }

    /// Loads an extension under a number, with a right that is derived from `by`.
    pub(super) fn load(
        &mut self,
        number: u64,
        (manifest, module): &(Manifest, Module),
        by: &Capability,
        loader: Loader,
        table: &mut Table,
    ) -> Result<(), String> {
        self.admit(manifest, loader)?;
        let rights = Rights { delegate: false, load: false, ..Rights::ALL };
        let capability = Arc::new(table.lend(by, rights).map_err(|error| error.to_string())?);
        match self.handler.load_for(module, manifest, &capability, table) {
            Ok(id) => {
                let entry = Entry {
                    name: manifest.name.clone(),
                    loader,
                    memory: manifest.memory,
                    fuel: manifest.fuel_per_second(),
                    capability,
                    id,
                    ended: None,
                };
                self.entries.insert(number, entry);
                Ok(())
            }
            Err(error) => {
                table.revoke(&capability);
                Err(error.to_string())
            }
        }
    }

    /// Checks an ordinary user's limits.
    fn admit(&self, manifest: &Manifest, loader: Loader) -> Result<(), String> {
        let Some(most) = loader.most else { return Ok(()) };
        let name = &manifest.name;
        let own = || {
            let of_user = |entry: &&Entry| entry.loader.uid == loader.uid && entry.ended.is_none();
            self.entries.values().filter(of_user)
        };
        refuse_more(own().count(), most, loader.uid)?;
        let memory = own().map(|entry| entry.memory).sum::<usize>() + manifest.memory;
        let fuel = own().fold(manifest.fuel_per_second(), |sum, entry| sum.saturating_add(entry.fuel));
        for (what, value, most) in [
            ("the memory in bytes of your extensions", memory as u64, MEMORY as u64),
            ("the operations in a second of your extensions", fuel, FUEL),
            ("the fuel of one event", manifest.fuel, FUEL_OF_EVENT),
        ] {
            if value > most {
                return Err(format!(
                    "cannot load extension {name:?}: {what} would be {value}; the limit of an ordinary user is {most}"
                ));
            }
        }
        if manifest.expiry > EXPIRY {
            return Err(format!(
                "cannot load extension {name:?}: the expiry is {} ms; the limit of an ordinary user is {} ms",
                manifest.expiry.as_millis(),
                EXPIRY.as_millis()
            ));
        }
        Ok(())
    }

    /// Returns how many extensions of a user run.
    pub(super) fn count(&self, uid: u32) -> usize {
        self.entries.values().filter(|entry| entry.loader.uid == uid && entry.ended.is_none()).count()
    }

    /// Returns the user who loaded an extension.
    pub(super) fn user(&self, number: u64) -> Option<u32> {
        self.entries.get(&number).map(|entry| entry.loader.uid)
    }

    /// Unloads an extension, and forgets it.
    pub(super) fn unload(&mut self, number: u64, table: &mut Table) {
        if let Some(entry) = self.entries.remove(&number) {
            self.handler.unload(entry.id);
            table.revoke(&entry.capability);
        }
    }

    /// Ends those that were aborted too often, or whose right was revoked; returns their numbers.
    pub(super) fn sweep(&mut self, table: &mut Table) -> Vec<u64> {
        let mut ended = Vec::new();
        for (number, entry) in self.entries.iter_mut().filter(|(_, entry)| entry.ended.is_none()) {
            let reason = if self.handler.status(entry.id).is_none() {
                self.handler.last_message(entry.id)
            } else if table.rights(&entry.capability).is_err() {
                self.handler.unload(entry.id);
                "its right was revoked, or its tracee has ended".to_owned()
            } else {
                continue;
            };
            entry.ended = Some(reason);
            table.revoke(&entry.capability);
            ended.push(*number);
        }
        let all: Vec<u64> =
            self.entries.iter().filter(|(_, entry)| entry.ended.is_some()).map(|(it, _)| *it).collect();
        for number in &all[..all.len().saturating_sub(MOST_ENDED)] {
            self.entries.remove(number);
        }
        ended
    }

    /// Reports on the extensions of a user; `None` for all.
    pub(super) fn report(&self, of: Option<u32>) -> Vec<ExtensionReport> {
        let own = self.entries.iter().filter(|(_, entry)| of.is_none_or(|uid| entry.loader.uid == uid));
        own.map(|(number, entry)| {
            let status = self.handler.status(entry.id).unwrap_or_default();
            ExtensionReport {
                number: *number,
                name: entry.name.clone(),
                uid: entry.loader.uid,
                tracee: entry.loader.tracee.map(|tracee| tracee.0),
                memory: entry.memory as u64,
                fuel: entry.fuel,
                handled: status.handled,
                failures: status.failures,
                dropped: status.dropped,
                message: self.handler.last_message(entry.id),
                ended: entry.ended.clone(),
            }
        })
        .collect()
    }
}

/// Refuses an extension of an ordinary user that has so many.
pub(super) fn refuse_more(own: usize, most: usize, uid: u32) -> Result<(), String> {
    if most == 0 {
        return Err(
            "cannot load an extension: this manager loads none of ordinary users; its owner allows some by `orrery manager serve --user-extensions NUMBER`".to_owned(),
        );
    }
    if own >= most {
        return Err(format!(
            "cannot load an extension: user {uid} has {own}, and more are refused; unload one by `orrery manager unload`"
        ));
    }
    Ok(())
}

struct Job {
    connection: u64,
    uid: u32,
    manifest: String,
    module: OwnedFd,
}

/// A module that was compiled for a connection.
pub(super) struct Compiled {
    pub(super) connection: u64,
    pub(super) result: Result<(Manifest, Module), String>,
}

/// A thread that reads manifests and compiles modules, which takes too long for the manager's own.
pub(super) struct Compiler {
    jobs: SyncSender<Job>,
    done: Receiver<Compiled>,
    doorbell: Arc<OwnedFd>,
    /// The connections that wait, and their users.
    waiting: HashMap<u64, u32>,
}

impl Compiler {
    /// Starts the thread, on these CPUs. It has ordinary priority: the manager's own is reset when it makes threads.
    pub(super) fn start(cpus: OwnCpus) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("cannot start a thread that compiles modules: {error}");
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let doorbell = Arc::new(rustix::event::eventfd(0, flags).map_err(|errno| failed(errno.into()))?);
        let (jobs, todo) = sync_channel::<Job>(MOST_WAITING);
        let (results, done) = channel();
        let bell = Arc::clone(&doorbell);
        let work = move || {
            cpus.take();
            for job in todo {
                let Job { connection, uid, manifest, module } = job;
                let result = compile(uid, &manifest, module);
                if results.send(Compiled { connection, result }).is_err() {
                    break;
                }
                // The counter cannot overflow by so many.
                let _rung = rustix::io::write(&*bell, &1_u64.to_ne_bytes());
            }
        };
        std::thread::Builder::new().name("compiler".to_owned()).spawn(work).map_err(failed)?;
        Ok(Self { jobs, done, doorbell, waiting: HashMap::new() })
    }

    /// Returns the descriptor that is readable when something was compiled.
    pub(super) fn doorbell(&self) -> &OwnedFd {
        &self.doorbell
    }

    /// Has a module compiled for a connection.
    pub(super) fn compile(
        &mut self,
        connection: u64,
        uid: u32,
        manifest: String,
        module: OwnedFd,
    ) -> Result<(), String> {
        if self.waiting.contains_key(&connection) {
            return Err("cannot load an extension: this connection waits for another one".to_owned());
        }
        let busy = || "cannot load an extension: too many wait to be compiled; try again later".to_owned();
        if self.waiting.values().filter(|waiting| **waiting == uid).count() >= MOST_WAITING_OF_USER {
            return Err(busy());
        }
        match self.jobs.try_send(Job { connection, uid, manifest, module }) {
            Ok(()) => drop(self.waiting.insert(connection, uid)),
            Err(TrySendError::Full(_)) => return Err(busy()),
            Err(TrySendError::Disconnected(_)) => {
                return Err("cannot load an extension: the thread that compiles has ended".to_owned());
            }
        }
        Ok(())
    }

    /// Returns what was compiled since this was asked last.
    pub(super) fn take(&mut self) -> Vec<Compiled> {
        let _count = rustix::io::read(&*self.doorbell, &mut [0; 8]);
        let all: Vec<Compiled> = self.done.try_iter().collect();
        for compiled in &all {
            self.waiting.remove(&compiled.connection);
        }
        all
    }
}

/// Reads and compiles; on the thread of the compiler.
fn compile(uid: u32, manifest: &str, module: OwnedFd) -> Result<(Manifest, Module), String> {
    let manifest =
        Manifest::parse(&format!("manifest of user {uid}"), manifest).map_err(|error| error.to_string())?;
    let named = |cause: String| format!("cannot load extension {:?}: {cause}", manifest.name);
    // Memory that cannot change any more: reading a file of the client's choice could wait for ever.
    let needed = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
    match rustix::fs::fcntl_get_seals(module.as_fd()) {
        Ok(seals) if seals.contains(needed) => {}
        Ok(_) | Err(Errno::INVAL) => {
            return Err(named("the module is not passed in a sealed memfd".to_owned()));
        }
        Err(errno) => return Err(named(format!("its module cannot be read: {errno}"))),
    }
    let mut bytes = Vec::new();
    let most = Module::LARGEST as u64 + 1;
    let mut file = std::fs::File::from(module);
    let read = std::io::Seek::rewind(&mut file).and_then(|()| file.take(most).read_to_end(&mut bytes));
    read.map_err(|error| named(format!("its module cannot be read: {error}")))?;
    let compiled = Module::compile(&manifest.name, &bytes).map_err(|error| error.to_string())?;
    Ok((manifest, compiled))
}
