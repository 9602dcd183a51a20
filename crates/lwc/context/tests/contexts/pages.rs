//! Memory that cases have contexts share, go without, and lay over one another's.

use std::ffi::c_void;
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicU64;

use orrery_context::{Context, Error, Overlay, Spec, remove_overlay};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

pub(crate) const PAGE: usize = 4096;

/// New memory that nobody else refers to.
pub(crate) fn anonymous(pages: usize, flags: MapFlags) -> *mut c_void {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, where the kernel likes: it takes no other one's place.
    unsafe { mmap_anonymous(std::ptr::null_mut(), pages * PAGE, protection, flags) }.unwrap()
}

/// Private pages that are mapped until the process ends, for contexts to share, to go without, and to lay over one
/// another's.
///
/// They are known by their address, as what is there differs from context to context. No reference leads there, but to
/// an atomic word; so they may change and go whenever control does. Where a case had them unmapped, it does not touch
/// them.
#[derive(Clone, Copy)]
pub(crate) struct Pages {
    start: usize,
    count: usize,
}

impl Pages {
    pub(crate) fn new(count: usize) -> Self {
        Self { start: anonymous(count, MapFlags::PRIVATE).expose_provenance(), count }
    }

    /// `count` of these pages, from number `first` on.
    pub(crate) fn part(self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.count);
        Self { start: self.start + first * PAGE, count }
    }

    pub(crate) fn address(self) -> usize {
        self.start
    }

    fn start(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.start)
    }

    fn length(self) -> usize {
        self.count * PAGE
    }

    /// Returns where byte `at` is.
    pub(crate) fn byte(self, at: usize) -> *mut u8 {
        assert!(at < self.length());
        std::ptr::with_exposed_provenance_mut(self.start + at)
    }

    pub(crate) fn peek(self, at: usize) -> u8 {
        // SAFETY: within these pages, which are mapped wherever a case looks into them, and to which no reference leads
        // but of an atomic.
        unsafe { self.byte(at).read_volatile() }
    }

    pub(crate) fn poke(self, at: usize, byte: u8) {
        // SAFETY: within these pages, which are mapped wherever a case writes to them, and writable by the time the
        // write is done, and to which no reference leads but of an atomic.
        unsafe { self.byte(at).write_volatile(byte) }
    }

    pub(crate) fn fill(self, byte: u8) {
        (0..self.length()).for_each(|at| self.poke(at, byte));
    }

    /// Writes at the beginning.
    pub(crate) fn put(self, bytes: &[u8]) {
        bytes.iter().enumerate().for_each(|(at, byte)| self.poke(at, *byte));
    }

    /// Reads from the beginning.
    pub(crate) fn get<const LENGTH: usize>(self) -> [u8; LENGTH] {
        std::array::from_fn(|at| self.peek(at))
    }

    /// The word at the beginning, of pages that are not taken away.
    pub(crate) fn word(self) -> &'static AtomicU64 {
        // SAFETY: aligned as a page is, within pages that stay, and changed by others as an atomic only.
        unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(self.start)) }
    }

    /// Has them shared by who is created to that order.
    pub(crate) fn shared(self, spec: Spec) -> Spec {
        // SAFETY: mapped, and known to no allocator; they hold numbers and no pointers, and no reference leads there
        // but to an atomic, which may change at any time.
        unsafe { spec.share(self.start(), self.length()) }
    }

    /// Has who is created to that order go without them.
    pub(crate) fn unmapped(self, spec: Spec) -> Spec {
        // SAFETY: a mapping of its own, with no stack, code or allocator in it; a case that goes without it does not
        // use it.
        unsafe { spec.unmap(self.start(), self.length()) }
    }

    /// Lays what `context` has there over one's own.
    pub(crate) fn overlay(self, context: Context, how: Overlay) -> Result<(), Error> {
        // SAFETY: nothing else is there than what the case put there for this, no reference leads there, and what is
        // read are bytes of whatever value.
        unsafe { context.overlay(self.start(), self.length(), how) }
    }

    pub(crate) fn remove_overlay(self) -> Result<(), Error> {
        // SAFETY: the pages are a mapping of the case's own, to which no reference leads.
        unsafe { remove_overlay(self.start(), self.length()) }
    }

    /// Takes them from the calling process.
    pub(crate) fn remove(self) {
        // SAFETY: our own mapping, to which no reference leads; the case does not touch it any more.
        unsafe { munmap(self.start().cast(), self.length()) }.unwrap();
    }
}

/// Returns whether something is mapped at an address, as the kernel finds it.
pub(crate) fn is_mapped(address: *const u8) -> bool {
    let (_read, write) = rustix::pipe::pipe().unwrap();
    // SAFETY: the kernel reads the byte, not this program, and says EFAULT where there is none.
    unsafe { libc::write(write.as_raw_fd(), address.cast(), 1) == 1 }
}
