//! A file for each thread (`-ff`), named after the one that was given: `trace.4711`.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The files of a trace.
pub(crate) struct ThreadFiles {
    path: PathBuf,
    append: bool,
    begun: HashSet<u32>,
    /// Only one is open: there may be more threads than descriptors.
    open: Option<(u32, File)>,
}

impl ThreadFiles {
    /// Files that are named after this one; what is there already is kept, or not.
    pub(super) fn new(path: &Path, append: bool) -> Self {
        Self { path: path.to_owned(), append, begun: HashSet::new(), open: None }
    }

    /// Writes lines of a thread to its file.
    pub(super) fn write(&mut self, thread: u32, lines: &[u8]) -> io::Result<()> {
        if let Some((_, file)) = self.open.as_mut().filter(|(open, _)| *open == thread) {
            return file.write_all(lines);
        }
        let mut name = OsString::from(&self.path);
        name.push(format!(".{thread}"));
        let first = self.begun.insert(thread);
        let mut file = OpenOptions::new();
        let file = match self.append || !first {
            true => file.append(true),
            false => file.write(true).truncate(true),
        };
        let mut file = file.create(true).open(&name).map_err(|error| {
            io::Error::new(error.kind(), format!("cannot create {}: {error}", Path::new(&name).display()))
        })?;
        file.write_all(lines)?;
        self.open = Some((thread, file));
        Ok(())
    }
}
