//! Extensions in the manager: WebAssembly modules that read and set attributes (`orrery-extension`).
//!
//! | `to` in a manifest | what it is | rights |
//! |---|---|---|
//! | a class, `cpu.target` for instance, with `of` | an attribute of the tracee that joined last under the name `of` | get, set |
//! | `timer` | the manager's tick; the parameter is a period in nanoseconds, which is rounded up to ticks | subscribe |
//! | `joined`, `ended`, `call`, `attribute`, `missed`, `cpu-pressure`, `memory-pressure`, `signal`, `custom` | an event's topic; with `of`, about this tracee only | subscribe |
//! | `event`, with or without `of` | emits an event of topic `custom`: 4 bytes of number and 8 of value | emit |
//! | `owner` | a line in the manager's log | emit |
//!
//! An event's value is passed as `value`, its number as `detail`. Extensions are loaded when the manager starts, and act with the
//! rights of the user who runs it, as far as their manifests ask for them.

mod host;
mod object;

use std::path::Path;
use std::sync::Arc;

use orrery_extension::{Extensions, Limits, LoadError, Manifest, Module};
use thiserror::Error;

use crate::attributes::{Classes, Event, Table, Topic};
use crate::server::Handler;
use host::TableHost;
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
            let id = extensions.load(&module, &manifest, |_, request| Object::of(request, classes))?;
            host.name(id, &manifest.name);
        }
        Ok(Self { host, extensions })
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
        for subscriber in self.host.subscribers(event) {
            let event =
                orrery_extension::Event { time: event.time, value: event.value, detail: event.number.into() };
            self.extensions.post(subscriber, event);
        }
        let (host, extensions) = (&self.host, &mut self.extensions);
        host.with(table, || extensions.run());
    }
}
