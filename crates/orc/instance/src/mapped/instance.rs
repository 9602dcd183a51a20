//! One mapping of a library.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::unix::ffi::OsStringExt as _;
use std::ptr::{NonNull, null_mut, with_exposed_provenance};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::mapped::descriptors::descriptor;
use crate::mapped::dynamic::Table;
use crate::mapped::imports::Found;
use crate::mapped::library::Mapped;
use crate::mapped::memory::Memory;
use crate::mapped::relocations::Value;
use crate::mapped::symbols::Definition;
use crate::mapped::threads::{Index, Template, Threads};

/// An instance of a library: a mapping of it, with variables and addresses of functions of its own.
///
/// Dropping it runs the library's destructors, and unmaps it. It is leaked where threads run that it made:
/// [`MappedInstance::destroy`] reports that.
#[derive(Debug)]
pub struct MappedInstance {
    core: ManuallyDrop<Box<Core>>,
}

#[derive(Debug)]
struct Core {
    library: Arc<Mapped>,
    memory: Memory,
    threads: Arc<Threads>,
    frames: Option<Registered>,
    /// What TLS descriptors lead to.
    #[expect(clippy::vec_box, reason = "descriptors have their addresses")]
    indices: Vec<Box<Index>>,
}

/// Frames that libgcc knows.
#[derive(Debug)]
struct Registered {
    start: usize,
    forget: unsafe extern "C" fn(*const c_void),
}

impl MappedInstance {
    /// # Safety
    /// As for [`crate::MappedLibrary::create`].
    pub(crate) unsafe fn create(library: &Arc<Mapped>) -> Result<Self> {
        let plan = &library.plan;
        let memory = Memory::map(&plan.segments, &library.file)?;
        let template = plan.segments.thread_local.map(|block| Template {
            image: memory.address(block.start),
            image_len: block.file_len,
            len: block.len,
            align: block.align,
        });
        let threads = Threads::register(memory.range(), template);
        let library = Arc::clone(library);
        let mut core = Core { library, memory, threads, frames: None, indices: Vec::new() };
        // SAFETY: nothing has the mapping yet; the functions that are called are the library's own (# Safety).
        if let Err(error) = unsafe { core.relocate() } {
            core.threads.unregister();
            return Err(error);
        }
        let mut made = Self { core: ManuallyDrop::new(Box::new(core)) };
        made.core.frames = made.core.register_frames();
        // SAFETY: it is relocated, and what runs is the library's own (# Safety).
        unsafe { made.core.construct() };
        Ok(made)
    }

    /// Returns the address of a function or variable in this instance, which is valid until that is destroyed. Of a
    /// thread-local variable, it is that of the calling thread.
    ///
    /// # Errors
    /// [`Error::Symbol`].
    pub fn symbol(&self, name: &CStr) -> Result<NonNull<c_void>> {
        let core = &self.core;
        let address = match core.library.plan.exports.get(name) {
            Some(Definition::Address(address)) => core.memory.address(*address),
            Some(Definition::Absolute(number)) => *number,
            Some(Definition::ThreadLocal(offset)) if core.library.plan.segments.thread_local.is_some() => {
                core.threads.variable(*offset).expose_provenance()
            }
            Some(Definition::Resolver(function)) if core.library.plan.segments.is_code(*function) => {
                // SAFETY: the symbol table says that there is such a function, in code of the library.
                unsafe { core.resolve(*function) }
            }
            _ => 0,
        };
        NonNull::new(std::ptr::with_exposed_provenance_mut(address))
            .ok_or_else(|| Error::Symbol { name: name.to_owned() })
    }

    /// Returns where the instance is mapped: what debuggers call the library's offset (`add-symbol-file -o` of gdb).
    #[must_use]
    pub fn base(&self) -> *const c_void {
        with_exposed_provenance(self.core.memory.address(0))
    }

