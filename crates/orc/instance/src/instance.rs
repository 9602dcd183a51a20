//! An instance: a library's state, and who is in it.

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard};

use crate::abi::Own;
use crate::error::{Error, Result};
use crate::heap::Heap;
use crate::library::Loaded;
use crate::places::Place;
use crate::region::{Moved, region};
use crate::resources::Resources;
use crate::words::{self, thread_pointer};

/// One copy of a library's writable state, with a heap.
///
/// Dropping it releases all of it, and runs the library's destructors. It is leaked where a thread is in it still, as
/// after `mem::forget` of a guard: [`Instance::destroy`] reports that.
#[derive(Debug)]
pub struct Instance {
    pub(crate) core: ManuallyDrop<Box<Core>>,
    /// Of a copy: where the memory of the first instance was, and is here.
    pub(crate) moved: Vec<Moved>,
}

/// What does not move, since the state has its address: that of its first member.
#[repr(C)]
pub(crate) struct Core {
    resources: Resources,
    pub(crate) library: Arc<Loaded>,
    pub(crate) place: Place,
    switch: Switch,
}

/// What entering and leaving use, in one line of the processor's cache.
///
/// The distance that the calling thread's word holds is that of the instance in which it is. An instance holds the distance
/// that was there before it was entered, so that the instances in which a thread is are a list, the innermost first.
#[repr(align(64))]
struct Switch {
    /// Where threads have their word.
    words: words::Place,
    /// From the library's own state to this one.
    delta: isize,
    /// Who entered: a thread pointer, or 0.
    entered: AtomicUsize,
    /// What that thread's word was before. That thread alone uses it.
    previous: AtomicIsize,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Core")
            .field("place", &self.place)
            .field("threads", &self.resources.threads)
            .finish_non_exhaustive()
    }
}

impl Switch {
    /// Returns the word of the calling thread.
    #[inline]
    fn word(&self) -> &AtomicIsize {
        // SAFETY: an instance has its library, which stays loaded; the reference is given to no other thread.
        unsafe { self.words.delta() }
    }

    /// Returns whether the calling thread entered.
    #[inline]
    fn is_entered_here(&self) -> bool {
        self.entered.load(Ordering::Relaxed) == thread_pointer()
    }

    /// Has the calling thread, which is noted as the one that entered, use the state.
    #[inline]
    fn enter(&self) {
        self.previous.store(self.word().load(Ordering::Relaxed), Ordering::Relaxed);
        self.use_at(self.delta);
    }

    /// Has the calling thread use the instance at a distance: this one, or that in which it was before.
    #[inline]
    fn use_at(&self, delta: isize) {
        // SAFETY: as in `word`; an instance that a thread is in lives.
        unsafe { self.words.set(delta) };
    }

    /// Leaves where this is the instance that the calling thread entered last; returns whether it was.
    #[inline]
    fn leave(&self) -> bool {
        if !self.is_entered_here() || self.word().load(Ordering::Relaxed) != self.delta {
            return false;
        }
        self.use_at(self.previous.load(Ordering::Relaxed));
        self.entered.store(0, Ordering::Release);
        true
    }
}

