//! The master's loop: wait for whatever happens next (a worker's exit, a question, a signal, a deadline), act on
//! it, wait again.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::control::ControlConnections;
use super::entrance::Entrance;
use super::passed::Passed;
use super::reload::{Progress, Reload};
use super::signalfd::{SignalFd, StopSignal};
use super::socket::{Claim, ClaimError};
use super::watch::{Watch, WatchError};
use super::worker_process::{WorkerExit, WorkerProcess, find_worker_program};
use crate::config::ServerConfig;
use crate::protocol::{Health, Reloaded};

/// How far beyond its limit a request may run before the master kills its worker: the worker's own means come first.
const KILL_DELAY: Duration = Duration::from_millis(500);
/// How long a stopping server waits for scripts without a time limit.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// First pause before a worker that died young is replaced; doubled every time, up to [`MAX_RESTART_DELAY`].
const MIN_RESTART_DELAY: Duration = Duration::from_millis(100);
const MAX_RESTART_DELAY: Duration = Duration::from_secs(10);
/// Pause before another attempt to open the request socket.
const RENEWAL_DELAY: Duration = Duration::from_millis(500);
/// How long a worker may be busy with itself: undoing what a script did, and getting ready for the next.
const UNDO_LIMIT: Duration = Duration::from_secs(20);

/// Why a server could not start, or ended other than by request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The socket could not be claimed.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// A directory cannot be watched.
    #[error(transparent)]
    Watch(#[from] WatchError),
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
    EndedBeforeReady {
        /// The wait status of the worker.
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
enum Slot {
    Running(WorkerProcess),
    /// To be filled at this time.
    StartAt(Instant),
}

struct Master<'a> {
    config: &'a ServerConfig,
    program: PathBuf,
    entrance: Entrance,
    /// One until the first worker is ready: see [`Master::add_slots`].
    slots: Vec<Slot>,
    /// Workers of before a reload, which finish what they have begun and then leave.
    retired: Vec<WorkerProcess>,
    reload: Option<Reload>,
    watch: Option<Watch>,
    control: ControlConnections,
    signals: SignalFd,
    started: Instant,
    reported_ready: bool,
    /// Requests finished by workers that are gone.
    served_before: u64,
    restarts: u64,
    /// Workers that could not be started or died young, one after another.
    failed_starts: u32,
    /// When the request socket, which was shut, is to be opened again.
    renewal: Option<Instant>,
    /// Set when a stop was asked for: until then scripts may finish.
    stopping: Option<Instant>,
}

/// Serves at `config.socket`, or at the sockets that were passed, until `SIGTERM` or `SIGINT`; blocks these signals in the calling thread, which should be the only one.
///
/// # Errors
/// See [`ServeError`].
pub fn serve(config: &ServerConfig, passed: Option<Passed>) -> Result<(), ServeError> {
    if config.workers == 0 {
        return Err(ServeError::NoWorkers);
    }
    let program = find_worker_program().map_err(ServeError::NoProgram)?;
    let signals = SignalFd::new().map_err(io_error("signalfd"))?;
    // Children that a dead worker leaves behind come to the master instead of escaping to init.
    rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(1))
        .map_err(io_error("PR_SET_CHILD_SUBREAPER"))?;
    // Before the workers import what is there.
    let watch = Watch::new(&config.watch)?;
    let entrance = match passed {
        Some(passed) => Entrance::Passed(passed),
        None => Entrance::Own(Claim::take(&config.socket, config.queue)?),
    };
    entrance.note_interpreter(&config.socket, &config.worker.interpreter.executable)?;
    let now = Instant::now();
    let mut master = Master {
        config,
        program,
        entrance,
        slots: vec![Slot::StartAt(now)],
        retired: Vec::new(),
        reload: None,
        watch,
        control: ControlConnections::new(),
        signals,
        started: now,
        reported_ready: false,
        served_before: 0,
        restarts: 0,
        failed_starts: 0,
        renewal: None,
        stopping: None,
    };
    master.run()
}

