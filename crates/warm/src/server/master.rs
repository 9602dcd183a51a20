//! The master's loop: wait for whatever happens next (a worker's death, a question, a signal, a deadline), act on
//! it, wait again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::control::Desk;
use super::member::{Death, Member, find_worker_program};
use super::signals::{SignalFd, StopSignal};
use super::socket::{Claim, ClaimError};
use crate::config::ServerConfig;
use crate::protocol::Health;

/// How far beyond its limit a request may run before the master kills its worker: the worker's own means come first.
const WATCHDOG_PATIENCE: Duration = Duration::from_millis(500);
/// How long a stopping server waits for scripts without a time limit.
const STOP_PATIENCE: Duration = Duration::from_secs(5);
/// First pause before a worker that died young is replaced; doubled every time, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Why a server could not start, or ended other than by request.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The socket could not be claimed.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// No workers were asked for.
    #[error("--workers 0: a server needs at least one worker")]
    NoWorkers,
    /// The worker program is missing.
    #[error("{0}")]
    NoProgram(io::Error),
    /// A worker could not be started at all.
    #[error("starting a worker ({program})")]
    Spawn {
        /// The program.
        program: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The first workers ended before they were ready.
    #[error("the worker ended before it was ready ({status}); what it said stands above")]
    Stillborn {
        /// Its wait status.
        status: std::process::ExitStatus,
    },
    /// The master's own machinery failed.
    #[error("{operation}")]
    Io {
        /// What was being done.
        operation: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

fn io_error<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> ServeError {
    move |source| ServeError::Io { operation, source: source.into() }
}

/// A place for a worker.
enum Seat {
    Taken(Member),
    /// To be filled at this time.
    Vacant(Instant),
}

struct Master<'a> {
    config: &'a ServerConfig,
    program: PathBuf,
    claim: Claim,
    seats: Vec<Seat>,
    desk: Desk,
    signals: SignalFd,
    started: Instant,
    announced: bool,
    /// Requests finished by workers that are gone.
    served_before: u64,
    restarts: u64,
    /// Workers that died young, one after another.
    young_deaths: u32,
    /// Set when a stop was asked for: until then scripts may finish.
    stopping: Option<Instant>,
}

/// Serves until `SIGTERM` or `SIGINT`; blocks these signals in the calling thread, which should be the only one.
///
/// # Errors
/// See [`ServeError`].
pub fn serve(config: &ServerConfig) -> Result<(), ServeError> {
    if config.workers == 0 {
        return Err(ServeError::NoWorkers);
    }
    let program = find_worker_program().map_err(ServeError::NoProgram)?;
    let signals = SignalFd::new().map_err(io_error("signalfd"))?;
    // Children that a dead worker leaves behind come to the master instead of escaping to init.
    rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(1))
        .map_err(io_error("PR_SET_CHILD_SUBREAPER"))?;
    let claim = Claim::take(&config.socket, config.queue)?;
    let now = Instant::now();
    let mut master = Master {
        config,
        program,
        claim,
        seats: (0..config.workers).map(|_| Seat::Vacant(now)).collect(),
        desk: Desk::new(),
        signals,
        started: now,
        announced: false,
        served_before: 0,
        restarts: 0,
        young_deaths: 0,
        stopping: None,
    };
    master.run()
}

