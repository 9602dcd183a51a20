//! The end of a program: what `Py_FinalizeEx` of CPython 3.11 does as far as a script or its user can tell, in the
//! same order.
//!
//! The interpreter itself is not taken apart, since the worker needs it again. Objects of the modules that were
//! imported before the first request are not destroyed either, because the garbage collector does not look into
//! them (`gc.freeze`). So an object with a destructor that a script stores inside such a module is not destroyed at
//! the end, other than by `python3`; open files stored there are still flushed and closed.

use std::ffi::{CStr, c_int};

use orrery_warm::worker::Ending;
use pyo3_ffi as ffi;

use crate::cpython::{
    _Py_HandleSystemExit, _Py_UnhandledKeyboardInterrupt, _PyModule_Clear, orrery_warm_begin_finalizing,
    orrery_warm_has_finalizers, orrery_warm_use_modules,
};
use crate::interpreter::Python;
use crate::object::{self, Held, Object, Raised};

/// Names in `sys` that `finalize_modules_delete_special` clears.
const SYS_CLEARED: [&CStr; 11] = [
    c"path",
    c"argv",
    c"ps1",
    c"ps2",
    c"last_type",
    c"last_value",
    c"last_traceback",
    c"path_hooks",
    c"path_importer_cache",
    c"meta_path",
    c"__interactivehook__",
];

/// The status with which `python3` exits when the last flush failed.
const FLUSH_FAILED: u8 = 120;

/// Ends the program that left with `status`.
pub(crate) fn finish(python: &Python, status: i32) -> Ending {
    let held = python.held;
    if has_threads(python) {
        join_threads(held);
    }
    if python.pristine.run_exit_functions.call(&[]).is_err() {
        object::unraisable(None);
    }
    // SAFETY: the lock is held.
    unsafe { orrery_warm_begin_finalizing() };
    let flushed = flush_standard_streams(held);
    // SAFETY: a signal number and an action that need nothing else.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
    // SAFETY: the lock is held.
    if unsafe { orrery_warm_has_finalizers() } == 0 {
        // Nobody is there to see in which order things go.
        drop_modules(python);
        collect();
    } else {
        // SAFETY: the lock is held. Does nothing where the script has switched the collector off.
        unsafe { ffi::PyGC_Collect() };
        clear_modules(python);
        close_files(python);
        // In python3 it is the streams' own destruction that writes what came last, and nobody hears of its failure.
        flush_quietly(held);
    }
    // SAFETY: null means all streams of the C library.
    unsafe { libc::fflush(std::ptr::null_mut()) };
    // SAFETY: a variable of CPython's, which only this thread uses.
    if unsafe { _Py_UnhandledKeyboardInterrupt } != 0 {
        return Ending::Signal(libc::SIGINT);
    }
    #[expect(clippy::cast_sign_loss, clippy::cast_possible_truncation, reason = "as exit(3) does")]
    let status = status as u8;
    Ending::Exit(if flushed { status } else { FLUSH_FAILED })
}

/// Does what every end does and can be done more than once.
pub(crate) fn rehearse(python: &Python) {
    flush_quietly(python.held);
    flush_standard_streams(python.held);
    restore_builtins(python);
    collect();
}

/// Reports the exception that is set, which nobody caught: gives the exit status.
pub(crate) fn report(held: Held) -> i32 {
    if let Some(status) = system_exit() {
        return status;
    }
    let _ = held;
    // SAFETY: the lock is held and an exception is set. A hook that raises SystemExit makes this end the process
    // after a real finalization: slower, but right.
    unsafe { ffi::PyErr_Print() };
    1
}

/// The status that an uncaught `SystemExit` asks for, if that is what is set.
pub(crate) fn system_exit() -> Option<i32> {
    let mut status: c_int = 0;
    // SAFETY: the lock is held; the pointer is to a live local.
    (unsafe { _Py_HandleSystemExit(&raw mut status) } == 1).then_some(status)
}

/// Returns whether the exception that is set is a `KeyboardInterrupt` itself.
pub(crate) fn is_interrupt(_: Held) -> bool {
    // SAFETY: the lock is held; only addresses are compared.
    unsafe { ffi::PyErr_Occurred() == ffi::PyExc_KeyboardInterrupt }
}

/// Notes whether the program ended by an uncaught `KeyboardInterrupt`.
pub(crate) fn note_interrupt(_: Held, uncaught: bool) {
    // SAFETY: a variable of CPython's, which only this thread uses.
    unsafe { _Py_UnhandledKeyboardInterrupt = c_int::from(uncaught) };
}

