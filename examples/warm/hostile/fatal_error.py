# expect: signal ABRT
"""Has the interpreter report a fatal error."""
import ctypes

print("fatal", flush=True)
ctypes.pythonapi.Py_FatalError(b"the end is nigh")
