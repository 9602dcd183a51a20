# expect: exit 0
"""Exit handlers that fail, exit, and add others; destructors that fail."""
import atexit
import sys


class Sore:
    def __del__(self):
        raise ValueError("no peace")


sore = Sore()
loop = [sore]
loop.append(loop)


@atexit.register
def fail():
    raise RuntimeError("no exit")


@atexit.register
def leave():
    sys.exit(5)


@atexit.register
def more():
    atexit.register(print, "one more thing")
    print("handling")


for _ in range(1000):
    atexit.register(lambda: None)
