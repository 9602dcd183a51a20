"""`pytest --orrery`: outcomes and output are those of plain pytest, and what tests do is undone.

Each test runs pytest in a process of its own, in which the plug-in is found by its entry point.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml

import pytest

MIXED = {
    "conftest": """
        import pytest

        @pytest.fixture(scope="session")
        def base():
            print("base up")
            yield []
            print("base down")

        @pytest.fixture(scope="module", params=["a", "b"])
        def each(request, base):
            print("each up", request.param)
            yield request.param
            print("each down", request.param)

        @pytest.fixture
        def own(base):
            print("own up")
            yield
            print("own down")

        @pytest.fixture(scope="session")
        def broken():
            raise OSError("no database")

        @pytest.fixture(scope="module")
        def breaks():
            yield
            raise OSError("does not stop")
    """,
    "test_first": """
        import logging, sys, unittest, warnings, pytest

        @pytest.mark.parametrize("number", range(3))
        def test_passes(number, own, tmp_path):
            assert not list(tmp_path.iterdir())
            (tmp_path / "file").write_text("x")

        def test_fails(each, own):
            print("to stdout")
            print("to stderr", file=sys.stderr)
            logging.warning("to the log")
            warnings.warn("be careful", DeprecationWarning)
            assert {"key": [1, 2]} == {"key": [1, 3]}

        def test_raises():
            def inner():
                raise ValueError("not good")
            inner()

        @pytest.mark.skip(reason="not today")
        def test_skipped(broken): pass

        @pytest.mark.xfail(reason="known")
        def test_known(): assert 0

        @pytest.mark.xfail
        def test_better(): pass

        def test_broken(broken): pass
        def test_broken_too(broken): pass

        def test_skips(): pytest.skip("from within")
        def test_captures(capsys, capfd=None):
            print("x")
            assert capsys.readouterr().out == "x\\n"
        def test_captures_descriptors(capfd):
            import os
            os.write(1, b"y")
            assert capfd.readouterr().out == "y"
        def test_logs(caplog):
            logging.error("z")
            assert caplog.messages == ["z"]
        def test_records(record_property):
            record_property("size", 3)

        class TestClass:
            @classmethod
            def setup_class(cls): cls.values = [1]
            def setup_method(self): self.own = 2
            def test_one(self): assert self.values + [self.own] == [1, 2]
            def test_two(self): assert 0, "class"

        class Unit(unittest.TestCase):
            @classmethod
            def setUpClass(cls): cls.shared = 5
            def setUp(self): self.number = 1
            def test_it(self): self.assertEqual(self.number + self.shared, 6)
            def test_not(self): self.assertEqual(self.number, 2)
            @unittest.skip("unit")
            def test_skipped(self): pass
            @unittest.expectedFailure
            def test_expected(self): self.fail()

        def test_asyncio():
            import asyncio
            async def answer():
                await asyncio.sleep(0)
                return 42
            assert asyncio.run(answer()) == 42
    """,
    "test_second": """
        def double(value):
            '''
            >>> double(2)
            4
            >>> double(3)
            7
            '''
            return 2 * value

        def test_last(breaks, own, each): pass
    """,
}


@pytest.fixture
def suite(pytester, monkeypatch):
    """Makes files of tests and runs pytest on them."""
    # What the pytest around this one says to its children; and without a buffer, what is never flushed would be printed, too.
    for name in ("PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)

    class Suite:
        path = pytester.path

        def make(self, **files):
            pytester.makepyfile(**files)

        def run(self, *arguments, timeout=120):
            return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=timeout)

        def orrery(self, *arguments, **named):
            return self.run("--orrery", *arguments, **named)

    return Suite()


def normal(lines):
    """Returns lines of output without what differs from run to run."""
    text = "\n".join(line for line in lines if not line.startswith(("orrery: ", "plugins: ", "cachedir")))
    # With --orrery as with xdist, the report of a doctest is text.
    text = re.sub(r"^(FAILED \S+double) - .*", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"\d+\.\d\ds\b|0x[0-9a-f]+|pytest-\d+/|\d\d:\d\d:\d\d", "*", text).splitlines()


@pytest.mark.parametrize("options", [["-v", "-rA", "--doctest-modules"], ["-s"], ["--setup-show"], ["--capture=sys", "--tb=short", "-q"]])
def test_output_is_that_of_pytest(suite, options):
    suite.make(**MIXED)
    plain, undone = suite.run(*options), suite.orrery(*options)
    assert "orrery: what tests do is undone" in undone.stdout.str() or "-q" in options
    assert normal(undone.outlines) == normal(plain.outlines)
    assert (undone.ret, undone.errlines) == (plain.ret, plain.errlines)


def test_junit_and_durations_are_those_of_pytest(suite):
    suite.make(**MIXED)
    read = []
    for options in ([], ["--orrery"]):
        suite.run("--junitxml=junit.xml", *options)
        tree = xml.parse("junit.xml").getroot()
        for element in tree.iter():
            for name in ("time", "timestamp"):
                element.attrib.pop(name, None)
        read.append(normal(xml.tostring(tree, encoding="unicode").splitlines()))
    assert read[0] == read[1]
    assert 'value="3"' in "".join(read[0])
    slow = {"test_slow": "import time\ndef test(): time.sleep(0.3)"}
    suite.make(**slow)
    suite.orrery("test_slow.py", "--durations=1").stdout.re_match_lines([r"0\.\d\ds call +test_slow\.py::test"])


UNDONE = """
    import json, os, random, subprocess, sys, threading, time, pytest

    STATE = []
    LOG = open("log", "a", buffering=1)

    @pytest.fixture(scope="session")
    def session():
        LOG.write("session up\\n")
        yield {}
        LOG.write("session down\\n")

    @pytest.fixture(scope="module")
    def module(session):
        LOG.write("module up\\n")
        yield []
        LOG.write("module down\\n")

    @pytest.fixture(scope="session")
    def late():
        LOG.write("late up\\n")
        yield
        LOG.write("late down\\n")

    @pytest.mark.parametrize("round", range(30))
    def test_damages(round, session, module):
        assert (STATE, session, module) == ([], {}, [])
        assert json.loads("1") == 1 and os.path.exists("log") and "DAMAGED" not in os.environ
        assert "colorsys" not in sys.modules
        import colorsys
        STATE.append(round); session[round] = 1; module.append(round)
        json.loads = None
        os.environ["DAMAGED"] = "yes"
        os.chdir("/")
        sys.path.clear()
        open("/dev/null")

    def test_leaves_a_thread_and_a_child():
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        child = subprocess.Popen(["sleep", "1000"])
        print("child", child.pid)
        LOG.write(f"child {child.pid}\\n")

    def test_they_are_gone():
        assert threading.active_count() == 1
        with open("log") as log:
            pid = [line.split()[1] for line in log if line.startswith("child")][0]
        assert not os.path.exists(f"/proc/{pid}")

    @pytest.mark.parametrize("round", range(2))
    def test_asks_late(round, request):
        request.getfixturevalue("late")

    @pytest.mark.parametrize("round", range(2))
    def test_draws(round):
        LOG.write(f"random {random.random()}\\n")
