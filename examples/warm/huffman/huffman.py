"""Build the Huffman code of a text, and show how much it would save."""

import heapq
import itertools
import sys
from collections import Counter


def code_of(text):
    ticket = itertools.count()
    queue = [(count, next(ticket), character) for character, count in sorted(Counter(text).items())]
    heapq.heapify(queue)
    while len(queue) > 1:
        (count1, _, left), (count2, _, right) = heapq.heappop(queue), heapq.heappop(queue)
        heapq.heappush(queue, (count1 + count2, next(ticket), (left, right)))
    code = {}

    def walk(node, prefix):
        if isinstance(node, str):
            code[node] = prefix or "0"
        else:
            walk(node[0], prefix + "0")
            walk(node[1], prefix + "1")

    walk(queue[0][2], "")
    return code


def decode(bits, code):
    back, word = {word: character for character, word in code.items()}, ""
    for bit in bits:
        word += bit
        if word in back:
            yield back[word]
            word = ""


text = sys.stdin.read()
code = code_of(text)
bits = "".join(code[character] for character in text)
assert "".join(decode(bits, code)) == text
for character, word in sorted(code.items(), key=lambda item: (len(item[1]), item[1])):
    print(f"{character!r:>5} {word}")
print(f"{len(text.encode()) * 8} bits become {len(bits)}, {len(bits) / len(text):.3f} per character")
