//! The interpreter: how it is started and warmed, and what is remembered of its pristine state.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ffi::{CStr, CString, c_char};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, bail};
use orrery_warm::config;
use pyo3_ffi as ffi;

use crate::environment::{LEFT_TO_REQUESTS, Settled};
use crate::object::{self, Held, Object, Raised, Result};
use crate::streams::Shelf;

const BOOTSTRAP: &str = concat!(include_str!("bootstrap.py"), "\0");
const REHEARSAL: &str = concat!(include_str!("rehearsal.py"), "\nrehearse(__import__('io'))\n\0");

/// How many threads the numerical libraries make: OpenBLAS, OpenMP, MKL, BLIS, numexpr.
const ONE_THREAD: [&str; 5] =
    ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS"];

/// A warm CPython.
#[derive(Debug)]
pub(crate) struct Python {
    pub(crate) held: Held,
    pub(crate) environment: Settled,
    pub(crate) shelf: Shelf,
    pub(crate) unusual: Unusual,
    pub(crate) reseeders: Vec<Object>,
    pub(crate) pristine: Pristine,
    /// A `SourceFileLoader` for the one script of a request; making one runs Python code.
    loader: RefCell<Option<Object>>,
}

/// Functions of the bootstrap for what few requests want.
#[derive(Debug)]
pub(crate) struct Unusual {
    pub(crate) ignore: Object,
    pub(crate) search_first: Object,
    pub(crate) warn: Object,
    pub(crate) user_packages: Object,
    pub(crate) pyc_code: Object,
}

/// Objects of the pristine interpreter that a script may replace, and that its end needs.
#[derive(Debug)]
pub(crate) struct Pristine {
    pub(crate) builtins_module: Object,
    pub(crate) builtins: Object,
    pub(crate) builtins_copy: Object,
    /// Addresses of the names and values of the builtins.
    pub(crate) builtins_known: HashSet<(usize, usize)>,
    pub(crate) builtin_importer: Object,
    source_loader: Object,
    pub(crate) sourceless_loader: Object,
    /// The first two bytes of compiled scripts.
    pub(crate) magic: u16,
    /// `threading` as it was imported, if it was.
    pub(crate) threading: Option<Threading>,
    pub(crate) run_as_main: Object,
    pub(crate) run_exit_functions: Object,
    pub(crate) get_objects: Object,
    pub(crate) io_base: Object,
    pub(crate) buffered_base: Object,
    pub(crate) raw_base: Object,
    /// Addresses of the keys and values of `sys.modules`: all of them live for ever.
    pub(crate) modules: HashSet<(usize, usize)>,
    /// What `sys.modules` looks like when the end of a program has come to `__main__`: see `finish`.
    pub(crate) modules_half_gone: Object,
    /// Names of the modules that a program's end takes away before `__main__`.
    modules_before_main: Vec<Object>,
}

