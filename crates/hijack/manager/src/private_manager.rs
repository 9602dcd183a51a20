//! A service manager that a demonstration or a benchmark starts for itself.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use orrery_sys::programs::find_helper;

use crate::client::Client;

/// How long a manager may take to listen.
const LIMIT: Duration = Duration::from_secs(20);

/// A manager with a socket in a directory of its own. Both end with this value.
#[derive(Debug)]
pub struct PrivateManager {
    process: Child,
    directory: PathBuf,
}

impl PrivateManager {
    /// Starts `orrery-manager serve` with these options, and waits until it listens.
    ///
    /// # Errors
    /// If it cannot be started, or does not listen within 20 seconds.
    pub fn start(options: &[&str]) -> Result<Self> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let program = find_helper("orrery-manager")?;
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("orrery-manager-{}-{number}", std::process::id()));
        std::fs::create_dir(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let mut command = Command::new(program);
        command.arg("serve").args(options).arg("--socket").arg(directory.join("socket"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = match command.spawn() {
            Ok(process) => process,
            Err(error) => {
                let _ = std::fs::remove_dir(&directory);
                return Err(error).context("cannot start the manager");
            }
        };
        let manager = Self { process, directory };
        let begin = Instant::now();
        while Client::connect(&manager.socket()).is_err() {
            if begin.elapsed() > LIMIT {
                bail!("cannot start the manager: it does not listen");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(manager)
    }

    /// Returns the path of its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }
}

impl Drop for PrivateManager {
    fn drop(&mut self) {
        // It can be killed by its own user, and restores nothing that outlives the experiment.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
