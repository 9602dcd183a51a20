//! Snapshots of instances: a rollback at the level of a library.

use std::ptr::NonNull;
use std::sync::Arc;

use orrery_sys::PAGE;

use crate::error::{Error, Result};
use crate::heap::Record;
use crate::instance::Instance;
use crate::library::Loaded;
use crate::region::{Moved, Run};

/// The state and the heap of an instance as at one instant. Thread-local variables are not in it: they begin afresh.
#[derive(Debug)]
pub struct Snapshot {
    library: Arc<Loaded>,
    /// The place of the instance, which tells it from others that live.
    place: usize,
    /// Which instance it was, of those at that place.
    core: *const (),
    state: Vec<u8>,
    record: Record,
    runs: Vec<Pages>,
}

// SAFETY: `core` is compared only, never dereferenced, and the rest is owned.
unsafe impl Send for Snapshot {}
// SAFETY: `core` is compared only, never dereferenced.
unsafe impl Sync for Snapshot {}

/// The pages of a run that are not zero.
#[derive(Debug)]
struct Pages {
    run: Run,
    pages: Vec<(usize, Box<[u8]>)>,
}

impl Pages {
    fn of(run: Run) -> Self {
        let pages = (0..run.len).step_by(PAGE).filter_map(|offset| {
            // SAFETY: the page is in the run, which the instance has; nobody is in the instance.
            let page = unsafe { std::slice::from_raw_parts(run.pointer().add(offset), PAGE) };
            page.iter().any(|byte| *byte != 0).then(|| (offset, page.into()))
        });
        Self { run, pages: pages.collect() }
    }

    /// # Safety
    /// `to` is as long, the caller's, and zero.
    unsafe fn write(&self, to: Run) {
        for (offset, page) in &self.pages {
            // SAFETY: the run is as long as this one was, so the page fits it, and it is the caller's
            // (# Safety).
            unsafe { to.pointer().add(*offset).copy_from_nonoverlapping(page.as_ptr(), page.len()) };
        }
    }
}

/// Changes each word that is an address in what was moved.
///
/// # Safety
/// `words` are whole words that only the caller uses.
unsafe fn relocate(words: &mut [usize], moved: &[Moved]) {
    for word in words {
        let inside = moved.iter().find(|moved| moved.from.contains(*word));
        // Else it may be the address one past the end.
        let found = inside.or_else(|| moved.iter().find(|moved| moved.from.start + moved.from.len == *word));
        if let Some(found) = found {
            *word = word.wrapping_sub(found.from.start).wrapping_add(found.to);
        }
    }
}

/// Returns the whole words among `len` bytes at `start`.
///
/// # Safety
/// The bytes are the caller's alone, for as long as the slice is used.
unsafe fn words_in<'a>(start: usize, len: usize) -> &'a mut [usize] {
    let first = start.next_multiple_of(size_of::<usize>());
    let count = (start + len).saturating_sub(first) / size_of::<usize>();
    // SAFETY: the caller's promise; the address is aligned.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(first), count) }
}

impl Instance {
    /// Takes a snapshot, which can be restored as often as wanted.
    ///
    /// # Errors
    /// [`Error::Entered`], [`Error::Threads`].
    pub fn snapshot(&mut self) -> Result<Snapshot> {
        self.check_unused("take a snapshot of")?;
        let (library, heap) = (&self.core.library, self.core.heap());
        let place: *mut u8 = self.core.place.into();
        // SAFETY: the state has this length, and nobody is in it.
        let state = unsafe { std::slice::from_raw_parts(place, library.image.len()) }.to_vec();
        Ok(Snapshot {
            library: Arc::clone(library),
            place: self.core.place.address,
            core: (&raw const **self.core).cast(),
            state,
            record: heap.record(),
            runs: heap.runs().iter().map(|run| Pages::of(*run)).collect(),
        })
    }

