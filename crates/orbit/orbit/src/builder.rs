//! Describing and creating an orbit.

use core::any::Any;
use core::cell::Cell;
use core::ffi::{c_long, c_ulong, c_void};
use core::ops::Range;
use core::sync::atomic::Ordering;
use core::time::Duration;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex};

use orrery_domain::forked::Creator;
use orrery_domain::{
    Channel, Descriptors, Domain, DomainState, End, History, Limits, Moment, Partner, Reaper, Restart,
    Scheduling, Settings, Signals, StatisticsPage, Woken,
};
use orrery_memory::area::{Area, Mirror, record_freed, without_areas};

use crate::arguments::ARGUMENTS;
use crate::check::CheckLog;
use crate::code::Code;
use crate::control_block::ControlBlock;
use crate::error::{Error, Fault, Result};
use crate::findings::Findings;
use crate::orbit::Orbit;
use crate::policy::{BackPressure, Placement};
use crate::protocol::{Function, REQUEST};
use crate::records::Records;
use crate::serve::{Entry, Init, Program};
use crate::shared::Shared;
use crate::state::{CpuPin, Phase, State};
use crate::task::{self, Task};
use crate::update::Permissions;
use crate::update_socket::UpdateSocket;

/// An orbit's description.
pub struct Builder {
    name: String,
    entry: Entry,
    init: Init,
    restart: Restart,
    settings: Settings,
    bound: u32,
    back_pressure: BackPressure,
    time_limit: Option<Duration>,
    init_limit: Duration,
    placement: Placement,
    largest_update: usize,
    unreceived: usize,
    allowed: Vec<Range<usize>>,
    existing_areas: bool,
    check: Option<bool>,
}

impl core::fmt::Debug for Builder {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Builder")
            .field("name", &self.name)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl Builder {
    pub(crate) fn new(name: String) -> Self {
        Self {
            name,
            entry: Entry::None,
            init: Init::None,
            restart: Restart::Never,
            settings: Settings::default(),
            bound: 64,
            back_pressure: BackPressure::WaitForValues(Duration::from_secs(1)),
            time_limit: None,
            init_limit: Duration::from_secs(60),
            placement: Placement::Auto,
            largest_update: 256 << 20,
            unreceived: 256 << 20,
            allowed: Vec::new(),
            existing_areas: false,
            check: None,
        }
    }

    /// Sets the function that a call runs. What the closure captures is as of the orbit's creation.
    #[must_use]
    pub fn entry(mut self, entry: impl Fn(&mut Task<'_>) -> i64 + Send + Sync + 'static) -> Self {
        self.entry = Entry::Closure(Box::new(entry));
        self
    }

    /// Sets a C function as the one that a call runs. [`Builder::create`] checks that there is code.
    ///
    /// # Safety
    /// There is a function of this type.
    #[must_use]
    pub unsafe fn c_entry(mut self, entry: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_long) -> Self {
        self.entry = Entry::Function(Function::C(entry));
        self
    }

    /// Like [`Builder::c_entry`], for a function that takes the store first.
    ///
    /// # Safety
    /// There is a function of this type.
    #[must_use]
    pub unsafe fn store_first_entry(
        mut self,
        entry: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_ulong,
    ) -> Self {
        self.entry = Entry::Function(Function::StoreFirst(entry));
        self
    }

    /// Runs in the orbit before its first task, and again in each instance after a restart. What it returns is the
    /// orbit's private store: [`Task::store`].
    #[must_use]
    pub fn init<T: 'static>(mut self, init: impl Fn() -> T + Send + Sync + 'static) -> Self {
        self.init = Init::Closure(Box::new(move || Box::new(init()) as Box<dyn Any>));
        self
    }

    /// Sets a C function as the init function, which returns the store.
    ///
    /// # Safety
    /// There is a function of this type.
    #[must_use]
    pub unsafe fn c_init(mut self, init: unsafe extern "C" fn() -> *mut c_void) -> Self {
        self.init = Init::C(init);
        self
    }

    /// Sets when it is restarted. Unless that is never, a parked spare process is kept for it.
    #[must_use]
    pub fn restart(mut self, restart: Restart) -> Self {
        self.restart = restart;
        self
    }

    /// Sets its resource limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.settings.limits = limits;
        self
    }

    /// Sets its scheduling class, niceness and CPUs.
    #[must_use]
    pub fn scheduling(mut self, scheduling: Scheduling) -> Self {
        self.settings.scheduling = scheduling;
        self
    }

    /// Sets which of main's open files it keeps.
    #[must_use]
    pub fn descriptors(mut self, descriptors: Descriptors) -> Self {
        self.settings.descriptors = descriptors;
        self
    }

    /// Sets whether it inherits main's signal dispositions.
    #[must_use]
    pub fn signals(mut self, signals: Signals) -> Self {
        self.settings.signals = signals;
        self
    }

    /// Sets who reaps it, if it is never restarted.
    #[must_use]
    pub fn reaper(mut self, reaper: Reaper) -> Self {
        self.settings.reaper = reaper;
        self
    }

