"""Solve systems of linear equations exactly; the systems stand on standard input, separated by empty lines."""

import sys
from fractions import Fraction


def solve(rows):
    size = len(rows)
    for pivot in range(size):
        row = next((row for row in range(pivot, size) if rows[row][pivot]), None)
        if row is None:
            return None
        rows[pivot], rows[row] = rows[row], rows[pivot]
        rows[pivot] = [value / rows[pivot][pivot] for value in rows[pivot]]
        for other in range(size):
            if other != pivot:
                factor = rows[other][pivot]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[pivot])]
    return [row[-1] for row in rows]


for system in sys.stdin.read().split("\n\n"):
    solution = solve([[Fraction(number) for number in line.split()] for line in system.splitlines()])
    print("no single solution" if solution is None else ", ".join(f"x{i} = {x}" for i, x in enumerate(solution, 1)))
