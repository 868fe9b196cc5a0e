"""Fixtures of all tests."""
import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from harness import ROOT, write_toy_images


@pytest.fixture
def cpp(record_property):
    """cpp(binary, *arguments) runs test_unet; its tests count instead of the function that asked for them."""
    def call(binary, *arguments, timeout=540):
        environment = dict(os.environ, UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1",
                           ASAN_OPTIONS="allocator_may_return_null=1")
        result = subprocess.run([binary, *map(str, arguments)], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, timeout=timeout, env=environment)
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
    monkeypatch.syspath_prepend(ROOT / "dev")
    return importlib.import_module
