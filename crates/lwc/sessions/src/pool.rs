//! The root's books: which sessions there are, and what each is doing.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::process::{DumpableBehavior, dumpable_behavior};

use super::error::{Error, Result};
use super::protocol::{Ended, Order, Report};
use super::session::Connection;
use super::template;
use super::{Builder, Step};
use orrery_context::{self as context, Arrival, Context};

/// How long a rollback may take. It is a bound for contexts that will never be clean, not for the time it takes.
const HOUSEWORK: Duration = Duration::from_secs(10);

/// The name of a session, from its beginning to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SessionId {
    place: u32,
    serial: u32,
}

impl SessionId {
    /// As one number, of which no two that a pool gives are the same before 4 billion sessions.
    pub fn number(self) -> u64 {
        u64::from(self.serial) << 32 | u64::from(self.place)
    }

    pub(super) fn place(self) -> usize {
        self.place as usize
    }

    /// Returns the name that [`SessionId::number`] stands for.
    pub fn of_number(number: u64) -> Self {
        let half = |number: u64| u32::try_from(number & u64::from(u32::MAX)).unwrap_or(0);
        Self { place: half(number), serial: half(number >> 32) }
    }
}

/// What a pool has, and what it has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Contexts that wait for a connection.
    pub clean: usize,
    /// Contexts that serve one.
    pub busy: usize,
    /// Contexts that are to be rolled back.
    pub dirty: usize,
    /// Sessions that were begun.
    pub begun: u64,
    /// Contexts that were made.
    pub made: u64,
    /// Contexts that were rolled back.
    pub rolled_back: u64,
    /// Contexts that were lost or given up.
    pub lost: u64,
}

/// A pool of sessions.
#[derive(Debug)]
pub struct Pool {
    settings: Builder,
    template: Context,
    members: Vec<Option<Member>>,
    /// Places of members, the last one first: it is the one whose memory is still in the CPU's caches.
    clean: Vec<usize>,
    dirty: Vec<usize>,
    serials: u32,
    statistics: Statistics,
}

/// A context of the pool.
#[derive(Debug)]
struct Member {
    context: Context,
    /// The session that it serves, if it does.
    session: Option<u32>,
}

/// Why a member did not answer as it should.
enum Silence {
    /// It had died before, and has not heard.
    Before,
    /// It is gone now.
    Now(Ended),
}

impl Pool {
    /// Default settings, to be changed.
    pub fn builder() -> Builder {
        Builder::default()
    }

    pub(super) fn new<F: Fn(&mut Connection)>(settings: Builder, serve: F) -> Result<Self> {
        let spec = template::template_spec(&settings.keep, settings.isolated);
        let (memory, isolated) = (settings.memory_limit, settings.isolated);
        let open = dumpable_behavior() == Ok(DumpableBehavior::Dumpable);
        let template =
            context::create(&spec, |start| template::template(start, open, isolated, memory, &serve))?;
        let mut pool = Self {
            settings,
            template,
            members: Vec::new(),
            clean: Vec::new(),
            dirty: Vec::new(),
            serials: 0,
            statistics: Statistics::default(),
        };
        for _ in 0..pool.settings.ready.min(pool.settings.most) {
            pool.make()?;
        }
        Ok(pool)
    }

