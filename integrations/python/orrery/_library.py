"""liborrery.so.0, loaded when it is first used."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import lru_cache

from orrery.errors import Error


class ObjectId(ctypes.Structure):
    """struct orrery_object_id (orrery/object.h)."""

    _fields_ = [("bytes", c_ubyte * 32)]


#: Functions of the C headers: what they return, and their arguments.
_FUNCTIONS = {
    "orrery_last_error": (c_char_p, []),
    # orrery/object.h
    "orrery_object_connect": (c_int, [c_char_p]),
    "orrery_object_hash": (c_int, [c_char_p, c_size_t, POINTER(ObjectId)]),
    "orrery_object_register": (c_void_p, [c_char_p, c_size_t, c_uint]),
    "orrery_object_open": (c_void_p, [c_char_p]),
    "orrery_object_request": (c_void_p, [POINTER(ObjectId)]),
    "orrery_object_map": (c_void_p, [c_void_p, c_uint]),
    "orrery_object_length": (c_size_t, [c_void_p]),
    "orrery_object_identify": (c_int, [c_void_p, POINTER(ObjectId)]),
    "orrery_object_release": (c_int, [c_void_p]),
    # orrery/instance.h
    "orrery_instance_load": (c_void_p, [c_char_p, c_void_p]),
    "orrery_instance_symbol": (c_void_p, [c_void_p, c_char_p]),
    "orrery_instance_state_size": (c_size_t, [c_void_p]),
    "orrery_instance_create": (c_void_p, [c_void_p]),
    "orrery_instance_attach": (c_int, [c_void_p]),
    "orrery_instance_detach": (c_int, [c_void_p]),
    "orrery_instance_destroy": (c_int, [c_void_p]),
    # orrery/rollback.h
    "orrery_rollback_snapshot": (c_int, [POINTER(c_uint64)]),
    "orrery_rollback_resume": (c_int, [c_uint64, c_int]),
    "orrery_rollback_discard": (c_int, [c_uint64]),
}


@lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """Loads the library: `$ORRERY_LIBRARY`, else liborrery.so.0, where the loader looks."""
    name = os.environ.get("ORRERY_LIBRARY") or "liborrery.so.0"
    try:
        loaded = ctypes.CDLL(name, use_errno=True)
    except OSError as error:
        way_out = "install liborrery0, or name the library in ORRERY_LIBRARY"
        raise Error("load the library", name, str(error), way_out) from None
    for function, (result, arguments) in _FUNCTIONS.items():
        known = getattr(loaded, function)
        known.restype, known.argtypes = result, arguments
    return loaded


def failure(operation: str, value: str, way_out: str) -> Error:
    """Returns the error of the last call, in the library's words."""
    text = library().orrery_last_error()
    cause = text.decode(errors="replace") if text else os.strerror(ctypes.get_errno())
    return Error(operation, value, cause, way_out, ctypes.get_errno())
