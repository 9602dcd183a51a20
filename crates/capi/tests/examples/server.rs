//! A key-value server for one test.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use super::resp::Client;
use super::until;

pub struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts it in a directory, where its socket and its dump are.
    pub fn start(program: &Path, folder: &Path, tracker: &str, options: &[&str]) -> Self {
        let socket = folder.join("socket");
        let log = std::fs::File::options().create(true).append(true).open(folder.join("log")).unwrap();
        let mut child =
            command(program, folder, tracker, options).stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let ready = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .map_while(Result::ok)
            .any(|line| line == "ready");
        if !ready {
            let status = child.wait();
            panic!("{status:?}: {}", std::fs::read_to_string(folder.join("log")).unwrap());
        }
        Self { child, socket }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.socket)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks it to end, by a signal.
    pub fn terminate(mut self) -> ExitStatus {
        // SAFETY: the process is this one's child and was not waited for.
        unsafe { libc::kill(i32::try_from(self.child.id()).unwrap(), libc::SIGTERM) };
        until("the server ends", || self.child.try_wait().unwrap())
    }

    /// Returns whether it still is the process that was started.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the command that starts the server.
pub fn command(program: &Path, folder: &Path, tracker: &str, options: &[&str]) -> Command {
    let mut command = Command::new(program);
    command
        .env("ORRERY_TRACKER", tracker)
        .stdin(Stdio::null())
        .arg("--socket")
        .arg(folder.join("socket"))
        .arg("--file")
        .arg(folder.join("dump.okv"))
        .args(options);
    command
}

/// That a server with these options does not start; gives what it says.
pub fn refuses_to_start(program: &Path, folder: &Path) -> String {
    let mut child = command(program, folder, "wp_async", &[])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let status = until("the server refuses to start", || {
        let status = child.try_wait().unwrap();
        if status.is_none() && folder.join("socket").exists() {
            let _ = child.kill();
        }
        status
    });
    assert_eq!((status.code(), status.signal()), (Some(1), None));
    let output = child.wait_with_output().unwrap();
    String::from_utf8_lossy(&output.stderr).into_owned()
}
