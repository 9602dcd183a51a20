# expect: crash
"""Writes rubbish over its own stack."""
import ctypes

word = ctypes.c_long()
libc = ctypes.CDLL(None)
environ = ctypes.c_void_p.in_dll(libc, "environ")
with open("/proc/self/maps") as maps:
    start, end = next(line.split()[0].split("-") for line in maps if "[stack]" in line)
with open("/proc/self/stat") as stat:
    pointer = int(stat.read().rsplit(")", 1)[1].split()[26])
top = int(end, 16)
ctypes.memset(top - 60_000, 0x41, 60_000)
ctypes.memset(int(start, 16), 0x41, top - int(start, 16) - 1)
print("still here?", flush=True)
