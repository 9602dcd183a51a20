# expect: anything
"""Throws away the heap."""
import ctypes

madvise = ctypes.CDLL(None).madvise
madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
with open("/proc/self/maps") as maps:
    start, end = next(line.split()[0].split("-") for line in maps if "[heap]" in line)
start, end = int(start, 16), int(end, 16)
for advice in (4, 8):
    madvise(start, end - start, advice)
print([object() for _ in range(100)])
