"""What starts the command `orrery`: guard, trace, orbits."""

import os
import subprocess
import tempfile
import time
import unittest

import orrery
from orrery import guard, orbits, trace


class Guard(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.secret = os.path.join(self.directory.name, "secret")
        with open(self.secret, "w") as file:
            file.write("the key\n")

    def test_what_a_policy_refuses_is_returned(self):
        policy = os.path.join(self.directory.name, "policy.toml")
        with open(policy, "w") as file:
            file.write(f'[files]\nread = ["/"]\nexecute = ["/"]\ndeny = ["{self.secret}"]\n')
        done = guard.run(["cat", self.secret], policy=policy, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        [refusal] = [each for each in done.refusals if each.path == os.path.realpath(self.secret)]
        self.assertEqual(refusal.missing, ("read",))
        self.assertIn("open", refusal.call)

    def test_settings_are_a_mapping(self):
        settings = {"filesystem": {"denyRead": [self.secret]}}
        done = guard.run(["sh", "-c", f"cat; cat {self.secret}"], settings=settings, input=b"in", capture_output=True)
        self.assertEqual((done.returncode, done.stdout), (1, b"in"))
        self.assertIn(b"Permission denied", done.stderr)
        self.assertTrue(any(each.path == os.path.realpath(self.secret) for each in done.refusals))

    def test_refusals_come_while_the_program_runs(self):
        settings = {"filesystem": {"denyRead": [self.secret]}}
        script = f"cat {self.secret}; read line"
        options = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with guard.Guard(["sh", "-c", script], settings=settings, **options) as running:
            found = []
            deadline = time.monotonic() + 60
            while not any(each.path == os.path.realpath(self.secret) for each in found):
                self.assertLess(time.monotonic(), deadline)
                found += running.refusals()
                time.sleep(0.01)
            self.assertIsNone(running.process.poll())
        self.assertIsNotNone(running.process.poll())

    def test_the_program_cannot_reach_the_log(self):
        script = "for each in /proc/self/fd/*; do readlink $each; done; ls /proc/*/fd"
        done = guard.run(["sh", "-c", script], settings={}, capture_output=True, text=True)
        self.assertNotIn("refusals", done.stdout)

    def test_what_the_guard_cannot_do_is_an_error(self):
        for arguments, options, said in (
            (["true"], {}, "cannot guard true: no policy is given; give one of"),
            (["true"], {"policy": "a", "profile": "b"}, "policy and profile are given"),
            ([], {"profile": "python"}, "cannot start a program: the list of its arguments is empty"),
            (["true"], {"policy": "/nonexistent", "capture_output": True}, "/nonexistent"),
            (["true"], {"settings": {"nonsense": 1}, "capture_output": True}, "nonsense"),
        ):
            with self.assertRaises(orrery.Error) as raised:
                guard.run(arguments, **options)
            self.assertIn(said, str(raised.exception))


class Trace(unittest.TestCase):
    def test_calls_are_yielded_in_order(self):
        script = "cat /nonexistent/file; exit 3"
        with trace.Trace(["sh", "-c", script], stderr=subprocess.DEVNULL) as traced:
            calls = list(traced)
        self.assertEqual(traced.returncode, 3)
        [missing] = [call for call in calls if call.arguments.get("filename") == '"/nonexistent/file"']
        self.assertEqual((missing.error, missing.by_policy), ("ENOENT", False))
        self.assertLess(missing.result, 0)
        self.assertGreaterEqual(missing.duration, 0)
        # A call that does not return.
        self.assertIsNone([call for call in calls if call.name == "exit_group"][-1].result)
        # Of two processes.
        self.assertGreater(len({call.thread for call in calls}), 1)

    def test_calls_can_be_chosen_and_the_program_left(self):
        with trace.Trace(["cat", "/proc/self/status", "-"], calls=["read"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as traced:
            self.assertEqual(next(iter(traced)).name, "read")
        self.assertIsNotNone(traced.returncode)

    def test_a_program_that_does_not_start_has_no_calls(self):
        with trace.Trace(["/nonexistent/program"], stderr=subprocess.DEVNULL) as traced:
            self.assertEqual(list(traced), [])
        self.assertEqual(traced.returncode, 127)


class Orbits(unittest.TestCase):
    @unittest.skipUnless("ORRERY_PROGRAM_WITH_ORBIT" in os.environ, "no program with an orbit was built")
    def test_a_program_has_its_orbits(self):
        with subprocess.Popen([os.environ["ORRERY_PROGRAM_WITH_ORBIT"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
            program.stdout.readline()
            [orbit] = orbits.statistics(program.pid)
            self.assertEqual((orbit.pid, orbit.orbit, orbit.calls, orbit.failed), (program.pid, "counter", 3, 0))
            self.assertTrue(any(each == orbit for each in orbits.statistics()))
            program.stdin.close()

    def test_a_process_that_is_not_there_is_an_error(self):
        with self.assertRaises(orrery.Error) as raised:
            orbits.statistics(1 << 22)
        self.assertIn("cannot list orbits", str(raised.exception))


class Command(unittest.TestCase):
    def test_without_a_command_the_error_says_what_to_do(self):
        named = os.environ.pop("ORRERY")
        path, os.environ["PATH"] = os.environ["PATH"], "/nonexistent"
        try:
            with self.assertRaises(orrery.Error) as raised:
                orbits.statistics()
        finally:
            os.environ["ORRERY"], os.environ["PATH"] = named, path
        self.assertEqual(
            str(raised.exception),
            "cannot find the command orrery: it is not in PATH; install Orrery, or name the command in ORRERY",
        )


if __name__ == "__main__":
    unittest.main()
