# expect: anything
"""Throws away what the C library and the interpreter have written in their own data."""
import ctypes

madvise = ctypes.CDLL(None).madvise
madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
pieces = []
with open("/proc/self/maps") as maps:
    for line in maps:
        place, access, *_, name = line.split()
        if "w" in access and ("libc.so" in name or "libpython" in name):
            start, end = (int(part, 16) for part in place.split("-"))
            pieces.append((start, end - start))
for start, length in pieces:
    madvise(start, length, 4)
print("dropped")
