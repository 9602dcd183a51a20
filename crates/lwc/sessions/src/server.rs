//! An event loop around a pool: accepts connections, and lets each one's session go on when it can (epoll(7)).

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::time::Timespec;

use super::Step;
use super::error::{Error, Result};
use super::pool::{Pool, SessionId};
use super::protocol::Interest;

/// Names in the epoll instance beside those of sessions, whose serial numbers never are as high.
const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;
const FRESH: u64 = u64::MAX << 32;

/// How many connections are accepted before those that there are go on.
const ACCEPTED_AT_ONCE: usize = 16;
/// After how many turns of the loop a dirty context is cleaned, even if there is always something else to do.
const TURNS: u32 = 64;

impl Pool {
    /// Serves connections to `listener` until `stop` is readable (a pipe, eventfd(2), signalfd(2) ...), or
    /// for ever.
    ///
    /// A session begins when its connection has sent something ([`super::Builder::greets`]: at once). When all are in
    /// use, nothing is accepted until one has ended: clients wait in the listener's backlog. `listener` is put into
    /// non-blocking mode.
    ///
    /// # Errors
    /// [`Error::System`]. That a session cannot be made is none as long as there are others.
    pub fn serve(&mut self, listener: BorrowedFd<'_>, stop: Option<BorrowedFd<'_>>) -> Result<()> {
        super::pool::set_non_blocking(listener)?;
        let mut server = Server::new(self, listener)?;
        if let Some(stop) = stop {
            server.watch(stop, STOP, EventFlags::IN)?;
        }
        let done = server.run();
        server.end_all();
        done
    }
}

struct Server<'a> {
    pool: &'a mut Pool,
    epoll: OwnedFd,
    listener: BorrowedFd<'a>,
    listening: bool,
    /// Connections that have sent nothing yet.
    fresh: Vec<Option<OwnedFd>>,
    free: Vec<usize>,
    /// Those for which there was no session.
    waiting: VecDeque<OwnedFd>,
    /// Those that a session serves, at the session's place.
    served: Vec<Option<Served>>,
}

/// A connection that a session serves.
struct Served {
    id: SessionId,
    connection: OwnedFd,
    /// For what epoll waits.
    interest: Interest,
}

