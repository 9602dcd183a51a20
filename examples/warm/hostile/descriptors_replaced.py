# expect: exit 0
# worker: may be replaced
"""Puts /dev/null in the place of every descriptor, open or not."""
import os

print("last words", flush=True)
null = os.open("/dev/null", os.O_RDWR)
for number in range(1100):
    try:
        os.dup2(null, number)
    except OSError:
        break
