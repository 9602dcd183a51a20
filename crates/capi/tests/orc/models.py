"""Two programs, two files with the same bytes, one copy."""

import array
import os
import subprocess
import sys

import orrery_orc

folder = sys.argv[1]


def backing(view):
    """The inode behind a view's memory."""
    import ctypes

    address = ctypes.addressof(view.obj)
    for line in open("/proc/self/maps"):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return int(line.split()[4])
    raise AssertionError("it is mapped nowhere")


if len(sys.argv) > 2:
    view = orrery_orc.open(sys.argv[2])
    print(backing(view), len(view), flush=True)
    sys.exit(0)

numbers = array.array("d", range(100_000))
paths = [os.path.join(folder, name) for name in ("one", "two")]
for path in paths:
    with open(path, "wb") as file:
        file.write(numbers)
view = orrery_orc.open(paths[0])
assert view.readonly and view == memoryview(numbers).cast("B")
try:
    view[0] = 1
except TypeError:
    pass
else:
    raise AssertionError("it was written")
other = subprocess.run([sys.executable, __file__, folder, paths[1]], capture_output=True, text=True, check=True)
assert other.stdout.split() == [str(backing(view)), "800000"], (other.stdout, backing(view))
# A file that changes, or goes, changes nothing.
with open(paths[0], "r+b") as file:
    file.write(b"changed!")
os.unlink(paths[0])
assert view == memoryview(numbers).cast("B")
again = orrery_orc.register(numbers.tobytes())
assert backing(again) == backing(view)
part = view[:8]
del view, again
assert bytes(part) == bytes(8)
for path, number in ((os.path.join(folder, "none"), 2), (folder, 21)):
    try:
        orrery_orc.open(path)
    except OSError as error:
        assert error.errno == number, error
    else:
        raise AssertionError(path)
