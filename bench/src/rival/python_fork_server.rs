//! The client of `bench/rivals/forkserver.py`.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tempfile::TempDir;

use super::PYTHON;
use crate::machine;
use crate::script::{Runner, Script, Streams};

/// No script of a benchmark takes longer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A Python process that has imported its modules and forks a child for each script.
pub struct PythonForkServer {
    server: Child,
    socket: PathBuf,
    // Held so that the server can write to it.
    _output: BufReader<ChildStdout>,
    // Holds the socket; removed at the end.
    _directory: TempDir,
}

impl PythonForkServer {
    /// Starts a server that imports `modules` first.
    pub fn start(modules: &[&str]) -> Result<Self> {
        let directory = tempfile::tempdir().context("cannot make a directory for a socket")?;
        let socket = directory.path().join("socket");
        let program = machine::source_root().join("bench/rivals/forkserver.py");
        let mut command = Command::new(PYTHON);
        command.arg(&program).arg(&socket).arg(modules.join(",")).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut server = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let mut output = BufReader::new(server.stdout.take().context("the fork server has no output")?);
        let mut line = String::new();
        output.read_line(&mut line).context("cannot wait for the fork server")?;
        let server = Self { server, socket, _output: output, _directory: directory };
        ensure!(line == "ready\n", "{} began with {line:?} instead of \"ready\"", program.display());
        Ok(server)
    }
}

impl Runner for PythonForkServer {
    fn run(&mut self, script: &Script, streams: Streams<'_>) -> Result<i32> {
        let mut request = script.directory.as_os_str().as_bytes().to_vec();
        for word in
            [script.path.as_os_str()].into_iter().chain(script.arguments.iter().map(OsString::as_os_str))
        {
            request.push(0);
            request.extend_from_slice(word.as_bytes());
        }
        let length = u32::try_from(request.len()).context("a request too long")?.to_le_bytes();
        let mut connection =
            UnixStream::connect(&self.socket).context("cannot connect to the fork server")?;
        connection.set_read_timeout(Some(TIMEOUT)).context("limiting the wait")?;

        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        ensure!(rights.push(SendAncillaryMessage::ScmRights(&streams)), "no space for three descriptors");
        let sent = sendmsg(connection.as_fd(), &[IoSlice::new(&length)], &mut rights, SendFlags::NOSIGNAL)
            .context("cannot send descriptors to the fork server")?;
        ensure!(sent == length.len(), "the fork server took only {sent} bytes");
        connection.write_all(&request).context("cannot send a request to the fork server")?;
        let mut status = [0; 4];
        connection.read_exact(&mut status).context("cannot read the fork server's answer")?;
        Ok(i32::from_le_bytes(status))
    }
}

impl Drop for PythonForkServer {
    fn drop(&mut self) {
        self.server.kill().ok();
        self.server.wait().ok();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Contender;
    use crate::rival::ColdPython;
    use crate::script::{Scripts, run};

    fn script(directory: &TempDir, name: &str, text: &str) -> Script {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        fs::write(directory.path().join("input"), "some input").unwrap();
        let arguments = vec!["one".into(), "two three".into()];
        Script {
            path,
            arguments,
            input: directory.path().join("input"),
            directory: directory.path().to_owned(),
        }
    }

    #[test]
    fn the_fork_server_runs_scripts_as_python_does() {
        let directory = tempfile::tempdir().unwrap();
        let mut server = PythonForkServer::start(&["json", "re"]).unwrap();
        let texts = [
            ("plain.py", "print(6 * 7)"),
            (
                "surroundings.py",
                "import os, sys; print(os.getcwd(), sys.argv, sys.path[0], __name__, __file__)",
            ),
            ("input.py", "import sys, json; print(json.dumps(sys.stdin.read()))"),
            ("exits.py", "import sys; print('half', end=''); sys.exit(7)"),
            ("complains.py", "import sys; sys.exit('no')"),
            ("raises.py", "print('before'); 1 / 0"),
            ("broken.py", "print('before'"),
            ("killed.py", "import os; os.kill(os.getpid(), 9)"),
        ];
        for (name, text) in texts {
            let script = script(&directory, name, text);
            // Its tracebacks show the server's own frames, too; what a script writes is the same.
            let seen = |runner: &mut dyn Runner| {
                let outcome = run(runner, &script).unwrap();
                (outcome.status, outcome.output)
            };
            let due = seen(&mut ColdPython);
            assert_eq!(seen(&mut server), due, "{name}");
            assert_eq!(seen(&mut server), due, "{name}, again");
        }
    }

    #[test]
    fn a_script_leaves_nothing_to_the_next() {
        let directory = tempfile::tempdir().unwrap();
        let mut server = PythonForkServer::start(&["json"]).unwrap();
        let marks = script(&directory, "marks.py", "import json, os; json.mark = 1; os.chdir('/')");
        let looks = script(&directory, "looks.py", "import json; print(hasattr(json, 'mark'))");
        assert_eq!(run(&mut server, &marks).unwrap().status, 0);
        assert_eq!(run(&mut server, &looks).unwrap().output, b"False\n");
    }

    #[test]
    fn a_wrong_outcome_is_no_measurement() {
        let directory = tempfile::tempdir().unwrap();
        let right = script(&directory, "right.py", "print(1)");
        let wrong = script(&directory, "wrong.py", "print(2)");
        let due = run(&mut ColdPython, &right).unwrap();
        let scripts = [("right", &right), ("wrong", &wrong)];
        let scripts = scripts.map(|(name, script)| (name.to_owned(), (script.clone(), due.clone())));
        let mut contender = Scripts::new(ColdPython, scripts.into());
        assert_eq!(contender.measure("right", 2).unwrap().latencies.len(), 2);
        assert!(contender.measure("wrong", 1).unwrap_err().to_string().contains("wrong wrote \"2\\n\""));
        assert!(contender.measure("absent", 1).is_err());
    }

    #[test]
    fn a_server_that_cannot_import_does_not_come_up() {
        assert!(PythonForkServer::start(&["no_such_module"]).is_err());
    }
}
