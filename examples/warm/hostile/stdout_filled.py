# expect: exit 0
"""Writes sixteen megabytes."""
import sys

for number in range(1 << 14):
    sys.stdout.write(f"{number:1023}\n")
