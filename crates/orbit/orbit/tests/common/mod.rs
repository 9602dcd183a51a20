//! What the tests of orbits share. Their cases are processes of their own: orbits are forked, and forking belongs to a
//! process whose threads the case chose itself.

use std::alloc::Layout;
use std::sync::atomic::{AtomicI64, Ordering};

use orrery_orbit::{Area, AreaOptions, Task};
use rustix::process::WaitOptions;

/// Returns a fresh area.
pub(crate) fn area() -> Area {
    Area::new(64 << 10, &AreaOptions::default()).unwrap()
}

/// A number in an area: main sets it, tasks are given its address and read it.
#[derive(Clone, Copy)]
pub(crate) struct Number<'area>(&'area AtomicI64);

impl<'area> Number<'area> {
    fn with_layout(area: &'area Area, layout: Layout) -> Self {
        let place = area.allocate(layout).unwrap().cast();
        // SAFETY: the layout has room for it, any bits are a number, and blocks that nobody frees last as long as the area.
        Self(unsafe { place.as_ref() })
    }

    pub(crate) fn set(self, value: i64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub(crate) fn get(self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn pointer(self) -> *mut i64 {
        self.0.as_ptr()
    }

    /// Returns the address as arguments of a call.
    pub(crate) fn address(self) -> [u8; 8] {
        address(self.pointer())
    }
}

/// Returns a number in `area`.
pub(crate) fn number(area: &Area) -> Number<'_> {
    Number::with_layout(area, Layout::new::<i64>())
}

/// A number in `area` that has a page to itself.
pub(crate) fn number_on_its_page(area: &Area) -> Number<'_> {
    Number::with_layout(area, Layout::from_size_align(4096, 4096).unwrap())
}

/// Returns, as a task, the number at the address that its arguments give.
pub(crate) fn read(task: &mut Task<'_>) -> i64 {
    // SAFETY: its callers pass the address of a number in an area that the call names.
    unsafe { *task.pointer::<i64>().unwrap() }
}

/// Returns the bytes of a pointer, as arguments.
pub(crate) fn address<T>(pointer: *const T) -> [u8; 8] {
    pointer.expose_provenance().to_ne_bytes()
}

/// Dies of SIGSEGV at 0x12345000. It is inlined nowhere, so that messages name this function.
#[inline(never)]
pub(crate) fn crash() -> i64 {
    // SAFETY: nothing is mapped there, so that the read ends the process, as is wanted.
    unsafe { std::ptr::without_provenance_mut::<i64>(0x1234_5000).read_volatile() }
}

/// Returns whether this process has no child, alive or to be waited for.
pub(crate) fn childless() -> bool {
    rustix::process::wait(WaitOptions::NOHANG).is_err_and(|error| error == rustix::io::Errno::CHILD)
}

/// Returns whether a process is gone or a zombie, after a while.
pub(crate) fn ends(pid: u32) -> bool {
    let begin = std::time::Instant::now();
    while begin.elapsed() < std::time::Duration::from_secs(20) {
        match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Err(_) => return true,
            Ok(stat) if stat.rsplit(')').next().unwrap().trim_start().starts_with(['Z', 'X']) => return true,
            Ok(_) => std::thread::sleep(std::time::Duration::from_millis(2)),
        }
    }
    false
}
