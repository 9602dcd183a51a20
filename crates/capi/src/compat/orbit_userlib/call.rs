//! Creating, calling, cancelling, destroying.

use core::ffi::{CStr, c_char, c_int, c_long, c_ulong, c_void};
use core::time::Duration;
use std::sync::Arc;

use orrery_orbit::{Area, BackPressure, Call, Error, Flags, Future, Life, Orbit, Reaper, Restart};

use super::registry::{self, Known, Pending, lock};
use super::{Entry, Module, Pool, Task, fail, refuse};

/// How many calls to an orbit may be under way, and how long one more with a return value waits for room.
const BOUND: u32 = 1024;
const PATIENCE: Duration = Duration::from_secs(10);

/// Implements `orbit_create`.
///
/// # Safety
/// The name is null or a C string; the functions are of their types.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_create(
    name: *const c_char,
    entry: Option<Entry>,
    init: Option<unsafe extern "C" fn() -> *mut c_void>,
) -> *mut Module {
    // SAFETY: the name was checked against null, and so is a C string that stays for this call (# Safety).
    let given = if name.is_null() { c"anonymous" } else { unsafe { CStr::from_ptr(name) } };
    let text = given.to_string_lossy();
    let mut shown: String = text.chars().filter(|letter| !letter.is_control()).take(50).collect();
    if shown.is_empty() {
        shown.push_str("anonymous");
    }
    let mut builder = Orbit::builder(shown)
        .restart(Restart::Never)
        .reaper(Reaper::Program)
        .existing_areas(true)
        .queue(BOUND)
        .back_pressure(BackPressure::WaitForValues(PATIENCE));
    // SAFETY: the functions are of these types (# Safety).
    unsafe {
        if let Some(entry) = entry {
            builder = builder.store_first_entry(entry);
        }
        if let Some(init) = init {
            builder = builder.c_init(init);
        }
    }
    let made = builder.create().and_then(|orbit| Ok((orbit.pid()?, orbit)));
    let (id, orbit) = match made {
        Ok((pid, orbit)) => (pid.cast_signed(), orbit),
        Err(error) => {
            refuse(&error);
            return core::ptr::null_mut();
        }
    };
    // SAFETY: as much memory as a module takes; the caller frees it with free(3).
    let place = unsafe { libc::malloc(size_of::<Module>()) }.cast::<Module>();
    if place.is_null() {
        fail(libc::ENOMEM, "no memory for an orbit's record");
        return place;
    }
    let mut module = Module {
        mpid: std::process::id().cast_signed(),
        lobid: registry::add(id, orbit),
        gobid: id,
        entry,
        name: [0; 16],
    };
    for (to, from) in module.name.iter_mut().zip(given.to_bytes().iter().take(15)) {
        *to = from.cast_signed();
    }
    // SAFETY: malloc(3) gave as much memory as a module takes, aligned for any type, and it was checked
    // against null.
    unsafe { place.write(module) };
    place
}

/// Implements `is_orbit_context`.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_authors_is_orbit_context() -> bool {
    orrery_orbit::is_orbit()
}

/// What a call needs.
struct Wanted {
    known: Arc<Known>,
    areas: Vec<Area>,
    function: Option<Entry>,
    arguments: Vec<u8>,
}

impl Wanted {
    /// # Safety
    /// What the pointers lead to is as the header says.
    unsafe fn read(
        module: *const Module,
        pools: (usize, *const *const Pool),
        function: Option<Entry>,
        arguments: (*const c_void, usize),
    ) -> Result<Self, c_int> {
        if orrery_orbit::is_orbit() {
            return Err(fail(
                libc::EPERM,
                "calls are made by the main program, and this process is an orbit",
            ));
        }
        // SAFETY: the module is null or one that `orbit_create` gave and that was not freed, as the header
        // says (# Safety).
        let module =
            unsafe { module.as_ref() }.ok_or_else(|| fail(libc::EINVAL, "a call to no orbit at all"))?;
        let known = registry::find(module.gobid)
            .ok_or_else(|| fail(libc::EINVAL, "this process has no such orbit (any more)"))?;
        if function.is_none() && module.entry.is_none() {
            return Err(fail(libc::EINVAL, "neither the orbit nor the call has a function"));
        }
        if arguments.1 >= orrery_orbit::ARGUMENTS {
            return Err(fail(libc::EINVAL, "1,024 bytes of arguments and more are too many"));
        }
        let (count, pools) = pools;
        if count > 0 && pools.is_null() || arguments.1 > 0 && arguments.0.is_null() {
            return Err(fail(libc::EINVAL, "a null pointer in place of pools or arguments"));
        }
        // SAFETY: the list was checked against null where `count` is not 0, and has `count` pointers to pools
        // or nulls, as the header says (# Safety).
        let areas = (0..count).map(|index| unsafe { pools.add(index).read().as_ref() });
        let areas = areas
            .map(|pool| pool.ok_or_else(|| fail(libc::EINVAL, "a null pool"))?.area_for_call())
            .collect::<Result<_, _>>()?;
        let bytes = if arguments.1 == 0 {
            Vec::new()
        } else {
            // SAFETY: the arguments were checked against null, and are fewer than 1,024 bytes that stay for
            // this call, as the header says (# Safety).
            unsafe { core::slice::from_raw_parts(arguments.0.cast::<u8>(), arguments.1) }.to_vec()
        };
        Ok(Self { known, areas, function, arguments: bytes })
    }