impl Python {
    /// Starts the interpreter and imports the modules. Call once, on the only thread.
    pub(crate) fn start(settings: &config::Interpreter) -> anyhow::Result<Self> {
        let search_path = std::env::var_os("PYTHONPATH");
        // SAFETY: no other thread runs that could read the environment meanwhile.
        unsafe {
            // The error handlers and file names of all requests are those of UTF-8; see `environment`.
            std::env::remove_var("LC_ALL");
            std::env::set_var("LC_CTYPE", "C.UTF-8");
            LEFT_TO_REQUESTS.iter().for_each(|name| std::env::remove_var(name));
            // Numerical libraries start threads when they are imported, unless they are configured not to.
            for name in ONE_THREAD {
                if std::env::var_os(name).is_none() {
                    std::env::set_var(name, "1");
                }
            }
        }
        initialize(&CString::new(settings.executable.as_os_str().as_bytes())?)?;
        // SAFETY: initializing gave this thread the lock, and nothing here ever gives it away.
        let held =
            unsafe { Held::new() }.map_err(|Raised| anyhow::anyhow!("the interpreter has no sys module"))?;
        // SAFETY: the lock is held.
        if unsafe { crate::cpython::orrery_warm_runtime_fits() } == 0 {
            bail!(
                "libpython is not the one that this program was built for ({}): build it again",
                // SAFETY: a static C string.
                unsafe { CStr::from_ptr(ffi::Py_GetVersion()) }.to_string_lossy()
            );
        }
        // SAFETY: a static C string.
        let version = unsafe { CStr::from_ptr(ffi::Py_GetVersion()) }.to_string_lossy();
        if version != settings.version {
            bail!(
                "{} is Python {}, and this build of orrery has {version}: name an interpreter of that build (a virtual \
                 environment of /usr/bin/python3, say), or build orrery with PYO3_PYTHON={}",
                settings.executable.display(),
                settings.version,
                settings.executable.display(),
            );
        }
        let paths: Vec<_> = search_path.iter().flat_map(std::env::split_paths).collect();
        Self::warm(held, settings, &paths).map_err(|Raised| {
            // SAFETY: the lock is held.
            unsafe { ffi::PyErr_Print() };
            anyhow::anyhow!("the interpreter could not be warmed (--import {})", settings.imports.join(","))
        })
    }

    fn warm(held: Held, settings: &config::Interpreter, paths: &[std::path::PathBuf]) -> Result<Self> {
        let bootstrap = Object::dict(held)?;
        let builtins = Object::import(held, c"builtins")?;
        bootstrap.set_item(held, c"__builtins__", &builtins)?;
        bootstrap.set_item(held, c"__name__", &Object::decode(held, b"<orrery>")?)?;
        // SAFETY: the source is terminated; the code runs in the dictionary just made.
        unsafe {
            let code = Object::own(ffi::Py_CompileString(
                BOOTSTRAP.as_ptr().cast::<c_char>(),
                c"<orrery>".as_ptr(),
                ffi::Py_file_input,
            ))?;
            Object::own(ffi::PyEval_EvalCode(code.pointer(), bootstrap.pointer(), bootstrap.pointer()))?;
        }
        let function = |name| bootstrap.item(held, name).ok_or(Raised);
        let environment = Settled::new(held)?;
        let pristine = Pristine::gather(held, &builtins)?;

        // The server's PYTHONPATH serves the imports; requests bring their own.
        let path = object::sys(held, c"path").ok_or(Raised)?;
        let base_path = path.method(held, c"copy", &[])?;
        for directory in paths.iter().rev() {
            let directory = Object::decode(held, directory.as_os_str().as_bytes())?;
            path.method(held, c"insert", &[&Object::integer(held, 0)?, &directory])?;
        }
        let names = settings.imports.iter().map(|name| Object::decode(held, name.as_bytes()));
        let names = Object::list(held, names)?;
        let reseeders = function(c"prepare")?.call(&[&names])?.items();
        object::set_sys(held, c"path", &base_path)?;

        let made = function(c"prefabricate")?.call(&[])?;
        let shelf = Shelf::new(&made, function(c"open_streams")?)?;
        let unusual = Unusual {
            ignore: function(c"ignore")?,
            search_first: function(c"search_first")?,
            warn: function(c"warn")?,
            user_packages: function(c"user_packages")?,
            pyc_code: function(c"pyc_code")?,
        };
        let pristine = pristine.remember(held)?;
        crate::openssl::use_the_kernels_numbers();
        let python =
            Self { held, environment, shelf, unusual, reseeders, pristine, loader: RefCell::new(None) };
        python.rehearse()?;
        function(c"settle")?.call(&[])?;
        // After the collector was made to look at nothing, since it is to look at these.
        new_main(held, &python.pristine)?;
        let name = Object::decode(held, b"__main__")?;
        let loader = python.pristine.source_loader.call(&[&name, &name])?;
        Ok(Self { loader: RefCell::new(Some(loader)), ..python })
    }

