//! In the orbit: the checking mode, in which tasks have only what was passed.
//!
//! While a task runs, the memory that the orbit took over from main and that main could write to, and all areas, are
//! not accessible. Each access faults; the handler notes address, value and instruction in the [`CheckLog`], makes the
//! page accessible for that one instruction (the trap flag, SIGTRAP), and the task goes on. Main, which alone knows
//! what it passed and freed, judges what was noted ([`crate::findings`]).
//!
//! What is not noted:
//!
//! - memory that the orbit has changed itself since its creation, such as its store: a *reference* child, forked before
//!   the init function, has it as of the creation;
//! - what the C library and the dynamic loader touch for themselves, such as lists of free memory, and the pages of
//!   that. [`LEAVES`] that the task calls, such as memcpy(3), work for the task;
//! - what a process touches that a task forked;
//! - code, constants, the stack, thread-local storage, the data of the C and C++ runtimes and of this library;
//! - after so many accesses to a page ([`ACCESSES`]), the rest of them.

use core::ffi::{CStr, c_int, c_void};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use orrery_domain::{Result, SharedMemory, watcher_stack};
use orrery_memory::area::View;
use orrery_sys::maps::{Access, Maps};
use orrery_sys::{PAGE, PageRange, process_memory};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// How many accesses to a page are noted during a task.
const ACCESSES: u8 = 64;
/// How much memory of a heap counts as changed where a byte of it is, a power of two.
const AROUND: usize = 64;
/// How many pages are counted apart.
const COUNTERS: usize = 1 << 16;
/// How many pages one instruction may touch.
const STEP: usize = 8;
/// How many accesses are kept for main.
const ENTRIES: usize = 1 << 14;
/// The trap flag of the processor.
const TRAP_FLAG: i64 = 0x100;
/// The bit of the fault's code that says that the access was a write.
const WRITE: i64 = 2;

/// Functions of the C library that work on memory which the task gives them, and how far their code reaches at most.
const LEAVES: [&CStr; 24] = [
    c"memcpy",
    c"memmove",
    c"mempcpy",
    c"memcmp",
    c"bcmp",
    c"memchr",
    c"memrchr",
    c"rawmemchr",
    c"memset",
    c"strlen",
    c"strnlen",
    c"strcmp",
    c"strncmp",
    c"strcasecmp",
    c"strncasecmp",
    c"strchr",
    c"strchrnul",
    c"strrchr",
    c"strcpy",
    c"stpcpy",
    c"strncpy",
    c"strcat",
    c"strstr",
    c"wcslen",
];
const LEAF: usize = 2048;

/// An access of a task's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Noted {
    pub(crate) address: usize,
    /// The aligned word at the address, as the orbit has it; `None` in areas.
    pub(crate) value: Option<u64>,
    pub(crate) instruction: usize,
}

#[repr(C)]
struct Entry {
    address: AtomicU64,
    value: AtomicU64,
    has_value: AtomicU64,
    instruction: AtomicU64,
}

/// Accesses, from the orbit to main, which believes nothing of it but shows it to people.
#[derive(Debug)]
pub(crate) struct CheckLog(SharedMemory);

impl CheckLog {
    pub(crate) fn new() -> Result<Self> {
        SharedMemory::for_domains("orrery-check", 64 + ENTRIES * size_of::<Entry>()).map(Self)
    }

    /// Returns the memory, which the orbit inherits.
    pub(crate) fn memory(&self) -> &SharedMemory {
        &self.0
    }

    fn place(&self) -> LogPlace {
        LogPlace(self.0.start())
    }

    /// Main's: takes what the task that has just ended touched.
    pub(crate) fn take(&self) -> Vec<Noted> {
        let place = self.place();
        let count = (place.count().swap(0, Ordering::AcqRel) as usize).min(ENTRIES);
        let number = |word: &AtomicU64| usize::try_from(word.load(Ordering::Relaxed)).unwrap_or(0);
        let one = |index| {
            let entry = place.entry(index);
            let value =
                (entry.has_value.load(Ordering::Relaxed) != 0).then(|| entry.value.load(Ordering::Relaxed));
            Noted { address: number(&entry.address), value, instruction: number(&entry.instruction) }
        };
        (0..count).map(one).collect()
    }
}

