"""Show how two texts differ, as `diff -u` would, and how alike they are. Exits with 1 if they differ."""

import difflib
import sys

old, new = sys.argv[1:3]
with open(old) as file:
    before = file.readlines()
with open(new) as file:
    after = file.readlines()
sys.stdout.writelines(difflib.unified_diff(before, after, old, new))
ratio = difflib.SequenceMatcher(None, "".join(before), "".join(after)).ratio()
print(f"alike by {ratio:.1%}")
sys.exit(before != after)
