"""Render a useful subset of Markdown as HTML."""

import html
import re
import sys

INLINE = [
    (re.compile(r"`([^`]+)`"), r"<code>\1</code>"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"\*([^*]+)\*"), r"<em>\1</em>"),
    (re.compile(r"!\[([^]]*)\]\(([^)]+)\)"), r'<img alt="\1" src="\2">'),
    (re.compile(r"\[([^]]+)\]\(([^)]+)\)"), r'<a href="\2">\1</a>'),
]


def inline(text):
    text = html.escape(text, quote=False)
    for pattern, replacement in INLINE:
        text = pattern.sub(replacement, text)
    return text


def blocks(lines):
    paragraph, items, fence = [], [], None

    def flush():
        nonlocal paragraph, items
        if paragraph:
            yield f"<p>{inline(' '.join(paragraph))}</p>"
        if items:
            yield "<ul>"
            yield from (f"  <li>{inline(item)}</li>" for item in items)
            yield "</ul>"
        paragraph, items = [], []

    for line in lines:
        line = line.rstrip("\n")
        if line.startswith("```"):
            yield from flush()
            yield "</code></pre>" if fence else f'<pre><code class="{html.escape(line[3:]) or "text"}">'
            fence = not fence
        elif fence:
            yield html.escape(line, quote=False)
        elif heading := re.match(r"(#{1,6}) (.+)", line):
            yield from flush()
            level = len(heading[1])
            yield f"<h{level}>{inline(heading[2])}</h{level}>"
        elif item := re.match(r"[-*] (.+)", line):
            items.append(item[1])
        elif line.startswith("> "):
            yield from flush()
            yield f"<blockquote>{inline(line[2:])}</blockquote>"
        elif re.fullmatch(r"-{3,}", line):
            yield from flush()
            yield "<hr>"
        elif not line:
            yield from flush()
        else:
            paragraph.append(line)
    yield from flush()


with open(sys.argv[1], encoding="utf-8") as file:
    for block in blocks(file):
        print(block)
