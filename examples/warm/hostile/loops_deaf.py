# expect: timeout
# worker: may be replaced
"""Never ends, with all signals blocked and ignored, in every way a program can."""
import ctypes
import signal

signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
print("deaf", flush=True)
libc = ctypes.CDLL(None)
while True:
    libc.usleep(10)
