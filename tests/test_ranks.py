"""Several ranks: the same bits as one, and an end in order whatever becomes of one of them.

On the CPU --processes makes the ranks; everything but what carries their messages is as with --gpus.
"""
import contextlib
import dataclasses
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import time

import numpy as np
import pytest

from harness import (
    LONG, RESUMED, SMALL, TOY, TRAIN, checkpoint_in, finish, is_handled, metrics_in, perturbed_file, picture, read_until,
    refused, run, start_flags, started, state_in, wait_until)
from unet_io import Config

EVERYTHING = dataclasses.replace(
    RESUMED, batch_size=16, grad_clip=0.5, skip_outliers=1.0, ema_rate=(0.9, 0.99), min_snr_gamma=5.0)
# ragged: the last part of 14 images has two
SHAPES = {"even": (16, 2), "ragged": (14, 4)}


def files_of(folder):
    """What a run leaves that must not depend on the number of ranks."""
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()
            if path.suffix in (".bin", ".png", ".txt")}


def nothing_is_left(folder):
    """No process stays that works in a folder or was told its name; a last one may be about to end. Ranks have nothing
    else that could lie about: their sockets and their memory have no names."""
    def works_there(process):
        with contextlib.suppress(OSError):  # of a process that has ended since
            return str(folder).encode() in (process / "cmdline").read_bytes() + os.readlink(process / "cwd").encode()

    while any(map(works_there, pathlib.Path("/proc").glob("[0-9]*"))):
        time.sleep(0.01)
    return True


