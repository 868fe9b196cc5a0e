"""Whatever ends a run or comes in its way, nothing is lost and no file is torn: signals, full disks, kills.

tests/faults.c, compiled here and preloaded, makes chosen calls of the program fail.
"""
import concurrent.futures
import contextlib
import fcntl
import json
import os
import pathlib
import pty
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

import unet_io
from harness import (
    LONG, ROOT, SMALL, TRAIN, checkpoint_in, fill, finish, is_delivered, is_handled, read_until, refused, run, start_flags,
    started, wait_until)
from unet_io import Config, flags_of

CONFIG = Config(**SMALL | dict(lr=1e-3, flip=True))
# the networks are so small that a second thread is slower
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1")


def records_in(folder):
    """{(step, kind): value} of metrics.jsonl, which holds whole lines only, and none twice."""
    text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
    assert text == "" or text.endswith("\n"), text[-300:]
    records = {}
    for line in map(json.loads, text.splitlines()):
        kind = "loss" if "loss" in line else "val_loss"
        assert (line["step"], kind) not in records, line
        records[line["step"], kind] = line[kind]
    return records


def checkpoints_in(folder):
    """Steps of the checkpoints in a folder, all of which must be whole."""
    paths = sorted(path for path in folder.glob("*.bin"))
    for path in paths:
        assert re.fullmatch(r"checkpoint_\d{8}\.bin", path.name)
        assert unet_io.read_checkpoint(str(path)).step == int(path.stem[-8:])
    return [int(path.stem[-8:]) for path in paths]


def start_or_resume(flags, folder):
    return [str(word) for word in
            (["--resume", folder] if any(folder.glob("checkpoint_*.bin")) else [*flags, "--out_dir", folder])]


def check_same(folder, calm, steps, without=()):
    """What lies in the folder of a run that was disturbed is what lies in that of one that was not.

    Grids in `without` may be missing.
    """
    assert checkpoint_in(folder, steps).read_bytes() == checkpoint_in(calm, steps).read_bytes()
    assert records_in(folder) == records_in(calm)
    grids, expected = ({path.name: path.read_bytes() for path in place.glob("samples_*")}
                       for place in (folder, calm))
    assert grids == {name: expected[name] for name in expected if name in grids or name not in without}
    assert not list(folder.glob("*.tmp"))


# ----------------------------------------------------------------------------------------------------
# signals

STEPS = 800  # whose lines are more than a pipe of a page holds, see harness.started
STOPPED = dict(log_every=1, save_every=50, sample_every=20, val_every=15, sample_steps=20, num_samples=4)