/// Where a log is. The handler cannot use the handle, which is memory that it guards.
#[derive(Clone, Copy)]
struct LogPlace(NonNull<u8>);

impl LogPlace {
    fn count(&self) -> &AtomicU32 {
        // SAFETY: the log, which outlives all that know its place, begins with a zeroed word that is used as an atomic
        // only.
        unsafe { self.0.cast::<AtomicU32>().as_ref() }
    }

    fn entry(&self, index: usize) -> &Entry {
        debug_assert!(index < ENTRIES);
        // SAFETY: behind 64 bytes there is room for so many entries, all atomics.
        unsafe { self.0.add(64).cast::<Entry>().add(index).as_ref() }
    }

    /// The orbit's. Async-signal-safe.
    fn note(&self, noted: Noted) {
        let index = self.count().load(Ordering::Relaxed) as usize;
        if index < ENTRIES {
            let entry = self.entry(index);
            entry.address.store(noted.address as u64, Ordering::Relaxed);
            entry.value.store(noted.value.unwrap_or(0), Ordering::Relaxed);
            entry.has_value.store(u64::from(noted.value.is_some()), Ordering::Relaxed);
            entry.instruction.store(noted.instruction as u64, Ordering::Relaxed);
            self.count().store(u32::try_from(index + 1).unwrap_or(0), Ordering::Release);
        }
    }
}

/// Memory that tasks may not touch unnoticed.
#[derive(Clone, Copy, Debug)]
struct Guarded {
    range: PageRange,
    is_area: bool,
    /// Variables of a module.
    is_module: bool,
}

/// What the handler knows; in a mapping of its own, since it cannot use memory that it guards.
struct Checker {
    log: LogPlace,
    guarded: &'static mut [Guarded],
    libraries: &'static [PageRange],
    leaves: [usize; LEAVES.len()],
    counters: &'static mut [u8],
    /// The process with the memory as of the orbit's creation.
    reference: libc::pid_t,
    process: libc::pid_t,
    active: bool,
    /// Whether it was active when a fork began.
    forking: bool,
    /// How many bytes are guarded: they do not count as the process' data meanwhile.
    bytes: u64,
    stepping: [usize; STEP],
    steps: usize,
}

/// The handler's only way to it: a page that is never guarded.
#[repr(align(4096))]
struct OwnPage(AtomicPtr<Checker>);
static CHECKER: OwnPage = OwnPage(AtomicPtr::new(core::ptr::null_mut()));

fn checker() -> Option<&'static mut Checker> {
    // SAFETY: null, or made by `install` for good. Only the orbit's one thread and the handler, which interrupts it at
    // instructions of the task and never in here, use it.
    unsafe { CHECKER.0.load(Ordering::SeqCst).as_mut() }
}

/// What [`prepare`] found before the init function ran.
pub(crate) struct Inherited {
    ranges: Vec<PageRange>,
    modules: Vec<PageRange>,
    libraries: Vec<PageRange>,
    leaves: [usize; LEAVES.len()],
    reference: libc::pid_t,
}

