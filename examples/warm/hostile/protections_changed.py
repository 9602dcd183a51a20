# expect: exit 0
"""Makes code writable and writes to it; makes read-only data writable and changes it."""
import ctypes

libc = ctypes.CDLL(None)
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
target = ctypes.cast(ctypes.pythonapi.Py_GetCopyright, ctypes.c_void_p).value
page = target & ~4095
assert libc.mprotect(page, 8192, 7) == 0
ctypes.memset(target, 0xC3, 1)
print(ctypes.pythonapi.Py_GetBuildInfo is not None)