    fn make<R>(&self, flags: Flags, make: impl FnOnce(&Orbit, &Call<'_>) -> R) -> R {
        let areas: Vec<&Area> = self.areas.iter().collect();
        let mut call = Call::new().areas(&areas).arguments(&self.arguments).flags(flags);
        if let Some(function) = self.function {
            // SAFETY: who made the call vouched for the function's type.
            call = unsafe { call.store_first_function(function) };
        }
        make(&self.known.orbit, &call)
    }
}

/// Implements `orbit_call`.
///
/// # Safety
/// What the pointers lead to is as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_call(
    module: *mut Module,
    count: usize,
    pools: *const *const Pool,
    function: Option<Entry>,
    arguments: *const c_void,
    size: usize,
) -> c_long {
    // SAFETY: what the pointers lead to is as the header says (# Safety).
    let wanted = match unsafe { Wanted::read(module, (count, pools), function, (arguments, size)) } {
        Ok(wanted) => wanted,
        Err(minus) => return minus.into(),
    };
    match wanted.make(Flags::NONE, |orbit, call| orbit.call(call)) {
        Ok(value) => value,
        Err(error) => refuse_call(&error).into(),
    }
}

/// Implements `orbit_call_async`.
///
/// # Safety
/// What the pointers lead to is as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_call_async(
    module: *mut Module,
    flags: c_ulong,
    count: usize,
    pools: *const *const Pool,
    function: Option<Entry>,
    arguments: *const c_void,
    size: usize,
    task: *mut Task,
) -> c_int {
    // SAFETY: null, or room for a task, as the header says.
    let tell = |number| unsafe {
        if !task.is_null() {
            task.write(Task { orbit: module, number });
        }
    };
    tell(0);
    // Theirs begin at 1 << 1, ours at 1, in the same order.
    let known_flags = u32::try_from(flags).ok().filter(|bits| bits & 1 == 0);
    let Some(flags) = known_flags.and_then(|bits| Flags::from_bits(bits >> 1)) else {
        return fail(libc::EINVAL, "a call has flags that mean nothing");
    };
    let (skip, cancel) =
        (Flags::SKIP_ANY | Flags::SKIP_SAME_ARGUMENT, Flags::CANCEL_ANY | Flags::CANCEL_SAME_ARGUMENT);
    if flags.has_any(skip) && flags.has_any(cancel) {
        return fail(libc::EINVAL, "a call is either skipped itself or cancels others, not both");
    }
    // SAFETY: what the pointers lead to is as the header says (# Safety).
    let wanted = match unsafe { Wanted::read(module, (count, pools), function, (arguments, size)) } {
        Ok(wanted) => wanted,
        Err(minus) => return minus,
    };
    match wanted.make(flags, |orbit, call| orbit.call_async(call)) {
        Ok(future) => {
            tell(keep(&wanted.known, future, wanted.arguments, flags, task.is_null()));
            0
        }
        Err(Error::Skipped { .. }) => 0,
        Err(error) => refuse_call(&error),
    }
}

/// Keeps what can still be asked of a call. Returns its number.
fn keep(known: &Known, future: Future, arguments: Vec<u8>, flags: Flags, unnamed: bool) -> c_ulong {
    let number = future.call();
    let unnamed = unnamed || flags.has(Flags::NO_RETURN_VALUE);
    if !unnamed || flags.has(Flags::CANCELLABLE) {
        let mut calls = lock(&known.calls);
        // Nobody asks for these; those so old are over.
        calls.open.retain(|other, call| !call.unnamed || other + u64::from(BOUND) > number);
        calls.open.insert(number, Pending { future: Arc::new(future), arguments: arguments.into(), unnamed });
    }
    number
}