def check_ranks_and_resume(tmp_path, flags, steps):
    """A run on 1, 2 and 4 ranks, and the first one stopped half-way: the same checkpoint, bit for bit. flags: those of a run of
    so many steps in the folder run."""
    found = {}
    for ranks in (1, 2, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        run(TRAIN, *flags, "--processes", ranks, cwd=folder)
        found[ranks] = files_of(folder / "run")
    assert found[1] == found[2] == found[4]
    (tmp_path / "parts").mkdir()
    shutil.copy(checkpoint_in(tmp_path / "1/run", steps // 2), tmp_path / "parts")
    run(TRAIN, "--resume", tmp_path / "parts")
    name = checkpoint_in(tmp_path / "1/run", steps).name
    assert checkpoint_in(tmp_path / "parts", steps).read_bytes() == found[1][name]


@pytest.mark.parametrize("path_steps, matching_fraction", ((0, 0.0), (5, 0.0), (5, 0.5), (5, 0.8)))
def test_same_bits_of_consistency(tmp_path, images8, path_steps, matching_fraction):
    """Tuning on 1, 2 and 4 ranks, and stopped half-way, on a path, before distributions are matched or meanwhile: the same
    checkpoint, bit for bit."""
    config = dataclasses.replace(RESUMED, batch_size=8, consistency=True, predict="v", learn_sigma=False,
                                 path_steps=path_steps, matching_fraction=matching_fraction)
    perturbed_file(tmp_path / "start.bin", config)
    flags = start_flags(config, images8, "run", 16, microbatch=2, save_every=8, log_every=1, num_samples=7,
                        model_weights=tmp_path / "start.bin")
    check_ranks_and_resume(tmp_path, flags, 16)
    run(TRAIN, *flags, "--microbatch", 0, "--out_dir", tmp_path / "whole")
    losses, whole = ([line["loss"] for line in metrics_in(folder)] for folder in (tmp_path / "1/run", tmp_path / "whole"))
    assert len(losses) == 16 and np.allclose(losses, whole, rtol=1e-4, atol=1e-5)


def test_same_bits_of_muon(tmp_path, images8):
    """Muon on 1, 2 and 4 ranks, and stopped half-way: the same checkpoint, bit for bit."""
    config = dataclasses.replace(EVERYTHING, batch_size=8, optimizer="muon", num_channels=64)
    check_ranks_and_resume(tmp_path, start_flags(config, images8, "run", 12, microbatch=2, save_every=6), 12)


@pytest.mark.parametrize("batch, microbatch", SHAPES.values(), ids=SHAPES)
def test_same_bits(tmp_path, images8, batch, microbatch):
    """20 steps with everything on 1, 2 and 4 ranks: checkpoints, grids, configuration; and the log's losses."""
    config = dataclasses.replace(EVERYTHING, batch_size=batch)
    flags = start_flags(config, images8, "run", 20, microbatch=microbatch, save_every=8, sample_every=10,
                        keep=9, log_every=1, val_file=images8, val_every=5, num_samples=7)
    found = {}
    for ranks in (1, 2, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        result = run(TRAIN, *flags, "--processes", ranks, cwd=folder)
        assert f"{ranks} ranks through sockets" in result.stdout or ranks == 1
        found[ranks] = files_of(folder / "run")
        assert len(found[ranks]) == 6 and found[ranks] == found[1]
        lines = metrics_in(folder / "run")
        assert [line["loss"] for line in lines] == [line["loss"] for line in metrics_in(tmp_path / "1/run")]
        assert all(("images_per_s_per_rank" in line) == (ranks > 1) for line in lines)
        validated = re.findall(r"validation loss (\S+)", result.stdout)
        assert len(validated) == 4 and (ranks == 1 or validated == first)
        first = validated
    assert nothing_is_left(tmp_path)


def test_more_ranks_than_weights(tmp_path, images4):
    """The smallest model has fewer chunks of weights than there are ranks: some have none."""
    flags = start_flags(Config(**SMALL | dict(batch_size=16)), images4, "run", 3, microbatch=1)
    for ranks in (1, 16):
        (tmp_path / str(ranks)).mkdir()
        run(TRAIN, *flags, "--processes", ranks, cwd=tmp_path / str(ranks))
    assert files_of(tmp_path / "16/run") == files_of(tmp_path / "1/run")


def test_own_share_is_a_part(tmp_path, images8):
    """Without --microbatch a rank's share is one part, and the log says what repeats the run on one rank."""
    config = Config(**TOY | dict(batch_size=8))
    for name, more in (("four", ["--processes", 4]), ("one", ["--microbatch", 2])):
        (tmp_path / name).mkdir()
        result = run(TRAIN, *start_flags(config, images8, "run", 4), *more, cwd=tmp_path / name)
        assert "--microbatch 2 makes the same on any number" in result.stdout or name == "one"
    assert files_of(tmp_path / "four/run") == files_of(tmp_path / "one/run")


def test_resume_on_other_numbers(tmp_path, images8):
    """Stopped on 4 ranks, resumed on 1, stopped, resumed on 2: the bits of the run that was never stopped."""
    config = dataclasses.replace(EVERYTHING, batch_size=8)
    flags = start_flags(config, images8, tmp_path / "whole", 18, microbatch=2, save_every=6, sample_every=0, keep=9)
    run(TRAIN, *flags)
    folder = tmp_path / "parts"
    flags[flags.index(tmp_path / "whole")] = folder
    run(TRAIN, *flags, "--processes", 4)
    for step, ranks in ((6, 1), (12, 2)):
        for later in (12, 18):
            if later > step:
                checkpoint_in(folder, later).unlink(missing_ok=True)
        run(TRAIN, "--resume", folder, "--processes", ranks)
        expected = checkpoint_in(tmp_path / "whole", 18).read_bytes()
        assert checkpoint_in(folder, 18).read_bytes() == expected


def test_pictures(tmp_path, images8):
    """--generate on 1, 2 and 4 ranks: grid and single pictures, guided, batches of three."""
    config = dataclasses.replace(EVERYTHING)
    perturbed_file(tmp_path / "model.bin", config)
    for ranks in (1, 2, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        run(TRAIN, "--model_weights", tmp_path / "model.bin", "--generate", "--num_samples", 10, "--sample_steps", 4,
            "--batch_size", 3, "--guidance_scale", 2, "--output_dir", "each", "--processes", ranks, cwd=folder)
        files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.png")}
        assert len(files) == 11 and (ranks == 1 or files == one)
        one = files
    assert len({picture(tmp_path / f"4/each/{seed:06d}.png").tobytes() for seed in range(10)}) == 10


def flags_of_run(folder, images, steps, **more):
    return start_flags(Config(**TOY | dict(batch_size=8)), images, folder, steps,
                       **dict(microbatch=2, log_every=1, save_every=2, sample_every=0) | more)


@contextlib.contextmanager
def running(folder, images, wait_for=1, ranks=4, steps=10**6, **more):
    """A run of several ranks that has done some steps, and the ranks' process ids. None outlives it."""
    with started(TRAIN, *flags_of_run(folder, images, steps, **more), "--processes", ranks) as process:
        read_until(process, rb"^step %d/" % wait_for)
        pids = [process.pid, *children_of(process)]
        assert len(pids) == ranks
        yield process, pids
        for pid in pids:
            while is_alive(pid):  # a rank that did not end would stay for ever
                time.sleep(0.01)


def children_of(process):
    return [int(pid) for pid in pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_kills(tmp_path, images8):
    """Each rank is killed at random moments, thirty times in all: the others end with a sentence that names it;
    resumed with another number of ranks, the run goes on with the bits of one that nobody killed."""
    chance, reached = random.Random(15), []
    for kill in range(30):
        folder = tmp_path / str(kill)
        with running(folder, images8, wait_for=chance.randint(3, 20)) as (process, pids):
            time.sleep(chance.random() * 0.03)  # now in one part of a step, now in another
            os.kill(pids[kill % 4], signal.SIGKILL)
            _, errors = finish(process)
        assert errors.count("error:") == 1 and f"rank {kill % 4} failed or was killed" in errors, errors
        assert process.returncode == (1 if kill % 4 else -signal.SIGKILL)
        last = max(int(path.stem[-8:]) for path in folder.glob("checkpoint_????????.bin"))
        run(TRAIN, "--resume", folder, "--processes", (1, 2, 4)[kill % 3], "--steps", last + 2)
        reached.append(last + 2)
    run(TRAIN, *flags_of_run(tmp_path / "whole", images8, max(reached), keep=max(reached)), "--processes", 2)
    for kill, step in enumerate(reached):
        assert state_in(checkpoint_in(tmp_path / str(kill), step)) == state_in(checkpoint_in(tmp_path / "whole", step))
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stops(tmp_path, images8, number, rank):
    """Ctrl-C or SIGTERM at any rank: all end at the same step with a whole checkpoint, and the run goes on."""
    with running(tmp_path / "run", images8, wait_for=5) as (process, pids):
        os.kill(pids[rank], number)
        output, errors = finish(process)
    assert process.returncode == 0 and not errors
    step = int(re.search(r"stopped at step (\d+)", output)[1])
    assert checkpoint_in(tmp_path / "run", step).is_file()
    run(TRAIN, "--resume", tmp_path / "run", "--steps", step + 2)


def test_stop_while_drawing(tmp_path, images8):
    """A stop of one rank while pictures are drawn, which would take an hour: nothing is written, as with one process."""
    perturbed_file(tmp_path / "model.bin", EVERYTHING)
    with started(TRAIN, "--model_weights", tmp_path / "model.bin", "--generate", "--num_samples", 2000, "--sample_steps", 1000,
                 "--processes", 2, "--batch_size", 20, cwd=tmp_path) as process:
        process.stdout.readline(), process.stdout.readline()
        other, = children_of(process)
        wait_until(lambda: is_handled(other, signal.SIGTERM), process)  # it may be late
        os.kill(other, signal.SIGTERM)
        errors = finish(process)[1]
    assert process.returncode == 130 and "nothing was written" in errors and not list(tmp_path.glob("*.png"))


def test_failures_are_told_once(tmp_path, images8, faults):
    """What fails on every rank, or on one, ends all of them with one sentence, however late that is written."""
    data = start_flags(Config(**TOY | dict(batch_size=8)), tmp_path / "none.bin", tmp_path / "run", 5)
    refused(TRAIN, *data, "--processes", 4, says="none.bin")
    refused(TRAIN, *data, "--processes", 4, says="none.bin", env=faults(late=300))
    with running(tmp_path / "full", images8) as (process, _):
        (tmp_path / "full").rename(tmp_path / "unplugged")  # as a disk: the next checkpoint can't be written
        errors = finish(process)[1]
    assert process.returncode == 1 and errors.count("error:") == 1, errors
    assert re.search(r"error: (can't|could not) write \S+/full/checkpoint_", errors), errors  # begun later or before
    assert nothing_is_left(tmp_path)


LAUNCHERS = {
    "torchrun": lambda rank, size, port: {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank,
                                          "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    "srun": lambda rank, size, port: {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size, "SLURM_LOCALID": rank},
    "mpirun": lambda rank, size, port: {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size,
                                        "OMPI_COMM_WORLD_LOCAL_RANK": rank},
}


def launched(name, rank, ranks, port):
    """The environment of a rank that a launcher starts."""
    return os.environ | {key: str(value) for key, value in LAUNCHERS[name](rank, ranks, port).items()}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers(tmp_path, images8, name):
    """What launchers say is read: of several ranks a CPU's program is none, alone it is as ever. See test_gpu.py."""
    flags = start_flags(Config(**TOY | dict(batch_size=8)), images8, tmp_path / "run", 2)
    for rank in (0, 3):
        refused(TRAIN, *flags, says=["started 4 ranks", "--processes 4"], status=2, env=launched(name, rank, 4, 29500))
    assert not (tmp_path / "run").exists()
    assert "ranks" not in run(TRAIN, *flags, env=launched(name, 0, 1, 29500)).stdout


def test_refusals(tmp_path, images8):
    toy = start_flags(Config(**TOY | dict(batch_size=12)), images8, tmp_path / "run", 2)
    refused(TRAIN, *toy, "--processes", 3, says=["3", "2, 4"])
    refused(TRAIN, *toy, "--processes", 8, says=["12 parts, which 8 ranks can't share", "a multiple of 8"])
    refused(TRAIN, *toy, "--processes", 4, "--microbatch", 2, says=["6 parts, which 4 ranks can't share", "a multiple of 8"])
    refused(TRAIN, *toy, "--processes", 65, status=2, says="between 1 and 64")
    refused(TRAIN, *toy, "--gpus", 2, status=2, says="--processes")
    launched = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    refused(TRAIN, *toy, "--processes", 2, status=2, says="a launcher has started 2", env=launched)
    for name, value in (("RANK", "2"), ("RANK", "-1"), ("RANK", "one"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "")):
        refused(TRAIN, *toy, says=[f"{name}={value}"], env=launched | {name: value})
    refused(TRAIN, *toy, says="can't be", env=launched | {"LOCAL_RANK": "2"})
    few = dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)))
    refused(TRAIN, *toy, "--processes", 8, says=["for 8 processes", "ulimit -n"], **few)
    guided = dataclasses.replace(EVERYTHING, batch_size=4)
    refused(TRAIN, *start_flags(guided, images8, tmp_path / "run", 2), "--guidance_scale", 2, "--processes", 4,
            says="--microbatch of 2 or more")
    for _ in range(10):  # whichever rank tells it
        refused(TRAIN, "--generate", "--num_samples", 2, "--seeds", "3x", "--model_weights", perturbed(tmp_path), "--processes", 8,
                status=2, says="--seeds 3x")
    assert nothing_is_left(tmp_path)
    assert not (tmp_path / "run").exists()


def test_dry_run(images8):
    """Memory of a rank, which shrinks with their number, and what travels."""
    toy = ("--preset", "unet64", "--optimizer", "adamw", "--dry_run", "--microbatch", 4, "--batch_size", 16)
    sizes = []
    for ranks in (1, 4):
        output = run(TRAIN, *toy, "--processes", ranks).stdout
        sizes.append(float(re.search(r"scratch; ([\d.]+) MB in all", output)[1]))
        assert ("each of 4 ranks has this memory and up to 4 images of a step, for which it sends 62." in output) == (ranks > 1)
    assert sizes[1] < sizes[0]


def perturbed(folder):
    """A file of weights."""
    perturbed_file(folder / "model.bin", EVERYTHING)
    return folder / "model.bin"


def test_other_checkpoints(tmp_path, images8, faults):
    """Ranks that find different checkpoints, as on machines that don't share the folder, refuse to go on."""
    folder, log = tmp_path / "run", tmp_path / "log"
    flags = start_flags(Config(**TOY | dict(batch_size=4)), images8, folder, 4, microbatch=2, save_every=2)
    run(TRAIN, *flags)
    checkpoint_in(folder, 4).rename(tmp_path / "later")
    run(TRAIN, "--resume", folder, "--print_config", env=faults(folder, log=log))
    listed = next(number for number, line in enumerate(log.read_text().splitlines()) if "checkpoint_" in line)
    # rank 0, which we have started, looks into the folder when rank 1 has done so, and finds one more there
    script = f"""if grep -q '^PPid:[[:space:]]*{os.getpid()}$' /proc/$PPID/status; then
            until [ -e {tmp_path}/seen ]; do sleep 0.01; done
            [ -e {tmp_path}/put ] || cp {tmp_path}/later {checkpoint_in(folder, 4)}; touch {tmp_path}/put
        else
            echo >> {tmp_path}/calls; [ $(wc -l < {tmp_path}/calls) -le {listed} ] || touch {tmp_path}/seen
        fi"""
    refused(TRAIN, "--resume", folder, "--processes", 2, "--steps", 6, says=["of step 2 and of 4"],
            env=faults(folder, at=1, until=10**6, kind=script))
    assert not checkpoint_in(folder, 6).exists() and nothing_is_left(tmp_path)


def test_reader_gone(tmp_path, images8):
    """Rank 0's output is read by nobody any more: the run stops as a single process does, without an error."""
    with running(tmp_path / "run", images8, ranks=2, wait_for=10) as (process, _):
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(LONG) == 0


def test_stop_of_one_rank_while_drawing(tmp_path, images8):
    """A stop reaches the rank that draws and was not told: the rest of the pictures would take minutes."""
    with running(tmp_path / "run", images8, ranks=2, wait_for=3, num_samples=2000, sample_steps=1000,
                 sample_every=3) as (process, pids):
        os.kill(pids[0], signal.SIGTERM)
        finish(process)
    assert process.returncode == 0
