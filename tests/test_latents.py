"""NumPy's arrays, floats among them: prepared, stored, trained on, drawn."""
import numpy as np
import pytest

import generate
import prepare_data
import train_unet
import unet_io
from harness import (
    SMALL, TOY, TRAIN, call, checkpoint_in, losses_in, perturbed_file, refused, run, same_bits, start_flags)
from unet_io import Config, UserError

LATENTS = Config(**TOY | dict(in_channels=4, class_cond=True, num_classes=3, predict="v"))


def latents(n=12, kind="f4"):
    return (np.random.default_rng(4).standard_normal((n, 4, 8, 8)) * 5 + 1).astype(kind)


def prepare(folder, array, *words, name="x.npy", **arrays):
    """(sentence of a refusal or '', the file's Images where there is none)"""
    path = folder / name
    np.savez(path, **arrays) if name.endswith("z") else np.save(path, array)
    sentence = call(prepare_data, "--data_dir", path, "--output_name", folder / "x.bin", *words)
    return sentence, None if sentence else unet_io.read_images(str(folder / "x.bin"))


@pytest.mark.parametrize("kind", ["f2", "f4", ">f8"])
def test_arrays_of_floats(tmp_path, capsys, kind):
    """They are stored as they are in float32, or scaled; their labels are classes; a part is held out."""
    x, labels = latents(kind=kind), np.arange(12) * 5 % 3 * 7
    _, images = prepare(tmp_path, x)
    assert images.pixels.dtype == np.float32 and same_bits(images.pixels, x.astype("f4"))
    assert images.labels is None and same_bits(images.floats(range(12), 8), x.astype("f4"))
    halves = x.astype("f4").reshape(12, 4, 4, 2, 4, 2).mean((3, 5))
    assert np.abs(images.floats(range(12), 4) - halves).max() < 1e-5
    printed = capsys.readouterr().out
    assert f"mean {x.astype('f8').mean():.5g}, standard deviation {x.astype('f8').std():.5g}" in printed
    _, images = prepare(tmp_path, None, "--labels", "--data_std", 0.5, "--val_fraction", 0.25, name="x.npz",
                        images=x, labels=labels, more=labels)
    held_out = unet_io.read_images(str(tmp_path / "x_val.bin"))
    factor = float(capsys.readouterr().out.split("stored times ")[1].split()[0])
    assert len(images) == 9 and len(held_out) == 3 and images.class_names == ("0", "7", "14")
    found = {one.tobytes(): int(file.class_names[label]) for file in (images, held_out)
             for one, label in zip(file.pixels, file.labels)}
    scaled = x.astype("f4") * np.float32(factor)
    assert found == {one.tobytes(): label for one, label in zip(scaled, labels)}
    assert abs(scaled.std() - 0.5) < 1e-5


def test_arrays_of_bytes(tmp_path):
    """The pixels of pictures, from whatever name stands alone."""
    x = np.random.default_rng(1).integers(0, 256, (5, 1, 16, 16), np.uint8)
    for name, more in (("x.npy", {}), ("x.npz", dict(pixels=x)), ("x.npz", dict(pixels=x, labels=x[0, 0]))):
        _, images = prepare(tmp_path, x, name=name, **more)
        assert same_bits(images.pixels, x) and images.labels is None and images.pixels.dtype == np.uint8


