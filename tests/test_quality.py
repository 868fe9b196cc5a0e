"""Nearest training images, and the figures of quality."""
import math
import re
import sys
import types

import numpy as np
import torch
import torch.nn.functional as F

import generate
import unet_io
from harness import TOY, call, error_of, perturbed_file, picture
from unet_io import Config


def test_nearest(tmp_path, images8):
    """A training image with noise on it is nearest to itself, and the distance is that of the noise."""
    images = unet_io.read_images(images8)
    order = np.random.default_rng(0).permutation(len(images))
    changed = images.pixels[order].astype(int)
    changed[:, 0, 0, 0] += np.where(changed[:, 0, 0, 0] < 128, 24, -24)
    where, distances = generate.nearest(changed.astype(np.uint8), images, 8, chunk=3)
    assert where.tolist() == order.tolist() and np.allclose(distances, 24 / np.sqrt(3 * 8 * 8), rtol=1e-12)
    assert (generate.nearest(images.pixels, images, 8)[1] == 0).all()
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    assert call(generate, "--model_filename", tmp_path / "w.bin", "--num_images", 3, "--sample_steps", 3,
                "--device", "cpu", "--output_name", tmp_path / "x.png", "--nearest", images8) == ""
    drawn, pairs = picture(tmp_path / "x.png"), picture(tmp_path / "x_nearest.png")

    def cell(grid, row, column):
        return grid[2 + 10 * row:, 2 + 10 * column:][:8, :8]
    for n, (y, x) in enumerate([(0, 0), (0, 1), (1, 0)]):
        ours, theirs = cell(pairs, n, 0), cell(pairs, n, 1)
        every = np.moveaxis(images.pixels, 1, -1).astype(int)
        assert (ours == cell(drawn, y, x)).all()
        assert (theirs == every[np.square(every - ours).sum((1, 2, 3)).argmin()]).all()


