"""Turn a list of orders into totals by customer, as JSON on standard output."""

import json
import sys
from collections import defaultdict


def summarize(orders):
    customers = defaultdict(lambda: {"orders": 0, "items": 0, "total": 0.0, "products": set()})
    for order in orders:
        summary = customers[order["customer"]["name"]]
        summary["orders"] += 1
        for line in order["lines"]:
            summary["items"] += line["quantity"]
            summary["total"] += line["quantity"] * line["price"]
            summary["products"].add(line["product"])
    for summary in customers.values():
        summary["total"] = round(summary["total"], 2)
        summary["products"] = sorted(summary["products"])
    return customers


with open(sys.argv[1]) as file:
    json.dump(summarize(json.load(file)), sys.stdout, indent=2, sort_keys=True, ensure_ascii=False)
print()
