"""Equal files and tables of Python programs in memory once, through the store of `orrery orc serve`.

    import orrery_orc
    model = orrery_orc.open("embeddings.bin")        # a memoryview that nobody can write
    vectors = numpy.frombuffer(model, dtype="float32")

Objects of Python itself cannot be shared so: their headers hold reference counts, which change all the time. What can be is
what they refer to: buffers, which arrays, memoryviews, numpy and pickle (protocol 5, buffers out of band) take as they are.
"""

import ctypes
import os
import weakref

_library = ctypes.CDLL(os.environ.get("ORRERY_LIBRARY", "liborrery.so"), use_errno=True)
for _name, _result, _arguments in (
    ("orc_open", ctypes.c_void_p, [ctypes.c_char_p]),
    ("orc_register", ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint]),
    ("orc_map", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_uint]),
    ("orc_length", ctypes.c_size_t, [ctypes.c_void_p]),
    ("orc_release", ctypes.c_int, [ctypes.c_void_p]),
    ("orc_error", ctypes.c_char_p, []),
):
    _function = getattr(_library, _name)
    _function.restype, _function.argtypes = _result, _arguments


def _fail(path=None):
    text = (_library.orc_error() or b"").decode(errors="replace")
    raise OSError(ctypes.get_errno(), text, path)


def _view(thing, path=None):
    if not thing:
        _fail(path)
    address = _library.orc_map(thing, 0)
    if not address:
        _library.orc_release(thing)
        _fail(path)
    memory = (ctypes.c_ubyte * _library.orc_length(thing)).from_address(address)
    # Views of the memory keep it alive; with the last one it is let go of.
    weakref.finalize(memory, _library.orc_release, thing).atexit = False
    return memoryview(memory).cast("B").toreadonly()


def open(path):
    """The bytes that a file has now, as a read-only memoryview: one copy for all who open a file with the same bytes."""
    return _view(_library.orc_open(os.fsencode(path)), path)


def register(data):
    """The same of bytes at hand: they may be forgotten afterwards."""
    data = bytes(data)
    return _view(_library.orc_register(data, len(data), 0))
