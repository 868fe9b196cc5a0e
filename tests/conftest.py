"""Fixtures of all tests, and which of them run one after the other."""
import importlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from harness import LONG, ROOT, run, write_toy_images

# These begin first, so that no long one is left to the end.
LONGEST = ["test_sanitized", "test_layers_of_other_processors", "test_kills", "test_same_bits", "test_program",
           "test_official_weights", "test_checkpoints_of_the_authors", "test_profile", "test_summary",
           "test_benchmark_on_a_cpu", "test_closed_terminal", "test_killed_twenty_times"]

# What shares a GPU, or is timed on it, is one group: a single worker runs it. Without a GPU, so are PyTorch's operators,
# so that they are built once.
ON_A_GPU = ["test_gpu.py", "test_torch_ops.py", "test_dev.py", "test_gpu_"] if shutil.which("nvidia-smi") else [
    "test_torch_ops.py"]


# What only `make test ALL=1` runs, besides whole files: what takes long, and further cases of what others show. A
# name means every case of a test.
ALL_ONLY_FILES = {"test_dev", "test_dit", "test_planted", "test_quality", "test_records", "test_signals", "test_torch_ops"}
ALL_ONLY = {
    "test_command_line": {"test_dry_run", "test_summary", "test_time_of_a_dry_run"},
    "test_files": {"test_damaged_files_in_python"},
    "test_flag_values": {"test_ends_of_flags", "test_little_memory", "test_sanitized"},
    "test_ideal": {"test_no_explosion"},
    "test_imports": {"test_fractions_of_num_channels", "test_hostile_pt_files"},
    "test_layers": {"test_default_model", "test_layers_of_other_processors", "test_more_damaged_files", "test_sanitized"},
    "test_pictures": {"test_grids_that_fit", "test_png", "test_png_is_small"},
    "test_prepare": {"test_data_dir_of_training", "test_prepare_exact_size", "test_prepare_memory"},
    "test_ranks": {"test_dry_run", "test_kills", "test_stop_while_drawing"},
    "test_reference": {"test_compare_quality"},
    "test_resume": {"test_everything_at_once", "test_killed_twenty_times", "test_stopped"},
}
# Of these, `make test` runs the cases that are named here.
SOME_CASES = {
    "test_errors": {"linear", "flow"},
    "test_model": {"toy", "scale and shift", "classes", "resampling blocks", "learned variance, eps", "everything"},
    "test_training": {"eps", "clipping, linear, averages", "classes, some hidden", "everything", "flow, lognormal", "edm",
                      "consistency, flow"},
}


def is_for_all_only(item):
    """Whether a test runs only with ALL=1."""
    file, name = item.path.stem, item.originalname
    case = item.callspec.id if hasattr(item, "callspec") else ""
    if file in ALL_ONLY_FILES or name in ALL_ONLY.get(file, ()):
        return True
    return file in ("test_ideal", "test_layers", "test_training") and name in SOME_CASES and case not in SOME_CASES[name]


@pytest.hookimpl(tryfirst=True)  # xdist's own comes later, and looks at the groups
def pytest_collection_modifyitems(config, items):
    def rank(item):
        return LONGEST.index(item.originalname) if item.originalname in LONGEST else len(LONGEST)

    # whoever names tests gets them
    named = config.option.keyword or any(path.endswith(".py") or "::" in path for path in config.args)
    if not named and not os.environ.get("ALL"):
        left_out = [item for item in items if is_for_all_only(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_for_all_only(item)]
    items.sort(key=rank)
    for item in items:
        if config.pluginmanager.hasplugin("xdist") and any(name in item.nodeid for name in ON_A_GPU):
            item.add_marker(pytest.mark.xdist_group("gpu"))


@pytest.fixture(scope="session", autouse=True)
def signals_arrive():
    """Programs start with every signal at its default, whoever started the tests: nohup ignores SIGHUP, and a shell that
    puts a command into the background SIGINT. Handlers that do nothing keep the tests themselves as they were told."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


@pytest.fixture(scope="session")
def faults(tmp_path_factory):
    """faults(folder, log=, at=, until=, kind=, alarm=): the environment in which calls fail, see faults.c."""
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    run(os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", ROOT / "tests/faults.c", "-o", library, "-ldl")

    def environment(folder="", **more):
        values = {f"FAULT_{name.upper()}": str(value) for name, value in more.items()}
        folder = {"FAULT_FOLDER": str(folder)} if folder else {}
        return os.environ | {"OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library)} | folder | values
    return environment


@pytest.fixture
def cpp(record_property):
    """cpp(binary, *arguments) runs a program of tests; its tests count instead of the function that asked for them."""
    def call(binary, *arguments):
        # detect_stack_use_after_return is g++ 13's default, and not g++ 12's
        environment = dict(os.environ, UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1",
                           ASAN_OPTIONS="allocator_may_return_null=1:detect_stack_use_after_return=1")
        if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 1 << 28:
            environment["TMPDIR"] = "/dev/shm"  # its thousands of damaged files need no disk, but 20 MB at a time
        result = subprocess.run([binary, *map(str, arguments)], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, timeout=LONG, env=environment)
        print(result.stdout)
        closing = re.search(r"^(\d+) passed, (\d+) failed$", result.stdout, re.M)
        assert closing, f"{binary} {arguments} ended with {result.returncode}:\n{result.stdout[-3000:]}"
        passed, failed = map(int, closing.groups())
        lines = [line for line in result.stdout.splitlines() if line.startswith(("ok ", "FAIL "))]
        assert len(lines) == passed + failed and "runtime error" not in result.stdout, result.stdout
        record_property("passed", passed)
        record_property("failed", failed)
        bad = "\n".join(line for line in lines if line.startswith("FAIL"))
        assert passed + failed > 0 and failed == 0 and result.returncode == 0, bad or result.stdout
    return call


@pytest.fixture(scope="session")
def images8(tmp_path_factory):
    return write_toy_images(tmp_path_factory.mktemp("data") / "toy8.bin")


@pytest.fixture(scope="session")
def images4(tmp_path_factory):
    return write_toy_images(tmp_path_factory.mktemp("data") / "toy4.bin", size=4)


@pytest.fixture(scope="session")
def images32(tmp_path_factory):
    return write_toy_images(tmp_path_factory.mktemp("data") / "toy32.bin", size=32)


@pytest.fixture
def tools(monkeypatch):
    """Import a tool of dev/ by its name."""
    for folder in ("dev/torch_ops", "dev/bench", "dev"):
        monkeypatch.syspath_prepend(ROOT / folder)
    return importlib.import_module
