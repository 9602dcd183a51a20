"""Calls a function and then undoes what it did to this process.

    total = orrery.rollback.call(lambda: damage_everything())

The snapshot is of the whole process, the interpreter in it, as orrery/rollback.h describes: what comes back is not Python's idea of the
state but every byte, so no object, module, reference count or free list can be forgotten. Only the result crosses.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from ctypes import byref, c_uint64
from typing import Any, Callable, TypeVar

from orrery._library import failure, library
from orrery.errors import Error

Result = TypeVar("Result")

_WAY_OUT = "call it from the main thread of a process that has no other threads"
_RETURNED, _RAISED, _UNFIT = b"R", b"E", b"U"


class NotPicklable(Error):
    """The function has done its work and was undone, but its result, or exception, cannot be pickled."""


def call(function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
    """Returns what `function(*arguments, **named)` returns, or raises what it raises, when all that it did to the process is undone.

    The result, or the exception, is pickled: it is a copy. Effects outside of the process stay: files, output, messages. Random
    numbers that the function drew are drawn again afterwards, those of OpenSSL and `random` among them.

    Raises `Error` where no snapshot can be taken, before the function is called: this process must have one thread.
    """
    # A file's contents are not undone, its offset would be.
    carrier = os.memfd_create("result", os.MFD_CLOEXEC)
    try:
        for stream in (sys.stdout, sys.stderr):
            # Else what waits in their buffers would be written again after the rollback.
            if stream is not None:
                stream.flush()
        snapshot = c_uint64()
        returned = library().orrery_rollback_snapshot(byref(snapshot))
        if returned == 0:
            os.pwrite(carrier, _outcome(function, arguments, named), 0)
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            library().orrery_rollback_resume(snapshot, 1)
            raise failure("undo", _name(function), "")
        if returned < 0:
            raise failure("call and undo", _name(function), _WAY_OUT)
        library().orrery_rollback_discard(snapshot)
        outcome = os.pread(carrier, os.fstat(carrier).st_size, 0)
    finally:
        os.close(carrier)
    kind, body = outcome[:1], outcome[1:]
    if kind == _UNFIT:
        raise NotPicklable("return the result of", _name(function), body.decode(), "return plain data")
    result = pickle.loads(body)
    if kind == _RAISED:
        raise result
    return result  # type: ignore[no-any-return]


def _outcome(function: Callable[..., Any], arguments: Any, named: Any) -> bytes:
    """Calls the function; returns its outcome in bytes."""
    try:
        try:
            kind, value = _RETURNED, function(*arguments, **named)
        except Exception as error:
            kind, value = _RAISED, error
        body = pickle.dumps(value)
        if kind == _RAISED:
            # Some exceptions can be pickled and not be made again.
            pickle.loads(body)
        return kind + body
    except Exception:
        return _UNFIT + traceback.format_exc(limit=0).strip().encode(errors="replace")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
