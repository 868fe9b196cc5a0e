"""On a GPU: the other tests once more, with the program built for it, and what only it can show."""
import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import subprocess

import numpy as np
import pytest
import torch

import harness
import test_command_line
import test_files
import test_pictures
import test_resume
import test_training
import test_flag_values
import test_reference
import train_unet
import unet_io
from harness import (
    GPU, LONG, QUICK, RESUMED, ROOT, SANITIZERS, SMALL, TOY, TRAIN, TRAINING, check_gpu_gradients, checkpoint_in,
    losses_in, on_gpu, perturbed_file, picture, refused, run, sanitized, start_flags, write_toy_images)
from unet_io import Config, flags_of

AGAIN = {  # function of which module, and its last arguments; those before them are fixtures
    "bf16": [(test_resume, "test_resume", {}), (test_resume, "test_resume_with_more_steps"),
             (test_resume, "test_stopped", signal.SIGINT), (test_resume, "test_free_on_resume"),
             (test_resume, "test_damaged_checkpoint_is_passed_over"), (test_resume, "test_reader_gone"),
             (test_resume, "test_best_validation_survives"), (test_resume, "test_resume_with_everything"),
             (test_files, "test_checkpoint_round_trip"), (test_reference, "test_initial_weights", 5),
             (test_command_line, "test_run_folders"), (test_command_line, "test_nan_keeps_the_checkpoint"),
             (test_command_line, "test_config_reproduces"), (test_command_line, "test_time_of_a_dry_run")],
    "fp32": [*((test_training, "test_training", name) for name in TRAINING),
             (test_training, "test_validation_loss"), (test_training, "test_decay_of_matrices_only"),
             (test_training, "test_clipping"), (test_training, "test_skipped_outliers"),
             (test_resume, "test_resume_with_everything"), (test_files, "test_resume_in_pytorch"),
             (test_resume, "test_resume", dict(microbatch=2, min_snr_gamma=5)),
             *((test_pictures, "test_pictures", name) for name in test_pictures.PICTURES),
             (test_pictures, "test_pictures_from_averaged_weights"), (test_pictures, "test_seeds_and_strips"),
             (test_pictures, "test_interpolation"), (test_pictures, "test_drawing_while_training"),
             (test_flag_values, "test_pictures_that_are_no_numbers"), (test_flag_values, "test_no_grid")],
}


@pytest.mark.parametrize("precision, module, name, arguments", [
    pytest.param(precision, module, name, arguments, id=f"{precision} {name[5:]} {arguments}")
    for precision, tests in AGAIN.items() for module, name, *arguments in tests])
def test_gpu(monkeypatch, request, precision, module, name, arguments):
    for user in (harness, module):
        monkeypatch.setattr(user, "TRAIN", on_gpu(precision))
    again = getattr(module, name)
    names = again.__code__.co_varnames[:again.__code__.co_argcount]
    fixtures = [request.getfixturevalue(name) for name in names[:len(names) - len(arguments)]]
    again(*fixtures, *arguments)


def test_gpu_missing():
    """A GPU that can't be seen: one sentence that says how to build for the CPU."""
    hidden = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    refused(on_gpu("bf16"), "--dry_run", says=["finds none", "DEVICE=cpu"], env=hidden)


def test_gpu_refuses_what_it_can_not(tmp_path):
    refused(on_gpu("bf16"), "--num_head_channels", 8, "--dry_run", says="heads of 8 channels")


def test_gpu_too_little_memory(tmp_path):
    """What is needed, what is free, and a batch size; with that one it runs."""
    flags = ["--data_file", ROOT / "data/emoji.bin", *QUICK]
    message = refused(on_gpu("bf16"), "--batch_size", 60000, *flags, "--out_dir", tmp_path / "no",
                      says=["this run needs", "of memory", "are free"])
    fits = re.search(r"--batch_size (\d+) would fit", message)
    run(on_gpu("bf16"), "--batch_size", fits[1], *flags, "--out_dir", tmp_path / "fits", "--steps", 2)


