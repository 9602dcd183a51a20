# expect: exit 0
"""Maps memory at odd places, with odd rights, and fills it."""
import ctypes
import mmap

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_size_t
libc.mmap.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
PRIVATE_ANONYMOUS, FIXED_NOREPLACE = 0x22, 0x100000
count = 0
for address in (0x10000, 0x7000_0000, 0x1234_5678_9000, 0x6000_0000_0000):
    if libc.mmap(address, 1 << 20, 7, PRIVATE_ANONYMOUS | FIXED_NOREPLACE, -1, 0) == address:
        ctypes.memset(address, 0x90, 1 << 20)
        count += 1
for length in range(1, 40):
    libc.mmap(0, length * 4096, length % 4, PRIVATE_ANONYMOUS, -1, 0)
shared = mmap.mmap(-1, 1 << 20)
shared.write(b"y" * (1 << 20))
print(count > 0)