/// A dead orbit is an invalid one; one that died of this call is "no such process".
fn refuse_call(error: &Error) -> c_int {
    refuse(error);
    if matches!(error, Error::Destroyed { .. } | Error::OtherProcess { .. }) {
        return fail(libc::EINVAL, &error.to_string());
    }
    -1
}

/// Implements `orbit_cancel_by_task`.
///
/// # Safety
/// The task is null or one that `orbit_call_async` filled in and whose orbit's record was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_cancel_by_task(task: *const Task) -> c_int {
    // SAFETY: the task is null or was filled in by `orbit_call_async`, and its orbit's record was not freed
    // (# Safety).
    match unsafe { pending(task) } {
        Some((_, _, call)) => cancelled(call.future.cancel().map(usize::from)),
        None => fail(libc::ENOENT, "there is no such call"),
    }
}

/// Implements `orbit_cancel_by_arg`.
///
/// # Safety
/// What the pointers lead to is as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_cancel_by_arg(
    module: *const Module,
    arguments: *const c_void,
    size: usize,
) -> c_int {
    // SAFETY: the module is null or one that `orbit_create` gave and that was not freed, as the header says
    // (# Safety).
    let known = unsafe { module.as_ref() }.and_then(|module| registry::find(module.gobid));
    let Some(known) = known else {
        return fail(libc::EINVAL, "this process has no such orbit (any more)");
    };
    let wanted = match size {
        0 => &[],
        _ if arguments.is_null() => return fail(libc::EINVAL, "a null pointer in place of arguments"),
        // SAFETY: the pointer is not null, so it leads to `size` bytes that stay for this call, as the header
        // says (# Safety).
        _ => unsafe { core::slice::from_raw_parts(arguments.cast::<u8>(), size) },
    };
    let alike: Vec<_> = lock(&known.calls)
        .open
        .values()
        .filter(|call| *call.arguments == *wanted)
        .map(|call| Arc::clone(&call.future))
        .collect();
    cancelled(alike.iter().map(|future| future.cancel().map(usize::from)).sum())
}

fn cancelled(count: Result<usize, Error>) -> c_int {
    match count {
        Ok(0) => fail(libc::ENOENT, "no such call waits"),
        Ok(_) => 0,
        Err(error) => refuse(&error),
    }
}

/// Returns the call that a task names.
///
/// # Safety
/// The task is null or one that `orbit_call_async` filled in and whose orbit's record was not freed.
pub(super) unsafe fn pending(task: *const Task) -> Option<(Arc<Known>, u64, Pending)> {
    // SAFETY: the task is null or was filled in by `orbit_call_async` (# Safety).
    let task = unsafe { task.as_ref() }?;
    // SAFETY: the task is alive by the caller's contract, and so is the module that it names.
    let module = unsafe { task.orbit.as_ref() }?;
    let known = registry::find(module.gobid)?;
    let call = lock(&known.calls).open.get(&task.number).filter(|call| !call.unnamed).cloned()?;
    Some((known, task.number, call))
}

/// Implements `orbit_destroy`.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_authors_destroy(id: c_int) -> c_int {
    if orrery_orbit::is_orbit() {
        return fail(libc::EPERM, "an orbit cannot destroy orbits");
    }
    match registry::remove(id) {
        Some(known) => known.orbit.destroy().map_or_else(|error| refuse(&error), |()| 0),
        None => fail(libc::ESRCH, "this process has no such orbit (any more)"),
    }
}

/// Implements `orbit_destroy_all`.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_authors_destroy_all() -> c_int {
    if orrery_orbit::is_orbit() {
        return fail(libc::EPERM, "an orbit cannot destroy orbits");
    }
    let ends = registry::remove_all().into_iter().map(|known| known.orbit.destroy());
    ends.fold(0, |all, end| end.map_or_else(|error| refuse(&error), |()| all))
}

/// Implements `orbit_exists`.
///
/// # Safety
/// The module is null or one that `orbit_create` gave, and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_exists(module: *const Module) -> bool {
    // SAFETY: the module is null or one that `orbit_create` gave and that was not freed (# Safety).
    let known = unsafe { module.as_ref() }.and_then(|module| registry::find(module.gobid));
    known.is_some_and(|known| matches!(known.orbit.life(), Ok(Life::Up)))
}

/// Implements `orbit_gone`.
///
/// # Safety
/// As for `orbit_exists`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_gone(module: *const Module) -> bool {
    // SAFETY: the module is null or one that `orbit_create` gave and that was not freed (# Safety).
    !unsafe { orrery_authors_exists(module) }
}