def test_laplacian_pyramid():
    """Its bands sum up to the image, a smooth image has no detail, and a pixel spreads binomially."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 64, 64)))
    bands = generate.laplacian_pyramid(x)
    assert [band.shape[-1] for band in bands] == [64, 32, 16]
    assert [generate.laplacian_pyramid(torch.zeros(1, 3, size, size))[-1].shape[-1] for size in (8, 24, 36)
            ] == [8, 24, 18]
    row = np.array([1, 4, 6, 4, 1]) / 16
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="reflect")
    low = np.zeros((2, 3, 32, 32))
    for dy in range(5):
        for dx in range(5):
            low += row[dy] * row[dx] * padded[:, :, dy:dy + 64:2, dx:dx + 64:2]
    small = generate.laplacian_pyramid(torch.from_numpy(low))
    assert all(error_of(a, b) < 1e-12 for a, b in zip(small, bands[1:]))
    spread = np.zeros((2, 3, 68, 68))
    spread[:, :, 2:66:2, 2:66:2] = low
    spread = np.pad(spread[:, :, 2:66, 2:66], ((0, 0), (0, 0), (2, 2), (2, 2)), mode="reflect")
    up = sum(4 * row[dy] * row[dx] * spread[:, :, dy:dy + 64, dx:dx + 64]
             for dy in range(5) for dx in range(5))
    assert error_of(bands[0] + torch.from_numpy(up), x) < 1e-12
    flat = generate.laplacian_pyramid(torch.full((1, 3, 32, 32), 0.7, dtype=torch.float64))
    assert flat[0].abs().max() < 1e-12 and (flat[1] - 0.7).abs().max() < 1e-12


def test_sliced_wasserstein():
    """Closed forms: a set moved by v, mean |v . u| of unit vectors u; Gaussians of two widths on a line."""
    dice = np.random.default_rng(1)
    for d in (1, 3, 147):
        points, v = dice.standard_normal((50, d)), dice.standard_normal(d)
        expected = np.linalg.norm(v) * math.gamma(d / 2) / (math.sqrt(math.pi) * math.gamma((d + 1) / 2))
        found = generate.sliced_wasserstein(points, dice.permutation(points) + v, dice, 2048)
        assert abs(found / expected - 1) < (1e-12 if d == 1 else 0.05)
        assert generate.sliced_wasserstein(points, points[::-1], dice) < 1e-12
    a, b = dice.standard_normal((2, 20000, 1))
    found = generate.sliced_wasserstein(a, 3 * b, dice, 64)  # 2 E|x|
    assert abs(found / (2 * math.sqrt(2 / math.pi)) - 1) < 0.02


def test_patches():
    """Patches come from the image, in every place, normalised by channel over all of them."""
    n, count = 3, 4000
    x = torch.arange(n * 3 * 10 * 10, dtype=torch.float64).reshape(n, 3, 10, 10)
    found = generate.patches(x, np.random.default_rng(0), count).reshape(n * count, 3, 7, 7)
    found = torch.from_numpy(found)
    assert abs(found.mean((0, 2, 3))).max() < 1e-9 and abs(found.var((0, 2, 3)) - 1).max() < 1e-4
    scale = 1 / (found[0, :, 0, 1] - found[0, :, 0, 0])  # neighbours differ by 1
    raw = found * scale[:, None, None]
    corner = raw[:, :, :1, :1]
    assert abs(raw - corner - x[0, 0, :7, :7]).max() < 1e-6
    places = (corner[:, 0, 0, 0] - corner[:, 0].min()).round().long().reshape(n, count)
    expected = {y * 10 + x for y in range(4) for x in range(4)}
    for i, row in enumerate(places.tolist()):
        assert {place - 300 * i for place in row} == expected
    constant = generate.patches(torch.full((2, 3, 8, 8), 0.5), np.random.default_rng(0))
    assert np.isfinite(constant).all() and constant.shape == (2 * 128, 147)


def test_patch_distances():
    """Blind to brightness and contrast, larger for what differs more, the same for the same seed."""
    def smooth(seed, coarse):
        noise = torch.from_numpy(np.random.default_rng(seed).random((16, 3, coarse, coarse), np.float32))
        return F.interpolate(noise, size=32, mode="bilinear")
    a, b, rough = smooth(1, 4), smooth(2, 4), smooth(3, 32)
    alike, brighter, unlike = (generate.patch_distances(a, x, 5) for x in (b, 0.3 * b + 0.4, rough))
    assert list(alike) == list(unlike) == [32, 16]
    print(alike, unlike)
    assert all(abs(brighter[size] / alike[size] - 1) < 1e-3 for size in alike)
    assert unlike[32] > 2 * alike[32] and unlike[16] > alike[16]  # 16 images have little to say of 16x16
    assert generate.patch_distances(a, b, 5) == alike != generate.patch_distances(a, b, 6)


def test_frechet_distance():
    """Closed forms: equal, moved, scaled, commuting and, in two dimensions, any covariances."""
    dice = np.random.default_rng(2)
    for d in (2, 7):
        means = dice.standard_normal((2, d))
        a, b = (factor @ factor.T for factor in dice.standard_normal((2, d, d)))
        moved = np.square(means[0] - means[1]).sum()
        assert abs(generate.frechet_distance(means[0], a, means[0], a)) < 1e-9
        assert np.isclose(generate.frechet_distance(means[0], a, means[1], a), moved)
        assert np.isclose(generate.frechet_distance(means[0], a, means[1], 9 * a), moved + 4 * np.trace(a))
        turn = np.linalg.qr(dice.standard_normal((d, d)))[0]
        x, y = dice.random((2, d))
        expected = moved + np.square(np.sqrt(x) - np.sqrt(y)).sum()
        assert np.isclose(generate.frechet_distance(means[0], turn * x @ turn.T, means[1], turn * y @ turn.T),
                          expected)
        if d == 2:  # the trace of the root of a 2x2 matrix M: sqrt(tr M + 2 sqrt(det M))
            trace = math.sqrt(np.trace(a @ b) + 2 * math.sqrt(np.linalg.det(a @ b)))
            assert np.isclose(generate.frechet_distance(means[0], a, means[1], b),
                              moved + np.trace(a) + np.trace(b) - 2 * trace)
        low = np.outer(means[0], means[0])  # rank 1
        assert np.isclose(generate.frechet_distance(means[0], low, means[0], 4 * low), np.trace(low))


def quality_words(tmp_path, held_out, count=6):
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    return ["--model_filename", tmp_path / "w.bin", "--num_images", count, "--sample_steps", 2,
            "--device", "cpu", "--output_name", tmp_path / "x.png", "--quality", held_out]


def test_quality(tmp_path, images8, capsys, monkeypatch):
    """--quality prints seed, count and the numbers of patch_distances, and that FID is left out."""
    monkeypatch.setitem(sys.modules, "pytorch_fid", None)
    printed = []
    for seed in (4, 3, 3):
        assert call(generate, *quality_words(tmp_path, images8), "--seed", seed) == ""
        printed.append(capsys.readouterr().out)
    assert printed[0] != printed[1] == printed[2]
    lines = printed[1].splitlines()[1:]
    assert lines[0].startswith(f"quality, seed 3: 5 pictures against 5 images of {images8}; as a yardstick")
    assert lines[1].split()[-2:] == ["8x8", "mean"] and lines[4].startswith("FID is left out: ")
    assert "pip install pytorch-fid" in lines[4] and len(lines) == 5
    order = unet_io.permutation(3, 0, 11)
    real = torch.from_numpy(unet_io.read_images(images8).floats(order[:10]))
    grid = picture(tmp_path / "x.png")
    cells = [grid[2 + 10 * (n // 3):, 2 + 10 * (n % 3):][:8, :8] for n in range(5)]
    drawn = torch.from_numpy(np.moveaxis(np.stack(cells), -1, 1)).float() / 127.5 - 1
    for line, images in ((lines[2], drawn), (lines[3], real[5:])):
        expected = generate.patch_distances(images, real[:5], 3)[8]
        assert all(abs(float(word) - expected) < 0.02 for word in line.split()[-2:])
    words = ["--seeds", "3-8", "--seed", 3]  # which is then --quality's alone
    assert call(generate, *quality_words(tmp_path, images8), *words) == ""
    assert capsys.readouterr().out == printed[1]
    for held_out, count, says in ((images8, 1, "2 pictures"), (tmp_path / "none.bin", 6, "none.bin")):
        assert says in call(generate, *quality_words(tmp_path, held_out, count))


def test_fid(tmp_path, images8, capsys, monkeypatch):
    """With another network in pytorch-fid's place: its features' Frechet distance; never a download."""
    class Network(torch.nn.Module):
        def forward(self, x):
            assert x.min() >= 0 and x.max() <= 1
            return [x.mean((2, 3), keepdim=True)]
    package = types.ModuleType("pytorch_fid.inception")
    package.FID_WEIGHTS_URL, package.InceptionV3 = "https://example.org/weights.pth", Network
    monkeypatch.setitem(sys.modules, "pytorch_fid", types.ModuleType("pytorch_fid"))
    monkeypatch.setitem(sys.modules, "pytorch_fid.inception", package)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert call(generate, *quality_words(tmp_path, images8)) == ""
    last = capsys.readouterr().out.splitlines()[-1]
    weights = tmp_path / "checkpoints/weights.pth"
    assert last == f"FID is left out: save https://example.org/weights.pth as {weights}"
    weights.parent.mkdir()
    weights.write_text("")
    assert call(generate, *quality_words(tmp_path, images8)) == ""
    last = capsys.readouterr().out.splitlines()[-1]
    real = unet_io.read_images(images8).floats(unet_io.permutation(0, 0, 11)[:10])
    features = (real.astype(np.float64) / 2 + 0.5).mean((2, 3))
    expected = generate.frechet_distance(*(moment for half in (features[5:], features[:5])
                                           for moment in (half.mean(0), np.cov(half.T))))
    assert re.fullmatch(rf"FID: \d+\.\d\d for 5 pictures, {expected:.2f} for 5 held-out images", last)
