"""Conway's game of life on an endless plane, from a drawing on standard input."""

import sys
from collections import Counter
from itertools import product

NEIGHBOURS = [offset for offset in product((-1, 0, 1), repeat=2) if offset != (0, 0)]


def step(alive):
    counts = Counter((row + r, column + c) for row, column in alive for r, c in NEIGHBOURS)
    return {cell for cell, count in counts.items() if count == 3 or count == 2 and cell in alive}


def show(alive):
    rows, columns = zip(*alive)
    for row in range(min(rows), max(rows) + 1):
        print("".join(".#"[(row, column) in alive] for column in range(min(columns), max(columns) + 1)))


alive = {(row, column) for row, line in enumerate(sys.stdin) for column, mark in enumerate(line) if mark == "#"}
for generation in range(int(sys.argv[1])):
    alive = step(alive)
print(f"after {sys.argv[1]} generations, {len(alive)} cells:")
show(alive)
