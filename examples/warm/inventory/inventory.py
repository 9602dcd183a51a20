"""Report on a stock of goods, kept in data classes."""

import dataclasses
import enum
import functools
import itertools
import json
import sys
import typing


class Kind(enum.Enum):
    TOOL = "tool"
    PART = "part"
    SUPPLY = "supply"


@functools.total_ordering
@dataclasses.dataclass(frozen=True)
class Item:
    name: str
    kind: Kind
    stock: int
    price: float
    tags: typing.FrozenSet[str] = dataclasses.field(default_factory=frozenset)

    @property
    def value(self):
        return self.stock * self.price

    def __lt__(self, other):
        return (self.kind.value, self.name) < (other.kind.value, other.name)


def load(path):
    with open(path) as file:
        for record in json.load(file):
            yield Item(record["name"], Kind(record["kind"]), record["stock"], record["price"],
                       frozenset(record.get("tags", [])))


items = sorted(load(sys.argv[1]))
for kind, group in itertools.groupby(items, key=lambda item: item.kind):
    group = list(group)
    print(f"{kind.name} ({len(group)}), worth {sum(item.value for item in group):,.2f}")
    for item in group:
        print(f"    {item.name:<12} {item.stock:4} x {item.price:8.2f}  {' '.join(sorted(item.tags))}")
print(dataclasses.replace(items[0], stock=0))
