# expect: exit 0
"""Takes memory in small pieces until there is none, survives that, and goes on."""
hoard = []
try:
    while True:
        hoard.append([None] * 10_000)
except MemoryError:
    del hoard[len(hoard) // 2 :]
print("survived")
