"""The runner: a process forked from pytest, which runs tests and undoes them. `orrery.pytest_plugin` has the whole."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import inspect
import mmap
import os
import random
import signal
import socket
import sys
import traceback
import types
import unittest
import warnings
from ctypes import byref, c_uint64
from functools import partial
from typing import Any, Callable, Iterator, NoReturn, Optional

import pytest
from _pytest.nodes import Node
from _pytest.runner import call_and_report, show_test_item
from _pytest.warnings import catch_warnings_for_item

from orrery import _pytest_frames as frames
from orrery._library import library
from orrery._pytest_coverage import Coverage
from orrery._pytest_warmup import warm_up
from orrery.errors import Error

#: What the shared byte says of a test's reports.
_SENT, _NOT_SENT = 1, 2
#: What a process ends with that could not be put back (orrery/rollback.h).
EXIT_BROKEN = 70


def fork() -> int:
    """Forks; the child draws the same random numbers as this process would, as after a rollback."""
    state = random.getstate()
    with warnings.catch_warnings():
        # Of other threads: those of xdist wait for messages, and are not needed in the child.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        random.setstate(state)
    return pid


def crash_reports(item: Any, status: int, sections: list[tuple[str, str]]) -> list[Any]:
    """Returns the reports of a test that ended its process; `status` is waitpid(2)'s."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        how = f"was ended by signal {number} ({signal.Signals(number).name})" if number < 32 else f"was ended by signal {number}"
    else:
        how = f"ended its process with status {os.WEXITSTATUS(status)}"
    return failure_reports(item, f"the test CRASHED: it {how}", sections)


def failure_reports(item: Any, text: str, sections: list[tuple[str, str]]) -> list[Any]:
    """Returns the reports of a test that failed in a way that pytest cannot see."""
    path, line, _ = item.location
    reports = []
    for when, outcome in (("setup", "passed"), ("call", "failed"), ("teardown", "passed")):
        failed = outcome == "failed"
        reports.append(
            pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={name: 1 for name in item.keywords},
                outcome=outcome,
                longrepr=f"{path}:{(line or 0) + 1}: {text}" if failed else None,
                when=when,
                sections=sections if failed else [],
            )
        )
    return reports