impl Master<'_> {
    fn run(&mut self) -> Result<(), ServeError> {
        loop {
            self.fill_vacant_seats()?;
            self.sleep()?;
            match self.signals.take().map_err(io_error("reading a signal"))? {
                Some(StopSignal::Stop) if self.stopping.is_some() => return Ok(()),
                Some(StopSignal::Stop) => self.begin_to_stop(),
                None => {}
            }
            self.bury_the_dead()?;
            self.watch()?;
            self.attend_desk();
            self.announce();
            if let Some(deadline) = self.stopping
                && (Instant::now() >= deadline || self.members().next().is_none())
            {
                return Ok(());
            }
        }
    }

    fn members(&self) -> impl Iterator<Item = &Member> {
        self.seats.iter().filter_map(|seat| match seat {
            Seat::Taken(member) => Some(member),
            Seat::Vacant(_) => None,
        })
    }

    fn fill_vacant_seats(&mut self) -> Result<(), ServeError> {
        if self.stopping.is_some() {
            return Ok(());
        }
        let now = Instant::now();
        for seat in &mut self.seats {
            if matches!(seat, Seat::Vacant(due) if *due <= now) {
                let member = Member::start(&self.program, &self.config.worker, self.claim.requests.as_fd());
                let spawn_error = |source| ServeError::Spawn { program: self.program.clone(), source };
                *seat = Seat::Taken(member.map_err(spawn_error)?);
            }
        }
        Ok(())
    }

    /// Sleeps until something happens.
    fn sleep(&self) -> Result<(), ServeError> {
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(8);
        fn add<'a>(fds: &mut Vec<PollFd<'a>>, fd: BorrowedFd<'a>) {
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        add(&mut fds, self.signals.as_fd());
        self.members().for_each(|member| add(&mut fds, member.pidfd()));
        self.desk.poll_fds().for_each(|fd| add(&mut fds, fd));
        if self.desk.has_room() {
            add(&mut fds, self.claim.control.as_fd());
        }
        let timeout = self.next_deadline().map(|at| {
            let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(io_error("poll")(errno)),
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let now = Instant::now();
        let vacancy = self.seats.iter().filter_map(|seat| match seat {
            Seat::Vacant(due) if self.stopping.is_none() => Some(*due),
            _ => None,
        });
        // Until the workers are ready there is no event that tells when they are.
        let announcement = (!self.announced).then(|| now + Duration::from_millis(10));
        let watch = self.watch_period().map(|period| now + period);
        vacancy.chain(announcement).chain(watch).chain(self.desk.deadline()).chain(self.stopping).min()
    }

    /// How often the master looks for overdue requests: often enough to be at most half as late again as the limit.
    fn watch_period(&self) -> Option<Duration> {
        let limit = self.config.worker.limits.time?;
        Some((limit / 2).clamp(Duration::from_millis(50), Duration::from_secs(1)))
    }

    fn bury_the_dead(&mut self) -> Result<(), ServeError> {
        for index in 0..self.seats.len() {
            let Seat::Taken(member) = &mut self.seats[index] else {
                continue;
            };
            let Some(death) = member.bury().map_err(io_error("waiting for a worker"))? else {
                continue;
            };
            let due = self.mourn(&death)?;
            self.seats[index] = Seat::Vacant(due);
        }
        reap_strays(&self.seats);
        Ok(())
    }

    /// Draws the consequences of a death; says when the seat is to be filled again.
    fn mourn(&mut self, death: &Death) -> Result<Instant, ServeError> {
        self.served_before += death.served;
        if let Some((id, outcome)) = &death.victim {
            self.desk.record(*id, outcome.clone());
        }
        if self.stopping.is_some() {
            return Ok(Instant::now());
        }
        if !death.was_ready && !self.announced {
            return Err(ServeError::Stillborn { status: death.status });
        }
        self.restarts += 1;
        // A worker that ends of its own accord has found the socket shut.
        if death.status.success() && self.claim.renew()? {
            eprintln!("orrery: warm: a script has shut the socket; it is up again");
        }
        eprintln!(
            "orrery: warm: worker {} ended after {:.3} s and {} requests ({}); starting another",
            death.pid,
            death.lived.as_secs_f64(),
            death.served,
            death.status
        );
        if death.was_ready {
            self.young_deaths = 0;
            return Ok(Instant::now());
        }
        let pause = FIRST_PAUSE.saturating_mul(1 << self.young_deaths.min(16)).min(LONGEST_PAUSE);
        self.young_deaths += 1;
        Ok(Instant::now() + pause)
    }

    fn watch(&mut self) -> Result<(), ServeError> {
        let Some(limit) = self.config.worker.limits.time else {
            return Ok(());
        };
        for seat in &mut self.seats {
            if let Seat::Taken(member) = seat {
                member.kill_if_overdue(limit, WATCHDOG_PATIENCE).map_err(io_error("killing a worker"))?;
            }
        }
        Ok(())
    }

    fn attend_desk(&mut self) {
        let mut desk = std::mem::replace(&mut self.desk, Desk::new());
        if desk.has_room() {
            desk.admit(self.claim.control.as_fd());
        }
        desk.work(|id| self.members().any(|member| member.runs(id)), || self.health());
        self.desk = desk;
    }

    fn health(&self) -> Health {
        let workers: Vec<_> = self.members().map(Member::health).collect();
        Health {
            uptime: self.started.elapsed().as_secs(),
            served: self.served_before + workers.iter().map(|worker| worker.served).sum::<u64>(),
            restarts: self.restarts,
            workers,
        }
    }

    fn announce(&mut self) {
        if self.announced || self.members().filter(|member| member.is_ready()).count() < self.seats.len() {
            return;
        }
        self.announced = true;
        let (count, plural) = (self.seats.len(), if self.seats.len() == 1 { "" } else { "s" });
        eprintln!(
            "orrery: warm: {count} worker{plural} ready in {:.2} s, serving on {}",
            self.started.elapsed().as_secs_f64(),
            self.config.socket.display()
        );
    }

    /// Lets running and queued requests finish; takes no new ones.
    fn begin_to_stop(&mut self) {
        // Workers take what is queued, then find the socket shut and leave. Nothing can go wrong here that a
        // later deadline would not mend.
        let _ = rustix::net::shutdown(&self.claim.requests, rustix::net::Shutdown::Both);
        let patience =
            self.config.worker.limits.time.map_or(STOP_PATIENCE, |limit| limit + 2 * WATCHDOG_PATIENCE);
        self.stopping = Some(Instant::now() + patience);
    }
}

/// Kills and reaps what dead workers left behind: being subreaper, the master is now its parent.
fn reap_strays(seats: &[Seat]) {
    let own: Vec<i32> = seats
        .iter()
        .filter_map(|seat| match seat {
            Seat::Taken(member) => Some(member.health().pid),
            Seat::Vacant(_) => None,
        })
        .collect();
    for pid in crate::family::children() {
        if !own.contains(&pid.as_raw_nonzero().get()) {
            // Either fails only if the process is gone already.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
        }
    }
}
