# expect: exit 1
"""Takes memory until there is none."""
hoard = []
while True:
    hoard.append(bytearray(4 << 20))
