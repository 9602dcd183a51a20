# expect: exit 0
"""Replaces parts of modules that were imported before, and empties the tables of the import system."""
import json
import os
import re
import sys

print(json.dumps({"before": 1}))
json.loads = json.dumps = None
re.compile = lambda *_: 1 / 0
os.path.join = os.getcwd = None
vars(json).clear()
json.victim = [open("/dev/null") for _ in range(10)]
sys.path.clear()
sys.meta_path.clear()
sys.path_hooks.clear()
sys.path_importer_cache.clear()
sys.modules.clear()
