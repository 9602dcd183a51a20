# expect: exit 120
"""Replaces, detaches and closes the standard streams."""
import io
import sys

print("written before")
sys.stdout.flush()
sys.__stdout__ = sys.stdout = io.StringIO()
print("never seen")
sys.stdin.close()
sys.stderr.detach()
sys.stdin = 5
