//! An instance: a library's state, and who is in it.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard};

use crate::abi::{Own, Words};
use crate::error::{Error, Result};
use crate::heap::Heap;
use crate::library::Loaded;
use crate::places::Place;
use crate::region::region;
use crate::resources::Resources;
use crate::words::thread_pointer;

/// One copy of a library's writable state, with a heap.
///
/// Dropping it releases all of it, and runs the library's destructors. It is leaked where a thread is in it still, as
/// after `mem::forget` of a guard: [`Instance::destroy`] reports that.
#[derive(Debug)]
pub struct Instance {
    pub(crate) core: ManuallyDrop<Box<Core>>,
}

/// What does not move, since the state has its address: that of its first member.
#[repr(C)]
pub(crate) struct Core {
    resources: Resources,
    pub(crate) library: Arc<Loaded>,
    pub(crate) place: Place,
    delta: isize,
    /// Who entered: a thread pointer, or 0.
    entered: AtomicUsize,
    /// What that thread's words were before.
    previous: UnsafeCell<Words>,
}

// SAFETY: `previous` is used by the thread that entered, alone.
unsafe impl Send for Core {}
// SAFETY: as above; the rest is atomic or under a lock.
unsafe impl Sync for Core {}

impl std::fmt::Debug for Core {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Core")
            .field("place", &self.place)
            .field("threads", &self.resources.threads)
            .finish_non_exhaustive()
    }
}

const NO_WORDS: Words = Words {
    delta: 0,
    block: std::ptr::null_mut(),
    instance: std::ptr::null_mut(),
    blocks: std::ptr::null_mut(),
};

impl Core {
    pub(crate) fn heap(&self) -> MutexGuard<'_, Heap> {
        self.resources.heap()
    }

    /// The runtime's variables in this instance.
    fn own(&self) -> *mut Own {
        self.library.descriptor.own.wrapping_byte_offset(self.delta)
    }

    /// Has the state lead here; a copy of a state has no thread-local variables.
    pub(crate) fn adopt(&self) {
        // SAFETY: the state is this instance's, in which nobody is.
        unsafe {
            (*self.own()).instance = std::ptr::from_ref(self).cast_mut().cast();
            (*self.own()).blocks = std::ptr::null_mut();
        }
    }

    #[inline]
    fn switch(&self) {
        // SAFETY: the words are this thread's; `previous` is its, too, since it is the one that enters.
        unsafe {
            let words = self.library.words.words();
            *self.previous.get() = *words;
            (*words).delta = self.delta;
            (*words).block = std::ptr::null_mut();
            (*words).instance = std::ptr::from_ref(self).cast_mut().cast();
        }
    }

    #[inline]
    fn entered_error(&self, action: &'static str) -> Error {
        Error::Entered { action, own: self.entered.load(Ordering::Relaxed) == thread_pointer() }
    }

    /// Enters where the caller alone has the instance.
    #[inline]
    fn enter_alone(&self) -> Result<()> {
        if self.entered.load(Ordering::Relaxed) != 0 {
            return Err(self.entered_error("enter"));
        }
        self.entered.store(thread_pointer(), Ordering::Relaxed);
        self.switch();
        Ok(())
    }

    /// Enters where other threads may try, too.
    #[inline]
    fn enter_among_others(&self) -> Result<()> {
        if self.entered.compare_exchange(0, thread_pointer(), Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Err(self.entered_error("enter"));
        }
        self.switch();
        Ok(())
    }

    #[inline]
    fn leave(&self) -> Result<()> {
        let here = self.entered.load(Ordering::Relaxed) == thread_pointer();
        // SAFETY: the words are this thread's; `previous` is its, if it entered.
        unsafe {
            let words = self.library.words.words();
            if !here || (*words).instance.cast_const() != std::ptr::from_ref(self).cast() {
                return Err(Error::NotInnermost { entered: here });
            }
            let previous = *self.previous.get();
            (*words).delta = previous.delta;
            // Of two instances in turn, each finds its thread-local variables again by a look-up.
            (*words).block = previous.block;
            (*words).instance = previous.instance;
        }
        self.entered.store(0, Ordering::Release);
        Ok(())
    }

    /// Leaves an instance from which this thread has entered others: they lead to where this one led.
    #[cold]
    fn leave_outer(&self) {
        if self.entered.load(Ordering::Relaxed) != thread_pointer() {
            return;
        }
        let this: *const c_void = std::ptr::from_ref(self).cast();
        // SAFETY: the words are this thread's, and the instances that they lead to are entered, so they live.
        unsafe {
            let mut words = self.library.words.words();
            while !(*words).instance.is_null() && (*words).instance.cast_const() != this {
                words = (*(*words).instance.cast::<Core>()).previous.get();
            }
            if (*words).instance.is_null() {
                return;
            }
            let previous = *self.previous.get();
            (*words).delta = previous.delta;
            (*words).block = previous.block;
            (*words).instance = previous.instance;
        }
        self.entered.store(0, Ordering::Release);
    }

    /// Fails where a thread is in the instance.
    fn check_unused(&self, action: &'static str) -> Result<()> {
        if self.entered.load(Ordering::Acquire) != 0 {
            return Err(self.entered_error(action));
        }
        match self.resources.threads.load(Ordering::Acquire) {
            0 => Ok(()),
            count => Err(Error::Threads { action, count }),
        }
    }

    /// Runs a function of the library's runtime in the instance, in which nobody is.
    fn run(&self, function: unsafe extern "C" fn()) -> Result<()> {
        self.enter_among_others()?;
        // SAFETY: it is a function of the library, and the thread is in the instance.
        unsafe { function() };
        self.leave()
    }
}

