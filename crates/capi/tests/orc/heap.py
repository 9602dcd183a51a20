"""Heap data of two Python programs that have made the same, shared in place."""

import array
import ctypes
import subprocess
import sys

import orrery_orc

SIZE = 500_000


def backing(address):
    """The mapping that an address lies in: its inode and its access."""
    for line in open("/proc/self/maps"):
        words = line.split()
        start, end = (int(part, 16) for part in words[0].split("-"))
        if start <= address < end:
            return words[4], words[1]
    raise AssertionError("it is mapped nowhere")


class Model:
    def __init__(self):
        noise = bytes((n * n >> 3) % 251 for n in range(SIZE))
        self.bytes = noise
        self.ascii = "".join(map(chr, (byte % 128 for byte in noise)))
        self.latin = noise.decode("latin-1")
        self.wide = "".join(chr(0x400 + byte) for byte in noise[: SIZE // 2])
        self.wider = "".join(chr(0x1F300 + byte) for byte in noise[: SIZE // 4])
        self.small = ["x" * 100, b"y" * 100, 12345]


model = Model()
table = {"nested": [(model,)]}
values = array.array("d", (n * 0.5 for n in range(SIZE // 8)))
copies = [bytes(bytearray(model.bytes)), model.ascii[:1] + model.ascii[1:], model.latin[:1] + model.latin[1:]]
copies += [model.wide[:1] + model.wide[1:], model.wider[:1] + model.wider[1:]]
large = [model.bytes, model.ascii, model.latin, model.wide, model.wider]

shared = orrery_orc.share(table)
assert shared > 5 * SIZE - 10 * 8192, shared
assert orrery_orc.share(table) == 0, "once is enough"
assert orrery_orc.freeze(values) > SIZE - 8192 and orrery_orc.freeze(array.array("b", b"abc")) == 0
# The same bytes, at the same addresses, in memory that nobody writes to.
assert large == copies and list(values[:3]) == [0.0, 0.5, 1.0] and sum(values) == sum(n * 0.5 for n in range(SIZE // 8))
places = [backing(id(thing) + 100_000) for thing in large] + [backing(values.buffer_info()[0] + 100_000)]
assert all(access == "r--p" and inode != "0" for inode, access in places), places
# The objects' own counts and hashes are written as ever, and the objects used as ever.
assert len({thing: 1 for thing in large}) == 5 and model.ascii.upper() != model.ascii
assert model.wide.encode() and model.latin + "x" and sys.getrefcount(model.bytes) > 2
try:
    values.append(1.0)
except BufferError:
    pass
else:
    raise AssertionError("it grew")
for wrong in (b"x" * 100_000, memoryview(bytearray(100_000))[::2]):
    try:
        orrery_orc.freeze(wrong)
    except ValueError:
        pass
    else:
        raise AssertionError(wrong)
# Of code: the docstring, the constants, the table of lines, which is as long as the code.
lines = "\n".join(f"    total += counted[{n % 7}]" for n in range(20_000))
source = f"def generated(counted):\n    {model.ascii[:200_000]!r}\n    total = 0\n{lines}\n    return total\n"
made = {}
exec(compile(source, "<generated>", "exec"), made)
code = made["generated"].__code__
tables = [table for table in (code.co_linetable, code.co_consts[0]) if len(table) > 150_000]
assert len(tables) == 2, [len(code.co_linetable), len(code.co_consts[0])]
assert orrery_orc.share(made["generated"]) >= sum(len(table) // 4096 * 4096 - 4096 for table in tables)
assert all(backing(id(table) + 8192)[1] == "r--p" for table in tables)
places += [backing(id(table) + 8192) for table in tables]
assert made["generated"]([1] * 7) == 20_000 and made["generated"].__doc__ == model.ascii[:200_000]
try:
    made["generated"]([1, 1, 1, 1, 1, 1, None])
except TypeError as error:
    assert error.__traceback__.tb_next.tb_lineno == 3 + 7, "the table is read where it is"
else:
    raise AssertionError("it added nothing")
# Why not the instructions: since Python 3.11 the interpreter writes to them as it runs them (PEP 659).
if code.co_code is not code.co_code:
    start, length = id(code) + type(code).__basicsize__, len(code.co_code)

    def generic():
        return ctypes.string_at(start, length)

    fresh = {}
    exec(compile(source, "<generated>", "exec"), fresh)
    start = id(fresh["generated"].__code__) + type(code).__basicsize__
    before = generic()
    for _ in range(20):
        fresh["generated"]([1] * 7)
    after = generic()
    touched = sum(before[at : at + 4096] != after[at : at + 4096] for at in range(0, length, 4096))
    assert touched > length // 4096 // 2, f"only {touched} pages of {length // 4096} have changed: they could be shared"
inodes = " ".join(inode for inode, _ in places)
if len(sys.argv) > 2:
    print(inodes, flush=True)
    sys.stdin.read()
    sys.exit(0)
# Another program has made the same, and has it where this one has it.
command = [sys.executable, __file__, sys.argv[1], "again"]
other = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
assert other.returncode == 0, other.stderr
assert other.stdout.split() == inodes.split(), (other.stdout, inodes)
# Nothing of it goes when the program lets go of it, as memory that cannot be written cannot be used again.
address = id(model.bytes)
del model, table, large, copies
again = [bytes(n % 256 for n in range(SIZE + n)) for n in range(5)]
assert backing(address + 100_000)[1] == "r--p"
# The modules that are loaded, with whatever they have.
assert orrery_orc.share(*sys.modules.values()) >= 0
import collections, decimal, json, re

assert re.match("a+", "aaa") and json.loads("[1, 2]") == [1, 2] and ctypes.sizeof(ctypes.c_int) == 4
