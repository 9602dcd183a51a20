//! A library that is mapped once for each instance.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::mapped::elf::Refusal;
use crate::mapped::imports::{Found, Scope};
use crate::mapped::instance::MappedInstance;
use crate::mapped::plan::Plan;

/// How instances of a mapped library are made.
#[derive(Clone, Copy, Debug, Default)]
pub struct MappedOptions {
    /// Whether exceptions, and backtraces, find their way through functions of the library. By default, where it has functions
    /// that handle exceptions or have destructors to run for them. Registering an instance's frames with libgcc takes
    /// memory, and time of the first exception that is thrown afterwards, in whatever code.
    pub unwind: Option<bool>,
}

/// A library of which each instance is a mapping of its own. A clone is another handle of the same library.
///
/// The library need not be built in any particular way. The libraries that it needs are loaded once, and their state is shared
/// by all instances, as is the heap of the process.
#[derive(Clone, Debug)]
pub struct MappedLibrary {
    pub(crate) mapped: Arc<Mapped>,
}

/// What all instances of a library have in common.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) file: File,
    pub(crate) plan: Plan,
    pub(crate) imports: Vec<Found>,
    /// What it needs stays loaded as long as an instance is there.
    pub(crate) scope: Scope,
    pub(crate) unwind: bool,
}

impl MappedLibrary {
    /// Reads a library, and loads the libraries that it needs. None of its own code runs.
    ///
    /// # Errors
    /// [`Error::Open`], [`Error::Elf`], [`Error::TextRelocations`], [`Error::ExecutableStack`], [`Error::InitialExec`],
    /// [`Error::Relocation`]; [`Error::Load`] where a library that it needs cannot be loaded, [`Error::Import`].
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::load_with(path, MappedOptions::default())
    }

    /// Reads a library whose instances are made in a certain way.
    ///
    /// # Errors
    /// As [`MappedLibrary::load`].
    pub fn load_with(path: impl AsRef<Path>, options: MappedOptions) -> Result<Self> {
        let path = path.as_ref();
        let open = |cause| Error::Open { path: path.to_owned(), cause };
        let path = path.canonicalize().map_err(open)?;
        let mut file = File::open(&path).map_err(open)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(open)?;
        let plan = Plan::read(&bytes).map_err(|refusal| refused(&path, refusal))?;
        let scope = Scope::load(&path, &plan)?;
        let imports = plan.imports.iter().map(|import| scope.find(&path, import)).collect::<Result<_>>()?;
        let unwind = options.unwind.unwrap_or_else(|| plan.frames.is_some_and(|frames| frames.handlers));
        Ok(Self { mapped: Arc::new(Mapped { file, plan, imports, scope, unwind }) })
    }

    /// Makes an instance: maps the library, relocates it, and runs its constructors.
    ///
    /// # Errors
    /// [`Error::AddressSpace`], [`Error::System`]: the kernel allows a process 65,530 mappings (`vm.max_map_count`), of which
    /// an instance takes about six.
    ///
    /// # Safety
    /// Once the instance is destroyed or dropped, nothing uses its functions and variables, as with a library after
    /// dlclose(3): no thread is in one of its functions, no other library calls one back, no signal handler and no key
    /// of pthread_key_create(3) is left that is one. Threads that it made by pthread_create(3) are waited for.
    pub unsafe fn create(&self) -> Result<MappedInstance> {
        // SAFETY: the caller's promise.
        unsafe { MappedInstance::create(&self.mapped) }
    }

    /// Returns how many bytes of addresses each instance takes. Of those, pages that it does not write are the page cache's.
    #[must_use]
    pub fn mapped_len(&self) -> usize {
        self.mapped.plan.segments.span.len()
    }

    /// Returns how many words are relocated in each instance.
    #[must_use]
    pub fn relocations(&self) -> usize {
        self.mapped.plan.relocations.len()
    }

    /// Returns whether exceptions find their way through functions of the library.
    #[must_use]
    pub fn unwinds(&self) -> bool {
        self.mapped.unwind && self.mapped.plan.frames.is_some()
    }
}

fn refused(path: &Path, refusal: Refusal) -> Error {
    let path: PathBuf = path.to_owned();
    match refusal {
        Refusal::Malformed(cause) => Error::Elf { path, cause },
        Refusal::TextRelocations => Error::TextRelocations { path },
        Refusal::ExecutableStack => Error::ExecutableStack { path },
        Refusal::InitialExec => Error::InitialExec { path },
        Refusal::Relocation(kind) => Error::Relocation { path, kind },
    }
}
