// What a faithful end of a script needs and CPython's public interface does not offer: to say that the
// interpreter is finalizing, upon which daemon threads end themselves instead of taking the interpreter lock
// again, and sys.is_finalizing() is true for destructors; and to take all modules away without touching each.
// Needs the internal headers, hence C.

#define Py_BUILD_CORE_MODULE 1
#include <Python.h>
#include <pycore_interp.h>
#include <pycore_pystate.h>
#include <pycore_runtime.h>
#include <structmember.h>

extern void _PyThreadState_DeleteExcept(_PyRuntimeState *runtime, PyThreadState *tstate);

// Marks the runtime as finalizing by the calling thread, and clears the states of all other threads, as
// Py_FinalizeEx does after the exit handlers. The calling thread holds the interpreter lock.
void orrery_warm_begin_finalizing(void) {
    PyThreadState *tstate = PyThreadState_Get();
    _PyRuntimeState_SetFinalizing(&_PyRuntime, tstate);
    _PyThreadState_DeleteExcept(&_PyRuntime, tstate);
}

// Makes modules, a borrowed dictionary that lives as long as the interpreter, what import statements look
// into. Neither the old nor the new dictionary changes its reference count.
void orrery_warm_use_modules(PyObject *modules) {
    PyInterpreterState *interp = PyInterpreterState_Get();
    interp->modules = modules;
    if (PyDict_SetItemString(interp->sysdict, "modules", modules) < 0) {
        PyErr_WriteUnraisable(NULL);
    }
}

static int type_has_finalizer(PyTypeObject *type) {
    return type->tp_finalize != NULL || type->tp_del != NULL;
}

// Of a class, too, because instances without a dictionary may not be known to the collector.
static int has_finalizer(PyObject *object) {
    return type_has_finalizer(Py_TYPE(object)) ||
           (PyType_Check(object) && type_has_finalizer((PyTypeObject *)object)) ||
           (PyWeakref_Check(object) && ((PyWeakReference *)object)->wr_callback != NULL);
}

// Whether destroying the objects that the program has made might run Python code or close a file: a
// destructor, the callback of a weak reference, a generator that is to be ended, a callback of the collector.
// Writes to nothing.
int orrery_warm_has_finalizers(void) {
    struct _gc_runtime_state *gc = &PyInterpreterState_Get()->gc;
    if (gc->callbacks != NULL && PyList_GET_SIZE(gc->callbacks) > 0) {
        return 1;
    }
    for (int generation = 0; generation < NUM_GENERATIONS; generation++) {
        PyGC_Head *head = &gc->generations[generation].head;
        for (PyGC_Head *at = _PyGCHead_NEXT(head); at != head; at = _PyGCHead_NEXT(at)) {
            if (has_finalizer((PyObject *)(at + 1))) {
                return 1;
            }
        }
    }
    return 0;
}

// Whether the layout that this file was compiled for is the layout of the library that is loaded.
int orrery_warm_runtime_fits(void) {
    if (_PyRuntimeState_GetFinalizing(&_PyRuntime) != NULL || _Py_IsFinalizing()) {
        return 0;
    }
    PyThreadState *tstate = PyThreadState_Get();
    _PyRuntimeState_SetFinalizing(&_PyRuntime, tstate);
    int fits = _Py_IsFinalizing();
    _PyRuntimeState_SetFinalizing(&_PyRuntime, NULL);
    fits = fits && !_Py_IsFinalizing();
    return fits && PyInterpreterState_Get()->modules == PyImport_GetModuleDict();
}

// Sets a flag of sys.flags, a structure that Python code cannot change. Returns -1 where there is none of that name.
int orrery_warm_set_flag(const char *name, PyObject *value) {
    PyObject *flags = PySys_GetObject("flags");
    if (flags == NULL) {
        return -1;
    }
    for (PyMemberDef *member = Py_TYPE(flags)->tp_members; member != NULL && member->name != NULL; member++) {
        if (strcmp(member->name, name) == 0) {
            PyObject **place = (PyObject **)((char *)flags + member->offset);
            PyObject *old = *place;
            Py_INCREF(value);
            *place = value;
            Py_XDECREF(old);
            return 0;
        }
    }
    return -1;
}

// Turns the UTF-8 mode on: what the locale's encoding is for open() and its like.
void orrery_warm_use_utf8_mode(void) { _PyRuntime.preconfig.utf8_mode = 1; }

// Constants of the headers that pyo3-ffi does not have.
const int orrery_warm_minor_version = PY_MINOR_VERSION;
const int orrery_warm_ignore_cookie = PyCF_IGNORE_COOKIE;
