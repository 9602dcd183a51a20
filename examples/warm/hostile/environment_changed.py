# expect: exit 0
"""Changes the environment, in Python and in C, and what depends on it."""
import ctypes
import os
import time

os.environ.clear()
os.environ["PATH"] = "/nowhere"
os.environ["TZ"] = "Asia/Kathmandu"
time.tzset()
libc = ctypes.CDLL(None)
for number in range(1000):
    libc.setenv(f"RUBBISH{number}".encode(), b"x" * 100, 1)
libc.clearenv()
print(time.tzname[0])
