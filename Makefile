# train_unet.cu: see README.md. The targets a newcomer needs: make train, make test.
#
#   DEVICE=cpu|cuda     what train_unet is built for   (default: cuda where nvcc and a GPU are found)
#   PRECISION=bf16|fp32 what the GPU computes in       (default: bf16; the CPU always computes in fp32)
#   GPU_ARCH=80|86|89|90 the GPU to build for          (default: the one in this machine)
#   PRESET=NAME         what make train trains         (default: unet64; small32 on a GPU under 8 GB, tiny on a CPU)
#   ALL=1               make test runs every test, and compiles for every GPU architecture and precision; warnings are
#                       errors

CXX ?= g++
BUILD := build
CXXFLAGS := -std=c++20 -Wno-deprecated-enum-enum-conversion -Wno-deprecated-enum-float-conversion -O3 -march=native -fno-math-errno -fno-trapping-math -Wall -Wextra \
	$(if $(ALL),-Werror)
ARCHS := 80 86 89 90

# ---- what this machine has ----------------------------------------------------------------------------------

compiles = $(shell echo '$(1)' | $(CXX) -x c++ - $(2) -o /dev/null 2>/dev/null && echo yes)

# Loops that are to become vectors are marked for OpenMP's compilers; nothing else of OpenMP is used.
OPENMP_SIMD := $(call compiles,int main() {},-fopenmp-simd)
NVCC := $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc))
PROCESSOR := $(shell grep -m 1 -iE '^(flags|features)' /proc/cpuinfo 2>/dev/null | cksum)
GPU := $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
GPU_MEMORY := $(shell nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
GPU_ARCH ?= $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
DEVICE ?= $(if $(and $(NVCC),$(GPU)),cuda,cpu)
PRECISION ?= bf16

ifeq ($(filter $(DEVICE),cpu cuda),)
$(error DEVICE is cpu or cuda, not '$(DEVICE)')
endif
ifeq ($(filter $(PRECISION),bf16 fp32),)
$(error PRECISION is bf16 or fp32, not '$(PRECISION)')
endif

# g++ uses half of AVX-512's width unless told
CXXFLAGS += $(if $(call compiles,int main() {},-mprefer-vector-width=512),-mprefer-vector-width=512)

OMP_FLAGS := $(if $(OPENMP_SIMD),-fopenmp-simd,-Wno-unknown-pragmas) -pthread

# A python3 with PyTorch 2.4 or later and the small packages of requirements.txt is used as it is. One that only lacks some
# of these gets them in a .venv that still sees its PyTorch; otherwise the .venv holds everything. Only pytest-xdist may be
# missing: then the tests run one after the other.
SYSTEM_TORCH := python3 -c 'import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4))' 2>/dev/null
SMALL_PACKAGES := numpy PIL tqdm safetensors matplotlib tensorboard pytest ninja
system_has = $(SYSTEM_TORCH) && python3 -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))' $(1) 2>/dev/null
SYSTEM_READY := $(call system_has,$(SMALL_PACKAGES) xdist)
SYSTEM_SUFFICES := $(call system_has,$(SMALL_PACKAGES))

.PHONY: train test coverage docs bench bench_ops profile toc check_toc data clean report python settings all_archs bench_dev
.DELETE_ON_ERROR:

# ---- build --------------------------------------------------------------------------------------------------

report:
	@echo "C++ compiler: $$($(CXX) --version 2>/dev/null | head -n 1 | grep . || echo 'not found: install g++, or name one with CXX=')"
	@echo "nvcc:         $(or $(NVCC),not found on the PATH or in /usr/local/cuda/bin)"
	@echo "GPU:          $(if $(GPU),$(GPU) (sm_$(GPU_ARCH)),not found: nvidia-smi lists none)"
	@echo "building for: the $(if $(filter cpu,$(DEVICE)),CPU,GPU)"

# Rewritten only when a setting changes, so that everything built with the old ones is built again; or the processor, on
# another machine that shares this folder: -march=native uses all that it can do.
SETTINGS := $(CXX) $(CXXFLAGS) $(OMP_FLAGS) $(DEVICE) $(PRECISION) $(GPU_ARCH) $(PROCESSOR)
$(BUILD)/settings: settings
	@mkdir -p $(BUILD)
	@echo '$(SETTINGS)' | cmp -s - $@ || echo '$(SETTINGS)' > $@

