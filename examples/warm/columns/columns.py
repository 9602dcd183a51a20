"""Select, sort and align columns of standard input."""

import argparse
import sys

parser = argparse.ArgumentParser(prog="columns", description=__doc__)
parser.add_argument("columns", type=int, nargs="+", help="columns to show, counted from 1")
parser.add_argument("-d", "--delimiter", default=None, help="what separates columns (default: white space)")
parser.add_argument("-s", "--sort", type=int, metavar="COLUMN", help="sort by this column")
parser.add_argument("-n", "--numeric", action="store_true", help="sort as numbers")
parser.add_argument("-r", "--reverse", action="store_true", help="sort backwards")
options = parser.parse_args()

rows = [line.rstrip("\n").split(options.delimiter) for line in sys.stdin]
if options.sort:
    rows.sort(key=lambda row: float(row[options.sort - 1]) if options.numeric else row[options.sort - 1],
              reverse=options.reverse)
chosen = [[row[column - 1] for column in options.columns] for row in rows]
widths = [max(map(len, column)) for column in zip(*chosen)]
for row in chosen:
    print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
