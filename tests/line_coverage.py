"""The lines of the program that its default tests reach, by gcov.

    make coverage

builds the program and its two test programs with counters, runs the tests on the CPU with them, and then calls this with the
folder of the builds. A line counts as reached where any of the programs ran it. Code for the GPU is not compiled there, and
so not counted. What a test ends by SIGKILL leaves no counts. test_config_that_can_not_be_written
fails here, because the counters are larger than the files that it allows.
"""
import collections
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = ("train_unet.cu", "unet_io.h", "unet_cpu.h")


def line_counts(folder):
    """{source: {line: how often it ran}} from the counters in a folder."""
    counters = sorted(folder.glob("*.gcda"))
    if not counters:
        sys.exit(f"{folder} holds no counters: no program that was built there has run")
    runs = {source: collections.Counter() for source in SOURCES}
    for counter in counters:
        report = subprocess.run(["gcov", "--json-format", "--stdout", counter], cwd=ROOT, check=True,
                                capture_output=True, text=True).stdout
        for file in json.loads(report)["files"]:
            if file["file"] in runs:
                for line in file["lines"]:
                    runs[file["file"]][line["line_number"]] += line["count"]
    return runs


def in_ranges(numbers):
    """[3, 4, 5, 9] as "3-5, 9"."""
    ranges = []
    for n in numbers:
        if ranges and ranges[-1][1] == n - 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges)


def main():
    runs = line_counts(pathlib.Path(sys.argv[1]))
    for source, lines in runs.items():
        print(f"{source}, not reached: {in_ranges(sorted(n for n, count in lines.items() if not count)) or 'none'}")
    print()
    for source, lines in [*runs.items(), ("all", dict(enumerate(n for lines in runs.values() for n in lines.values())))]:
        reached = sum(count > 0 for count in lines.values())
        print(f"{source:14} {reached:5} of {len(lines):5} lines reached, {100 * reached / len(lines):.1f}%")


if __name__ == "__main__":
    main()
