"""Merge INI files, later ones over earlier ones, and tell where each setting came from."""

import configparser
import sys

merged, origin = configparser.ConfigParser(interpolation=configparser.ExtendedInterpolation()), {}
for path in sys.argv[1:]:
    layer = configparser.ConfigParser(interpolation=None)
    layer.read(path)
    for section in layer.sections():
        if not merged.has_section(section):
            merged.add_section(section)
        for key, value in layer.items(section):
            merged.set(section, key, value)
            origin[section, key] = path
for section in merged.sections():
    print(f"[{section}]")
    for key, value in merged.items(section):
        print(f"{key} = {value}    # {origin[section, key]}")