@pytest.fixture(scope="module")
def calm(tmp_path_factory, images4):
    """(flags, folder) of a run that nobody disturbs, with validation and grids on its way."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    flags = start_flags(CONFIG, images4, folder, STEPS, val_file=images4, **STOPPED)
    run(TRAIN, *flags, env=ENVIRONMENT)
    return flags, folder


MIXED = ["INT INT", "TERM TERM TERM", "HUP HUP", "HUP HUP HUP", "TERM HUP INT", "INT TERM", "HUP INT HUP"]


@pytest.mark.parametrize("signals", MIXED)
def test_signals(tmp_path, calm, faults, signals):
    """Signals within a second, which does not end here, are one request: the step is finished, and a resume goes on."""
    flags, calm_folder = calm
    dice = random.Random(seed := random.randrange(10**6))
    numbers = [getattr(signal, f"SIG{name}") for name in signals.split()]
    folder, pauses = tmp_path / "run", []
    print(f"seed {seed}")
    for part in range(2):  # the second time a resumed run is stopped
        before = max(checkpoints_in(folder), default=0)
        with started(TRAIN, *start_or_resume(flags, folder), env=faults(alarm="never")) as process:
            read_until(process, rb"^step %d/" % (before + dice.randrange(1, STEPS // 4)))
            time.sleep(dice.uniform(0, 0.02))  # now in one part of a step, now in another; as are the pauses below
            for number in numbers:
                process.send_signal(number)
                time.sleep(dice.choice([0, dice.uniform(0, 0.003)]))
            output, errors = finish(process)
        assert process.returncode == 0 and errors == "", (process.returncode, output[-2000:], errors)
        stopped_at = int(re.search(r"\nstopped at step (\d+)", output).group(1))
        assert stopped_at > before and max(checkpoints_in(folder)) == stopped_at
        pauses.append(stopped_at)
    print(f"stopped at {pauses}")
    run(TRAIN, *start_or_resume(flags, folder), env=ENVIRONMENT)
    check_same(folder, calm_folder, STEPS)


@pytest.mark.parametrize("first, second, status", [
    ("INT", "INT", -signal.SIGINT), ("TERM", "INT", -signal.SIGINT), ("HUP", "HUP", 0), ("HUP", "TERM", 0),
    ("TERM", "HUP", 0)])
def test_later_signals(tmp_path, calm, faults, first, second, status):
    """A second Ctrl-C that is meant, a second later, ends the program at once; one hang-up after another never does."""
    later = tmp_path / "later"  # is made when that second is over
    with started(TRAIN, *start_or_resume(calm[0], tmp_path / "run"), env=faults(alarm=later)) as process:
        read_until(process, rb"^step 1/")
        fill(process)
        process.send_signal(getattr(signal, f"SIG{first}"))
        if first == "HUP":  # which no alarm follows
            wait_until(lambda: is_delivered(process, signal.SIGHUP), process)
        else:
            wait_until(later.exists, process)
        process.send_signal(getattr(signal, f"SIG{second}"))
        if status:
            assert process.wait(LONG) == status  # with its output unread, which it would wait for
        errors = finish(process)[1]
    assert process.returncode == status and errors == ""
    if status == 0:
        assert max(checkpoints_in(tmp_path / "run")) < STEPS


def test_timeout(tmp_path, calm, faults):
    """timeout sends its signal to the program and to its group: twice. The run goes on where it was."""
    flags, calm_folder = calm
    dice = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    folder, reached = tmp_path / "run", [0]
    for attempt in range(12):
        command = ["timeout", "1d", TRAIN, *start_or_resume(flags, folder)]
        with started(*command, env=faults(alarm="never")) as process:
            # and as many steps again as a pipe holds, so that the twelfth is not at the run's end
            read_until(process, rb"^step %d/" % (reached[-1] + dice.randrange(1, STEPS // 32)))
            process.send_signal(signal.SIGALRM)  # its time is over
            output, errors = finish(process)
        assert process.returncode == 124 and errors == "", (process.returncode, errors)
        reached.append(int(re.search(r"\nstopped at step (\d+)", output).group(1)))
        assert max(checkpoints_in(folder)) == reached[-1] > reached[-2]
    print(f"ended at {reached}")
    run(TRAIN, *start_or_resume(flags, folder), env=ENVIRONMENT)
    check_same(folder, calm_folder, STEPS)


def read_terminal_until(step, terminal):
    """Read what a run prints in a terminal until it has come to a step."""
    output = b""
    while max(map(int, re.findall(rb"step +(\d+)/", output)), default=0) < step:
        piece = os.read(terminal, 4096)
        assert piece, output.decode()
        output += piece


def wait_for_end(folder):
    """Until no process trains in the folder any more."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def test_closed_terminal(tmp_path, calm):
    """The terminal of a shell that a run is in the foreground of: the shell and the kernel both hang up."""
    flags, calm_folder = calm
    dice = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    reached = []
    for attempt in range(10):
        folder = tmp_path / f"run{attempt}"
        words = [TRAIN, *start_or_resume(flags, folder)]
        pid, ours = pty.fork()
        if not pid:
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], ENVIRONMENT | {"HISTFILE": ""})
        os.write(ours, (" ".join(f"'{word}'" for word in words) + "\n").encode())
        read_terminal_until(dice.randrange(1, STEPS // 8), ours)
        time.sleep(dice.uniform(0, 0.005))  # now in one part of a step, now in another
        os.close(ours)
        os.waitpid(pid, 0)
        wait_for_end(folder)
        reached.append(max(checkpoints_in(folder), default=0))
        assert reached[-1] == max(step for step, _ in records_in(folder))  # no step is done that is not saved
        run(TRAIN, *start_or_resume(flags, folder), env=ENVIRONMENT)
        check_same(folder, calm_folder, STEPS)
    print(f"ended at {reached}")


def test_stops_of_train_unet_py(tmp_path, images4, faults):
    """Two signals within a second, or a terminal that is closed, finish the step and save, as in the program."""
    for name, stop in (("twice", lambda pid, _: [os.kill(pid, signal.SIGINT) for _ in range(2)]),
                       ("closed", lambda _, terminal: os.close(terminal))):
        flags = [*flags_of(CONFIG), "--data_file", images4, "--out_dir", tmp_path / name, "--log_every", 1]
        pid, terminal = pty.fork()
        if not pid:
            os.execve(sys.executable, [sys.executable, str(ROOT / "train_unet.py"), *map(str, flags)],
                      faults(alarm="never"))
        read_terminal_until(3, terminal)
        stop(pid, terminal)
        with contextlib.suppress(OSError):  # as far as there is somebody to tell
            while os.read(terminal, 4096):
                pass
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, name
        steps = [step for step, _ in records_in(tmp_path / name)]
        assert checkpoints_in(tmp_path / name) == [len(steps)] and steps == list(range(1, len(steps) + 1))


def test_later_signals_of_train_unet_py(tmp_path, images4, faults):
    """A second later, another Ctrl-C ends it at once, as in the program."""
    flags = [*flags_of(CONFIG), "--data_file", images4, "--out_dir", tmp_path / "run", "--log_every", 1]
    with started(sys.executable, ROOT / "train_unet.py", *flags, env=faults(alarm=tmp_path / "later")) as process:
        read_until(process, rb"^step +3/")
        fill(process)
        process.send_signal(signal.SIGTERM)
        # Python calls handlers some time after their signals, and of two that came it calls SIGINT's before SIGALRM's
        wait_until(lambda: not is_handled(process.pid, signal.SIGINT), process)
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == -signal.SIGINT
    assert not checkpoints_in(tmp_path / "run")


# ----------------------------------------------------------------------------------------------------
# faults

def test_lines_of_train_unet_py(tmp_path, images4):
    """Lines of steps that are done again, and one that was cut short, are dropped on resume."""
    flags = [*flags_of(CONFIG), "--data_file", images4, "--out_dir", tmp_path, "--log_every", 1,
             "--sample_every", 0, "--device", "cpu"]
    run(sys.executable, ROOT / "train_unet.py", *flags, "--steps", 4, "--save_every", 2, env=ENVIRONMENT)
    before = records_in(tmp_path)
    checkpoint_in(tmp_path, 4).unlink()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    run(sys.executable, ROOT / "train_unet.py", *flags, "--steps", 4, "--resume", env=ENVIRONMENT)
    assert records_in(tmp_path) == before and sorted(before) == [(step, "loss") for step in range(1, 5)]


def test_who_is_blamed():
    """An error without a file's name is blamed on standard output only where that can't be written."""
    script = "import os, unet_io; unet_io.run_script(lambda: {})"
    for act, says in (("os.read(99, 1)", "the operating system: Bad file descriptor"),
                      ("print('x')", "standard output: No space left on device")):
        with open("/dev/full", "w") as full:
            result = subprocess.run([sys.executable, "-c", script.format(act)], text=True, cwd=ROOT,
                                    stdout=full if act.startswith("print") else None, stderr=subprocess.PIPE)
        assert (result.returncode, result.stderr) == (1, f"error: {says}\n")


def test_terminal_gone():
    """What a Python program prints into a terminal that was closed is lost, and the program goes on."""
    script = """if True:
        import sys, unet_io
        def main():
            for stream in (sys.stdout, sys.stderr):
                print("before", file=stream)
            sys.stdin.read()
            for stream in (sys.stdout, sys.stderr):
                print("after", file=stream)
            sys.exit(7)
        unet_io.run_script(main)"""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs,
                          cwd=ROOT) as process:
        os.close(theirs)
        output = b""
        while output.count(b"before") < 2:
            output += os.read(ours, 4096)
        os.close(ours)
        process.stdin.close()
        assert process.wait(LONG) == 7


SHORT_STEPS = 5
SHORT = dict(log_every=1, save_every=2, sample_every=3, val_every=3)


@pytest.fixture(scope="module")
def short(tmp_path_factory, images4, faults):
    """(flags, folder) of a short run; in the folder `calm`, and `stopped`, killed in the save of step 4."""
    base = tmp_path_factory.mktemp("short")
    flags = start_flags(CONFIG, images4, base / "calm", SHORT_STEPS, val_file=images4, **SHORT)
    calls_of(faults, base / "calm", flags, base / "started.log")
    log = (base / "started.log").read_text().splitlines()
    save = [int(line.split()[0]) for line in log if re.search(r" rename .*checkpoint_00000004", line)][0]
    run(TRAIN, *flags, "--out_dir", base / "stopped", status=-signal.SIGKILL,
        env=faults(base / "stopped", at=save, kind="die"))
    assert checkpoints_in(base / "stopped") == [2] and len(list((base / "stopped").glob("*.tmp"))) == 1
    return flags, base


def calls_of(faults, folder, words, log):
    """The calls of a run that concern its folder: [(number, function, file's name)]"""
    run(TRAIN, *words, env=faults(folder, log=log))
    lines = [line.split(" ", 2) for line in log.read_text().splitlines()]
    return [(int(number), function, pathlib.Path(path).name) for number, function, path in lines]


def chosen(calls, dice, most=6):
    """Every call's number; of the many writes into a checkpoint, which are all alike, and of readdir some."""
    numbers = [number for number, function, _ in calls if function not in ("fwrite", "fread", "readdir")]
    for kind in ("fwrite", "fread", "readdir"):
        alike = [number for number, function, _ in calls if function == kind]
        numbers += dice.sample(alike, min(most, len(alike)))
    return sorted(numbers)


def sentences(errors):
    assert all(re.match(r"(error|note): .{10,}", line) for line in errors.splitlines()), errors
    return [line for line in errors.splitlines() if line.startswith("error: ")]


STOP = "kill -TERM $PPID; kill -HUP $PPID; kill -TERM $PPID"  # at this very call


@pytest.mark.parametrize("resumed", [False, True], ids=["train", "resume"])
@pytest.mark.parametrize("kind", ["once", "full", "die", STOP],
                         ids=["fails", "full disk", "killed", "stopped"])
def test_faults(tmp_path, short, faults, kind, resumed):
    """A fault at each call: a sentence or a note, nothing torn, nothing lost, and afterwards the same bits.

    Once ENOSPC or EIO; a disk that is full from there on; a kill; a stop.
    """
    flags, base = short
    dice = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    if resumed:
        shutil.copytree(base / "stopped", tmp_path / "counted")
    words = ["--resume", tmp_path / "counted"] if resumed else [*flags, "--out_dir", tmp_path / "counted"]
    calls = calls_of(faults, tmp_path / "counted", words, tmp_path / "log")
    names = {number: f"{number}: {function} {name}" for number, function, name in calls}
    before = {key: value for key, value in records_in(base / "stopped").items() if resumed and key[0] <= 2}

    def one(number):
        folder, log = tmp_path / f"run{number}", tmp_path / f"log{number}"
        if resumed:
            shutil.copytree(base / "stopped", folder)
        command = [TRAIN, *start_or_resume(flags, folder)]
        fault = dict(at=number, log=log, kind=kind, until=10**6 if kind == "full" else number)
        fault["kind"] = ["ENOSPC", "EIO"][number % 2] if kind == "once" else kind
        result = subprocess.run(command, env=faults(folder, **fault), capture_output=True, text=True)
        assert len(log.read_text().splitlines()) >= number
        errors = sentences(result.stderr)
        ends = {"die": (-signal.SIGKILL,), STOP: (0,)}.get(kind, (0, 1))
        assert result.returncode in ends and len(errors) == (result.returncode == 1), result
        if folder.exists():
            done = checkpoints_in(folder)
            assert not resumed or 2 in done or (4 in done and 5 in done), done
            assert not resumed or before.items() <= records_in(folder).items()
            if kind == "once" and "unlink" not in names[number]:
                assert resumed or not list(folder.glob("*.tmp"))
        if result.returncode == 0 and kind == "once":
            found = records_in(folder)
            assert found == records_in(base / "calm"), result.stderr
        run(TRAIN, *start_or_resume(flags, folder), env=ENVIRONMENT)
        failed = re.findall(r"^note: .*(samples_\d{8}\.png)", result.stderr, re.M)
        check_same(folder, base / "calm", SHORT_STEPS, without=failed)
        shutil.rmtree(folder)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # programs that wait for the disk more than they compute
        futures = {number: pool.submit(one, number) for number in chosen(calls, dice)}
    found = {names[number]: future.exception() for number, future in futures.items()}
    wrong = [f"{name}: {what}" for name, what in found.items() if what]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind, at, until", [
    ("full", 3, 3), ("full", 3, 5), ("full", 4, 30), ("full", 3, 10**6), ("short", 3, 5), ("short", 3, 30)])
