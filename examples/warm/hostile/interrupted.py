# expect: signal INT
"""Ends by a KeyboardInterrupt that nobody catches."""
import os
import signal

print("interrupt")
os.kill(os.getpid(), signal.SIGINT)
