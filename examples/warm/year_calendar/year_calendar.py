"""Print a year's calendar with its movable feasts."""

import calendar
import datetime
import sys


def easter(year):
    """Gauss' algorithm in the form of Meeus, Jones and Butcher."""
    a, b, c = year % 19, year // 100, year % 100
    d, e = divmod(b, 4)
    g = (8 * b + 13) // 25
    h = (19 * a + b - d - g + 15) % 30
    i, k = divmod(c, 4)
    l = (32 + 2 * e + 2 * i - h - k) % 7
    m = (a + 11 * h + 22 * l) // 451
    month, day = divmod(h + l - 7 * m + 114, 31)
    return datetime.date(year, month, day + 1)


year = int(sys.argv[1])
print(calendar.TextCalendar(calendar.MONDAY).formatyear(year, w=2, l=1, c=4, m=3))
sunday = easter(year)
feasts = {
    "Ash Wednesday": -46, "Good Friday": -2, "Easter": 0, "Ascension": 39, "Pentecost": 49, "Corpus Christi": 60,
}
for feast, offset in feasts.items():
    day = sunday + datetime.timedelta(days=offset)
    print(f"{feast:<16} {day:%a %d %b}  week {day.isocalendar().week:2}, day {day.timetuple().tm_yday:3}")
