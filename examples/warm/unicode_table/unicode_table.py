"""Describe the characters of a text, and its normal forms."""

import sys
import unicodedata

text = " ".join(sys.argv[1:])
for character in text:
    name = unicodedata.name(character, "(no name)")
    print(f"U+{ord(character):04X} {unicodedata.category(character)} {unicodedata.east_asian_width(character):<2} "
          f"{character.encode('utf-8').hex(' '):<12} {name}")
for form in ("NFC", "NFD", "NFKC", "NFKD"):
    normal = unicodedata.normalize(form, text)
    print(f"{form:<5} {len(normal):3} {ascii(normal)}")
print(text.upper(), text.casefold(), text.title(), sep=" | ")
