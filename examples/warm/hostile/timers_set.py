# expect: exit 0
"""Leaves timers running whose signals would kill whoever runs next."""
import ctypes
import signal

signal.setitimer(signal.ITIMER_REAL, 0.15, 0.05)
signal.setitimer(signal.ITIMER_VIRTUAL, 0.1, 0.01)
signal.setitimer(signal.ITIMER_PROF, 0.1, 0.01)


class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("notify", ctypes.c_int),
                ("rest", ctypes.c_char * 48)]


class Times(ctypes.Structure):
    _fields_ = [("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2)]


libc = ctypes.CDLL(None)
timer = ctypes.c_void_p()
assert libc.timer_create(1, ctypes.byref(Event(None, signal.SIGUSR1, 0, b"")), ctypes.byref(timer)) == 0
times = Times((0, 50_000_000), (0, 150_000_000))
assert libc.timer_settime(timer, 0, ctypes.byref(times), None) == 0
print("tick")
