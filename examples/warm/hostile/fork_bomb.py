# expect: exit 0
"""A fork bomb of bounded force: every process forks six times in all, 64 processes that sleep."""
import os
import time

first = os.getpid()
print("bang", flush=True)
for _ in range(6):
    os.fork()
if os.getpid() != first:
    os.closerange(0, 3)
    time.sleep(1000)
    os._exit(0)
