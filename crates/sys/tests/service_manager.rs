//! Descriptors that a service manager passes. In a program of its own: a fork waits while another test of the process has a
//! userfaultfd whose events it does not read.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;

use orrery_sys::service_manager::passed_descriptors;

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
    const NAME: &str = "passed_descriptors_are_duplicated";
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