def test_metrics_on_a_disk_that_is_full_for_a_while(tmp_path, images4, faults, kind, at, until):
    """One note; when there is room again the lines go on, all of them, and never one glued to another.

    Where not even the half of a line can be taken back ("short"), its other half comes next.
    """
    folder, steps = tmp_path / "run", 40
    flags = start_flags(CONFIG, images4, folder, steps, log_every=1, save_every=0, sample_every=0)
    environment = faults(folder / "metrics.jsonl", at=at, until=until, kind=kind)
    errors = run(TRAIN, *flags, env=environment).stderr.splitlines()
    found = [step for step, _ in records_in(folder)]
    if until < 10**6:
        assert found == list(range(1, steps + 1))
    else:
        assert found == list(range(1, len(found) + 1)) and len(found) < steps
        assert re.search(rf"metrics\.jsonl lacks {steps - len(found)} lines", errors.pop())
    assert len(errors) == (until > at)  # the rest of a short write may well be taken
    assert not errors or re.match(r"note: .*metrics\.jsonl.*No space left", errors[0])


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.txt"])
@pytest.mark.parametrize("how", ["a fault", "a loop of links", "a folder"])
def test_unreadable_old_files(tmp_path, short, faults, name, how):
    """Only a file that is not there is empty; nothing is replaced where one can't be read."""
    folder = tmp_path / "run"
    shutil.copytree(short[1] / "stopped", folder)
    for stale in folder.glob("*.tmp"):
        stale.unlink()
    environment = ENVIRONMENT
    if how == "a fault":
        environment = faults(folder / name, at=1, until=10**6, kind="EIO")
    else:
        (folder / name).unlink()
        (folder / name).symlink_to(name) if how == "a loop of links" else (folder / name).mkdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    refused(TRAIN, "--resume", folder, says=[folder / name], env=environment)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert (folder / name).is_symlink() == (how == "a loop of links")


