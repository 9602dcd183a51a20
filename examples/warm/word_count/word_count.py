"""Count lines, words and characters of standard input, and show the commonest words."""

import collections
import re
import sys

text = sys.stdin.read()
words = re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", text.casefold())
print(f"{text.count(chr(10))} lines, {len(words)} words, {len(text)} characters, {len(set(words))} different words")
for word, count in sorted(collections.Counter(words).items(), key=lambda item: (-item[1], item[0]))[:10]:
    print(f"{count:4} {word}")
lengths = collections.Counter(map(len, words))
for length in range(1, max(lengths) + 1):
    print(f"{length:2} {'*' * lengths[length]}")
