//! The watcher of a pair, `orrery orthros up`. SKIPPED where QEMU, criu, a kernel or root are absent.

use std::process::{Child, Command, Stdio};

use orrery_testing::faults::{Faults, MEMORY, Server};

use crate::pairs::{ONE_PAIR, missing, orthros};
use crate::{CLIENT, kill, pid, run_within};

/// A pair of a test's own.
struct Pair {
    child: Child,
    directory: tempfile::TempDir,
}

impl Pair {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let mut command = orthros();
        command.args(["up", "--json", "--directory"]).arg(directory.path().join("pair"));
        command.args(["--", "orrery-orthros-load", "ballast", "1", "0", "0"]);
        // An open pipe: the end of its standard input would end it.
        let child =
            command.stdin(Stdio::piped()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let this = Self { child, directory };
        orrery_testing::eventually("the pair is armed", || this.log().contains("\"armed\""));
        this
    }

    fn command(&self, name: &str) -> Command {
        let mut command = orthros();
        command.arg(name).arg("--directory").arg(self.directory.path().join("pair"));
        command
    }

    /// Asks how the pair is, in words.
    fn status(&self) -> Option<String> {
        let output = run_within(&mut self.command("status"), CLIENT)?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        kill(pid(&self.child), libc::SIGTERM);
        let _ = self.child.wait();
    }
}

/// Whatever fails of its watching, it neither ends the service nor takes one of the machines for dead, and fails over when it is asked to.
#[test]
fn the_watcher_survives_each_failing_call() {
    if let Some(why) = missing(&[]) {
        return orrery_testing::skipped!("{why}");
    }
    let _one = ONE_PAIR.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let pair = Pair::start();
    {
        let Some(faults) = Faults::attach(pid(&pair.child)) else { return };
        let reached = Server {
            faults: &faults,
            work: &mut || {
                pair.status();
                std::thread::sleep(std::time::Duration::from_millis(100));
            },
            serves: &mut || {
                orrery_testing::eventually("the pair answers", || pair.status().is_some());
            },
            spared: &MEMORY,
            log: &|| pair.log(),
        }
        .survives_each_failure();
        assert!(reached > 4, "{reached}");
    }
    let log = pair.log();
    assert!(!log.contains("\"died\"") && !log.contains("backup died"), "{log}");
    let asked = pair.command("failover").stdout(Stdio::null()).status().unwrap();
    assert!(asked.success(), "{}", pair.log());
    assert!(pair.log().contains("\"survived\""), "{}", pair.log());
}
