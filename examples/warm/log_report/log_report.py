"""Report on a web server's access log."""

import re
import sys
from collections import Counter

LINE = re.compile(
    r"(?P<host>\S+) \S+ \S+ \[[^:]+:(?P<hour>\d\d)[^]]*\] "
    r'"(?P<method>[A-Z]+) (?P<path>\S+) [^"]*" (?P<status>\d{3}) (?P<bytes>\d+|-)'
)


def main():
    paths, statuses, hours, hosts, sent, broken = Counter(), Counter(), Counter(), Counter(), Counter(), 0
    with open(sys.argv[1]) as log:
        for line in log:
            match = LINE.match(line)
            if not match:
                broken += 1
                continue
            paths[match["path"]] += 1
            statuses[match["status"][0] + "xx"] += 1
            hours[match["hour"]] += 1
            hosts[match["host"]] += 1
            sent[match["path"]] += 0 if match["bytes"] == "-" else int(match["bytes"])
    print(f"{sum(paths.values())} requests from {len(hosts)} hosts, {broken} lines not understood")
    for path, count in paths.most_common():
        print(f"{count:6} {sent[path] / 1024:10.1f} KiB  {path}")
    print(*(f"{status}: {count}" for status, count in sorted(statuses.items())), sep=", ")
    peak = max(hours.values())
    for hour, count in sorted(hours.items()):
        print(hour, "#" * round(40 * count / peak))


main()