def test_refused_arrays(tmp_path):
    x, numbers = latents(), np.arange(12)
    bad = x.copy()
    bad[3, 1, 2, 5] = np.nan
    two, pixels = dict(name="x.npz", images=x), x.astype(np.uint8)
    for array, words, more, says in (
            (x[0], [], {}, "(4, 8, 8)"), (x[:, :, :4], [], {}, "(12, 4, 4, 8)"), (x[:0], [], {}, "(0, 4, 8"),
            (np.concatenate([x, x], 1), [], {}, "(12, 8, 8, 8)"), (x.astype(int), [], {}, "holds int64"),
            (np.array([{}] * 2), [], {}, "can't be read"), (bad, [], {}, "mean nan"),
            (latents(kind="f8") * 1e300, [], {}, "has the mean"), (0 * x, [], {}, "standard deviation 0"),
            (x, ["--labels"], {}, "array called labels"), (None, ["--labels"], two, "called labels"),
            (None, [], dict(name="x.npz", a=x, b=x), "no array called images"),
            (None, [], dict(name="x.npz", labels=numbers), "no array called images"),
            (None, ["--labels"], two | dict(labels=numbers[1:]), "shape (11,)"),
            (None, ["--labels"], two | dict(labels=numbers - 1), "from 0 on"),
            (None, ["--labels"], two | dict(labels=numbers / 2), "labels of float64"),
            (x, ["--image_size", 8], {}, "leave --image"), (x, ["--in_channels", 4], {}, "leave --image"),
            (x, ["--data_std", -1], {}, "--data_std -1"), (pixels, ["--data_std", 1], {}, "is for floats")):
        sentence, _ = prepare(tmp_path, array, *words, **more)
        assert says in sentence and len(sentence.splitlines()) == 1, (says, sentence)
        assert not list(tmp_path.glob("*.bin"))
    (tmp_path / "y.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:900])
    for name in ("y.npz", "none.npy"):
        assert name in call(prepare_data, "--data_dir", tmp_path / name, "--output_name", tmp_path / "x.bin")
    (tmp_path / "pictures").mkdir()
    assert "--data_std 1" in call(prepare_data, "--data_dir", tmp_path / "pictures", "--data_std", 1,
                                  "--output_name", tmp_path / "x.bin")


@pytest.mark.parametrize("values, kind, suggests", [
    ((0, 1), "f4", "--range 0,1,"), ((0, 1), "f2", "--range 0,1,"), ((0, 255), "f8", "--range 0,255,"),
    ((-0.05, 1.06), "f4", "--range LOW,HIGH"), ((0, 40), "f4", "--range 0,255"), ((0, 255), "i8", "--range 0,255"),
    ((0, 65535), "u2", "--range 0,65535"), ((0, 4000), "u2", "--range 0,4095"), ((0, 1), "?", "--range 0,1"),
    ((0, 1), "u1", "--range 0,1"), ((-128, 127), "i1", "--range LOW,HIGH")])
def test_values_that_nobody_can_know(tmp_path, values, kind, suggests):
    """Black and white of an array have to be told where training would take them for something else."""
    x = np.random.default_rng(5).uniform(0, 1, (6, 3, 8, 8))
    x = np.concatenate([x > 0.5, x]) if kind != "?" and kind[0] in "f" else x > 0.5
    x = (values[0] + x * (values[1] - values[0])).astype(kind)
    sentence, _ = prepare(tmp_path, x)
    assert suggests in sentence and f"{values[0]:g} to {values[1]:g}"[:6] in sentence and "\n" not in sentence
    told = ",".join(map(str, values if suggests.endswith("HIGH") else suggests.strip(",").split()[1].split(",")))
    _, images = prepare(tmp_path, x, "--range", told)
    low, high = map(float, told.split(","))
    part = (x.astype("f8") - low) / (high - low)
    if kind[0] == "f":
        assert images.pixels.dtype == np.float32 and np.abs(images.pixels - (2 * part - 1)).max() < 1e-6
        _, images = prepare(tmp_path, x, "--range", "none")
        assert same_bits(images.pixels, x.astype("f4"))
    else:
        assert same_bits(images.pixels, np.floor(255 * part + 0.5).astype(np.uint8))
        assert "--range none is for floats" in prepare(tmp_path, x, "--range", "none")[0]


def test_values_that_are_known(tmp_path, capsys):
    """Pictures from -1 to 1 and latents pass as they are; another range than is told does not."""
    rng = np.random.default_rng(6)
    for x in (rng.uniform(-1, 1, (6, 3, 8, 8)).astype("f4"), latents(), 0.1 * latents(), latents() - 20):
        assert same_bits(prepare(tmp_path, x)[1].pixels, x)
    err = capsys.readouterr().err
    assert err.count("--data_std 1 scales it") == 2  # of 5, and of 0.5 in neither case
    _, images = prepare(tmp_path, rng.uniform(0, 1, (6, 3, 8, 8)), "--range", "0,1", "--data_std", 1)
    assert abs(images.pixels.std() - 1) < 1e-3
    x = rng.uniform(0, 1.2, (6, 3, 8, 8))
    for words, says in ((["--range", "0,1"], "outside --range 0,1"), (["--range", "-1,1"], "outside --range -1,1")):
        assert says in prepare(tmp_path, x, *words)[0]
    for word in ("1,0", "0", "a,b", "0,nan", "0,inf", "0,1,2"):
        with pytest.raises(SystemExit):
            prepare(tmp_path, x, "--range", word)
        assert f"{word!r} is neither none nor two numbers" in capsys.readouterr().err
    (tmp_path / "pictures").mkdir()
    assert "--range goes with" in call(prepare_data, "--data_dir", tmp_path / "pictures", "--range", "0,1",
                                       "--output_name", tmp_path / "x.bin")


def test_order_of_axes(tmp_path, capsys):
    """Channels may come last, as in the .npz that the evaluators of this field read; what is said is how."""
    x = np.random.default_rng(7).integers(0, 256, (5, 8, 8, 3), np.uint8)
    labels = np.array([2, 0, 1, 1, 0])
    for kind, words in (("u1", []), ("f4", ["--range", "0,255"])):
        _, images = prepare(tmp_path, None, "--labels", *words, name="x.npz", arr_0=x.astype(kind), arr_1=labels)
        assert np.abs(images.floats(range(5)) - (x.transpose(0, 3, 1, 2) / 127.5 - 1)).max() < 1e-6
        assert images.labels.tolist() == labels.tolist() and images.class_names == ("0", "1", "2")
        assert "x.npz has the shape (5, 8, 8, 3), which is (N, H, W, C)" in capsys.readouterr().out
    x = np.random.default_rng(8).integers(0, 256, (5, 4, 4, 4), np.uint8)
    assert same_bits(prepare(tmp_path, x)[1].pixels, x)
    assert "note: " in (err := capsys.readouterr().err) and "which is taken for (N, C, H, W)" in err


def test_damaged_floats(tmp_path):
    """What is stored is checked like bytes, and is a number; only old files have to lie in [-1, 1]."""
    path, x = str(tmp_path / "x.bin"), latents()
    unet_io.write_images(path, x)
    good = (tmp_path / "x.bin").read_bytes()
    assert np.frombuffer(good, "<i4", 10)[5:8].tolist() == [1, 2, 0] and len(good) == 1024 + x.nbytes
    for content, says in ((good[:-4], "cut short"), (good + b"four", "too long"),
                          (good[:2000] + b"\1" + good[2001:], "checksum")):
        (tmp_path / "x.bin").write_bytes(content)
        with pytest.raises(UserError, match=says):
            unet_io.read_images(path)
    for value in (np.nan, np.inf, -np.inf):
        x[5, 0, 0, 0] = value
        unet_io.write_images(path, x)
        with pytest.raises(UserError, match="damaged: it holds a pixel of"):
            unet_io.read_images(path)
    with pytest.raises(AssertionError):
        unet_io.write_images(path, x.astype("f8"))


def test_training_and_drawing(tmp_path, monkeypatch):
    """Float images are trained on as they are, and drawn as floats by --output_name FILE.npy."""
    labels = np.arange(12) % 3
    prepare(tmp_path, None, "--labels", "--data_std", 1, name="x.npz", images=latents(), labels=labels)
    data = unet_io.read_images(str(tmp_path / "x.bin"))
    batch = train_unet.make_batch(data, LATENTS, 0)[0]
    assert np.abs(batch).max() > 2 and {one.tobytes() for one in batch} <= {p.tobytes() for p in data.pixels}
    assert call(train_unet, *unet_io.flags_of(LATENTS), "--data_file", tmp_path / "x.bin", "--steps", 2,
                "--out_dir", tmp_path / "run", "--device", "cpu", "--sample_every", 0) == ""
    words = ["--model_weights", checkpoint_in(tmp_path / "run", 2), "--seeds", "3,9,4", "--threshold",
             "none", "--sample_steps", 3, "--device", "cpu", "--batch_size", 2]
    assert call(generate, *words, "--output_name", tmp_path / "y.npy", "--strip", 2, "--output_dir",
                tmp_path / "single", "--nearest", tmp_path / "x.bin") == ""
    drawn = np.load(tmp_path / "y.npy")
    model, _ = train_unet.load_model(str(checkpoint_in(tmp_path / "run", 2)))
    expected = train_unet.sample(model, [3, 9, 4], sample_steps=3, threshold="none", classes=[0, 1, 2])
    assert drawn.dtype == np.float32 and np.abs(drawn - expected.numpy()).max() < 1e-5
    for name in ("y_strip.png", "y_nearest.png", "single/000009.png"):
        assert (tmp_path / name).is_file()
    monkeypatch.setattr(generate, "sample", None)
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    for name, says in (("none/y.npy", "does not exist"), ("run", "a folder")):
        words = ["--model_weights", tmp_path / "w.bin", "--output_name", tmp_path / name]
        assert says in call(generate, *words)


# ----------------------------------------------------------------------------------------------------
# ./train_unet

@pytest.mark.parametrize("size", [8, 16])
def test_training_in_both_programs(tmp_path, size):
    """The same losses from float images, in their size or averaged; damaged ones are refused."""
    x = np.random.default_rng(4).standard_normal((12, 4, size, size)).astype("f4") * 2
    prepare(tmp_path, None, "--labels", name="x.npz", images=x, labels=np.arange(12) % 3)
    words = start_flags(LATENTS, tmp_path / "x.bin", tmp_path / "run", 3, log_every=1)
    run(TRAIN, *words, "--val_file", tmp_path / "x.bin")
    model = train_unet.init_weights(train_unet.UNet(LATENTS), LATENTS.seed)
    trainer = train_unet.Trainer(model, unet_io.read_images(str(tmp_path / "x.bin")), LATENTS)
    losses = losses_in(tmp_path / "run")
    for step in (1, 2, 3):
        assert abs(losses[step] / trainer.step() - 1) < 1e-5
    good = (tmp_path / "x.bin").read_bytes()
    x[2, 1, 0, 0] = np.nan
    unet_io.write_images(str(tmp_path / "nan.bin"), x)
    (tmp_path / "cut.bin").write_bytes(good[:-8])
    (tmp_path / "odd.bin").write_bytes(good[:3000] + b"\1" + good[3001:])
    for name in ("nan", "cut", "odd"):
        refused(TRAIN, *start_flags(LATENTS, tmp_path / f"{name}.bin", tmp_path / name, 1),
                says=[f"{name}.bin", "damaged"])


def test_first_step_is_infinite(tmp_path, capsys):
    """Where no update came before it, --lr is not blamed, and data far outside [-1, 1] are."""
    unet_io.write_images(str(tmp_path / "x.bin"), latents() * np.float32(1e25))
    config = Config(**TOY | dict(in_channels=4, predict="v"))
    sentence = refused(TRAIN, *start_flags(config, tmp_path / "x.bin", tmp_path / "run", 3),
                       says=["became infinite in step 1", "x.bin holds values up to ", "--range or --data_std"])
    assert "--lr" not in sentence and not checkpoint_in(tmp_path / "run", 0).exists()
    model = train_unet.init_weights(train_unet.UNet(config), config.seed)
    trainer = train_unet.Trainer(model, unet_io.read_images(str(tmp_path / "x.bin")), config)
    trainer.step()
    assert f"x.bin holds values up to {np.abs(latents()).max() * 1e25:g}," in capsys.readouterr().err
    unet_io.write_images(str(tmp_path / "x.bin"), latents())
    weights = train_unet.to_numpy(train_unet.file_order(model, train_unet.perturb(model, 1).parameters()))
    unet_io.write_checkpoint(str(tmp_path / "w.bin"), unet_io.Checkpoint(
        config, {"weights": [array * np.float32(1e20) for array in weights]}))
    sentence = refused(TRAIN, *start_flags(config, tmp_path / "x.bin", tmp_path / "run", 3), "--model_weights",
                       tmp_path / "w.bin", says=["in step 1, before any update", "--model_weights"])
    assert "--lr" not in sentence


def test_first_of_several_arrays(tmp_path):
    """arr_0 holds the images and arr_1 their labels, whatever else there is."""
    x = latents()
    np.savez(tmp_path / "x.npz", x, np.arange(len(x)), x[0])
    images, numbers = prepare_data.read_array(str(tmp_path / "x.npz"), labels=True)
    assert same_bits(images, x) and (numbers == np.arange(len(x))).all()
    assert same_bits(prepare_data.read_array(str(tmp_path / "x.npz"), labels=False)[0], x)
