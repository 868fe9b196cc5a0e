"""The documents against the code that they describe."""
import importlib
import re

import pytest

import unet_io
from harness import ROOT, TRAIN, run, source_of_the_program

PAGES = sorted(str(path.relative_to(ROOT)) for folder in (".", "docs", "dev", "data")
               for path in (ROOT / folder).glob("**/*.md" if folder == "dev" else "*.md"))


def anchors(text):
    """The names by which a page's headings can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links(name):
    """Every link and picture within the repository leads somewhere."""
    text = (ROOT / name).read_text()
    links = [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("http")]
    assert links, "a page without a link leads nowhere"
    for link in links:
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("name", PAGES)
def test_tables(name):
    """Every table has a head and a line below it, and as many cells in each row: a blank line would end it."""
    for table in re.findall(r"(?:^\|.*\n?)+", (ROOT / name).read_text(), re.M):
        head, line, *rows = table.splitlines()
        assert re.fullmatch(r"\|(?:[ :]*-+[ :]*\|)+", line), table
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in (head, line, *rows)]
        assert set(cells) == {cells[0]}, table


def test_names():
    """README.md's functions, layers and files are there, and its table of sections is train_unet.cu's."""
    page, code = (ROOT / "README.md").read_text(), source_of_the_program()
    trace = page.split("To follow one training step")[1]
    names = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (?:\d )?\|([^|]*)\|", trace, re.M)))
    assert len(names) > 10
    for name in names:
        assert re.search(rf"^(static [\w<> *]+\b{name}\(|(template <[^>]*> )?struct {name}( : Module)? {{$)", code, re.M), name
    layout = page.split("The sections follow")[1].split("To follow")[0]
    sections = [section.upper() for numbers, names in re.findall(r"^\| ([\d, ]+) \| ([^|`]*) \|", layout, re.M)
             for section in (names.split(", ") if "," in numbers else [names])]
    banners = re.findall(r"^// ==== \d+  ([A-Z, ]+?) =+$", code, re.M)
    assert len(sections) > 10 and sections == banners


@pytest.mark.parametrize("name, least", [("README.md", 5), ("docs/guide.md", 80), ("docs/formats.md", 40), ("docs/speed.md", 3)])
def test_flags(name, least):
    """Every flag that a page names exists in one of the programs."""
    page = (ROOT / name).read_text()
    programs = "".join((ROOT / name).read_text() for name in (
        "train_unet.cu", "unet_io.h", "unet_io.py", "train_unet.py", "generate.py", "prepare_data.py",
        "dev/bench/compare_quality.py"))
    page = re.sub(r"^- (torchrun|srun|mpirun)\b.*$", "", page, flags=re.M)  # these have flags of their own
    flags = set(re.findall(r"--(\w+)", page))
    assert len(flags) > least
    for flag in flags:
        assert re.search(rf'"(--)?{flag}"|(FIELD|OPTIMISER)\({flag}\)', programs), flag


def test_header_of_formats():
    """Each field of a weights file's header is in docs/formats.md, in the place where unet_io.h and unet_io.py put it."""
    page, code = (ROOT / "docs/formats.md").read_text(), source_of_the_program()
    page = page.split("### Weights and checkpoints, new")[1].split("\n#")[0]
    fields = re.findall(r"\bFIELD_(\w+)", re.search(r"enum HeaderField \{(.*?)\}", code, re.S)[1])
    rows = re.findall(r"^\| (\d+) \| (\d+) \| \w+ \| (.*) \|$", page, re.M)
    assert [int(field) for field, _, _ in rows] == list(range(9)) and fields[9:] == ["SECTION_TABLE"]
    words = {"CHECKSUM": "CRC-32", "SMOOTHED": "loss", "LR_STEPS": "length of the learning rate's schedule"}
    for name, (field, byte, meaning) in zip(fields, rows):
        assert int(byte) == 4 * int(field) and words.get(name, name.lower()) in meaning, name
    assert unet_io.FIELD_LR_STEPS == fields.index("LR_STEPS") and unet_io.FIELD_LOSS == fields.index("SMOOTHED")


def test_streams_of_formats():
    """The streams of random numbers, by number."""
    page, code = (ROOT / "docs/formats.md").read_text(), source_of_the_program()
    streams = re.findall(r"STREAM_(\w+)", re.search(r"enum RandomStream \{(.*?)\}", code, re.S)[1])
    table = page.split("## Random numbers")[1].split("Steps count")[0]
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \|", table, re.M)
    assert len(streams) == 16 and [int(number) for _, number in rows] == list(range(16))
    for stream, (name, _) in zip(streams, rows):
        assert name[:3] == stream[:3].lower()


def test_what_the_twin_lacks():
    """guide.md names the flags that only ./train_unet has, those of drawing aside."""
    section = (ROOT / "docs/guide.md").read_text().split("## The same in PyTorch")[1]
    lacks = re.findall(r"--(\w+)", section.split("It has no ")[1].split(";")[0])
    assert sorted([*lacks, "generate"]) == sorted([*unet_io.ELSEWHERE["./train_unet"].split(), "num_samples"])


def test_tables_of_flags(monkeypatch, capsys):
    """The tables of guide.md are made from --help all, and a table that is not is found."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    flags = importlib.import_module("flags")
    text = run(TRAIN, "--help", "all").stdout
    page = flags.PAGE.read_text(encoding="utf-8")
    assert flags.written(page, text) == page
    assert set(flags.tables(text)) - {"Presets"} == set(re.findall(r"<!-- flags: (\w+) -->", page))
    assert sorted(re.findall(r"^\| `--(\w+)", "".join(flags.tables(text).values()), re.M)) == sorted(
        re.findall(r"^  --(\w+)", text, re.M))
    other = text.replace("learning rate", "rate of learning", 1)
    assert flags.written(page, other) != page


@pytest.mark.parametrize("name", ["docs/guide.md", "docs/formats.md", "docs/speed.md"])
def test_contents(name):
    """A page's contents lead to every section, in the order of the sections."""
    text = (ROOT / name).read_text()
    contents, sections = text.split("Contents:", 1)[1].split("\n## ", 1)
    listed = re.findall(r"\]\(#([^)]*)\)", contents)
    headings = ["## " + sections.split("\n", 1)[0]] + re.findall(r"^## .*$", sections, re.M)
    wanted = [re.sub(r"[^\w\- ]", "", heading[3:].lower()).replace(" ", "-") for heading in headings]
    assert len(wanted) > 5 and [anchor for anchor in listed if anchor in wanted][:len(wanted)] == wanted


@pytest.mark.parametrize("name", ["README.md", "docs/guide.md", "docs/formats.md", "docs/speed.md"])
def test_files_and_targets(name):
    """The repository has every program, script and folder that a page names, and the Makefile every target."""
    page = (ROOT / name).read_text()
    files = set(re.findall(r"(?<![\w/.:])([\w/]+\.(?:py|cu|h|bash))\b", page)) - {"evaluator.py"}  # guided-diffusion's
    folders = re.findall(r"`((?:dev|tests|data|docs)/[\w/]*)`", page)
    targets = re.findall(r"(?:^    |`)make ([a-z_]+)", page, re.M)
    assert files
    for name in [*files, *folders]:
        assert (ROOT / name).exists() or (ROOT / "tests" / name).exists(), name
    rules = re.findall(r"^([\w ]+):(?!=)", (ROOT / "Makefile").read_text(), re.M)
    for target in targets:
        assert target in " ".join(rules).split(), target
