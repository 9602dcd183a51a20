//! Trackers: which pages may have been written since they were last settled?
//!
//! Two ways are built:
//!
//! - [`WpAsync`] lets the kernel write-protect pages and asks it which lost the protection. A first write costs a fault
//!   of about 0.6 us, a scan 0.2 us per MiB of 4 KiB pages or per GiB of huge pages.
//! - [`Compare`] compares every page with its last image. It needs nothing but `/proc/self/pagemap`, costs a run's
//!   first write nothing and a scan as much as reading all memory twice.
//!
//! A third, soft-dirty bits, has a place here but brings nothing on kernels that have neither.
//!
//! A tracker may report a page that did not change; it must never miss one that did, by any writer: the program, a
//! system call on its behalf, another process through `process_vm_writev(2)` or `ptrace(2)`. Dropping contents
//! (`madvise(2)` with `MADV_DONTNEED`) and replacing a mapping are writes as well.

mod compare;
mod wp_async;

pub use compare::Compare;
pub use wp_async::WpAsync;

use orrery_sys::PageRange;
use orrery_sys::maps::Access;
use orrery_sys::pagemap::Pagemap;

use crate::arena::Arena;
use crate::images::{Image, Images};
use crate::layout::{Backing, Mapping};
use crate::pages::PageMap;
use crate::ranges::Ranges;
use crate::{Error, Result};

/// The environment variable that forces a tracker: `wp_async` or `compare`.
pub const TRACKER_VARIABLE: &str = "ORRERY_TRACKER";

/// A mapping to track.
#[derive(Clone, Copy, Debug)]
pub struct Tracked {
    /// The range that is tracked.
    pub range: PageRange,
    /// What may be done with it.
    pub access: Access,
    /// Whether a file gives its untouched contents.
    pub of_file: bool,
    /// Whether any of its pages has an image.
    pub has_images: bool,
    /// Whether nothing was mapped between the tracked mapping before it and this one.
    pub joined: bool,
    /// Where it is, with the gaps before and behind it.
    pub around: PageRange,
}

impl Tracked {
    /// Returns `mapping` as a tracker sees it.
    pub fn of(mapping: &Mapping, pages: &PageMap, joined: bool) -> Self {
        Self {
            range: mapping.range,
            access: mapping.access,
            of_file: matches!(mapping.backing, Backing::File { .. }),
            has_images: pages.next_used(mapping.range).is_some(),
            joined,
            around: mapping.range,
        }
    }
}

/// What pages held when they were last settled.
#[derive(Clone, Copy, Debug)]
pub struct Reference<'a> {
    /// Which image each page had.
    pub pages: &'a PageMap,
    /// The images.
    pub images: &'a Images,
}

impl Reference<'_> {
    /// Returns the image of the page at `address`.
    pub fn image(&self, address: usize) -> Image {
        self.pages.get(address)
    }
}

/// How a search for written pages ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scan {
    /// Everything was looked at.
    Complete,
    /// At this address is memory that the tracker does not know: the layout changed.
    Strange(usize),
}

/// Finds written pages.
pub trait Tracker: core::fmt::Debug {
    /// Returns its name, as `ORRERY_TRACKER` has it.
    fn name(&self) -> &'static str;

    /// Returns whether a scan answers [`Scan::Strange`] wherever a mapping was added or replaced since
    /// [`Tracker::arrange`], and reports parts by which a mapping grew.
    fn sees_new_mappings(&self) -> bool;

    /// Returns the page map of the process.
    fn pagemap(&self) -> &Pagemap;

    /// Tracks exactly `mappings` (in address order) from now on; in the gaps `voids` there is nothing. Pages of
    /// mappings that it did not track before count as written until they are settled.
    ///
    /// # Errors
    /// [`Error::System`], [`Error::Memory`].
    fn arrange(&mut self, mappings: &[Tracked], voids: &[PageRange]) -> Result<()>;

    /// Returns whether the mapping at `range` is still the one that was arranged (true where the tracker cannot
    /// tell).
    ///
    /// # Errors
    /// [`Error::System`].
    fn still_tracks(&self, range: PageRange) -> Result<bool>;

    /// Adds the ranges that may have been written, in address order, to the empty `written`.
    ///
    /// # Errors
    /// [`Error::System`], [`Error::Memory`].
    fn written(&mut self, reference: Reference<'_>, written: &mut Ranges) -> Result<Scan>;

    /// Takes the present contents of `ranges` (in address order) as the reference. What is in `spared` (likewise) and
    /// was written still counts as written.
    ///
    /// # Errors
    /// [`Error::System`].
    fn mark_clean(&mut self, ranges: &[PageRange], spared: &[PageRange]) -> Result<()>;
}

/// Which tracker to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Choice {
    /// What `ORRERY_TRACKER` says, else the fastest that works.
    #[default]
    Auto,
    /// [`WpAsync`].
    WpAsync,
    /// [`Compare`].
    Compare,
}

impl Choice {
    /// Returns the choice of the environment variable.
    ///
    /// # Errors
    /// [`Error::TrackerName`].
    pub fn of_environment() -> Result<Self> {
        match std::env::var_os(TRACKER_VARIABLE) {
            None => Ok(Self::Auto),
            Some(name) if name == "wp_async" => Ok(Self::WpAsync),
            Some(name) if name == "compare" => Ok(Self::Compare),
            Some(_) => Err(Error::TrackerName),
        }
    }
}

/// The tracker that was chosen.
#[derive(Debug)]
pub enum AnyTracker {
    /// Write protection by the kernel.
    WpAsync(WpAsync),
    /// The tracker that compares pages with their images.
    Compare(Compare),
}

impl AnyTracker {
    /// Makes the tracker of `choice`.
    ///
    /// # Errors
    /// [`Error::Tracker`] where one was asked for by name and does not work here, [`Error::TrackerName`].
    pub fn new(arena: &'static Arena, choice: Choice) -> Result<Self> {
        let choice = if choice == Choice::Auto { Choice::of_environment()? } else { choice };
        match choice {
            Choice::Compare => Ok(Self::Compare(Compare::new(arena)?)),
            Choice::WpAsync => Ok(Self::WpAsync(WpAsync::new(arena)?)),
            Choice::Auto => match WpAsync::new(arena) {
                Ok(tracker) => Ok(Self::WpAsync(tracker)),
                Err(Error::Tracker { .. }) => Ok(Self::Compare(Compare::new(arena)?)),
                Err(other) => Err(other),
            },
        }
    }

    /// Returns the tracker behind the choice.
    pub fn get(&mut self) -> &mut dyn Tracker {
        match self {
            Self::WpAsync(tracker) => tracker,
            Self::Compare(tracker) => tracker,
        }
    }

    /// Returns the tracker behind the choice.
    pub fn peek(&self) -> &dyn Tracker {
        match self {
            Self::WpAsync(tracker) => tracker,
            Self::Compare(tracker) => tracker,
        }
    }
}
