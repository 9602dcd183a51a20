//! Areas: memory of which another process keeps a copy, page by page, as of the moments that main chooses.
//!
//! # The story
//!
//! Main allocates what its companions look at in an [`Area`]. For each companion it makes a [`Mirror`], forks, and the
//! child attaches a [`View`]. From then on each call is: main *delivers* (or, while the companion is still busy,
//! *captures*) the areas that the call is about; the companion *refreshes* its view, *applies* what was captured, and runs.
//!
//! ```
//! use orrery_memory::area::{Area, AreaOptions, Mirror, View, without_areas};
//! use core::alloc::Layout;
//!
//! let area = Area::new(1 << 20, &AreaOptions::default())?;
//! let number = area.allocate(Layout::new::<u64>())?.cast::<u64>();
//! let mirror = Mirror::new()?;
//! // SAFETY: room for a number, which nobody else knows of.
//! unsafe { number.write(42) };
//! let delta = mirror.deliver(&[&area])?;
//! // SAFETY: room for a number, which nobody else knows of.
//! unsafe { number.write(43) }; // too late for this call
//! // SAFETY: the child calls nothing but what is allowed there, and ends.
//! let child = without_areas(|| unsafe { libc::fork() })?;
//! if child == 0 {
//!     // SAFETY: a child of the one that made the mirror, with one thread, and no reference into the area.
//!     let mut view = unsafe { View::attach(&mirror) }.unwrap();
//!     view.refresh().unwrap();
//!     view.apply(&delta.reference()).unwrap();
//!     // SAFETY: the view has the number there; no code of this process runs after its end.
//!     unsafe { libc::_exit(number.read() as i32) }
//! }
//! let mut status = 0;
//! // SAFETY: our own child, and a status to write to.
//! unsafe { libc::waitpid(child, &mut status, 0) };
//! assert_eq!(libc::WEXITSTATUS(status), 42);
//! mirror.release(delta);
//! # Ok::<_, orrery_memory::area::Error>(())
//! ```
//!
//! # Costs
//!
//! A call pays for one scan per area (0.2 us for each MiB in use), 0.3 us for each page that was written since the last
//! call of any companion, and 0.6 us at main's next write to each of these pages. A companion pays a fault for each page
//! it looks at for the first time and for each page it writes.
//!
//! # Consistency
//!
//! Pages are copied while the caller waits; other threads of main go on. As with the program's own readers, what must
//! not change meanwhile is protected by the lock that protects it anyway: make the call under it.

#[expect(clippy::module_inception, reason = "an area is one of the things in here")]
mod area;
mod area_arena;
mod copier;
mod delta;
mod error;
mod file;
mod fork_locks;
mod heap;
mod live_map;
mod lock;
mod mirror;
mod pageset;
mod tracking;
mod view;
mod without_areas;

pub use area::{Area, AreaOptions};
pub use area_arena::{AreaArena, in_orbit};
pub use delta::{Delta, DeltaRef};
pub use error::Error;
pub use heap::{Freed, frees, record_freed};
pub use mirror::{Mirror, MirrorMemory};
pub use view::{Refreshed, View};
pub use without_areas::without_areas;

/// A value in an area.
pub type AreaBox<T> = allocator_api2::boxed::Box<T, Area>;
/// A vector whose elements are in an area.
pub type AreaVec<T> = allocator_api2::vec::Vec<T, Area>;

/// How an area's pages reach orbits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Main copies the pages that were written.
    Copy,
    /// A forked copy of main copies them, which spares main the time and costs it a fork and page faults.
    Cow,
    /// The cheaper of both, judged by how much was written.
    #[default]
    Auto,
}
