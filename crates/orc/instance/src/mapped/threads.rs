//! Threads of instances: their thread-local variables, the destructors of those, and which of them run in an instance.
//!
//! Code that was compiled to be in a shared library finds a thread-local variable by `__tls_get_addr`, with the identifier of
//! its module and an offset (ELF Handling For Thread-Local Storage, 3.4.1). The dynamic loader writes the identifier, so that
//! of an instance is one that the C library does not have, and its call is bound to the function here. An instance has one
//! block for each thread that used one of its variables.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::Cell;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use crate::words::thread_pointer;

/// The bit that distinguishes identifiers of blocks of instances from those of the C library, which count from 1.
const OURS: usize = 1 << 63;
/// How many of the low bits are the slot; the others count up, so that no two instances have the same identifier.
const SLOT_BITS: u32 = 24;

/// What `__tls_get_addr` is called with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Index {
    pub(crate) block: usize,
    pub(crate) offset: usize,
}

type Destructor = unsafe extern "C-unwind" fn(*mut c_void);
type Start = extern "C-unwind" fn(*mut c_void) -> *mut c_void;

unsafe extern "C" {
    fn __tls_get_addr(index: *const Index) -> *mut c_void;
    fn __cxa_thread_atexit_impl(destructor: Destructor, object: *mut c_void, library: *mut c_void) -> c_int;
    fn pthread_create(
        thread: *mut libc::pthread_t,
        attributes: *const libc::pthread_attr_t,
        start: Start,
        argument: *mut c_void,
    ) -> c_int;
}

/// Returns the address of the function that instances call by a name in place of the C library's.
pub(crate) fn replacement(name: &CStr) -> Option<usize> {
    let function = match name.to_bytes() {
        b"__tls_get_addr" => address_of as *const (),
        b"__cxa_thread_atexit" | b"__cxa_thread_atexit_impl" => at_thread_exit as *const (),
        b"pthread_create" => create_thread as *const (),
        _ => return None,
    };
    Some(function.expose_provenance())
}

/// What threads begin with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Template {
    /// The initial bytes, in the mapping of the instance.
    pub(crate) image: usize,
    pub(crate) image_len: usize,
    pub(crate) len: usize,
    pub(crate) align: usize,
}

/// The threads of an instance.
#[derive(Debug)]
pub(crate) struct Threads {
    /// Identifies the block of thread-local variables.
    pub(crate) block: usize,
    /// Where the instance is mapped.
    range: Range<usize>,
    template: Option<Template>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By thread pointer.
    blocks: HashMap<usize, Block>,
    destructors: HashMap<usize, Vec<(Destructor, Object)>>,
    /// How many threads run that the instance made.
    running: usize,
}

/// What a destructor destroys.
#[derive(Clone, Copy, Debug)]
struct Object(*mut c_void);

// SAFETY: the thread that registered it is the one that destroys it.
unsafe impl Send for Object {}

/// A thread's variables.
#[derive(Debug)]
struct Block {
    memory: NonNull<u8>,
    layout: Layout,
    /// Where the variables begin in it.
    start: usize,
}

// SAFETY: the memory is the block's own.
unsafe impl Send for Block {}

impl Block {
    fn new(template: Template) -> Self {
        // The first variable is at an address that is to the alignment as that of the image is.
        let start = template.image % template.align;
        let layout = Layout::from_size_align(start + template.len, template.align.max(16));
        let Ok(layout) = layout else { fatal("thread-local variables of an instance are too large") };
        // SAFETY: the layout has a size, since a template without variables is none.
        let Some(memory) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        let image: *const u8 = std::ptr::with_exposed_provenance(template.image);
        // SAFETY: the image is mapped as long as the instance, and is no longer than the block.
        unsafe { memory.as_ptr().add(start).copy_from_nonoverlapping(image, template.image_len) };
        Self { memory, layout, start }
    }

