"""Yields the system calls of a program, as `orrery trace` sees them.

    with orrery.trace.Trace(["ls"], calls=["openat"]) as trace:
        for call in trace:
            print(call.name, call.arguments, call.result, call.error)
    print(trace.returncode)
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Iterator, Mapping, Optional, Sequence

from orrery._command import Argument, command, program


@dataclass(frozen=True)
class Call:
    """A system call that has returned, or one that does not return."""

    name: str
    number: int
    #: By name, as text: `{"dfd": "AT_FDCWD", "filename": '"/etc/passwd"'}`.
    arguments: Mapping[str, str]
    #: What the kernel returned; None where the call did not return.
    result: Optional[int]
    #: The name of the error, such as "ENOENT".
    error: Optional[str]
    #: Seconds.
    duration: Optional[float]
    thread: int
    time: datetime
    #: Whether a policy answered, and not the kernel.
    by_policy: bool


class Trace:
    """A program that is traced; iterating yields its calls while it runs, until it and all that it started have ended.

    `calls` chooses, in the words of `orrery trace -e`. Further keyword arguments are those of `subprocess.Popen`. At the end of
    the `with` block a program that still runs is terminated.
    """

    def __init__(self, arguments: Sequence[Argument], *, calls: Optional[Sequence[str]] = None, **options: Any) -> None:
        self.args = command(arguments)
        self._directory = tempfile.mkdtemp(prefix="orrery-trace-")
        self._pipe = -1
        try:
            path = os.path.join(self._directory, "calls")
            os.mkfifo(path, 0o600)
            # Not to wait for the other side: it may fail before it opens its end.
            self._pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            line = [program(), "trace", "--json", "-f", "-e", "signal=none", "-o", path]
            if calls is not None:
                line += ["-e", ",".join(calls)]
            self.process: subprocess.Popen[Any] = subprocess.Popen([*line, "--", *self.args], **options)
        except BaseException:
            self._release()
            raise

    def __iter__(self) -> Iterator[Call]:
        rest = b""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while True:
            ready = poll.poll(100)
            piece = b""
            if ready:
                try:
                    piece = os.read(self._pipe, 1 << 16)
                except BlockingIOError:
                    continue
            if not piece:
                # Either nobody has opened the other end yet, or everybody has closed it.
                if ready or self.process.poll() is not None:
                    break
                continue
            *lines, rest = (rest + piece).split(b"\n")
            for text in lines:
                yield _call(json.loads(text))
        self.process.wait()

    @property
    def returncode(self) -> Optional[int]:
        """How the program ended, as of `subprocess`; None while it runs."""
        return self.process.poll()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.__exit__(None, None, None)
        self._release()

    def _release(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        shutil.rmtree(self._directory, ignore_errors=True)


def _call(fields: Mapping[str, Any]) -> Call:
    nanoseconds = fields["duration_ns"]
    # Python before 3.11 reads up to six digits of a fraction, and no Z.
    seconds, _, fraction = fields["time"].removesuffix("Z").partition(".")
    return Call(
        fields["call"],
        fields["number"],
        {argument["name"]: argument["value"] for argument in fields["arguments"]},
        fields["result"],
        fields["error"],
        None if nanoseconds is None else nanoseconds / 1e9,
        fields["thread"],
        datetime.fromisoformat(f"{seconds}.{fraction[:6]:0<6}+00:00"),
        fields["by_policy"],
    )
