//! The file that a learnt policy goes to: opened before the program starts, and not written over.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};

use crate::policy_recorder::PolicyRecorder;
use crate::{Error, Policy};

/// A file that becomes a policy, or learns more.
#[derive(Debug)]
pub(crate) struct Learning {
    path: PathBuf,
    file: File,
    /// What it says so far.
    text: String,
    known: Policy,
    /// It was not there, and nothing has been learnt yet.
    new: bool,
}

impl Learning {
    /// Opens the file. What it says is kept unless it is to be forgotten.
    ///
    /// # Errors
    /// Where it cannot be written, or is no policy.
    pub(crate) fn open(path: &Path, forget: bool) -> Result<Self, Error> {
        let failed = |source| Error::Write { path: path.to_owned(), source };
        let new = !path.exists();
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(failed)?;
        let mut text = String::new();
        if !forget {
            file.read_to_string(&mut text).map_err(failed)?;
        }
        let known = Policy::parse_named(&text, &path.display().to_string()).map_err(|error| match error {
            Error::Policy(source) => Error::Learn(source),
            other => other,
        })?;
        Ok(Self { path: path.to_owned(), file, text, known, new })
    }

    /// What the policy says so far.
    pub(crate) fn known(&self) -> &Policy {
        &self.known
    }

    /// Writes what was learnt.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(crate) fn finish(mut self, recorder: &PolicyRecorder) -> Result<(), Error> {
        let path = self.path.clone();
        let failed = |source| Error::Write { path, source };
        let text = recorder
            .policy(&self.known, &self.text)
            .map_err(|message| failed(std::io::Error::other(message)))?;
        let path = self.path.clone();
        self.file
            .rewind()
            .and_then(|()| self.file.write_all(text.as_bytes()))
            .and_then(|()| self.file.set_len(text.len() as u64))
            .map_err(|source| Error::Write { path, source })?;
        self.new = false;
        Ok(())
    }
}

/// Leaves no empty file where no program ran.
impl Drop for Learning {
    fn drop(&mut self) {
        if self.new {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