"""


def test_what_tests_do_is_undone(suite):
    suite.make(test_undone=UNDONE, conftest="import random\nrandom.seed(5)")
    suite.orrery().assert_outcomes(passed=36)
    log = [line for line in (suite.path / "log").read_text().splitlines() if not line.startswith("child")]
    import random

    random.seed(5)
    drawn = f"random {random.random()}"
    assert log == ["session up", "module up", *["late up", "late down"] * 2, drawn, drawn, "module down", "session down"]
    # It is no such suite without: the test has something to find.
    assert suite.run().ret == 1


def test_fixtures_by_parameter_and_class_stay_while_they_serve(suite):
    suite.make(
        test_it="""
        import pytest
        LOG = open("log", "a", buffering=1)

        @pytest.fixture(scope="module", params=[1, 2])
        def parameter(request):
            LOG.write(f"up {request.param}\\n")
            yield [request.param]
            LOG.write(f"down {request.param}\\n")

        def test_one(parameter):
            assert len(parameter) == 1
            parameter.append(0)

        def test_two(parameter):
            assert len(parameter) == 1
            parameter.append(0)

        class TestClass:
            @pytest.fixture(scope="class", autouse=True)
            def around(self):
                LOG.write("class up\\n")
                yield
                LOG.write("class down\\n")

            def test_three(self): pass
            def test_four(self): pass
        """
    )
    suite.orrery().assert_outcomes(passed=6)
    log = (suite.path / "log").read_text().split("\n")[:-1]
    assert log == ["up 1", "down 1", "up 2", "class up", "class down", "down 2"]


def test_stopping(suite):
    suite.make(
        test_stop="""
        import pytest
        LOG = open("log", "a", buffering=1)

        @pytest.fixture(scope="session", autouse=True)
        def session():
            yield
            LOG.write("down\\n")

        def test_1(): pass
        def test_2(): assert 0
        def test_3(): LOG.write("third\\n")
        def test_exits(): pytest.exit("enough", returncode=9)
        def test_interrupts(): raise KeyboardInterrupt
        def test_asks(request): request.session.shouldstop = "asked"
        def test_last(): LOG.write("last\\n")
        """
    )
    log = suite.path / "log"

    def ran(*options):
        log.write_text("")
        return suite.orrery(*options), log.read_text().split()

    done, written = ran("-x")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*stopping after 1 failures*"])
    assert written == ["down"]
    done, written = ran("-k", "exits or last")
    done.stdout.fnmatch_lines(["*Exit: enough*"])
    assert (done.ret, written) == (9, ["down"])
    done, written = ran("-k", "interrupts or last")
    assert (done.ret, written) == (2, ["down"])
    done, written = ran("-k", "asks or last")
    done.stdout.fnmatch_lines(["*Interrupted: asked*"])
    assert written == ["down"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_ends_pytest_ends_the_test(suite, number):
    suite.make(
        test_it="""
        import os, pytest, time

        @pytest.fixture(scope="session", autouse=True)
        def session():
            yield
            open("down", "w").close()

        def test_first(): pass
        def test_waits():
            with open("pid.new", "w") as file:
                file.write(str(os.getpid()))
            os.rename("pid.new", "pid")
            time.sleep(1000)
        """
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--orrery"]

    def heed():
        # Shells start what is to run in the background with SIGINT ignored, and so do all below it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    running = subprocess.Popen(command, cwd=suite.path, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    pid = suite.path / "pid"
    while not pid.exists():
        assert running.poll() is None
        time.sleep(0.05)
    # Only pytest, as `kill` does; Ctrl-C reaches both.
    running.send_signal(number)
    output, _ = running.communicate()
    if number == signal.SIGINT:
        assert running.returncode == pytest.ExitCode.INTERRUPTED and "1 passed" in output
        assert (suite.path / "down").exists()
    status = f"/proc/{pid.read_text()}/status"
    for _ in range(2400):
        try:
            with open(status) as file:
                if "\nState:\tZ" in file.read():
                    return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.05)
    pytest.fail("the test's process is still there")


def test_last_failed(suite, pytester):
    suite.make(test_it="def test_1(): pass\ndef test_2(): assert 0\n")
    for count in (2, 1):
        done = pytester.runpytest_subprocess("--orrery", "--lf")
        assert sum(done.parseoutcomes().get(name, 0) for name in ("passed", "failed")) == count


CRASHES = """
    import ctypes, os, signal, pytest
    LOG = open("log", "a", buffering=1)

    @pytest.fixture(scope="session", autouse=True)
    def session(): LOG.write("up\\n")

    def test_before(): pass
    def test_exits():
        print("said before", flush=True)
        os._exit(3)
    def test_between(): pass
    def test_faults(): ctypes.string_at(0)
    def test_is_killed(): os.kill(os.getpid(), signal.SIGKILL)
    def test_after(): pass