    fn variables(&self) -> *mut u8 {
        self.memory.as_ptr().wrapping_add(self.start)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and this is its last use.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}

/// The instances of this process.
#[derive(Debug, Default)]
struct Instances {
    /// By the slot in their identifiers.
    slots: Vec<Option<Arc<Threads>>>,
    free: Vec<usize>,
    made: usize,
    /// By where they are mapped.
    places: BTreeMap<usize, Arc<Threads>>,
}

static INSTANCES: Mutex<Instances> =
    Mutex::new(Instances { slots: Vec::new(), free: Vec::new(), made: 0, places: BTreeMap::new() });

fn instances() -> MutexGuard<'static, Instances> {
    INSTANCES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn slot_of(block: usize) -> usize {
    block & ((1 << SLOT_BITS) - 1)
}

/// Returns the instance that has an address.
fn at(address: *const c_void) -> Option<Arc<Threads>> {
    let instances = instances();
    let (_, threads) = instances.places.range(..=address.addr()).next_back()?;
    threads.range.contains(&address.addr()).then(|| Arc::clone(threads))
}

fn fatal(what: &str) -> ! {
    eprintln!("orrery: {what}");
    std::process::abort()
}

impl Threads {
    /// Registers an instance that is mapped at `range`; the template's image is there.
    pub(crate) fn register(range: Range<usize>, template: Option<Template>) -> Arc<Self> {
        let mut instances = instances();
        let slot = instances.free.pop().unwrap_or(instances.slots.len());
        instances.made += 1;
        let block = OURS | instances.made << SLOT_BITS | slot;
        let threads = Arc::new(Self { block, range, template, state: Mutex::default() });
        if slot == instances.slots.len() {
            instances.slots.push(None);
        }
        instances.slots[slot] = Some(Arc::clone(&threads));
        instances.places.insert(threads.range.start, Arc::clone(&threads));
        threads
    }

    /// Ends what [`Threads::register`] began; the blocks of all threads are released.
    pub(crate) fn unregister(&self) {
        let mut instances = instances();
        let slot = slot_of(self.block);
        instances.slots[slot] = None;
        instances.free.push(slot);
        instances.places.remove(&self.range.start);
        drop(instances);
        let blocks = std::mem::take(&mut self.state().blocks);
        drop(blocks);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many other threads run that the instance made, or have variables to destroy.
    pub(crate) fn others(&self) -> usize {
        let state = self.state();
        let own = thread_pointer();
        let with_destructors =
            state.destructors.iter().filter(|(thread, list)| **thread != own && !list.is_empty()).count();
        state.running.max(with_destructors)
    }

    /// Runs the destructors of the calling thread's variables, the last one first.
    pub(crate) fn run_destructors(&self) {
        let own = thread_pointer();
        loop {
            let last = self.state().destructors.get_mut(&own).and_then(Vec::pop);
            let Some((destructor, Object(object))) = last else { break };
            // SAFETY: the code of the instance registered it for this thread, once, and is still mapped.
            unsafe { destructor(object) };
        }
        self.state().destructors.remove(&own);
    }

    /// Returns the calling thread's variables.
    fn variables(self: &Arc<Self>) -> *mut u8 {
        let own = thread_pointer();
        let mut state = self.state();
        if let Some(block) = state.blocks.get(&own) {
            return block.variables();
        }
        let Some(template) = self.template else { fatal("an instance has no thread-local variables") };
        let block = Block::new(template);
        let variables = block.variables();
        state.blocks.insert(own, block);
        variables
    }

    /// Returns the address of a variable in the calling thread.
    pub(crate) fn variable(self: &Arc<Self>, offset: usize) -> *mut u8 {
        let variables = self.variables();
        with_local(|local| {
            local.note(self);
            local.remember(self.block, variables);
        });
        variables.wrapping_add(offset)
    }
}

/// What a thread knows of the instances that it was in.
#[derive(Default)]
struct Local {
    /// Identifiers of blocks and where they are, by slot.
    known: Vec<(usize, *mut u8)>,
    /// Instances of which the thread has variables, or will have, by identifier.
    used: HashMap<usize, Weak<Threads>>,
    /// The instance that made the thread.
    maker: Option<Arc<Threads>>,
    /// How often the destructor of the key has run.
    rounds: u32,
}

thread_local! {
    // Without a destructor, so that it is there for as long as code of the thread runs.
    static LOCAL: Cell<*mut Local> = const { Cell::new(null_mut()) };
}

/// The key whose destructor runs when a thread ends, after all of C++'s.
static KEY: OnceLock<libc::pthread_key_t> = OnceLock::new();

/// Destructors of keys run in so many rounds, as often as keys have values again (PTHREAD_DESTRUCTOR_ITERATIONS).
const ROUNDS: u32 = 4;

/// Has `action` use what the calling thread knows, which ends with that.
fn with_local<T>(action: impl FnOnce(&mut Local) -> T) -> T {
    if LOCAL.get().is_null() {
        let made = Box::into_raw(Box::new(Local::default()));
        LOCAL.set(made);
        set_key(made);
    }
    // SAFETY: it was made by this thread, which alone uses it; no action calls code that gets here.
    action(unsafe { &mut *LOCAL.get() })
}

fn set_key(local: *mut Local) {
    let key = *KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the key is written to `key`; the function has the type that is wanted.
        if unsafe { libc::pthread_key_create(&raw mut key, Some(thread_ends)) } != 0 {
            fatal("there is no thread-specific key left for instances of libraries");
        }
        key
    });
    // SAFETY: the key exists as long as the process.
    if unsafe { libc::pthread_setspecific(key, local.cast()) } != 0 {
        fatal("there is no memory for thread-specific data of instances of libraries");
    }
}