impl<'a> Server<'a> {
    fn new(pool: &'a mut Pool, listener: BorrowedFd<'a>) -> Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(|e| Error::system("epoll_create1", 0, e))?;
        let mut server = Self {
            pool,
            epoll,
            listener,
            listening: false,
            fresh: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            served: Vec::new(),
        };
        server.listen(true)?;
        Ok(server)
    }

    fn run(&mut self) -> Result<()> {
        let mut events = Vec::with_capacity(128);
        let mut idle = false;
        let mut turns = 0_u32;
        loop {
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            events.clear();
            let timeout = if idle { None } else { Some(&at_once) };
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::system("epoll_wait", 0, errno)),
            }
            turns = turns.wrapping_add(1);
            if events.is_empty() || turns.is_multiple_of(TURNS) {
                // What does not work now may work when something has changed.
                idle = !self.pool.tidy().unwrap_or(false);
            }
            for event in &events {
                idle = false;
                match event.data.u64() {
                    STOP => return Ok(()),
                    LISTENER => self.accept()?,
                    name if name >= FRESH => self.first_words(name)?,
                    name => self.go_on(SessionId::of_number(name))?,
                }
            }
        }
    }

    /// Accepts what connections there are, but not for too long.
    fn accept(&mut self) -> Result<()> {
        for _ in 0..ACCEPTED_AT_ONCE {
            if !self.listening {
                return Ok(());
            }
            match rustix::net::accept_with(self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(connection) if self.pool.settings().greets => self.begin(connection)?,
                Ok(connection) => self.remember(connection)?,
                Err(Errno::AGAIN) => return Ok(()),
                // The client has gone, or the firewall forbids it (accept(2)).
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO | Errno::PERM) => {}
                // When a session has ended, there may be descriptors and memory.
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) if self.serves_any() => {
                    return self.listen(false);
                }
                Err(errno) => return Err(Error::system("accept", 0, errno)),
            }
        }
        Ok(())
    }

    fn serves_any(&self) -> bool {
        self.served.iter().any(Option::is_some)
    }

    /// A connection that has sent nothing yet.
    fn remember(&mut self, connection: OwnedFd) -> Result<()> {
        let place = self.free.pop().unwrap_or(self.fresh.len());
        self.watch(connection.as_fd(), FRESH + place as u64, EventFlags::IN)?;
        if place == self.fresh.len() {
            self.fresh.push(None);
        }
        self.fresh[place] = Some(connection);
        Ok(())
    }

    /// A fresh connection has sent something.
    fn first_words(&mut self, name: u64) -> Result<()> {
        let place = usize::try_from(name - FRESH).unwrap_or(usize::MAX);
        let Some(connection) = self.fresh.get_mut(place).and_then(Option::take) else { return Ok(()) };
        self.free.push(place);
        let _ = epoll::delete(&self.epoll, &connection);
        if self.waiting.is_empty() {
            self.begin(connection)
        } else {
            self.waiting.push_back(connection);
            Ok(())
        }
    }

    /// Begins a session; where there is none to be had, the connection waits, and nothing more is accepted.
    fn begin(&mut self, connection: OwnedFd) -> Result<()> {
        match self.pool.begin(connection.as_fd()) {
            Ok((id, Step::Waits(interest))) => {
                self.watch(connection.as_fd(), id.number(), flags(interest))?;
                let place = id.place();
                if self.served.len() <= place {
                    self.served.resize_with(place + 1, || None);
                }
                self.served[place] = Some(Served { id, connection, interest });
                self.listen(self.waiting.is_empty())
            }
            Ok((_, Step::Ended(_))) => self.listen(self.waiting.is_empty()),
            Err(error) if !self.serves_any() => Err(error),
            Err(_) => {
                self.waiting.push_front(connection);
                self.listen(false)
            }
        }
    }

    /// A session's connection is ready.
    fn go_on(&mut self, id: SessionId) -> Result<()> {
        // An event may be about a session that ended in the same turn.
        let Ok(step) = self.pool.step(id) else { return Ok(()) };
        let Some(place) = self.served.get_mut(id.place()) else { return Ok(()) };
        match step {
            Step::Waits(interest) => {
                if let Some(served) = place
                    && served.interest != interest
                {
                    served.interest = interest;
                    let data = EventData::new_u64(id.number());
                    epoll::modify(&self.epoll, &served.connection, data, flags(interest))
                        .map_err(|e| Error::system("epoll_ctl", id.place(), e))?;
                }
                Ok(())
            }
            Step::Ended(_) => {
                // Before it is closed: a dirty session may have a copy, with which the kernel would still know it.
                if let Some(served) = place.take() {
                    let _ = epoll::delete(&self.epoll, &served.connection);
                }
                match self.waiting.pop_front() {
                    Some(connection) => self.begin(connection),
                    None => self.listen(true),
                }
            }
        }
    }

    fn watch(&self, fd: BorrowedFd<'_>, name: u64, flags: EventFlags) -> Result<()> {
        epoll::add(&self.epoll, fd, EventData::new_u64(name), flags)
            .map_err(|e| Error::system("epoll_ctl", 0, e))
    }

    /// Accepts connections, or lets them wait.
    fn listen(&mut self, yes: bool) -> Result<()> {
        if self.listening == yes {
            return Ok(());
        }
        self.listening = yes;
        if yes {
            self.watch(self.listener, LISTENER, EventFlags::IN)
        } else {
            epoll::delete(&self.epoll, self.listener).map_err(|e| Error::system("epoll_ctl", 0, e))
        }
    }

    fn end_all(&mut self) {
        for served in self.served.drain(..).flatten() {
            let _ = self.pool.end(served.id);
        }
    }
}

fn flags(interest: Interest) -> EventFlags {
    match interest {
        Interest::Readable => EventFlags::IN,
        Interest::Writable => EventFlags::OUT,
        Interest::Both => EventFlags::IN | EventFlags::OUT,
    }
}
