"""dev/bench/records.py and the opponents that it trains in PyTorch."""
import dataclasses
import json
import math
import signal
import subprocess

import numpy as np
import pytest
import torch

import quality
import train_unet
import unet_io
from harness import ROOT, TOY, TRAIN, call, error_of
from unet_io import Config, UserError

CLASSES = TOY | dict(class_cond=True, num_classes=3, batch_size=5, seed=7)


@pytest.fixture
def records(tools, monkeypatch):
    monkeypatch.setattr(tools("records"), "PROGRAM", TRAIN)
    return tools("records")


def toy_config(records, recipe, **more):
    """The Config of a recipe on a small network."""
    return dataclasses.replace(Config(**CLASSES), **records.RECIPES[recipe].flags | more).check()


@pytest.mark.parametrize("recipe", ["ddpm", "flow"])
def test_loss_of_an_opponent(records, tools, images8, tmp_path, recipe):
    """The loss is the paper's formula of the recipe, written out in float64, with the classes of the images."""
    config = toy_config(records, recipe)
    trainer = tools("opponents").PyTorch(config, images8, tmp_path / "run")
    x0, t, noise, classes = trainer.batch()
    assert x0.shape == noise.shape == (5, 3, 8, 8) and 0 <= t.min() and t.max() < 1000
    images = unet_io.read_images(images8)
    every = images.floats(range(len(images)))
    for image, label in zip(x0.numpy(), classes[0]):
        place = np.abs(every - image).reshape(len(every), -1).max(1).argmin()
        assert (every[place] == image).all() and images.labels[place] == label
    if recipe == "ddpm":
        kept = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))[t.numpy()]
        alpha, sigma, target = np.sqrt(kept), np.sqrt(1 - kept), noise.double()
    else:
        s = (t.numpy() + 1) / 1000
        alpha, sigma, target = 1 - s, s, noise.double() - x0.double()
    train_unet.perturb(trainer.model, 1)
    alpha, sigma = (torch.from_numpy(values)[:, None, None, None] for values in (alpha, sigma))
    with torch.no_grad():
        loss = trainer.loss(x0, t, noise, classes).item()
        out = trainer.model.double()(alpha * x0.double() + sigma * noise.double(), t, *classes)
    assert abs(loss / (out - target).square().mean().item() - 1) < 1e-5


@pytest.mark.parametrize("recipe", ["ddpm", "flow"])
def test_steps_of_an_opponent(records, tools, images8, tmp_path, monkeypatch, recipe):
    """On the batches of ./train_unet its weights and their average become those of train_unet.py's trainer."""
    config = toy_config(records, recipe, warmup_steps=3, lr_steps=6)
    trainer, images = tools("opponents").PyTorch(config, images8, tmp_path / "run"), unet_io.read_images(images8)
    twin = train_unet.Trainer(train_unet.UNet(config), images, config)
    twin.model.load_state_dict(trainer.model.state_dict())
    twin.emas = [[p.detach().clone() for p in twin.parameters]]

    def batch():
        x0, t, noise, y = map(torch.from_numpy, train_unet.make_batch(images, config, int(trainer.steps_done)))
        return x0, t, noise, [y]

    monkeypatch.setattr(trainer, "batch", batch)
    trainer.train(6, 3, math.inf)
    for _ in range(6):
        twin.step()
    for ours, theirs in ((trainer.weights, twin.parameters), (trainer.average, twin.emas[0])):
        assert error_of(torch.cat([p.flatten() for p in ours]), torch.cat([p.detach().flatten() for p in theirs])) < 1e-5
    for step in (3, 6):
        assert (tmp_path / f"run/checkpoint_{step:08d}.bin").exists()
    model, checkpoint = train_unet.load_model(str(tmp_path / "run/checkpoint_00000006.bin"))
    assert checkpoint.class_names == images.class_names and checkpoint.step == 6
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trainer.average))


def test_opponent_without_classes(records, tools, images8, tmp_path):
    """A model that was trained without the classes of its images can be read, and names none."""
    config = toy_config(records, "flow", class_cond=False, num_classes=0)
    tools("opponents").PyTorch(config, images8, tmp_path).train(1, 1, math.inf)
    _, checkpoint = train_unet.load_model(str(tmp_path / "checkpoint_00000001.bin"))
    assert checkpoint.class_names == () and checkpoint.step == 1