data/%.bin: data/%.bin.gz
	gzip -dc $< > $@.tmp && mv $@.tmp $@

UNPACKED = $(addprefix data/,emoji.bin faces.bin faces_in_two_steps.bin fashion_in_two_steps.bin)
data: $(UNPACKED)

# nvcc's flags for an architecture (80, 86, 89, 90) and a precision. 90 means 90a; a newer GPU gets 90's code as PTX.
gencode = -gencode $(if $(filter 90,$(1)),arch=compute_90a$(,)code=sm_90a,$(if $(filter $(ARCHS),$(1)),arch=compute_$(1)$(,)code=sm_$(1),arch=compute_90$(,)code=compute_90))
nvccflags = -std=c++20 -O3 $(call gencode,$(1)) $(if $(filter fp32,$(2)),-DPRECISION_FP32,$(if $(filter 90,$(1)),-DHOPPER)) \
	$(if $(ALL),-Werror all-warnings -Xcompiler -Werror) -diag-suppress 177 -Xcompiler -Wall$(,)-Wextra$(,)-Wno-unused-function$(,)-Wno-deprecated-enum-enum-conversion$(,)-Wno-deprecated-enum-float-conversion
, := ,
# The tests hold the CPU layers beside the kernels, and do not use every function of the program.
nvcctestflags = $(call nvccflags,$(1),$(2)) -diag-suppress 1675 -Xcompiler -O3$(,)-fopenmp


# A program from its one file, $<: for the CPU, for this machine's GPU in a precision, or for what DEVICE says. What
# includes train_unet.cu uses a part of it.
for_cpu = $(CXX) -x c++ $(CXXFLAGS) $(if $(filter train_unet.cu,$<),,-Wno-unused-function) $(OMP_FLAGS) $(1) $< -o $@
for_gpu = $(NVCC) $(call nvccflags,$(GPU_ARCH),$(1)) $< -o $@
ifeq ($(DEVICE),cuda)
for_here = $(call for_gpu,$(PRECISION))
else
for_here = $(for_cpu)
endif