impl Core {
    pub(crate) fn heap(&self) -> MutexGuard<'_, Heap> {
        self.resources.heap()
    }

    /// Returns the runtime's variables in this instance.
    fn own(&self) -> *mut Own {
        self.library.descriptor.own.wrapping_byte_offset(self.switch.delta)
    }

    /// The instance of the library at a distance, which is 0 for the library's own state.
    ///
    /// # Safety
    /// It lives.
    unsafe fn at(&self, delta: isize) -> Option<&Self> {
        if delta == 0 {
            return None;
        }
        let own = self.library.descriptor.own.wrapping_byte_offset(delta);
        // SAFETY: the state of an instance holds its address, see `adopt`.
        unsafe { (*own).instance.cast::<Self>().cast_const().as_ref() }
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
    fn entered_error(&self, action: &'static str) -> Error {
        Error::Entered { action, own: self.switch.is_entered_here() }
    }

    /// Enters where the caller alone has the instance.
    #[inline]
    fn enter_alone(&self) -> Result<()> {
        if self.switch.entered.load(Ordering::Relaxed) != 0 {
            return Err(self.entered_error("enter"));
        }
        self.switch.entered.store(thread_pointer(), Ordering::Relaxed);
        self.switch.enter();
        Ok(())
    }

    /// Enters where other threads may try, too.
    #[inline]
    fn enter_among_others(&self) -> Result<()> {
        let entered = &self.switch.entered;
        if entered.compare_exchange(0, thread_pointer(), Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Err(self.entered_error("enter"));
        }
        self.switch.enter();
        Ok(())
    }

    #[inline]
    fn leave(&self) -> Result<()> {
        if self.switch.leave() {
            return Ok(());
        }
        Err(Error::NotInnermost { entered: self.switch.is_entered_here() })
    }

    /// Leaves an instance from which this thread has entered others: they lead to where this one led.
    #[cold]
    fn leave_outer(&self) {
        if self.switch.is_entered_here() && self.unlink(false, self.switch.previous.load(Ordering::Relaxed)) {
            self.switch.entered.store(0, Ordering::Release);
        }
    }

    /// Unbinds the calling thread, which was attached.
    fn detach(&self) {
        self.unlink(true, 0);
        self.resources.threads.fetch_sub(1, Ordering::Release);
    }

    /// Has the list of instances in which the calling thread is lead to `next` where it leads to this one. A thread that is
    /// attached to this one may have entered it, too: `attached` says which of the two ends. Returns whether it was there.
    fn unlink(&self, attached: bool, next: isize) -> bool {
        let mut word = self.switch.word();
        let mut has_passed = false;
        loop {
            let delta = word.load(Ordering::Relaxed);
            // What a thread is attached to is the end of the list, also where it entered that in between.
            let is_end = !self.switch.is_entered_here() || has_passed;
            if delta == self.switch.delta && (is_end || !attached) {
                word.store(next, Ordering::Relaxed);
                // SAFETY: as in `Switch::word`.
                unsafe { self.switch.words.synchronize() };
                return true;
            }
            // SAFETY: the word is 0, or the distance of an instance in which this thread is, so that one lives.
            let Some(core) = (unsafe { self.at(delta) }) else { return false };
            if !core.switch.is_entered_here() || std::ptr::eq(word, &raw const core.switch.previous) {
                return false;
            }
            has_passed |= std::ptr::eq(core, self);
            word = &core.switch.previous;
        }
    }

    /// Fails where a thread is in the instance.
    fn check_unused(&self, action: &'static str) -> Result<()> {
        if self.switch.entered.load(Ordering::Acquire) != 0 {
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
            switch: Switch {
                words: library.words,
                delta: place.address.wrapping_sub(library.image.start).cast_signed(),
                entered: AtomicUsize::new(0),
                previous: AtomicIsize::new(0),
            },
        });
        core.adopt();
        Ok(Self { core: ManuallyDrop::new(core), moved: Vec::new() })
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
    /// [`Error::Attached`] where the thread is in an instance of the library; [`Error::Entered`].
    ///
    /// # Safety
    /// The library may be used by several threads at a time, as far as these threads use it.
    pub unsafe fn attach(&self) -> Result<Attached<'_>> {
        let switch = &self.core.switch;
        if switch.word().load(Ordering::Relaxed) != 0 {
            return Err(Error::Attached);
        }
        // A thread that has ended may have had this one's thread pointer.
        if switch.is_entered_here() {
            return Err(self.core.entered_error("attach a thread to"));
        }
        self.core.resources.threads.fetch_add(1, Ordering::Relaxed);
        switch.use_at(switch.delta);
        Ok(Attached { core: &self.core, of_thread: PhantomData })
    }

    /// Unbinds the calling thread where the guard was forgotten, as C programs do.
    ///
    /// # Errors
    /// [`Error::NotInnermost`].
    pub fn detach(&self) -> Result<()> {
        let switch = &self.core.switch;
        if switch.word().load(Ordering::Relaxed) != switch.delta || switch.is_entered_here() {
            return Err(Error::NotInnermost { entered: false });
        }
        self.core.detach();
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
        Ok(if is_state { unsafe { own.byte_offset(self.core.switch.delta) } } else { own })
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
        if !self.core.switch.leave() {
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
        self.core.detach();
    }
}
