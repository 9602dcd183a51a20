//! Snapshots of memory against a plain copy: random programs of operations, under each tracker.

#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use orrery_memory::images::Visibility;
use orrery_memory::space::{Config, First, SnapshotId, Space};
use orrery_memory::tracker::{AnyTracker, Compare, Tracker, WpAsync};
use orrery_memory::{Arena, PAGE, PageRange};
use proptest::prelude::*;
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};

/// Pages in the playground: three page tables.
const PAGES: usize = 1536;

type Bytes = Rc<[u8; PAGE]>;

#[derive(Clone, PartialEq)]
struct Cell {
    readable: bool,
    writable: bool,
    bytes: Bytes,
    /// What the page goes back to when its private copy is dropped.
    untouched: Bytes,
}

type Model = BTreeMap<usize, Cell>;

#[derive(Clone, Debug)]
enum Operation {
    Write { page: usize, word: usize, value: u64 },
    Fill { page: usize, pages: usize, value: u8 },
    ReadInto { page: usize, pages: usize, value: u8 },
    Look { page: usize, pages: usize },
    MapAnonymous { page: usize, pages: usize },
    MapFile { page: usize, pages: usize, offset: usize },
    Unmap { page: usize, pages: usize },
    Protect { page: usize, pages: usize, mode: u8 },
    Drop { page: usize, pages: usize },
    Move { from: usize, to: usize, pages: usize },
    HugePages { page: usize, pages: usize },
    Lock { page: usize, pages: usize },
    Capture,
    Restore,
    Snapshot,
    Resume(usize),
    Discard(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    let page = 0..PAGES;
    let few = prop_oneof![4 => 1..20_usize, 1 => 1..PAGES];
    prop_oneof![
        20 => (page.clone(), 0..512_usize, any::<u64>())
            .prop_map(|(page, word, value)| Operation::Write { page, word, value }),
        6 => (page.clone(), few.clone(), 0..4_u8).prop_map(|(page, pages, value)| Operation::Fill { page, pages, value }),
        4 => (page.clone(), 1..20_usize, 1..4_u8)
            .prop_map(|(page, pages, value)| Operation::ReadInto { page, pages, value }),
        3 => (page.clone(), few.clone()).prop_map(|(page, pages)| Operation::Look { page, pages }),
        4 => (page.clone(), few.clone()).prop_map(|(page, pages)| Operation::MapAnonymous { page, pages }),
        4 => (page.clone(), few.clone(), 0..40_usize)
            .prop_map(|(page, pages, offset)| Operation::MapFile { page, pages, offset }),
        3 => (page.clone(), few.clone()).prop_map(|(page, pages)| Operation::Unmap { page, pages }),
        4 => (page.clone(), few.clone(), 0..4_u8)
            .prop_map(|(page, pages, mode)| Operation::Protect { page, pages, mode }),
        4 => (page.clone(), few.clone()).prop_map(|(page, pages)| Operation::Drop { page, pages }),
        2 => (page.clone(), page.clone(), 1..40_usize).prop_map(|(from, to, pages)| Operation::Move { from, to, pages }),
        1 => (page.clone(), few.clone()).prop_map(|(page, pages)| Operation::HugePages { page, pages }),
        1 => (page.clone(), 1..10_usize).prop_map(|(page, pages)| Operation::Lock { page, pages }),
        4 => Just(Operation::Capture),
        8 => Just(Operation::Restore),
        4 => Just(Operation::Snapshot),
        6 => (0..8_usize).prop_map(Operation::Resume),
        2 => (0..8_usize).prop_map(Operation::Discard),
    ]
}

/// Operations, some of them in rounds that do much the same again and again and are undone, as servers do.
fn program() -> impl Strategy<Value = Vec<Operation>> {
    let round = proptest::collection::vec(operation(), 1..6);
    let rounds = (round, proptest::collection::vec(operation(), 3..8)).prop_map(|(round, others)| {
        let each = others.into_iter().map(|other| round.iter().cloned().chain([other, Operation::Restore]));
        each.flatten().collect()
    });
    let piece = prop_oneof![20 => operation().prop_map(|operation| vec![operation]), 1 => rounds];
    proptest::collection::vec(piece, 1..100).prop_map(|pieces: Vec<Vec<_>>| pieces.concat())
}

/// A stretch of address space, what is in it, and what should be.
struct Playground {
    range: PageRange,
    /// The range with guards on both sides.
    reserved: PageRange,
    model: Model,
    file: OwnedFd,
    path: std::path::PathBuf,
    zeros: Bytes,
}

const FILE_PAGES: usize = PAGES + 64;

impl Playground {
    fn new() -> Self {
        // Three aligned page tables with a guard on either side, which keeps the kernel from joining neighbours. Far from
        // where the kernel puts mappings of its own choice, so that nobody else moves into a hole.
        static NEXT: AtomicUsize = AtomicUsize::new(0x1000_0000_0000);
        let size = (PAGES + 1024) * PAGE;
        let base = NEXT.fetch_add(64 << 20, Ordering::Relaxed);
        // SAFETY: a mapping where there is none.
        unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::with_exposed_provenance_mut(base),
                size,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE,
            )
            .unwrap();
        }
        let start = (base + PAGE).next_multiple_of(512 * PAGE);
        let path = std::env::temp_dir().join(format!("orrery-space-{}-{start:x}", std::process::id()));
        let contents: Vec<u8> = (0..FILE_PAGES * PAGE).map(|at| (at / PAGE % 251 + 1) as u8).collect();
        std::fs::write(&path, contents).unwrap();
        let file = std::fs::File::open(&path).unwrap().into();
        let mut new = Self {
            range: PageRange::new(start, start + PAGES * PAGE),
            reserved: PageRange::new(base, base + size),
            model: Model::new(),
            file,
            path,
            zeros: Rc::new([0; PAGE]),
        };
        new.unmap(0, PAGES);
        new
    }

    fn pointer(&self, page: usize) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.range.start + page * PAGE)
    }

    fn unmap(&mut self, page: usize, pages: usize) {
        // SAFETY: the range is inside the playground, to whose pages nothing refers.
        unsafe { rustix::mm::munmap(self.pointer(page), pages * PAGE).unwrap() };
        self.model.retain(|&at, _| at < page || at >= page + pages);
    }

    fn all(&self, page: usize, pages: usize, what: impl Fn(&Cell) -> bool) -> bool {
        (page..page + pages).all(|at| self.model.get(&at).is_some_and(&what))
    }

    fn apply(&mut self, operation: &Operation) {
        let fit = |page: usize, pages: usize| pages.min(PAGES - page);
        match *operation {
            Operation::Write { page, word, value } => {
                if let Some(cell) = self.model.get_mut(&page).filter(|cell| cell.writable) {
                    let bytes = Rc::make_mut(&mut cell.bytes);
                    bytes[word * 8..word * 8 + 8].copy_from_slice(&value.to_ne_bytes());
                    // SAFETY: mapped and writable, as the model says.
                    unsafe { self.pointer(page).cast::<u64>().add(word).write_volatile(value) };
                }
            }
            Operation::Fill { page, pages, value } => {
                for page in page..page + fit(page, pages) {
                    if let Some(cell) = self.model.get_mut(&page).filter(|cell| cell.writable) {
                        cell.bytes = Rc::new([value; PAGE]);
                        // SAFETY: the page is mapped and writable, as the model says, and the playground is
                        // the test's own.
                        unsafe { self.pointer(page).cast::<u8>().write_bytes(value, PAGE) };
                    }
                }
            }
            Operation::ReadInto { page, pages, value } => {
                let pages = fit(page, pages);
                if self.all(page, pages, |cell| cell.writable) {
                    // The kernel writes: pread(2) of the file, whose page `value` is filled with `value + 1`.
                    for at in page..page + pages {
                        // SAFETY: the page is mapped and writable, as the model says, and nothing else refers
                        // to it meanwhile.
                        let into =
                            unsafe { std::slice::from_raw_parts_mut(self.pointer(at).cast::<u8>(), PAGE) };
                        let offset = u64::from(value) * PAGE as u64;
                        assert_eq!(rustix::io::pread(&self.file, into, offset).unwrap(), PAGE);
                        self.model.get_mut(&at).unwrap().bytes = Rc::new([value + 1; PAGE]);
                    }
                }
            }
            Operation::Look { page, pages } => {
                for page in page..page + fit(page, pages) {
                    if self.model.get(&page).is_some_and(|cell| cell.readable) {
                        // SAFETY: the model says that the page is mapped and readable, and `check` compares
                        // the model with the kernel.
                        let byte = unsafe { self.pointer(page).cast::<u8>().read_volatile() };
                        assert_eq!(byte, self.model[&page].bytes[0]);
                    }
                }
            }
            Operation::MapAnonymous { page, pages } => {
                let pages = fit(page, pages);
                // SAFETY: the mapping replaces pages of the playground only, to which nothing refers.
                unsafe {
                    rustix::mm::mmap_anonymous(
                        self.pointer(page),
                        pages * PAGE,
                        ProtFlags::READ | ProtFlags::WRITE,
                        MapFlags::PRIVATE | MapFlags::FIXED,
                    )
                    .unwrap();
                }
                for at in page..page + pages {
                    let zeros = self.zeros.clone();
                    self.model.insert(
                        at,
                        Cell { readable: true, writable: true, bytes: zeros.clone(), untouched: zeros },
                    );
                }
            }
            Operation::MapFile { page, pages, offset } => {
                let pages = fit(page, pages);
                // SAFETY: the mapping replaces pages of the playground only, to which nothing refers.
                unsafe {
                    rustix::mm::mmap(
                        self.pointer(page),
                        pages * PAGE,
                        ProtFlags::READ | ProtFlags::WRITE,
                        MapFlags::PRIVATE | MapFlags::FIXED,
                        &self.file,
                        (offset * PAGE) as u64,
                    )
                    .unwrap();
                }
                for at in page..page + pages {
                    let bytes: Bytes = Rc::new([((offset + at - page) % 251 + 1) as u8; PAGE]);
                    self.model.insert(
                        at,
                        Cell { readable: true, writable: true, bytes: bytes.clone(), untouched: bytes },
                    );
                }
            }
            Operation::Unmap { page, pages } => self.unmap(page, fit(page, pages)),
            Operation::Protect { page, pages, mode } => {
                let pages = fit(page, pages);
                if self.all(page, pages, |_| true) {
                    let (readable, writable) =
                        [(false, false), (true, false), (true, true), (true, true)][mode as usize];
                    let mut flags = MprotectFlags::empty();
                    flags.set(MprotectFlags::READ, readable);
                    flags.set(MprotectFlags::WRITE, writable);
                    // SAFETY: the range is inside the playground, to whose pages nothing refers.
                    unsafe { rustix::mm::mprotect(self.pointer(page), pages * PAGE, flags).unwrap() };
                    for at in page..page + pages {
                        let cell = self.model.get_mut(&at).unwrap();
                        (cell.readable, cell.writable) = (readable, writable);
                    }
                }
            }
            Operation::Drop { page, pages } => {
                let pages = fit(page, pages);
                let all = self.all(page, pages, |_| true);
                // SAFETY: the range is inside the playground, to whose pages nothing refers.
                let whole = all
                    && unsafe {
                        rustix::mm::madvise(self.pointer(page), pages * PAGE, Advice::LinuxDontNeed)
                    }
                    .is_ok();
                for at in (page..page + pages).filter(|_| all) {
                    // Locked memory refuses, and then it is unknown which of the others were dropped.
                    // SAFETY: the page is in the playground, which only this test uses.
                    let one = unsafe { rustix::mm::madvise(self.pointer(at), PAGE, Advice::LinuxDontNeed) };
                    if whole || one.is_ok() {
                        let cell = self.model.get_mut(&at).unwrap();
                        cell.bytes = cell.untouched.clone();
                    }
                }
            }
            Operation::Move { from, to, pages } => {
                let pages = fit(from, pages).min(fit(to, pages));
                let apart = from + pages <= to || to + pages <= from;
                if apart && self.all(from, pages, |_| true) {
                    // SAFETY: the playground is ours. It may be refused, as when several mappings would be moved.
                    let moved = unsafe {
                        rustix::mm::mremap_fixed(
                            self.pointer(from),
                            pages * PAGE,
                            pages * PAGE,
                            MremapFlags::MAYMOVE,
                            self.pointer(to),
                        )
                    };
                    match moved {
                        Ok(_) => {
                            for at in 0..pages {
                                let cell = self.model.remove(&(from + at)).unwrap();
                                self.model.insert(to + at, cell);
                            }
                        }
                        Err(_) => {
                            // What is left is the kernel's choice: start over with nothing on either side.
                            self.unmap(from, pages);
                            self.unmap(to, pages);
                        }
                    }
                }
            }
            Operation::HugePages { page, pages } => {
                // SAFETY: the advice is about pages of the playground and changes no contents.
                let _ = unsafe {
                    rustix::mm::madvise(self.pointer(page), fit(page, pages) * PAGE, Advice::LinuxHugepage)
                };
            }
            Operation::Lock { page, pages } => {
                let pages = fit(page, pages);
                if self.all(page, pages, |cell| cell.readable) {
                    // SAFETY: the range is inside the playground, and locking changes no contents.
                    unsafe {
                        let _ = rustix::mm::mlock(self.pointer(page), pages * PAGE);
                        if page % 2 == 0 {
                            let _ = rustix::mm::munlock(self.pointer(page), pages * PAGE);
                        }
                    }
                }
            }
            _ => unreachable!("an operation on snapshots"),
        }
    }

    /// Compares everything with the model, protection included.
    fn check(&self) -> Result<(), TestCaseError> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut modes = BTreeMap::new();
        for line in maps.lines() {
            let (range, rest) = line.split_once(' ').unwrap();
            let (start, end) = range.split_once('-').unwrap();
            let (start, end) = (
                usize::from_str_radix(start, 16).unwrap(),
                usize::from_str_radix(end, 16).unwrap_or(usize::MAX),
            );
            for address in (start.max(self.range.start)..end.min(self.range.end)).step_by(PAGE) {
                modes.insert((address - self.range.start) / PAGE, &rest[..2]);
            }
        }
        let expected: BTreeMap<usize, &str> = self
            .model
            .iter()
            .map(|(&page, cell)| {
                (
                    page,
                    if cell.writable {
                        "rw"
                    } else if cell.readable {
                        "r-"
                    } else {
                        "--"
                    },
                )
            })
            .collect();
        prop_assert_eq!(&modes, &expected);
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        let mut page_bytes = [0_u8; PAGE];
        for (&page, cell) in &self.model {
            let address = self.range.start + page * PAGE;
            if cell.readable {
                // SAFETY: the model says that the page is mapped and readable, and nobody writes to it while
                // the slice lives.
                let found = unsafe { std::slice::from_raw_parts(self.pointer(page).cast::<u8>(), PAGE) };
                prop_assert!(
                    found == &cell.bytes[..],
                    "page {page}: {:?} for {:?}",
                    &found[..9],
                    &cell.bytes[..9]
                );
            } else {
                assert_eq!(rustix::io::pread(&memory, &mut page_bytes, address as u64).unwrap(), PAGE);
                prop_assert!(page_bytes == cell.bytes[..], "page {page}, unreadable");
            }
        }
        Ok(())
    }
}

