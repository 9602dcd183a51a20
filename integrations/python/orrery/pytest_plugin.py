"""Runs each test of pytest in a process that is rolled back afterwards: `pytest --orrery`.

Tests are collected once. With the first test, pytest forks the *runner*, which runs all tests one after another and sends their reports to
pytest; so pytest's own state, and that of plug-ins which report (terminal, junitxml, cache, xdist), is out of reach of tests. In the
runner a test is

    set up     fixtures of class, module, package and session scope: they stay, and are torn down as pytest does it
    snapshot   orrery_rollback_snapshot (orrery/rollback.h), in the midst of the setup phase
    run        fixtures of function scope, the test, their teardown: pytest's own hooks, with the report sent from within
    resume     everything since the snapshot is undone, and the setup phase ends as if there had been no more to set up

Where no snapshot can be taken (a fixture has started a thread, the library is not there), the test is run in a process forked from the runner
at the same point. A test that ends the runner (a fatal signal, os._exit) has failed, and another runner is forked for the tests that follow.

Without `--orrery` this module does nothing but to define the options.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("orrery", "undo what tests do (orrery)")
    group.addoption(
        "--orrery",
        action="store_true",
        help="roll the interpreter back after each test; fixtures of higher scope are kept",
    )
    group.addoption(
        "--orrery-fallback",
        choices=("fork", "refuse"),
        default="fork",
        help="what to do with a test that cannot be rolled back: run it in a forked process (default), or let it fail",
    )


def pytest_configure(config: Any) -> None:
    if not config.getoption("orrery"):
        return
    if config.getoption("forked", False):
        raise pytest.UsageError("cannot use --orrery and --forked together: both isolate each test; give one of them")
    from orrery._pytest_session import Session

    config.pluginmanager.register(Session(config), "orrery-session")
