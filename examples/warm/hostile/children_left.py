# expect: exit 0
"""Leaves children behind: plain ones, a stopped one, zombies, and a daemon in a session of its own."""
import os
import signal
import subprocess
import time

null = subprocess.DEVNULL
for _ in range(3):
    subprocess.Popen(["sleep", "1000"], stdin=null, stdout=null, stderr=null)
for kind in range(4):
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        if kind == 0:
            os._exit(0)
        if kind == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == 2:
            os.setsid()
            if os.fork():
                os._exit(0)
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                try:
                    signal.signal(number, signal.SIG_IGN)
                except OSError:
                    pass
        time.sleep(1000)
        os._exit(0)
time.sleep(0.02)
print("seven children")