    /// Makes the instance as the snapshot of it has it. What it allocated since is released; descriptors of files, and
    /// memory that it mapped by itself, are not the library's state, and stay.
    ///
    /// # Errors
    /// [`Error::Foreign`], [`Error::Entered`], [`Error::Threads`].
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        if snapshot.place != self.core.place.address || snapshot.core != (&raw const **self.core).cast() {
            return Err(Error::Foreign);
        }
        self.check_unused("restore")?;
        self.forget_threads()?;
        {
            let mut heap = self.core.heap();
            let runs: Vec<Run> = snapshot.runs.iter().map(|pages| pages.run).collect();
            // SAFETY: the record is of this heap, whose memory is written below, before anybody allocates.
            if !unsafe { heap.restore(&snapshot.record, &runs) } {
                return Err(Error::Foreign);
            }
            for pages in &snapshot.runs {
                // SAFETY: the run is the heap's, which cleared it.
                unsafe { pages.write(pages.run) };
            }
        }
        let place: *mut u8 = self.core.place.into();
        // SAFETY: the state is this instance's and has this length; nobody is in it.
        unsafe { place.copy_from_nonoverlapping(snapshot.state.as_ptr(), snapshot.state.len()) };
        self.core.adopt();
        Ok(())
    }
}

impl Instance {
    /// Returns where in this instance, which was created from a snapshot, the copy is of what is at `address` in the
    /// instance that the snapshot is of. So a program finds, for a handle that it got there, the one that is valid here.
    ///
    /// `None` if this is no copy, or the snapshot has no memory at the address.
    #[must_use]
    pub fn copy_of<T>(&self, address: *mut T) -> Option<NonNull<T>> {
        let moved = self.moved.iter().find(|moved| moved.from.contains(address.addr()))?;
        let here = address.addr().wrapping_sub(moved.from.start).wrapping_add(moved.to);
        NonNull::new(std::ptr::with_exposed_provenance_mut(here))
    }
}

impl Snapshot {
    /// Makes another instance of a snapshot, at other addresses, which [`Instance::copy_of`] returns.
    ///
    /// Every aligned word of the state and of the heap that holds an address in the instance's memory is taken for a pointer
    /// and adjusted, as a conservative garbage collector would find it.
    ///
    /// # Errors
    /// [`Error::AddressSpace`], [`Error::System`].
    ///
    /// # Safety
    /// The library stores addresses in its state and heap as whole aligned words, and no number there happens to be one.
    pub unsafe fn create(&self) -> Result<Instance> {
        let mut instance = Instance::bare(&self.library)?;
        let mut record = self.record;
        let state = Run { start: self.place, len: self.state.len() };
        let mut moved = vec![Moved { from: state, to: instance.core.place.address }];
        {
            let mut heap = instance.core.heap();
            let from: Vec<Run> = self.runs.iter().map(|pages| pages.run).collect();
            let to = heap.take_like(&from)?;
            moved.extend(from.iter().zip(&to).map(|(from, to)| Moved { from: *from, to: to.start }));
            // SAFETY: the words of the record are a copy.
            unsafe { relocate(&mut record, &moved) };
            // SAFETY: the runs are the new heap's; its memory is written below, before anybody allocates.
            unsafe { heap.restore(&record, &to) };
            let place: *mut u8 = instance.core.place.into();
            // SAFETY: the memory is the new instance's, in which nobody is, and as long as what is copied.
            unsafe {
                place.copy_from_nonoverlapping(self.state.as_ptr(), self.state.len());
                relocate(words_in(instance.core.place.address, self.state.len()), &moved);
                for (pages, to) in self.runs.iter().zip(&to) {
                    pages.write(*to);
                    for (offset, page) in &pages.pages {
                        relocate(words_in(to.start + offset, page.len()), &moved);
                    }
                }
            }
        }
        instance.core.adopt();
        instance.moved = moved;
        Ok(instance)
    }
}
