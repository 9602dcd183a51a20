"""Starts a server of Orrery for a test."""

import contextlib
import os
import signal
import subprocess
import time


@contextlib.contextmanager
def serving(arguments, is_ready):
    """Runs `orrery ARGUMENTS` until the block ends, which begins when it is ready."""
    process = subprocess.Popen([os.environ["ORRERY"], *arguments], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        for _ in range(6000):
            if is_ready():
                break
            if process.poll() is not None:
                raise RuntimeError(process.stderr.read().decode())
            time.sleep(0.01)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
