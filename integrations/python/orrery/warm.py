"""Runs scripts in the warm interpreters of `orrery warm serve`, without a process for each.

    client = orrery.warm.Client()
    done = client.run(command="print(6 * 7)", capture_output=True)
    print(done.stdout)

A client is of the same version as its server: the protocol (crates/warm/src/protocol.rs) has a number, which both check.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time
from array import array
from dataclasses import dataclass
from typing import IO, Iterable, Mapping, Optional, Sequence, Union

from orrery._command import Argument
from orrery.errors import Error

_MAGIC = b"ORRY"
_VERSION = 1
_HEADER = struct.Struct("<4sHxxI")
_LONGEST = 16 << 20
#: Seconds for which a server that is there may be without its socket.
_HICCUP = 1.0

Stream = Union[int, IO[bytes], IO[str], None]


class NoServer(Error):
    """No server listens on the socket."""


class Busy(Error):
    """All workers are busy, and the queue is full."""


class Refused(Error):
    """The server did not run the program, for a reason that the error has."""


class TimeLimit(Error):
    """The program ran longer than the server's `--timeout`, and was killed."""


class MemoryLimit(Error):
    """The program needed more memory than the server's `--memory`, and was killed."""


class ServerLost(Error):
    """The worker or the server ended while the program ran: how far it came is unknown."""


@dataclass(frozen=True)
class Result:
    """How a program ended."""

    #: As of `subprocess`: -N if signal N killed it.
    returncode: int
    stdout: Optional[bytes]
    stderr: Optional[bytes]
    #: From when the worker took the request until everything was undone.
    microseconds: int


@dataclass(frozen=True)
class Worker:
    """A process of a server."""

    pid: int
    ready: bool
    busy: bool
    served: int


@dataclass(frozen=True)
class Health:
    """The state of a server."""

    #: Seconds since it started.
    uptime: int
    #: Requests that were finished.
    served: int
    #: Workers that were started in the place of others.
    restarts: int
    workers: Sequence[Worker]


