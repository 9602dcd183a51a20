# expect: exit 0
"""Turns every knob of the interpreter."""
import codecs
import gc
import locale
import sys
import threading
import warnings

gc.disable()
gc.set_threshold(1)
gc.callbacks.append(lambda *_: None)
gc.freeze()
sys.setrecursionlimit(60)
sys.setswitchinterval(3)
sys.set_int_max_str_digits(0)
sys.addaudithook(lambda event, _: event == "open" and print("hooked"))
codecs.register(lambda name: 1 / 0)
locale.setlocale(locale.LC_ALL, "C")
warnings.simplefilter("error")
threading.settrace(lambda *_: None)
sys.setprofile(lambda *_: None)
sys.excepthook = sys.displayhook = sys.unraisablehook = None
print("tuned")
