"""The part of `orrery.interpreters` that runs in a subinterpreter: it has extensions imported as instances."""

from __future__ import annotations

import _thread
import ctypes
import importlib.machinery
import mmap
import os
import pickle
import sys
import threading
import time
from contextlib import contextmanager
from ctypes import PYFUNCTYPE, c_char_p, c_int, c_uint64, c_void_p, py_object, pythonapi
from types import BuiltinFunctionType, ModuleType
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Set, Tuple

from orrery._library import library

#: What every library that was built with the pass exports.
_DESCRIPTOR = b"\0orrery_cls_descriptor\0"

#: How many extensions an interpreter may have instances of.
_CAPACITY = 1022


class Table:
    """Handles of an interpreter's instances, and its thread state, in memory that it and the one that made it both use."""

    def __init__(self, address: Optional[int] = None) -> None:
        kind = c_uint64 * (2 + _CAPACITY)
        self._words = kind() if address is None else kind.from_address(address)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words)

    def __len__(self) -> int:
        return self._words[0]

    def __iter__(self) -> Iterator[int]:
        for number in range(2, 2 + len(self)):
            yield self._words[number]

    @property
    def thread_state(self) -> int:
        """The address of the PyThreadState in which the interpreter is run; 0 before it was."""
        return self._words[1]

    @thread_state.setter
    def thread_state(self, address: int) -> None:
        self._words[1] = address

    def append(self, handle: int) -> None:
        self._words[2 + len(self)] = handle
        self._words[0] += 1

    def clear(self) -> None:
        self._words[0] = 0


_table = Table()

#: A mark for each thread that was started by _thread.start_new_thread and has not ended.
_started: Set[object] = set()

#: Of those extensions that are instances: their libraries, by device and inode, and by their modules' names what each has of state, and
#: the module, if it is made in one phase.
_libraries: Dict[Tuple[int, int], int] = {}
_sizes: Dict[str, int] = {}
_modules: Dict[str, ModuleType] = {}


def install(address: int) -> None:
    """Has this interpreter import extensions that were built with the pass as instances, which it notes in the table."""
    global _table
    _table = Table(address)
    of_this_thread = pythonapi.PyThreadState_Get
    of_this_thread.restype = c_void_p
    _table.thread_state = of_this_thread()
    sys.meta_path.insert(0, _Finder())
    _thread.start_new_thread = _in_instances(_thread.start_new_thread)
    # The threads of `threading` begin there, whichever function starts them.
    bootstrap = threading.Thread._bootstrap  # type: ignore[attr-defined]

    def attached(self: threading.Thread) -> None:
        with _Attached():
            bootstrap(self)

    threading.Thread._bootstrap = attached  # type: ignore[attr-defined]


def evaluate(expression: str, carrier: int) -> None:
    """Writes the pickled value of an expression in `__main__` to a descriptor."""
    scope = dict(vars(sys.modules["__main__"]))
    os.pwrite(carrier, pickle.dumps(eval(expression, scope)), 0)


def extensions() -> Dict[str, int]:
    """Returns the names of the extensions that are instances, and how many bytes of state each has."""
    return dict(_sizes)


def end_threads() -> int:
    """Waits for the threads that the end of an interpreter waits for; returns how many others there are."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    return _threads()


def _threads() -> int:
    """Returns how many threads this interpreter has beside the calling one. Those that are ending have a second for it."""
    until = time.monotonic() + 1
    while True:
        # The interpreter counts a thread when it runs, which may be after it was started, and for a moment after it was joined.
        left = max(_thread._count(), len(_started))
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.001)


@contextmanager
def without_instances() -> Iterator[None]:
    """Has the calling thread be in no instance of this interpreter, while another interpreter runs in it."""
    for instance in reversed(list(_table)):
        library().orrery_instance_detach(instance)
    try:
        yield
    finally:
        for instance in _table:
            library().orrery_instance_attach(instance)


class _Attached:
    """Binds the calling thread to all instances of this interpreter."""

    def __enter__(self) -> None:
        self._instances = list(_table)
        for instance in self._instances:
            library().orrery_instance_attach(instance)

    def __exit__(self, *_: object) -> None:
        for instance in reversed(self._instances):
            library().orrery_instance_detach(instance)


def _in_instances(start: Callable[..., int]) -> Callable[..., int]:
    """Returns a function that starts threads which are bound to this interpreter's instances."""

    def start_attached(function: Callable[..., Any], *arguments: Any) -> int:
        mark = object()

        def run(*arguments: Any, **named: Any) -> None:
            try:
                with _Attached():
                    function(*arguments, **named)
            finally:
                _started.discard(mark)

        _started.add(mark)
        try:
            return start(run, *arguments)
        except BaseException:
            _started.discard(mark)
            raise

    return start_attached


