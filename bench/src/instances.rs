//! Many instances of one library, and what does the same otherwise.

mod child;
pub mod fresh;
pub mod libraries;
pub mod lua;
pub mod program;
pub mod sqlite;
pub mod wasm;

use orrery_sys::scheduling::thread_cpu_time;

/// Databases among which calls go round.
pub const DATABASES: usize = 500;

/// Returns nanoseconds of this thread's processor time for each of `count`, since `thread_cpu_time` returned `since`.
#[must_use]
pub fn nanoseconds(since: u64, count: usize) -> f64 {
    (thread_cpu_time() - since) as f64 / count as f64
}

/// Returns nanoseconds of a call, over databases in turn.
pub fn calls(count: usize, mut call: impl FnMut(usize)) -> f64 {
    const CALLS: usize = 100_000;
    (0..count).for_each(&mut call);
    let begin = thread_cpu_time();
    for _ in 0..CALLS / count {
        (0..count).for_each(&mut call);
    }
    nanoseconds(begin, CALLS / count * count)
}
