# expect: timeout
"""Waits for a lock that nobody holds the key to."""
import threading

print("zzz", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
