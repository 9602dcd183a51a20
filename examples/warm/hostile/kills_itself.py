# expect: signal KILL
# worker: replaced
"""Kills its own process in the one way that nobody can catch."""
import os

print("goodbye", flush=True)
os.kill(os.getpid(), 9)
