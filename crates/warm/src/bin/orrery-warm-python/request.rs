//! One request: what `python3` does between its start and its end, in the same order. References are to
//! `Modules/main.c` and `Python/pythonrun.c` of CPython 3.11.

use std::ffi::{CStr, CString, c_int};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};

use std::path::PathBuf;

use orrery_warm::protocol::{Program, Request};
use orrery_warm::worker::{Ending, Interpreter};
use pyo3_ffi as ffi;
use rustix::fs::FileType;

use crate::cpython::{PY_MINOR_VERSION, PYCF_IGNORE_COOKIE};
use crate::finish;
use crate::interpreter::Python;
use crate::object::{self, Held, Object, Raised, Result};

/// The name under which messages speak of the interpreter: what the user would have typed.
const NAME: &[u8] = b"python3";
/// The longest comment at a zip file's end, and the record before it.
const ZIP_TAIL: u64 = (1 << 16) + 22;

impl Interpreter for Python {
    fn after_fork(&self) {
        // SAFETY: called in a child of the one thread that runs Python.
        unsafe { ffi::PyOS_AfterFork_Child() }
    }

    fn run(&self, request: &Request<'_>, script: Option<OwnedFd>) -> Ending {
        if let Some(objection) = self.environment.objection(request.environment) {
            return Ending::Refused(objection);
        }
        let status = self.begin(request).and_then(|safe_path| self.run_program(request, script, safe_path));
        let status = status.unwrap_or_else(|Raised| finish::report(self.held));
        finish::finish(self, status)
    }

    fn library(&self) -> Vec<PathBuf> {
        let path = object::sys(self.held, c"path").map(|path| path.items()).unwrap_or_default();
        let prefixes = [c"prefix", c"base_prefix", c"exec_prefix"].into_iter();
        let prefixes = prefixes.filter_map(|name| object::sys(self.held, name));
        path.into_iter()
            .chain(prefixes)
            .filter_map(|directory| directory.encode().ok())
            .map(path_from)
            .collect()
    }
}

fn path_from(bytes: Vec<u8>) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

impl Python {
    /// Makes the interpreter look freshly started; tells whether `sys.path` is to be left without the script's
    /// directory.
    fn begin(&self, request: &Request<'_>) -> Result<bool> {
        let held = self.held;
        let wishes = self.environment.apply(held, request.environment)?;
        for reseed in &self.reseeders {
            reseed.call(&[])?;
        }
        let decoded =
            |parts: &[&[u8]]| Object::list(held, parts.iter().map(|part| Object::decode(held, part)));
        let (arguments, original) = argument_lists(request);
        object::set_sys(held, c"argv", &decoded(&arguments)?)?;
        object::set_sys(held, c"orig_argv", &decoded(&original)?)?;
        let options = &request.options;
        if options.dont_write_bytecode || wishes.no_bytecode {
            object::set_sys(held, c"dont_write_bytecode", &Object::boolean(held, true))?;
            set_flag(c"dont_write_bytecode", &Object::integer(held, 1)?);
        }
        if options.safe_path || wishes.safe_path {
            set_flag(c"safe_path", &Object::boolean(held, true));
        }
        if wishes.utf8_mode {
            set_flag(c"utf8_mode", &Object::integer(held, 1)?);
            // SAFETY: the lock is held; nothing but this thread reads the mode.
            unsafe { crate::cpython::orrery_warm_use_utf8_mode() };
        }
        if wishes.another_home {
            self.unusual.user_packages.call(&[])?;
        }
        if let Some(directory) = wishes.cache {
            object::set_sys(held, c"pycache_prefix", &Object::decode(held, directory)?)?;
        }
        if let Some(directories) = wishes.search {
            self.unusual.search_first.call(&[&Object::decode(held, directories)?])?;
        }
        if request.ignored_signals != 0 {
            let ignored = (1..=64_u64).filter(|number| request.ignored_signals & (1 << (number - 1)) != 0);
            let ignored = Object::list(held, ignored.map(|number| Object::integer(held, number)))?;
            self.unusual.ignore.call(&[&ignored])?;
        }
        if wishes.warnings.is_some() || !options.warnings.is_empty() {
            let variable = Object::decode(held, wishes.warnings.unwrap_or_default())?;
            self.unusual.warn.call(&[&variable, &decoded(&options.warnings)?])?;
        }
        self.shelf.open(held, request.streams, &wishes, options.unbuffered || wishes.unbuffered)?;
        Ok(options.safe_path || wishes.safe_path)
    }

