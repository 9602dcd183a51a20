# expect: exit 7
"""Leaves without flushing, handlers or destructors."""
import atexit
import os

atexit.register(print, "never seen")
print("lost in the buffer")
os._exit(7)