impl Master<'_> {
    fn run(&mut self) -> Result<(), ServeError> {
        loop {
            self.add_slots();
            self.start_due_workers()?;
            self.sleep()?;
            match self.signals.take() {
                Ok(Some(StopSignal::Stop)) if self.stopping.is_some() => return Ok(()),
                Ok(Some(StopSignal::Stop)) => self.begin_to_stop(),
                Ok(None) => {}
                Err(error) => self.pause_after("read a signal", &error),
            }
            self.reap_workers()?;
            self.advance_reload();
            self.reload_after_changes();
            self.renew_socket();
            self.end_overdue();
            self.answer_questions();
            self.report_ready();
            if let Some(deadline) = self.stopping
                && (Instant::now() >= deadline || self.workers().next().is_none())
            {
                return Ok(());
            }
        }
    }

    /// The workers that serve, or finish what they have begun.
    fn workers(&self) -> impl Iterator<Item = &WorkerProcess> {
        let serving = self.slots.iter().filter_map(|slot| match slot {
            Slot::Running(worker) => Some(worker),
            Slot::StartAt(_) => None,
        });
        serving.chain(&self.retired)
    }

    /// All workers, those that do not serve yet among them.
    fn all_workers(&self) -> impl Iterator<Item = &WorkerProcess> {
        self.workers().chain(self.reload.iter().flat_map(|reload| &reload.workers))
    }

    /// Makes room for the other workers when the first is ready: an import that fails is reported once, and not by each.
    fn add_slots(&mut self) {
        if self.slots.len() < self.config.workers
            && matches!(&self.slots[..], [Slot::Running(worker), ..] if worker.is_ready())
        {
            let now = Instant::now();
            self.slots.resize_with(self.config.workers, || Slot::StartAt(now));
        }
    }

    fn start_due_workers(&mut self) -> Result<(), ServeError> {
        if self.stopping.is_some() {
            return Ok(());
        }
        let now = Instant::now();
        for slot in &mut self.slots {
            if !matches!(slot, Slot::StartAt(due) if *due <= now) {
                continue;
            }
            match WorkerProcess::start(&self.program, &self.config.worker, self.entrance.requests()) {
                Ok(worker) => *slot = Slot::Running(worker),
                // Scripts run in the other workers, and the want of descriptors, processes or memory passes.
                Err(error) if self.reported_ready => {
                    let pause = restart_delay(&mut self.failed_starts);
                    tracing::warn!(
                        seconds = pause.as_secs_f64(),
                        "cannot start a worker ({}): {error}; its place stays empty until another attempt",
                        self.program.display()
                    );
                    *slot = Slot::StartAt(Instant::now() + pause);
                }
                Err(source) => return Err(ServeError::Spawn { program: self.program.clone(), source }),
            }
        }
        Ok(())
    }

    /// Opens the request socket again, if it was found shut and that is due.
    fn renew_socket(&mut self) {
        if self.stopping.is_some() || self.renewal.is_none_or(|due| due > Instant::now()) {
            return;
        }
        match self.entrance.renew() {
            Ok(renewed) => {
                self.renewal = None;
                if renewed {
                    tracing::warn!("a script shut down the request socket; it was opened again");
                    // Those that run have the old one.
                    let now = Instant::now();
                    for slot in &mut self.slots {
                        if let Slot::StartAt(due) = slot {
                            *due = now;
                        }
                    }
                }
            }
            Err(error) => {
                let error = anyhow::Error::from(error);
                tracing::warn!("cannot open the request socket again: {error:#}; it is tried again");
                self.renewal = Some(Instant::now() + RENEWAL_DELAY);
            }
        }
    }

    /// Sleeps until something happens that concerns more than the passing on of requests.
    fn sleep(&mut self) -> Result<(), ServeError> {
        let deadline = self.next_deadline();
        // What comes before a worker can take it waits at the socket, for another server if this one cannot start.
        let relays = self.reported_ready || self.workers().any(WorkerProcess::is_ready);
        loop {
            let woken = self.wait(deadline, relays);
            if !relays {
                return Ok(());
            }
            let relayed = self.entrance.relay();
            if relayed.map_err(io_error("cannot accept on the passed socket, which was shut down"))? {
                self.renewal.get_or_insert_with(Instant::now);
                return Ok(());
            }
            if woken || Instant::now() >= deadline {
                return Ok(());
            }
        }
    }

    /// Waits for descriptors until `deadline`, and for requests to relay; returns whether something else happened than their
    /// arrival.
    fn wait(&self, deadline: Instant, relays: bool) -> bool {
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(8);
        fn add<'a>(fds: &mut Vec<PollFd<'a>>, fd: BorrowedFd<'a>) {
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        add(&mut fds, self.signals.as_fd());
        if let Some(watch) = &self.watch {
            add(&mut fds, watch.fd());
        }
        self.all_workers().for_each(|worker| add(&mut fds, worker.pidfd()));
        self.control.poll_fds().for_each(|fd| add(&mut fds, fd));
        if self.control.has_room() {
            add(&mut fds, self.entrance.control());
        }
        let others = fds.len();
        let entrance = self.entrance.poll_fd().filter(|_| relays);
        fds.extend(entrance.map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
        let at = self.entrance.deadline().map_or(deadline, |entrance| entrance.min(deadline));
        let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(_) => fds[..others].iter().any(|fd| !fd.revents().is_empty()),
            Err(rustix::io::Errno::INTR) => true,
            // Short of memory: whatever has happened is looked for all the same.
            Err(_) => {
                std::thread::sleep(MIN_RESTART_DELAY);
                true
            }
        }
    }

    fn next_deadline(&self) -> Instant {
        let now = Instant::now();
        let starts = self.slots.iter().filter_map(|slot| match slot {
            Slot::StartAt(due) if self.stopping.is_none() => Some(*due),
            _ => None,
        });
        // Until the workers are ready there is no event that tells when they are.
        let starting = !self.reported_ready || self.reload.is_some();
        let readiness = starting.then(|| now + Duration::from_millis(10));
        let overdue = now + self.overdue_period();
        // Changes during a start or a reload wait until its end, which is looked for anyway.
        let changes = self.watch.as_ref().and_then(Watch::due).filter(|_| self.may_reload().is_ok());
        let others = starts.chain(readiness).chain(self.renewal).chain(changes);
        others.chain(self.control.deadline()).chain(self.stopping).fold(overdue, Instant::min)
    }

    /// Returns how often the master looks for overdue requests, often enough to be at most half as late again as the
    /// limit; and for workers that are busy with themselves.
    fn overdue_period(&self) -> Duration {
        let limit = self.config.worker.limits.time;
        limit.map_or(UNDO_LIMIT / 4, |limit| {
            (limit / 2).clamp(Duration::from_millis(50), Duration::from_secs(1))
        })
    }

    /// Reports what failed for want of a resource, and waits a little: scripts run in the workers, and it is tried
    /// again.
    fn pause_after(&self, what: &str, error: &io::Error) {
        tracing::warn!("cannot {what}: {error}; it is tried again");
        std::thread::sleep(MIN_RESTART_DELAY);
    }

    fn reap_workers(&mut self) -> Result<(), ServeError> {
        for index in 0..self.slots.len() {
            let Slot::Running(worker) = &mut self.slots[index] else {
                continue;
            };
            let exit = match worker.reap() {
                Ok(Some(exit)) => exit,
                Ok(None) => continue,
                Err(error) => {
                    self.pause_after("wait for a worker", &error);
                    continue;
                }
            };
            let due = self.handle_exit(&exit)?;
            self.slots[index] = Slot::StartAt(due);
        }
        self.reap_retired();
        reap_orphans(&self.all_workers().map(|worker| worker.health().pid).collect::<Vec<_>>());
        Ok(())
    }

    fn reap_retired(&mut self) {
        let mut retired = std::mem::take(&mut self.retired);
        retired.retain_mut(|worker| match worker.reap() {
            Ok(None) => true,
            Ok(Some(exit)) => {
                self.note_end(&exit);
                false
            }
            Err(error) => {
                self.pause_after("wait for a worker", &error);
                true
            }
        });
        self.retired = retired;
    }

    /// Notes what a worker has left: the requests that it finished, and the one that died with it.
    fn note_end(&mut self, exit: &WorkerExit) {
        self.served_before += exit.served;
        if let Some((id, outcome)) = &exit.request {
            self.control.record(*id, outcome.clone());
        }
    }

    /// Draws the consequences of an exit; returns when the slot is to be filled again.
    fn handle_exit(&mut self, exit: &WorkerExit) -> Result<Instant, ServeError> {
        self.note_end(exit);
        if self.stopping.is_some() {
            return Ok(Instant::now());
        }
        if !exit.was_ready && !self.reported_ready {
            return Err(ServeError::EndedBeforeReady { status: exit.status });
        }
        self.restarts += 1;
        // A worker that ends of its own accord has found the socket shut.
        if exit.status.success() {
            self.renewal = Some(Instant::now());
            self.renew_socket();
        }
        tracing::warn!(
            pid = exit.pid,
            seconds = exit.lived.as_secs_f64(),
            requests = exit.served,
            "worker ended ({}); starting another",
            exit.status
        );
        if exit.was_ready {
            self.failed_starts = 0;
            return Ok(Instant::now());
        }
        Ok(Instant::now() + restart_delay(&mut self.failed_starts))
    }

    /// Kills workers that take too long.
    fn end_overdue(&mut self) {
        let limit = self.config.worker.limits.time;
        let serving = self.slots.iter_mut().filter_map(|slot| match slot {
            Slot::Running(worker) => Some(worker),
            Slot::StartAt(_) => None,
        });
        for worker in serving.chain(&mut self.retired) {
            if let Some(reason) = worker.overdue(limit, KILL_DELAY, UNDO_LIMIT) {
                tracing::warn!("worker {}: {reason}; it is killed", worker.health().pid);
                if let Err(error) = worker.kill() {
                    tracing::warn!("cannot kill the worker: {error}");
                }
            }
        }
    }

    fn answer_questions(&mut self) {
        let mut control = std::mem::replace(&mut self.control, ControlConnections::new());
        if control.has_room() {
            control.admit(self.entrance.control());
        }
        let reload = Cell::new(false);
        let ask_reload = || {
            self.may_reload()?;
            reload.set(true);
            Ok(())
        };
        control.work(|id| self.workers().any(|worker| worker.runs(id)), || self.health(), ask_reload);
        self.control = control;
        if reload.get() {
            self.begin_reload();
        }
    }

    /// Returns why there can be no reload now, if there can be none.
    fn may_reload(&self) -> Result<(), String> {
        if self.stopping.is_some() {
            return Err("the server is about to end".to_owned());
        }
        if !self.reported_ready {
            return Err("the server has not started yet".to_owned());
        }
        if self.reload.is_some() {
            return Err("another reload is under way; ask again when it has ended".to_owned());
        }
        Ok(())
    }

    /// Reloads if a burst of changes of the watched files has ended.
    fn reload_after_changes(&mut self) {
        let Some(watch) = &mut self.watch else { return };
        let due = watch.look().unwrap_or_else(|error| {
            tracing::warn!("{:#}; its changes may go unnoticed", anyhow::Error::from(error));
            false
        });
        if due && self.may_reload().is_ok() {
            self.watch.iter_mut().for_each(Watch::forget);
            tracing::info!("Python files have changed");
            self.begin_reload();
        }
    }

    fn begin_reload(&mut self) {
        let begin = || -> anyhow::Result<Reload> {
            let mut reload = Reload::new(self.entrance.prepare_next()?, self.config.workers);
            self.start_new_workers(&mut reload, 1)?;
            Ok(reload)
        };
        match begin() {
            Ok(reload) => {
                tracing::info!(workers = self.config.workers, "reloading: new workers start");
                self.reload = Some(reload);
            }
            Err(error) => self.conclude_reload(&Reloaded::Failed(format!("{error:#}"))),
        }
    }

    /// Starts new workers until there are `number`.
    fn start_new_workers(&self, reload: &mut Reload, number: usize) -> anyhow::Result<()> {
        while reload.workers.len() < number {
            let requests = reload.entrance.requests();
            let worker = WorkerProcess::start(&self.program, &self.config.worker, requests)
                .with_context(|| format!("cannot start {}", self.program.display()))?;
            reload.workers.push(worker);
        }
        Ok(())
    }

    fn advance_reload(&mut self) {
        let Some(mut reload) = self.reload.take() else { return };
        let how = match reload.progress() {
            Progress::Waits => {
                self.reload = Some(reload);
                return;
            }
            Progress::FirstReady => match self.start_new_workers(&mut reload, self.config.workers) {
                Ok(()) => {
                    self.reload = Some(reload);
                    return;
                }
                Err(error) => Reloaded::Failed(format!("{error:#}")),
            },
            Progress::Failed(reason) => Reloaded::Failed(reason),
            Progress::Ready => match self.entrance.replace(&mut reload.entrance) {
                Ok(()) => Reloaded::Done { workers: u32::try_from(reload.workers.len()).unwrap_or(u32::MAX) },
                Err(error) => Reloaded::Failed(format!("{:#}", anyhow::Error::from(error))),
            },
        };
        // Workers that do not come into a slot end with their values.
        if matches!(how, Reloaded::Done { .. }) {
            tracing::info!(seconds = reload.elapsed().as_secs_f64(), "reloaded");
            self.renewal = None;
            self.failed_starts = 0;
            let next = reload.workers.into_iter().map(Slot::Running).collect();
            let former = std::mem::replace(&mut self.slots, next);
            self.retired.extend(former.into_iter().filter_map(|slot| match slot {
                Slot::Running(worker) => Some(worker),
                Slot::StartAt(_) => None,
            }));
        }
        self.conclude_reload(&how);
    }

    fn conclude_reload(&mut self, how: &Reloaded) {
        if let Reloaded::Failed(reason) = how {
            tracing::warn!("cannot reload: {reason}; the workers are those of before");
        }
        self.control.conclude_reload(how);
    }

    fn health(&self) -> Health {
        let mut workers: Vec<_> = self.workers().map(WorkerProcess::health).collect();
        if self.slots.len() < self.config.workers {
            // The others are not there to be listed yet.
            workers.iter_mut().for_each(|worker| worker.ready = false);
        }
        Health {
            uptime: self.started.elapsed().as_secs(),
            served: self.served_before + workers.iter().map(|worker| worker.served).sum::<u64>(),
            restarts: self.restarts,
            workers,
        }
    }

    fn report_ready(&mut self) {
        if self.reported_ready
            || self.workers().filter(|worker| worker.is_ready()).count() < self.config.workers
        {
            return;
        }
        self.reported_ready = true;
        orrery_sys::service_manager::ready();
        tracing::info!(
            workers = self.slots.len(),
            seconds = self.started.elapsed().as_secs_f64(),
            "serving on {}",
            self.config.socket.display()
        );
    }

    /// Lets running and queued requests finish; takes no new ones.
    fn begin_to_stop(&mut self) {
        orrery_sys::service_manager::stopping();
        if self.reload.take().is_some() {
            self.conclude_reload(&Reloaded::Failed("the server is about to end".to_owned()));
        }
        self.entrance.shut();
        let patience = self.config.worker.limits.time.map_or(STOP_TIMEOUT, |limit| limit + 2 * KILL_DELAY);
        self.stopping = Some(Instant::now() + patience);
    }
}

/// Returns how long to wait before a worker is started, after so many that did not come to life.
fn restart_delay(failed_starts: &mut u32) -> Duration {
    let pause = MIN_RESTART_DELAY.saturating_mul(1 << (*failed_starts).min(16)).min(MAX_RESTART_DELAY);
    *failed_starts = failed_starts.saturating_add(1);
    pause
}

/// Kills and reaps what dead workers left behind: being subreaper, the master is now its parent.
fn reap_orphans(own: &[i32]) {
    for pid in crate::children::children() {
        if !own.contains(&pid.as_raw_nonzero().get()) {
            // Either fails only if the process is gone already.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            // One that is slow to die is reaped when the master wakes next.
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
        }
    }
}
