"""Subinterpreters in which C extensions have a state of their own.

    with orrery.interpreters.Interpreter() as one, orrery.interpreters.Interpreter() as two:
        one.run("import regex")
        two.run("import regex")               # another instance: other static variables, other types
        print(two.evaluate("regex.findall('a+', 'aabaa')"))

Most C extensions keep their state in static variables, which all interpreters of a process share. An extension that was built with
`orrery-cc` (`CC=orrery-cc LDSHARED="orrery-cc -shared" pip install --no-binary :all: ...`) gets an instance for each interpreter that
imports it (orrery/instance.h). Other extensions are as ever.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import pickle
import sys
import time
from contextlib import contextmanager
from ctypes import c_int, c_uint, c_void_p
from functools import lru_cache
from types import TracebackType
from typing import Any, Dict, Iterator, List, Optional, Type

from orrery import _interpreter
from orrery._library import failure, library
from orrery.errors import Error


def _module_of_python() -> Optional[Any]:
    """Returns CPython's own module of subinterpreters: `_interpreters` from 3.13 on."""
    for name in ("_interpreters", "_xxsubinterpreters"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


_python: Any = _module_of_python()

#: Python from which on an interpreter with a lock of its own can load ctypes, by which instances are made.
_OWN_LOCK = (3, 13)

#: <limits.h>
_PTHREAD_KEYS_MAX = 1024

#: The module in the interpreter, by an expression that binds no name there.
_INSIDE = "__import__('orrery._interpreter')._interpreter"


class Interpreter:
    """A subinterpreter, in which `run` and `evaluate` work in the calling thread.

    `own_lock` gives it a global interpreter lock of its own, so that threads in several interpreters run at the same time; it needs
    Python 3.13. CPython itself refuses extensions there that do not declare to support that; those built with `orrery-cc` are loaded.

    It lives until it is closed, or the process ends. Raises `Error` where Python has no subinterpreters.
    """

    def __init__(self, *, own_lock: bool = False) -> None:
        if _python is None:
            raise Error("make an interpreter", "", "this Python has no subinterpreters", "use CPython 3.9 or later")
        if own_lock and sys.version_info < _OWN_LOCK:
            raise Error("make an interpreter", "with a lock of its own", "this Python's ctypes cannot be loaded there", "use CPython 3.13")
        # Else an extension of the main interpreter's could be the first that loads the library.
        library()
        self._instances = _interpreter.Table()
        self._id: Optional[Any] = None
        self._id = _create(own_lock)
        _open.append(self)
        prelude = (
            f"__import__('sys').path[:] = {sys.path!r}\n"
            f"{_INSIDE}.install({self._instances.address})\n"
        )
        try:
            self.run(prelude)
        except BaseException:
            _destroy(self._id)
            self._ended()
            raise

    def run(self, source: str) -> None:
        """Runs Python source in `__main__` of the interpreter.

        Raises `Error` with the text of an exception that it does not catch, and where the interpreter was closed or runs already.
        """
        if self._id is None:
            raise Error("run", "", "the interpreter was closed", "make another one")
        with self._entered():
            reason = _run(self._id, source)
        if reason is not None:
            raise Error("run in the interpreter", "", reason, "")

    def evaluate(self, expression: str) -> Any:
        """Returns the value of an expression in `__main__` of the interpreter: a copy, by pickle."""
        carrier = os.memfd_create("result", os.MFD_CLOEXEC)
        try:
            self.run(f"{_INSIDE}.evaluate({expression!r}, {carrier})")
            return pickle.loads(os.pread(carrier, os.fstat(carrier).st_size, 0))
        finally:
            os.close(carrier)

    @property
    def extensions(self) -> Dict[str, int]:
        """The extensions of which this interpreter has an instance: name, and how many bytes of state each has."""
        return dict(self.evaluate(f"{_INSIDE}.extensions()"))

    def close(self) -> None:
        """Ends the interpreter and its instances, when its threads have ended.

        Raises `Error` while it runs in another thread, and while it has threads that are not waited for (daemons, those of `_thread`).
        """
        if self._id is None:
            return
        left = self.evaluate(f"{_INSIDE}.end_threads()")
        if left:
            # CPython ends the process if such a one is left.
            raise Error("close the interpreter", "", f"{left} of its threads run", "wait for them in the interpreter")
        with self._entered():
            reason = _destroy(self._id)
        if reason is not None:
            raise Error("close the interpreter", "", reason, "wait for its threads")
        self._ended()
        for instance in reversed(list(self._instances)):
            if library().orrery_instance_destroy(instance) != 0:
                raise failure("end the instance of an extension", "", "wait for its threads")
        self._instances.clear()

    def _ended(self) -> None:
        self._id = None
        _open.remove(self)

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Binds this thread to the interpreter's instances, also to those that are made meanwhile."""
        with _interpreter.without_instances(), _gil_state(self._instances.thread_state):
            bound: List[int] = []
            try:
                for instance in self._instances:
                    if library().orrery_instance_attach(instance) != 0:
                        raise failure("enter the instance of an extension", "", "run it in one thread at a time")
                    bound.append(instance)
                try:
                    yield
                finally:
                    bound = list(self._instances)
            finally:
                for instance in reversed(bound):
                    library().orrery_instance_detach(instance)


@contextmanager
def _gil_state(thread_state: int) -> Iterator[None]:
    """Has PyGILState_Ensure in this thread find the interpreter that is run, and not the one that runs it.

    CPython does so itself from 3.12 on. Before, it keeps the first thread state of a thread under a key of pthread_key_create(3), so that a
    callback would wait for the lock that the thread has.
    """
    if not thread_state or sys.version_info >= (3, 12):
        yield
        return
    key = _gil_state_key()
    before = _C.pthread_getspecific(key)
    _C.pthread_setspecific(key, thread_state)
    try:
        yield
    finally:
        _C.pthread_setspecific(key, before)


#: Called with the interpreter's lock held, so that nothing of Python runs meanwhile.
_C = ctypes.PyDLL(None)
_C.pthread_getspecific.restype, _C.pthread_getspecific.argtypes = c_void_p, [c_uint]
_C.pthread_setspecific.restype, _C.pthread_setspecific.argtypes = c_int, [c_uint, c_void_p]


@lru_cache(maxsize=None)
def _gil_state_key() -> int:
    """Returns the key whose value is what PyGILState_GetThisThreadState returns. It has no name outside of CPython."""
    of_this_thread = ctypes.pythonapi.PyGILState_GetThisThreadState
    of_this_thread.restype = c_void_p
    state = of_this_thread()
    for key in range(_PTHREAD_KEYS_MAX):
        if state and _C.pthread_getspecific(key) == state:
            _C.pthread_setspecific(key, None)
            found = of_this_thread() is None
            _C.pthread_setspecific(key, state)
            if found:
                return key
    raise Error("make an interpreter", "", "this Python keeps thread states in an unknown place", "use CPython 3.12 or later")


#: Those that are not closed: Python would end them with no thread in their instances when their last reference is gone.
_open: List[Interpreter] = []


@atexit.register
def _close_all() -> None:
    for interpreter in list(reversed(_open)):
        try:
            interpreter.close()
        except Error as error:
            print(f"orrery: {error}", file=sys.stderr)


def _create(own_lock: bool) -> Any:
    if sys.version_info >= (3, 13):
        return _python.create("isolated" if own_lock else "legacy")
    return _python.create(isolated=False)


def _run(identifier: Any, source: str) -> Optional[str]:
    """Runs source; returns the text of the exception that ended it."""
    until = time.monotonic() + 1
    while True:
        try:
            raised = _python.run_string(identifier, source)
            break
        except Exception as error:
            # RunFailedError of before 3.13, and what says that it does not exist or runs already. Before 3.12 nothing runs while the
            # interpreter has another thread; one that was joined is there for a moment longer.
            if "more than one thread" not in str(error) or time.monotonic() > until:
                return str(error)
            time.sleep(0.001)
    if raised is None:
        return None
    return str(getattr(raised, "errdisplay", None) or getattr(raised, "formatted", None) or raised)


def _destroy(identifier: Any) -> Optional[str]:
    try:
        _python.destroy(identifier)
    except Exception as error:
        return str(error)
    return None
