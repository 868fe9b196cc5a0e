"""Grids that --generate and generate.py show in a terminal: what a terminal that knows the codes would draw is the PNG."""
import base64
import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest
from PIL import Image

import generate
import unet_io
from harness import LONG, ROOT, TOY, TRAIN, call, perturbed_file, picture, refused, run
from unet_io import Config

UTF8, SHELL = {"LANG": "de_DE.UTF-8"}, {"TERM": "xterm-256color", "LANG": "de_DE.UTF-8"}
DISPLAYS = [  # (what is shown, what the environment holds)
    ("kitty", {"TERM": "xterm-kitty"}),
    ("kitty", {"TERM": "xterm-kitty", "TERM_PROGRAM": "iTerm.app"}),  # started from the other
    ("kitty", SHELL | {"KITTY_WINDOW_ID": "1", "NO_COLOR": "1"}),
    ("kitty", {"TERM": "xterm-ghostty"}),
    ("kitty", SHELL | {"TERM_PROGRAM": "ghostty"}),
    ("iterm", SHELL | {"TERM_PROGRAM": "iTerm.app"}),
    ("iterm", {"TERM": "xterm", "LC_TERMINAL": "iTerm2"}),
    ("iterm", SHELL | {"TERM_PROGRAM": "WezTerm"}),
    ("iterm", SHELL | {"TERM_PROGRAM": "mintty", "KITTY_WINDOW_ID": "1"}),
    ("half blocks", SHELL),
    ("half blocks", {"TERM": "xterm", "LC_ALL": "", "LC_CTYPE": "en_US.utf8", "LANG": "C"}),
    ("half blocks", UTF8 | {"TERM": "tmux-256color", "TERM_PROGRAM": "iTerm.app"}),
    ("half blocks", UTF8 | {"TERM": "xterm-kitty", "TMUX": "/tmp/tmux,1,0"}),
    ("half blocks", UTF8 | {"TERM": "screen", "STY": "1.pts", "LC_TERMINAL": "iTerm2"}),
    ("half blocks", UTF8 | {"TERM": "xterm-ghostty", "ZELLIJ": "0"}),
    ("half blocks", SHELL | {"TERM_PROGRAM": "vscode", "KITTY_WINDOW_ID": "1"}),
    ("", SHELL | {"NO_COLOR": "1"}),
    ("", SHELL | {"LC_ALL": "C"}),
    ("", SHELL | {"LC_CTYPE": "en_US.ISO-8859-1"}),
    ("", {"TERM": "xterm"}),
    ("", UTF8 | {"TERM": "dumb", "KITTY_WINDOW_ID": "1"}),
    ("", UTF8),
]
NAMES = {name for _, env in DISPLAYS for name in env}
ELSEWHERE = {name: value for name, value in os.environ.items() if name not in NAMES}


