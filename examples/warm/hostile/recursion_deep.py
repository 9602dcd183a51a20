# expect: exit 1
"""Calls itself for ever."""


def again(depth):
    return again(depth + 1)


again(0)
