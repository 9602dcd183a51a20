//! Extensions in the manager: WebAssembly modules that read and set attributes (`orrery-extension`).
//!
//! | `to` in a manifest | what it is | rights |
//! |---|---|---|
//! | a class, `cpu.target` for instance, with `of` | an attribute of the tracee that joined last under the name `of` | get, set |
//! | `timer` | the manager's tick; the parameter is a period in nanoseconds, which is rounded up to ticks | subscribe |
//! | `joined`, `ended`, `call`, `attribute`, `missed`, `cpu-pressure`, `memory-pressure`, `signal`, `custom` | an event's topic; with `of`, about this tracee only | subscribe |
//! | `event`, with or without `of` | emits an event of topic `custom`: 4 bytes of number and 8 of value | emit |
//! | `upcall`, with `of` | the function that this tracee registered for upcalls is called: 4 bytes of number and 8 of value | emit |
//! | `owner` | a line in the manager's log | emit |
//!
//! An event's value is passed as `value`, its number as `detail`. Extensions that are loaded when the manager starts act with the
//! rights of the user who runs it, as far as their manifests ask for them; those that a connection loads, with the rights of that
//! connection, and they have no line in the manager's log.

mod host;
mod loading;
mod object;

use std::path::Path;
use std::sync::Arc;

use orrery_extension::{Extensions, Id, Limits, LoadError, Manifest, Module, Status};
use thiserror::Error;

use crate::attributes::{Capability, Classes, Event, Table, Topic, TraceeId};
use crate::client::ClientError;
use crate::server::Handler;
use host::{Right, TableHost};
pub use loading::{Package, load};
use object::Object;

/// Why an extension is not loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExtensionError {
    /// A file cannot be read.
    #[error("cannot read {path}: {cause}")]
    File {
        /// The path of the file.
        path: String,
        /// The kernel's error, which is part of the message and so no source.
        cause: std::io::Error,
    },
    /// The manifest is wrong.
    #[error(transparent)]
    Manifest(#[from] orrery_policy::PolicyError),
    /// The module is wrong, or what it asks for is not granted.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The manager does not load it, or does not answer.
    #[error(transparent)]
    Manager(#[from] ClientError),
}

/// All extensions of a manager, as one of its handlers.
pub struct ExtensionHandler {
    host: Arc<TableHost>,
    extensions: Extensions<TableHost>,
}

impl ExtensionHandler {
    /// Loads extensions by their manifests. Their modules are compiled now, which takes milliseconds each.
    ///
    /// # Errors
    /// What is wrong with the first that is not loaded.
    pub fn load<P: AsRef<Path>>(
        manifests: impl IntoIterator<Item = P>,
        classes: &Classes,
    ) -> Result<Self, ExtensionError> {
        let host = Arc::new(TableHost::default());
        let mut extensions = Extensions::new(Arc::clone(&host), Limits::default());
        for path in manifests {
            let path = path.as_ref();
            let file = |path: &Path, cause| ExtensionError::File { path: path.display().to_string(), cause };
            let text = std::fs::read_to_string(path).map_err(|cause| file(path, cause))?;
            let manifest = Manifest::parse(&path.display().to_string(), &text)?;
            let module = path.parent().unwrap_or(Path::new("")).join(&manifest.module);
            let bytes = std::fs::read(&module).map_err(|cause| file(&module, cause))?;
            let module = Module::compile(&manifest.name, &bytes)?;
            let grant = |_: &str, request: &_| Object::of(request, classes).map(Right::of_manager);
            let id = extensions.load(&module, &manifest, grant)?;
            host.name(id, &manifest.name);
        }
        Ok(Self { host, extensions })
    }

    /// Returns one without extensions, for those that connections load.
    pub(crate) fn for_connections(limits: Limits) -> Self {
        let host = Arc::new(TableHost::quiet());
        Self { extensions: Extensions::new(Arc::clone(&host), limits), host }
    }

    /// Learns of a tracee that joined before.
    pub(crate) fn meet(&self, tracee: TraceeId, pid: i32) {
        self.host.meet(tracee, pid.into());
    }

    /// Loads an extension that acts by a capability.
    pub(crate) fn load_for(
        &mut self,
        module: &Module,
        manifest: &Manifest,
        by: &Arc<Capability>,
        table: &mut Table,
    ) -> Result<Id, LoadError> {
        let classes = table.classes().clone();
        let rights = table.rights(by).ok();
        let grant = |_: &str, request: &_| Right::of_connection(Object::of(request, &classes)?, by, rights);
        let (host, extensions) = (&self.host, &mut self.extensions);
        let id = host.with(table, || extensions.load(module, manifest, grant))?;
        host.name(id, &manifest.name);
        Ok(id)
    }

    /// Unloads an extension; returns whether there was one.
    pub(crate) fn unload(&mut self, id: Id) -> bool {
        self.extensions.unload(id)
    }

    /// Returns the counters of an extension; `None` where it is unloaded.
    pub(crate) fn status(&self, id: Id) -> Option<Status> {
        self.extensions.status(id)
    }

    /// Returns what an extension that a connection has loaded logged last, or was reported of it.
    pub(crate) fn last_message(&self, id: Id) -> String {
        self.host.last_message(id)
    }
}

impl Handler for ExtensionHandler {
    fn name(&self) -> &str {
        "extensions"
    }

    fn topics(&self) -> Vec<Topic> {
        object::TOPICS.iter().map(|(_, topic)| *topic).collect()
    }

    fn handle(&mut self, event: &Event, table: &mut Table) {
        self.host.look(event);
        for subscriber in self.host.subscribers(event, table) {
            let event =
                orrery_extension::Event { time: event.time, value: event.value, detail: event.number.into() };
            self.extensions.post(subscriber, event);
        }
        let (host, extensions) = (&self.host, &mut self.extensions);
        host.with(table, || extensions.run());
    }
}
