# expect: exit 0
# worker: may be replaced
"""Gives up what cannot be had back: privileges, system calls, the root directory."""
import ctypes
import os
import struct

libc = ctypes.CDLL(None)
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22
libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
# Every socket(2) fails with ENETDOWN; everything else is allowed.
program = b"".join(struct.pack("HBBI", *instruction) for instruction in
                   [(0x20, 0, 0, 0), (0x15, 0, 1, 41), (0x06, 0, 0, 0x00050064), (0x06, 0, 0, 0x7FFF0000)])
buffer = ctypes.create_string_buffer(program)
filters = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(buffer)))
libc.prctl(PR_SET_SECCOMP, 2, filters, 0, 0)
for change in (lambda: os.chroot("/usr"), lambda: libc.unshare(0x04000000), lambda: os.setgroups([]),
               lambda: os.setresgid(65534, 65534, 65534), lambda: os.setresuid(65534, 65534, 65534)):
    try:
        change()
    except OSError:
        pass
print("humble")