# The program: its one file and the two that this includes.
PROGRAM_SOURCES := train_unet.cu unet_io.h unet_cpu.h
train_unet: $(PROGRAM_SOURCES) $(BUILD)/settings | report data
ifeq ($(DEVICE),cuda)
	$(if $(NVCC),,$(error DEVICE=cuda needs nvcc, the CUDA Toolkit's compiler))
	$(if $(GPU_ARCH),,$(error no GPU was found: name the one to build for with GPU_ARCH=80, 86, 89 or 90))
endif
	$(for_here)
# Another network, whose file includes the program.
DIT_SOURCES := dev/dit/train_dit.cu $(wildcard dev/dit/*.h) $(PROGRAM_SOURCES)
train_dit: $(DIT_SOURCES) $(BUILD)/settings | report data
	$(for_here)
PROFILE_SOURCES := dev/bench/profile.cu dev/bench/work.h $(PROGRAM_SOURCES)
dev/bench/profile: $(PROFILE_SOURCES) $(BUILD)/settings | report
	$(for_here)
dev/bench/profile_dit: $(PROFILE_SOURCES) $(DIT_SOURCES) $(BUILD)/settings | report
	$(for_here) -DDIT

# The tests of the CPU build run everywhere; on a machine with a GPU, those of the kernels run before them.
TEST_SOURCES := tests/network.cu tests/readers.cu tests/kernels.cu tests/cases.h tests/harness.h tests/microbatch.h $(PROGRAM_SOURCES)
DIT_TEST_SOURCES := dev/dit/dit_layers.cu tests/cases.h $(DIT_SOURCES)
$(BUILD)/network $(BUILD)/readers: $(BUILD)/%: tests/%.cu $(TEST_SOURCES) $(BUILD)/settings | report
	$(call for_cpu,-O2)
$(BUILD)/train_unet_cpu: $(PROGRAM_SOURCES) $(BUILD)/settings
	$(for_cpu)
$(BUILD)/train_dit_cpu: $(DIT_SOURCES) $(BUILD)/settings
	$(for_cpu)
$(BUILD)/dit_layers: $(DIT_TEST_SOURCES) $(BUILD)/settings
	$(for_cpu)
$(BUILD)/train_unet_fp32: $(PROGRAM_SOURCES) $(BUILD)/settings
	$(call for_gpu,fp32)
$(BUILD)/train_dit_fp32: $(DIT_SOURCES) $(BUILD)/settings
	$(call for_gpu,fp32)
$(BUILD)/profile_fp32: $(PROFILE_SOURCES) $(BUILD)/settings
	$(call for_gpu,fp32)
$(BUILD)/dit_layers_cuda_%: $(DIT_TEST_SOURCES) $(BUILD)/settings
	$(call for_gpu,$*)
$(BUILD)/kernels_bf16 $(BUILD)/kernels_fp32: $(BUILD)/kernels_%: tests/kernels.cu $(TEST_SOURCES) $(BUILD)/settings
	$(NVCC) $(call nvcctestflags,$(GPU_ARCH),$*) $< -o $@
# Under AddressSanitizer and UndefinedBehaviorSanitizer; a NaN made an integer counts too.
SANITIZED := -O1 -g -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
# To find a use of a local variable after its function has returned, AddressSanitizer moves such variables to the
# heap, and g++ before 14 misaligns vectors of AVX-512 there (GCC bug 110027): the program would end with SIGSEGV.
SANITIZED += $(if $(call compiles,int avx512 = __AVX512F__; int main() {},-march=native --param=asan-use-after-return=0),--param=asan-use-after-return=0)
$(BUILD)/network_asan $(BUILD)/readers_asan: $(BUILD)/%_asan: tests/%.cu $(TEST_SOURCES) $(BUILD)/settings
	$(call for_cpu,$(SANITIZED))
$(BUILD)/train_unet_asan: $(PROGRAM_SOURCES) $(BUILD)/settings
	$(call for_cpu,$(SANITIZED))
$(BUILD)/train_dit_asan: $(DIT_SOURCES) $(BUILD)/settings
	$(call for_cpu,$(SANITIZED))

# Compiled and not run: that nothing rots on a machine without a GPU.
PRECISIONS := bf16 fp32
object = $(NVCC) $(call $(1),$(firstword $(subst _, ,$*)),$(lastword $(subst _, ,$*))) -c $< -o $@
of_both = $(foreach arch,80 90,$(foreach precision,$(PRECISIONS),$(BUILD)/$(1)_$(arch)_$(precision).o))
TRAIN_OBJECTS := $(foreach arch,$(ARCHS),$(foreach precision,$(PRECISIONS),$(BUILD)/train_unet_$(arch)_$(precision).o))
PROFILE_OBJECTS := $(BUILD)/profile_90_bf16.o $(BUILD)/profile_80_fp32.o
TEST_OBJECTS := $(call of_both,kernels)
OPS_OBJECTS := $(call of_both,torch_ops)
DIT_OBJECTS := $(call of_both,train_dit)
DIT_TEST_OBJECTS := $(BUILD)/dit_layers_90_bf16.o
$(TRAIN_OBJECTS): $(BUILD)/train_unet_%.o: $(PROGRAM_SOURCES) $(BUILD)/settings
	$(call object,nvccflags)
$(PROFILE_OBJECTS): $(BUILD)/profile_%.o: $(PROFILE_SOURCES) $(BUILD)/settings
	$(call object,nvccflags)
$(TEST_OBJECTS): $(BUILD)/kernels_%.o: tests/kernels.cu $(TEST_SOURCES) $(BUILD)/settings
	$(call object,nvcctestflags)
# The device side of PyTorch's operators, which tests/test_torch_ops.py builds for the CPU: see dev/torch_ops/torch_ops.py.
$(OPS_OBJECTS): $(BUILD)/torch_ops_%.o: dev/torch_ops/torch_ops.cu dev/torch_ops/torch_ops.h dev/dit/gelu.h $(PROGRAM_SOURCES) $(BUILD)/settings
	$(call object,nvccflags) -Xcompiler -fPIC,-fvisibility=hidden
$(DIT_OBJECTS): $(BUILD)/train_dit_%.o: $(DIT_SOURCES) $(BUILD)/settings
	$(call object,nvccflags)
$(DIT_TEST_OBJECTS): $(BUILD)/dit_layers_%.o: $(DIT_TEST_SOURCES) $(BUILD)/settings
	$(call object,nvccflags)
# NCCL's place in the tests of several ranks on one GPU.
$(BUILD)/one_gpu_nccl.so: tests/one_gpu_nccl.cu $(BUILD)/settings
	$(NVCC) -std=c++20 -O2 -shared -Xcompiler -fPIC,-Wall,-Wextra $(if $(ALL),-Xcompiler -Werror) $< -o $@
# As many at a time as there are cores, and what one prints in one piece.
side_by_side = $(MAKE) -j $$(nproc) --output-sync=target --no-print-directory
all_archs:
	@+$(if $(NVCC),$(side_by_side) $(TRAIN_OBJECTS) $(TEST_OBJECTS) $(LADDER_OBJECTS) $(PROFILE_OBJECTS) $(OPS_OBJECTS) $(DIT_OBJECTS) $(DIT_TEST_OBJECTS) $(BUILD)/one_gpu_nccl.so,echo "no nvcc: the CUDA build is not compiled")

# ---- the ladders of dev/: each alone, each with the program, and all in one for the tests -------------------

# A ladder is a .cu with a .py of the same name.
LADDERS := $(filter $(patsubst dev/%.cu,%,$(wildcard dev/*.cu)),$(patsubst dev/%.py,%,$(wildcard dev/*.py)))
# Alone a ladder compiles in seconds. dev/X_program also has the program's version of X, and includes all of the program,
# of which it uses a part; the ladders of the two blocks always do. Some first versions call cuBLAS.
ifeq ($(DEVICE),cuda)
build_ladder = $(NVCC) $(call nvcctestflags,$(GPU_ARCH),$(PRECISION)) $(1) $< -o $@ -lcublas
else
build_ladder = $(for_cpu) $(if $(call compiles,int main() {},-fopenmp),-fopenmp)
endif
LADDER_SOURCES := $(wildcard dev/*.h) dev/bench/work.h
$(addprefix dev/,$(LADDERS)): dev/%: dev/%.cu $(LADDER_SOURCES) $(BUILD)/settings | report
	$(call build_ladder)
dev/resblock dev/attention_block: dev/dit/gelu.h $(PROGRAM_SOURCES)
$(LADDERS:%=dev/%_program): dev/%_program: dev/%.cu $(LADDER_SOURCES) dev/dit/gelu.h $(PROGRAM_SOURCES) $(BUILD)/settings | report
	$(call build_ladder,-DPROGRAM)
$(BUILD)/ladders: dev/all.cu $(wildcard dev/*.cu) $(LADDER_SOURCES) dev/dit/gelu.h $(PROGRAM_SOURCES) $(BUILD)/settings
	$(call build_ladder)
LADDER_OBJECTS := $(BUILD)/ladders_80_bf16.o $(BUILD)/ladders_90_bf16.o $(BUILD)/ladders_80_fp32.o
$(LADDER_OBJECTS): $(BUILD)/ladders_%.o: dev/all.cu $(wildcard dev/*.cu) $(LADDER_SOURCES) dev/dit/gelu.h $(PROGRAM_SOURCES) $(BUILD)/settings
	$(call object,nvcctestflags)
# PyTorch's numbers; on a GPU its times too.
$(BUILD)/dev/%.bin: dev/%.py dev/common.py dev/blocks.py | python
	@$(RUN_PYTHON) $<

# Every ladder in turn, then the pages of dev/ from what they printed. On a CPU those that have a ladder there, into a
# table of their own.
ifeq ($(DEVICE),cpu)
bench_dev: python $(BUILD)/ladders
	@export OMP_NUM_THREADS=$$(nproc) CUDA_VISIBLE_DEVICES= DEV_DATA=$(BUILD)/dev_cpu; \
		for ladder in conv3x3 conv1x1 groupnorm attention; do $(RUN_PYTHON) dev/$$ladder.py && \
		$(BUILD)/ladders $$ladder > $$DEV_DATA/$$ladder.txt || { tail -n 20 $$DEV_DATA/$$ladder.txt; exit 1; }; done
	@$(RUN_PYTHON) dev/bench/ladders.py cpu
else
bench_dev: python $(BUILD)/ladders $(LADDERS:%=$(BUILD)/dev/%.bin)
	@for ladder in $(LADDERS); do echo "$$ladder"; \
		DEV_DATA=$(BUILD)/dev $(BUILD)/ladders $$ladder > $(BUILD)/dev/$$ladder.txt || { tail -n 20 $(BUILD)/dev/$$ladder.txt; exit 1; }; done
	@$(RUN_PYTHON) dev/bench/ladders.py
endif

# The CPU's layers for the vectors of other processors: AVX2's, and NEON's where Debian's cross compiler is found.
OTHER_FLAGS = $(filter-out -march=native -mprefer-vector-width=512,$(CXXFLAGS)) $(OMP_FLAGS)
NEON_CXX := $(shell command -v aarch64-linux-gnu-g++ 2>/dev/null)
OTHER_TESTS := $(if $(call compiles,int main() {},-march=x86-64-v3),$(BUILD)/network_avx2) $(if $(NEON_CXX),$(BUILD)/network_neon)
$(BUILD)/network_avx2: tests/network.cu $(TEST_SOURCES) $(BUILD)/settings
	$(CXX) -x c++ $(OTHER_FLAGS) -march=x86-64-v3 $< -o $@
$(BUILD)/network_neon: tests/network.cu $(TEST_SOURCES) $(BUILD)/settings
	$(NEON_CXX) -x c++ $(OTHER_FLAGS) -Wno-psabi $< -o $@

# ---- the demo -----------------------------------------------------------------------------------------------

# A GPU with little memory is a slow one too.
SMALL_GPU := $(shell [ "$(GPU_MEMORY)" -lt 8000 ] 2>/dev/null && echo yes)
PRESET ?= $(if $(filter cpu,$(DEVICE)),tiny,$(if $(SMALL_GPU),small32,unet64))
# Continues where an earlier `make train` was stopped.
train: train_unet
	@if ls out/$(PRESET)/checkpoint_*.bin >/dev/null 2>&1; then run="--resume out/$(PRESET)"; \
		else run="--preset $(PRESET) --out_dir out/$(PRESET)"; fi; \
		echo ./train_unet $$run; exec ./train_unet $$run

# ---- tests and benchmark ------------------------------------------------------------------------------------

python:
	@if $(SYSTEM_READY); then echo "Python:       the system's python3 has all that is needed"; \
	elif [ -e .venv/ready ] && [ .venv/ready -nt requirements.txt ]; then echo "Python:       .venv"; \
	elif $(SYSTEM_SUFFICES); then echo "Python:       the system's python3 has all but pytest-xdist; adding that in .venv"; \
		{ python3 -m venv --system-site-packages .venv && .venv/bin/pip install -q pytest-xdist && touch .venv/ready; } >/dev/null 2>&1 || \
		echo "              which failed: the tests run one after the other"; \
	elif ! python3 -c 'import venv, ensurepip' 2>/dev/null; then \
		echo "Python:       python3 with its venv module is needed (Debian: python3-venv)"; exit 1; \
	elif $(SYSTEM_TORCH); then echo "Python:       the system's python3 has PyTorch; adding the small packages that it lacks in .venv"; \
		python3 -m venv --system-site-packages .venv && \
		grep -v '^torch' requirements.txt | .venv/bin/pip install -r /dev/stdin && touch .venv/ready; \
	else echo "Python:       no python3 with PyTorch 2.4 or later; installing requirements.txt into .venv"; \
		echo "              (on Linux about 2.5 GB to download, 5.5 GB on the disk; once. A build of PyTorch for the CPU, some 200 MB,"; \
		echo "              does as well: Ctrl-C, install that from PyTorch's own index, and call make again)"; \
		python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && touch .venv/ready; fi

RUN_PYTHON = $$(if $(SYSTEM_READY) || [ ! -e .venv/ready ]; then echo python3; else echo .venv/bin/python; fi)

# What `make test` builds and runs, and what it does besides with ALL=1.
ON_GPU := $(filter cuda,$(DEVICE))
TEST_BINARIES := train_unet $(BUILD)/network $(BUILD)/readers $(if $(ON_GPU),$(BUILD)/kernels_$(PRECISION) $(BUILD)/train_unet_cpu)
ifdef ALL
TEST_BINARIES += train_dit dev/bench/profile $(BUILD)/ladders $(BUILD)/dit_layers $(BUILD)/network_asan $(BUILD)/readers_asan \
	$(BUILD)/train_unet_asan $(BUILD)/train_dit_asan $(OTHER_TESTS)
TEST_BINARIES += $(if $(ON_GPU),$(BUILD)/kernels_bf16 $(BUILD)/kernels_fp32 $(BUILD)/train_unet_fp32 $(BUILD)/train_dit_cpu \
	$(BUILD)/train_dit_fp32 $(BUILD)/dit_layers_cuda_bf16 $(BUILD)/dit_layers_cuda_fp32 $(BUILD)/one_gpu_nccl.so)
endif
KERNEL_TESTS := $(sort $(filter $(BUILD)/kernels_%,$(TEST_BINARIES)))
export ALL

test: python check_toc
	@+$(side_by_side) $(TEST_BINARIES)
	@+$(if $(ALL),$(MAKE) --no-print-directory all_archs)
	@$(foreach kernels,$(KERNEL_TESTS),$(kernels) $(if $(ALL),&& $(kernels) limits) &&) true
	@$(if $(ON_GPU),TRAIN_UNET=$(CURDIR)/$(BUILD)/train_unet_cpu TRAIN_DIT=$(CURDIR)/$(BUILD)/train_dit_cpu) $(RUN_PYTHON) tests/run.py

# The lines that the default tests reach, by gcov: see tests/line_coverage.py. Several processes count in the same files.
COVERED := $(BUILD)/coverage
COUNTED := -O1 --coverage -fprofile-update=atomic
$(COVERED)/train_unet: $(PROGRAM_SOURCES) $(BUILD)/settings
	@mkdir -p $(@D)
	$(call for_cpu,$(COUNTED))
$(COVERED)/network $(COVERED)/readers: $(COVERED)/%: tests/%.cu $(TEST_SOURCES) $(BUILD)/settings
	@mkdir -p $(@D)
	$(call for_cpu,$(COUNTED))
coverage: python
	@+$(side_by_side) $(addprefix $(COVERED)/,train_unet network readers)
	@rm -f $(COVERED)/*.gcda
	@$(foreach program,train_unet network readers,$(shell echo $(program) | tr a-z A-Z)=$(CURDIR)/$(COVERED)/$(program)) \
		$(RUN_PYTHON) tests/run.py; $(RUN_PYTHON) tests/line_coverage.py $(COVERED)

# Against PyTorch on this machine; writes its tables into README.md and the pages of dev/bench. On a GPU, BATCHES=32,128 measures
# some of the batch sizes, and what was measured earlier on the same GPU stays in the tables.
bench: python train_unet dev/bench/profile train_dit dev/bench/profile_dit $(if $(filter cuda,$(DEVICE)),$(BUILD)/train_unet_fp32 $(BUILD)/profile_fp32)
	@$(RUN_PYTHON) dev/bench/benchmark.py $(if $(BATCHES),--batches $(BATCHES)) $(if $(PRESETS),--presets $(PRESETS))

# PyTorch's operators and ours, on a GPU, into dev/torch_ops/README.md.
bench_ops: python
	@$(RUN_PYTHON) dev/torch_ops/bench_ops.py $(if $(BATCHES),--batches $(BATCHES))

# What a step's time goes to; FLAGS: the program's, such as --batch_size 32.
profile: dev/bench/profile
	@dev/bench/profile $(FLAGS)

# The tables of flags in docs/guide.md, from the program's own help.
docs: train_unet
	@python3 docs/flags.py

# ---- housekeeping -------------------------------------------------------------------------------------------

# The contents list of train_unet.cu: toc writes it from the banners, check_toc fails where it is not what they say.
toc:
	@python3 dev/bench/toc.py
check_toc:
	@python3 dev/bench/toc.py --check

clean:
	rm -rf $(BUILD) train_unet train_dit __pycache__ dev/__pycache__ dev/*/__pycache__ tests/__pycache__ $(addprefix dev/,$(LADDERS) $(LADDERS:%=%_program) bench/profile bench/profile_dit) $(UNPACKED)
