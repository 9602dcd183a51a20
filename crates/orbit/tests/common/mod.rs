//! What the tests of orbits share. Their cases are processes of their own: orbits are forked, and forking belongs to a
//! process whose threads the case chose itself.

use std::alloc::Layout;

use orrery_orbit::{Area, AreaOptions};

/// A fresh area.
pub(crate) fn area() -> Area {
    Area::new(64 << 10, &AreaOptions::default()).unwrap()
}

/// A number in `area`.
pub(crate) fn number(area: &Area) -> *mut i64 {
    area.allocate(Layout::new::<i64>()).unwrap().cast().as_ptr()
}

/// The bytes of a pointer, as arguments.
pub(crate) fn address<T>(pointer: *const T) -> [u8; 8] {
    pointer.expose_provenance().to_ne_bytes()
}

/// Whether a process is gone or a zombie, after a while.
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