    /// Begins a session with a connection, which is put into non-blocking mode, and lets it go on until it waits or
    /// ends. The session gets a descriptor of its own: the caller's, for which it waits on behalf of the session, it
    /// may close when the session has ended.
    ///
    /// A clean context serves; else a dirty one is cleaned, else one is made.
    ///
    /// # Errors
    /// [`Error::Exhausted`] where all that may be are in use, [`Error::Setup`], [`Error::NoTemplate`],
    /// [`Error::Descriptors`], [`Error::System`]. The connection is as it was then, but for its mode.
    pub fn begin(&mut self, connection: BorrowedFd<'_>) -> Result<(SessionId, Step)> {
        set_non_blocking(connection)?;
        loop {
            let place = self.take_clean()?;
            let Some(context) = self.context(place) else { continue };
            match context.pass(connection) {
                Ok(()) => {}
                Err(context::Error::System(error)) => {
                    // Too many descriptors under way, or no memory: it is none of the member's fault.
                    self.clean.push(place);
                    return Err(error.into());
                }
                Err(_) => {
                    self.lose(place);
                    continue;
                }
            }
            let answer = match self.order(place, Order::Begin) {
                Ok(Report::Unconnected) => {
                    self.clean.push(place);
                    return Err(Error::Descriptors);
                }
                // It died waiting for work: the next one may have it.
                Err(Silence::Before) => {
                    self.lose(place);
                    continue;
                }
                Ok(report) => Ok(report),
                Err(Silence::Now(ended)) => Err(ended),
            };
            self.serials = self.serials.wrapping_add(1);
            self.statistics.begun += 1;
            let id = SessionId { place: u32::try_from(place).unwrap_or(u32::MAX), serial: self.serials };
            if let Some(Some(member)) = self.members.get_mut(place) {
                member.session = Some(id.serial);
            }
            return Ok((id, self.conclude(place, answer)));
        }
    }

    /// Lets a session that waits go on.
    ///
    /// # Errors
    /// [`Error::NoSession`].
    pub fn step(&mut self, session: SessionId) -> Result<Step> {
        let place = self.find(session)?;
        let answer = self.answer(place, Order::Resume);
        Ok(self.conclude(place, answer))
    }

    /// Ends a session that waits: it does not go on, and its descriptor of the connection is closed.
    ///
    /// # Errors
    /// [`Error::NoSession`].
    pub fn end(&mut self, session: SessionId) -> Result<()> {
        let place = self.find(session)?;
        let answer = self.answer(place, Order::Abandon);
        self.conclude(place, answer);
        Ok(())
    }

