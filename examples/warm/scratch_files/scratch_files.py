"""Work in a scratch directory that is gone afterwards: archive some files, list and compare them."""

import filecmp
import os
import pathlib
import shutil
import tarfile
import tempfile
import zipfile

with tempfile.TemporaryDirectory(prefix="scratch-") as name:
    scratch = pathlib.Path(name)
    source = scratch / "source"
    (source / "deep" / "er").mkdir(parents=True)
    for number in range(5):
        (source / ("deep" if number % 2 else ".") / f"file{number}.txt").write_text(f"{number}\n" * 100 * number)
    with zipfile.ZipFile(scratch / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(source.rglob("*.txt")):
            archive.write(path, path.relative_to(source))
    with zipfile.ZipFile(scratch / "all.zip") as archive:
        for entry in archive.infolist():
            print(f"{entry.filename:<16} {entry.file_size:5} {entry.compress_size:4} {entry.CRC:08x}")
        archive.extractall(scratch / "copy")
    with tarfile.open(scratch / "all.tar", "w") as archive:
        archive.add(source, "source", filter=lambda entry: None if entry.name.endswith("3.txt") else entry)
        print(sorted(archive.getnames()))
    comparison = filecmp.dircmp(source, scratch / "copy")
    print(comparison.left_list, comparison.right_list, comparison.diff_files)
    shutil.rmtree(scratch / "copy")
    print(sorted(os.listdir(scratch)))
print(os.path.exists(name))
