//! Where a demo or a soak has its pair: a directory and a network of the program's own, which go with it, also where it is interrupted.

use std::path::Path;

use anyhow::{Context as _, Result};
use orrery_orthros_host::{Network, NetworkConfig};
use tempfile::TempDir;

use super::remote::INTERRUPTED;

/// The directory and the network of a demo or a soak.
pub(super) struct Workspace {
    directory: TempDir,
    network: String,
}

impl Workspace {
    pub(super) fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let network = format!("orrery-{}", std::process::id());
        let (path, name) = (directory.path().to_owned(), network.clone());
        ctrlc::set_handler(move || {
            // The machines end with the program. What they still write may take a second try.
            Network::remove(&name);
            let _ = (0..3).any(|_| std::fs::remove_dir_all(&path).is_ok());
            std::process::exit(INTERRUPTED);
        })
        .context("cannot listen to signals")?;
        Ok(Self { directory, network })
    }

    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(super) fn network(&self) -> NetworkConfig {
        NetworkConfig::Own(self.network.clone())
    }
}
