# expect: exit 0
# worker: may be replaced
"""Looks for sockets among the descriptors it was born with, and does to each what could hurt others."""
import os
import socket
import stat

found = 0
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        if number < 3 or not stat.S_ISSOCK(os.fstat(number).st_mode):
            continue
        victim = socket.socket(fileno=number)
        victim.setblocking(False)
        found += 1
        victim.accept()
    except OSError:
        pass
print("no other's business")