def test_old_files_that_are_gone(tmp_path, short):
    """Then the run begins new ones."""
    shutil.copytree(short[1] / "stopped", tmp_path / "run")
    for name in ("metrics.jsonl", "config.txt"):
        (tmp_path / "run" / name).unlink()
    run(TRAIN, "--resume", tmp_path / "run", env=ENVIRONMENT)
    assert {step for step, _ in records_in(tmp_path / "run")} == {3, 4, 5}
    assert (tmp_path / "run/config.txt").exists()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path, short, closed):
    """What the program prints does not end up in its files."""
    flags, base = short
    words = ["sh", "-c", f'exec "$0" "$@" {closed}', TRAIN, *start_or_resume(flags, tmp_path / "run")]
    run(*words, env=ENVIRONMENT)
    check_same(tmp_path / "run", base / "calm", SHORT_STEPS)


def test_file_size_limit(tmp_path, short):
    """Past ulimit -f the kernel would end the program without a word."""
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))

    flags, base = short
    folder = tmp_path / "run"
    refused(TRAIN, *flags, "--out_dir", folder, says=["checkpoint_00000002.bin", "too large"],
            env=ENVIRONMENT, preexec_fn=limit)
    assert not list(folder.glob("*.tmp")) and sorted(step for step, _ in records_in(folder)) == [1, 2]


