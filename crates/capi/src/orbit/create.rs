//! Orbits: making, asking, ending.

use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use core::time::Duration;

use orrery_orbit::{BackPressure, Backoff, Life, Limits, Orbit, Reaper, Restart, Scheduling};

use super::{Handle, Refused, read_options, refuse, status};

/// `orrery_orbit_entry`: arguments and store.
pub type Entry = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_long;
/// What makes the store.
pub type Init = unsafe extern "C" fn() -> *mut c_void;

/// Mirrors `struct orrery_orbit_options` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The size of this structure in bytes.
    pub size: usize,
    /// When it comes back.
    pub restart: c_int,
    /// What to do with a call when the queue is full.
    pub when_full: c_int,
    /// Who takes its exit status.
    pub reaper: c_int,
    /// How many calls may be under way.
    pub queue: c_uint,
    /// How long a task may run, in milliseconds.
    pub time_limit: c_uint,
    /// Per cent of one CPU.
    pub cpu_percent: c_uint,
    /// How many it may have.
    pub processes: c_uint,
    /// The limit of memory in bytes.
    pub memory: usize,
    /// How much nicer than main it is.
    pub nice: c_int,
    /// How many restarts in a row there may be; `UINT_MAX` for any number.
    pub restart_limit: c_uint,
    /// The wait before the second restart in a row, in milliseconds; it doubles with each further one.
    pub backoff_first: c_uint,
    /// The longest of these waits, in milliseconds.
    pub backoff_longest: c_uint,
    /// How long it has to live for its restarts to be forgiven, in milliseconds.
    pub healthy_after: c_uint,
    /// Whether it has all areas as of its creation.
    pub existing_areas: c_int,
    /// Whether its tasks run in the checking mode, besides what the environment says.
    pub check: c_int,
}

/// `ORRERY_ORBIT_RESTART_WITHOUT_LIMIT`.
const WITHOUT_LIMIT: c_uint = c_uint::MAX;

const USUAL: Options = Options {
    size: size_of::<Options>(),
    restart: 0,
    when_full: 0,
    reaper: 0,
    queue: 0,
    time_limit: 0,
    cpu_percent: 0,
    processes: 0,
    memory: 0,
    nice: 0,
    restart_limit: 0,
    backoff_first: 0,
    backoff_longest: 0,
    healthy_after: 0,
    existing_areas: 0,
    check: 0,
};

impl Options {
    /// Returns how restarts are to follow one another; `None` where nothing is said about it.
    fn backoff(&self) -> Result<Option<Backoff>, Refused> {
        let mut backoff = Backoff::default();
        let given =
            |milliseconds: c_uint| (milliseconds > 0).then(|| Duration::from_millis(milliseconds.into()));
        let (first, longest) = (given(self.backoff_first), given(self.backoff_longest));
        let healthy_after = given(self.healthy_after);
        if first.is_none() && longest.is_none() && healthy_after.is_none() && self.restart_limit == 0 {
            return Ok(None);
        }
        if let (Some(first), Some(longest)) = (first, longest)
            && first > longest
        {
            let (first, longest) = (first.as_millis(), longest.as_millis());
            let text = format!("backoff_first_ms ({first}) is more than backoff_longest_ms ({longest})");
            return Err(refuse(libc::EINVAL, &text));
        }
        // A wait that is given alone draws the other one along.
        backoff.longest = longest.unwrap_or(backoff.longest.max(first.unwrap_or_default()));
        backoff.first = first.unwrap_or(backoff.first).min(backoff.longest);
        backoff.healthy_after = healthy_after.unwrap_or(backoff.healthy_after);
        match self.restart_limit {
            0 => {}
            WITHOUT_LIMIT => backoff.limit = None,
            limit => backoff.limit = Some(limit),
        }
        Ok(Some(backoff))
    }
}

/// Implements `orrery_orbit_create`.
///
/// # Safety
/// The name is null or a C string; the functions are of their types.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_create(
    name: *const c_char,
    entry: Option<Entry>,
    init: Option<Init>,
) -> *mut Handle<Orbit> {
    // SAFETY: the name is null or a C string, and the functions are of their types (# Safety); the null
    // pointer stands for no options.
    unsafe { orrery_orbit_create_with(name, entry, init, core::ptr::null()) }
}

/// Implements `orrery_orbit_create_with`.
///
/// # Safety
/// As for [`orrery_orbit_create`]; the options are null or a structure with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_create_with(
    name: *const c_char,
    entry: Option<Entry>,
    init: Option<Init>,
    options: *const Options,
) -> *mut Handle<Orbit> {
    // SAFETY: the name is null or a C string, the functions are of their types, and the options are null or
    // begin with their size (# Safety).
    match unsafe { create(name, entry, init, options) } {
        Ok(orbit) => Handle::make(orbit),
        Err(Refused) => core::ptr::null_mut(),
    }
}

