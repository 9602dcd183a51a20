# expect: exit 0
"""Leaves a hundred megabytes hanging on a module that lives on."""
import json

json.hoard = [bytearray(b"x" * 1_000_000) for _ in range(100)]
print(sum(map(len, json.hoard)))
