"""Runs the test suites of three packages with plain pytest, --orrery, --forked and -n 2, beside one another.

    python3 bench/scripts/pytest_suites.py [--rounds N] [--directory DIRECTORY]

It fetches the packages' sources with pip, and needs pytest, pytest-xdist and pytest-forked in the Python that runs it, and the package `orrery` built
from this tree (it is installed into DIRECTORY). Outcomes of all tests must be equal. For each suite and way it prints the least of N rounds: seconds,
processor seconds (the children's, too), and what that is for each test beyond plain pytest, in milliseconds. A suite of tests that do nothing comes
first: it shows what the isolation is without what tests do again because caches are undone.
"""

import argparse
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as xml
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Source distributions that have their tests, and what the tests need. Versions are fixed, so that figures can be compared.
SUITES = {"click==8.1.7": [], "more-itertools==10.1.0": [], "Jinja2==3.1.2": ["MarkupSafe==2.1.3"]}
WAYS = {"plain": [], "--orrery": ["--orrery"], "--forked": ["--forked"], "-n 2": ["-n", "2"]}
NOTHING = "import pytest\n@pytest.mark.parametrize('number', range(1000))\ndef test(number): pass\n"


def pip(*arguments):
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def prepare(directory):
    """Yields the name and the directory of each suite."""
    site = directory / "site"
    source = directory / "source"
    if not site.exists():
        subprocess.run(["cp", "-R", ROOT / "integrations/python", source], check=True)
        pip("install", "--no-index", "--no-build-isolation", "--no-deps", "--target", site, source)
        for needs in SUITES.values():
            if needs:
                pip("install", "--no-deps", "--target", site, "--upgrade", *needs)
    nothing = directory / "nothing" / "tests"
    nothing.mkdir(parents=True, exist_ok=True)
    (nothing / "test_nothing.py").write_text(NOTHING)
    yield "nothing", nothing.parent
    for suite in SUITES:
        name = suite.replace("==", "-")
        if not (directory / name).exists():
            pip("download", "--no-deps", "--no-binary", ":all:", "--dest", directory, suite)
            with tarfile.open(directory / f"{name}.tar.gz") as archive:
                archive.extractall(directory)
        yield name, directory / name


def measure(directory, suite, options):
    """Runs a suite once; returns seconds, processor seconds, and the outcome of each test."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(directory / "site"), str(suite / "src"), str(suite)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.setdefault("ORRERY_LIBRARY", str(ROOT / "target/release/liborrery.so"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", directory / "junit.xml", *options, "tests"]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True)
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        sys.exit(f"cannot run the tests of {suite.name} with {options}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    if "in a forked process each" in done.stdout:
        print(f"{suite.name}: " + next(line for line in done.stdout.splitlines() if "in a forked process each" in line))
    processor = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    outcomes = {}
    for case in xml.parse(directory / "junit.xml").iter("testcase"):
        outcome = sorted(child.tag for child in case if child.tag in ("failure", "error", "skipped"))
        outcomes[case.get("classname"), case.get("name")] = outcome
    return seconds, processor, outcomes


def main():
    parser = argparse.ArgumentParser(description="Compares ways to run test suites with pytest.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "orrery-pytest-suites")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    equal = True
    print(f"{'suite':24} {'way':10} {'tests':>6} {'seconds':>9} {'cpu':>8} {'ms/test more':>13} {'cpu ms more':>12}")
    for name, suite in prepare(options.directory):
        best = {}
        # Interleaved: all have the same share of what else the machine does.
        for _ in range(options.rounds):
            for way, arguments in WAYS.items():
                seconds, processor, outcomes = measure(options.directory, suite, arguments)
                known = best.get(way, (seconds, processor, outcomes))
                best[way] = (min(seconds, known[0]), min(processor, known[1]), outcomes)
        plain = best["plain"]
        for way, (seconds, processor, outcomes) in best.items():
            more, cpu_more = ((of - than) * 1000 / len(outcomes) for of, than in ((seconds, plain[0]), (processor, plain[1])))
            print(f"{name:24} {way:10} {len(outcomes):6} {seconds:9.2f} {processor:8.2f} {more:13.2f} {cpu_more:12.2f}", flush=True)
            for test in sorted(set(outcomes) | set(plain[2])):
                if outcomes.get(test) != plain[2].get(test):
                    equal = False
                    print(f"  differs with {way}: {'::'.join(test)}: {outcomes.get(test)}, plain {plain[2].get(test)}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
