"""Fill a letter's template once for every row of a CSV file."""

import csv
import string
import sys
import textwrap


class Letter(string.Template):
    delimiter = "@"


template_path, people_path = sys.argv[1:3]
with open(template_path) as file:
    letter = Letter(file.read())
with open(people_path, newline="") as file:
    for number, person in enumerate(csv.DictReader(file), 1):
        person["due"] = f"{float(person['due']):,.2f}"
        body = letter.substitute(person, number=number)
        print(*(textwrap.fill(paragraph, 60) for paragraph in body.split("\n\n")), sep="\n\n")
        print("=" * 60)