def test_gpu_same_bits(tmp_path):
    """The default model: two runs, and one that was stopped and resumed, end with the same bits."""
    flags = ["--data_file", ROOT / "data/emoji.bin", "--batch_size", 16, "--sample_every", 0, *QUICK]
    for name in ("first", "second"):
        run(on_gpu("bf16"), *flags, "--steps", 20, "--save_every", 10, "--out_dir", tmp_path / name)
    (tmp_path / "parts").mkdir()
    shutil.copy(checkpoint_in(tmp_path / "second", 10), tmp_path / "parts")
    run(on_gpu("bf16"), "--resume", tmp_path / "parts")
    first, second, parts = (checkpoint_in(tmp_path / name, 20).read_bytes()
                            for name in ("first", "second", "parts"))
    assert first == second and first == parts


@pytest.mark.parametrize("precision", GPU)
def test_gpu_to_cpu_and_back(tmp_path, images8, precision):
    """3 steps on the GPU, 3 on the CPU, 3 on the GPU: the losses of 9 on the GPU."""
    gpu, folder = on_gpu(precision), tmp_path / "parts"
    if "train_unet on the CPU" not in run(TRAIN, "--dry_run").stdout:
        pytest.skip(f"{TRAIN} is no build for the CPU: name one by TRAIN_UNET")
    flags = dict(save_every=3, sample_every=0, log_every=1, keep=9)
    run(gpu, *start_flags(RESUMED, images8, tmp_path / "whole", 9, **flags))
    folder.mkdir()
    shutil.copy(checkpoint_in(tmp_path / "whole", 3), folder)
    run(TRAIN, "--resume", folder, "--steps", 6)
    run(gpu, "--resume", folder, "--steps", 9)
    ours, theirs = losses_in(folder), losses_in(tmp_path / "whole")
    worst = np.max([abs(loss / theirs[step] - 1) for step, loss in ours.items()])
    print(f"largest relative difference {worst:.2g}")
    assert sorted(ours) == [4, 5, 6, 7, 8, 9] and worst < (2e-5 if precision == "fp32" else 0.02)


def test_gpu_training_of_default_model(tmp_path):
    """20 steps in fp32 on the GPU, on the CPU and in PyTorch: the same losses to 1e-5."""
    config, steps, data = Config(batch_size=2, seed=3), 20, ROOT / "data/emoji.bin"
    gpu = on_gpu("fp32")
    model = perturbed_file(tmp_path / "start.bin", config)
    for name, program in (("gpu", gpu), ("cpu", TRAIN)):
        run(program, *flags_of(config), "--model_weights", tmp_path / "start.bin", "--data_file", data,
            "--steps", steps, "--log_every", 1, "--save_every", 0, "--out_dir", tmp_path / name, *QUICK)
    gpu, cpu = ([losses_in(tmp_path / name)[step] for step in range(1, steps + 1)] for name in ("gpu", "cpu"))
    theirs = train_unet.replay(model, unet_io.read_images(str(data)), config, steps)
    pairs = (gpu, theirs), (cpu, theirs), (gpu, cpu)
    worst = [np.abs(np.array(a) / np.array(b) - 1).max() for a, b in pairs]
    print(f"largest relative differences: GPU, CPU from PyTorch, GPU from CPU: {worst}")
    assert all(value < 1e-5 for value in worst)


