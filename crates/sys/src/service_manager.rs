//! The service manager that started this process: notifications to it (`sd_notify(3)`), as systemd's `Type=notify` expects them,
//! and the sockets that it passes (`sd_listen_fds(3)`).
//!
//! Without `NOTIFY_SOCKET` in the environment there is nothing to notify. A service manager that has gone, or that takes no
//! message, is no reason for a service to fail: what goes wrong is ignored.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use sd_notify::NotifyState;

/// The variables that announce passed sockets. They are for this process alone: a service removes them from the environment
/// of the processes that it starts.
pub const LISTEN_VARIABLES: [&str; 4] = ["LISTEN_PID", "LISTEN_PIDFDID", "LISTEN_FDS", "LISTEN_FDNAMES"];

/// Reports that the service has started: clients can connect.
pub fn ready() {
    let _ = sd_notify::notify(&[NotifyState::Ready]);
}

/// Reports that the service is about to end.
pub fn stopping() {
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
}

/// Reports in one line what the service does, for `systemctl status`.
pub fn status(line: &str) {
    let _ = sd_notify::notify(&[NotifyState::Status(line)]);
}

/// Returns the descriptors that the service manager passed to this process, close-on-exec, in its order; none if it passed
/// none, or passed them to another process.
///
/// The descriptors are duplicates. Those that were passed, from 3 on, stay open, close-on-exec, until the process ends: what
/// `LISTEN_FDS` announces may be another's.
///
/// # Errors
/// `InvalidInput` where a variable is malformed; `EBADF` where fewer descriptors are open than announced.
pub fn passed_descriptors() -> io::Result<Vec<OwnedFd>> {
    let duplicate = |number| {
        // SAFETY: the descriptor is open, as sd_notify has just set its close-on-exec flag, and it is borrowed for one system
        // call, which changes nothing of it.
        let passed = unsafe { BorrowedFd::borrow_raw(number) };
        Ok(rustix::io::fcntl_dupfd_cloexec(passed, 3)?)
    };
    sd_notify::listen_fds()?.map(duplicate).collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::process::Command;

    use super::*;

    /// Runs this test again as a process with the variables, whose descriptor 3 is a pipe and 4 is closed.
    fn with_variables(name: &str, variables: &[(&str, &str)]) -> std::process::Output {
        use std::os::unix::process::CommandExt;
        let (pipe, _writer) = std::io::pipe().unwrap();
        let pipe = OwnedFd::from(pipe);
        let raw = pipe.as_raw_fd();
        let script = "export LISTEN_PID=${LISTEN_PID-$$}; exec \"$0\" \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", "--test-threads=1", name]).env("PASSED_TEST", "1");
        command.envs(variables.iter().copied());
        // SAFETY: plain system calls between fork and exec on descriptors of the child; nothing is allocated.
        unsafe {
            command.pre_exec(move || {
                libc::dup2(raw, 3);
                libc::fcntl(3, libc::F_SETFD, 0);
                libc::close(4);
                Ok(())
            });
        }
        command.output().unwrap()
    }

    #[test]
    fn passed_descriptors_are_duplicated() {
        const NAME: &str = "service_manager::tests::passed_descriptors_are_duplicated";
        if std::env::var_os("PASSED_TEST").is_some() {
            match passed_descriptors() {
                Ok(passed) => {
                    assert!(passed.iter().all(|fd| fd.as_raw_fd() > 3));
                    println!("passed {}", passed.len());
                }
                Err(error) => println!("refused: {error}"),
            }
            // SAFETY: the descriptor is leaked again, so that nothing closes it.
            let third = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(3) });
            println!("flags {:?}", rustix::io::fcntl_getfd(&*third));
            return;
        }
        for (variables, wanted) in [
            (&[][..], "passed 0"),
            (&[("LISTEN_FDS", "1")], "passed 1\nflags Ok(FdFlags(CLOEXEC))"),
            (&[("LISTEN_FDS", "1"), ("LISTEN_PID", "1")], "passed 0"),
            (&[("LISTEN_FDS", "many")], "refused: invalid LISTEN_FDS"),
            (&[("LISTEN_FDS", "2")], "refused: Bad file descriptor"),
            (&[("LISTEN_FDS", "1"), ("LISTEN_PID", "me")], "refused: invalid LISTEN_PID"),
        ] {
            let output = with_variables(NAME, variables);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success() && text.contains(wanted), "{variables:?}: {text}");
        }
    }
}