    /// `pymain_run_python`.
    fn run_program(&self, request: &Request<'_>, script: Option<OwnedFd>, safe_path: bool) -> Result<i32> {
        let held = self.held;
        let main = self.main()?;
        let put_first = |path: &Object| object::sys(held, c"path").ok_or(Raised)?.prepend(path);
        if let Program::Script { path } = request.program {
            let script = script.ok_or(Raised)?;
            let filename = absolute(path);
            let name = Object::decode(held, &filename)?;
            if self.is_importable(script.as_fd(), &name)? {
                put_first(&name)?;
                return self.run_module(b"__main__", false);
            }
            if !safe_path {
                put_first(&Object::decode(held, &directory_of(path))?)?;
            }
            return self.run_file(script, &filename, &main);
        }
        if !safe_path {
            let first = match request.program {
                Program::Module { .. } => current_directory(),
                _ => Vec::new(),
            };
            put_first(&Object::decode(held, &first)?)?;
        }
        match request.program {
            Program::Command { text } => self.run_command(text, &main),
            Program::Module { name } => self.run_module(name, true),
            Program::Stdin { .. } | Program::Script { .. } => self.run_stdin(&main),
        }
    }

    /// `pymain_get_importer`: whether the script is a directory or archive with a `__main__` in it. Asks the import
    /// system, which is slow, only where the answer may be yes.
    fn is_importable(&self, script: BorrowedFd<'_>, name: &Object) -> Result<bool> {
        if !may_be_importable(script) {
            let cache = object::sys(self.held, c"path_importer_cache").ok_or(Raised)?;
            // SAFETY: living objects; what cannot be stored is not a dictionary, which does no harm here.
            if unsafe { ffi::PyDict_SetItem(cache.pointer(), name.pointer(), ffi::Py_None()) } == -1 {
                object::clear();
            }
            return Ok(false);
        }
        // SAFETY: a living string; gives a new reference or null.
        let importer = unsafe { Object::own(ffi::PyImport_GetImporter(name.pointer()))? };
        Ok(!importer.is_none())
    }

    /// `pymain_run_file_obj` and `_PyRun_SimpleFileObject`.
    fn run_file(&self, script: OwnedFd, filename: &[u8], main: &Object) -> Result<i32> {
        let held = self.held;
        let name = Object::decode(held, filename)?;
        if rustix::fs::fstat(&script)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
        {
            let quoted = name.method(held, c"__repr__", &[])?;
            let line = [NAME, b": ", &quoted.encode()?, b" is a directory, cannot continue\n"].concat();
            object::complain(held, &line);
            return Ok(1);
        }
        make_pending_calls()?;
        main.set_item(held, c"__file__", &name)?;
        main.set_item(held, c"__cached__", &Object::none(held))?;
        let compiled = is_compiled(script.as_fd(), filename, self.pristine.magic);
        let loader = if compiled {
            self.pristine.sourceless_loader.call(&[&Object::decode(held, b"__main__")?, &name])?
        } else {
            self.loader(&name)?
        };
        main.set_item(held, c"__loader__", &loader)?;
        drop(loader);
        let result = if compiled {
            let code = self.unusual.pyc_code.call(&[&name]).inspect_err(|&Raised| finish::drop_traceback());
            // SAFETY: a code object and two dictionaries; gives a new reference or null.
            code.and_then(|code| unsafe {
                Object::own(ffi::PyEval_EvalCode(code.pointer(), main.pointer(), main.pointer()))
            })
        } else {
            run_stream(open_stream(script)?, filename, main, true)
        };
        Ok(conclude_file(held, result.map(drop), main))
    }

    /// `pymain_run_stdin`.
    fn run_stdin(&self, main: &Object) -> Result<i32> {
        let held = self.held;
        make_pending_calls()?;
        main.set_item(held, c"__file__", &Object::decode(held, b"<stdin>")?)?;
        main.set_item(held, c"__cached__", &Object::none(held))?;
        let result = run_stream(c_stdin(), b"<stdin>", main, false);
        Ok(conclude_file(held, result.map(drop), main))
    }

    /// `pymain_run_command`.
    fn run_command(&self, text: &[u8], main: &Object) -> Result<i32> {
        let text = Object::decode(self.held, &[text, b"\n"].concat())?;
        let Ok(source) = text.encode() else {
            object::complain(self.held, b"Unable to decode the command from the command line:\n");
            return Err(Raised);
        };
        let source = CString::new(source).map_err(|_| Raised)?;
        let mut flags = compiler_flags(PYCF_IGNORE_COOKIE);
        // SAFETY: a C string, two dictionaries and live flags; gives a new reference or null.
        let result = unsafe {
            Object::own(ffi::PyRun_StringFlags(
                source.as_ptr(),
                ffi::Py_file_input,
                main.pointer(),
                main.pointer(),
                &raw mut flags,
            ))
        };
        Ok(conclude(self.held, result.map(drop)))
    }

    /// `pymain_run_module`.
    fn run_module(&self, name: &[u8], set_argv0: bool) -> Result<i32> {
        let name = Object::decode(self.held, name)?;
        finish::note_interrupt(self.held, false);
        let result = self.pristine.run_as_main.call(&[&name, &Object::boolean(self.held, set_argv0)]);
        if result.is_err() && finish::is_interrupt(self.held) {
            finish::note_interrupt(self.held, true);
        }
        Ok(conclude(self.held, result.map(drop)))
    }
}

/// Sets a flag of `sys.flags`, if this interpreter has it.
fn set_flag(name: &CStr, value: &Object) {
    // SAFETY: a C string and a living object; the lock is held.
    let _ = unsafe { crate::cpython::orrery_warm_set_flag(name.as_ptr(), value.pointer()) };
}