/// Finds what the orbit took over from main, and makes the reference. Before the init function runs.
pub(crate) fn prepare() -> Option<Inherited> {
    let maps = Maps::open().ok()?;
    let local = 0_u8;
    let here = [core::ptr::from_ref(&local).addr(), thread_pointer()];
    let (mut ranges, mut modules, mut libraries) = (Vec::new(), Vec::<PageRange>::new(), Vec::new());
    let mut runtime_end = 0;
    maps.for_each(&mut vec![0; 64 << 10], |entry| {
        let file = entry.name.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        let begins = |with: &[u8]| entry.name.starts_with(b"/") && file.starts_with(with);
        let is_libc = begins(b"libc.so") || begins(b"libc-2") || begins(b"ld-linux") || begins(b"ld-2");
        let runtime = [&b"libstdc++.so"[..], b"libgcc_s", b"libm.so", b"libpthread", b"liborrery.so"];
        // A module's zeroed data follows it without a name.
        let is_runtime = is_libc
            || runtime.iter().any(|name| begins(name))
            || entry.name.is_empty() && entry.range.start == runtime_end;
        let follows =
            entry.name.is_empty() && modules.last().is_some_and(|last| last.end == entry.range.start);
        if entry.name.starts_with(b"/") || follows {
            modules.push(entry.range);
        }
        if is_runtime {
            runtime_end = entry.range.end;
        }
        if is_libc && entry.access.contains(Access::EXECUTE) {
            libraries.push(entry.range);
        }
        let stack = entry.name.starts_with(b"[stack") || entry.range.contains(here[0]);
        // Thread-local storage has a mapping of its own, unless the program is static.
        let local_storage = entry.range.contains(here[1]) && entry.range.len() <= 1 << 20;
        let writable = entry.access.contains(Access::READ | Access::WRITE);
        if writable
            && !entry.access.intersects(Access::SHARED | Access::EXECUTE)
            && !is_runtime
            && !stack
            && !local_storage
        {
            ranges.push(entry.range);
        }
        Ok(())
    })
    .ok()?;
    let around = |address: usize| {
        let page = address & !(PAGE - 1);
        PageRange::new(page - 16 * PAGE, page + 2 * PAGE)
    };
    let own = core::ptr::from_ref(&CHECKER).addr();
    without(&mut ranges, PageRange::new(own, own + PAGE));
    without(&mut ranges, around(here[1]));
    // The handler's own.
    // SAFETY: all zeros are a valid `stack_t`, which the kernel fills in.
    let handlers = unsafe {
        let mut stack: libc::stack_t = core::mem::zeroed();
        libc::sigaltstack(core::ptr::null(), &raw mut stack);
        stack
    };
    let handlers = PageRange::new(handlers.ss_sp.addr(), handlers.ss_sp.addr() + handlers.ss_size);
    without(&mut ranges, handlers);
    if let Some(stack) = watcher_stack() {
        without(&mut ranges, stack);
    }
    // SAFETY: asks for a number; the child does nothing but wait to be killed, with the orbit at the latest.
    let (orbit, reference) = unsafe { (libc::getpid(), libc::fork()) };
    if reference == 0 {
        loop {
            // SAFETY: the calls take numbers only, and change no memory of this process.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if libc::getppid() != orbit {
                    libc::_exit(0);
                }
                libc::pause();
            }
        }
    }
    use_up_heaps(&ranges);
    let mut byte = [0; 1];
    let readable = reference > 0 && process_memory::read(reference, own as u64, &mut byte).is_ok();
    // Without a reference what main passed otherwise cannot be distinguished from the orbit's own; areas can be
    // checked. SAFETY: looks up names; what comes back is the variant for this processor.
    let leaves = LEAVES.map(|name| unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.addr());
    let leaves = leaves.map(|address| if address == 0 { usize::MAX - LEAF } else { address });
    Some(Inherited {
        leaves,
        ranges: if readable { ranges } else { Vec::new() },
        modules,
        libraries,
        reference,
    })
}

fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: on x86-64 the first word of a thread's block is its own address.
    unsafe { core::arch::asm!("mov {}, fs:[0]", out(reg) pointer, options(nostack, readonly, pure)) };
    pointer
}

/// Takes `hole` out of the ranges.
fn without(ranges: &mut Vec<PageRange>, hole: PageRange) {
    let parts = ranges.iter().flat_map(|range| {
        let before = PageRange::new(range.start, range.end.min(hole.start).max(range.start));
        let after = PageRange::new(range.start.max(hole.end).min(range.end), range.end);
        if range.overlaps(hole) { [before, after] } else { [*range, PageRange::default()] }
    });
    *ranges = parts.filter(|range| !range.is_empty()).collect();
}

/// Takes what is free in the heaps that were main's, so that what tasks allocate comes from new memory: it would be
/// taken for main's otherwise, and the kernel could not write to it. Only small blocks still come from there.
fn use_up_heaps(inherited: &[PageRange]) {
    const SIZES: [usize; 5] = [64 << 10, 16 << 10, 4 << 10, 1 << 10, 256];
    const MOST: usize = 1 << 16;
    for size in SIZES {
        for _ in 0..MOST {
            // SAFETY: the block is never used nor freed.
            let block = unsafe { libc::malloc(size) }.addr();
            if !inherited.iter().any(|range| range.contains(block)) {
                break;
            }
        }
    }
}

