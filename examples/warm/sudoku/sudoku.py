"""Solve the sudokus on standard input, one per line of 81 characters."""

import sys

PEERS = []
for cell in range(81):
    row, column = divmod(cell, 9)
    peers = {row * 9 + other for other in range(9)} | {other * 9 + column for other in range(9)}
    top, left = row - row % 3, column - column % 3
    peers |= {(top + r) * 9 + left + c for r in range(3) for c in range(3)}
    PEERS.append(tuple(peers - {cell}))


def assign(options, cell, digit):
    """Puts a digit into a cell and strikes it from the peers; False where that contradicts."""
    options[cell] = digit
    stack = [cell]
    while stack:
        settled = stack.pop()
        for peer in PEERS[settled]:
            if options[settled] in options[peer]:
                options[peer] = options[peer].replace(options[settled], "")
                if not options[peer]:
                    return False
                if len(options[peer]) == 1:
                    stack.append(peer)
    return True


def search(options):
    open_cells = [cell for cell in range(81) if len(options[cell]) > 1]
    if not open_cells:
        return options
    cell = min(open_cells, key=lambda cell: len(options[cell]))
    for digit in options[cell]:
        trial = options.copy()
        if assign(trial, cell, digit) and (solution := search(trial)):
            return solution
    return None


for puzzle in sys.stdin:
    options = ["123456789"] * 81
    given = [(cell, digit) for cell, digit in enumerate(puzzle.strip()) if digit in "123456789"]
    solvable = all(digit in options[cell] and assign(options, cell, digit) for cell, digit in given)
    solution = search(options) if solvable else None
    print("".join(solution) if solution else "no solution")
