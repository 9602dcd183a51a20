# expect: exit 0
"""Replaces the builtins that everything uses, the interpreter's own exit included."""
import builtins

print("before")
for name in list(vars(builtins)):
    if name not in {"print", "setattr", "__build_class__"} and not name.startswith("__"):
        setattr(builtins, name, None)
builtins.print = lambda *_: 1 / 0
del builtins.__import__
