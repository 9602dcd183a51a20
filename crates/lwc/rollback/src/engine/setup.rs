//! Making the engine of a process, once.

use orrery_sys::thread;
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;

use allocator_api2::alloc::Allocator;
use orrery_memory::HeapVec;
use orrery_memory::space::{Config, Space};
use orrery_sys::timers::{self, PosixTimers};

use super::owner::{Inner, Known, ProcessState, Sources};
use super::{ALTERNATE_STACK, CLAIM, ENGINE, Engine, Limits, STACK, arena, begin_run, current, end_run};
use crate::arch::{self, Crossing};
use crate::error::{Error, Result};
use crate::rollback::stack_address;
use crate::rseq_areas::{self, RseqAreas};
use crate::run_state::{self, CONTROL_SIGNAL, RunState};
use crate::safe_point::SafePointState;
use crate::undo::attributes::{Files, Status};
use crate::undo::children::{Children, Nursery};
use crate::undo::descriptors::Keepers;
use crate::undo::signals::Signals;
use crate::undo::threads::Threads;
use crate::watcher;

/// Makes the engine of this process, or finds it. `children` counts when it is made.
pub(crate) fn set_up(config: Config<'_>, children: Children) -> Result<&'static Engine> {
    if let Some(engine) = current() {
        return engine.for_owner();
    }
    let claim = Claim::take()?;
    let engine = make(config, children)?;
    claim.keep();
    Ok(engine)
}

/// The right to make this process' engine, given to one of its threads and back when dropped.
struct Claim;

impl Claim {
    fn take() -> Result<Self> {
        let process = u64::from(rustix::process::getpid().as_raw_pid().unsigned_abs());
        let thread = u64::from(rustix::thread::gettid().as_raw_pid().unsigned_abs());
        // A claim inherited from a parent is void.
        let taken = CLAIM.fetch_update(Ordering::AcqRel, Ordering::Acquire, |claim| {
            (claim >> 32 != process).then_some(process << 32 | thread)
        });
        match taken {
            Ok(_) => Ok(Self),
            Err(claim) if claim & u64::from(u32::MAX) == thread => Err(Error::Nested),
            Err(claim) => {
                let id = |id: u64| i32::try_from(id & u64::from(u32::MAX)).unwrap_or(0);
                Err(Error::WrongThread { owner: id(claim), caller: id(thread) })
            }
        }
    }

    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        CLAIM.store(0, Ordering::Release);
    }
}

fn make(config: Config<'_>, children: Children) -> Result<&'static Engine> {
    if thread::shadow_stack_is_on() {
        return Err(Error::ShadowStack);
    }
    let arena = arena()?;
    let thread = rustix::thread::gettid().as_raw_pid();
    let stack = arena.stack(STACK)?;
    let alternate_stack = arena.stack(ALTERNATE_STACK)?;
    let mut before = arena.vec();
    list_descriptors(&mut before)?;
    let unset: unsafe extern "C" fn(*mut Crossing) -> i32 = begin_run;
    let engine = Engine {
        arena,
        run: RunState::new(),
        last: UnsafeCell::new(None),
        safe_point: SafePointState::default(),
        rseq_areas: RseqAreas::new(),
        inner: UnsafeCell::new(Inner {
            crossing: Crossing {
                stack_pointer: 0,
                engine_stack: stack.end,
                mask: 0,
                has_xsave: arch::has_xsave().into(),
                begin: unset,
                body: nothing,
                argument: std::ptr::null_mut(),
                end: end_run,
            },
            space: Space::new(arena, config)?,
            threads: Threads::new(arena)?,
            sources: Sources {
                keepers: Keepers::new(arena),
                nursery: Nursery::new(children, thread),
                timers: PosixTimers::open().ok(),
                files: Files::open(thread),
                known: Known::NONE,
                status: Status::UNKNOWN,
            },
            process: ProcessState::new(arena),
            snapshots: arena.vec(),
            alternate_stack,
            timer: timers::create(CONTROL_SIGNAL, thread, 0).ok(),
            limits: Limits::default(),
            data_limit: u64::MAX,
            repeats: false,
            limits_at_once: true,
            running_signals: Signals::NONE,
            // A child goes on where its parent was, so that the parent's names mean nothing here.
            // SAFETY: as in `current`; what there is, is the parent's, and nobody writes it here.
            serial: unsafe {
                ENGINE.load(Ordering::Acquire).as_ref().map_or(0, |old| (*old.inner.get()).serial)
            },
            wanted: 0,
            name: (std::ptr::null_mut(), MaybeUninit::uninit()),
            value: 0,
            error: None,
            last_restore: orrery_memory::space::Restored::default(),
        }),
    };
    let layout = std::alloc::Layout::new::<Engine>();
    let block = arena.heap().allocate(layout).map_err(|_| orrery_memory::Error::Memory {
        bytes: layout.size(),
        errno: rustix::io::Errno::NOMEM,
    })?;
    let pointer = block.cast::<Engine>();
    // SAFETY: the block is fresh and has the engine's layout.
    unsafe { pointer.write(engine) };
    // SAFETY: as in `current`.
    let engine: &'static Engine = unsafe { pointer.as_ref() };
    for range in watcher::memory() {
        // SAFETY: this is the owner's thread, and holds no other reference.
        unsafe { engine.inner() }.space.exclude(range, stack_address())?;
    }
    let mut after = arena.vec();
    list_descriptors(&mut after)?;
    // SAFETY: this is the owner's thread, and holds no other reference.
    unsafe { engine.inner() }.sources.keepers.own(after.iter().copied().filter(|fd| !before.contains(fd)))?;
    ENGINE.store(pointer.as_ptr(), Ordering::Release);
    // SAFETY: this is the owner's thread, and holds no other reference.
    run_state::publish(&engine.run, &raw mut unsafe { engine.inner() }.crossing);
    engine.safe_point.publish();
    engine.rseq_areas.publish();
    rseq_areas::leave_own_alone();
    Ok(engine)
}

fn list_descriptors(list: &mut HeapVec<i32>) -> Result<()> {
    let mut room = true;
    orrery_sys::process::for_each_descriptor(|fd| {
        room &= list.try_reserve(1).is_ok();
        if room {
            list.push(fd);
        }
    })?;
    Ok(())
}

unsafe extern "C" fn nothing(_: *mut c_void) {}
