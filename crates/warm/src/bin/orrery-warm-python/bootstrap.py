"""The part of a warm worker that is easier said in Python.

`prepare` runs once, before the first request: everything it leaves behind is in every request's starting state. The rest
runs at the start of a request, before the script, and only where a request wants something out of the ordinary: Python
code writes to memory when it runs (reference counts, inline caches), and every page written has to be put back.
Nothing here runs after the script has started: a script may have replaced any builtin by then.
"""

import _signal
import codecs
import gc
import io
import os
import sys
import warnings


def _threads():
    return len(os.listdir("/proc/self/task"))


def prepare(names):
    """Imports the modules and tells which of them started threads; gives the reseeders."""
    site = sys.modules.get("site")
    if site is not None and site.ENABLE_USER_SITE:
        _user_entries.extend(_added_by_user_packages(site))
    for name in names:
        before = _threads()
        __import__(name)
        if _threads() > before:
            raise RuntimeError(
                f"importing {name!r} started a thread, which a warm interpreter cannot take back between requests "
                f"(for a numerical library, do not set OPENBLAS_NUM_THREADS or OMP_NUM_THREADS for the server, or to 1)"
            )
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        # The generator of names is made again when it is missing.
        tempfile._name_sequence = None
    return list(_reseeders())


def _reseeders():
    """Generators of random numbers that were seeded by an import would repeat themselves in every request."""
    random = sys.modules.get("random")
    if random is not None:
        # What Random.seed does, without its Python code; as many bits as the kernel's generator has.
        yield random._random.Random.seed.__get__(random._inst)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        yield numpy_random.seed
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        yield lambda: setattr(process.current_process(), "authkey", os.urandom(32))


def prefabricate():
    """Standard streams as requests will want them: by whether they can seek, by error handler and by whether output is
    unbuffered, three each. With the keys comes the block size that the streams' buffers were made for.
    """
    saved = [os.dup(number) for number in range(3)]
    reader, writer = os.pipe()
    file = os.memfd_create("orrery-prefabricated")
    shelf = []
    for seekable, ends in ((False, (reader, writer, writer)), (True, (file, file, file))):
        for number in range(3):
            os.dup2(ends[number], number)
        for errors in ("surrogateescape", "strict"):
            for unbuffered in (False, True):
                streams = [_stream(number, 7, "utf-8", errors, unbuffered) for number in range(3)]
                shelf.append((seekable, errors, unbuffered, streams[0].buffer.raw._blksize, streams))
    for number in range(3):
        os.dup2(saved[number], number)
    for number in (*saved, reader, writer, file):
        os.close(number)
    return shelf


def settle():
    """Leaves nothing that a request would have to clean away, and hides all there is from the collector."""
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)
    # The very dictionary that os.environ wraps.
    os.environ._data.clear()
    gc.collect()
    gc.freeze()


def ignore(numbers):
    """What the client ignores, as `nohup` or a shell's `&` arrange it, its script ignores."""
    for number in numbers:
        try:
            _signal.signal(number, _signal.SIG_IGN)
        except (OSError, ValueError):
            pass


def search_first(directories):
    """PYTHONPATH, as `site` leaves it: absolute, and every directory once."""
    path = []
    for directory in [os.path.abspath(directory) for directory in directories.split(":")] + sys.path:
        if directory not in path:
            path.append(directory)
    sys.path[:] = path


# What the server's user's own packages added to sys.path.
_user_entries = []


def _added_by_user_packages(site):
    directory = site.getusersitepackages()
    if directory not in sys.path:
        return []
    start = sys.path.index(directory)
    others = {os.path.normcase(path) for path in site.getsitepackages()}
    entries = []
    # Up to the system's packages: the directory, and what its .pth files name.
    for path in sys.path[start:]:
        if os.path.normcase(path) in others:
            break
        entries.append(path)
    return entries


def user_packages():
    """The user's own packages (PEP 370) are those below the client's HOME, where `site` has them."""
    import site

    system = site.getsitepackages()
    path = [entry for entry in sys.path if entry not in _user_entries]
    place = next((index for index, entry in enumerate(path) if entry in system), len(path))
    sys.path[:], rest = path[:place], path[place:]
    site.USER_SITE = site.USER_BASE = None
    try:
        site.addusersitepackages({os.path.normcase(entry) for entry in path})
    finally:
        sys.path += rest


def warn(from_environment, from_options):
    """PYTHONWARNINGS and -W."""
    options = (from_environment.split(",") if from_environment else []) + from_options
    sys.warnoptions = options
    warnings._processoptions(options)


def open_streams(present, choice, errors, unbuffered):
    """Opens the standard streams that are `present`; `choice` is PYTHONIOENCODING."""
    encoding = "utf-8"
    named, _, handler = choice.partition(":")
    if named:
        encoding, errors = codecs.lookup(named).name, "strict"
    if handler:
        errors = handler
    return [_stream(number, present, encoding, errors, unbuffered) for number in range(3)]


def _stream(number, present, encoding, errors, unbuffered):
    """What `create_stdio` in CPython's pylifecycle.c does."""
    if not present & 1 << number:
        return None
    mode = "w" if number else "r"
    # Input is always buffered.
    bare = unbuffered and number > 0
    buffer = io.open(number, mode + "b", 0 if bare else -1, None, None, None, False)
    raw = buffer if bare else buffer.raw
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[number]
    line_buffering = not unbuffered and (number == 2 or raw.isatty())
    if number == 2:
        errors = "backslashreplace"
    stream = io.TextIOWrapper(buffer, encoding, errors, "\n", line_buffering, unbuffered)
    stream.mode = mode
    return stream


def pyc_code(filename):
    """The code of a compiled script; messages as CPython's `run_pyc_file` words them."""
    import importlib.util
    import marshal

    with io.open(filename, "rb") as file:
        if file.read(4) != importlib.util.MAGIC_NUMBER:
            raise RuntimeError("Bad magic number in .pyc file")
        file.read(12)
        code = marshal.loads(file.read())
    if type(code) is not type(pyc_code.__code__):
        raise RuntimeError("Bad code object in .pyc file")
    return code
