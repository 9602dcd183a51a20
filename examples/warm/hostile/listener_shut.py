# expect: exit 0
# worker: may be replaced
"""Shuts every listening socket that it can find among its descriptors."""
import os
import socket
import stat

print("last words", flush=True)
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        if number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode):
            victim = socket.socket(fileno=os.dup(number))
            if victim.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                victim.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
