#!/usr/bin/python3
"""A plain fork server for Python scripts: what one would write instead of using `orrery warm`.

    forkserver.py SOCKET [MODULE,MODULE ...]

It imports the modules once, then listens on a Unix socket and prints "ready". A client sends one frame: a length
(4 bytes, little endian) and so many bytes, which are the working directory, the script and its arguments, separated by
zero bytes; descriptors 0, 1 and 2 of the script travel with the first byte. Each connection gets a forked child that runs
the script as `python3 SCRIPT ARG ...` would. When the child has ended, the server answers with its exit status (4
bytes, little endian, negative for a signal).

It does what makes such servers fast: the collector is frozen and the compiler set up before the fork, the child touches
as little of the interpreter as it can (every page of it is a fault, every written one a copy), and output is not copied.
It leaves out what costs time: no environment, no umask, no limits, no sandbox.
"""

import builtins
import gc
import importlib
import os
import selectors
import socket
import struct
import sys
import types

LENGTH = struct.Struct("<I")
DESCRIPTORS = struct.Struct("3i")
RIGHTS = socket.CMSG_LEN(DESCRIPTORS.size)
STATUS = struct.Struct("<i")


def serve(path, modules):
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    # The first compilation of a process sets the compiler up, which takes longer than a fork: not in every child.
    compile("print()", "<warm-up>", "exec")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(128)
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    gc.collect()
    gc.freeze()
    gc.enable()
    print("ready", flush=True)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is listener:
                accept(listener, waiting)
            else:
                answer(key.fileobj, *key.data, waiting)


def accept(listener, waiting):
    connection, _ = listener.accept()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = run(*receive(connection))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    waiting.register(os.pidfd_open(child), selectors.EVENT_READ, (child, connection))


def answer(process, child, connection, waiting):
    waiting.unregister(process)
    os.close(process)
    _, status = os.waitpid(child, 0)
    try:
        connection.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))
    except OSError:
        pass  # The client did not wait.
    connection.close()


def receive(connection):
    data, [(_, _, descriptors)], _, _ = connection.recvmsg(65536, RIGHTS)
    length = LENGTH.size + LENGTH.unpack_from(data)[0]
    while len(data) < length:
        data += connection.recv(length - len(data))
    for number, descriptor in enumerate(DESCRIPTORS.unpack(descriptors)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    cwd, *argv = os.fsdecode(data[LENGTH.size :]).split("\0")
    return cwd, argv


def run(cwd, argv):
    """Runs the script, as its own main module; returns the exit status."""
    os.chdir(cwd)
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    main = types.ModuleType("__main__")
    main.__file__ = argv[0]
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    status = 0
    try:
        with open(argv[0], "rb") as script:
            code = compile(script.read(), argv[0], "exec")
        exec(code, main.__dict__)
    except SystemExit as end:
        status = exit_status(end.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            status = status or 120
    return status


def exit_status(code):
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 255
    print(code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    serve(sys.argv[1], [name for name in sys.argv[2:3] for name in name.split(",") if name])
