//! Orbits: making, asking, ending.

use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use core::time::Duration;

use orrery_orbit::{BackPressure, Backoff, Life, Limits, Orbit, Reaper, Restart, Scheduling};

use super::{Handle, Refused, read_options, refuse, status};

/// `orbit_entry`: arguments and store.
pub type Entry = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_long;
/// What makes the store.
pub type Init = unsafe extern "C" fn() -> *mut c_void;

/// `struct orbit_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Of this structure.
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
    /// Of one CPU.
    pub cpu_percent: c_uint,
    /// How many it may have.
    pub processes: c_uint,
    /// In bytes.
    pub memory: usize,
    /// How much nicer than main it is.
    pub nice: c_int,
}

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
};

/// `orbit_create`.
///
/// # Safety
/// The name is null or a C string; the functions are of their types.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orbit_create(
    name: *const c_char,
    entry: Option<Entry>,
    init: Option<Init>,
) -> *mut Handle<Orbit> {
    // SAFETY: the caller's promise.
    unsafe { orbit_create_with(name, entry, init, core::ptr::null()) }
}

/// `orbit_create_with`.
///
/// # Safety
/// As for [`orbit_create`]; the options are null or a structure with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orbit_create_with(
    name: *const c_char,
    entry: Option<Entry>,
    init: Option<Init>,
    options: *const Options,
) -> *mut Handle<Orbit> {
    // SAFETY: the caller's promise.
    match unsafe { create(name, entry, init, options) } {
        Ok(orbit) => Handle::make(orbit),
        Err(Refused) => core::ptr::null_mut(),
    }
}

/// # Safety
/// As for [`orbit_create_with`].
unsafe fn create(
    name: *const c_char,
    entry: Option<Entry>,
    init: Option<Init>,
    options: *const Options,
) -> Result<Orbit, Refused> {
    if name.is_null() {
        return Err(refuse(libc::EINVAL, "an orbit needs a name"));
    }
    // SAFETY: the caller's promise.
    let (name, options) = unsafe { (CStr::from_ptr(name).to_string_lossy(), read_options(options, USUAL)?) };
    let unknown = |what: &str, value: c_int| refuse(libc::EINVAL, &format!("{value} is no {what}"));
    let mut builder = Orbit::builder(name)
        .restart(match options.restart {
            0 => Restart::Never,
            1 => Restart::OnCrash(Backoff::default()),
            2 => Restart::Always(Backoff::default()),
            other => return Err(unknown("restart policy (enum orbit_restart)", other)),
        })
        .back_pressure(match options.when_full {
            0 => BackPressure::WaitAtMost(Duration::from_secs(1)),
            1 => BackPressure::Wait,
            2 => BackPressure::Fail,
            3 => BackPressure::CancelOldest,
            other => return Err(unknown("way with a full queue (enum orbit_when_full)", other)),
        })
        .reaper(match options.reaper {
            0 => Reaper::Library,
            1 if options.restart == 0 => Reaper::Program,
            1 => {
                return Err(refuse(
                    libc::EINVAL,
                    "an orbit that is restarted is reaped by the library: ORBIT_REAP_PROGRAM goes with \
                     ORBIT_RESTART_NEVER",
                ));
            }
            other => return Err(unknown("reaper (enum orbit_reaper)", other)),
        });
    let mut limits = Limits::default();
    limits.memory = (options.memory > 0).then_some(options.memory as u64);
    limits.cpu_percent = (options.cpu_percent > 0).then_some(options.cpu_percent);
    limits.processes = (options.processes > 0).then_some(options.processes);
    builder = builder.limits(limits);
    if options.queue > 0 {
        builder = builder.queue(options.queue);
    }
    if options.time_limit > 0 {
        builder = builder.time_limit(Duration::from_millis(options.time_limit.into()));
    }
    if options.nice != 0 {
        // SAFETY: plain system call.
        let own = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let nice = own.saturating_add(options.nice).clamp(-20, 19);
        let mut scheduling = Scheduling::default();
        scheduling.nice = Some(nice);
        builder = builder.scheduling(scheduling);
    }
    // SAFETY: the caller's promise.
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

/// `orbit_destroy`.
///
/// # Safety
/// The handle is null or one that `orbit_create` gave, and used by nobody else.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orbit_destroy(orbit: *mut Handle<Orbit>) -> c_int {
    // SAFETY: the caller's promise. It is taken only where it can be ended.
    let ended = unsafe { Handle::in_main(orbit, "orbit") }.and_then(|known| Ok(known.end()?));
    // SAFETY: as above.
    status(ended.and_then(|()| unsafe { Handle::take(orbit, "orbit") }).map(drop))
}

/// `orbit_pid`.
///
/// # Safety
/// The handle is null or one that `orbit_create` gave.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orbit_pid(orbit: *mut Handle<Orbit>) -> c_int {
    // SAFETY: the caller's promise.
    let pid = unsafe { Handle::in_main(orbit, "orbit") }.and_then(|orbit| Ok(orbit.pid()?));
    pid.map_or(-1, u32::cast_signed)
}

/// `orbit_alive`.
///
/// # Safety
/// As for [`orbit_pid`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orbit_alive(orbit: *mut Handle<Orbit>) -> c_int {
    // SAFETY: the caller's promise.
    let life = unsafe { Handle::in_main(orbit, "orbit") }.and_then(|orbit| Ok(orbit.life()?));
    life.map_or(-1, |life| c_int::from(matches!(life, Life::Up)))
}

/// `orbit_restarts`.
///
/// # Safety
/// As for [`orbit_pid`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orbit_restarts(orbit: *mut Handle<Orbit>) -> c_long {
    // SAFETY: the caller's promise.
    match unsafe { Handle::in_main(orbit, "orbit") } {
        Ok(orbit) => c_long::try_from(orbit.restarts()).unwrap_or(c_long::MAX),
        Err(Refused) => -1,
    }
}
