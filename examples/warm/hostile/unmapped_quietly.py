# expect: exit 0
"""Takes mappings away that it does not need itself, and leaves holes."""
import ctypes
import os
import sqlite3

libc = ctypes.CDLL(None)
libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
done = 0
with open("/proc/self/maps") as maps:
    for line in maps.read().splitlines():
        place, access, *_, name = line.split()
        start, end = (int(part, 16) for part in place.split("-"))
        if "libsqlite3" in name:
            libc.mprotect(start, end - start, 0)
            libc.munmap(start, 4096)
            done += 1
print(done > 0, sqlite3.__name__, flush=True)
os._exit(0)
