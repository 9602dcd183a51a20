#!/usr/bin/python3
"""A Python process of 64 MiB that measures something about itself.

    python_process.py LIBRARY run|fork

Speaks the language of the benchmark's workers: "ready", then for each line "ITERATIONS nothing" of its standard input
"ok ITERATIONS NANOSECONDS". LIBRARY is the benchmark's shared object, which does the work.
"""

import ctypes
import json
import re
import sqlite3
import sys


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


objects = []
while resident() < 64 << 20:
    objects.append([{"number": number, "text": str(number) * 9} for number in range(1000)])

# Calls through PyDLL keep the interpreter's lock: nothing else runs meanwhile.
operation = getattr(ctypes.PyDLL(sys.argv[1]), "orrery_bench_" + sys.argv[2])
operation.argtypes = [ctypes.c_uint32]
operation.restype = ctypes.c_int64

print("ready", flush=True)
for line in sys.stdin:
    iterations = int(line.split()[0])
    nanoseconds = operation(iterations)
    if nanoseconds < 0:
        print("failed in the Python process: see its standard error", flush=True)
    else:
        print("ok", iterations, nanoseconds, flush=True)
