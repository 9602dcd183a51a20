//! Names that libpython exports and `pyo3-ffi` does not declare, and the functions of `runtime.c`.

use std::ffi::{c_char, c_int};

use pyo3_ffi::PyObject;

unsafe extern "C" {
    /// Set when a program ended by an uncaught `KeyboardInterrupt`: the process then dies by `SIGINT`.
    pub(crate) static mut _Py_UnhandledKeyboardInterrupt: c_int;

    /// If the exception that is set is `SystemExit`: prints what it has to print, clears it, stores the exit status
    /// and answers 1.
    pub(crate) fn _Py_HandleSystemExit(status: *mut c_int) -> c_int;

    /// Sets the names in a module to None, underscored ones first.
    pub(crate) fn _PyModule_Clear(module: *mut PyObject);

    /// Writes to `sys.stderr`, at most 1,000 bytes.
    pub(crate) fn PySys_WriteStderr(format: *const c_char, ...);

    /// `PY_MINOR_VERSION`.
    #[link_name = "orrery_warm_minor_version"]
    pub(crate) safe static PY_MINOR_VERSION: c_int;

    /// `PyCF_IGNORE_COOKIE`: the text is UTF-8, whatever it says of itself.
    #[link_name = "orrery_warm_ignore_cookie"]
    pub(crate) safe static PYCF_IGNORE_COOKIE: c_int;

    /// See `runtime.c`.
    pub(crate) fn orrery_warm_begin_finalizing();

    /// See `runtime.c`.
    pub(crate) fn orrery_warm_use_modules(modules: *mut PyObject);

    /// See `runtime.c`.
    pub(crate) fn orrery_warm_has_finalizers() -> c_int;

    /// See `runtime.c`.
    pub(crate) fn orrery_warm_runtime_fits() -> c_int;

    /// See `runtime.c`.
    pub(crate) fn orrery_warm_set_flag(name: *const c_char, value: *mut PyObject) -> c_int;

    /// See `runtime.c`.
    pub(crate) fn orrery_warm_use_utf8_mode();
}