GRADIENTS = {
    "default": Config(batch_size=4, ema_rate=0.0),
    "largest images": Config(image_size=1024, num_channels=32, norm_groups=8, channel_mult=(1, 1, 1, 1, 1, 1),
                             num_res_blocks=1, attention_resolutions=(), batch_size=1, ema_rate=0.0),
    "attention of 64 x 64": Config(image_size=256, num_channels=32, norm_groups=8, channel_mult=(1, 1, 2),
                                   num_res_blocks=1, attention_resolutions=(64,), batch_size=2, ema_rate=0.0),
    "grey, with classes": Config(image_size=32, in_channels=1, num_channels=64, channel_mult=(1, 2),
                                 batch_size=16, class_cond=True, num_classes=3, cond_drop_prob=0.2,
                                 ema_rate=0.0),
    "scaled and shifted": Config(image_size=32, channel_mult=(1, 2), batch_size=8, use_scale_shift_norm=True,
                                 resblock_updown=True, learn_sigma=True, attention_resolutions=(16,),
                                 num_heads=4, rescale_timesteps=True, ema_rate=0.0, seed=31),
    "learned resampling": Config(image_size=32, channel_mult=(1, 2, 3), batch_size=4, conv_resample=True,
                                 num_channels=128, num_heads=2, num_heads_upsample=3, ema_rate=0.0, seed=32,
                                 attention_resolutions=(8,), predict="v"),
    "narrow first level": Config(image_size=32, num_channels=128, channel_mult=(0.25, 0.75, 1.5), batch_size=4,
                                 norm_groups=16, ema_rate=0.0, seed=34),
    "heads of 256": Config(image_size=32, num_channels=256, channel_mult=(1, 1), num_res_blocks=1, num_heads=1,
                           attention_resolutions=(32, 16), batch_size=2, ema_rate=0.0, seed=33),
    "most images": Config(**SMALL | dict(num_head_channels=16, batch_size=65535, ema_rate=0.0)),
}


@pytest.mark.parametrize("precision", GPU)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gpu_gradients(tmp_path, name, precision):
    data = ROOT / "data/emoji.bin"
    if GRADIENTS[name].image_size != 64:
        size, channels = GRADIENTS[name].image_size, GRADIENTS[name].in_channels
        data = write_toy_images(tmp_path / "images.bin", size=size, channels=channels)
    checked = check_gpu_gradients(on_gpu(precision), precision, perturbed_file, GRADIENTS[name], tmp_path, data)
    assert name != "default" or len(checked) == 326 + 2 * 2 * 11


def test_gpu_pictures_in_bf16(tmp_path):
    """DDIM of trained weights: ours are less than twice as far from PyTorch's in fp32 as autocast's are."""
    data, weights = ROOT / "data/faces.bin", checkpoint_in(tmp_path / "run", 300)
    run(on_gpu("bf16"), "--preset", "tiny", "--data_file", data, "--steps", 300, "--lr_schedule", "constant",
        "--out_dir", tmp_path / "run", *QUICK)
    run(on_gpu("bf16"), "--generate", "--num_samples", 8, "--model_weights", weights, "--sample_steps", 20, "--seed", 40,
        "--output_name", tmp_path / "a.png")
    model, _ = train_unet.load_model(str(weights))
    seeds = range(40, 48)
    exact = train_unet.sample(model, seeds, sample_steps=20)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = train_unet.sample(model, seeds, sample_steps=20)
    grids = []
    for name, pictures in (("b", exact), ("c", rounded)):
        unet_io.save_grid(str(tmp_path / f"{name}.png"), unet_io.to_uint8(pictures.numpy()))
        grids.append(picture(tmp_path / f"{name}.png"))
    ours, theirs = (np.abs(grid - grids[0]).mean() for grid in (picture(tmp_path / "a.png"), grids[1]))
    print(f"mean difference of a pixel: {ours:.2f} of 255, PyTorch in bf16 {theirs:.2f}")
    assert grids[0].std() > 20 and ours < 2 * theirs + 0.5


def nccl_library():
    """NCCL's own file, as the benchmark finds it."""
    return unet_io.import_from_dev("bench/benchmark").nccl_library()


def start_ranks(through, ranks, folder, *flags):
    """Processes, one a rank, that a launcher would start, or one that starts the others."""
    folder.mkdir(exist_ok=True)
    words = [on_gpu("bf16"), *map(str, flags)]
    options = dict(cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if through == "NCCL":
        return [subprocess.Popen([*words, "--gpus", str(ranks)], **options,
                                 env=os.environ | dict(NCCL_LIBRARY=nccl_library()))]
    return [subprocess.Popen(words, **options, env=os.environ | launcher_of(rank, ranks, str(STAND_IN)))
            for rank in range(ranks)]


def launcher_of(rank, ranks, library):
    return dict(NCCL_LIBRARY=library, MASTER_PORT="29517", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))


