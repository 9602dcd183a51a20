"""Encode and compress a file in several ways; check that each way back gives the same bytes."""

import base64
import bz2
import gzip
import hashlib
import lzma
import sys
import zlib

with open(sys.argv[1], "rb") as file:
    data = file.read()
for name in ("md5", "sha1", "sha256", "blake2b"):
    print(f"{name:<10} {hashlib.new(name, data).hexdigest()}")
print(f"{'crc32':<10} {zlib.crc32(data):08x}")
codecs = {
    "base64": (base64.b64encode, base64.b64decode),
    "base85": (base64.b85encode, base64.b85decode),
    "zlib": (zlib.compress, zlib.decompress),
    "gzip": (lambda data: gzip.compress(data, mtime=0), gzip.decompress),
    "bz2": (bz2.compress, bz2.decompress),
    "xz": (lzma.compress, lzma.decompress),
}
for name, (encode, decode) in codecs.items():
    encoded = encode(data)
    assert decode(encoded) == data
    print(f"{name:<10} {len(encoded):6} bytes, {len(encoded) / len(data):7.1%}")
