# expect: signal SEGV
"""Does a little of everything, then crashes in the middle of it."""
import builtins
import ctypes
import os
import signal
import sys
import threading
import time

print("enough", flush=True)
builtins.open = None
os.chdir("/")
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
if os.fork() == 0:
    os.closerange(0, 3)
    time.sleep(100)
    os._exit(0)
os.closerange(0, 64)
signal.setitimer(signal.ITIMER_REAL, 0.2)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
sys.modules.clear()
ctypes.memset(8, 1, 1)