# ----------------------------------------------------------------------------------------------------
# grids, folders, names

def test_grids_are_made_up_for(tmp_path, short):
    """A grid that was due at the checkpoint's step, or at the run's end, and is not there is drawn first."""
    flags, base = short
    for step in (3, 5):
        folder, name = tmp_path / f"run{step}", f"samples_{step:08d}.png"
        run(TRAIN, *flags, "--out_dir", folder, "--save_every", 3, env=ENVIRONMENT)
        (folder / name).unlink()
        for later in range(step + 1, 6):
            checkpoint_in(folder, later).unlink(missing_ok=True)
        assert name in run(TRAIN, "--resume", folder, "--steps", 6, env=ENVIRONMENT).stdout
        checkpoint_in(folder, 6).unlink()
        assert name not in run(TRAIN, "--resume", folder, "--steps", 6, env=ENVIRONMENT).stdout
        assert (folder / name).read_bytes() == (base / "calm" / name).read_bytes()


def test_grid_that_can_not_be_written(tmp_path, short):
    """A note, and the run goes on."""
    flags, base = short
    (tmp_path / "run/samples_00000003.png").mkdir(parents=True)
    result = run(TRAIN, *flags, "--out_dir", tmp_path / "run", env=ENVIRONMENT)
    assert re.fullmatch(r"note: .*samples_00000003\.png.*\n", result.stderr)
    assert checkpoint_in(tmp_path / "run", 5).read_bytes() == checkpoint_in(base / "calm", 5).read_bytes()
    assert (tmp_path / "run/samples_00000005.png").exists()