impl Instance {
    pub(crate) fn create(library: &Arc<Loaded>) -> Result<Self> {
        let instance = Self::bare(library)?;
        if library.has_constructors {
            instance.core.run(library.descriptor.construct)?;
        }
        Ok(instance)
    }

    /// Makes an instance whose constructors did not run.
    pub(crate) fn bare(library: &Arc<Loaded>) -> Result<Self> {
        let place = library.places.take(&library.image)?;
        let limit = if library.options.heap_limit == 0 { usize::MAX } else { library.options.heap_limit };
        let core = Box::new(Core {
            resources: Resources::new(Heap::new(region()?, limit)),
            library: Arc::clone(library),
            place: place.used(),
            delta: place.address.wrapping_sub(library.image.start).cast_signed(),
            entered: AtomicUsize::new(0),
            previous: UnsafeCell::new(NO_WORDS),
        });
        core.adopt();
        Ok(Self { core: ManuallyDrop::new(core) })
    }

    /// Has the calling thread use this instance until the guard is dropped. Instances can be entered from callbacks of
    /// others: the guard returns to what was before. Calls and callbacks of the library within need not enter again.
    ///
    /// # Errors
    /// [`Error::Entered`] where a guard was forgotten, or skipped by longjmp(3).
    #[inline]
    pub fn enter(&mut self) -> Result<Entered<'_>> {
        self.core.enter_alone()?;
        Ok(Entered { core: &self.core, of_thread: PhantomData })
    }

    /// Enters without a guard, for callers that no compiler checks, such as C programs.
    ///
    /// # Errors
    /// [`Error::Entered`]: one thread is in an instance at a time, and once.
    ///
    /// # Safety
    /// The instance lives until [`Instance::leave`], which the same thread calls.
    #[inline]
    pub unsafe fn enter_unguarded(&self) -> Result<()> {
        self.core.enter_among_others()
    }

    /// Leaves what [`Instance::enter_unguarded`] entered.
    ///
    /// # Errors
    /// [`Error::NotInnermost`].
    #[inline]
    pub fn leave(&self) -> Result<()> {
        self.core.leave()
    }

    /// Binds the calling thread to this instance, beside other threads, until the guard is dropped.
    ///
    /// Threads that the library makes by pthread_create(3) are in the instance of who made them without this.
    ///
    /// # Errors
    /// [`Error::Attached`] where the thread is in an instance of the library.
    ///
    /// # Safety
    /// The library may be used by several threads at a time, as far as these threads use it.
    pub unsafe fn attach(&self) -> Result<Attached<'_>> {
        let words = self.core.library.words.words();
        // SAFETY: the words are this thread's.
        unsafe {
            if !(*words).instance.is_null() {
                return Err(Error::Attached);
            }
            self.core.resources.threads.fetch_add(1, Ordering::Relaxed);
            (*words).delta = self.core.delta;
            (*words).block = std::ptr::null_mut();
            (*words).instance = (&raw const **self.core).cast_mut().cast();
        }
        Ok(Attached { core: &self.core, of_thread: PhantomData })
    }

    /// Unbinds the calling thread where the guard was forgotten, as C programs do.
    ///
    /// # Errors
    /// [`Error::NotInnermost`].
    pub fn detach(&self) -> Result<()> {
        let words = self.core.library.words.words();
        // SAFETY: the words are this thread's.
        let here = unsafe { (*words).instance.cast_const() == (&raw const **self.core).cast() };
        if !here || self.core.entered.load(Ordering::Relaxed) == thread_pointer() {
            return Err(Error::NotInnermost { entered: false });
        }
        drop(Attached { core: &self.core, of_thread: PhantomData });
        Ok(())
    }

    /// Returns the address of a variable of the library in this instance. Of what all instances share, it is the one
    /// address that there is.
    ///
    /// # Errors
    /// [`Error::Symbol`].
    pub fn variable(&self, name: &CStr) -> Result<NonNull<c_void>> {
        let image = &self.core.library.image;
        let own = self.core.library.symbol(name)?;
        let is_state = own.addr().get().wrapping_sub(image.start) < image.len();
        // SAFETY: what is in the library's own state has its place in the instance's.
        Ok(if is_state { unsafe { own.byte_offset(self.core.delta) } } else { own })
    }

    /// Makes the instance as it was when it was created: its state is the first one, its heap is empty; destructors do not
    /// run, constructors do.
    ///
    /// # Errors
    /// [`Error::Entered`], [`Error::Threads`], [`Error::System`].
    pub fn reset(&mut self) -> Result<()> {
        self.core.check_unused("reset")?;
        let library = &self.core.library;
        self.core.run(library.descriptor.forget)?;
        self.core.heap().clear();
        library.places.reset(&library.image, self.core.place)?;
        self.core.adopt();
        if library.has_constructors {
            self.core.run(library.descriptor.construct)?;
        }
        Ok(())
    }

    pub(crate) fn check_unused(&self, action: &'static str) -> Result<()> {
        self.core.check_unused(action)
    }

    /// Drops all threads' thread-local variables.
    pub(crate) fn forget_threads(&self) -> Result<()> {
        self.core.run(self.core.library.descriptor.forget)
    }

    /// Runs the library's destructors and functions at exit, and releases the state and everything that was allocated.
    ///
    /// # Errors
    /// [`Error::Entered`], [`Error::Threads`], with the instance, which is as it was.
    pub fn destroy(self) -> std::result::Result<(), (Self, Error)> {
        match self.core.check_unused("destroy") {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let destructed = self
            .core
            .check_unused("destroy")
            .and_then(|()| self.core.run(self.core.library.descriptor.destruct))
            // Destructors may make threads.
            .and_then(|()| self.core.check_unused("destroy"));
        // Else a thread uses the state, and finds the core by it: both stay. So does the library.
        if destructed.is_ok() {
            let library = &self.core.library;
            library.places.give(&library.image, self.core.place);
            // SAFETY: this is the last use of it.
            unsafe { ManuallyDrop::drop(&mut self.core) };
        }
    }
}

/// The calling thread is in an instance.
#[derive(Debug)]
pub struct Entered<'a> {
    core: &'a Core,
    of_thread: PhantomData<*mut ()>,
}

impl Entered<'_> {
    /// Runs `action` in the instance, and leaves it.
    pub fn run<T>(self, action: impl FnOnce() -> T) -> T {
        action()
    }
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.core.leave().is_err() {
            self.core.leave_outer();
        }
    }
}

/// The calling thread is bound to an instance.
#[derive(Debug)]
pub struct Attached<'a> {
    core: &'a Core,
    of_thread: PhantomData<*mut ()>,
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        let words = self.core.library.words.words();
        // SAFETY: the words are this thread's, which was in no instance before.
        unsafe {
            (*words).delta = 0;
            (*words).block = std::ptr::null_mut();
            (*words).instance = std::ptr::null_mut();
        }
        self.core.resources.threads.fetch_sub(1, Ordering::Release);
    }
}