impl Drop for Playground {
    fn drop(&mut self) {
        // SAFETY: the playground and its guards are ours.
        unsafe {
            let base = std::ptr::with_exposed_provenance_mut(self.reserved.start);
            rustix::mm::munmap(base, self.reserved.len()).unwrap();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    WpAsync,
    SilentHoles,
    Compare,
}

fn tracker(arena: &'static Arena, kind: Kind) -> Option<AnyTracker> {
    let made = match kind {
        Kind::Compare => return Some(AnyTracker::Compare(Compare::new(arena).unwrap())),
        Kind::WpAsync => WpAsync::new(arena),
        Kind::SilentHoles => WpAsync::with_silent_holes(arena),
    };
    match made {
        Ok(tracker) => Some(AnyTracker::WpAsync(tracker)),
        Err(error) => {
            orrery_testing::skipped!("{kind:?}: {error}");
            None
        }
    }
}

/// Gives an arena back to the kernel, even from a test that failed.
struct Returned(&'static Arena);

impl Drop for Returned {
    fn drop(&mut self) {
        let range = self.0.range();
        // SAFETY: it is dropped last, when nothing uses the arena any more.
        unsafe { rustix::mm::munmap(std::ptr::with_exposed_provenance_mut(range.start), range.len()) }
            .unwrap();
    }
}

fn run(
    kind: Kind,
    visibility: Visibility,
    first: First,
    operations: &[Operation],
) -> Result<(), TestCaseError> {
    // The table of mappings can be read in one piece only while no other thread changes it.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let arena = Arena::reserve().unwrap();
    let _returned = Returned(arena);
    let Some(tracker) = tracker(arena, kind) else {
        return Ok(());
    };
    let mut playground = Playground::new();
    let scope = [playground.range];
    let config = Config { scope: Some(&scope), visibility, first, ..Config::default() };
    let mut space = Space::with_tracker(arena, config, tracker).unwrap();
    let mut base: Option<Model> = None;
    let mut snapshots: Vec<(SnapshotId, Model)> = Vec::new();
    for operation in operations {
        match operation {
            // SAFETY (all below): nothing runs in the playground meanwhile.
            Operation::Capture => {
                // SAFETY: nothing but this thread writes to the playground, and the arena outlives the space.
                unsafe { space.capture() }.unwrap();
                base = Some(playground.model.clone());
            }
            Operation::Snapshot if snapshots.len() < 8 => {
                // SAFETY: nothing but this thread writes to the playground, and the arena outlives the space.
                snapshots.push((unsafe { space.snapshot() }.unwrap(), playground.model.clone()));
                base = Some(playground.model.clone());
            }
            Operation::Restore => {
                if let Some(base) = &base {
                    // SAFETY: nothing refers to the playground's content over the restore.
                    unsafe { space.restore(None) }.unwrap();
                    playground.model = base.clone();
                    playground.check()?;
                }
            }
            Operation::Resume(which) if !snapshots.is_empty() => {
                let (id, model) = &snapshots[which % snapshots.len()];
                // SAFETY: nothing refers to the playground's content over the restore.
                unsafe { space.restore(Some(*id)) }.unwrap();
                playground.model = model.clone();
                base = Some(model.clone());
                playground.check()?;
            }
            Operation::Discard(which) if !snapshots.is_empty() => {
                let (id, _) = snapshots.swap_remove(which % snapshots.len());
                space.discard(id).unwrap();
                prop_assert!(space.discard(id).is_err() && !space.has(id));
            }
            Operation::Snapshot | Operation::Resume(_) | Operation::Discard(_) => {}
            other => playground.apply(other),
        }
    }
    playground.check()?;
    Ok(())
}
/// As many cases as `ORRERY_CASES` says.
fn cases() -> ProptestConfig {
    let cases = std::env::var("ORRERY_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(48);
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 2_000, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn wp_async_behaves_like_a_copy(operations in program(), hidden in any::<bool>()) {
        let visibility = if hidden { Visibility::Hidden } else { Visibility::Mapped };
        run(Kind::WpAsync, visibility, First::Copy, &operations)?;
    }

    #[test]
    fn a_held_first_snapshot_behaves_like_a_copy(operations in program()) {
        run(Kind::WpAsync, Visibility::Mapped, First::Fork, &operations)?;
    }

    #[test]
    fn silent_holes_behave_like_a_copy(operations in program()) {
        run(Kind::SilentHoles, Visibility::Mapped, First::Copy, &operations)?;
    }

    #[test]
    fn compare_behaves_like_a_copy(operations in program(), hidden in any::<bool>()) {
        let visibility = if hidden { Visibility::Hidden } else { Visibility::Mapped };
        run(Kind::Compare, visibility, First::Copy, &operations)?;
    }
}

#[test]
fn trackers_have_the_names_that_force_them() {
    let arena = Arena::reserve().unwrap();
    assert_eq!(Compare::new(arena).unwrap().name(), "compare");
    if let Some(AnyTracker::WpAsync(tracker)) = tracker(arena, Kind::WpAsync) {
        assert_eq!(tracker.name(), "wp_async");
    }
}