def in_terminal(*command, env, columns=80):
    """What a program prints into a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    with subprocess.Popen([str(word) for word in command], stdout=theirs, stderr=theirs, env=ELSEWHERE | env) as process:
        os.close(theirs)
        output = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while piece := os.read(ours, 65536):
                output += piece
        os.close(ours)
        assert process.wait(LONG) == 0, output
    return output.decode().replace("\r\n", "\n")


class Terminal(io.StringIO):
    """A standard output that says that it is a terminal, of unknown size."""
    def isatty(self):
        return True


def kind_of(text):
    """What a text shows, as DISPLAYS name it."""
    beginnings = {"kitty": "\x1b_G", "iterm": "\x1b]1337", "half blocks": "\x1b[38;2;"}
    kinds = [kind for kind, beginning in beginnings.items() if beginning in text]
    assert len(kinds) <= 1 and ("\x1b" in text) == len(kinds)
    return "".join(kinds)


def sent_png(text):
    """(the bytes of a PNG in codes of kitty or iTerm2, its width in cells, the text without it)."""
    if kind_of(text) == "kitty":
        commands = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", text)
        *keys, more = commands[0][0].split(",")
        cells, *keys = reversed(keys)
        assert set(keys) == {"a=T", "f=100", "q=2"} and cells.startswith("c=")
        assert [more, *(keys for keys, _ in commands[1:])] == ["m=1"] * (len(commands) - 1) + ["m=0"]
        assert all(len(data) == 4096 for _, data in commands[:-1]) and len(commands[-1][1]) <= 4096
        encoded, cells = "".join(data for _, data in commands), int(cells[2:])
        rest = re.sub(r"(\x1b_G[^\x1b]*\x1b\\)+\n", "<picture>", text)
    else:
        size, cells, encoded = re.search(r"\x1b\]1337;File=inline=1;size=(\d+);width=(\d+):([^\a]*)\a\n", text).groups()
        assert int(size) == len(base64.b64decode(encoded))
        rest = re.sub(r"\x1b\]1337;[^\a]*\a\n", "<picture>", text)
    return base64.b64decode(encoded, validate=True), int(cells), rest


def drawn(text):
    """(the pixels that half blocks show, (height, width, 3); the text without them)."""
    cell = r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m▀"
    lines = re.findall(rf"^((?:{cell})+)\x1b\[0m$", text, re.M)
    cells = np.array([re.findall(cell, line[0]) for line in lines], int)  # (lines, width, 6)
    pixels = cells.reshape(*cells.shape[:2], 2, 3).swapaxes(1, 2).reshape(-1, cells.shape[1], 3)
    return pixels, re.sub(r"(\x1b\[38;2;.*\x1b\[0m\n)+", "<picture>", text)


def over_white(pixels):
    """float64 (height, width, 3) of any kind of picture."""
    pixels = np.atleast_3d(pixels).astype(float)
    alpha = pixels[..., -1:] / 255 if pixels.shape[-1] in (2, 4) else 1
    colours = pixels[..., :3] if pixels.shape[-1] > 2 else pixels[..., :1].repeat(3, axis=-1)
    return colours * alpha + 255 * (1 - alpha)


def check_means(shown, original):
    """Each pixel that is shown is the mean of a box, and the boxes cover the picture."""
    (h, w, _), (height, width, _) = shown.shape, original.shape
    assert w <= width and h <= height and h % 2 == 0 and abs(h - height * w / width) <= 2
    for y in range(h):
        for x in range(w):
            box = original[y * height // h:(y + 1) * height // h, x * width // w:(x + 1) * width // w]
            assert np.abs(shown[y, x] - box.mean(axis=(0, 1))).max() < 0.501


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """{channels: a file of weights}."""
    folder = tmp_path_factory.mktemp("show")
    files = {channels: folder / f"{channels}.bin" for channels in (1, 3, 4)}
    for channels, path in files.items():
        perturbed_file(path, Config(**TOY | dict(predict="v", in_channels=channels)))
    return files


def flags(weights, target, count=16):
    return ["--model_weights", weights, "--num_samples", count, "--sample_steps", 2, "--output_name", target]


@pytest.mark.parametrize("kind, env", DISPLAYS)
def test_terminals(tmp_path, weights, kind, env):
    """Each terminal is shown what it can draw, right below the line that names the file; generate.py chooses alike."""
    words = [TRAIN, "--generate", *flags(weights[3], tmp_path / "a.png", 40)]
    text = in_terminal(*words, env=env)
    assert kind_of(text) == kind
    if kind in ("kitty", "iterm"):
        png, cells, text = sent_png(text)
        assert png == (tmp_path / "a.png").read_bytes() and len(png) > 4096  # chunks
        assert cells == 9  # of 72 pixels
    elif kind:
        pixels, text = drawn(text)
        assert (pixels == over_white(picture(tmp_path / "a.png"))).all()  # it fits 80 columns
    shown = "<picture>" if kind else ""
    assert re.search(rf"a\.png: 40 pictures in [\d.]+s, [\d.]+s each\n{shown}$", text) and "\x1b" not in text

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(Terminal()):
        for name in NAMES:
            patch.delenv(name, raising=False)
        for name, value in env.items():
            patch.setenv(name, value)
        assert unet_io.terminal_display() == kind


@pytest.mark.parametrize("channels, columns", [(3, 41), (3, 7), (1, 30), (4, 30), (4, 1), (3, 0)])
def test_half_blocks(tmp_path, weights, channels, columns):
    """A picture that is wider than the terminal is scaled down to it: means, over white, the same in both programs."""
    words = [TRAIN, "--generate", *flags(weights[channels], tmp_path / "a.png", 5), "--output_dir", tmp_path / "each"]
    text = in_terminal(*words, env=SHELL, columns=columns)
    assert re.search(rf"\ba\.png: .*\n(\x1b.*\n)+{re.escape(str(tmp_path))}/each: each picture on its own\n$", text)
    grid = np.atleast_3d(picture(tmp_path / "a.png"))
    assert grid.shape == (22, 32, channels)
    pixels, _ = drawn(text)
    assert pixels.shape[1] == min(columns or 80, 32)
    check_means(pixels, over_white(grid))
    assert unet_io.half_blocks(np.moveaxis(grid.astype(np.uint8), -1, 0), columns or 80) in text


def test_wide_pictures(tmp_path, weights):
    """Of kitty and iTerm2 a picture takes no more cells than the terminal has columns."""
    for env in (DISPLAYS[0][1], SHELL | {"TERM_PROGRAM": "iTerm.app"}):
        text = in_terminal(TRAIN, "--generate", *flags(weights[1], tmp_path / "a.png"), env=env, columns=3)
        png, cells, _ = sent_png(text)
        assert png == (tmp_path / "a.png").read_bytes() and cells == 3


def test_nothing_to_show(tmp_path, weights):
    """--show 0, arrays and another standard output than a terminal: no code at all."""
    common = ["--generate", *flags(weights[3], tmp_path / "a.png")]
    env = {"TERM": "xterm-kitty"}
    assert "\x1b" not in run(TRAIN, *common, env=ELSEWHERE | env).stdout
    assert "\x1b_G" in in_terminal(TRAIN, *common, env=env)
    for words in (["--show", 0], ["--show=0"], ["--output_name", tmp_path / "a.npy"]):
        assert "\x1b" not in in_terminal(TRAIN, *common, *words, env=env)
    refused(TRAIN, *common, "--show", "kitty", status=2, says=["--show", "kitty"])


@pytest.mark.parametrize("env", [SHELL, DISPLAYS[0][1], SHELL | {"TERM_PROGRAM": "iTerm.app"}])
def test_generate_py(tmp_path, weights, monkeypatch, env):
    """generate.py shows its own grid in the same way, whatever format it is written in."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for channels, ending in ((3, "png"), (4, "png"), (1, "bmp"), (3, "npz"), (3, "npy")):
        path = tmp_path / f"a.{ending}"
        with contextlib.redirect_stdout(Terminal()) as printed:
            assert call(generate, *flags(weights[channels], path, 5), "--device", "cpu") == ""
        text = printed.getvalue()
        if ending.startswith("np"):
            assert text == f"wrote {path}\n"
            continue
        grid = np.atleast_3d(np.asarray(Image.open(path)))
        if env is SHELL:
            pixels, rest = drawn(text)
            assert (pixels == np.round(over_white(grid))).all()
        else:
            png, cells, rest = sent_png(text)
            assert (np.atleast_3d(np.asarray(Image.open(io.BytesIO(png)))) == grid).all() and cells == 4
        assert rest == f"wrote {path}\n<picture>"
        with contextlib.redirect_stdout(Terminal()) as printed:
            assert call(generate, *flags(weights[channels], path, 5), "--device", "cpu", "--show", 0) == ""
        assert printed.getvalue() == f"wrote {path}\n"


def test_generate_py_in_a_terminal(tmp_path, weights):
    """It knows the width of a terminal, and writes nothing for a file or a pipe."""
    words = [sys.executable, ROOT / "generate.py", *flags(weights[3], tmp_path / "a.png", 5), "--device", "cpu"]
    pixels, _ = drawn(in_terminal(*words, env=SHELL, columns=30))
    assert pixels.shape[1] == 30
    check_means(pixels, over_white(picture(tmp_path / "a.png")))
    assert run(*words, env=ELSEWHERE | SHELL).stdout == f"wrote {tmp_path / 'a.png'}\n"


def test_large_pictures(monkeypatch):
    """What many viewers refuse is not sent to a terminal either."""
    monkeypatch.setenv("TERM", "xterm-kitty")
    for name in ("TMUX", "STY", "ZELLIJ"):
        monkeypatch.delenv(name, raising=False)
    for width, kind in ((4000, "kitty"), (4001, "")):
        with contextlib.redirect_stdout(Terminal()) as printed:
            unet_io.show_grid(np.zeros((1, 10, width), np.uint8))
        assert kind_of(printed.getvalue()) == kind
