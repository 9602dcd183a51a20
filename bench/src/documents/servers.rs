//! The three servers. All understand the same requests and answer with the same calls; what differs is which process serves.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use orrery_sessions::{Connection, Pool};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::net::SocketFlags;
use rustix::process::{Pid, Resource, Rlimit, Signal};

use super::protocol::{CLIENTS, LONGEST, REQUEST, read_request};
use crate::machine;

static DOCUMENT: [u8; LONGEST] = [b'd'; LONGEST];

/// How connections are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serving {
    /// In sessions of a pool.
    Sessions,
    /// In an event loop.
    EventLoop,
    /// In a forked process each.
    Fork,
}

/// A server's process, which ends with this object.
#[derive(Debug)]
pub(super) struct Server {
    pid: Pid,
}

impl Server {
    pub(super) fn start(serving: Serving, listener: TcpListener, cpu: usize) -> Result<Self> {
        rustix::net::listen(&listener, 2048).context("cannot listen")?;
        // SAFETY: the child has the one thread that runs, and its memory is a copy: it allocates as any
        // process does, because the C library takes care of its own locks.
        match unsafe { libc::fork() } {
            -1 => Err(std::io::Error::last_os_error()).context("fork"),
            0 => {
                let ended = run(serving, &listener, cpu);
                eprintln!("the server by {serving:?} ended: {ended:?}");
                // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in
                // it.
                unsafe { libc::_exit(1) }
            }
            pid => Ok(Self { pid: Pid::from_raw(pid).context("a child without a PID")? }),
        }
    }

    /// Fails where the server has ended.
    pub(super) fn check(&self) -> Result<()> {
        let options = rustix::process::WaitOptions::NOHANG;
        let ended =
            rustix::process::waitpid(Some(self.pid), options).context("cannot look for the server")?;
        ensure!(ended.is_none(), "the server has ended");
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
        let _ = rustix::process::waitpid(Some(self.pid), rustix::process::WaitOptions::empty());
    }
}

fn run(serving: Serving, listener: &TcpListener, cpu: usize) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    machine::pin(cpu)?;
    let limit = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    match serving {
        Serving::Sessions => {
            let mut pool = Pool::builder().ready(8).most(CLIENTS + 50).build(session)?;
            Ok(pool.serve(listener.as_fd(), None)?)
        }
        Serving::EventLoop => event_loop(listener),
        Serving::Fork => fork_each(listener),
    }
}

/// Answers one request; false where that was the last.
fn answer(connection: &mut (impl Read + Write)) -> std::io::Result<bool> {
    let mut request = [0; REQUEST];
    // Requests come whole, for they are sent so.
    let got = connection.read(&mut request)?;
    match read_request(&request[..got]) {
        Some((length, last)) => {
            connection.write_all(&DOCUMENT[..length])?;
            Ok(!last)
        }
        None => Ok(false),
    }
}

fn session(connection: &mut Connection) {
    while let Ok(true) = answer(connection) {}
}

fn event_loop(listener: &TcpListener) -> Result<()> {
    listener.set_nonblocking(true)?;
    let ready = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&ready, listener, EventData::new_u64(u64::MAX), EventFlags::IN)?;
    let mut connections: Vec<Option<TcpStream>> = Vec::new();
    let mut free = Vec::new();
    let mut events = Vec::with_capacity(128);
    loop {
        events.clear();
        epoll::wait(&ready, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in &events {
            let name = event.data.u64();
            if name == u64::MAX {
                while let Ok(new) =
                    rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
                {
                    let place = free.pop().unwrap_or_else(|| {
                        connections.push(None);
                        connections.len() - 1
                    });
                    epoll::add(&ready, &new, EventData::new_u64(place as u64), EventFlags::IN)?;
                    connections[place] = Some(TcpStream::from(new));
                }
                continue;
            }
            let place = usize::try_from(name)?;
            if let Some(connection) = &mut connections[place] {
                let goes_on = match answer(connection) {
                    Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
                    Ok(goes_on) => goes_on,
                };
                if !goes_on {
                    connections[place] = None;
                    free.push(place);
                }
            }
        }
    }
}

fn fork_each(listener: &TcpListener) -> Result<()> {
    // Children are reaped by the kernel.
    // SAFETY: SIG_IGN installs no function as a handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    loop {
        let connection: OwnedFd = rustix::net::accept(listener)?;
        // SAFETY: the child has the one thread that runs, and uses its copy of the memory alone.
        match unsafe { libc::fork() } {
            -1 => return Err(std::io::Error::last_os_error()).context("fork"),
            0 => {
                let mut connection = TcpStream::from(connection);
                while let Ok(true) = answer(&mut connection) {}
                // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in
                // it.
                unsafe { libc::_exit(0) }
            }
            _ => {}
        }
    }
}