/// Room for `count` values in a mapping of its own, which stays.
fn mapped<T>(count: usize) -> Option<*mut T> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let bytes = (count.max(1) * size_of::<T>()).next_multiple_of(PAGE);
    // SAFETY: a new mapping replaces no mapping.
    unsafe { rustix::mm::mmap_anonymous(core::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }
        .ok()
        .map(<*mut c_void>::cast)
}

/// Turns the mode on for the tasks to come.
pub(crate) fn install(inherited: &Inherited, view: &View, log: &'static CheckLog) {
    let areas: Vec<PageRange> = view.ranges().collect();
    let mut all: Vec<Guarded> =
        areas.iter().map(|range| Guarded { range: *range, is_area: true, is_module: false }).collect();
    let mut others = inherited.ranges.clone();
    areas.iter().for_each(|area| without(&mut others, *area));
    let mut heap = others.clone();
    inherited.modules.iter().for_each(|module| without(&mut heap, *module));
    heap.iter().for_each(|range| without(&mut others, *range));
    let guarded = |is_module| move |range| Guarded { range, is_area: false, is_module };
    all.extend(heap.into_iter().map(guarded(false)));
    all.extend(others.into_iter().map(guarded(true)));
    all.sort_by_key(|guarded| guarded.range.start);
    let made =
        (mapped::<Guarded>(all.len()), mapped::<PageRange>(inherited.libraries.len()), mapped(COUNTERS));
    let (Some(guarded), Some(libraries), Some(counters), Some(place)) =
        (made.0, made.1, made.2, mapped::<Checker>(1))
    else {
        return;
    };
    // SAFETY: fresh memory with room for all of it, which stays and nobody else knows.
    unsafe {
        guarded.copy_from_nonoverlapping(all.as_ptr(), all.len());
        libraries.copy_from_nonoverlapping(inherited.libraries.as_ptr(), inherited.libraries.len());
        place.write(Checker {
            log: log.place(),
            guarded: core::slice::from_raw_parts_mut(guarded, all.len()),
            libraries: core::slice::from_raw_parts(libraries, inherited.libraries.len()),
            leaves: inherited.leaves,
            counters: core::slice::from_raw_parts_mut(counters, COUNTERS),
            reference: inherited.reference,
            process: libc::getpid(),
            active: false,
            forking: false,
            bytes: all.iter().map(|guarded| guarded.range.len() as u64).sum(),
            stepping: [0; STEP],
            steps: 0,
        });
    }
    CHECKER.0.store(place, Ordering::SeqCst);
    // SAFETY: registers functions that make system calls only. Without memory for that, a child of a task's may find
    // memory guarded while it blocks the handler's signals.
    let _ = unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), None) };
}

/// What is forked is born with all its memory: it is not checked, and handlers of forks may block all signals.
extern "C" fn before_fork() {
    let was_active = end();
    if let Some(checker) = checker() {
        checker.forking = was_active;
    }
}

extern "C" fn after_fork() {
    again(checker().is_some_and(|checker| core::mem::take(&mut checker.forking)));
}

/// Guards memory, before a task.
pub(crate) fn begin() {
    if let Some(checker) = checker() {
        checker.counters.fill(0);
        checker.guard(true);
    }
}

/// Makes all memory accessible again, after a task or while this library works for one. Returns whether it was guarded.
/// Async-signal-safe.
pub(crate) fn end() -> bool {
    checker().is_some_and(|checker| {
        core::mem::take(&mut checker.active) && {
            checker.guard(false);
            true
        }
    })
}

/// Guards memory again where [`end`] said that it had been.
pub(crate) fn again(was: bool) {
    if let (true, Some(checker)) = (was, checker()) {
        checker.guard(true);
    }
}

fn protect(range: PageRange, accessible: bool) -> bool {
    let access = if accessible { MprotectFlags::READ | MprotectFlags::WRITE } else { MprotectFlags::empty() };
    // SAFETY: the ranges are readable and writable memory of the task's; while they are guarded the handler serves it.
    unsafe { rustix::mm::mprotect(core::ptr::without_provenance_mut(range.start), range.len(), access) }
        .is_ok()
}

fn page_of(address: usize) -> PageRange {
    PageRange::new(address & !(PAGE - 1), (address & !(PAGE - 1)) + PAGE)
}

impl Checker {
    fn guard(&mut self, on: bool) {
        self.active = on;
        self.steps = 0;
        if !on {
            self.limit_data(on);
        }
        for guarded in self.guarded.iter() {
            protect(guarded.range, !on);
        }
        if on {
            self.limit_data(on);
        }
    }

