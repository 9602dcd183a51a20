# expect: exit 0
"""Changes built-in types and interned objects, which no Python code can do, through ctypes."""
import ctypes
import gc

print(gc.get_referents(str.__dict__)[0].get("shout"))
gc.get_referents(str.__dict__)[0]["shout"] = lambda text: text.upper()
ctypes.pythonapi.PyType_Modified(ctypes.py_object(str))
print("quiet".shout())
# The small integer 7 is one object in the whole interpreter: let it be 8.
ctypes.memset(id(7) + 24, 8, 1)