    /// Sets how many calls may be under way, the running one included.
    #[must_use]
    pub fn queue(mut self, bound: u32) -> Self {
        self.bound = bound;
        self
    }

    /// Sets what to do with a call when the queue is full. The default is to wait for a second
    /// where the call has a return value ([`BackPressure::WaitForValues`]).
    #[must_use]
    pub fn back_pressure(mut self, policy: BackPressure) -> Self {
        self.back_pressure = policy;
        self
    }

    /// Sets how long a task may run before the orbit is killed. By default there is no limit.
    #[must_use]
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }

    /// Sets how long the init function may take at creation. The default is a minute.
    #[must_use]
    pub fn init_limit(mut self, limit: Duration) -> Self {
        self.init_limit = limit;
        self
    }

    /// Sets the CPUs on which main places it.
    #[must_use]
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// Sets the largest update that main accepts, in bytes. The default is 256 MiB.
    #[must_use]
    pub fn largest_update(mut self, bytes: usize) -> Self {
        self.largest_update = bytes;
        self
    }

    /// Sets how many bytes of updates of one call main keeps until the program receives them. What comes beyond that is
    /// dropped, and an [`Error::BadUpdate`] says so in its place. The default is 256 MiB.
    #[must_use]
    pub fn unreceived_updates(mut self, bytes: usize) -> Self {
        self.unreceived = bytes;
        self
    }

    /// Lets updates modify memory outside of areas.
    ///
    /// # Safety
    /// The range is mapped and writable for as long as updates of this orbit are applied.
    #[must_use]
    pub unsafe fn allow(mut self, range: Range<usize>) -> Self {
        self.allowed.push(range);
        self
    }

    /// Sets whether the orbit has all areas of main as of its creation, until calls name them. Otherwise areas that no
    /// call has named are empty in the orbit, or not there. It costs a copy of what all areas hold, at creation and
    /// after the orbit corrupted what it shares with main.
    #[must_use]
    pub fn existing_areas(mut self, shown: bool) -> Self {
        self.existing_areas = shown;
        self
    }

    /// Sets whether tasks run in the checking mode, which reports what they touch that was not passed to them:
    /// [`Orbit::findings`], and lines on standard error. Tasks are slower by far, and system calls of theirs fail with
    /// EFAULT on memory that the orbit took over from main. The default is what the environment variable
    /// `ORRERY_ORBIT_CHECK` says: `1` turns it on.
    #[must_use]
    pub fn check(mut self, on: bool) -> Self {
        self.check = Some(on);
        self
    }

    /// Creates the orbit. When this returns, its init function has.
    ///
    /// # Errors
    /// [`Error::Init`] where the init function crashed or took too long, [`Error::Name`], [`Error::NoFunction`],
    /// [`Error::Inside`] in an orbit, [`Error::Domain`] where the process could not be made or a setting makes no
    /// sense, [`Error::Area`] where there is no room for areas. Nothing is left over then.
    pub fn create(self) -> Result<Orbit> {
        if task::is_orbit() {
            return Err(Error::Inside { operation: "creating an orbit" });
        }
        if self.name.is_empty() || self.name.chars().count() > 50 || self.name.chars().any(char::is_control) {
            return Err(Error::Name { name: self.name });
        }
        let code = Code::of_this_process().map_err(orrery_domain::Error::from)?;
        let has_entry = !matches!(self.entry, Entry::None);
        if let Entry::Function(function) = &self.entry
            && function.is_foreign()
            && !code.contains(function.address())
        {
            return Err(Error::NoFunction { address: function.address() });
        }
        if let Init::C(init) = self.init
            && !code.contains(init as *const () as usize)
        {
            return Err(Error::NoFunction { address: init as *const () as usize });
        }
        let mirror = Arc::new(Mirror::new()?);
        if self.existing_areas {
            mirror.show(&Area::all())?;
        }
        // Twice the bound: cancelled calls keep their slots until the orbit has come past them.
        let channel =
            Arc::new(Channel::new("orrery-queue", self.bound.saturating_mul(2), REQUEST + ARGUMENTS)?);
        let control = Arc::new(ControlBlock::new(channel.slots())?);
        let update_socket = Arc::new(UpdateSocket::new().map_err(orrery_domain::Error::from)?);
        let check = self
            .check
            .unwrap_or_else(|| std::env::var_os("ORRERY_ORBIT_CHECK").is_some_and(|value| value == "1"));
        let check = check.then(|| CheckLog::new().map(Arc::new)).transpose()?;
        if check.is_some() {
            record_freed();
        }
        let statistics = StatisticsPage::new(&self.name)?;
        let program = Program {
            name: self.name.clone(),
            entry: self.entry,
            init: self.init,
            channel: Arc::clone(&channel),
            control: Arc::clone(&control),
            update_socket: Arc::clone(&update_socket),
            mirror: Arc::clone(&mirror),
            check: check.clone(),
        };
        let mut settings = self.settings;
        settings.name.clone_from(&self.name);
        settings.viewed = mirror.viewed() as u64;
        settings.restartable = History::restartable(self.restart);
        if let Placement::Cpu(cpu) = self.placement {
            settings.scheduling.cpus = Some(vec![cpu]);
        }
        if let Descriptors::Only(keep) = &mut settings.descriptors {
            keep.push(update_socket.orbit_end().as_raw_fd());
            keep.extend(mirror.descriptors().map(|fd| fd.as_raw_fd()));
        }
        let memory_limit = settings.limits.memory;
        let domain = start(&settings, &channel, program)?;
        let created = Moment::now();
        await_ready(&self.name, &domain, &channel, &control, self.init_limit)?;
        statistics.created().store(created.0, Ordering::Relaxed);
        statistics.bound().store(self.bound.into(), Ordering::Relaxed);
        statistics.set_state(DomainState::Up);
        statistics.memory_limit().store(memory_limit.unwrap_or(0), Ordering::Relaxed);
        statistics.cpu_limit().store(settings.limits.cpu_percent.unwrap_or(0).into(), Ordering::Relaxed);
        statistics.process_limit().store(settings.limits.processes.unwrap_or(0).into(), Ordering::Relaxed);
        let pid = domain.process().pid();
        statistics.domain().store(pid.as_raw_pid().unsigned_abs().into(), Ordering::Relaxed);
        let allowed = rustix::thread::sched_getaffinity(Some(pid))
            .or_else(|_| rustix::thread::sched_getaffinity(None))
            .map_err(|e| orrery_domain::Error::from(orrery_sys::Error::new("sched_getaffinity", 0, e)))?;
        // SAFETY: the state keeps the channel, and this is main's only end.
        let side = unsafe { channel.main() };
        let state = State {
            name: self.name.clone(),
            pid: pid.as_raw_pid().unsigned_abs(),
            enforcement: domain.enforcement(),
            domain: Some(domain),
            _channel: Arc::clone(&channel),
            side,
            mirror: Some(mirror),
            existing_areas: self.existing_areas,
            check: check.map(|log| (log, Findings::default())),
            control,
            update_socket: Some(update_socket),
            received: 0,
            update_buffer: Vec::new(),
            largest_update: self.largest_update,
            unreceived: self.unreceived,
            more: false,
            stalled: false,
            permissions: Permissions { code, ranges: self.allowed },
            records: Records::with_room(self.bound as usize),
            queued: VecDeque::with_capacity(channel.slots() as usize),
            settled: 0,
            next_call: 1,
            history: History::new(self.restart, created),
            phase: Phase::Up,
            marked_since: None,
            cpu: CpuPin { allowed, pinned: None },
            memory_limit,
            memory_kills: 0,
            statistics,
            last_fault: None,
        };
        Ok(Orbit {
            shared: Arc::new(Shared {
                name: self.name,
                creator: Creator::here(),
                channel,
                state: Mutex::new(state),
                bound: self.bound,
                back_pressure: self.back_pressure,
                time_limit: self.time_limit,
                placement: self.placement,
                has_entry,
            }),
        })
    }
}

