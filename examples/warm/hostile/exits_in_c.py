# expect: exit 9
"""Leaves through the C library's exit, from a thread."""
import ctypes
import threading
import time

print("flushed", flush=True)
threading.Thread(target=lambda: ctypes.CDLL(None)._exit(9), daemon=True).start()
time.sleep(100)