/// # Safety
/// As for [`orrery_orbit_create_with`].
unsafe fn create(
    name: *const c_char,
    entry: Option<Entry>,
    init: Option<Init>,
    options: *const Options,
) -> Result<Orbit, Refused> {
    if name.is_null() {
        return Err(refuse(libc::EINVAL, "an orbit needs a name"));
    }
    // SAFETY: the name was checked against null, and so is a C string; the options are null or begin with
    // their size (# Safety), and `Options` consists of integers.
    let (name, options) = unsafe { (CStr::from_ptr(name).to_string_lossy(), read_options(options, USUAL)?) };
    let unknown = |what: &str, value: c_int| refuse(libc::EINVAL, &format!("{value} is no {what}"));
    let mut builder = Orbit::builder(name)
        .restart(match (options.restart, options.backoff()?) {
            (0, None) => Restart::Never,
            (0, Some(_)) => {
                return Err(refuse(
                    libc::EINVAL,
                    "restart_limit, backoff_first_ms, backoff_longest_ms and healthy_after_ms go with \
                     ORRERY_ORBIT_RESTART_ON_CRASH or ORRERY_ORBIT_RESTART_ALWAYS",
                ));
            }
            (1, backoff) => Restart::OnCrash(backoff.unwrap_or_default()),
            (2, backoff) => Restart::Always(backoff.unwrap_or_default()),
            (other, _) => return Err(unknown("restart policy (enum orrery_orbit_restart)", other)),
        })
        .back_pressure(match options.when_full {
            0 => BackPressure::WaitForValues(Duration::from_secs(1)),
            1 => BackPressure::Wait,
            2 => BackPressure::Fail,
            3 => BackPressure::CancelOldest,
            other => return Err(unknown("way with a full queue (enum orrery_orbit_when_full)", other)),
        })
        .reaper(match options.reaper {
            0 => Reaper::Library,
            1 if options.restart == 0 => Reaper::Program,
            1 => {
                return Err(refuse(
                    libc::EINVAL,
                    "an orbit that is restarted is reaped by the library: ORRERY_ORBIT_REAP_PROGRAM goes with \
                     ORRERY_ORBIT_RESTART_NEVER",
                ));
            }
            other => return Err(unknown("reaper (enum orrery_orbit_reaper)", other)),
        });
    let mut limits = Limits::default();
    limits.memory = (options.memory > 0).then_some(options.memory as u64);
    limits.cpu_percent = (options.cpu_percent > 0).then_some(options.cpu_percent);
    limits.processes = (options.processes > 0).then_some(options.processes);
    builder = builder.limits(limits).existing_areas(options.existing_areas != 0);
    if options.check != 0 {
        builder = builder.check(true);
    }
    if options.queue > 0 {
        builder = builder.queue(options.queue);
    }
    if options.time_limit > 0 {
        builder = builder.time_limit(Duration::from_millis(options.time_limit.into()));
    }
    if options.nice != 0 {
        let own = rustix::process::getpriority_process(None).unwrap_or(0);
        let nice = own.saturating_add(options.nice).clamp(-20, 19);
        let mut scheduling = Scheduling::default();
        scheduling.nice = Some(nice);
        builder = builder.scheduling(scheduling);
    }
    // SAFETY: the functions are of these types (# Safety).
    unsafe {
        if let Some(entry) = entry {
            builder = builder.c_entry(entry);
        }
        if let Some(init) = init {
            builder = builder.c_init(init);
        }
    }
    Ok(builder.create()?)
}

/// Implements `orrery_orbit_destroy`.
///
/// # Safety
/// The handle is null or one that `orrery_orbit_create` gave, and used by nobody else.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_destroy(orbit: *mut Handle<Orbit>) -> c_int {
    // SAFETY: the handle is null or was given by `orrery_orbit_create` (# Safety). It is taken only where it
    // can be ended.
    let ended = unsafe { Handle::in_main(orbit, "orbit") }.and_then(|known| Ok(known.destroy()?));
    // SAFETY: the handle is valid by the caller's contract, and is taken only after its orbit has ended.
    status(ended.and_then(|()| unsafe { Handle::take(orbit, "orbit") }).map(drop))
}

/// Implements `orrery_orbit_pid`.
///
/// # Safety
/// The handle is null or one that `orrery_orbit_create` gave, and nobody destroys the orbit meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_pid(orbit: *mut Handle<Orbit>) -> c_int {
    // SAFETY: the handle is null or was given by `orrery_orbit_create`, and nobody destroys the orbit
    // meanwhile (# Safety).
    let pid = unsafe { Handle::in_main(orbit, "orbit") }.and_then(|orbit| Ok(orbit.pid()?));
    pid.map_or(-1, u32::cast_signed)
}

/// Implements `orrery_orbit_alive`.
///
/// # Safety
/// As for [`orrery_orbit_pid`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_alive(orbit: *mut Handle<Orbit>) -> c_int {
    // SAFETY: the handle is null or was given by `orrery_orbit_create`, and nobody destroys the orbit
    // meanwhile (# Safety).
    let life = unsafe { Handle::in_main(orbit, "orbit") }.and_then(|orbit| Ok(orbit.life()?));
    life.map_or(-1, |life| c_int::from(matches!(life, Life::Up)))
}

/// Implements `orrery_orbit_restarts`.
///
/// # Safety
/// As for [`orrery_orbit_pid`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_restarts(orbit: *mut Handle<Orbit>) -> c_long {
    // SAFETY: the handle is null or was given by `orrery_orbit_create`, and nobody destroys the orbit
    // meanwhile (# Safety).
    let restarts = unsafe { Handle::in_main(orbit, "orbit") }.and_then(|orbit| Ok(orbit.restarts()?));
    restarts.map_or(-1, |restarts| c_long::try_from(restarts).unwrap_or(c_long::MAX))
}
