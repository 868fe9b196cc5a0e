"""Do the tests find faults? A fault is planted into each subsystem of a copy of the program, and its tests must fail."""
import os
import shutil
import subprocess
import sys

import pytest

from harness import LONG, ROOT

PROGRAM = ("train_unet.cu", "unet_io.h", "unet_cpu.h")
NETWORK, READERS = "tests/network.cu", "tests/readers.cu"

# subsystem: (file, what stands there, what is planted instead, what is built, what must fail): arguments of the program
# that was built, or, behind "pytest", a test that runs it
FAULTS = {
    "random numbers": ("train_unet.cu", "(uint64_t)0xD2511F53u * c0", "(uint64_t)0xD2511F51u * c0", NETWORK, ["--only", "random"]),
    "threads": ("unet_cpu.h", "if (prepared != n) prepare(n, end);", "if (prepared < 0) prepare(n, end);", NETWORK,
                ["--only", "plain layers"]),
    "convolution of more than 512 channels": ("unet_cpu.h", "layer.bias = nullptr;", "", NETWORK, ["--only", "plain layers"]),
    "group norm": ("unet_cpu.h", "(float)(w_dy / T / width)", "(float)(w_dy / T)", NETWORK, ["--only", "plain layers"]),
    "residual block": ("train_unet.cu", ".accumulate = !adds_x || block.accumulate", ".accumulate = block.accumulate", NETWORK,
                       ["--only", "differences"]),
    "life of a buffer": ("train_unet.cu", "b.late.used_at(back + 1);", "", NETWORK, ["--only", "plan"]),
    "side stream": ("train_unet.cu", "std::max(newest_event - 1, of_block_before)", "newest_event - 1", NETWORK, ["--only", "plan"]),
    "micro-batches": ("train_unet.cu", "parts.subspan(half), other", "parts.first(half), other", NETWORK,
                      ["--only", "microbatch"]),
    "checksum": ("unet_io.h", "return crc32(header, HEADER_BYTES, crc) == stored;",
                 "return !stored || crc32(header, HEADER_BYTES, crc) == stored;", READERS, ["--fuzz", "500"]),
    "schedule": ("train_unet.cu", "(s + 0.008) / 1.008", "(s + 0.009) / 1.009", NETWORK, ["pytest", "test_reference.py::test_program"]),
    "sampler": ("train_unet.cu", "/ length(before, from) / 2;", "/ length(before, from);", NETWORK,
                ["pytest", "test_reference.py::test_program"]),
    "labels": ("train_unet.cu", "if (labels[b] == row) sum +=", "if (labels[b] <= row) sum +=", NETWORK,
               ["pytest", "test_layers.py::test_model[classes]"]),
    "optimiser": ("train_unet.cu", "1 - pow((double)c.beta2, n)", "1 - pow((double)c.beta1, n)", "train_unet.cu",
                  ["pytest", "test_training.py::test_training[eps]"]),
    "data": ("train_unet.cu", "e += W - 1 - 2 * (e % W);", "e += W - 1 - (e % W);", "train_unet.cu",
             ["pytest", "test_training.py::test_training[v, flip, warm-up, cosine]"]),
}


def run_tests_of(folder, file, there, planted, source, words):
    """Build `source` of a copy of the program with the fault, and run its tests: the CompletedProcess."""
    for name in PROGRAM:
        shutil.copy(ROOT / name, folder)
    (folder / "tests").mkdir()
    for path in [*(ROOT / "tests").glob("*.h"), ROOT / NETWORK, ROOT / READERS]:
        shutil.copy(path, folder / "tests")
    text = (folder / file).read_text()
    assert text.count(there) == 1, f"{file} has {text.count(there)} times {there}"
    (folder / file).write_text(text.replace(there, planted))

    compiler = [*os.environ.get("CXX", "g++").split(), "-x", "c++", "-std=c++20", "-O1", "-march=native", "-fopenmp-simd", "-pthread"]
    subprocess.run([*compiler, "-w", source, "-o", "program"], cwd=folder, check=True, timeout=LONG)
    environment = os.environ | {"TMPDIR": str(folder)}
    command = [folder / "program", *words]
    if words[0] == "pytest":
        environment["TRAIN_UNET" if source == "train_unet.cu" else "NETWORK"] = str(folder / "program")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "tests" / words[1]]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment, timeout=LONG)


@pytest.mark.parametrize("subsystem", FAULTS)
def test_fault_is_found(tmp_path, subsystem):
    result = run_tests_of(tmp_path, *FAULTS[subsystem])
    says = "1 failed" if FAULTS[subsystem][-1][0] == "pytest" else "FAIL "
    assert result.returncode == 1 and says in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("subsystem", ["random numbers", "checksum", "schedule"])
def test_nothing_is_found_without_a_fault(tmp_path, subsystem):
    file, there, _, source, words = FAULTS[subsystem]
    result = run_tests_of(tmp_path, file, there, there, source, words)
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout + result.stderr
