"""Orrery from Python: guard a program, trace it, run scripts in warm interpreters, undo a function, share objects, watch orbits.

Each module is one subject; `guard`, `trace` and `orbits` start the command `orrery`, `objects` and `rollback` call liborrery.so.0
in this process, and `warm` talks to a server over its socket.
"""

from orrery import guard, objects, orbits, rollback, trace, warm
from orrery._version import VERSION as __version__
from orrery.errors import Error

__all__ = ["Error", "__version__", "guard", "objects", "orbits", "rollback", "trace", "warm"]
