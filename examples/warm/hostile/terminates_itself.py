# expect: signal TERM
# worker: replaced
"""Sends itself a signal whose default is to end the process."""
import os
import signal

print("goodbye", flush=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
os.kill(os.getpid(), signal.SIGTERM)
