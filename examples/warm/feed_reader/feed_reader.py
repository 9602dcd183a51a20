"""List the entries of an RSS feed, newest first."""

import sys
import xml.etree.ElementTree as ElementTree
from email.utils import parsedate_to_datetime
from html import unescape
from html.parser import HTMLParser


class Text(HTMLParser):
    def __init__(self):
        super().__init__()
        self.pieces = []

    def handle_data(self, data):
        self.pieces.append(data)


def plain(html):
    parser = Text()
    parser.feed(unescape(html))
    return " ".join("".join(parser.pieces).split())


channel = ElementTree.parse(sys.argv[1]).getroot().find("channel")
print(channel.findtext("title"))
entries = [(parsedate_to_datetime(item.findtext("pubDate")), item) for item in channel.iter("item")]
for date, item in sorted(entries, key=lambda entry: entry[0], reverse=True):
    print(f"{date:%Y-%m-%d %H:%M %z}  {item.findtext('title')}")
    print(f"    {plain(item.findtext('description'))}")
