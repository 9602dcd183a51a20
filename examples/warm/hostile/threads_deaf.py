# expect: exit 0
# worker: stays
"""Leaves a thread of pure C behind that has blocked every signal."""
import ctypes
import signal
import time

libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
thread = ctypes.c_ulong()
libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.sleep, ctypes.c_void_p), ctypes.c_void_p(1000))
time.sleep(0.02)
print("created")
