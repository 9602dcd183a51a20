# expect: signal SEGV
"""Reads from the address 0."""
import ctypes

print("about to fall", flush=True)
ctypes.string_at(0)