@pytest.mark.parametrize("resumed", [False, True], ids=["train", "resume"])
def test_another_run_meanwhile(tmp_path, short, faults, resumed):
    """Between the first look into the folder and the lock another process has trained there."""
    flags, base = short
    folder, counted = tmp_path / "run", tmp_path / "counted"
    if resumed:
        shutil.copytree(base / "stopped", folder), shutil.copytree(base / "stopped", counted)
    calls = calls_of(faults, counted, start_or_resume(flags, counted), tmp_path / "log")
    lock = next(number for number, function, _ in calls if function == "flock")
    copy = f"mkdir -p '{folder}' && cp '{checkpoint_in(base / 'calm', 5)}' '{folder}'"
    refused(TRAIN, *start_or_resume(flags, folder), says=[f"{folder} already holds a run", "--resume"],
            env=faults(folder, at=lock, kind=copy))
    assert checkpoint_in(folder, 5).read_bytes() == checkpoint_in(base / "calm", 5).read_bytes()
    assert resumed or not (folder / "config.txt").exists()


def test_another_run_while_a_checkpoint_is_read(tmp_path, short, faults):
    """Reading a large one takes seconds, in which the process before may save its last one and end."""
    flags, base = short
    folder, counted = tmp_path / "run", tmp_path / "counted"
    shutil.copytree(base / "stopped", folder), shutil.copytree(base / "stopped", counted)
    calls = calls_of(faults, counted, ["--resume", counted], tmp_path / "log")
    first = next(number for number, *call in calls if call == ["fread", "checkpoint_00000002.bin"])
    refused(TRAIN, "--resume", folder, says=[f"{folder} already holds a run", "--resume"],
            env=faults(folder, at=first, kind=f"cp '{checkpoint_in(base / 'calm', 5)}' '{folder}'"))
    assert checkpoint_in(folder, 5).read_bytes() == checkpoint_in(base / "calm", 5).read_bytes()


def test_no_lock_to_be_had(tmp_path, short, faults):
    """As on some network's file systems: a note, and the run goes on."""
    flags, base = short
    counted = tmp_path / "counted"
    calls = calls_of(faults, counted, start_or_resume(flags, counted), tmp_path / "log")
    lock = next(number for number, function, _ in calls if function == "flock")
    result = run(TRAIN, *flags, "--out_dir", tmp_path / "run",
                 env=faults(tmp_path / "run", at=lock, kind="ENOSPC"))
    assert re.fullmatch(r"note: .*run can't be locked.*\n", result.stderr)
    check_same(tmp_path / "run", base / "calm", SHORT_STEPS)