def test_timesteps_of_an_opponent(records, tools, images8, tmp_path):
    """A Config whose timesteps the opponent would draw otherwise is refused."""
    with pytest.raises(UserError, match="draws timesteps uniformly here, not by --timestep_sampling lognormal"):
        tools("opponents").PyTorch(toy_config(records, "flow", timestep_sampling="lognormal"), images8, tmp_path)


def test_opponent_goes_on(records, tools, images8, tmp_path):
    """A run that was cut goes on with all that it had, on other images; measuring its speed changes nothing."""
    opponents, config = tools("opponents"), toy_config(records, "flow")
    trainer = opponents.PyTorch(config, images8, tmp_path)
    first = [tensor.clone() for tensor in trainer.state()]
    assert trainer.step_seconds(0) > 0 and all(map(torch.equal, first, trainer.state()))
    trainer.train(4, 4, math.inf)
    with pytest.raises(opponents.Unfinished, match="call the same job again"):
        trainer.train(8, 4, -math.inf)
    again = opponents.PyTorch(config, images8, tmp_path)
    assert all(map(torch.equal, trainer.state(), again.state())) and int(again.steps_done) == 4
    assert not torch.equal(opponents.PyTorch(config, images8, tmp_path / "new").batch()[2], again.batch()[2])
    again.train(8, 4, math.inf)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9)) and all(line["ms"] > 0 for line in lines)
    again.average[0].fill_(math.nan)
    with pytest.raises(UserError, match="NaN or infinite by step 8"):
        again.save()


class Means(torch.nn.Module):
    """In the place of EfficientNet-Lite0: the means of the channels in four quarters."""
    input_image_size = 16

    def extract_features(self, x):
        return torch.nn.functional.avg_pool2d(x, 8).flatten(1)[:, :, None, None]


@pytest.fixture
def small(records, monkeypatch, tmp_path):
    """(Options of small jobs, the records.py that runs them); two of its recipes, and the judge's network, are replaced."""
    monkeypatch.setattr(quality, "feature_network", lambda: (Means(), ""))
    for name in ("ours", "ours_adamw", "flow"):
        recipe = records.RECIPES[name]
        monkeypatch.setitem(records.RECIPES, name, dataclasses.replace(recipe, samplers=(f"{records.HEUN} 2",)))
    options = records.Options(tmp_path, (1, 2), math.inf, minute=0.05, probe=0.01, pictures=8,
                              data_sets={"smoke": records.SMOKE})
    records.prepare(options, "", "")
    return options, records


def test_one_job_twice(small):
    """A job that another process is at is refused, and its results stay."""
    options, records = small
    job = records.Job("smoke-real-3", options)
    with unet_io.locked(job.folder, "not held by another"):
        with pytest.raises(UserError, match="another process is at --job smoke-real-3"):
            job.run()
        assert not job.path.exists()
    job.run()
    assert job.path.exists()


def test_jobs(small, capsys):
    """Every recipe in miniature: models of both lengths are judged once, and what was cut goes on."""
    options, records = small
    for recipe in records.RECIPES:
        name = f"smoke-{recipe}-3"
        if recipe != "real":
            with pytest.raises(UserError, match="call the same job again"):
                records.Job(name, options._replace(deadline=-math.inf)).run()
        records.Job(name, options).run()
        text = (options.folder / f"{name}.json").read_text()
        records.Job(name, options).run()
        assert (options.folder / f"{name}.json").read_text() == text
    results = {result["recipe"]: result for result in records.read_results(options.folder)}
    assert list(results) == sorted(records.RECIPES)
    for recipe, result in results.items():
        points = {(point["minutes"], point["calls"]): point for point in result["points"]}
        wanted = {"real": {(0, 0)}, "ours": {(1, 3), (1.2, 1), (1.2, 2), (2, 3), (2.4, 1), (2.4, 2)},
                  "ours_adamw": {(1, 3), (2, 3)}, "flow": {(1, 3), (2, 3)}}
        assert set(points) == wanted.get(recipe, {(1, 50), (2, 50)})
        if recipe == "ours":
            ours = points
        for (minutes, _), point in points.items():
            assert {"Frechet", "Frechet of 4", "KID x 1000", "precision %", "recall %", "accuracy %"} == set(point["figures"])
            assert not minutes or point["steps"] >= minutes and point["seconds"] > 0
        folder = options.folder / f"smoke-{recipe}-3"
        if recipe != "real":
            every = int((folder / "steps_a_minute").read_text())
            assert [points[minutes, calls]["steps"] for minutes, calls in points if minutes in (1, 2)] == [every, 2 * every]
            assert (folder / "run_2").exists() != records.RECIPES[recipe].one_run
        if recipe == "ours":  # a tuning to one call has steps of its own: other ones, and so many of them as fit its minutes
            fraction = unet_io.PRESETS["consistency"]["matching_fraction"]
            for calls in (1, 2):
                told = (folder / f"tuned_2_{calls}/config.txt").read_text()
                assert f"consistency_steps = {calls}\n" in told and f"matching_fraction = {fraction:g}\n" in told
                more = round(0.4 * int((folder / f"tuning_{calls}_steps_a_minute").read_text()))
                assert points[2.4, calls]["steps"] == 2 * every + max(1, more)
    _, table = records.render(list(results.values()), "")["smoke"]
    rows = records.summary(table)[-2:]
    for minutes, row in enumerate(rows, 1):
        assert int(row[0]) == minutes and row[1].strip() == f"{results['real']['points'][0]['figures']['Frechet']:.2f}"
        wanted = [ours[key]["figures"]["Frechet"] for key in ((minutes, 3), (1.2 * minutes, 1), (1.2 * minutes, 2))]
        assert [cell.strip() for cell in row[3:]] == [f"{value:.2f}" for value in wanted]
    assert f"| 2.4 | {records.RECIPES['ours'].title}, consistency |" in records.table(table)


