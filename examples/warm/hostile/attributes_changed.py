# expect: exit 0
# worker: may be replaced
"""Changes what else a process is: name, priority, processors, session, execution domain, locked memory."""
import ctypes
import os

libc = ctypes.CDLL(None)
PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_TIMERSLACK, PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 4, 15, 29, 1, 36
libc.prctl(PR_SET_NAME, b"impostor")
libc.prctl(PR_SET_TIMERSLACK, 1_000_000_000)
libc.prctl(PR_SET_PDEATHSIG, 0)
libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
libc.prctl(PR_SET_DUMPABLE, 0)
os.nice(7)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
libc.personality(0x0040000)
libc.mlockall(2)
print("changed")
