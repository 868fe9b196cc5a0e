"""The contents list at the head of train_unet.cu: each section with its parts, from their banners.

    make toc                            writes it
    python3 dev/bench/toc.py --check    fails where the list is not what would be written; `make test` runs this
"""
import pathlib
import re
import sys
import textwrap

PATH = pathlib.Path(__file__).resolve().parents[2] / "train_unet.cu"
LIST = re.compile(r"(?<=\n// Contents\n//\n)(//  [ \d]\d  .*\n|//      .*\n)*")


def contents(code):
    """The lines of the list, each with its end."""
    parts_of = {}  # by section
    for section, part in re.findall(r"^// ==== (\d+  .+?) =+$|^// ---- (.+?)(?: -+)?$", code, re.M):
        if section:
            parts = []
            parts_of[section] = parts
        else:
            parts.append(re.split("[:;]", part)[0])
    text = ""
    for section, parts in parts_of.items():
        number, name = section.split("  ")
        line = f"{name}: {'; '.join(parts)}" if parts else name
        text += textwrap.fill(line, width=110, initial_indent=f"//  {number:>2}  ",
                              subsequent_indent="//        ", break_on_hyphens=False) + "\n"
    return text


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    code = PATH.read_text()
    new = LIST.sub(lambda _: contents(code), code, count=1)
    if "--check" not in sys.argv:
        PATH.write_text(new)
    elif new != code:
        sys.exit(f"the contents list of {PATH.name} is not that of its banners: run `make toc`")


if __name__ == "__main__":
    main()