class Client:
    """Knows where a server is: `socket_path`, else `$ORRERY_WARM`, else orrery-warm.socket in `$XDG_RUNTIME_DIR`.

    `wait` is how many seconds to wait for a place in a full queue.
    """

    def __init__(self, socket_path: Optional[Argument] = None, *, wait: Optional[float] = None) -> None:
        if socket_path is not None:
            self.socket_path = os.fspath(socket_path)
        elif os.environ.get("ORRERY_WARM"):
            self.socket_path = os.environ["ORRERY_WARM"]
        elif os.environ.get("XDG_RUNTIME_DIR"):
            self.socket_path = os.path.join(os.environ["XDG_RUNTIME_DIR"], "orrery-warm.socket")
        else:
            cause = "neither ORRERY_WARM nor XDG_RUNTIME_DIR is set"
            raise Error("find the socket of", "the server", cause, "give socket_path")
        self.wait = wait

    def run(
        self,
        script: Optional[Argument] = None,
        arguments: Sequence[str] = (),
        *,
        command: Optional[str] = None,
        module: Optional[str] = None,
        input: Optional[bytes] = None,
        capture_output: bool = False,
        stdin: Stream = 0,
        stdout: Stream = 1,
        stderr: Stream = 2,
        environment: Optional[Mapping[str, str]] = None,
        directory: Optional[Argument] = None,
        warnings: Sequence[str] = (),
    ) -> Result:
        """Runs one of `script`, `command` (as after -c) and `module` (as after -m) to its end.

        Streams are descriptors or files, and None for a closed one. `input` and `capture_output` are as of `subprocess.run`; the
        program then reads and writes memory files. What is not given is this process' own.

        Raises `NoServer`, `Busy`, `Refused`, `TimeLimit`, `MemoryLimit` and `ServerLost`; that a program failed is a status.
        """
        given = [name for name, value in (("script", script), ("command", command), ("module", module)) if value is not None]
        if len(given) != 1:
            cause = "nothing is given to run" if not given else " and ".join(given) + " are given"
            raise Error("run", "a program", cause, "give one of script, command and module")
        opened: list[int] = []
        try:
            if input is not None:
                stdin = _memory_file(opened, "stdin")
                os.write(stdin, input)
                os.lseek(stdin, 0, os.SEEK_SET)
            out = err = -1
            if capture_output:
                stdout = out = _memory_file(opened, "stdout")
                stderr = err = _memory_file(opened, "stderr")
            where = os.fspath(directory) if directory is not None else "."
            opened.append(os.open(where, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            descriptors = [opened[-1]]
            if script is not None:
                path = os.fspath(script)
                opened.append(os.open(os.path.join(where, path), os.O_RDONLY | os.O_CLOEXEC))
                descriptors.append(opened[-1])
                program = b"\0" + _bytes(os.fsencode(path))
            elif command is not None:
                program = b"\1" + _bytes(os.fsencode(command))
            else:
                program = b"\2" + _bytes(os.fsencode(module or ""))
            streams = [_descriptor(stream) for stream in (stdin, stdout, stderr)]
            body = b"".join((
                identity := os.urandom(16),
                program,
                _sequence(os.fsencode(argument) for argument in arguments),
                _bytes(_environment(environment)),
                _bytes(b"" if directory is not None else os.fsencode(os.getcwd())),
                _varint(_umask()),
                bytes([sum(1 << number for number, stream in enumerate(streams) if stream is not None)]),
                _varint(0),
                b"\0\0\0",
                _sequence(os.fsencode(warning) for warning in warnings),
            ))
            passed = [stream for stream in streams if stream is not None] + descriptors
            returncode, microseconds = self._answer(_frame(body), passed, identity)
            texts = [_content(each) if each >= 0 else None for each in (out, err)]
            return Result(returncode, texts[0], texts[1], microseconds)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def health(self) -> Health:
        """Returns the state of the server and its workers."""
        reader = self._ask(b"\1")
        if reader.number() != 1:
            raise self._lost()
        uptime, served, restarts = reader.number(), reader.number(), reader.number()
        workers = [
            Worker(reader.signed(), reader.byte() != 0, reader.byte() != 0, reader.number()) for _ in range(reader.number())
        ]
        return Health(uptime, served, restarts, workers)

    def _answer(self, frame: bytes, passed: Sequence[int], identity: bytes) -> tuple[int, int]:
        """Sends a request, and returns the status and the time. One that no worker had begun is sent once more."""
        for attempt in (1, 2):
            with self._connect() as connection:
                reset = False
                try:
                    _send(connection, frame, passed)
                    body = _receive(connection)
                except (ConnectionResetError, BrokenPipeError):
                    body, reset = None, True
                except ValueError as error:
                    raise Error("talk to the server on", self.socket_path, str(error), "use the client of its version") from None
            if body is not None:
                reader = _Reader(body)
                return self._outcome(reader), reader.number()
            try:
                reader = self._ask(b"\0" + identity)
            except NoServer:
                raise self._lost() from None
            if reader.number() != 0:
                raise self._lost()
            if reader.number() == 0:
                return self._outcome(reader), 0
            # An end without a reset means that a worker had read the request: it may have run.
            if not reset or attempt == 2:
                break
        raise self._lost()

    def _outcome(self, reader: _Reader) -> int:
        kind = reader.number()
        if kind == 0:
            return reader.byte()
        if kind == 1:
            return -reader.signed()
        if kind == 2:
            limit = reader.number() + reader.number() / 1e9
            raise TimeLimit("run", "the program", f"it ran longer than {limit:g} s", "start the server with another --timeout")
        if kind == 3:
            cause = f"it needed more than {reader.number()} bytes of memory"
            raise MemoryLimit("run", "the program", cause, "start the server with another --memory")
        if kind == 5:
            raise Refused("run", "the program", reader.text(), "run it with python3")
        raise self._lost()

    def _ask(self, question: bytes) -> _Reader:
        path = self.socket_path + ".control"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(path)
                connection.sendall(_frame(question))
                body = _receive(connection)
            except OSError as error:
                raise self._no_server(error) from None
            except ValueError as error:
                raise Error("talk to the server on", path, str(error), "use the client of its version") from None
        if body is None:
            raise self._lost()
        return _Reader(body)

    def _connect(self) -> socket.socket:
        """Connects without waiting, so that a full queue shows; the connection then waits."""
        begun = time.monotonic()
        deadline = begun + (self.wait or 0)
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.setblocking(False)
                connection.connect(self.socket_path)
                connection.setblocking(True)
                return connection
            except OSError as error:
                connection.close()
                if error.errno != errno.EAGAIN:
                    # A server that is there, but whose socket is just being put up.
                    if time.monotonic() < begun + _HICCUP and self._is_claimed():
                        time.sleep(0.01)
                        continue
                    raise self._no_server(error) from None
            if time.monotonic() >= deadline:
                cause = "all workers are busy and the queue is full"
                raise Busy("run a program on", self.socket_path, cause, "try again later, or give wait")
            time.sleep(0.01)

    def _is_claimed(self) -> bool:
        """Whether a server holds the lock of the socket, even if that does not answer at the moment."""
        try:
            lock = os.open(self.socket_path + ".lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(lock)

    def _no_server(self, error: OSError) -> NoServer:
        way_out = f"start one: orrery warm serve --python --socket {self.socket_path}"
        return NoServer("connect to", self.socket_path, error.strerror or str(error), way_out, error.errno)

    def _lost(self) -> ServerLost:
        cause = "the server ended, and how far the program came is unknown"
        return ServerLost("run a program on", self.socket_path, cause, "look at what it should have done")


# ---- the protocol: frames of a header and a body in postcard's encoding ----


class _Reader:
    """Reads a body from its beginning."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def byte(self) -> int:
        if self._at >= len(self._body):
            raise Error("read", "the server's answer", "it is cut off", "use the client of the server's version")
        self._at += 1
        return self._body[self._at - 1]

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def signed(self) -> int:
        value = self.number()
        return value >> 1 ^ -(value & 1)

    def text(self) -> str:
        length = self.number()
        self._at += length
        return self._body[self._at - length : self._at].decode(errors="replace")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _bytes(value: bytes) -> bytes:
    return _varint(len(value)) + value


def _sequence(values: Iterable[bytes]) -> bytes:
    encoded = [_bytes(value) for value in values]
    return _varint(len(encoded)) + b"".join(encoded)


def _frame(body: bytes) -> bytes:
    if len(body) > _LONGEST:
        cause = f"it has {len(body)} bytes of {_LONGEST} that are allowed"
        raise Error("send", "the request", cause, "pass large input through a file or input")
    return _HEADER.pack(_MAGIC, _VERSION, len(body)) + body


def _send(connection: socket.socket, frame: bytes, passed: Sequence[int]) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", passed))
    sent = connection.sendmsg([frame], [rights])
    # Even to send nothing fails (EPIPE) where the worker has answered by now.
    if sent < len(frame):
        connection.sendall(frame[sent:])


def _receive(connection: socket.socket) -> Optional[bytes]:
    """Returns the body of a frame, or None where the connection ends before one is complete."""
    header = _exactly(connection, _HEADER.size)
    if header is None:
        return None
    magic, version, length = _HEADER.unpack(header)
    if magic != _MAGIC or length > _LONGEST:
        raise ValueError(f"its answer is none of this protocol (it begins with {header[:4]!r})")
    if version != _VERSION:
        raise ValueError(f"it speaks version {version} of the protocol, and this client version {_VERSION}")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> Optional[bytes]:
    received = bytearray()
    while len(received) < length:
        piece = connection.recv(length - len(received))
        if not piece:
            return None
        received += piece
    return bytes(received)


def _memory_file(opened: list[int], name: str) -> int:
    opened.append(os.memfd_create(name, os.MFD_CLOEXEC))
    return opened[-1]


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _descriptor(stream: Stream) -> Optional[int]:
    if stream is None or isinstance(stream, int):
        return stream
    stream.flush()
    return stream.fileno()


def _environment(variables: Optional[Mapping[str, str]]) -> bytes:
    chosen = os.environ if variables is None else variables
    return b"".join(os.fsencode(name) + b"=" + os.fsencode(value) + b"\0" for name, value in chosen.items())


def _umask() -> int:
    """Returns the mask, which can be read without setting it in /proc alone."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