OTHER_NAMES = ["checkpoint_1.bin", "checkpoint_123456789.bin", "checkpoint_-0000001.bin",
               "checkpoint_ 0000001.bin", "checkpoint_0000000x.bin", "checkpoint_00000009.bin.bak",
               "notes.tmp", "notes.2024-11.tmp"]


def test_other_names(tmp_path, short):
    """Names of checkpoints have eight digits; whatever else lies in the folder is left alone."""
    flags, base = short
    folder = tmp_path / "run"
    folder.mkdir()
    for name in OTHER_NAMES:
        (folder / name).write_bytes(checkpoint_in(base / "calm", 5).read_bytes())
    run(TRAIN, *flags, "--out_dir", folder, "--keep", 1, env=ENVIRONMENT)  # it holds no run
    assert sorted(path.name for path in folder.glob("*.bin") if path.name not in OTHER_NAMES) == [
        "checkpoint_00000005.bin"]
    checkpoint_in(folder, 5).unlink()
    refused(TRAIN, "--resume", folder, says=["there is no checkpoint", folder])
    for name in OTHER_NAMES:
        assert (folder / name).read_bytes() == checkpoint_in(base / "calm", 5).read_bytes()


def stale_files(folder, target):
    """Temporary files of killed writers, and of one that is at work; returns the latter, open."""
    for number in (1, 2):
        (folder / f"{target}.unet-{10**7 + number}-1.tmp").write_text("half")
    busy = open(folder / f"{target}.unet-{10**7}-1.tmp", "wb")
    fcntl.flock(busy, fcntl.LOCK_EX)
    return busy


def test_temporary_files(tmp_path, short):
    """They never go through a link; those of killed processes go, one that is being written stays."""
    flags, base = short
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "precious").write_text("precious")
    linked = [folder / f"{name}.tmp" for name in ("config.txt", "metrics.jsonl", "checkpoint_00000002.bin")]
    for link in linked:
        link.symlink_to(tmp_path / "precious")
    with stale_files(folder, "checkpoint_00000003.bin") as busy:
        run(TRAIN, *flags, "--out_dir", folder, env=ENVIRONMENT)
        kept = [folder / busy.name, *linked]
        assert sorted(folder.glob("*.tmp")) == sorted(kept)
    assert (tmp_path / "precious").read_text() == "precious"
    run(TRAIN, "--resume", folder, "--steps", 6, env=ENVIRONMENT)  # nobody writes it any more
    assert sorted(folder.glob("*.tmp")) == sorted(linked)

    with stale_files(tmp_path, "grid.png") as busy:
        (tmp_path / "grid.png.tmp").symlink_to(tmp_path / "precious")
        run(TRAIN, "--model_weights", checkpoint_in(base / "calm", 5), "--generate", "--num_samples", 1, "--sample_steps", 1,
            "--output_name", tmp_path / "grid.png", env=ENVIRONMENT)
        assert sorted(path.name for path in tmp_path.glob("*.tmp")) == [
            "grid.png.tmp", pathlib.Path(busy.name).name]
    assert (tmp_path / "precious").read_text() == "precious"


def test_temporary_files_of_python(tmp_path):
    """The same in Python."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "x.bin.tmp").symlink_to(tmp_path / "precious")
    with stale_files(tmp_path, "x.bin") as busy:
        for text in (b"first", b"second"):
            with unet_io.replacing(tmp_path / "x.bin") as file:
                with unet_io.replacing(tmp_path / "x.bin") as other:
                    file.write(text), other.write(b"another's")
        assert (tmp_path / "x.bin").read_bytes() == b"second"
        with pytest.raises(unet_io.UserError), unet_io.replacing(tmp_path / "x.bin") as file:
            file.write(b"third")
            raise OSError(28, "No space left on device")
        assert (tmp_path / "x.bin").read_bytes() == b"second"
        assert sorted(path.name for path in tmp_path.glob("*.tmp")) == [
            "x.bin.tmp", pathlib.Path(busy.name).name]
    assert (tmp_path / "precious").read_text() == "precious"