    /// Returns a loader for the script `filename`, as `__main__.__loader__`.
    pub(crate) fn loader(&self, filename: &Object) -> Result<Object> {
        let loader = self.loader.take().ok_or(Raised)?;
        loader.set_attribute(self.held, c"path", filename)?;
        Ok(loader)
    }

    /// Returns the dictionary of `__main__`, which nothing else refers to but its module: at a program's end both go.
    pub(crate) fn main(&self) -> Result<Object> {
        // SAFETY: the dictionary of modules lives as long as the interpreter.
        let modules = unsafe { Object::borrow(ffi::PyImport_GetModuleDict()) }.ok_or(Raised)?;
        modules.item(self.held, c"__main__").ok_or(Raised)?.attribute(self.held, c"__dict__")
    }

    /// Does what every request does, as far as it can be done more than once, so that what CPython makes or remembers
    /// at the first time is there.
    fn rehearse(&self) -> Result<()> {
        for _ in 0..3 {
            let stage = Object::dict(self.held)?;
            stage.set_item(self.held, c"__builtins__", &self.pristine.builtins_module)?;
            let (source, stage) = (REHEARSAL.as_ptr().cast::<c_char>(), stage.pointer());
            // SAFETY: the source is terminated; it runs in the dictionary just made. Gives a new reference or null.
            unsafe {
                Object::own(ffi::PyRun_StringFlags(
                    source,
                    ffi::Py_file_input,
                    stage,
                    stage,
                    std::ptr::null_mut(),
                ))?;
            }
            self.main()?;
            crate::finish::rehearse(self);
        }
        Ok(())
    }

    /// The last preparation, when everything else is done and dropped: lets what requests make lie close together.
    pub(crate) fn settle(&self) {
        crate::pools::top_up();
        crate::heap::fill_holes();
    }
}

/// `add_main_module`.
fn new_main(held: Held, pristine: &Pristine) -> Result<()> {
    let name = Object::decode(held, b"__main__")?;
    // SAFETY: living objects; gives a new reference or null.
    let main = unsafe { Object::own(ffi::PyModule_NewObject(name.pointer()))? };
    let dict = main.attribute(held, c"__dict__")?;
    dict.set_item(held, c"__annotations__", &Object::dict(held)?)?;
    dict.set_item(held, c"__builtins__", &pristine.builtins_module)?;
    dict.set_item(held, c"__loader__", &pristine.builtin_importer)?;
    // SAFETY: the dictionary of modules lives as long as the interpreter.
    let modules = unsafe { Object::borrow(ffi::PyImport_GetModuleDict()) }.ok_or(Raised)?;
    modules.set_item(held, c"__main__", &main)
}

/// What tells whether a program has threads to wait for.
#[derive(Debug)]
pub(crate) struct Threading {
    pub(crate) namespace: Object,
    pub(crate) shutdown: Object,
    /// The sizes that `finish::sizes` reported.
    pub(crate) sizes: [isize; 3],
}

