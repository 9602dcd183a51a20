# expect: signal ILL
"""Runs two bytes that are no instruction."""
import ctypes
import mmap

code = mmap.mmap(-1, 4096, prot=7)
code.write(b"\x0f\x0b")
print("ud2", flush=True)
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