def test_sets_have_all_classes(small, monkeypatch):
    """Sets of fewer pictures than were drawn, of which some are left over, have equally many of each class."""
    options, records = small
    judge = records.Job("smoke-ours-0", options).judge
    judge.sizes, judge.held_out_features = (50, 20), np.zeros((50, 1))
    classes, _ = unet_io.spread_classes(Config(class_cond=True, num_classes=10), range(10), 50)
    judge.features = lambda pictures: np.array(classes) + np.arange(50) / 100  # the class, and which picture
    seen = []
    monkeypatch.setattr(quality, "feature_figures", lambda points, theirs: seen.append(points.tolist()) or {"Frechet": 0.0})
    judge.figures(np.zeros((50, 1, 8, 8), np.uint8), None)
    assert [len(points) for points in seen] == [50, 20, 20] and not set(seen[1]) & set(seen[2])
    for points, of_each in zip(seen, (5, 2, 2), strict=True):
        assert np.bincount(np.array(points, int)).tolist() == [of_each] * 10


@pytest.mark.parametrize("name, says", [("smoke-ours", "DATA-RECIPE-SEED"), ("smoke-none-0", "DATA-RECIPE-SEED"),
                                        ("none-ours-0", "DATA-RECIPE-SEED"), ("smoke-ours-x", "DATA-RECIPE-SEED")])
def test_names_of_jobs(small, name, says):
    options, records = small
    with pytest.raises(UserError, match=says):
        records.Job(name, options)
    with pytest.raises(UserError, match="--prepare"):
        records.Job("smoke-ours-0", options._replace(folder=options.folder / "none"))


def test_data_sets(records, tmp_path):
    """A third of the emoji is held out, no image is in both files; the recipes fit both networks."""
    options = records.Options(tmp_path, (1,), math.inf, data_sets={"emoji": records.DATA_SETS["emoji"]})
    records.prepare(options, "", "")
    trained, held_out = (unet_io.read_images(options.images("emoji", part)).pixels for part in (False, True))
    assert len(trained) == 1084 and len(held_out) == records.DATA_SETS["emoji"].sizes[0] == 541
    assert len({image.tobytes() for image in (*trained, *held_out)}) == 1625
    for data in records.DATA_SETS.values():
        for recipe in records.RECIPES.values():
            config = records.config_of(data, recipe, 2)
            assert config.seed == 2 and config.class_cond == (data.preset == "fashion32") and not config.cond_drop_prob


def results_of(recipe, seed, frechet, minutes=1, **more):
    point = dict(minutes=minutes, sampler="--sampler ddim --sample_steps 50", calls=50, steps=1000 + 10 * seed, seconds=59.4,
                 figures={"Frechet": frechet, "recall %": 70.0})
    return dict(data="fashion", recipe=recipe, seed=seed, device="X", torch="2.9", points=[point | more])


