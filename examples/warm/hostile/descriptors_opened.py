# expect: exit 0
"""Opens files, pipes and sockets and leaves them open, some beyond the reach of Python's destructors."""
import os
import socket

kept = [os.open("/dev/null", os.O_RDWR) for _ in range(300)] + [os.pipe() for _ in range(50)]
pairs = [socket.socketpair() for _ in range(50)]
os.set_inheritable(kept[0], True)
print(len(kept), len(pairs))
os._exit(0)
