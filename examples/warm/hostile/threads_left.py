# expect: exit 0
"""Leaves threads running, some of which Python does not know, while it ends."""
import _thread
import threading
import time


def scribble():
    while True:
        globals()["rubbish"] = [0] * 1000


for _ in range(4):
    threading.Thread(target=scribble, daemon=True).start()
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    _thread.start_new_thread(time.sleep, (100,))
time.sleep(0.02)
print(threading.active_count())
