"""What calls liborrery in this process: objects, rollback."""

import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import unittest

import orrery
from orrery import objects, rollback
from server import serving

STATE = ["as it was"]


class Objects(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        store = os.path.join(cls.directory.name, "store")
        cls.addClassCleanup(cls.directory.cleanup)

        def ready():
            # Its socket is there before it listens.
            try:
                objects.connect(store)
            except orrery.Error:
                return False
            return True

        server = serving(["orc", "serve", "--directory", store], ready)
        server.__enter__()
        cls.addClassCleanup(server.__exit__, None, None, None)

    def test_bytes_come_back_by_their_name(self):
        data = os.urandom(10000)
        with objects.put(data) as put:
            self.assertEqual((bytes(put), len(put), put.name), (data, len(data), objects.hash(data)))
            with objects.get(put.name) as got:
                self.assertEqual(bytes(got.view), data)
        with self.assertRaises(orrery.Error) as raised:
            put.view
        self.assertIn("was released", str(raised.exception))

    def test_a_view_outlives_its_object_and_cannot_be_written(self):
        shared = objects.put(b"x" * 5000)
        view = shared.view
        shared.release()
        del shared
        gc.collect()
        self.assertEqual(bytes(view), b"x" * 5000)
        with self.assertRaises(TypeError):
            view[0] = 1

    def test_a_file_is_an_object(self):
        path = os.path.join(self.directory.name, "file")
        with open(path, "wb") as file:
            file.write(b"model" * 1000)
        with objects.open(path) as opened:
            self.assertEqual(opened.name, objects.hash(b"model" * 1000))

    def test_errors_name_value_and_way_out(self):
        absent = objects.hash(os.urandom(16))
        for wrong in (lambda: objects.get(absent), lambda: objects.get("abc"), lambda: objects.put(b""), lambda: objects.open("/none")):
            with self.assertRaises(orrery.Error) as raised:
                wrong()
            self.assertRegex(str(raised.exception), "^cannot .*; ")
        copy = pickle.loads(pickle.dumps(raised.exception))
        self.assertEqual((str(copy), copy.value), (str(raised.exception), "/none"))


def damage(path):
    """Changes all that it can reach; returns what it saw of it."""
    import decimal

    STATE.append("changed")
    json.loads = None
    sys.path.clear()
    os.chdir("/")
    os.environ["DAMAGED"] = "yes"
    open(path, "w").close()
    thread = threading.Thread(target=len, args=([],))
    thread.start()
    thread.join()
    rubbish = {number: str(number) for number in range(50000)}
    return list(STATE), len(rubbish), decimal.Decimal(1) + 1


class Rollback(unittest.TestCase):
    def setUp(self):
        self.assertEqual(threading.active_count(), 1, "another test has left a thread")

    def test_the_interpreter_is_as_it_was(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "written")
            there, allocated = os.getcwd(), None
            for _ in range(20):
                seen, length, total = rollback.call(damage, path)
                self.assertEqual((seen, length, total), (["as it was", "changed"], 50000, 2))
                self.assertEqual((STATE, json.loads("1"), os.getcwd()), (["as it was"], 1, there))
                self.assertTrue(sys.path)
                self.assertNotIn("DAMAGED", os.environ)
                self.assertNotIn("rubbish", dir())
            # What lies outside of the process stays.
            self.assertTrue(os.path.exists(path))
            for round in range(40):
                rollback.call(damage, path)
                if round == 20:
                    allocated = len(os.listdir("/proc/self/fd"))
            self.assertLessEqual(len(os.listdir("/proc/self/fd")), allocated + 1)

    def test_exceptions_cross(self):
        def fails():
            STATE.append("changed")
            raise KeyError("which")

        with self.assertRaises(KeyError) as raised:
            rollback.call(fails)
        self.assertEqual((raised.exception.args, STATE), (("which",), ["as it was"]))

    def test_a_result_that_cannot_cross_is_an_error_and_undone(self):
        def returns_a_function():
            STATE.append("changed")
            return lambda: None

        with self.assertRaises(rollback.NotPicklable) as raised:
            rollback.call(returns_a_function)
        self.assertIn("return plain data", str(raised.exception))
        self.assertEqual(STATE, ["as it was"])

    def test_output_appears_once(self):
        script = (
            "import orrery\n"
            "print('before')\n"
            "for round in range(3): orrery.rollback.call(lambda: print('within', round))\n"
            "print('after')\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        self.assertEqual(done.stdout, "before\nwithin 0\nwithin 1\nwithin 2\nafter\n", done.stderr)

    def test_a_process_with_threads_is_refused_before_the_call(self):
        script = (
            "import orrery, threading\n"
            "end = threading.Event()\n"
            "threading.Thread(target=end.wait).start()\n"
            "try: orrery.rollback.call(print, 'called')\n"
            "except orrery.Error as error: print(error)\n"
            "end.set()\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        self.assertRegex(done.stdout, "^cannot .*call it from the main thread", done.stderr)


if __name__ == "__main__":
    unittest.main()