impl Local {
    fn note(&mut self, threads: &Arc<Threads>) {
        if let Entry::Vacant(entry) = self.used.entry(threads.block) {
            entry.insert(Arc::downgrade(threads));
            if self.used.len().is_power_of_two() {
                self.used.retain(|_, used| used.strong_count() > 0);
            }
        }
    }

    fn remember(&mut self, block: usize, variables: *mut u8) {
        let slot = slot_of(block);
        if self.known.len() <= slot {
            self.known.resize(slot + 1, (0, null_mut()));
        }
        self.known[slot] = (block, variables);
    }
}

/// Runs the destructors of a thread's variables in the first round, and forgets the thread in the last: destructors of keys
/// of the instances' own come between.
unsafe extern "C" fn thread_ends(local: *mut c_void) {
    let local = local.cast::<Local>();
    let (last, used) = with_local(|local| {
        local.rounds += 1;
        let used: Vec<Arc<Threads>> = local.used.values().filter_map(Weak::upgrade).collect();
        (local.rounds >= ROUNDS, used)
    });
    for threads in &used {
        threads.run_destructors();
    }
    if !last {
        set_key(local);
        return;
    }
    for threads in &used {
        let block = threads.state().blocks.remove(&thread_pointer());
        drop(block);
    }
    LOCAL.set(null_mut());
    // SAFETY: `with_local` made it so, and this is its last use.
    let local = unsafe { Box::from_raw(local) };
    if let Some(maker) = &local.maker {
        maker.state().running -= 1;
    }
}

/// `__tls_get_addr`: returns the address of a variable in the calling thread.
pub(crate) unsafe extern "C" fn address_of(index: *const Index) -> *mut c_void {
    // SAFETY: compiled code passes two words that were relocated.
    let Index { block, offset } = unsafe { *index };
    if block & OURS == 0 {
        // SAFETY: it is an identifier of the C library, which a relocation took from it.
        return unsafe { __tls_get_addr(index) };
    }
    variable(block, offset).cast()
}

fn variable(block: usize, offset: usize) -> *mut u8 {
    let local = LOCAL.get();
    if !local.is_null() {
        // SAFETY: as in `with_local`.
        let known = unsafe { &(*local).known };
        if let Some((of, variables)) = known.get(slot_of(block))
            && *of == block
        {
            return variables.wrapping_add(offset);
        }
    }
    let found = instances().slots.get(slot_of(block)).cloned().flatten();
    let Some(threads) = found.filter(|threads| threads.block == block) else {
        fatal("code of an instance that was destroyed uses a thread-local variable")
    };
    threads.variable(offset)
}

/// `__cxa_thread_atexit`: registers the destructor of a thread-local object.
unsafe extern "C" fn at_thread_exit(
    destructor: Destructor,
    object: *mut c_void,
    library: *mut c_void,
) -> c_int {
    let Some(threads) = at(library) else {
        // SAFETY: the caller's promise; it is not about an instance.
        return unsafe { __cxa_thread_atexit_impl(destructor, object, library) };
    };
    with_local(|local| local.note(&threads));
    threads.state().destructors.entry(thread_pointer()).or_default().push((destructor, Object(object)));
    0
}

/// A thread that an instance made.
struct Started {
    maker: Arc<Threads>,
    start: Start,
    argument: *mut c_void,
}

/// `pthread_create`: the thread is one of the instance whose function it runs.
unsafe extern "C" fn create_thread(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    let Some(maker) = at(start as *const c_void) else {
        // SAFETY: the caller's promise.
        return unsafe { pthread_create(thread, attributes, start, argument) };
    };
    maker.state().running += 1;
    let started = Box::into_raw(Box::new(Started { maker, start, argument }));
    // SAFETY: the caller's promise; `run` takes what it is given.
    let failed = unsafe { pthread_create(thread, attributes, run, started.cast()) };
    if failed != 0 {
        // SAFETY: it was made above, and no thread has it.
        let started = unsafe { Box::from_raw(started) };
        started.maker.state().running -= 1;
    }
    failed
}

/// Has nothing to drop while the function runs: pthread_exit(3) passes by.
extern "C-unwind" fn run(started: *mut c_void) -> *mut c_void {
    // SAFETY: `create_thread` made it, for this thread alone.
    let Started { maker, start, argument } = *unsafe { Box::from_raw(started.cast::<Started>()) };
    with_local(|local| local.maker = Some(maker));
    start(argument)
}
