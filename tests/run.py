"""Tests of train_unet against PyTorch and NumPy, of its files, and of the command lines: those in tests/.

    make test                      builds what is tested, sets up Python, runs this
    python3 tests/run.py            the tests; the last line counts them, those that build/network and others run too
    ALL=1 python3 tests/run.py      every one, also those that take long: conftest.py names them
    python3 tests/run.py -k resume  those whose name contains "resume"; all of pytest's flags work
    python3 tests/run.py -n 0       one after the other, in this process

Where pytest-xdist is found, the tests run side by side, one on each core and each with one thread; conftest.py tells
which of them may not. The programs under test are those in the folder above; harness.py tells how to name others.
"""
import collections
import importlib.util
import os
import pathlib
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parent


class Counter:
    """A pytest plugin that counts tests; a function that ran such a program counts as the tests run there."""
    def __init__(self):
        self.passed = self.failed = 0
        self.skipped = collections.Counter()  # by reason

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.user_properties:
            counts = {name: sum(value for key, value in report.user_properties if key == name)
                      for name in ("passed", "failed")}
            self.passed += counts["passed"]
            self.failed += max(counts["failed"], int(report.failed))
        elif report.failed:
            self.failed += 1
        elif report.when == "call" and report.passed:
            self.passed += 1
        elif report.skipped:
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def summary(self):
        """N passed, N failed, N skipped (why: N; why: N)."""
        why = "; ".join(f"{reason}: {count}" for reason, count in self.skipped.items())
        return (f"{self.passed} passed, {self.failed} failed, {sum(self.skipped.values())} skipped"
                + f" ({why})" * bool(why))

    def pytest_collectreport(self, report):
        self.failed += report.failed


MOST_WORKERS = 16  # more would wait for the longest tests, and each has PyTorch in its memory


def side_by_side():
    """pytest's flags for a worker on each core, or none where there is one core or no pytest-xdist."""
    workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    if not importlib.util.find_spec("xdist"):
        print("pytest-xdist is not installed: the tests run one after the other")
        return []
    if workers == 1:
        return []
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the programs under test, and of PyTorch
    return ["-n", str(workers), "--dist", "loadgroup"]


def main():
    counter = Counter()
    flags = ["-q", "-p", "no:cacheprovider", "--durations=8", "--tb=short", "-rs", *side_by_side()]
    status = pytest.main([str(TESTS), *flags, *sys.argv[1:]], plugins=[counter])
    if status != pytest.ExitCode.OK and not counter.failed:
        counter.failed = 1
    print(counter.summary(), flush=True)
    sys.exit(1 if counter.failed else 0)


if __name__ == "__main__":
    main()