/// `sys.argv` and `sys.orig_argv`.
fn argument_lists<'a>(request: &'a Request<'a>) -> (Vec<&'a [u8]>, Vec<&'a [u8]>) {
    let (first, how): (&[u8], Vec<&[u8]>) = match request.program {
        Program::Script { path } => (path, vec![path]),
        Program::Command { text } => (b"-c", vec![b"-c", text]),
        Program::Module { name } => (b"-m", vec![b"-m", name]),
        Program::Stdin { dash: true } => (b"-", vec![b"-"]),
        Program::Stdin { dash: false } => (b"", Vec::new()),
    };
    let arguments = std::iter::once(first).chain(request.arguments.iter().copied()).collect();
    let original = std::iter::once(NAME).chain(how).chain(request.arguments.iter().copied()).collect();
    (arguments, original)
}

fn current_directory() -> Vec<u8> {
    rustix::process::getcwd(Vec::new()).map(CString::into_bytes).unwrap_or_default()
}

/// `config_run_filename_abspath`: not normalised.
fn absolute(path: &[u8]) -> Vec<u8> {
    let directory = current_directory();
    if path.starts_with(b"/") || directory.is_empty() {
        return path.to_vec();
    }
    [directory.as_slice(), b"/", path].concat()
}

/// `_PyPathConfig_ComputeSysPath0` for a script.
fn directory_of(path: &[u8]) -> Vec<u8> {
    let real = real_path(path).unwrap_or_else(|| path.to_vec());
    match real.iter().rposition(|&byte| byte == b'/') {
        None => Vec::new(),
        Some(0) => b"/".to_vec(),
        Some(slash) => real[..slash].to_vec(),
    }
}

fn real_path(path: &[u8]) -> Option<Vec<u8>> {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let real = std::fs::canonicalize(std::ffi::OsStr::from_bytes(path)).ok()?;
    Some(real.into_os_string().into_vec())
}

fn may_be_importable(script: BorrowedFd<'_>) -> bool {
    let Ok(stat) = rustix::fs::fstat(script) else {
        return false;
    };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => true,
        FileType::RegularFile => {
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            let mut tail = vec![0; usize::try_from(size.min(ZIP_TAIL)).unwrap_or(0)];
            let read =
                rustix::io::pread(script, tail.as_mut_slice(), size.saturating_sub(ZIP_TAIL)).unwrap_or(0);
            tail[..read].windows(4).any(|window| window == b"PK\x05\x06")
        }
        _ => false,
    }
}

/// `maybe_pyc_file`.
fn is_compiled(script: BorrowedFd<'_>, filename: &[u8], expected: u16) -> bool {
    let mut magic = [0; 2];
    filename.ends_with(b".pyc")
        || rustix::io::pread(script, &mut magic, 0) == Ok(2) && u16::from_le_bytes(magic) == expected
}

fn make_pending_calls() -> Result<()> {
    // SAFETY: the lock is held wherever a request is run.
    object::check(unsafe { ffi::Py_MakePendingCalls() })
}

fn compiler_flags(flags: c_int) -> ffi::PyCompilerFlags {
    ffi::PyCompilerFlags { cf_flags: flags, cf_feature_version: PY_MINOR_VERSION }
}

fn open_stream(script: OwnedFd) -> Result<*mut libc::FILE> {
    // SAFETY: the descriptor is given away to the stream; the mode is a C string.
    let stream = unsafe { libc::fdopen(script.into_raw_fd(), c"rb".as_ptr()) };
    if stream.is_null() { Err(Raised) } else { Ok(stream) }
}

fn c_stdin() -> *mut libc::FILE {
    unsafe extern "C" {
        static mut stdin: *mut libc::FILE;
    }
    // SAFETY: the C library's own stream, which it never moves.
    unsafe { stdin }
}

/// Runs what a stream holds in `main`; closes it before the first statement if `close` says so.
fn run_stream(stream: *mut libc::FILE, filename: &[u8], main: &Object, close: bool) -> Result<Object> {
    let filename = CString::new(filename).map_err(|_| Raised)?;
    let mut flags = compiler_flags(0);
    // SAFETY: an open stream, a C string, two dictionaries and live flags; gives a new reference or null.
    unsafe {
        Object::own(ffi::PyRun_FileExFlags(
            stream,
            filename.as_ptr(),
            ffi::Py_file_input,
            main.pointer(),
            main.pointer(),
            c_int::from(close),
            &raw mut flags,
        ))
    }
}

/// Returns what follows the last statement of a program: its exit status.
fn conclude(held: Held, result: Result<()>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(Raised) => finish::report(held),
    }
}

fn conclude_file(held: Held, result: Result<()>, main: &Object) -> i32 {
    finish::flush_quietly(held);
    if let Err(Raised) = result
        && let Some(status) = finish::system_exit()
    {
        return status;
    }
    let status = conclude(held, result);
    main.remove_item(held, c"__file__");
    main.remove_item(held, c"__cached__");
    status
}
