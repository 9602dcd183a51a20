"""Finds and starts the command `orrery`."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Sequence, Union

from orrery.errors import Error

Argument = Union[str, "os.PathLike[str]"]


def program() -> str:
    """Returns the path of the command: `$ORRERY`, else the first `orrery` in `PATH`."""
    named = os.environ.get("ORRERY")
    if named:
        return named
    found = shutil.which("orrery")
    if found is None:
        raise Error("find the command", "orrery", "it is not in PATH", "install Orrery, or name the command in ORRERY")
    return found


def command(arguments: Sequence[Argument]) -> list[str]:
    """Returns the arguments of a program to start as text; there must be some."""
    texts = [os.fspath(argument) for argument in arguments]
    if not texts:
        raise Error("start", "a program", "the list of its arguments is empty", "give at least the program's name")
    return texts


def output_of(operation: str, arguments: Sequence[str]) -> str:
    """Returns what a subcommand prints, which must succeed."""
    done = subprocess.run([program(), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().removeprefix("Error: ") or f"orrery ended with status {done.returncode}"
        raise Error(operation, " ".join(arguments), said, "")
    return done.stdout