class _Finder:
    """Finds what others find, and has what was built with the pass loaded as an instance."""

    @staticmethod
    def find_spec(name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and spec.origin and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            if _was_built_with_the_pass(spec.origin):
                spec.loader = _Loader(spec.name, spec.origin)
        return spec


class _Loader(importlib.machinery.ExtensionFileLoader):
    """Makes an instance of an extension, and has it make its module."""

    name: str
    path: str
    _definition: Optional[int] = None

    def create_module(self, spec: Any) -> ModuleType:
        known = _modules.get(spec.name)
        if known is not None:
            # It was removed from `sys.modules`, and would initialize the same state once more.
            return known
        file = os.stat(self.path)
        self._library = _libraries.get((file.st_dev, file.st_ino)) or self._make_instance()
        _libraries[file.st_dev, file.st_ino] = self._library
        made: Any = PYFUNCTYPE(py_object)(self._entry())()
        _sizes[spec.name] = library().orrery_instance_state_size(self._library)
        if isinstance(made, ModuleType):
            _name(made, spec)
            definition = _module_definition(made)
            if definition:
                # So that PyState_FindModule finds it in this interpreter.
                pythonapi.PyState_AddModule(py_object(made), c_void_p(definition))
            _modules[spec.name] = made
            return made
        # A definition, of which the module is made (PEP 489). The extension has the one reference to it.
        pythonapi.Py_IncRef(py_object(made))
        self._definition = id(made)
        of_definition = pythonapi.PyModule_FromDefAndSpec2
        of_definition.restype, of_definition.argtypes = py_object, [c_void_p, py_object, c_int]
        module: ModuleType = of_definition(self._definition, spec, sys.api_version)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if self._definition is not None:
            execute = pythonapi.PyModule_ExecDef
            execute.restype, execute.argtypes = c_int, [py_object, c_void_p]
            execute(module, self._definition)

    def _make_instance(self) -> int:
        """Makes an instance, and binds the calling thread to it. Returns its library.

        It is there until the interpreter ends, also if it then makes no module: objects that it has made may be left.
        """
        if _threads() > 0:
            raise self._error("this interpreter's other threads would use another state: import it before they are started")
        if len(_table) == _CAPACITY:
            raise self._error(f"an interpreter can have instances of {_CAPACITY} extensions")
        loaded: Optional[int] = library().orrery_instance_load(os.fsencode(self.path), None)
        instance: Optional[int] = loaded and library().orrery_instance_create(loaded)
        if not loaded or not instance:
            raise self._error(_last_error())
        if library().orrery_instance_attach(instance) != 0:
            reason = _last_error()
            library().orrery_instance_destroy(instance)
            raise self._error(reason)
        _table.append(instance)
        return loaded

    def _entry(self) -> int:
        """Returns the address of the function that makes the module (PEP 489 has how its name is made)."""
        last = self.name.rpartition(".")[2]
        try:
            symbol = b"PyInit_" + last.encode("ascii")
        except UnicodeEncodeError:
            symbol = b"PyInitU_" + last.encode("punycode").replace(b"-", b"_")
        address = library().orrery_instance_symbol(self._library, symbol)
        if not address:
            raise self._error(_last_error())
        return int(address)

    def _error(self, reason: str) -> ImportError:
        return ImportError(f"cannot make an instance of {self.path}: {reason}", name=self.name, path=self.path)


def _was_built_with_the_pass(path: str) -> bool:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(_DESCRIPTOR) >= 0
    except (OSError, ValueError):
        # The import reports what is wrong with it.
        return False


def _name(module: ModuleType, spec: Any) -> None:
    """Gives the module and its functions the whole name, which the import system has otherwise passed to where they are made."""
    short = module.__name__
    module.__name__ = spec.name
    module.__file__ = spec.origin
    for function in vars(module).values():
        if isinstance(function, BuiltinFunctionType) and function.__module__ == short:
            function.__module__ = spec.name


def _module_definition(module: ModuleType) -> Optional[int]:
    definition = pythonapi.PyModule_GetDef
    definition.restype, definition.argtypes = c_void_p, [py_object]
    found: Optional[int] = definition(module)
    return found


def _last_error() -> str:
    text = library().orrery_last_error()
    return str(text, errors="replace") if text else os.strerror(ctypes.get_errno())