STAND_IN = ROOT / "build/one_gpu_nccl.so"
OF_RANKS = ["--data_file", ROOT / "data/emoji.bin", "--out_dir", "run", "--batch_size", 32, "--microbatch", 8,
            "--steps", 6, "--save_every", 3, "--val_file", ROOT / "data/emoji.bin", "--val_every", 6, "--flip",
            "--dropout", 0.1, "--grad_clip", 1, "--num_samples", 20, "--sample_steps", 2]


@pytest.mark.parametrize("through", ["stand-in", "NCCL"])
def test_gpu_ranks(tmp_path, through):
    """1, 2 and 4 ranks: equal checkpoints, grids and pictures; what two began goes on alone and on more; a killed
    rank ends the other. Ranks share a GPU by a stand-in for NCCL, or each has its own, as far as there are any."""
    most = torch.cuda.device_count() if through == "NCCL" else 4
    if most < 2 or through != "NCCL" and not STAND_IN.exists():
        pytest.skip("one GPU, or the stand-in is not built")
    numbers = [ranks for ranks in (1, 2, 4) if ranks <= most]

    def finish(ranks):
        told = [process.communicate(timeout=LONG) for process in ranks]
        assert [process.returncode for process in ranks] == [0] * len(ranks), told

    draws = ["--model_weights", "run/checkpoint_00000006.bin", "--generate", "--num_samples", 50, "--sample_steps", 3]
    for ranks in numbers:
        folder = tmp_path / str(ranks)
        finish(start_ranks(through, ranks, folder, *OF_RANKS))
        finish(start_ranks(through, ranks, folder, *draws))
        found = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*")
                 if path.suffix in (".bin", ".png")}
        assert len(found) == 4 and (ranks == 1 or found == alone)
        alone = found
    for ranks in (1, numbers[-1]):
        (tmp_path / f"2 to {ranks}" / "run").mkdir(parents=True)
        shutil.copy(checkpoint_in(tmp_path / "2/run", 3), tmp_path / f"2 to {ranks}" / "run")
        finish(start_ranks(through, ranks, tmp_path / f"2 to {ranks}", "--resume", "run"))
        assert checkpoint_in(tmp_path / f"2 to {ranks}" / "run", 6).read_bytes() == \
            checkpoint_in(tmp_path / "1/run", 6).read_bytes()
    for victim in (0, 1):
        ranks = start_ranks(through, 2, tmp_path / f"killed {victim}", *OF_RANKS[:-1], 1, "--steps", 10**6,
                            "--log_every", 1)
        next(line for line in ranks[0].stdout if line.startswith("step 3/"))
        pids = [process.pid for process in ranks]
        if through == "NCCL":
            pids += map(int, pathlib.Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split())
        os.kill(pids[victim], signal.SIGKILL)
        if through != "NCCL":
            ranks[victim].wait(LONG)  # as its launcher would
        told = "".join(process.communicate(timeout=LONG)[1] for process in ranks)
        assert (f"rank {victim} failed or was killed" if through == "NCCL" else "NCCL reported error 6") in told
        assert [process.returncode for process in ranks] == [-9 if rank == victim else 1 for rank in range(len(ranks))]


@pytest.mark.parametrize("tool", SANITIZERS)
def test_gpu_ranks_sanitized(tmp_path, tool):
    """Two GPUs train a small model and draw with it under a tool of compute-sanitizer; NCCL's own kernels are left out."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    flags = [on_gpu("bf16"), *start_flags(Config(**TOY | dict(batch_size=8, num_channels=64, grad_clip=1.0)),
                                          write_toy_images(tmp_path / "images.bin"), tmp_path / "run", 4),
             "--microbatch", 2]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: sanitized(tool, *flags, exclude="nccl", env=os.environ | launcher_of(
            rank, 2, nccl_library())), range(2)))