class Runner:
    """Runs one test after another as pytest asks for them.

    A test whose fixtures of higher scope are ready is run in the *standing* snapshot, which is resumed again and again: pages that each
    test writes are then neither captured nor protected anew. Another is set up outside and has a snapshot of its own, in the midst
    of its setup phase; after that there is another state to stand on.
    """

    def __init__(self, session: Any, connection: socket.socket, traceback_file: Any, live: bool) -> None:
        self.session, self.config = session, session.config
        #: Calls hooks.
        self.hook = self.config.hook
        self.connection = connection
        #: Whether tests print to the terminal themselves.
        self.live = live
        self.refuses = self.config.getoption("orrery_fallback") == "refuse"
        self.coverage = Coverage()
        self.warnings: list[dict[str, Any]] = []
        # Shared memory is no part of a snapshot.
        self.sent = mmap.mmap(-1, mmap.PAGESIZE)
        #: Within what is undone: its process.
        self.inside = 0
        self.caught: Any = None
        self.snapshot = c_uint64()
        self.stands = False
        #: How the present test is undone, why it was not rolled back, and what of the last one could not be undone.
        self.how: Optional[str] = None
        self.reason: Optional[str] = None
        self.leftover: Optional[str] = None
        #: How the process that was forked for it ended, if the test ended it.
        self.crash: Optional[int] = None
        #: Fixtures of higher scope that are set up: now, and outside. Nodes that are set up outside; the test that follows.
        self.ready: dict[Any, None] = {}
        self.fixtures: dict[Any, None] = {}
        self.kept: list[Any] = []
        self.following: Any = None
        self.reports: list[Any] = []
        self.warm = False
        self.library: Any = None
        self.absence: Optional[str] = None
        try:
            self.library = library()
        except Error as error:
            self.absence = str(error)
        if faulthandler.is_enabled():
            faulthandler.enable(traceback_file)

    def serve(self) -> None:
        """Runs what is asked for until there is no more."""
        manager = self.config.pluginmanager
        for plugin in list(manager.get_plugins()):
            # What a worker of xdist reports is reported by the process that this one was forked from.
            if type(plugin).__module__ == "xdist.remote":
                manager.unregister(plugin)
        manager.register(self, "orrery-runner")
        self.coverage.begin_runner(manager)
        if not self.live:
            # Of a version of pytest that this does not fit tests are run all the same.
            with contextlib.suppress(Exception, KeyboardInterrupt):
                self.warm = warm_up(self)
        # A full collection of garbage would else write to every object that is there to stay.
        gc.freeze()
        while True:
            try:
                what, number, following = frames.receive(self.connection)
            except KeyboardInterrupt:
                # pytest decides what becomes of it.
                continue
            if what == "finish":
                break
            if self.leftover:
                frames.send(self.connection, {"leftover": self.leftover})
                continue
            item = self.session.items[number]
            self.following = self.session.items[following] if following >= 0 else None
            self.how, self.reason, self.crash = None, None, None
            # Where a rollback does not reach: whether the reports were sent, and whose.
            self.sent[0] = 0
            self.sent[8:16] = number.to_bytes(8, sys.byteorder)
            try:
                if what == "teardown":
                    self._tear_down(item)
                elif self._is_ready(item):
                    self._run_in_standing_snapshot(item)
                else:
                    self._run_from_midst_of_setup(item)
            except BaseException as error:
                frames.send(self.connection, self._frame([], **_ended_by(error)))
        failure = ""
        try:
            self.session._setupstate.teardown_exact(None)
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
        frames.send(self.connection, self._frame([], finished=failure))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        self.warnings.append(frames.warning_to_plain(warning_message, when, nodeid, location))

    def _is_ready(self, item: Any) -> bool:
        """Returns whether all that the item needs of higher scope is set up, or is nothing."""
        chain, kept = item.listchain(), list(self.session._setupstate.stack)
        if chain[: len(kept)] != kept or any(type(node).setup is not Node.setup for node in chain[len(kept) : -1]):
            return False
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        for name, fixture in _higher_fixtures(item):
            if fixture.cached_result is None and not _is_inherited(item, name):
                return False
            if name in parameters and fixture.cached_result and fixture.cached_result[1] is not parameters[name]:
                return False
        return True

    def _run_in_standing_snapshot(self, item: Any) -> None:
        if not self.stands:
            # Else each test would send it again.
            pending = self._frame([], extra=True)
            if pending["coverage"] or pending["warnings"]:
                frames.send(self.connection, pending)
            self.kept = list(self.session._setupstate.stack)
            self._freeze()
            self.stands = True
            try:
                begun = self._begin()
            except pytest.fail.Exception as error:
                self.stands = False
                return self._send(failure_reports(item, str(error.msg), []))
            if not begun:
                # Once, or for each test that was run in the snapshot.
                self.stands = self.how == "rollback"
                self._report_lost(self.session.items[int.from_bytes(self.sent[8:16], sys.byteorder)])
                return None
        self.how, self.inside = self.how or "rollback", os.getpid()
        self._leave(*self._protocol(item))

    def _run_from_midst_of_setup(self, item: Any) -> None:
        self._stand_no_more()
        reports, ended = self._protocol(item)
        if self.how is None:
            # There was nothing to undo yet: it was skipped, or a fixture of higher scope failed.
            self._send(reports, ended)
        else:
            self._report_lost(item)

    def _report_lost(self, item: Any) -> None:
        """Reports for a test that did not do so itself."""
        if self.crash is not None:
            self._send(crash_reports(item, self.crash, []))
        elif self.sent[0] != _SENT:
            self._send(failure_reports(item, "the test closed descriptors that are not its own", []))

    def _send(self, reports: list[Any], ended: Optional[dict[str, Any]] = None) -> None:
        """Sends a test's reports, and how many of its nodes are set up outside: whether another test can follow at once."""
        kept = len(self.kept if self.inside else self.session._setupstate.stack)
        if self.inside and not self.stands:
            # The item was set up outside, too.
            kept += 1
        frames.send(self.connection, self._frame(reports, kept=kept, **(ended or {})))

    def _protocol(self, item: Any) -> tuple[list[Any], dict[str, Any]]:
        """Runs the test in the wrappers of pytest's hook; the hook itself calls `run`."""
        self.reports = []
        ended: dict[str, Any] = {}
        try:
            self.hook.pytest_runtest_protocol(item=item, nextitem=self.following)
        except BaseException as error:
            ended = _ended_by(error)
        return self.reports, ended

    def run(self, item: Any) -> None:
        """Runs one test: pytest's protocol, in the runner."""
        if hasattr(item, "_request") and not item._request:
            item._initrequest()
        standing = bool(self.inside)
        if not standing:
            self._set_boundary(item)
        ended: dict[str, Any] = {}
        try:
            self._phases(item)
        except BaseException as error:
            if standing or not self.inside:
                raise
            ended = _ended_by(error)
        if not standing and self.inside:
            self._leave(self.reports, ended)
        for attribute in ("_request", "funcargs"):
            if hasattr(item, attribute):
                setattr(item, attribute, None)
        item.__dict__.pop("setup", None)

    def _set_boundary(self, item: Any) -> None:
        """Has the item's setup call `_cross` where its fixtures of higher scope are there and those of the function are not."""
        request: Any = getattr(item, "_request", None)
        if hasattr(request, "_fillfixtures"):
            fill = request._fillfixtures
            request._fillfixtures = partial(self._cross, item, partial(_fill_higher, item, request), fill)
        else:
            # An item of a kind of its own: all that it sets up is undone.
            setup = item.setup
            item.setup = partial(self._cross, item, _nothing, setup)

    def _cross(self, item: Any, higher: Callable[[], None], rest: Callable[[], None]) -> None:
        # Not to be seen in the tracebacks of fixtures.
        __tracebackhide__ = True
        higher()
        # But for the item.
        self.kept = list(self.session._setupstate.stack)[:-1]
        self._freeze()
        if self._begin():
            self.inside = os.getpid()
            # The wrapper of pytest_runtest_protocol would collect this test's warnings, and forget them.
            if self.config.pluginmanager.hasplugin("warnings"):
                self.caught = catch_warnings_for_item(self.config, item.ihook, "runtest", item)
                self.caught.__enter__()
            rest()

    def _begin(self) -> bool:
        """Returns true, and when what followed is undone, false."""
        _flush()
        self.how, self.reason = "rollback", self.absence
        if self.library is not None:
            returned = self.library.orrery_rollback_snapshot(byref(self.snapshot))
            if returned == 0:
                return True
            text = self.library.orrery_last_error()
            text = text.decode(errors="replace") if text else None
            if returned > 0:
                self.leftover = text
                if not self.stands:
                    self.library.orrery_rollback_discard(self.snapshot)
                return False
            self.reason = text
        if self.refuses:
            self.how = None
            pytest.fail(f"--orrery cannot roll the test back: {self.reason}", pytrace=False)
        self.how = "fork"
        pid = fork()
        if pid == 0:
            self.coverage.begin_process(self.config.pluginmanager)
            return True
        try:
            _, status = os.waitpid(pid, 0)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        if not self.sent[0]:
            self.crash = status
        return False

    def _stand_no_more(self) -> None:
        if self.stands:
            self.library.orrery_rollback_discard(self.snapshot)
            self.stands = False

    def _freeze(self) -> None:
        if self.ready.keys() != self.fixtures.keys():
            gc.freeze()
            self.fixtures = dict(self.ready)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        yield
        if fixturedef.scope != "function":
            self.ready[fixturedef] = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        self.ready.pop(fixturedef, None)

    def _phases(self, item: Any) -> None:
        """Runs the phases as pytest's runtestprotocol does; outside of what is undone, the first half of the setup is all."""
        self.reports.append(call_and_report(item, "setup", log=False))
        if not self.inside:
            return
        setup_only = self.config.getoption("setuponly", False)
        if self.reports[0].passed:
            if self.config.getoption("setupshow", False):
                if "add_space" in inspect.signature(show_test_item).parameters:
                    show_test_item(item, add_space=not setup_only)
                else:
                    show_test_item(item)
            self._report_now()
            if not setup_only:
                self.reports.append(call_and_report(item, "call", log=False))
        self._report_now()
        # What was set up outside stays.
        last = self.kept[-1] if self.kept else None
        self.reports.append(call_and_report(item, "teardown", log=False, nextitem=last))

    def _report_now(self) -> None:
        """Has the reports printed between what the test prints."""
        if self.live:
            reports, self.reports = self.reports, []
            frames.send(self.connection, self._frame(reports, part=True))
            frames.receive(self.connection)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: Any) -> None:
        """Tears down fixtures of higher scope that the test asked for by `getfixturevalue`: they are about to be undone."""
        if self.inside:
            request = getattr(item, "_request", None) or types.SimpleNamespace(node=item)
            for fixture in reversed(list(self.ready)):
                if fixture not in self.fixtures:
                    fixture.finish(request)

    def _leave(self, reports: list[Any], ended: dict[str, Any]) -> NoReturn:
        """Sends the reports and undoes the test."""
        if os.getpid() != self.inside:
            # The test forked, and its child came back here.
            os._exit(1)
        if self.caught is not None:
            self.caught.__exit__(None, None, None)
        try:
            self._send(reports, ended)
            self.sent[0] = _SENT
        except OSError:
            self.sent[0] = _NOT_SENT
        if self.how == "fork":
            os._exit(0)
        self.library.orrery_rollback_resume(self.snapshot, 1)
        os.write(2, b"orrery: " + self.library.orrery_last_error() + b"\n")
        os._exit(EXIT_BROKEN)

    def _tear_down(self, item: Any) -> None:
        """Tears down, outside, what the following test does not need."""
        self._stand_no_more()
        state = self.session._setupstate
        if item in state.stack:
            report = call_and_report(item, "teardown", log=False, nextitem=self.following)
        else:
            # Hooks that set the item up are undone, so those that tear it down are not called.
            manager = self.config.pluginmanager.getplugin("capturemanager")
            with manager.item_capture("teardown", item) if manager is not None else contextlib.nullcontext():
                call = pytest.CallInfo.from_call(
                    lambda: state.teardown_exact(self.following),
                    when="teardown",
                    reraise=(pytest.exit.Exception, KeyboardInterrupt),
                )
            report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        self._send([report])

    def _frame(self, reports: list[Any], **more: Any) -> dict[str, Any]:
        # What was printed so far is to be read before what is reported.
        _flush()
        warned, self.warnings = self.warnings, []
        serialize = self.hook.pytest_report_to_serializable
        return {
            "reports": [serialize(config=self.config, report=report) for report in reports],
            "coverage": self.coverage.take(),
            "warnings": warned,
            "shouldstop": self.session.shouldstop,
            "shouldfail": self.session.shouldfail,
            "how": self.how,
            "reason": self.reason,
            **more,
        }


