"""Equal files, tables and heap data of Python programs in memory once, through the store of `orrery orc serve`.

    import orrery_orc
    model = orrery_orc.open("embeddings.bin")        # a memoryview that nobody can write
    vectors = numpy.frombuffer(model, dtype="float32")

    words = load_dictionary()                        # whatever the program makes of it, on its own heap
    orrery_orc.share(words, *sys.modules.values())   # the large strings and bytes in there, in place
    orrery_orc.freeze(matrix)                        # the buffer of an array that is not written any more

The headers of Python's objects hold reference counts, which change whenever somebody looks, and containers hold addresses, which are
each process' own. What can be shared is what lies behind the headers of large objects: the characters of strings, the bytes
of bytes, the numbers of arrays. It is shared page by page, in whole pages, at the addresses where it is.
"""

import ctypes
import gc
import mmap
import os
import sys
import types
import weakref

_library = ctypes.CDLL(os.environ.get("ORRERY_LIBRARY", "liborrery.so"), use_errno=True)
for _name, _result, _arguments in (
    ("orrery_object_open", ctypes.c_void_p, [ctypes.c_char_p]),
    ("orrery_object_register", ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint]),
    ("orrery_object_map", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_uint]),
    ("orrery_object_length", ctypes.c_size_t, [ctypes.c_void_p]),
    ("orrery_object_publish", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]),
    ("orrery_object_release", ctypes.c_int, [ctypes.c_void_p]),
    ("orrery_last_error", ctypes.c_char_p, []),
):
    _function = getattr(_library, _name)
    _function.restype, _function.argtypes = _result, _arguments


def _fail(path=None):
    text = (_library.orrery_last_error() or b"").decode(errors="replace")
    raise OSError(ctypes.get_errno(), text, path)


def _view(thing, path=None):
    if not thing:
        _fail(path)
    address = _library.orrery_object_map(thing, 0)
    if not address:
        _library.orrery_object_release(thing)
        _fail(path)
    memory = (ctypes.c_ubyte * _library.orrery_object_length(thing)).from_address(address)
    # Views of the memory keep it alive; with the last one it is let go of.
    weakref.finalize(memory, _library.orrery_object_release, thing).atexit = False
    return memoryview(memory).cast("B").toreadonly()


def open(path):
    """The bytes that a file has now, as a read-only memoryview: one copy for all who open a file with the same bytes."""
    return _view(_library.orrery_object_open(os.fsencode(path)), path)


def register(data):
    """The same of bytes at hand: they may be forgotten afterwards."""
    data = bytes(data)
    return _view(_library.orrery_object_register(data, len(data), 0))


# ---- heap data ----

_FREEZE = 8
_LEAST = 2 * mmap.PAGESIZE
# What was shared, by address: it must never be freed, as its memory cannot be written again.
_frozen = {}

# Large objects get memory of their own, which begins at a page, so that what lies in it is equal page for page in all
# programs. By itself the C library moves this threshold (mallopt(3), M_MMAP_THRESHOLD) up to 32 MiB as a program runs.
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
if _mallopt:
    _mallopt(-3, 128 << 10)


def _publish(owner, address, length):
    """Shares the whole pages in a range that `owner` keeps; how many bytes."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if end - start < mmap.PAGESIZE or address in _frozen:
        return 0
    thing = _library.orrery_object_publish(start, end - start, _FREEZE)
    if not thing:
        _fail()
    # The object is held for as long as the program runs, and so is what lies in its pages.
    _frozen[address] = owner, thing
    return end - start


def _payload(thing):
    """Where the bytes of a large string or bytes lie, and how many they are."""
    if type(thing) is bytes:
        return id(thing) + sys.getsizeof(b"") - 1, len(thing)
    # One, two or four bytes for each character, behind one of two headers.
    width = 1 if thing.isascii() else next(width for width in (1, 2, 4) if ord(max(thing)) < 1 << 8 * width or width == 4)
    header = sys.getsizeof("") - 1 if thing.isascii() else sys.getsizeof("\x80") - 2
    return id(thing) + header, len(thing) * width


def _is_where_it_should_be(thing, address, length):
    """Whether this Python lays its objects out as we think: its own bytes tell."""
    if type(thing) is bytes:
        wanted = thing
    elif thing.isascii():
        wanted = thing.encode("ascii")
    else:
        codec = {1: "latin-1", 2: "utf-16", 4: "utf-32"}[length // len(thing)]
        codec += "" if codec == "latin-1" else "-le" if sys.byteorder == "little" else "-be"
        wanted = thing.encode(codec, "surrogatepass")
    return ctypes.string_at(address, length) == wanted


# What a code object refers to; the garbage collector does not know of it. Docstrings are constants.
_CODE = ("co_consts", "co_names", "co_varnames", "co_linetable", "co_exceptiontable", "co_code")


def _parts_of_code(code):
    """What a code object has in objects of their own: those that are made anew for whoever asks are not the ones it uses. Since
    Python 3.11 instructions are such: they lie in the code object itself, among counters that change as they run."""
    parts = ((getattr(code, name, None), getattr(code, name, None)) for name in _CODE)
    return [part for part, again in parts if part is again and part is not None]


def share(*roots):
    """Shares the large strings and bytes that can be reached from these objects; how many bytes of memory that was.

    Modules, functions, classes and their instances, containers and code are looked into: of code the constants with the docstrings,
    and the tables of lines and exceptions. What was shared stays for as long as the
    program runs, as if it were referred to. Raises OSError where the store is not there, or refuses; what was shared until
    then stays shared.
    """
    seen, shared = set(), 0
    left = list(roots)
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if type(thing) in (str, bytes):
            if sys.getsizeof(thing) < _LEAST:
                continue
            address, length = _payload(thing)
            if address not in _frozen and _is_where_it_should_be(thing, address, length):
                shared += _publish(thing, address, length)
        elif type(thing) is types.CodeType:
            left.extend(_parts_of_code(thing))
        else:
            left.extend(gc.get_referents(thing))
    return shared


def freeze(array):
    """Shares the memory behind an array (array.array, bytearray, numpy's) that nobody will write any more, for good; how many
    bytes that was. Whoever writes to it afterwards ends the program (SIGSEGV). It cannot grow or shrink any more, either."""
    view = memoryview(array)
    if view.readonly or not view.contiguous:
        raise ValueError("freeze wants a writable array that lies in memory in one piece; share takes strings and bytes")
    if view.nbytes < _LEAST:
        return 0
    whole = (ctypes.c_ubyte * view.nbytes).from_buffer(array)
    shared = _publish((array, whole), ctypes.addressof(whole), view.nbytes)
    if hasattr(array, "setflags"):
        array.setflags(write=False)
    return shared
