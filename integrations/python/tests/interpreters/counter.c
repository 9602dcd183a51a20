/*
 * An extension as most are: static variables, a static type, an exception and a cache that are made once, memory of malloc.
 * The modules `counter` and `second` are made in one phase, `phases` in two.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>

static long count;
static PyObject *error;
static PyObject *last;
static char *text;

typedef struct {
    PyObject_HEAD long number;
} Ticket;

static PyObject *ticket_number(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(((Ticket *)self)->number);
}

static PyMethodDef ticket_methods[] = {
    {"number", ticket_number, METH_NOARGS, "The number of the ticket."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject TicketType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "counter.Ticket",
    .tp_basicsize = sizeof(Ticket),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_methods = ticket_methods,
};

static PyObject *next_ticket(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    Ticket *ticket = PyObject_New(Ticket, &TicketType);
    if (!ticket)
        return NULL;
    ticket->number = ++count;
    Py_INCREF(ticket);
    Py_XSETREF(last, (PyObject *)ticket);
    return (PyObject *)ticket;
}

static PyObject *fail(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    PyErr_Format(error, "after %ld", count);
    return NULL;
}

/* Keeps a copy of a text in memory of malloc, and returns the one before. */
static PyObject *note(PyObject *self, PyObject *value) {
    (void)self;
    const char *read = PyUnicode_AsUTF8(value);
    if (!read)
        return NULL;
    char *copy = malloc(strlen(read) + 1);
    if (!copy)
        return PyErr_NoMemory();
    strcpy(copy, read);
    PyObject *before = PyUnicode_FromString(text ? text : "");
    free(text);
    text = copy;
    return before;
}

/* Returns in which interpreter a callback of a C library would run. */
static PyObject *of_gil_state(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *number = PyLong_FromLongLong(PyInterpreterState_GetID(PyThreadState_Get()->interp));
    PyGILState_Release(state);
    return number;
}

static PyMethodDef methods[] = {
    {"next", next_ticket, METH_NOARGS, "Returns the next ticket."},
    {"fail", fail, METH_NOARGS, "Raises the module's exception."},
    {"of_gil_state", of_gil_state, METH_NOARGS,
     "Returns the number of the interpreter that PyGILState_Ensure finds."},
    {"note", note, METH_O, "Keeps a text, and returns the one before."},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module) {
    if (getenv("COUNTER_FAILS")) {
        PyErr_SetString(PyExc_RuntimeError, "as the environment has it");
        return -1;
    }
    if (PyType_Ready(&TicketType) < 0)
        return -1;
    Py_XSETREF(error, PyErr_NewException("counter.error", NULL, NULL));
    if (!error)
        return -1;
    Py_INCREF(&TicketType);
    Py_INCREF(error);
    if (PyModule_AddObject(module, "Ticket", (PyObject *)&TicketType) < 0)
        return -1;
    return PyModule_AddObject(module, "error", error);
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "counter",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit_counter(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && fill(module) < 0)
        Py_CLEAR(module);
    return module;
}

static struct PyModuleDef second_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "second",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit_second(void) { return PyModule_Create(&second_definition); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, fill},
    {0, NULL},
};

static struct PyModuleDef phases_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "phases",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_phases(void) { return PyModuleDef_Init(&phases_definition); }