impl Pristine {
    fn gather(held: Held, builtins: &Object) -> Result<Self> {
        let builtins_module = builtins.clone();
        let builtins = builtins.attribute(held, c"__dict__")?;
        let io = Object::import(held, c"_io")?;
        let external = Object::import(held, c"_frozen_importlib_external")?;
        Ok(Self {
            builtins_module,
            builtins_copy: builtins.method(held, c"copy", &[])?,
            builtins_known: HashSet::new(),
            builtins,
            builtin_importer: Object::import(held, c"_frozen_importlib")?
                .attribute(held, c"BuiltinImporter")?,
            source_loader: external.attribute(held, c"SourceFileLoader")?,
            sourceless_loader: external.attribute(held, c"SourcelessFileLoader")?,
            // SAFETY: the lock is held.
            magic: u16::try_from(unsafe { ffi::PyImport_GetMagicNumber() } & 0xffff).unwrap_or(0),
            threading: None,
            run_as_main: Object::import(held, c"runpy")?.attribute(held, c"_run_module_as_main")?,
            run_exit_functions: Object::import(held, c"atexit")?.attribute(held, c"_run_exitfuncs")?,
            get_objects: Object::import(held, c"gc")?.attribute(held, c"get_objects")?,
            io_base: io.attribute(held, c"_IOBase")?,
            buffered_base: io.attribute(held, c"_BufferedIOBase")?,
            raw_base: io.attribute(held, c"_RawIOBase")?,
            modules: HashSet::new(),
            modules_half_gone: Object::dict(held)?,
            modules_before_main: {
                // SAFETY: the dictionary of modules lives as long as the interpreter.
                let modules = unsafe { Object::borrow(ffi::PyImport_GetModuleDict()) }.ok_or(Raised)?;
                let main = modules.item(held, c"__main__").ok_or(Raised)?;
                let before = modules.entries().into_iter().take_while(|(_, module)| !module.is(&main));
                before.map(|(name, _)| name).collect()
            },
        })
    }

    fn remember(mut self, held: Held) -> Result<Self> {
        // SAFETY: the dictionary of modules lives as long as the interpreter.
        let modules = unsafe { Object::borrow(ffi::PyImport_GetModuleDict()) };
        self.modules_half_gone = modules.as_ref().ok_or(Raised)?.method(held, c"copy", &[])?;
        for name in &self.modules_before_main {
            self.modules_half_gone.method(held, c"__setitem__", &[name, &Object::none(held)])?;
        }
        let main = modules.as_ref().and_then(|modules| modules.item(held, c"__main__"));
        if let Some(threading) = modules.as_ref().and_then(|modules| modules.item(held, c"threading")) {
            let namespace = threading.attribute(held, c"__dict__")?;
            let shutdown = namespace.item(held, c"_shutdown").ok_or(Raised)?;
            let sizes = crate::finish::sizes(held, &namespace);
            // Functions for the end that an import registered are to be called.
            if sizes[2] == 0 {
                self.threading = Some(Threading { namespace, shutdown, sizes });
            }
        }
        let addresses = |(name, value): (Object, Object)| (name.pointer().addr(), value.pointer().addr());
        self.builtins_known = self.builtins.entries().into_iter().map(addresses).collect();
        let entries = modules.iter().flat_map(Object::entries);
        // The entry of `__main__` is replaced in every request.
        self.modules = entries
            .filter(|(_, module)| !main.as_ref().is_some_and(|main| main.is(module)))
            .map(addresses)
            .collect();
        Ok(self)
    }
}

fn initialize(executable: &CStr) -> anyhow::Result<()> {
    let mut config = MaybeUninit::<ffi::PyConfig>::uninit();
    // SAFETY: `PyConfig_InitPythonConfig` initialises the structure before anything reads it; strings are C strings.
    let status = unsafe {
        ffi::PyConfig_InitPythonConfig(config.as_mut_ptr());
        let config = config.assume_init_mut();
        config.parse_argv = 0;
        let mut status =
            ffi::PyConfig_SetBytesString(config, &raw mut config.program_name, executable.as_ptr());
        if ffi::PyStatus_Exception(status) == 0 {
            status = ffi::Py_InitializeFromConfig(config);
        }
        ffi::PyConfig_Clear(config);
        status
    };
    // SAFETY: a status as returned; its message, if any, is a static C string.
    unsafe {
        if ffi::PyStatus_Exception(status) != 0 {
            let message =
                if status.err_msg.is_null() { c"no reason given" } else { CStr::from_ptr(status.err_msg) };
            return Err(anyhow::anyhow!("{}", message.to_string_lossy()))
                .with_context(|| format!("cannot start the interpreter {}", executable.to_string_lossy()));
        }
    }
    Ok(())
}
