"""Describe the numeric columns of a CSV file, group by group."""

import csv
import statistics
import sys
from collections import defaultdict


def main():
    path, group_by, *columns = sys.argv[1:]
    groups = defaultdict(lambda: defaultdict(list))
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            for column in columns:
                groups[row[group_by]][column].append(float(row[column]))
    header = f"{group_by:<12} {'column':<10} {'n':>4} {'mean':>9} {'median':>9} {'stdev':>9} {'min':>9} {'max':>9}"
    print(header)
    print("-" * len(header))
    for group, values_by_column in sorted(groups.items()):
        for column, values in values_by_column.items():
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(
                f"{group:<12} {column:<10} {len(values):>4} {statistics.fmean(values):>9.3f} "
                f"{statistics.median(values):>9.3f} {spread:>9.3f} {min(values):>9.3f} {max(values):>9.3f}"
            )


if __name__ == "__main__":
    main()