def test_tables(records, tmp_path, monkeypatch):
    """Rows by minutes and recipe with mean and deviation of the seeds; the other table stays; one kind of GPU alone."""
    page = ROOT / "docs/records.md"
    for name, file in ("PAGE", page), ("README", ROOT / "README.md"):
        monkeypatch.setattr(records, name, tmp_path / file.name)
        getattr(records, name).write_text(file.read_text())
    real = dict(minutes=0, sampler="", calls=0, steps=0, seconds=0.0)
    results = [results_of("ddpm", 0, 20.0), results_of("ours_v", 0, 10.0, 2), results_of("ours_v", 0, 12.0),
               results_of("ours_v", 1, 13.0), results_of("ours_v", 2, 14.0), results_of("real", 0, 8.0, **real)]
    words = "--write", "--folder", tmp_path / "results"
    assert "holds no results" in call(records, *words)
    (tmp_path / "results").mkdir()
    for n, result in enumerate(results):
        (tmp_path / f"results/{n}.json").write_text(json.dumps(result))
    assert call(records, *words) == ""
    written = records.PAGE.read_text()
    assert written.split("<!-- records:fashion -->\n")[1].split("<!-- /records")[0].splitlines() == [
        "On X, PyTorch 2.9. Measured, a minute's steps took from 29.7 to 59.4 s.", "",
        "| minutes | recipe | steps | calls a picture | Fréchet | recall % | seeds |",
        "|---:|---|---:|---:|---:|---:|---:|",
        "|  | training images, as a yardstick |  |  | 8.00 | 70.00 | 1 |",
        "| 1 | `./train_unet`, v, ddim | 1,010 | 50 | 13.00 ± 1.00 | 70.00 ± 0.00 | 3 |",
        "| 1 | PyTorch, DDPM as diffusers, ddim | 1,000 | 50 | 20.00 | 70.00 | 1 |",
        "| 2 | `./train_unet`, v, ddim | 1,000 | 50 | 10.00 | 70.00 | 1 |"]
    emoji = written.split("## Emoji")[1]
    assert emoji == page.read_text().split("## Emoji")[1]

    # rows that were not measured again stay
    for path in (tmp_path / "results").iterdir():
        path.unlink()
    ours = dict(sampler="--sampler dpmpp --sample_steps 20", calls=20)
    results = [results_of("ours", 0, 6.0, 2, **ours), results_of("ddpm", 0, 19.0), results_of("ours_v", 0, 11.5, 2)]
    for n, result in enumerate(results):
        (tmp_path / f"results/{n}.json").write_text(json.dumps(result))
    assert call(records, *words) == ""
    assert records.rows_in(records.text_between(records.PAGE.read_text(), "records:fashion"))[1:] == [
        ["", "training images, as a yardstick", "", "", "8.00", "70.00", "1"],
        ["1", "`./train_unet`, v, ddim", "1,010", "50", "13.00 ± 1.00", "70.00 ± 0.00", "3"],
        ["1", "PyTorch, DDPM as diffusers, ddim", "1,000", "50", "19.00", "70.00", "1"],
        ["2", "`./train_unet`, EDM, Muon, dpmpp", "1,000", "20", "6.00", "70.00", "1"],
        ["2", "`./train_unet`, v, ddim", "1,000", "50", "11.50", "70.00", "1"]]
    overview = records.rows_in(records.text_between(records.README.read_text(), "records:summary"))
    assert overview[1:] == [["2", "8.00", "", "6.00", "", ""]]
    written = records.PAGE.read_text()
    (tmp_path / "results/other.json").write_text(json.dumps(results[0] | dict(device="Y")))
    assert "results of X and of Y" in call(records, *words) and records.PAGE.read_text() == written


def test_flags(records, tmp_path):
    """What can't be is refused in a sentence."""
    assert "--minutes" in call(records, "--job", "fashion-ours-0", "--minutes", "0,2", "--folder", tmp_path)
    if not torch.cuda.is_available():
        assert "minutes of a GPU" in call(records, "--job", "fashion-ours-0", "--folder", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("status", [0, 130, -signal.SIGINT, 1])
def test_trainer_that_fails_when_told_to_stop(records, tmp_path, monkeypatch, status):
    """Only who ends in good order counts as stopped."""
    class Process:
        returncode = None

        def __init__(self, *_, **options):
            options["stdout"].write(b"error: the disk is full\n")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait(self, timeout=None):
            if timeout is not None:
                raise subprocess.TimeoutExpired("trainer", timeout)
            self.returncode = status

        def send_signal(self, number):
            assert number == signal.SIGINT

    monkeypatch.setattr(records.subprocess, "Popen", Process)
    if status != 1:
        assert not records.run_until(0, ["trainer"], tmp_path / "log")
        return
    with pytest.raises(UserError, match="trainer failed with status 1: error: the disk is full"):
        records.run_until(0, ["trainer"], tmp_path / "log")
