# Everything one does with this repository. On a fresh machine (Python 3.11, a C++ compiler, make, git):
#   make demo
#   make test
# Both make a virtual environment in .venv first; CONTRIBUTING.md says how to use a torch that is there.

ifeq ($(origin PYTHON),undefined)
PYTHON := python3
KEEP := --keep
endif
VENV := .venv
VENV_PY := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
PIP := $(VENV_PY) -m pip --disable-pip-version-check --no-input
JOBS := $(shell nproc 2>/dev/null || echo 2)

LAYERS := $(shell find csrc -type d)
EXTENSION_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
FORMATTED = $(shell find csrc scripts tests/cpp benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
TYPED = $(wildcard *.py) scripts torch_uvm tests docs $(wildcard examples benchmarks)

# What is built here is for tests, too; wheels lack their bindings.
export TORCH_UVM_TEST_BINDINGS ?= 1

# CMake and ninja are those of the virtual environment. Not for all commands: PYTHON must not be found there.
WITH_TOOLS := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv build cpp demo docs examples test test-nightly test-cpp lint size format bench bench-schedules stubs sanitize sanitize-extension sanitized fuzz bad-input races checked soak soak-training faults security guard cuda-wheels test-cuda-flavour test-cuda bench-cuda wheels try-wheel test-versions packages clean FORCE

help: ## say what there is
	@sed -n -E 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo
	@echo "PYTHON=... is the Python to begin with; if it has a torch, that one is used."
	@echo "TORCH_UVM_CUDA=0 leaves the CUDA layer out, =1 insists on it; MAX_JOBS=n bounds the compilers."
	@echo "TORCH_UVM_TEST_CUDA=0 leaves out what is tested of CUDA without a GPU, and its downloads."

demo: build ## train beyond the memory of an emulated accelerator, and show it
	$(VENV_PY) examples/demo.py

examples: export OMP_WAIT_POLICY = PASSIVE
examples: export TORCH_UVM_DEVICE = emu
examples: build ## run all examples on the emulated accelerator, the demo too; docs/recipes.md says what they show
	$(VENV_PY) examples/both_sides.py
	$(VENV_PY) examples/one_array.py
	$(VENV_PY) examples/embedding_table.py
	$(VENV_PY) -m torch_uvm run --budget 24MiB examples/finetune_lora.py --output build/lora
	$(VENV_PY) -m torch_uvm run --budget 24MiB examples/finetune_lora.py --output build/lora \
	  --resume build/lora/checkpoint-4
	$(VENV_PY) examples/demo.py

# A worker for each core, in the order of the files: what compiles comes early. OpenMP's threads leave a core at once.
test: build cpp cuda-wheels ## run the tests, those of the C++ layers included
	OMP_WAIT_POLICY=PASSIVE $(VENV_PY) -m pytest tests -m "not nightly" -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-nightly: build cpp sanitized test-cuda-flavour ## what `test` leaves out: documents, results, all operators, sanitizers, torch 2.11's CUDA
	OMP_WAIT_POLICY=PASSIVE $(VENV_PY) -m pytest tests -m nightly -n $(JOBS) --dist loadfile --no-loadscope-reorder

venv: $(STAMPS)/installed ## make .venv with what is pinned in requirements/

build: $(STAMPS)/built ## build the extension in place, if anything changed

$(STAMPS)/origin: FORCE
	@$(PYTHON) scripts/environment.py create $(VENV) $(KEEP)

$(STAMPS)/installed: $(STAMPS)/origin $(wildcard requirements/*.txt)
	@$(VENV_PY) scripts/environment.py install
	@touch $@

# Changes when a variable that the build depends on does.
FLAVOUR = TORCH_UVM_CUDA=$(TORCH_UVM_CUDA) CUDA_HOME=$(CUDA_HOME) TORCH_UVM_TEST_BINDINGS=$(TORCH_UVM_TEST_BINDINGS)
$(STAMPS)/flavour: $(STAMPS)/installed FORCE
	@echo "$(FLAVOUR)" | cmp -s - $@ || echo "$(FLAVOUR)" > $@

# The folders stand for files that are taken away. pip imports torch three times, so it installs only what changes with
# setup.py and pyproject.toml.
$(STAMPS)/built: $(STAMPS)/installed $(STAMPS)/flavour setup.py pyproject.toml $(LAYERS) $(EXTENSION_FILES)
	@if test $(STAMPS)/editable -nt $(STAMPS)/installed -a $(STAMPS)/editable -nt setup.py \
	    -a $(STAMPS)/editable -nt pyproject.toml; then \
	  $(WITH_TOOLS) $(VENV_PY) setup.py -q build_ext --inplace --force; \
	else \
	  $(VENV_PY) setup.py -q flavour && $(WITH_TOOLS) $(PIP) install --no-build-isolation --no-deps -e . && \
	  touch $(STAMPS)/editable; \
	fi
	@touch $@

# CUDA's headers are those that are pinned, so that nothing is left out where there is no CUDA. The layers' files, each
# by itself, are compiled by `checked` and `sanitize`.
cpp: $(STAMPS)/installed ## build the tests and benchmarks of the C++ layers
ifneq ($(TORCH_UVM_TEST_CUDA),0)
	@$(VENV_PY) scripts/check_cuda_flavour.py headers > $(STAMPS)/cuda-headers
endif
	@$(WITH_TOOLS) cmake -S tests/cpp -B build/cpp -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DUNITY=ON -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O2 -g1 -DNDEBUG" \
	  $(if $(filter 0,$(TORCH_UVM_TEST_CUDA)),,-DCUDA_HEADERS="$$(cat $(STAMPS)/cuda-headers)")
	@$(WITH_TOOLS) cmake --build build/cpp -j $(JOBS) $(if $(CPP_TARGETS),--target $(CPP_TARGETS))

test-cpp: cpp ## run the tests of the C++ layers alone
	$(VENV_PY) -m pytest tests/test_cpp_layers.py

cuda-wheels: $(STAMPS)/installed
ifneq ($(TORCH_UVM_TEST_CUDA),0)
	@$(VENV_PY) scripts/check_cuda_flavour.py fetch
endif

test-cuda-flavour: build cpp cuda-wheels ## CUDA with no GPU and every pinned torch: compile, link, audit, control paths
	TORCH_UVM_TEST_CUDA=$(or $(TORCH_UVM_TEST_CUDA),all) $(VENV_PY) -m pytest \
	  tests/test_cuda_flavour.py tests/test_cuda_control*.py

# 4 GiB in all, since six processes share a card. tests/_gpu_guard.py requires that and 6 GiB free.
test-cuda: export TORCH_UVM_REQUIRE_CUDA = 1
test-cuda: export TORCH_UVM_CONF = limit:4GiB
test-cuda: build ## run the suite on a real GPU; without one it fails
	CUDA_LAUNCH_BLOCKING= $(VENV_PY) -m pytest tests/gpu
	CUDA_LAUNCH_BLOCKING=1 $(VENV_PY) -m pytest tests/gpu

bench-cuda: build ## measure on a real GPU, into benchmarks/results/
	env -u OUT TORCH_UVM_CONF=limit:8GiB $(VENV_PY) benchmarks/bench_cuda.py --json benchmarks/results/cuda.json
	env -u OUT $(VENV_PY) benchmarks/bench_residency.py --json benchmarks/results/residency.json

sanitize: $(STAMPS)/installed ## run the tests of the C++ layers under ASAN and UBSAN, then under TSAN
	$(WITH_TOOLS) cmake -S tests/cpp -B build/cpp-address -G Ninja -DSANITIZE=address,undefined
	$(WITH_TOOLS) cmake --build build/cpp-address -j $(JOBS)
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(VENV_PY) -m pytest tests/test_cpp_layers.py --cpp-build build/cpp-address
	$(WITH_TOOLS) cmake -S tests/cpp -B build/cpp-thread -G Ninja -DSANITIZE=thread
	$(WITH_TOOLS) cmake --build build/cpp-thread -j $(JOBS)
	TSAN_OPTIONS=halt_on_error=1 $(VENV_PY) -m pytest tests/test_cpp_layers.py --cpp-build build/cpp-thread

# All of csrc, with the storages of torch. Python is started with the sanitizer's library; see tests/_sanitized.py.
SANITIZERS := address thread
sanitize-extension: export OMP_WAIT_POLICY = PASSIVE
sanitize-extension: $(STAMPS)/installed ## run threads that race on builds of the extension under ASAN and TSAN: SECONDS=60 each
	for kind in $(SANITIZERS); do \
	  $(WITH_TOOLS) TORCH_UVM_SANITIZE=$$kind $(VENV_PY) setup.py -q build --build-lib build/sanitized-$$kind && \
	  $(VENV_PY) tests/_sanitized.py $$kind --seconds $(or $(SECONDS),60) || exit 1; done

# What tests/test_sanitizers.py names, of layers that are compiled as a few files.
SHORT = -G Ninja --log-level=WARNING -DUNITY=ON -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="-O1 -g1"
FUZZERS := fuzz_options fuzz_replay fuzz_allocator
sanitized: $(STAMPS)/installed ## build what `test-nightly` runs under sanitizers
	@$(WITH_TOOLS) cmake -S tests/cpp -B build/short-thread $(SHORT) -DSANITIZE=thread
	@$(WITH_TOOLS) cmake --build build/short-thread -j $(JOBS) \
	  --target test_allocator_stress test_arena test_emulated_queue test_residency_room
	@$(WITH_TOOLS) cmake -S tests/cpp -B build/short-address $(SHORT) -DSANITIZE=address -DFUZZ=ON
	@$(WITH_TOOLS) cmake --build build/short-address -j $(JOBS) \
	  --target test_allocator_failures test_replay planted_fault $(FUZZERS)

# With CXX=clang++ in the environment they are libFuzzer's. What one finds is left in build/.
fuzz: export SECONDS ?= 60
fuzz: export SEED ?= 1
fuzz: build ## the fuzzers, under ASAN and UBSAN, and those of what reads files: SECONDS=60 each; SEED=1
	@$(WITH_TOOLS) cmake -S tests/cpp -B build/cpp-fuzz $(SHORT) -DSANITIZE=address,undefined -DFUZZ=ON
	@$(WITH_TOOLS) cmake --build build/cpp-fuzz -j $(JOBS) --target $(FUZZERS)
	for fuzzer in $(FUZZERS); do UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build/cpp-fuzz/$$fuzzer \
	  -max_total_time=$(SECONDS) -seed=$(SEED) -artifact_prefix=build/$$fuzzer- tests/cpp/corpus/$${fuzzer#fuzz_} \
	  || exit 1; done
	$(VENV_PY) tests/fuzz_readers.py --seconds $(SECONDS) --seed $(SEED)

bad-input: export TORCH_UVM_CALLS = $(or $(CALLS),10000)
bad-input: build ## CALLS=10000 calls of the public face, made up from the signatures, with SEED=1
	$(VENV_PY) -m pytest tests/test_generated_calls.py --hypothesis-seed=$(or $(SEED),1)

# Each program of tests/_races.py under this many schedules. Programs whose threads race take seconds each, and have a time.
SCHEDULES ?= 770
races: export OMP_WAIT_POLICY = PASSIVE
races: export TORCH_UVM_DEVICE = emu
races: build ## run programs that race under a budget, under SCHEDULES=770 schedules each; those of threads SECONDS=120 each
	$(VENV_PY) tests/_races.py --no-threads --jobs $(JOBS) --seeds 0:$(SCHEDULES)
	$(VENV_PY) tests/_races.py --threads --seconds $(or $(SECONDS),120)

# The suite runs beside its own build: in build/checked, so that nothing else is imported. Each file is compiled by
# itself: one that lacks an include, and is compiled in a group elsewhere, fails here.
CHECKED := build/checked
checked: $(STAMPS)/installed ## run the suite on builds that walk every structure after each change; EVERY=n: each n-th
	$(WITH_TOOLS) cmake -S tests/cpp -B build/cpp-checked -G Ninja --log-level=WARNING -DCHECKED=ON
	$(WITH_TOOLS) cmake --build build/cpp-checked -j $(JOBS)
	$(WITH_TOOLS) TORCH_UVM_CHECKED=1 TORCH_UVM_UNITY=0 $(VENV_PY) setup.py -q build --build-lib $(CHECKED)
	cd $(CHECKED) && PYTHONPATH="$$PWD" TORCH_UVM_CHECK_EVERY=$(or $(EVERY),1) OMP_WAIT_POLICY=PASSIVE \
	  $(CURDIR)/$(VENV_PY) -m pytest $(CURDIR)/tests -n $(JOBS) --dist loadfile --no-loadscope-reorder --cpp-build $(CURDIR)/build/cpp-checked

soak: export OPERATIONS ?= 100000000
soak: $(STAMPS)/installed ## the allocator: OPERATIONS=100000000 random ones by 8 threads; SEED= plays one again
	@$(WITH_TOOLS) cmake -S tests/cpp -B build/cpp -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo
	@$(WITH_TOOLS) cmake --build build/cpp -j $(JOBS) --target soak_allocator
	build/cpp/soak_allocator $(OPERATIONS) $(SEED)

soak-training: export STEPS ?= 10000
soak-training: build ## training: STEPS=10000 of random models under random budgets, against the CPU; SEED=
	TORCH_UVM_DEVICE=emu $(VENV_PY) tests/soak_training.py --steps $(STEPS) $(if $(SEED),--seed $(SEED))

faults: export TORCH_UVM_FAULTS = long
faults: build cpp ## make each call of the runtime fail once, wherever one is made; cut training short in other ways
	build/cpp/test_residency_faults
	build/cpp/test_residency_memory
	OMP_WAIT_POLICY=PASSIVE $(VENV_PY) -m pytest tests/test_faults.py tests/test_engine_faults.py tests/test_training_faults.py \
	  tests/test_interruptions.py tests/test_interrupted_calls.py

security: build ## what is read is data, reports obey nothing, zero_on_alloc; then the fuzzers of readers: SECONDS=60
	$(VENV_PY) -m pytest tests/test_untrusted_files.py tests/test_zero_on_alloc.py
	$(VENV_PY) tests/fuzz_readers.py --seconds $(or $(SECONDS),60) --seed $(or $(SEED),1)

guard: build cpp ## one function makes every managed allocation, and checks limit, host and device first
	build/cpp/test_managed_limit
	$(VENV_PY) -m pytest tests/test_guard.py tests/test_gpu_guard.py

# Sphinx reads the repository from its root; docs/conf.py says why.
docs: build ## make a site of README.md, RFC.md, docs/ and the docstrings, in build/docs; a warning fails it
	$(VENV_PY) -m sphinx -W -n --keep-going -q -c docs -d build/docs-doctrees . build/docs
	@echo build/docs/index.html

lint: $(STAMPS)/installed ## ruff, mypy, clang-format and codespell; changes nothing
	$(VENV_PY) -m ruff check .
	$(VENV_PY) -m ruff format --check .
	$(VENV_PY) -m mypy $(TYPED)
	$(VENV_PY) -m mypy --python-version 3.10 torch_uvm
	@echo clang-format --dry-run -Werror
	@$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)
	git ls-files | xargs $(VENV)/bin/codespell

format: $(STAMPS)/installed ## let ruff and clang-format rewrite what they can
	$(VENV_PY) -m ruff check --fix .
	$(VENV_PY) -m ruff format .
	@$(VENV)/bin/clang-format -i $(FORMATTED)

bench: build cpp ## time the allocator, into benchmarks/results/
	$(VENV_PY) benchmarks/bench_allocator.py

bench-schedules: build cpp ## predict steps within budgets, from traces of an H200 and dry runs, beside their lower bounds
	$(VENV_PY) benchmarks/bench_schedules.py
	$(VENV_PY) benchmarks/bench_plans.py

size: ## how large the project is, beside what it may be
	@lines() { git ls-files "$$@" | xargs cat | wc -l; }; \
	echo "csrc        $$(lines 'csrc/*.cpp' 'csrc/*.h') lines of 30000"; \
	echo "torch_uvm   $$(lines 'torch_uvm/*.py') lines of 11000"; \
	echo "benchmarks  $$(lines 'benchmarks/*.py' 'benchmarks/cpp/*') lines of 6000"; \
	echo "...         $$(git ls-files benchmarks/results benchmarks/traces benchmarks/logs | xargs cat | wc -c) bytes of 1500000"; \
	echo "docs        $$(git ls-files 'docs/*.md' | wc -l) pages of 15, $$(git ls-files 'docs/*.md' | xargs cat | wc -w) words of 25000"; \
	echo "README.md   $$(wc -w < README.md) words of 1000"

stubs: build ## check torch_uvm/_C.pyi against the extension
	$(VENV_PY) -m pytest tests/test_stubs.py

wheels: $(STAMPS)/wheel-tools ## build one wheel for each torch and CUDA 13 into dist/; VERSIONS="2.11.0 2.13.0": for these
	$(WITH_TOOLS) $(VENV_PY) scripts/wheels.py dist $(VERSIONS)

try-wheel: $(STAMPS)/installed ## install the wheel of `wheels` beside a pinned torch, without a compiler, and try it
	$(VENV_PY) scripts/packages.py --try dist

$(STAMPS)/wheel-tools: $(STAMPS)/installed requirements/wheels.txt
	@sed '/^torch==/d' requirements/wheels.txt | $(PIP) install -q -r /dev/stdin
	@touch $@

# Each night's torch, once a week: CONTRIBUTING.md has the command. Of the C++ layers' programs two are needed.
test-versions: CPP_TARGETS := fake_cuda play_accesses
test-versions: $(STAMPS)/wheel-tools cpp ## run the suite with a wheel for each torch; VERSIONS="2.11.0 2.13.0", TESTS="test_moves.py"
	rm -rf build/versions/wheel
	$(WITH_TOOLS) $(VENV_PY) scripts/wheels.py --test build/versions/wheel $(VERSIONS)
	$(VENV_PY) scripts/versions.py build/versions/wheel/*.whl $(VERSIONS) --jobs $(JOBS) $(if $(TESTS),--tests $(TESTS))

packages: $(STAMPS)/installed ## build sdist and wheel into dist/, install and try them in empty environments; minutes
	$(VENV_PY) scripts/packages.py dist

clean: ## remove what was built, the virtual environment included
	rm -rf build dist $(VENV) *.egg-info torch_uvm/_native demo-output lora-output .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
