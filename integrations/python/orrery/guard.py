"""Runs programs under `orrery guard`: they may use what a policy lists.

    done = orrery.guard.run(["python3", "script.py"], profile="python", capture_output=True, text=True)
    for refusal in done.refusals:
        print(refusal.call, refusal.path or refusal.address)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass, field
from typing import Any, Iterator, Mapping, Optional, Sequence, Union

from orrery._command import Argument, command, program
from orrery.errors import Error

#: The status with which the guard itself fails: the program was not run, or not to its end.
GUARD_FAILED = 125


@dataclass(frozen=True)
class Refusal:
    """A system call that the policy did not allow."""

    call: str
    #: The file, where the call names one.
    path: Optional[str]
    #: The rights that are missing, where a file was refused.
    missing: tuple[str, ...]
    process: int
    thread: int
    #: Seconds since 1970.
    time: float
    #: All that the guard reports, by its names.
    fields: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Result:
    """How a guarded program ended. `returncode` is as of `subprocess`: -N for signal N."""

    args: Sequence[str]
    returncode: int
    stdout: Any
    stderr: Any
    refusals: Sequence[Refusal]


class Guard:
    """A program under a guard, as a context manager. At its end the program is killed if it still runs.

    Exactly one of `policy` (a file in TOML), `profile` (a name such as "python") and `settings` (a mapping, or a file in
    JSON, of coding agents' sandboxes) says what the program may use. Further keyword arguments are those of `subprocess.Popen`.
    """

    def __init__(
        self,
        arguments: Sequence[Argument],
        *,
        policy: Optional[Argument] = None,
        profile: Optional[str] = None,
        settings: Union[Mapping[str, Any], Argument, None] = None,
        **options: Any,
    ) -> None:
        given = [name for name, value in (("policy", policy), ("profile", profile), ("settings", settings)) if value is not None]
        if len(given) != 1:
            cause = "no policy is given" if not given else " and ".join(given) + " are given"
            raise Error("guard", command(arguments)[0], cause, "give one of policy, profile and settings")
        self.args = command(arguments)
        # In this process only, so that the program cannot reach it: the guard opens it by this process' name.
        self._log = os.memfd_create("refusals", os.MFD_CLOEXEC)
        self._read = 0
        self._rest = b""
        document = -1
        try:
            line = [program(), "guard", "--log", f"/proc/{os.getpid()}/fd/{self._log}"]
            if policy is not None:
                line += ["--policy", os.fspath(policy)]
            elif profile is not None:
                line += ["--profile", profile]
            elif isinstance(settings, Mapping):
                document = os.memfd_create("settings", os.MFD_CLOEXEC)
                os.write(document, json.dumps(settings).encode())
                line += ["--settings", f"/proc/{os.getpid()}/fd/{document}"]
            elif settings is not None:
                line += ["--settings", os.fspath(settings)]
            self.process: subprocess.Popen[Any] = subprocess.Popen([*line, "--", *self.args], **options)
        except BaseException:
            os.close(self._log)
            if document >= 0:
                os.close(document)
            raise
        # Read by the guard when it starts.
        self._document = document

    def refusals(self) -> Iterator[Refusal]:
        """Yields the refusals that were reported since the last time, as far as the program has come."""
        while True:
            piece = os.pread(self._log, 1 << 16, self._read)
            if not piece:
                return
            self._read += len(piece)
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for text in lines:
                fields = json.loads(text)
                if fields.get("action") != "refused":
                    continue
                yield Refusal(
                    fields["call"],
                    fields.get("path"),
                    tuple(fields.get("missing", ())),
                    fields["process"],
                    fields["thread"],
                    fields["time"],
                    fields,
                )

    def wait(self, timeout: Optional[float] = None) -> int:
        """Waits for the program's end, and returns its status; raises `subprocess.TimeoutExpired`."""
        return self.process.wait(timeout)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            # The monitor forwards it; what remains of the program dies with the monitor.
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.__exit__(None, None, None)
        os.close(self._log)
        if self._document >= 0:
            os.close(self._document)


def run(
    arguments: Sequence[Argument],
    *,
    policy: Optional[Argument] = None,
    profile: Optional[str] = None,
    settings: Union[Mapping[str, Any], Argument, None] = None,
    input: Union[str, bytes, None] = None,
    capture_output: bool = False,
    timeout: Optional[float] = None,
    **options: Any,
) -> Result:
    """Runs a program under a guard to its end, as `subprocess.run` does.

    Raises `Error` where the guard itself fails (a policy with an error, say), which is the status 125 without a refusal, and
    `subprocess.TimeoutExpired`.
    """
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = subprocess.PIPE
        options["stderr"] = subprocess.PIPE
    with Guard(arguments, policy=policy, profile=profile, settings=settings, **options) as guard:
        stdout, stderr = guard.process.communicate(input, timeout)
        refusals = list(guard.refusals())
        status = guard.process.returncode
        if status == GUARD_FAILED and not refusals:
            said = stderr.decode(errors="replace") if isinstance(stderr, bytes) else stderr
            cause = (said or "the guard ended with status 125; its message is on standard error").strip()
            raise Error("guard", guard.args[0], cause, "see `orrery guard --check`")
        return Result(guard.args, status, stdout, stderr, refusals)