/// `flush_io`: flushes both streams, and lets no failure replace the exception that is set.
pub(crate) fn flush_quietly(held: Held) {
    let (mut class, mut value, mut traceback) =
        (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the pointers are to live locals, which take over the references and give them back below.
    unsafe { ffi::PyErr_Fetch(&raw mut class, &raw mut value, &raw mut traceback) };
    for name in [c"stderr", c"stdout"] {
        if object::sys(held, name).is_some_and(|stream| stream.method(held, c"flush", &[]).is_err()) {
            object::clear();
        }
    }
    // SAFETY: as fetched.
    unsafe { ffi::PyErr_Restore(class, value, traceback) };
}

/// Lets the exception that is set look as if C code had raised it.
pub(crate) fn drop_traceback() {
    let (mut class, mut value, mut traceback) =
        (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: as in `flush_quietly`; the traceback's reference is taken over and dropped.
    unsafe {
        ffi::PyErr_Fetch(&raw mut class, &raw mut value, &raw mut traceback);
        drop(Object::own(traceback));
        ffi::PyErr_Restore(class, value, std::ptr::null_mut());
    }
}

/// Returns whether there may be something for `threading` to do: threads that it knows, or functions that want to be
/// called when they end. Where there is nothing, not even its function is called, which would write to many pages.
fn has_threads(python: &Python) -> bool {
    let Some(threading) = &python.pristine.threading else { return true };
    threading.namespace.peek(python.held, c"_shutdown") != threading.shutdown.pointer()
        || threading.sizes != sizes(python.held, &threading.namespace)
}

/// Returns how many threads, locks of threads and functions for the end `threading` knows.
pub(crate) fn sizes(held: Held, threading: &Object) -> [isize; 3] {
    let peek = |name| threading.peek(held, name);
    // SAFETY: borrowed from a living dictionary and looked at before anything changes it; a function gives -1 and an
    // exception for what is not of its kind.
    let sizes = unsafe {
        [
            ffi::PyDict_Size(peek(c"_active")),
            ffi::PySet_Size(peek(c"_shutdown_locks")),
            ffi::PyList_Size(peek(c"_threading_atexits")),
        ]
    };
    object::clear();
    sizes
}

/// `wait_for_thread_shutdown`.
fn join_threads(held: Held) {
    // SAFETY: the dictionary of modules lives as long as the interpreter.
    let modules = unsafe { Object::borrow(ffi::PyImport_GetModuleDict()) };
    if let Some(threading) = modules.and_then(|modules| modules.item(held, c"threading"))
        && threading.method(held, c"_shutdown", &[]).is_err()
    {
        object::unraisable(Some(&threading));
    }
}

/// `flush_std_files`.
fn flush_standard_streams(held: Held) -> bool {
    let open = |name| {
        object::sys(held, name).filter(|stream| !stream.is_none()).filter(|stream| {
            !stream.attribute(held, c"closed").map_or_else(forget, |closed| closed.is_true())
        })
    };
    let mut flushed = true;
    if let Some(stdout) = open(c"stdout")
        && stdout.method(held, c"flush", &[]).is_err()
    {
        object::unraisable(Some(&stdout));
        flushed = false;
    }
    if let Some(stderr) = open(c"stderr")
        && stderr.method(held, c"flush", &[]).is_err()
    {
        object::clear();
        flushed = false;
    }
    flushed
}

fn forget(_: Raised) -> bool {
    object::clear();
    false
}

/// Lets go of the modules that this request brought in, and of what they hold.
fn drop_modules(python: &Python) {
    // SAFETY: the dictionary of modules lives as long as the interpreter.
    let Some(modules) = (unsafe { Object::borrow(ffi::PyImport_GetModuleDict()) }) else { return };
    for (name, module) in modules.entries_not_in(&python.pristine.modules) {
        drop(module);
        // SAFETY: the objects are held meanwhile, and so is the interpreter.
        if unsafe { ffi::PyDict_DelItem(modules.pointer(), name.pointer()) } == -1 {
            object::clear();
        }
    }
}

/// `finalize_modules`, for the modules that this request brought in.
fn clear_modules(python: &Python) {
    let held = python.held;
    let none = Object::none(held);
    if python.pristine.builtins.item(held, c"_").is_some() {
        unraisable_if(python.pristine.builtins.set_item(held, c"_", &none));
    }
    for name in SYS_CLEARED {
        if object::sys(held, name).is_some_and(|value| !value.is_none()) {
            unraisable_if(object::set_sys(held, name, &none));
        }
    }
    for (name, original) in [(c"stdin", c"__stdin__"), (c"stdout", c"__stdout__"), (c"stderr", c"__stderr__")]
    {
        let original = object::sys(held, original).unwrap_or_else(|| none.clone());
        if !object::sys(held, name).is_some_and(|stream| stream.is(&original)) {
            unraisable_if(object::set_sys(held, name, &original));
        }
    }
    let survivors = remove_modules(python, &none);
    restore_builtins(python);
    collect();
    for survivor in survivors.iter().rev() {
        // SAFETY: a weak reference, whose target is borrowed and made our own before anything can destroy it.
        let module = unsafe { Object::borrow(ffi::PyWeakref_GetObject(survivor.pointer())) };
        if let Some(module) = module.filter(|module| !module.is_none()) {
            // SAFETY: a living module, as `remove_modules` saw.
            unsafe { _PyModule_Clear(module.pointer()) };
        }
    }
    collect();
}

/// `finalize_restore_builtins`, for those that changed.
fn restore_builtins(python: &Python) {
    let pristine = &python.pristine;
    let changed = pristine.builtins.entries_not_in(&pristine.builtins_known);
    if changed.is_empty() && pristine.builtins.length() == pristine.builtins_known.len() {
        return;
    }
    // SAFETY: two living dictionaries.
    unsafe {
        ffi::PyDict_Clear(pristine.builtins.pointer());
        if ffi::PyDict_Update(pristine.builtins.pointer(), pristine.builtins_copy.pointer()) == -1 {
            object::clear();
        }
    }
}

/// `finalize_remove_modules`: takes all modules out of `sys.modules`, one by one in the order of the dictionary, so
/// that a destructor finds those imported before its own module gone already and the others still there.
///
/// Touching every module would be expensive. So the dictionary is replaced: first by one that looks as if the turn had come
/// to `__main__`, from which the modules of this request are taken one by one, then by an empty one. Gives weak
/// references to the modules of this request.
fn remove_modules(python: &Python, none: &Object) -> Vec<Object> {
    // SAFETY: the dictionary of modules lives as long as the interpreter.
    let Some(modules) = (unsafe { Object::borrow(ffi::PyImport_GetModuleDict()) }) else {
        return Vec::new();
    };
    let new = modules.entries_not_in(&python.pristine.modules);
    let stage = &python.pristine.modules_half_gone;
    for (name, module) in &new {
        // SAFETY: the objects are held meanwhile, and so is the interpreter.
        unsafe {
            if ffi::PyDict_SetItem(stage.pointer(), name.pointer(), module.pointer()) == -1 {
                object::unraisable(None);
            }
            if ffi::PyDict_DelItem(modules.pointer(), name.pointer()) == -1 {
                object::clear();
            }
        }
    }
    // SAFETY: a dictionary that `python` keeps.
    unsafe { orrery_warm_use_modules(stage.pointer()) };
    let (mut references, mut others) = (Vec::new(), Vec::new());
    for (name, module) in new {
        // SAFETY: living objects; the reference returned is new or null.
        unsafe {
            if ffi::PyModule_Check(module.pointer()) == 0 {
                others.push(name);
                continue;
            }
            match Object::own(ffi::PyWeakref_NewRef(module.pointer(), std::ptr::null_mut())) {
                Ok(reference) => references.push(reference),
                Err(Raised) => object::unraisable(None),
            }
            // Now the stage holds the last reference, unless the program has others.
            drop(module);
            if ffi::PyDict_SetItem(stage.pointer(), name.pointer(), none.pointer()) == -1 {
                object::unraisable(None);
            }
        }
    }
    for name in others {
        // SAFETY: the objects are held meanwhile, and so is the interpreter.
        if unsafe { ffi::PyDict_DelItem(stage.pointer(), name.pointer()) } == -1 {
            object::clear();
        }
    }
    if let Ok(empty) = Object::dict(python.held) {
        // SAFETY: a dictionary that is kept for ever.
        unsafe { orrery_warm_use_modules(empty.pointer()) };
        std::mem::forget(empty);
    }
    references
}

/// Flushes and closes the files that are still open: text before the buffers beneath, and raw files not at all, as
/// they hold nothing back.
fn close_files(python: &Python) {
    let (pristine, held) = (&python.pristine, python.held);
    let Ok(objects) = pristine.get_objects.call(&[]) else {
        return object::clear();
    };
    let standard: Vec<Object> = [c"__stdin__", c"__stdout__", c"__stderr__"]
        .into_iter()
        .filter_map(|name| object::sys(held, name))
        .flat_map(|stream| [stream.attribute(held, c"buffer").ok(), Some(stream)])
        .flatten()
        .collect();
    object::clear();
    let files: Vec<Object> = objects
        .items()
        .into_iter()
        .filter(|object| {
            object.has_type_below(&pristine.io_base) && !object.has_type_below(&pristine.raw_base)
        })
        .filter(|file| !standard.iter().any(|stream| stream.is(file)))
        .collect();
    let (buffers, texts): (Vec<_>, Vec<_>) =
        files.iter().partition(|file| file.has_type_below(&pristine.buffered_base));
    for file in texts.into_iter().chain(buffers) {
        if file.method(held, c"close", &[]).is_err() {
            object::clear();
        }
    }
}

fn collect() {
    // SAFETY: the lock is held. What is left at the end is collected even if the script switched the collector off.
    unsafe {
        ffi::PyGC_Enable();
        ffi::PyGC_Collect();
    }
}

fn unraisable_if(result: object::Result<()>) {
    if result.is_err() {
        object::unraisable(None);
    }
}
