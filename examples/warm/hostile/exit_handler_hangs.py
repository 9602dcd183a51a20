# expect: timeout
"""Ends, but for its exit handler."""
import atexit

print("almost", flush=True)


@atexit.register
def hang():
    while True:
        pass
