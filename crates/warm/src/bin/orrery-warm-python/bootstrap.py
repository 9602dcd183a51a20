"""The part of a warm worker that is easier said in Python.

`prepare` runs once, before the first request: everything it leaves behind is in every request's starting state.
`begin` runs at the start of each request, before the script, and is gone from the stack when the script starts.
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
    """Imports the modules, tells which of them started threads, and freezes all objects; gives the reseeders."""
    for name in names:
        before = _threads()
        __import__(name)
        if _threads() > before:
            raise RuntimeError(
                f"importing {name!r} started a thread, which a warm interpreter cannot take back between requests "
                f"(for a numerical library, set OPENBLAS_NUM_THREADS=1 or OMP_NUM_THREADS=1 for the server)"
            )
    reseeders = list(_reseeders())
    gc.collect()
    gc.freeze()
    return reseeders


def _reseeders():
    """Generators of random numbers that were seeded by an import would repeat themselves in every request."""
    random = sys.modules.get("random")
    if random is not None:
        yield random._inst.seed
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        yield numpy_random.seed
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        yield lambda: setattr(process.current_process(), "authkey", os.urandom(32))


def begin(reseeders, arguments, original, streams, errors, unbuffered, no_bytecode, warning_options, ignored):
    """Makes the interpreter look as if it had just been started for this client."""
    for reseed in reseeders:
        reseed()
    for number in ignored:
        _ignore(number)
    environment = os.environ
    sys.argv = arguments
    sys.orig_argv = original
    if no_bytecode or _flag(environment.get("PYTHONDONTWRITEBYTECODE")):
        sys.dont_write_bytecode = True
    prefix = environment.get("PYTHONPYCACHEPREFIX")
    if prefix:
        sys.pycache_prefix = prefix
    search = environment.get("PYTHONPATH")
    if search:
        _put_first(search.split(":"))
    options = environment.get("PYTHONWARNINGS")
    if options:
        warning_options = options.split(",") + warning_options
    if warning_options:
        sys.warnoptions = warning_options
        warnings._processoptions(warning_options)
    unbuffered = unbuffered or _flag(environment.get("PYTHONUNBUFFERED"))
    _open_streams(streams, *_encoding(environment, errors), unbuffered)


def _flag(value):
    """A variable that is on by whatever it says, but for nothing and 0."""
    try:
        return bool(value) and int(value) != 0
    except ValueError:
        return True


def _ignore(number):
    """What the client ignores, as `nohup` or a shell's `&` arrange it, its script ignores."""
    try:
        _signal.signal(number, _signal.SIG_IGN)
    except (OSError, ValueError):
        pass


def _put_first(directories):
    """PYTHONPATH, as `site` leaves it: absolute, and every directory once."""
    path = []
    for directory in [os.path.abspath(directory) for directory in directories] + sys.path:
        if directory not in path:
            path.append(directory)
    sys.path[:] = path


def _encoding(environment, errors):
    encoding = "utf-8"
    choice = environment.get("PYTHONIOENCODING")
    if choice:
        named, _, handler = choice.partition(":")
        if named:
            encoding, errors = codecs.lookup(named).name, "strict"
        if handler:
            errors = handler
    return encoding, errors


def _open_streams(present, encoding, errors, unbuffered):
    """What `create_stdio` in CPython's pylifecycle.c does."""
    sys.stdin = sys.__stdin__ = _stream(0, "<stdin>", present, encoding, errors, False)
    sys.stdout = sys.__stdout__ = _stream(1, "<stdout>", present, encoding, errors, unbuffered)
    sys.stderr = sys.__stderr__ = _stream(2, "<stderr>", present, encoding, "backslashreplace", unbuffered)


def _stream(number, name, present, encoding, errors, unbuffered):
    if not present & 1 << number:
        return None
    mode = "w" if number else "r"
    buffer = io.open(number, mode + "b", 0 if unbuffered else -1, None, None, None, False)
    raw = buffer if unbuffered else buffer.raw
    raw.name = name
    line_buffering = not unbuffered and (number == 2 or raw.isatty())
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
