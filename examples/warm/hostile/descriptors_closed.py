# expect: exit 0
# worker: may be replaced
"""Closes every descriptor there can be, 0, 1 and 2 among them."""
import os

print("last words", flush=True)
os.closerange(0, 1 << 20)
