# expect: crash
"""Takes the interpreter's own code away, page by page."""
import ctypes

munmap = ctypes.CDLL(None).munmap
munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
with open("/proc/self/maps") as maps:
    places = [line.split()[0].split("-") for line in maps if "python3.11" in line and "r-xp" in line]
start, end = max(((int(start, 16), int(end, 16)) for start, end in places), key=lambda place: place[1] - place[0])
for page in range(start, end, 8192):
    munmap(page, 4096)
