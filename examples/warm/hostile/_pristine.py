"""Describe what a program can see of its process and interpreter before it has done anything.

Two runs in one warm worker must print the same, whatever ran in between. With --portable, leaves out what depends on
addresses, so that two workers print the same, too.
"""

import sys

known = dict(sys.modules)

import builtins
import gc
import hashlib
import os
import re
import resource
import signal
import time


def digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        return error.strerror


def namespace(module):
    """Names and values of a module, but for what differs in every request."""
    passing = {"argv", "orig_argv", "stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__", "path",
               "path_importer_cache", "warnoptions", "modules"}
    return sorted((name, id(value)) for name, value in vars(module).items() if name not in passing)


def link(number):
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return None
    return re.sub(r":\[\d+\]|/\d+", "", target) if int(number) > 2 else "given"


def mappings():
    """The layout of memory but for the heap; neighbours of one kind count as one, however the kernel cuts them."""
    merged = []
    for line in read("/proc/self/maps").splitlines():
        place, access, *rest = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in place.split("-"))
        kind = access, rest[3:]
        if rest[3:] == ["[heap]"]:
            continue
        if merged and merged[-1][1:] == (start, kind):
            merged[-1] = merged[-1][0], end, kind
        else:
            merged.append((start, end, kind))
    return merged


KEPT = set("Umask Groups Threads SigQ SigPnd ShdPnd SigBlk SigIgn SigCgt CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs "
           "Seccomp Seccomp_filters Cpus_allowed Mems_allowed VmLck CoreDumping THP_enabled Uid Gid".split())
status = dict(line.split(":\t", 1) for line in read("/proc/self/status").splitlines() if ":\t" in line)
report = {
    "names": sorted(vars(builtins)),
    "modules": sorted(known),
    "path": sys.path[1:],
    "search": (len(sys.meta_path), len(sys.path_hooks)),
    "directory": os.getcwd(),
    "environment": digest(sorted(os.environb.items())),
    "descriptors": sorted((int(number), link(number)) for number in os.listdir("/proc/self/fd") if link(number)),
    "status": {name: value.split() for name, value in status.items() if name in KEPT and name != "SigQ"},
    "handlers": [str(signal.getsignal(number)).split(" at ")[0] for number in sorted(signal.valid_signals())],
    "limits": [resource.getrlimit(number) for number in range(16) if number != resource.RLIMIT_DATA],
    "timers": [signal.getitimer(number) for number in range(3)],
    "posix timers": len(re.findall("^ID", read("/proc/self/timers"), re.MULTILINE)),
    "children": [len(read(f"/proc/self/task/{task}/children").split()) for task in os.listdir("/proc/self/task")],
    "leader": (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()),
    "priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))),
    "name": read("/proc/self/comm"),
    "personality": read("/proc/self/personality"),
    "oom": read("/proc/self/oom_score_adj"),
    "slack": read("/proc/self/timerslack_ns"),
    "core filter": read("/proc/self/coredump_filter"),
    "root": os.stat("/")[:3],
    "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))},
    "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0, len(gc.callbacks), gc.garbage),
    "limits of the interpreter": (sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits()),
    "hooks": (sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace(),
              sys.getprofile(), sys.breakpointhook is sys.__breakpointhook__, sys.unraisablehook is sys.__unraisablehook__),
    "streams": [(stream.name, stream.mode, stream.encoding, stream.errors, stream.fileno())
                for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "time zone": time.tzname,
    "bytecode": (sys.dont_write_bytecode, sys.pycache_prefix),
    "flags": repr(sys.flags),
}
if "--portable" not in sys.argv:
    report |= {
        "builtins": digest(namespace(builtins)),
        "values": digest([(name, namespace(module)) for name, module in sorted(known.items()) if name != "__main__"]),
        "meta path": digest([id(finder) for finder in sys.meta_path + sys.path_hooks]),
        "frozen": gc.get_freeze_count(),
        "mappings": digest(mappings()),
        "heap": [line.split()[0] for line in read("/proc/self/maps").splitlines() if line.endswith("[heap]")],
        "private memory": status["VmData"],
        # What the server allows, on top of what the worker has.
        "limit of private memory": resource.getrlimit(resource.RLIMIT_DATA),
        "locked": status.get("VmLck"),
    }
for name, value in report.items():
    print(f"{name}: {value}")
