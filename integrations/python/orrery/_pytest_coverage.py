"""Carries what coverage.py measured in the runner to the pytest that reports it.

Lines are noted in sets of the collector, one for each file, which a rollback undoes. So they are sent with each test's reports. Of
coverage.py's collector only `data` and `_activity` are used, which versions 6 and 7 have, with each of their tracers.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Optional

#: The lines, or arcs, of each file; and the dynamic context they were measured in, if it was switched.
Measured = list[tuple[Optional[str], dict[str, list[Any]], dict[str, str]]]


class Coverage:
    """The measurement that is under way in this process, if there is one."""

    def __init__(self) -> None:
        module = sys.modules.get("coverage")
        self.measurement: Any = module.Coverage.current() if module else None
        self.collector: Any = getattr(self.measurement, "_collector", None)
        self.context: Optional[str] = None
        self.earlier: Measured = []

    def begin_process(self, manager: Any) -> None:
        """Has pytest-cov measure nothing of its own in a process that was forked from pytest."""
        plugin = manager.getplugin("_cov")
        if hasattr(plugin, "pid"):
            plugin.pid = os.getpid()

    def begin_runner(self, manager: Any) -> None:
        """Forgets what pytest's own process will report; contexts are switched there, too."""
        self.begin_process(manager)
        self.take()
        if self.measurement is not None:
            self.measurement.switch_context = self._switch

    def _switch(self, context: str) -> None:
        self.earlier = self.take()
        self.context = context

    def take(self) -> Measured:
        """Returns what was measured since the last call."""
        taken, self.earlier = self.earlier, []
        lines = {}
        for file, noted in list(getattr(self.collector, "data", {}).items()):
            if noted:
                lines[file] = list(noted)
                # The tracer of a running frame has a reference to the set.
                noted.clear()
        if lines:
            taken.append((self.context, lines, dict(getattr(self.collector, "file_tracers", {}))))
        return taken

    def merge(self, measured: Measured) -> None:
        """Adds what a runner took."""
        data = getattr(self.collector, "data", None)
        if data is None or not measured:
            return
        # No tracer of this process has seen these lines, without which nothing would be stored.
        self.collector._activity = lambda: True
        for context, lines, file_tracers in measured:
            if context is not None:
                self.measurement.switch_context(context)
            for file, noted in lines.items():
                data.setdefault(file, set()).update(noted)
            getattr(self.collector, "file_tracers", {}).update(file_tracers)
