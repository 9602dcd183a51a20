"""Runs a test that does nothing, several times, before anything is undone.

CPython fills caches while it runs: of attributes in types, of specialized byte code, of compiled regular expressions. A rollback undoes
that, so each test would find pytest as it is before the first one, which takes several times as long. Here pytest's own code is run
first: its hooks, its fixtures, the reports. Hooks of plug-ins, of conftest files and of the project are not called, and no fixture of theirs
is set up. Nothing is reported, and nothing is left but what is cached.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from _pytest.fixtures import FuncFixtureInfo
from _pytest.runner import SetupState

from orrery import _pytest_frames as frames

#: CPython specializes what has run some ten times.
_TIMES = 24
#: What the test asks for.
_FIXTURES = ("monkeypatch", "request")


def warm_up(runner: Any) -> bool:
    """Runs the test in the runner, as if in a standing snapshot. Returns whether it passed each time."""
    session, config = runner.session, runner.config
    state, hook, inside = session._setupstate, runner.hook, runner.inside
    hooks = _own_hooks(config)
    current = os.environ.get("PYTEST_CURRENT_TEST")
    ours, theirs = socket.socketpair()
    passed = True
    try:
        session._setupstate, session.gethookproxy = SetupState(), lambda *path: hooks
        runner.hook, runner.inside = hooks, os.getpid()
        item = _test(session)
        for _ in range(_TIMES):
            reports, ended = runner._protocol(item)
            passed = passed and not ended and len(reports) == 3 and all(report.passed for report in reports)
            frames.send(ours, runner._frame(reports, kept=0))
            frames.receive(theirs)
    finally:
        session._setupstate, runner.hook, runner.inside = state, hook, inside
        del session.gethookproxy
        runner.reports = []
        ours.close()
        theirs.close()
        if current is None:
            os.environ.pop("PYTEST_CURRENT_TEST", None)
        else:
            os.environ["PYTEST_CURRENT_TEST"] = current
    return passed


def _own_hooks(config: Any) -> Any:
    """Returns pytest's hooks, and those of this plug-in. Of the same types as those that tests meet: byte code is specialized by type."""
    manager = config.pluginmanager
    others = [plugin for plugin in manager.get_plugins() if not _is_own(plugin)]
    relay = _like(manager.hook)
    for name in vars(manager.hook):
        vars(relay)[name] = manager.subset_hook_caller(name, remove_plugins=others)
    if config.hook is manager.hook:
        return relay
    # pytest 7 and 8 have another object around it, which keeps what it has returned.
    for name in vars(manager.hook):
        getattr(config.hook, name)
    proxy = _like(config.hook)
    for name, value in vars(config.hook).items():
        vars(proxy)[name] = relay if value is manager.hook else vars(relay).get(name, value)
    return proxy


def _like(thing: Any) -> Any:
    return object.__new__(type(thing))


def _is_own(plugin: Any) -> bool:
    name = getattr(plugin, "__name__", None) or type(plugin).__module__
    return name.split(".")[0] in ("_pytest", "orrery")


def _test(session: Any) -> Any:
    root: Any = session if pytest.version_tuple >= (8,) else ""
    fixtures = {}
    for name in _FIXTURES:
        known = session._fixturemanager.getfixturedefs(name, root) or ()
        own = [fixture for fixture in known if fixture.func.__module__.startswith("_pytest.")]
        if own:
            fixtures[name] = own[:1]
    information = FuncFixtureInfo(_FIXTURES, _FIXTURES, list(_FIXTURES), fixtures)
    return pytest.Function.from_parent(session, name="orrery", callobj=_nothing, fixtureinfo=information)


def _nothing(monkeypatch: Any, request: Any) -> None:
    """Does nothing."""
