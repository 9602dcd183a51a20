//! Programs that exit as soon as their service runs in the background (daemon(7); systemd's `Type=forking` and `Type=oneshot`).

use std::fs;
use std::path::Path;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::output::Output;

/// How long a program may take to go into the background: systemd's `DefaultTimeoutStartSec`.
const TIMEOUT: Duration = Duration::from_secs(90);
/// How long processes that help it to do so may take to exit.
const SETTLING: Duration = Duration::from_secs(10);
/// How long there must be one process that is always the same, where no PID file names it.
const STEADY: Duration = Duration::from_millis(200);
const INTERVAL: Duration = Duration::from_millis(5);

/// Waits until `program`, a child of this init process, has exited with success, has written its PID file, and has left one process
/// as a child of init: the service.
///
/// # Errors
///
/// It fails, takes too long, or leaves none or several.
pub(crate) fn wait(
    mut program: Child,
    name: &str,
    pid_file: Option<&Path>,
    output: &mut Output,
) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    let status = loop {
        if let Some(status) = program.try_wait().with_context(|| format!("cannot wait for {name}"))? {
            break status;
        }
        output.read();
        ensure!(
            Instant::now() < deadline,
            "{name} has not exited within {} s, though its unit says that it goes into the background",
            TIMEOUT.as_secs()
        );
        sleep(INTERVAL);
    };
    ensure!(status.success(), "{name}, which goes into the background: {status}: {}", output.last_lines());
    let settled = Instant::now() + SETTLING;
    // The process that is the only one, and since when.
    let mut only = (0, Instant::now());
    loop {
        reap();
        output.read();
        let left = children()?;
        match left[..] {
            [] => bail!(
                "{name} has exited with success and left no process, so that nothing could be carried over"
            ),
            [pid] => {
                if only.0 != pid {
                    only = (pid, Instant::now());
                }
                let found = match pid_file.map(read_pid) {
                    None => only.1.elapsed() > STEADY,
                    // One that started it may stay, as mysqld_safe does, or is about to exit.
                    Some(Some(written)) => {
                        written == pid
                            || Path::new(&format!("/proc/{written}")).exists() && Instant::now() > settled
                    }
                    Some(None) => false,
                };
                if found {
                    return Ok(());
                }
            }
            _ => ensure!(
                Instant::now() < settled,
                "{name} has left {} processes ({}): a service is one process with all that it started",
                left.len(),
                left.iter().map(|&pid| command_name(pid)).collect::<Vec<_>>().join(", ")
            ),
        }
        if let Some(path) = pid_file.filter(|_| Instant::now() > deadline) {
            bail!(
                "{name} has not written the PID of a process to {} within {} s",
                path.display(),
                TIMEOUT.as_secs()
            );
        }
        sleep(INTERVAL);
    }
}

/// Returns the PID that a file has.
fn read_pid(path: &Path) -> Option<i32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Waits for all children that have exited.
fn reap() {
    let mut status = 0;
    // SAFETY: `status` is a live integer, which the call writes.
    while unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) } > 0 {}
}

/// Returns the PIDs of the children of this process, which has one thread.
fn children() -> Result<Vec<i32>> {
    let path = format!("/proc/self/task/{}/children", std::process::id());
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    Ok(text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect())
}

fn command_name(pid: i32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("{} {pid}", name.trim())
}
