//! A terminal served over the network: a program runs in it, and every client sees it and types into it.
//!
//! Both sides of the terminal belong to the service, so that both survive, and so does the connection.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::pty::OpenptFlags;

const ROWS: u16 = 24;
const COLUMNS: u16 = 80;
const KIND: &str = "vt100";

/// Runs a program in a terminal and serves that at a port, one client at a time, until the program ends.
pub(crate) fn run(port: u16, argv: &[&str]) -> Result<()> {
    let (program, arguments) = argv.split_first().context("name a program")?;
    let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    rustix::pty::grantpt(&master)?;
    rustix::pty::unlockpt(&master)?;
    let size = rustix::termios::Winsize { ws_row: ROWS, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(&master, size)?;
    let name = rustix::pty::ptsname(&master, Vec::new())?;
    let slave =
        rustix::fs::open(&*name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, rustix::fs::Mode::empty())?;
    let mut command = Command::new(program);
    command.args(arguments).env("TERM", KIND);
    command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave);
    // SAFETY: both calls are safe between fork and exec. The terminal, on standard input, becomes the program's own.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
            Ok(())
        });
    }
    let mut child = command.spawn().with_context(|| format!("cannot run {program}"))?;
    drop(command);
    let listener =
        TcpListener::bind(("0.0.0.0", port)).with_context(|| format!("cannot listen at {port}"))?;
    let mut master = File::from(master);
    while child.try_wait()?.is_none() {
        let (client, _) = listener.accept()?;
        // A client that hangs up may come back.
        let _ = serve(&mut master, client);
    }
    Ok(())
}

/// Passes bytes both ways until one side ends.
fn serve(master: &mut File, mut client: TcpStream) -> Result<()> {
    let mut bytes = [0; 4096];
    loop {
        let mut ready = [
            PollFd::from_borrowed_fd(master.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(client.as_fd(), PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let [printed, typed] = ready.map(|side| !side.revents().is_empty());
        if printed {
            let count = master.read(&mut bytes)?;
            client.write_all(&bytes[..count])?;
        }
        if typed {
            match client.read(&mut bytes)? {
                0 => return Ok(()),
                count => master.write_all(&bytes[..count])?,
            }
        }
    }
}
