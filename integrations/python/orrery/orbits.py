"""Statistics of the orbits of running programs, as `orrery orbits` has them.

    for orbit in orrery.orbits.statistics():
        print(orbit.program, orbit.name, orbit.state, orbit.calls, orbit.last_fault)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Optional

from orrery._command import output_of


@dataclass(frozen=True)
class Orbit:
    """One orbit. Sizes are in bytes, counts since its creation."""

    pid: int
    program: str
    #: Its name, which `orrery_orbit_create` was given.
    orbit: str
    orbit_pid: int
    state: str
    calls: int
    returned: int
    failed: int
    dropped: int
    queued: int
    queue_bound: int
    updates: int
    restarts: int
    #: Of a call's snapshot, on average.
    snapshot_pages: float
    snapshot_microseconds: float
    last_snapshot_pages: int
    last_snapshot_microseconds: float
    memory_bytes: Optional[int]
    memory_limit_bytes: Optional[int]
    cpu_limit_percent: Optional[int]
    process_limit: Optional[int]
    last_fault: Optional[str]


def statistics(pid: Optional[int] = None) -> list[Orbit]:
    """Returns the orbits of a process, or of all processes that may be inspected."""
    arguments = ["orbits", "--json"] if pid is None else ["orbits", "--json", str(pid)]
    rows: list[dict[str, Any]] = json.loads(output_of("list", arguments))["orbits"]
    # A newer command may have more columns.
    names = [each.name for each in fields(Orbit)]
    return [Orbit(**{name: row[name] for name in names}) for row in rows]