/// Makes the process, leaving main's areas out of it.
fn start(settings: &Settings, channel: &Channel, program: Program) -> Result<Domain> {
    let failed = Cell::new(None);
    let by = |fork: &dyn Fn() -> i32| match without_areas(fork) {
        Ok(pid) => pid,
        Err(error) => {
            failed.set(Some(error));
            -1
        }
    };
    let control = Arc::clone(&program.control);
    let check = program.check.clone();
    let shared: Vec<_> =
        core::iter::once(control.memory()).chain(check.iter().map(|log| log.memory())).collect();
    // SAFETY: the program keeps the channel; its code takes no lock that another thread of main may hold, and what the
    // user's functions do is theirs to know (the book says so).
    let domain =
        unsafe { Domain::start_by(settings, channel, &shared, Box::new(move || program.run()), &by) };
    match (domain, failed.take()) {
        (_, Some(error)) => Err(error.into()),
        (domain, None) => Ok(domain?),
    }
}

/// Waits until the init function has returned.
fn await_ready(
    name: &str,
    domain: &Domain,
    channel: &Channel,
    control: &ControlBlock,
    limit: Duration,
) -> Result<()> {
    let gate = channel.main_gate();
    let until = Moment::now().after(limit);
    loop {
        let heard = gate.heard();
        if control.is_ready() {
            return Ok(());
        }
        let partner = Partner::Pidfd(domain.process().as_fd());
        let fault = match gate.wait(heard, Some(until), partner) {
            Woken::Rung => continue,
            Woken::TimedOut => Fault::TimeLimit { limit },
            Woken::PartnerGone if control.is_ready() => return Ok(()),
            Woken::PartnerGone => control
                .crash_record()
                .unwrap_or_else(|| Fault::of_end(domain.process().end().unwrap_or(End::Unknown))),
        };
        return Err(Error::Init { orbit: name.to_owned(), fault });
    }
}