    /// Keeps a limit on data (RLIMIT_DATA) what it is for the task, though guarded memory does not count.
    fn limit_data(&self, guarded: bool) {
        let Rlimit { current: Some(soft), maximum } = getrlimit(Resource::Data) else { return };
        let soft = if guarded { soft.saturating_sub(self.bytes) } else { soft.saturating_add(self.bytes) };
        let current = Some(maximum.map_or(soft, |hard| soft.min(hard)));
        let _ = setrlimit(Resource::Data, Rlimit { current, maximum });
    }

    /// Returns whether the orbit has changed so much memory around an address since its creation, or that is unknown.
    fn is_own(&self, address: usize, around: usize) -> bool {
        let start = address & !(around - 1);
        let mut then = [0_u8; AROUND];
        let then = &mut then[..around.min(AROUND)];
        if process_memory::read(self.reference, start as u64, then).is_err() {
            return true;
        }
        // SAFETY: the page is mapped and was just made readable.
        *then
            != *unsafe { core::slice::from_raw_parts(core::ptr::with_exposed_provenance(start), then.len()) }
    }
}

/// Returns what the two signals lead to: whether it was an access to guarded memory, or the step behind one.
/// Async-signal-safe.
pub(crate) fn handles(signal: c_int, address: usize, context: *mut c_void) -> bool {
    let Some(checker) = checker() else { return false };
    // SAFETY: the kernel passes the interrupted context.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    if signal == libc::SIGTRAP {
        if checker.steps == 0 {
            return false;
        }
        registers[libc::REG_EFL as usize] &= !TRAP_FLAG;
        for page in &checker.stepping[..checker.steps] {
            protect(page_of(*page), false);
        }
        checker.steps = 0;
        return true;
    }
    if signal != libc::SIGSEGV || !checker.active {
        return false;
    }
    let after = checker.guarded.partition_point(|guarded| guarded.range.start <= address);
    let Some(guarded) = after.checked_sub(1).map(|index| checker.guarded[index]) else { return false };
    let page = page_of(address);
    if !guarded.range.contains(address) {
        return false;
    }
    if !protect(page, true) {
        // The task has all the data that it may have. The rest of it is not checked.
        return end();
    }
    let instruction = usize::try_from(registers[libc::REG_RIP as usize].cast_unsigned()).unwrap_or(0);
    let stack = usize::try_from(registers[libc::REG_RSP as usize].cast_unsigned()).unwrap_or(0);
    let in_library = |address: usize| checker.libraries.iter().any(|range| range.contains(address));
    // SAFETY: the calls take nothing.
    let one_thread = unsafe { libc::gettid() == checker.process && libc::getpid() == checker.process };
    let counter = &mut checker.counters[page.start / PAGE % COUNTERS];
    *counter = counter.saturating_add(1);
    if *counter > ACCESSES || !one_thread || checker.steps == STEP {
        return true;
    }
    // A leaf function has its return address on top of the stack.
    // SAFETY: the stack of the interrupted function, which is not guarded.
    let caller = || unsafe { core::ptr::with_exposed_provenance::<usize>(stack).read_unaligned() };
    let for_task =
        checker.leaves.iter().any(|leaf| instruction.wrapping_sub(*leaf) < LEAF) && !in_library(caller());
    let of_library = in_library(instruction) && !for_task;
    if of_library && !guarded.is_module {
        // What it has there, such as the buffer of a file, it may give to the kernel, for which there is no handler.
        return true;
    }
    let is_write = registers[libc::REG_ERR as usize] & WRITE != 0;
    let value = (!guarded.is_area).then(|| {
        // SAFETY: the page was just made readable, and the aligned word is in it.
        unsafe { core::ptr::with_exposed_provenance::<u64>(address & !7).read_volatile() }
    });
    let around = if guarded.is_module { 8 } else { AROUND };
    if !of_library && (guarded.is_area || !is_write && !checker.is_own(address, around)) {
        checker.log.note(Noted { address, value, instruction });
    }
    checker.stepping[checker.steps] = page.start;
    checker.steps += 1;
    registers[libc::REG_EFL as usize] |= TRAP_FLAG;
    true
}