    /// Runs the library's destructors, and unmaps the instance.
    ///
    /// # Errors
    /// [`Error::Threads`] where threads run that the instance made, or that have thread-local objects of it to destroy; the
    /// instance is as it was.
    pub fn destroy(mut self) -> std::result::Result<(), (Self, Error)> {
        match self.core.others() {
            Ok(()) => {
                // SAFETY: no thread is in it that could be known, and this is the last use.
                unsafe { self.end() };
                std::mem::forget(self);
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// # Safety
    /// The instance is used no more, and not ended twice.
    unsafe fn end(&mut self) {
        // SAFETY: who made the instance has promised that nothing uses it any more; it is ended once (# Safety).
        unsafe {
            self.core.destruct();
            ManuallyDrop::drop(&mut self.core);
        }
    }
}

impl Drop for MappedInstance {
    fn drop(&mut self) {
        if self.core.others().is_ok() {
            // SAFETY: this is the last use.
            unsafe { self.end() };
        }
    }
}

impl Core {
    fn others(&self) -> Result<()> {
        match self.threads.others() {
            0 => Ok(()),
            count => Err(Error::Threads { action: "destroy", count }),
        }
    }

    /// Writes the words that are different in each mapping, and makes read only what then stays.
    ///
    /// # Safety
    /// Nothing uses the mapping yet; functions that return addresses may be called.
    unsafe fn relocate(&mut self) -> Result<()> {
        let library = Arc::clone(&self.library);
        for relocation in &library.plan.relocations {
            let value = match relocation.value {
                Value::Base(addend) => self.memory.address(addend),
                Value::Same(number) => number,
                Value::Import { import, addend } => match self.library.imports[import] {
                    Found::Address(address) => address.wrapping_add(addend),
                    Found::ThreadLocal { offset, .. } => offset.wrapping_add(addend),
                },
                Value::Resolved { function, addend } => {
                    // SAFETY: all words but those of such relocations are relocated; the function is code of the library.
                    let address = unsafe { self.resolve(function) };
                    address.wrapping_add(addend)
                }
                Value::Block => self.threads.block,
                Value::BlockOf { import } => match self.library.imports[import] {
                    Found::Address(_) => 0,
                    Found::ThreadLocal { block, .. } => block,
                },
                Value::OffsetOf { import, addend } => match self.library.imports[import] {
                    Found::Address(address) => address,
                    Found::ThreadLocal { offset, .. } => offset.wrapping_add(addend),
                },
                Value::Descriptor { offset } => {
                    let index = Box::new(Index { block: self.threads.block, offset });
                    let words = descriptor(&index);
                    self.indices.push(index);
                    let [function, index] = words.ok_or(Error::System {
                        action: "serve TLS descriptors: the processor has no XSAVE",
                        errno: Errno::NOTSUP,
                    })?;
                    // SAFETY: as below; the plan has two words for a descriptor.
                    unsafe {
                        self.memory.word(relocation.at).add(1).write_unaligned(index);
                    }
                    function
                }
            };
            // SAFETY: the plan has only words in writable segments, which nothing uses yet (# Safety); they need not be aligned.
            unsafe { self.memory.word(relocation.at).write_unaligned(value) };
        }
        self.memory.protect(&self.library.plan.segments.relro)
    }

    /// Calls a function that returns the address of another (STT_GNU_IFUNC).
    ///
    /// # Safety
    /// The library has such a function there, and is relocated as far as that needs.
    unsafe fn resolve(&self, function: usize) -> usize {
        let function = self.memory.pointer(function).cast_const();
        // SAFETY: a function of the library has this type, as its symbol table says (# Safety).
        unsafe {
            let function: unsafe extern "C" fn() -> usize = std::mem::transmute(function);
            function()
        }
    }

    /// # Safety
    /// The mapping is relocated; constructors have not run.
    unsafe fn construct(&self) {
        type Constructor = unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char);
        unsafe extern "C" {
            static environ: *const *const c_char;
        }
        let arguments = arguments();
        let count = c_int::try_from(arguments.len() - 1).unwrap_or(c_int::MAX);
        let run = |address: usize| {
            let function: *const () = with_exposed_provenance(address);
            // SAFETY: it is a constructor of the library, which gets what the dynamic loader passes.
            unsafe {
                let function: Constructor = std::mem::transmute(function);
                function(count, arguments.as_ptr().cast(), environ);
            }
        };
        if let Some(init) = self.library.plan.init {
            run(self.memory.address(init));
        }
        for function in self.functions(self.library.plan.init_array) {
            run(function);
        }
    }

    /// # Safety
    /// Constructors have run, and destructors have not; nothing uses the instance any more.
    unsafe fn destruct(&mut self) {
        let run = |address: usize| {
            let function: *const () = with_exposed_provenance(address);
            // SAFETY: it is a destructor of the library, which takes nothing.
            unsafe {
                let function: unsafe extern "C" fn() = std::mem::transmute(function);
                function();
            }
        };
        self.threads.run_destructors();
        for function in self.functions(self.library.plan.fini_array).into_iter().rev() {
            run(function);
        }
        if let Some(fini) = self.library.plan.fini {
            run(self.memory.address(fini));
        }
        // A destructor may have used a thread-local object for the first time.
        self.threads.run_destructors();
        if let Some(registered) = self.frames.take() {
            // SAFETY: it was registered with this address.
            unsafe { (registered.forget)(with_exposed_provenance(registered.start)) };
        }
        self.threads.unregister();
    }

    /// Returns the functions in a list, which is relocated.
    fn functions(&self, list: Table) -> Vec<usize> {
        let first = self.memory.word(list.address).cast_const();
        // SAFETY: the plan has checked that the list is aligned and in the mapping's variables.
        let all = (0..list.len / size_of::<usize>()).map(|at| unsafe { first.add(at).read() });
        // As linkers fill them, 0 and -1 are no functions.
        all.filter(|function| !matches!(*function, 0 | usize::MAX)).collect()
    }

    fn register_frames(&self) -> Option<Registered> {
        let frames = self.library.plan.frames.filter(|_| self.library.unwind)?;
        // The libgcc that the library calls is to know them.
        let register = self.library.scope.function(c"__register_frame")?;
        let forget = self.library.scope.function(c"__deregister_frame")?;
        let start = self.memory.address(frames.start);
        // SAFETY: libgcc's functions have this type; the table is mapped and ends with a zero word, as the plan has checked.
        unsafe {
            let register: unsafe extern "C" fn(*const c_void) = std::mem::transmute(register);
            let forget: unsafe extern "C" fn(*const c_void) = std::mem::transmute(forget);
            register(with_exposed_provenance(start));
            Some(Registered { start, forget })
        }
    }
}

/// The arguments of the process, as constructors get them: ends with a null pointer.
struct Arguments(Vec<*mut c_char>);

// SAFETY: the strings are never changed by this crate, and live as long as the process.
unsafe impl Send for Arguments {}
// SAFETY: the strings are never changed by this crate, and live as long as the process.
unsafe impl Sync for Arguments {}

fn arguments() -> &'static [*mut c_char] {
    static ARGUMENTS: OnceLock<Arguments> = OnceLock::new();
    let made = ARGUMENTS.get_or_init(|| {
        let all = std::env::args_os().filter_map(|argument| CString::new(argument.into_vec()).ok());
        Arguments(all.map(CString::into_raw).chain(std::iter::once(null_mut())).collect())
    });
    &made.0
}
