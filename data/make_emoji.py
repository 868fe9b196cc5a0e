#!/usr/bin/env python3
"""Makes the demo data, emoji.bin.gz and faces.bin.gz, from the colour bitmaps in the font Noto Color Emoji.

    apt-get install fonts-noto-color-emoji      # the font, 11 MB (Debian, Ubuntu)
    pip install fonttools pillow numpy
    python3 data/make_emoji.py                  # some seconds; writes into data/

The pictures lie in the font as PNGs of 136x128 pixels, one a glyph. A glyph is reached from one code point
or, by a ligature, from several ("woman", joiner, "rocket": an astronaut). Only the bitmap version of the
font (table CBDT) works, not the vector version (COLR). README.md beside this file says what is left out.
"""
import argparse
import io
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

try:
    import numpy as np
    from fontTools.ttLib import TTFont
    from PIL import Image
except ImportError as e:
    sys.exit(f"make_emoji.py needs {e.name}: pip install fonttools pillow numpy")

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from unet_io import write_images  # noqa: E402  (it lies one folder up)

FONT = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
SIZE, MARGIN = 64, 2            # a picture is SIZE x SIZE pixels, of which MARGIN on every side are white
INNER = SIZE - 2 * MARGIN
WHITE = (255, 255, 255)

TONES = range(0x1F3FB, 0x1F400)                         # skin-tone modifiers
LETTERS = range(0x1F1E6, 0x1F200)                       # two of these are a country's flag
TAGS = range(0xE0000, 0xE0080)                          # a black flag and tags are a region's flag
HELPERS = {*map(ord, "#*0123456789"), 0x20E3,           # pieces of keycaps: the bare signs, the empty cap
           *range(0x1F9B0, 0x1F9B4),                    # hair without a head
           0x1F595}                                     # and a gesture that not everybody wants to see
JOINER = 0x200D

# Round faces, the right way up and looking at us, with little outside the circle. Chosen by eye.
FACES = [(c,) for c in (
    0x2639, 0x263A,
    *range(0x1F600, 0x1F607), *range(0x1F609, 0x1F624),                 # not 607 (halo), 608 (horns)
    *range(0x1F625, 0x1F631), 0x1F632, 0x1F633,                         # not 624 (steam), 631 (hands)
    *range(0x1F635, 0x1F638), 0x1F641, 0x1F642, 0x1F644,                # not 634 (zzz), 643 (upside down)
    *range(0x1F910, 0x1F914), 0x1F915, 0x1F922, 0x1F924,                # not 914 (hand), 923 (rolling)
    *range(0x1F928, 0x1F92E), 0x1F972, 0x1F974, 0x1F978, 0x1F979, 0x1F97A, 0x1F9D0,
    0x1FAE2, 0x1FAE4)] + [(0x1F635, JOINER, 0x1F4AB)]


def glyph_sequences(font):
    """The sequences of code points that lead to each glyph: {glyph name: [(code point, ...), ...]}."""
    cmap = font.getBestCmap()
    code = {name: c for c, name in cmap.items()}
    sequences = defaultdict(list, {name: [(c,)] for c, name in cmap.items()})
    for lookup in font["GSUB"].table.LookupList.Lookup:
        for table in lookup.SubTable:
            table = getattr(table, "ExtSubTable", table)
            for first, ligatures in getattr(table, "ligatures", {}).items():
                for lig in ligatures:
                    names = (first, *lig.Component)
                    if all(n in code for n in names):
                        sequences[lig.LigGlyph].append(tuple(code[n] for n in names))
    return sequences


def is_private(sequence):
    """Whether it holds a code point from Unicode's private areas (old names of some glyphs)."""
    return any(0xE000 <= c < 0xF900 or c >= 0xF0000 for c in sequence)


def is_flag(sequence):
    """Whether it is a country's or region's flag, or one of the letters that spell them."""
    return sequence[0] in LETTERS or any(c in TAGS for c in sequence)


def wanted(sequences):
    """The sequences left of a glyph's without skin tones; none for flags and helper glyphs."""
    left = [s for s in sequences if not any(c in TONES for c in s)]
    if any(is_flag(s) or (len(s) == 1 and s[0] in HELPERS) for s in left):
        return []
    return left


def picture(png):
    """(SIZE, SIZE) RGB on white from a bitmap of the font, or None if it is empty or would be enlarged."""
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    box = image.getchannel("A").getbbox()
    if box is None:
        return None
    image = image.crop(box)
    side = max(image.size)
    if side < INNER:
        return None
    square = Image.new("RGBA", (side, side), WHITE + (255,))
    square.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    out = Image.new("RGB", (SIZE, SIZE), WHITE)
    out.paste(square.convert("RGB").resize((INNER, INNER), Image.Resampling.HAMMING), (MARGIN, MARGIN))
    return out


def write_sheet(path, images, columns, size, gap, palette):
    """A PNG of all images, box-filtered to size x size; a palette makes the file three times smaller."""
    step = size + gap
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * step + gap, rows * step + gap), WHITE)
    for i, image in enumerate(images):
        sheet.paste(image.reduce(SIZE // size), (gap + i % columns * step, gap + i // columns * step))
    if palette:
        sheet = sheet.quantize(256, kmeans=2, dither=Image.Dither.NONE)
    sheet.save(path, optimize=True)


def main():
    parser = argparse.ArgumentParser(description="Makes the demo data from the bitmaps in Noto Color Emoji.")
    parser.add_argument("--font", default=FONT, help="default: %(default)s (Debian: fonts-noto-color-emoji)")
    parser.add_argument("--out_dir", type=Path, default=HERE, help="default: the folder of this script")
    args = parser.parse_args()

    if not Path(args.font).is_file():
        sys.exit(f"{args.font} is not there: apt-get install fonts-noto-color-emoji, or use --font")
    font = TTFont(args.font)
    if "CBDT" not in font:
        sys.exit(f"{args.font} holds no colour bitmaps (no CBDT table): use the bitmap version of the font")

    bitmaps = font["CBDT"].strikeData[0]
    entries = []                                    # (lowest sequence that is not private, all of them, glyph)
    for name, sequences in glyph_sequences(font).items():
        left = wanted(sequences) if name in bitmaps else []
        if left:
            entries.append((min(left, key=lambda s: (is_private(s), s)), left, name))

    pictures, index = {}, {}                            # {pixels: image} in order; {sequence: pixels}
    for _, sequences, name in sorted(entries):
        image = picture(bitmaps[name].imageData)
        if image is not None:
            pictures.setdefault(image.tobytes(), image)
            index.update((s, image.tobytes()) for s in sequences)

    missing = [s for s in FACES if s not in index]
    if missing:
        sys.exit(f"{args.font} lacks " + ", ".join(" ".join(f"U+{c:X}" for c in s) for s in missing))
    emoji = list(pictures.values())
    faces = [pictures[index[s]] for s in sorted(FACES)]

    args.out_dir.mkdir(parents=True, exist_ok=True)
    for name, images, sheet in (("emoji", emoji, (54, 32, 1, True)), ("faces", faces, (13, 64, 4, False))):
        path = args.out_dir / f"{name}.bin"
        write_images(path, np.stack(images).transpose(0, 3, 1, 2))      # (N, 3, SIZE, SIZE)
        subprocess.run(["gzip", "-9", "-n", "-k", "-f", path], check=True)
        write_sheet(path.with_suffix(".png"), images, *sheet)
        packed = path.with_suffix(".bin.gz").stat().st_size
        print(f"{path}: {len(images)} images, {path.stat().st_size} bytes, packed {packed}")


if __name__ == "__main__":
    main()
