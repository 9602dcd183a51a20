//! The three servers. All understand the same requests and answer with the same calls; what differs is who serves.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use orrery_sessions::{Connection, Pool};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::net::SocketFlags;
use rustix::process::{Pid, Resource, Rlimit, Signal};

use super::{CLIENTS, Demand, Serving};
use crate::machine;

/// The longest document.
pub(super) const LONGEST: usize = 9999;
/// The length of a request: `0045 L\r\n`, with `L` for the last one on a connection, else `G`.
pub(super) const REQUEST: usize = 8;
static DOCUMENT: [u8; LONGEST] = [b'd'; LONGEST];

/// A server's process, which ends with this object.
#[derive(Debug)]
pub(super) struct Server {
    pid: Pid,
}

impl Server {
    pub(super) fn start(serving: Serving, listener: TcpListener, cpu: usize) -> Result<Self> {
        rustix::net::listen(&listener, 2048).context("listening")?;
        // SAFETY: the child has the one thread that runs, and its memory is a copy: it allocates as any process does, for
        // the C library sees to its own locks.
        match unsafe { libc::fork() } {
            -1 => Err(std::io::Error::last_os_error()).context("fork"),
            0 => {
                let ended = run(serving, &listener, cpu);
                eprintln!("the server by {serving:?} ended: {ended:?}");
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(1) }
            }
            pid => Ok(Self { pid: Pid::from_raw(pid).context("a child without a number")? }),
        }
    }

    /// That it is still there.
    pub(super) fn check(&self) -> Result<()> {
        let options = rustix::process::WaitOptions::NOHANG;
        let ended = rustix::process::waitpid(Some(self.pid), options).context("looking for the server")?;
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

/// What a request asks for, and whether it is the last one.
fn read_request(request: &[u8]) -> Option<(usize, bool)> {
    let length: usize = str::from_utf8(request.get(..4)?).ok()?.parse().ok()?;
    Some((length.min(LONGEST), request.get(5) == Some(&b'L')))
}

/// How a client asks.
pub(super) fn request(demand: Demand, last: bool) -> [u8; REQUEST] {
    let text = format!("{:04} {}\r\n", demand.document, if last { 'L' } else { 'G' });
    let mut request = [b' '; REQUEST];
    for (place, byte) in request.iter_mut().zip(text.bytes()) {
        *place = byte;
    }
    request
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
    // SAFETY: a disposition without a handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    loop {
        let connection: OwnedFd = rustix::net::accept(listener)?;
        // SAFETY: as in `start`.
        match unsafe { libc::fork() } {
            -1 => return Err(std::io::Error::last_os_error()).context("fork"),
            0 => {
                let mut connection = TcpStream::from(connection);
                while let Ok(true) = answer(&mut connection) {}
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(0) }
            }
            _ => {}
        }
    }
}
