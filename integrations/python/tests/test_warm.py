"""The client of warm interpreters, beside a server."""

import fcntl
import os
import signal
import socket
import tempfile
import threading
import unittest
import unittest.mock

import orrery
from orrery import warm
from server import serving


class Warm(unittest.TestCase):
    def serve(self, *options):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        path = os.path.join(directory.name, "socket")
        workers = [] if "--workers" in options else ["--workers", "1"]
        manager = serving(["warm", "serve", "--python=/usr/bin/python3", *workers, "--socket", path, *options], lambda: os.path.exists(path))
        self.server = manager.__enter__()
        self.addCleanup(manager.__exit__, None, None, None)
        self.directory = directory.name
        return warm.Client(path, wait=60)

    def test_programs_run_as_under_python(self):
        client = self.serve("--import", "json")
        done = client.run(command="import json, sys; print(json.dumps(sys.argv), file=sys.stderr)", arguments=["a", "\u00e9"], capture_output=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, b"", b'["-c", "a", "\\u00e9"]\n'))
        self.assertGreater(done.microseconds, 0)

        done = client.run(command="import sys; print(sys.stdin.read().upper()); sys.exit(3)", input=b"in" * 100000, capture_output=True)
        self.assertEqual((done.returncode, done.stdout), (3, b"IN" * 100000 + b"\n"))

        script = os.path.join(self.directory, "script.py")
        with open(script, "w") as file:
            file.write("import os, sys\nprint(__file__, os.getcwd(), os.environ['A'], len(os.environ))\n")
        done = client.run("script.py", environment={"A": "b", "PATH": "/bin"}, directory=self.directory, capture_output=True)
        self.assertEqual(done.stdout.decode().split()[:3], [os.path.join(self.directory, "script.py"), self.directory, "b"], done)

        done = client.run(module="json.tool", input=b"{}", capture_output=True)
        self.assertEqual(done.stdout, b"{}\n")

        done = client.run(command="import os; os.kill(os.getpid(), 9)", capture_output=True)
        self.assertEqual(done.returncode, -signal.SIGKILL)

        health = client.health()
        self.assertEqual(len(health.workers), 1)
        self.assertTrue(all(worker.pid > 1 for worker in health.workers))

    def test_streams_are_passed(self):
        client = self.serve()
        with tempfile.TemporaryFile() as out:
            out.write(b"before ")
            done = client.run(command="import sys; print(sys.stdin, sys.stderr)", stdin=None, stdout=out, stderr=None)
            self.assertEqual(done.returncode, 0)
            out.seek(0)
            self.assertEqual(out.read(), b"before None None\n")

    def test_many_clients_share_a_server(self):
        client = self.serve("--workers", "2")
        results = []

        def run(number):
            results.append((number, client.run(command=f"print({number} * 2)", capture_output=True).stdout))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(sorted(results), [(number, f"{number * 2}\n".encode()) for number in range(20)])

    def test_what_the_server_cannot_do_is_an_error(self):
        client = self.serve()
        with self.assertRaises(warm.Refused) as raised:
            client.run(command="pass", environment={"PYTHONMALLOC": "debug"}, capture_output=True)
        self.assertIn("PYTHONMALLOC", str(raised.exception))
        with self.assertRaises(orrery.Error):
            client.run("script.py", command="pass")
        with self.assertRaises(FileNotFoundError):
            client.run("/nonexistent/script.py")

    def test_a_time_limit_is_an_error(self):
        client = self.serve("--timeout", "1s")
        with self.assertRaises(warm.TimeLimit) as raised:
            client.run(command="while True: pass", capture_output=True)
        self.assertIn("longer than 1 s; start the server with another --timeout", str(raised.exception))

    def test_a_worker_may_answer_before_the_client_goes_on(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.addCleanup(ours.close)

        class Slow:
            """Goes on only when the worker has answered and closed the connection."""

            sendall = ours.sendall

            def sendmsg(self, *arguments):
                sent = ours.sendmsg(*arguments)
                theirs.recv(1 << 16)
                theirs.sendall(b"answer")
                theirs.close()
                return sent

        # An error here would have the program run a second time.
        warm._send(Slow(), b"frame", [0])
        self.assertEqual(ours.recv(100), b"answer")

    def test_a_server_that_is_just_starting_is_waited_for(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "socket")
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.addCleanup(listener.close)
            # As a server is between bind and listen.
            listener.bind(path)
            with self.assertRaises(warm.NoServer):
                warm.Client(path).run(command="pass")
            lock = open(path + ".lock", "w")
            self.addCleanup(lock.close)
            fcntl.flock(lock, fcntl.LOCK_EX)
            accepting = threading.Thread(target=lambda: listener.accept()[0].close())

            def sleep(_):
                if not accepting.ident:
                    listener.listen()
                    accepting.start()

            # It then ends without an answer, and nobody knows what became of the program.
            with unittest.mock.patch.object(warm.time, "sleep", sleep), self.assertRaises(warm.ServerLost):
                warm.Client(path).run(command="pass")
            accepting.join()

    def test_no_server_is_an_error_that_names_the_command(self):
        with self.assertRaises(warm.NoServer) as raised:
            warm.Client("/nonexistent/socket").run(command="pass")
        self.assertEqual(
            str(raised.exception),
            "cannot connect to /nonexistent/socket: No such file or directory; "
            "start one: orrery warm serve --python --socket /nonexistent/socket",
        )
        with self.assertRaises(warm.NoServer):
            warm.Client("/nonexistent/socket").health()


if __name__ == "__main__":
    unittest.main()
