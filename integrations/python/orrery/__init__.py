"""Orrery from Python: guard a program, trace it, run scripts in warm interpreters, undo a function, share objects, watch orbits, give
extensions a state for each interpreter.

Each module is one subject; `guard`, `trace` and `orbits` start the command `orrery`, `interpreters`, `objects` and `rollback` call
liborrery.so.0 in this process, and `warm` talks to a server over its socket. They are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from orrery._version import VERSION as __version__
from orrery.errors import Error

if TYPE_CHECKING:
    from types import ModuleType

    from orrery import guard, interpreters, objects, orbits, rollback, trace, warm

__all__ = ["Error", "__version__", "guard", "interpreters", "objects", "orbits", "rollback", "trace", "warm"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"orrery.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
