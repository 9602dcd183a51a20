# Run a few times before the first request: much of CPython is made at its first use (argument parsers of builtins, the
# caches of methods and attributes, strings that are shared), and what is there already no request needs to make.
# Touches nothing but what it makes itself.

def rehearse(io):
    class Base:
        kind = "base"

        def __init__(self, value=0, *rest, key=None, **more):
            self.value = value
            self.key = key

        def __repr__(self):
            return f"Base({self.value!r})"

        def __eq__(self, other):
            return self.value == other.value

        def __hash__(self):
            return hash(self.value)

        @property
        def double(self):
            return self.value * 2

        @classmethod
        def make(cls, value):
            return cls(value)

        @staticmethod
        def plain(value):
            return value

    class Derived(Base):
        def __init__(self, *arguments):
            super().__init__(*arguments)

    out = io.StringIO()
    print("text", 1, 2.5, None, True, sep=",", end="\n", file=out, flush=True)
    print(Derived(3), [1, "a"], {"k": (1,)}, {1, 2}, b"bytes", file=out)
    numbers = [number * number for number in range(10) if number % 2]
    table = {str(key): value for key, value in zip("abc", numbers)}
    table.update(d=4)
    table.setdefault("e", []).append(5)
    words = "the quick brown fox".split()
    ordered = sorted(words, key=len, reverse=True)
    ordered.sort(key=str.lower)
    "-".join(ordered).upper().replace("A", "b").strip().startswith("x")
    "{:>10} {:<5.2f} {name}".format("x", 1.5, name="n")
    f"{numbers[0]:05d} {1.25:.1f} {words!r:>40} {'x':^3}"
    "%s %d %5.2f" % ("a", 1, 2.0)
    sum(numbers), min(numbers), max(numbers, default=0), len(table), any(numbers), all(words), abs(-1), round(2.567, 2)
    list(map(int, "123")), list(filter(None, [0, 1])), list(enumerate(words, 1)), list(reversed(words)), divmod(7, 2)
    int("42", 10), float("1.5"), str(b"x", "utf-8"), bytes("x", "utf-8"), bytearray(4), ord("a"), chr(97), hex(255)
    isinstance(1, (int, str)), issubclass(Derived, Base), hasattr(out, "write"), getattr(out, "nope", None), id(out)
    setattr(out, "x", 1), vars(Derived(1)), dir(Derived), type(out), callable(print), iter(words), next(iter(words))
    Derived.make(2).double, Derived.plain(1), Derived(1) == Derived(1), hash(Derived(1)), repr(Derived(2))
    with io.StringIO("line\nline\n") as source:
        for line in source:
            line.rstrip("\n").partition("i")
        source.seek(0)
        source.read(), source.readlines()
    with open("/dev/null", "r", encoding="utf-8") as file:
        file.read()
    with open("/dev/null", "w") as file:
        file.write("x\n")
    with open("/dev/null", "rb") as file:
        file.read(1)
    for failure in (lambda: 1 / 0, lambda: {}["missing"], lambda: [][1], lambda: int("x"), lambda: nothing):  # noqa
        try:
            failure()
        except (ZeroDivisionError, KeyError, IndexError, ValueError, NameError) as error:
            str(error), error.args, type(error).__name__
        finally:
            pass

    def generator(limit):
        for number in range(limit):
            received = yield number
        return received

    list(generator(3)), tuple(generator(2)), dict.fromkeys("ab"), set("aab") | {"c"}, frozenset("ab"), slice(1, 2)
    lambda x, *y, z=1, **w: (x, y, z, w)
    eval("1 + 1"), exec("x = 1", {}), compile("y = [2]", "<rehearsal>", "exec")
    __import__("sys").getrecursionlimit(), __import__("os").getcwd(), __import__("time").time()
