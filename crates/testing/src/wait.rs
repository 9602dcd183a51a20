//! Waiting for what another process or thread does.

use std::time::{Duration, Instant};

/// How long a condition may take to come true: generous, because a busy machine is slow and not wrong.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until `condition` is true, asking every 5 ms.
///
/// # Panics
/// With `what`, if it is not true after [`PATIENCE`].
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    until(what, || condition().then_some(()));
}

/// Waits until `ready` returns a value, asking every 5 ms, and returns it.
///
/// # Panics
/// With `what`, if there is none after [`PATIENCE`].
pub fn until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(begin.elapsed() < PATIENCE, "{what}: not within {} s", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
}