def _ended_by(error: BaseException) -> dict[str, Any]:
    """Returns what pytest must know of an exception that ends the session."""
    if isinstance(error, pytest.exit.Exception):
        return {"exit": (str(error.msg), error.returncode)}
    if isinstance(error, KeyboardInterrupt):
        return {"interrupt": True}
    return {"failure": "".join(traceback.format_exception(type(error), error, error.__traceback__))}


def _higher_fixtures(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields the item's fixtures of higher scope than a function, in the order in which they are set up."""
    known = item._fixtureinfo.name2fixturedefs if hasattr(item, "_fixtureinfo") else {}
    for name in item.fixturenames if known else ():
        if name in known and known[name][-1].scope != "function":
            yield name, known[name][-1]


def _is_inherited(item: Any, name: str) -> bool:
    """Returns whether this is the fixture that calls `setUpClass` and `tearDownClass`, which do nothing but what TestCase's do."""
    if not name.startswith("_unittest_setUpClass_fixture"):
        return False
    return all(
        getattr(getattr(item.cls, method, None), "__func__", None) is getattr(unittest.TestCase, method).__func__
        for method in ("setUpClass", "tearDownClass")
    )


def _nothing() -> None:
    pass


def _fill_higher(item: Any, request: Any) -> None:
    __tracebackhide__ = True
    for name, _ in _higher_fixtures(item):
        if name not in item.funcargs:
            item.funcargs[name] = request.getfixturevalue(name)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()
