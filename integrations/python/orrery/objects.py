"""Bytes that are in memory once for all programs that have the same, by the store of `orrery orc serve`.

    with orrery.objects.put(b"..." * 1000) as shared:
        name = shared.name                       # of the content: 64 hexadecimal digits
    with orrery.objects.get(name) as shared:
        print(bytes(shared.view[:3]))
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Optional

from orrery._command import Argument
from orrery._library import ObjectId, failure, library
from orrery.errors import Error

_NO_STORE = "`orrery orc stat` shows the store"


class Object:
    """Bytes that nobody can change. Views and this object keep them mapped; the store may forget them afterwards."""

    def __init__(self, handle: int, operation: str, value: str) -> None:
        address = library().orrery_object_map(handle, 0)
        if not address:
            error = failure(operation, value, _NO_STORE)
            library().orrery_object_release(handle)
            raise error
        length = library().orrery_object_length(handle)
        named = ObjectId()
        library().orrery_object_identify(handle, ctypes.byref(named))
        #: The BLAKE3 hash of the bytes, in hexadecimal.
        self.name = bytes(named.bytes).hex()
        memory = (ctypes.c_ubyte * length).from_address(address)
        # With the last view of the memory. At the end of the process the kernel does it.
        weakref.finalize(memory, library().orrery_object_release, handle).atexit = False
        self._memory: Optional[ctypes.Array[ctypes.c_ubyte]] = memory

    @property
    def view(self) -> memoryview:
        """The bytes, read-only, without a copy."""
        if self._memory is None:
            raise Error("view the object", self.name, "it was released", "view it before, and keep the view")
        return memoryview(self._memory).cast("B").toreadonly()

    def __len__(self) -> int:
        return 0 if self._memory is None else len(self._memory)

    def __bytes__(self) -> bytes:
        return bytes(self.view)

    def release(self) -> None:
        """Drops this reference; views stay valid."""
        self._memory = None

    def __enter__(self) -> Object:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def connect(directory: Argument) -> None:
    """Uses the store in a directory, or at a socket, instead of the usual one (`$ORRERY_ORC`, else /run/orrery/orc)."""
    if library().orrery_object_connect(os.fsencode(directory)) != 0:
        raise failure("connect to the store", os.fspath(directory), _NO_STORE)


def hash(data: bytes) -> str:
    """Returns the name that these bytes have as an object: their BLAKE3 hash. No store is needed."""
    named = ObjectId()
    if library().orrery_object_hash(data, len(data), ctypes.byref(named)) != 0:
        raise failure("hash", f"{len(data)} bytes", "give at least one byte")
    return bytes(named.bytes).hex()


def put(data: bytes) -> Object:
    """Registers bytes with the store, which copies them unless it has them."""
    handle = library().orrery_object_register(data, len(data), 0)
    if not handle:
        raise failure("put", f"{len(data)} bytes", _NO_STORE)
    return Object(handle, "put", f"{len(data)} bytes")


def get(name: str) -> Object:
    """Returns the object of a name."""
    try:
        wanted = ObjectId.from_buffer_copy(bytes.fromhex(name))
        if len(name) != 64:
            raise ValueError
    except ValueError:
        cause = "a name is 64 hexadecimal digits"
        raise Error("get the object", repr(name), cause, "take it from Object.name or objects.hash") from None
    handle = library().orrery_object_request(ctypes.byref(wanted))
    if not handle:
        raise failure("get the object", name, _NO_STORE)
    return Object(handle, "get the object", name)


def open(path: Argument) -> Object:
    """Returns the object of the bytes that a file has now."""
    handle = library().orrery_object_open(os.fsencode(path))
    if not handle:
        raise failure("open", os.fspath(path), _NO_STORE)
    return Object(handle, "open", os.fspath(path))
