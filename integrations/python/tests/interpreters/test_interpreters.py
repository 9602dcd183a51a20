"""Extensions in subinterpreters: `counter` and `phases`, built by orrery-cc in ORRERY_EXTENSIONS, and plainly in its `plain`."""

import os
import subprocess
import sys
import threading
import time
import unittest

import orrery
from orrery.interpreters import Interpreter

EXTENSIONS = os.environ["ORRERY_EXTENSIONS"]
OWN_LOCK = sys.version_info >= (3, 13)


class Interpreters(unittest.TestCase):
    def setUp(self):
        sys.path.insert(0, EXTENSIONS)
        self.addCleanup(sys.path.remove, EXTENSIONS)

    def made(self, **options):
        interpreter = Interpreter(**options)
        self.addCleanup(interpreter.close)
        return interpreter

    def test_each_has_variables_types_exceptions_and_memory_of_its_own(self):
        one, two = self.made(), self.made()
        for interpreter in (one, two):
            interpreter.run("import counter")
        self.assertEqual([one.evaluate("counter.next().number()") for _ in range(3)], [1, 2, 3])
        self.assertEqual(two.evaluate("counter.next().number()"), 1)
        self.assertNotEqual(one.evaluate("id(counter.Ticket)"), two.evaluate("id(counter.Ticket)"))
        one.run("counter.note('of one')")
        self.assertEqual(two.evaluate("counter.note('of two')"), "")
        self.assertEqual(one.evaluate("counter.note('')"), "of one")
        two.run("try: counter.fail()\nexcept counter.error as error: text = str(error)")
        self.assertEqual(two.evaluate("text"), "after 1")
        two.run("class Sub(counter.Ticket): pass")
        self.assertEqual(one.evaluate("counter.Ticket.__subclasses__()"), [])
        self.assertEqual(set(one.extensions), {"counter"})
        self.assertGreater(one.extensions["counter"], 400)

    def test_without_the_pass_they_share_all_of_it(self):
        sys.path[0] = os.path.join(EXTENSIONS, "plain")
        one, two = self.made(), self.made()
        sys.path[0] = EXTENSIONS
        for interpreter in (one, two):
            interpreter.run("import counter")
        self.assertEqual([one.evaluate("counter.next().number()"), two.evaluate("counter.next().number()")], [1, 2])
        self.assertEqual(one.extensions, {})

    def test_an_interpreter_that_is_closed_leaves_nothing_to_the_next(self):
        for _ in range(20):
            with Interpreter() as interpreter:
                interpreter.run("import counter; counter.note('left')")
                self.assertEqual(interpreter.evaluate("counter.next().number()"), 1)
            with self.assertRaisesRegex(orrery.Error, "was closed"):
                interpreter.run("pass")

    def test_one_that_is_not_closed_ends_with_the_process(self):
        source = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from orrery.interpreters import Interpreter\n"
            "kept = Interpreter()\n"
            "kept.run('import counter; ticket = counter.next()')\n"
            "Interpreter().run('import counter; ticket = counter.next()')\n"
            "import gc; gc.collect()\n"
            "print(kept.evaluate('ticket.number()'))\n"
        )
        done = subprocess.run([sys.executable, "-c", source, EXTENSIONS], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "1\n", ""))

    def test_callbacks_find_their_interpreter(self):
        # Without it they wait for the lock that they have, so another process tries it.
        source = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from orrery.interpreters import Interpreter\n"
            "with Interpreter() as one, Interpreter() as two:\n"
            "    for interpreter in one, two, one:\n"
            "        interpreter.run('import counter')\n"
            "        print(interpreter.evaluate('counter.of_gil_state()'), flush=True)\n"
            "    two.run('from orrery.interpreters import Interpreter')\n"
            "    two.run('with Interpreter() as inner: inner.run(\"import counter; print(counter.of_gil_state(), flush=True)\")')\n"
            "    print(two.evaluate('counter.of_gil_state()'))\n"
            "import counter\n"
            "print(counter.of_gil_state())\n"
        )
        done = subprocess.run([sys.executable, "-c", source, EXTENSIONS], capture_output=True, text=True, timeout=300)
        self.assertEqual((done.returncode, done.stdout.split(), done.stderr), (0, ["1", "2", "1", "3", "2", "0"], ""))

    def test_modules_of_two_phases_are_instances_too(self):
        one, two = self.made(), self.made()
        for interpreter in (one, two):
            interpreter.run("import phases")
        self.assertEqual([one.evaluate("phases.next().number()"), one.evaluate("phases.next().number()")], [1, 2])
        self.assertEqual(two.evaluate("phases.next().number()"), 1)

    def test_modules_of_one_file_share_its_instance(self):
        one = self.made()
        one.run("import counter, second")
        self.assertEqual([one.evaluate(f"{name}.next().number()") for name in ("counter", "second")], [1, 2])
        one.run("import sys; before = counter; del sys.modules['counter']; import counter")
        self.assertTrue(one.evaluate("counter is before"))
        self.assertEqual(one.evaluate("counter.next().number()"), 3)

    def test_functions_have_the_name_of_their_module(self):
        one = self.made()
        one.run("import packaged.counter, pickle")
        name, function = "packaged.counter", "packaged.counter.next"
        self.assertEqual(one.evaluate("(packaged.counter.__name__, packaged.counter.next.__module__)"), (name, name))
        self.assertTrue(one.evaluate(f"pickle.loads(pickle.dumps({function})) is {function}"))

    def test_threads_of_an_interpreter_use_its_instances(self):
        one, two = self.made(), self.made()
        for interpreter in (one, two):
            interpreter.run("import counter, threading, _thread\nnumbers = []")
            interpreter.run("counter.next()")
        two.run(
            "def work(done=None):\n"
            "    numbers.append(counter.next().number())\n"
            "    if done: done.release()\n"
            "threads = [threading.Thread(target=work) for _ in range(8)]\n"
            "for thread in threads: thread.start()\n"
            "for thread in threads: thread.join()\n"
            "done = threading.Lock(); done.acquire()\n"
            "_thread.start_new_thread(work, (done,))\n"
            "done.acquire()\n"
        )
        self.assertEqual(sorted(two.evaluate("numbers")), list(range(2, 11)))
        self.assertEqual(one.evaluate("counter.next().number()"), 2)

    def test_interpreters_run_in_threads_side_by_side(self):
        interpreters = [self.made(own_lock=OWN_LOCK) for _ in range(4)]
        for interpreter in interpreters:
            interpreter.run("import counter")
        counts = {}

        def count(number):
            interpreters[number].run("for _ in range(20000): last = counter.next()")
            counts[number] = interpreters[number].evaluate("last.number()")

        threads = [threading.Thread(target=count, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(counts, {number: 20000 for number in range(4)})

    def test_an_interpreter_within_another_has_its_own(self):
        one = self.made()
        one.run("import counter; counter.next()\nfrom orrery.interpreters import Interpreter")
        one.run("with Interpreter() as inner:\n    inner.run('import counter')\n    number = inner.evaluate('counter.next().number()')")
        self.assertEqual(one.evaluate("(number, counter.next().number())"), (1, 2))

    def test_what_would_use_another_state_is_refused(self):
        one = self.made()
        one.run(
            "import threading\n"
            "end = threading.Event()\n"
            "thread = threading.Thread(target=end.wait)\n"
            "thread.start()\n"
            "try: import counter\n"
            "except ImportError as error: text = str(error)\n"
            "end.set()\n"
            "thread.join()\n"
        )
        self.assertIn("import it before they are started", one.evaluate("text"))
        one.run("import counter")
        self.assertEqual(one.evaluate("counter.next().number()"), 1)

    def test_threads_that_are_left_keep_an_interpreter_from_being_closed(self):
        one = self.made()
        reader, writer = os.pipe()
        one.run(f"import _thread, os\n_thread.start_new_thread(os.read, ({reader}, 1))")
        # Until 3.11, CPython itself runs nothing in it meanwhile.
        with self.assertRaisesRegex(orrery.Error, "of its threads run|more than one thread"):
            one.close()
        os.write(writer, b"x")
        deadline = time.monotonic() + 60
        while True:
            try:
                one.close()
                break
            except orrery.Error:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
        os.close(reader)
        os.close(writer)

    def test_an_extension_that_fails_to_start_fails_the_import_alone(self):
        one, two = self.made(), self.made()
        one.run("import os; os.environ['COUNTER_FAILS'] = '1'")
        for module in ("counter", "phases"):
            with self.assertRaisesRegex(orrery.Error, "as the environment has it"):
                one.run(f"import {module}")
        one.run("del os.environ['COUNTER_FAILS']")
        two.run("import counter")
        self.assertEqual(two.evaluate("counter.next().number()"), 1)
        one.run("import counter")
        self.assertEqual(one.evaluate("counter.next().number()"), 1)

    def test_errors_name_what_happened(self):
        one = self.made()
        with self.assertRaisesRegex(orrery.Error, "(?s)cannot run in the interpreter: .*division by zero"):
            one.run("1 / 0")
        with self.assertRaisesRegex(orrery.Error, "division by zero"):
            one.evaluate("1 / 0")
        one.close()
        one.close()
        with self.assertRaisesRegex(orrery.Error, "was closed; make another one"):
            one.evaluate("1")
        with open(os.path.join(EXTENSIONS, "broken.so"), "rb") as file:
            self.assertIn(b"\0orrery_cls_descriptor\0", file.read())
        with self.assertRaisesRegex(orrery.Error, "(?s)cannot make an instance of .*broken.so"):
            self.made().run("import broken")
        if not OWN_LOCK:
            with self.assertRaisesRegex(orrery.Error, "use CPython 3.13"):
                Interpreter(own_lock=True)


if __name__ == "__main__":
    unittest.main()
