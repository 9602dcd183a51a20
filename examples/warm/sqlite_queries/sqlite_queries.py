"""Load a data set into an in-memory SQLite database and answer some questions about it."""

import csv
import sqlite3
import sys

QUESTIONS = {
    "Passengers per line": """
        SELECT line, SUM(passengers) AS total FROM rides GROUP BY line ORDER BY total DESC""",
    "Busiest stop on each line": """
        SELECT line, stop, MAX(total) FROM
            (SELECT line, stop, SUM(passengers) AS total FROM rides GROUP BY line, stop)
        GROUP BY line ORDER BY line""",
    "Running total on line 2": """
        SELECT hour, SUM(SUM(passengers)) OVER (ORDER BY hour) FROM rides WHERE line = 2 GROUP BY hour""",
    "Stops served by more than one line": """
        SELECT stop, GROUP_CONCAT(DISTINCT line) FROM rides GROUP BY stop HAVING COUNT(DISTINCT line) > 1
        ORDER BY stop""",
}

database = sqlite3.connect(":memory:")
database.execute("CREATE TABLE rides (line INTEGER, stop TEXT, hour INTEGER, passengers INTEGER)")
with open(sys.argv[1], newline="") as file, database:
    rows = csv.reader(file)
    next(rows)
    database.executemany("INSERT INTO rides VALUES (?, ?, ?, ?)", rows)
database.execute("CREATE INDEX by_stop ON rides (stop)")
for question, query in QUESTIONS.items():
    print(question)
    for row in database.execute(query):
        print("   ", *row, sep="\t")
