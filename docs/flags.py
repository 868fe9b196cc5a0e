"""The tables of flags in guide.md, from what `./train_unet --help all` prints.

    make docs                       writes them
    python3 docs/flags.py --check    fails where a table is not what would be written; the tests run this

A table stands between <!-- flags: GROUP --> and <!-- /flags -->, GROUP being a title of --help.
"""
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE / "guide.md"
PROGRAM = os.environ.get("TRAIN_UNET", str(HERE.parent / "train_unet"))
TABLE = re.compile(r"(?<=<!-- flags: )(\w+)( -->\n).*?(?=<!-- /flags -->)", re.S)


def tables(text):
    """{title: a table of its flags} from the text of --help all."""
    rows, title = {}, ""
    for line in text.splitlines():
        if re.fullmatch(r"[A-Z]\w+", line):
            title = line
            rows[title] = ["| flag | default | what it does |", "|---|---|---|"]
        elif flag := re.fullmatch(r"  (--\w+) ?(\S*) +(.*?)(?: \(default (\S+)\))?", line):
            name, choices, meaning, standard = flag.groups()
            choices = f" {choices}".replace("|", r"\|") if choices else ""
            rows[title].append(f"| `{name}{choices}` | {standard or ''} | {meaning} |")
    return {title: "\n".join(lines) + "\n" for title, lines in rows.items()}


def written(page, text):
    """The page with the tables that --help all's text gives."""
    made = tables(text)
    return TABLE.sub(lambda found: found[1] + found[2] + made[found[1]], page)


def main():
    help_text = subprocess.run([PROGRAM, "--help", "all"], capture_output=True, text=True, check=True).stdout
    page = PAGE.read_text(encoding="utf-8")
    new = written(page, help_text)
    if "--check" not in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    elif new != page:
        sys.exit(f"the tables of flags in {PAGE.name} are not those of --help all: run `make docs`")


if __name__ == "__main__":
    main()
