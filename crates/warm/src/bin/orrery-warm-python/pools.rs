//! Room for a request's objects, close together.
//!
//! CPython takes small objects from pools of 16 KiB, one size to a pool, and fills the holes that earlier objects left
//! before it opens a new pool. After the imports the holes are scattered over megabytes, and a request that makes a
//! few hundred objects would write to a few hundred pages. So all holes are filled once, and each size is given a new
//! pool, from which a request's objects come one behind the other.

use std::collections::HashSet;

use pyo3_ffi as ffi;

/// Sizes come in steps of this many bytes, up to [`LARGEST`].
const STEP: usize = 16;
const LARGEST: usize = 512;
const POOL: usize = 16 << 10;
/// Where the first object of a pool is.
const OVERHEAD: usize = 48;
/// A size whose holes are more than this many bytes is left alone: something is not as described above.
const MOST: usize = 64 << 20;

/// Fills the holes.
pub(crate) fn top_up() {
    for size in (STEP..=LARGEST).step_by(STEP) {
        let mut pools = HashSet::new();
        for _ in 0..MOST / size {
            // SAFETY: the interpreter lock is held. The memory is never used nor freed.
            let block = unsafe { ffi::PyObject_Malloc(size) }.addr();
            let is_new = pools.insert(block & !(POOL - 1));
            if block == 0 || is_new && block % POOL == OVERHEAD {
                break;
            }
        }
    }
}
