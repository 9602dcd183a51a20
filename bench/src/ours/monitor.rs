//! Calls under guard.

use std::path::Path;

use anyhow::Result;
use orrery_monitor::{Guard, Log, Policy};

use crate::contender::{Contender, Sample};
use crate::rival::{Direct, Remote};

/// A process under guard that makes calls.
pub struct Guarded {
    caller: Remote,
}

impl Guarded {
    /// Starts it; it may read and write files in `directory`. `mediation` is the policy's setting of which process opens them.
    pub fn new(directory: &Path, mediation: &str) -> Result<Self> {
        // What the kernel is to execute it has to be able to read; here it executes nothing.
        let text = format!(
            "mediation = {mediation:?}\n[files]\nread = [{0:?}, \"/usr\", \"/lib\", \"/lib64\"]\nwrite = [{0:?}]\n",
            directory.display().to_string()
        );
        let policy = Policy::parse(&text)?;
        let (caller, served) = Remote::new()?;
        let mut caller_files = Direct::new(directory)?;
        std::thread::Builder::new().spawn(move || {
            let end = Guard::new(policy).log(Log::Words).closure(move || served.serve(&mut caller_files));
            if let Err(error) = end {
                eprintln!("{error}");
            }
        })?;
        Ok(Self { caller })
    }
}

impl Contender for Guarded {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        self.caller.measure(work, iterations)
    }
}