"""


def test_a_crash_is_a_failure(suite):
    suite.make(test_crash=CRASHES)
    done = suite.orrery("--junitxml=junit.xml", "--log-level=INFO")
    done.assert_outcomes(passed=3, failed=3)
    done.stdout.fnmatch_lines(
        [
            "test_crash.py:*: the test CRASHED: it ended its process with status 3",
            "said before",
            "*CRASHED: it was ended by signal 11 (SIGSEGV)",
            "*Fatal Python error*",
            "*in test_faults*",
            "*CRASHED: it was ended by signal 9 (SIGKILL)",
            "test_crash.py::test_exits ended its process, with all fixtures that were set up",
        ]
    )
    suite_element = xml.parse("junit.xml").getroot().find("testsuite")
    assert (suite_element.get("tests"), suite_element.get("failures")) == ("6", "3")
    assert (suite.path / "log").read_text().split() == ["up"] * 4


THREADS = """
    import threading, pytest
    STATE = []

    @pytest.fixture(scope="session", autouse=True)
    def thread():
        end = threading.Event()
        threading.Thread(target=end.wait).start()
        yield
        end.set()
"""


def test_with_threads_it_forks(suite):
    suite.make(conftest=THREADS.replace("STATE = []", ""), test_crash=CRASHES)
    suite.make(test_it="STATE = []\ndef test_1(): assert STATE == []; STATE.append(1)\ndef test_2(): assert STATE == []\n")
    done = suite.orrery()
    done.assert_outcomes(passed=5, failed=3)
    lines = [line for line in done.outlines if "tests ran in a forked process each" in line]
    assert len(lines) == 1 and re.search("^8 tests .*other threads run", lines[0]), lines
    done.stdout.fnmatch_lines(["*CRASHED: it ended its process with status 3", "*signal 11*", "*signal 9*"])
    # Such a crash costs no fixtures.
    assert (suite.path / "log").read_text().split() == ["up"]


def test_a_refusal_is_an_error_if_so_wanted(suite):
    suite.make(conftest=THREADS, test_it="def test_1(): pass\ndef test_2(): pass\n")
    done = suite.orrery("--orrery-fallback=refuse")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["*--orrery cannot roll the test back: *other threads run*"])
    assert done.parseoutcomes().get("passed") is None


def test_without_the_library_it_forks(suite, monkeypatch):
    monkeypatch.setenv("ORRERY_LIBRARY", "/none/liborrery.so")
    suite.make(test_it="STATE = []\ndef test_1(): assert STATE == []; STATE.append(1)\ndef test_2(): assert STATE == []\n")
    done = suite.orrery()
    done.assert_outcomes(passed=2)
    done.stdout.fnmatch_lines(["2 tests ran in a forked process each*cannot load the library /none/liborrery.so*"])


def test_with_xdist(suite):
    pytest.importorskip("xdist")
    suite.make(test_undone=UNDONE.replace("range(30)", "range(10)"), conftest="import random\nrandom.seed(5)")
    suite.make(test_state="import pytest\nS = []\n@pytest.mark.parametrize('n', range(20))\ndef test(n): assert not S; S.append(n)\n")
    # By file, since one test looks for what another has left.
    done = suite.orrery("-n", "2", "--dist=loadfile")
    done.assert_outcomes(passed=36)
    assert "in a forked process" not in done.stdout.str()
    suite.make(test_crash=CRASHES)
    done = suite.orrery("-n", "2", "test_crash.py")
    done.assert_outcomes(passed=3, failed=3)
    done.stdout.fnmatch_lines(["*test_exits ended its process*"])


def test_coverage_is_that_of_pytest(suite):
    pytest.importorskip("pytest_cov")
    suite.make(
        measured="""
        def choose(value):
            if value == 1:
                return "one"
            elif value == 2:
                return "two"
            return "many"

        def fixture():
            return 1

        def never():
            return 0
        """,
        test_it="""
        import pytest, measured
        @pytest.fixture(scope="module")
        def one(): return measured.fixture()
        def test_one(one): assert measured.choose(one) == "one"
        def test_two(): assert measured.choose(2) == "two"
        def test_fails(): assert measured.choose(3) == "few"
        """,
    )
    options = ["--cov=measured", "--cov-report=", "--cov-context=test", "--cov-branch"]

    def measured(*more):
        done = suite.run(*options, *more)
        done.assert_outcomes(passed=2, failed=1)
        done = subprocess.run([sys.executable, "-m", "coverage", "json", "--show-contexts", "-o", "-"], capture_output=True, text=True)
        file = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])["files"]["measured.py"]
        file["contexts"] = {line: sorted(contexts) for line, contexts in file["contexts"].items()}
        return {name: file[name] for name in ("executed_lines", "missing_lines", "contexts", "missing_branches") if name in file}

    plain = measured()
    assert 11 in plain["missing_lines"] or 12 in plain["missing_lines"]
    assert any("test_two" in context for contexts in plain["contexts"].values() for context in contexts)
    assert measured("--orrery") == plain
    if pytest.importorskip("xdist"):
        assert measured("--orrery", "-n", "2") == measured("-n", "2")
    suite.make(conftest=THREADS)
    assert measured("--orrery") == plain


def test_a_test_that_closes_all_descriptors(suite):
    suite.make(test_it="import os\ndef test_1(): os.closerange(3, 200)\ndef test_2(): pass\n")
    done = suite.orrery()
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*the test closed descriptors that are not its own*"])


def test_what_cannot_be_undone_costs_the_process(suite):
    suite.make(
        test_it="""
        import ctypes, os, pytest
        libc = ctypes.CDLL(None)
        PIDS = open("pids", "a", buffering=1)

        @pytest.fixture(scope="session", autouse=True)
        def timer():
            # sigev_notify is SIGEV_NONE.
            event = (ctypes.c_int * 16)(0, 0, 0, 1)
            timer = ctypes.c_void_p()
            assert libc.timer_create(1, event, ctypes.byref(timer)) == 0
            return timer

        @pytest.mark.parametrize("number", range(3))
        def test(number, timer):
            PIDS.write(f"{os.getpid()}\\n")
            if number == 1:
                assert libc.timer_delete(timer) == 0
        """
    )
    done = suite.orrery()
    done.assert_outcomes(passed=3)
    done.stdout.fnmatch_lines(["before test_it.py::test?2?: *POSIX timer*; tests went on in another process"])
    first, second, third = (suite.path / "pids").read_text().split()
    assert first == second != third


def test_a_forked_child_that_returns_says_nothing(suite):
    suite.make(test_it="import os\ndef test_1():\n    pid = os.fork()\n    if pid: os.waitpid(pid, 0)\ndef test_2(): pass\n")
    suite.orrery().assert_outcomes(passed=2)


def test_directories_are_removed(suite):
    suite.make(test_it="def test_1(tmp_path): (tmp_path / 'x').write_text('x')\n")
    base = suite.path / "base"
    suite.orrery(f"--basetemp={base}").assert_outcomes(passed=1)
    assert (base / "test_10" / "x").exists()
    suite.orrery(f"--basetemp={base}", "-o", "tmp_path_retention_policy=none")
    locks = [path for path in suite.path.rglob(".lock")]
    assert not locks


def test_debugger(suite):
    pexpect = pytest.importorskip("pexpect")
    suite.make(test_it="STATE = [41]\ndef test_1():\n    STATE[0] += 1\n    assert 0\ndef test_2(): assert STATE == [41]\n")
    command = ["-m", "pytest", "-p", "no:cacheprovider", "--orrery", "--pdb"]
    child = pexpect.spawn(sys.executable, command, encoding="utf-8", timeout=60, cwd=str(suite.path))
    child.expect(r"\(Pdb\)")
    child.sendline("print('state', STATE)")
    child.expect(r"state \[42\]")
    child.sendline("c")
    child.expect("1 failed, 1 passed")
    child.expect(pexpect.EOF)


def test_only_pytest_itself_is_run_ahead(suite):
    """What has run before is cached, so that tests begin with that. Hooks and fixtures of the project have not run, and nothing is left."""
    suite.make(
        conftest="""
            import os, pytest

            SEEN = []

            def pytest_runtest_setup(item): SEEN.append(item.name)
            def pytest_runtest_teardown(item): SEEN.append("down")
            def pytest_runtest_makereport(item, call): SEEN.append(call.when)
            def pytest_report_to_serializable(report): SEEN.append("sent")

            @pytest.fixture(autouse=True)
            def auto(): SEEN.append("auto")

            @pytest.fixture
            def monkeypatch(): SEEN.append("patch")

            @pytest.fixture
            def seen(request):
                session, manager = request.session, request.config.pluginmanager
                assert "gethookproxy" not in vars(session) and session._setupstate.stack
                assert manager.getplugin("orrery-runner").hook is request.config.hook
                assert request.node.name in os.environ["PYTEST_CURRENT_TEST"]
                return SEEN
        """,
        test_it="""
            import pytest, random
            random.seed(5)
            @pytest.mark.parametrize("number", range(3))
            def test(number, seen, monkeypatch, request):
                assert seen == [f"test[{number}]", "auto", "patch", "setup"]
                assert request.config.pluginmanager.getplugin("orrery-runner").warm
                assert random.random() == random.Random(5).random()
        """,
    )
    done = suite.orrery()
    done.assert_outcomes(passed=3)
    assert "in a forked process" not in done.stdout.str()


def test_it_does_nothing_unless_asked(suite):
    suite.make(test_it="import os\nSTATE = []\ndef test_1(): STATE.append(os.getppid())\ndef test_2(): assert STATE\n")
    done = suite.run()
    done.assert_outcomes(passed=2)
    assert "orrery: " not in done.stdout.str()


def test_not_with_forked(suite):
    pytest.importorskip("pytest_forked")
    done = suite.orrery("--forked")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*cannot use --orrery and --forked together*"])
