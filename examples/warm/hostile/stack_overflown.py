# expect: signal SEGV
"""Lifts the bound on recursion and recurses through C until the stack ends."""
import sys

sys.setrecursionlimit(1 << 30)


class Mirror:
    def __repr__(self):
        return repr(self)


print("down we go", flush=True)
repr(Mirror())
