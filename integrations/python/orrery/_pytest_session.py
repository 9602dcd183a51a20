"""pytest's side: asks the runner for tests and reports what it answers. `orrery.pytest_plugin` has the whole."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import stat
import sys
import tempfile
from collections import Counter
from typing import Any, Iterator, Optional

import pytest

from orrery import _pytest_frames as frames
from orrery._pytest_coverage import Coverage
from orrery._pytest_runner import EXIT_BROKEN, Runner, crash_reports, failure_reports, fork

_PR_SET_PDEATHSIG = 1
#: Seconds for a runner that was interrupted, and for the reports of a test whose time was up.
_PATIENCE = 30.0
_LATE = 5.0


class Session:
    """The plug-in, if `--orrery` is given."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.runner: Optional[Runner] = None
        self.pid = 0
        self.connection: Any = None
        self.traceback_file: Any = None
        self.coverage: Any = None
        self.numbers: dict[Any, int] = {}
        #: Descriptors whose flags are others for now.
        self.appending: list[tuple[int, int]] = []
        #: The test that runs while the one before it is reported. Not where it would speak to the terminal meanwhile.
        self.ahead: Any = None
        option = config.option
        self.may_run_ahead = option.capture in ("fd", "sys") and not (
            option.usepdb or option.trace or option.setupshow or option.setuponly or config.getini("log_cli") or option.log_cli_level
        )
        #: How many tests were undone in which way; how many could not be and why; what was lost.
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.notes: list[str] = []

    def pytest_report_header(self) -> str:
        return "orrery: what tests do is undone"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        if self.runner is not None:
            self.runner.run(item)
            return True
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            self._run(item, nextitem)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _start(self, session: Any) -> None:
        if not self.numbers:
            self.numbers = {item: number for number, item in enumerate(session.items)}
            # Else the runner would make the directory, and pytest not know which to remove.
            factory = getattr(self.config, "_tmp_path_factory", None)
            if factory is not None:
                factory.getbasetemp()
            for item in session.items:
                # Both processes ask for these. The runner would work them out for each test, since what they are found by is undone.
                with contextlib.suppress(Exception):
                    item.location, item.ihook
            # Imported by now, if tests are measured.
            self.coverage = Coverage()
        if self.traceback_file is None:
            self.traceback_file = tempfile.TemporaryFile()
        for stream in (sys.stdout, sys.stderr, self.config.get_terminal_writer()):
            stream.flush()
        self._append_output()
        self.connection, other = socket.socketpair()
        parent = os.getpid()
        self.pid = fork()
        if self.pid:
            other.close()
            return
        status = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                self.connection.close()
                self.runner = Runner(session, other, self.traceback_file, not self.may_run_ahead)
                self.runner.serve()
                status = 0
        except EOFError:
            # pytest has ended.
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)

    def _append_output(self) -> None:
        """Has output that goes to a file appended to it: both processes write there, and a rollback puts offsets back."""
        terminal: Any = getattr(self.config.get_terminal_writer(), "_file", None)
        capturing = getattr(self.config.pluginmanager.getplugin("capturemanager"), "_global_capturing", None)
        descriptors = {1, 2}
        for capture in (getattr(capturing, "out", None), getattr(capturing, "err", None)):
            descriptors.add(getattr(capture, "targetfd_save", 1))
        try:
            descriptors.add(terminal.fileno())
        except (AttributeError, OSError, ValueError):
            pass
        for descriptor in descriptors:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if stat.S_ISREG(os.fstat(descriptor).st_mode) and not flags & os.O_APPEND:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
                self.appending.append((descriptor, flags))

    def pytest_unconfigure(self) -> None:
        for descriptor, flags in self.appending:
            with contextlib.suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)

    def _run(self, item: Any, nextitem: Any) -> None:
        """Has one test run, and reports it."""
        if self.ahead not in (None, item):
            # Something has changed the order: what runs there is not what is to be run.
            self._finish()
        if not self.pid:
            self._start(item.session)
        was_ahead = self.ahead is item
        self.ahead = None
        teardown, reported = [], False
        try:
            frame = self._answer(item) if was_ahead else self._ask(item, "run", nextitem)
            if frame is None:
                return
            if "leftover" in frame:
                self.notes.append(f"before {item.nodeid}: {frame['leftover']}; tests went on in another process")
                self._finish()
                return self._run(item, nextitem)
            reported = True
            stays = self._stays(item, nextitem, frame["kept"]) if "kept" in frame else False
            if stays and nextitem is not None and self.may_run_ahead and not _stops(frame):
                frames.send(self.connection, ("run", self.numbers[nextitem], -1))
                self.ahead = nextitem
            # The teardown of higher scopes belongs to the same report.
            if frame["reports"] and frame["reports"][-1]["when"] == "teardown":
                teardown.append(frame["reports"].pop())
            self._report(item, frame)
            ends = item.session.shouldfail or item.session.shouldstop
            if self.ahead is None and (not stays or ends):
                rest = self._ask(item, "teardown", None if ends else nextitem)
                teardown += rest.pop("reports")
                self._report(item, {**rest, "reports": []})
        except (EOFError, BrokenPipeError):
            self._log(item, teardown)
            if self._lost(item, reported, was_ahead):
                self._run(item, nextitem)
            return
        self._log(item, [_joined(*teardown)] if teardown else [])
        self.counts[frame["how"] or "outside"] += 1
        if frame["how"] == "fork":
            self.reasons[frame["reason"]] += 1

    def _stays(self, item: Any, nextitem: Any, kept: int) -> bool:
        """Returns whether all that is set up outside serves the next test, too."""
        chain = nextitem.listchain() if nextitem is not None else []
        return bool(chain[:kept] == item.listchain()[:kept])

    def _ask(self, item: Any, what: str, nextitem: Any) -> Any:
        following = -1 if nextitem is None else self.numbers[nextitem]
        frames.send(self.connection, (what, self.numbers[item], following))
        return self._answer(item)

    def _answer(self, item: Any) -> Any:
        while True:
            frame = self._receive(item)
            if frame is not None and "part" in frame:
                self._report(item, frame)
                frames.send(self.connection, ("reported", -1, -1))
            elif frame is not None and "extra" in frame:
                self._report(None, frame)
            else:
                return frame

    def _receive(self, item: Any) -> Any:
        """Returns the runner's next frame. Plug-ins that bound a test's time raise an exception in this process, too."""
        try:
            return frames.receive(self.connection)
        except pytest.fail.Exception as error:
            late = error
        self.connection.settimeout(_LATE)
        try:
            return frames.receive(self.connection)
        except socket.timeout:
            self._kill()
            self._log_made(item, failure_reports(item, str(late), self._captured()))
            return None
        finally:
            if self.connection is not None:
                self.connection.settimeout(None)

    def _report(self, item: Any, frame: Any) -> None:
        self.coverage.merge(frame["coverage"])
        for warned in frame["warnings"]:
            self.config.hook.pytest_warning_recorded.call_historic(
                kwargs={
                    "warning_message": frames.warning_from_plain(warned),
                    "when": warned["when"],
                    "nodeid": warned["nodeid"],
                    "location": warned["location"],
                }
            )
        if item is not None:
            self._log(item, frame["reports"])
            for attribute in ("shouldstop", "shouldfail"):
                if frame[attribute]:
                    setattr(item.session, attribute, frame[attribute])
        if "exit" in frame:
            pytest.exit(*frame["exit"])
        if "interrupt" in frame:
            raise KeyboardInterrupt
        if "failure" in frame:
            raise RuntimeError(f"the runner of --orrery failed: {frame['failure']}")

    def _log(self, item: Any, reports: list[Any]) -> None:
        make = self.config.hook.pytest_report_from_serializable
        self._log_made(item, [make(config=self.config, data=data) for data in reports])

    def _log_made(self, item: Any, reports: list[Any]) -> None:
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)

    def _captured(self) -> list[tuple[str, str]]:
        """Returns what the runner noted of a test that did not end as tests do."""
        sections = []
        self.traceback_file.seek(0)
        text = self.traceback_file.read().decode(errors="replace")
        self.traceback_file.seek(0)
        self.traceback_file.truncate()
        if text:
            sections.append(("Fatal Python error", text))
        manager = self.config.pluginmanager.getplugin("capturemanager")
        if manager is not None and manager.is_globally_capturing():
            # The file that descriptors 1 and 2 lead to is the runner's, too.
            for name, text in zip(("stdout", "stderr"), manager.read_global_capture()):
                if text:
                    sections.append((f"Captured {name} call", text))
        return sections

    def _lost(self, item: Any, reported: bool, was_ahead: bool) -> bool:
        """The runner has ended. Returns whether that was not by this test, which is then to be run again."""
        _, status = os.waitpid(self.pid, 0)
        self._forget()
        sections = self._captured()
        broken = os.WIFEXITED(status) and os.WEXITSTATUS(status) == EXIT_BROKEN
        if reported or (was_ahead and broken):
            text = "".join(text for _, text in sections).strip() or f"wait status {status}"
            self.notes.append(f"{'after' if reported else 'before'} {item.nodeid} the process could not be put back: {text}")
            return not reported
        self._log_made(item, crash_reports(item, status, sections))
        self.notes.append(f"{item.nodeid} ended its process, with all fixtures that were set up")
        return False

    def _forget(self) -> None:
        self.connection.close()
        self.pid, self.connection, self.ahead = 0, None, None

    def _kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._forget()

    def _interrupt(self) -> None:
        """Interrupts the runner, unless it was by the same key."""
        if self.pid:
            self.connection.settimeout(1)
            try:
                frames.receive(self.connection)
            except socket.timeout:
                os.kill(self.pid, signal.SIGINT)
            except (EOFError, ValueError):
                pass
            self.connection.settimeout(_PATIENCE)

    def _finish(self) -> None:
        """Has the runner tear down what is set up, and end."""
        if not self.pid:
            return
        try:
            frames.send(self.connection, ("finish", -1, -1))
            while True:
                frame = frames.receive(self.connection)
                self._report(None, {key: frame[key] for key in ("coverage", "warnings")})
                if "finished" in frame:
                    if frame["finished"]:
                        self.notes.append(f"teardown after the last test failed: {frame['finished']}")
                    os.waitpid(self.pid, 0)
                    return self._forget()
        except (EOFError, BrokenPipeError):
            self.notes.append("the runner ended before it had torn down its fixtures")
            os.waitpid(self.pid, 0)
            self._forget()
        except (ValueError, socket.timeout):
            self.notes.append("the runner was ended before it had torn down its fixtures")
            self._kill()

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        # Before pytest-cov reads what was measured: its wrapper is around this one.
        yield
        self._finish()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._finish()
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["orrery"] = (dict(self.counts), dict(self.reasons), self.notes)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        counts, reasons, notes = getattr(node, "workeroutput", {}).get("orrery", ({}, {}, []))
        self.counts.update(counts)
        self.reasons.update(reasons)
        self.notes.extend(notes)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.reasons and not self.notes:
            return
        terminalreporter.section("orrery")
        for reason, count in self.reasons.items():
            terminalreporter.write_line(f"{count} tests ran in a forked process each, not rolled back: {reason}")
        for note in self.notes:
            terminalreporter.write_line(note)


def _stops(frame: dict[str, Any]) -> bool:
    """Returns whether pytest may end after this test."""
    ends = any(frame.get(name) for name in ("exit", "interrupt", "failure", "shouldstop", "shouldfail"))
    return ends or any(report["outcome"] == "failed" for report in frame["reports"])


def _joined(first: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """Returns one report of a teardown that was done in parts: that of the function, and that of higher scopes."""
    joined = dict(first)
    for other in others:
        added = {name: text for name, text in other["sections"] if name.endswith(" teardown")}
        sections = [(name, text + added.pop(name, "")) for name, text in joined["sections"]]
        joined["sections"] = sections + list(added.items())
        joined["duration"] += other["duration"]
        if joined["outcome"] == "passed":
            joined["outcome"], joined["longrepr"] = other["outcome"], other["longrepr"]
    return joined
