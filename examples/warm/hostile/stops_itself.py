# expect: timeout
# worker: replaced
"""Stops its own process, so that nothing in it can go on."""
import os
import signal

print("stop", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