    /// Does one thing that will have to be done: cleans a dirty context, or makes one where fewer than
    /// [`Builder::spare`] are clean. True where it did something, so that there may be more; call it when there is
    /// nothing else to do.
    ///
    /// # Errors
    /// Those of making a session: see [`Pool::begin`].
    pub fn tidy(&mut self) -> Result<bool> {
        if let Some(place) = self.dirty.pop() {
            self.clean_up(place);
            return Ok(true);
        }
        let members = self.members.iter().flatten().count();
        if self.clean.len() < self.settings.spare && members < self.settings.most {
            self.make()?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Returns what the pool has, and what it has done.
    pub fn statistics(&self) -> Statistics {
        let busy = self.members.iter().flatten().filter(|member| member.session.is_some()).count();
        Statistics { clean: self.clean.len(), dirty: self.dirty.len(), busy, ..self.statistics }
    }

    pub(super) fn settings(&self) -> &Builder {
        &self.settings
    }

    /// A clean member, whatever that takes.
    fn take_clean(&mut self) -> Result<usize> {
        loop {
            if let Some(place) = self.clean.pop() {
                return Ok(place);
            }
            match self.dirty.pop() {
                Some(place) => self.clean_up(place),
                None => {
                    let most = self.settings.most;
                    if self.members.iter().flatten().count() >= most {
                        return Err(Error::Exhausted { most });
                    }
                    self.make()?;
                }
            }
        }
    }

    /// Has a dirty member rolled back.
    fn clean_up(&mut self, place: usize) {
        match self.order(place, Order::Clean) {
            Ok(Report::Clean(_)) => {
                self.statistics.rolled_back += 1;
                self.clean.push(place);
            }
            _ => self.lose(place),
        }
    }

    /// Has the template make a member.
    fn make(&mut self) -> Result<()> {
        let arrival = self.template.switch(Order::Make.word(), &[]).map_err(Error::NoTemplate)?;
        let made = arrival.caller;
        if made == self.template {
            return Err(Error::Setup(text(&arrival)));
        }
        let ready = self
            .template
            .switch(Order::Settle.word(), &[])
            .map_err(Error::NoTemplate)
            .and_then(|_| Ok(made.switch(Order::Clean.word(), &[])?))
            .and_then(|arrival| match Report::of(arrival.word) {
                Some(Report::Clean(None)) => Ok(()),
                _ => Err(Error::Setup(text(&arrival))),
            });
        if let Err(error) = ready {
            let _ = made.close();
            return Err(error);
        }
        let member = Some(Member { context: made, session: None });
        let place = match self.members.iter().position(Option::is_none) {
            Some(free) => {
                self.members[free] = member;
                free
            }
            None => {
                self.members.push(member);
                self.members.len() - 1
            }
        };
        self.statistics.made += 1;
        self.clean.push(place);
        Ok(())
    }

    /// Lets go of a member, which ends.
    fn lose(&mut self, place: usize) {
        if let Some(member) = self.members.get_mut(place).and_then(Option::take) {
            self.statistics.lost += 1;
            let _ = member.context.close();
        }
    }

    fn context(&self, place: usize) -> Option<Context> {
        self.members.get(place)?.as_ref().map(|member| member.context)
    }

    /// Returns the place of a session.
    fn find(&self, session: SessionId) -> Result<usize> {
        let place = session.place as usize;
        let serves = self.members.get(place).and_then(Option::as_ref).and_then(|member| member.session);
        if serves == Some(session.serial) { Ok(place) } else { Err(Error::NoSession { number: place }) }
    }

    /// Returns what a member that works answers; whatever goes wrong is its end.
    fn answer(&self, place: usize, order: Order) -> std::result::Result<Report, Ended> {
        self.order(place, order).map_err(|silence| match silence {
            Silence::Before => Ended::Lost,
            Silence::Now(ended) => ended,
        })
    }

    /// Switches to a member with an order.
    fn order(&self, place: usize, order: Order) -> std::result::Result<Report, Silence> {
        let Some(context) = self.context(place) else { return Err(Silence::Now(Ended::Lost)) };
        let limit = match order {
            Order::Begin | Order::Resume => self.settings.step_limit,
            _ => Some(HOUSEWORK),
        };
        let switched = match limit {
            Some(limit) => context.switch_within(order.word(), &[], limit),
            None => context.switch(order.word(), &[]),
        };
        match switched {
            // Other processes have no business here, and nor has a member that sends nonsense.
            Ok(arrival) if arrival.caller == context => {
                Report::of(arrival.word).ok_or(Silence::Now(Ended::Lost))
            }
            Ok(_) => Err(Silence::Now(Ended::Lost)),
            Err(context::Error::Gone { .. } | context::Error::NoContext { .. }) => Err(Silence::Before),
            Err(context::Error::TimedOut) => Err(Silence::Now(Ended::TimedOut)),
            Err(_) => Err(Silence::Now(Ended::Lost)),
        }
    }

    /// Takes note of what a session said last.
    fn conclude(&mut self, place: usize, answer: std::result::Result<Report, Ended>) -> Step {
        let ended = match answer {
            Ok(Report::Waits(interest)) => return Step::Waits(interest),
            Ok(Report::Finished) => {
                self.release(place);
                self.dirty.push(place);
                return Step::Ended(Ended::Returned);
            }
            Ok(Report::Clean(Some(ended))) => {
                self.statistics.rolled_back += 1;
                if ended.is_harmless() {
                    self.release(place);
                    self.clean.push(place);
                    return Step::Ended(ended);
                }
                ended
            }
            Ok(_) => Ended::Lost,
            Err(ended) => ended,
        };
        self.lose(place);
        Step::Ended(ended)
    }

    /// The member's session is over.
    fn release(&mut self, place: usize) {
        if let Some(Some(member)) = self.members.get_mut(place) {
            member.session = None;
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // In a forked process that closes nothing: contexts are not that process' own.
        for place in 0..self.members.len() {
            self.lose(place);
        }
        let _ = self.template.close();
    }
}

/// Returns why the template, or a session that is not ready, says that it is not.
fn text(arrival: &Arrival) -> String {
    String::from_utf8_lossy(&arrival.bytes).into_owned()
}

pub(super) fn set_non_blocking(fd: BorrowedFd<'_>) -> Result<()> {
    let failed = |errno| Error::system("fcntl(O_NONBLOCK)", fd.as_raw_fd().unsigned_abs() as usize, errno);
    let flags = rustix::fs::fcntl_getfl(fd).map_err(failed)?;
    if flags.contains(OFlags::NONBLOCK) {
        return Ok(());
    }
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(failed)
}
