# expect: signal ABRT
"""Aborts."""
import os

print("abort", flush=True)
os.abort()
