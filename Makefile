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
JOBS := $(shell nproc 2>/dev/null || echo 2)

FLOORS := $(shell find csrc -type d)
EXTENSION_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
FORMATTED = $(shell find csrc tests/cpp benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
TYPED = $(wildcard *.py) scripts torch_uvm tests $(wildcard examples benchmarks)

# CMake and ninja are those of the virtual environment. Not for all commands: PYTHON must not be found there.
WITH_TOOLS := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv build cpp demo examples test test-cpp lint format bench stubs sanitize test-cuda-flavour sdist clean FORCE

help: ## say what there is
	@sed -n -E 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo
	@echo "PYTHON=... is the Python to begin with; if it has a torch, that one is used."
	@echo "TORCH_UVM_CUDA=0 leaves the CUDA floor out, =1 insists on it; MAX_JOBS=n bounds the compilers."

demo: build ## train beyond the memory of an emulated accelerator, and show it
	$(VENV_PY) examples/demo.py

# A few steps of the demo's script: `make demo` has the whole of it.
examples: build ## run the other examples: tensors on both sides, the GPT script by itself, in short
	OMP_WAIT_POLICY=PASSIVE $(VENV_PY) examples/both_sides.py
	OMP_WAIT_POLICY=PASSIVE TORCH_UVM_DEVICE=emu $(VENV_PY) -m torch_uvm run examples/train_gpt.py --steps 5 --validation-batches 1

test: build cpp ## run all tests, those of the C++ floors included
	$(VENV_PY) -m pytest tests

venv: $(STAMPS)/installed ## make .venv with what is pinned in requirements/

build: $(STAMPS)/built ## build the extension in place, if anything changed

$(STAMPS)/origin: FORCE
	@$(PYTHON) scripts/environment.py create $(VENV) $(KEEP)

$(STAMPS)/installed: $(STAMPS)/origin $(wildcard requirements/*.txt)
	@$(VENV_PY) scripts/environment.py install
	@touch $@

# Changes when a variable that the build depends on does.
$(STAMPS)/flavour: $(STAMPS)/installed FORCE
	@echo "TORCH_UVM_CUDA=$(TORCH_UVM_CUDA) CUDA_HOME=$(CUDA_HOME)" | cmp -s - $@ || \
	  echo "TORCH_UVM_CUDA=$(TORCH_UVM_CUDA) CUDA_HOME=$(CUDA_HOME)" > $@

# The folders stand for files that are taken away.
$(STAMPS)/built: $(STAMPS)/installed $(STAMPS)/flavour setup.py pyproject.toml $(FLOORS) $(EXTENSION_FILES)
	@$(VENV_PY) setup.py -q flavour
	$(WITH_TOOLS) $(VENV_PY) -m pip --disable-pip-version-check --no-input install --no-build-isolation --no-deps -e .
	@touch $@

cpp: $(STAMPS)/installed ## build the tests and benchmarks of the C++ floors
	@$(WITH_TOOLS) cmake -S tests/cpp -B build/cpp -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo
	@$(WITH_TOOLS) cmake --build build/cpp -j $(JOBS)

test-cpp: cpp ## run the tests of the C++ floors alone
	$(VENV_PY) -m pytest tests/test_cpp_floors.py

test-cuda-flavour: $(STAMPS)/installed ## compile and link against CUDA wheels of torch (1.1 GB), with no GPU; audit the allocator
	TORCH_UVM_TEST_CUDA=1 $(VENV_PY) -m pytest tests/test_cuda_flavour.py

sanitize: $(STAMPS)/installed ## run the tests of the C++ floors under ASAN and UBSAN, then under TSAN
	$(WITH_TOOLS) cmake -S tests/cpp -B build/cpp-address -G Ninja -DSANITIZE=address,undefined
	$(WITH_TOOLS) cmake --build build/cpp-address -j $(JOBS)
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(VENV_PY) -m pytest tests/test_cpp_floors.py --cpp-build build/cpp-address
	$(WITH_TOOLS) cmake -S tests/cpp -B build/cpp-thread -G Ninja -DSANITIZE=thread
	$(WITH_TOOLS) cmake --build build/cpp-thread -j $(JOBS)
	TSAN_OPTIONS=halt_on_error=1 $(VENV_PY) -m pytest tests/test_cpp_floors.py --cpp-build build/cpp-thread

lint: $(STAMPS)/installed ## ruff, mypy, clang-format and codespell; changes nothing
	$(VENV_PY) -m ruff check .
	$(VENV_PY) -m ruff format --check .
	$(VENV_PY) -m mypy $(TYPED)
	@echo clang-format --dry-run -Werror
	@$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)
	git ls-files | xargs $(VENV)/bin/codespell

format: $(STAMPS)/installed ## let ruff and clang-format rewrite what they can
	$(VENV_PY) -m ruff check --fix .
	$(VENV_PY) -m ruff format .
	@$(VENV)/bin/clang-format -i $(FORMATTED)

bench: build cpp ## measure, into benchmarks/results/
	$(VENV_PY) benchmarks/run.py

stubs: build ## check torch_uvm/_C.pyi against the extension
	$(VENV_PY) -m pytest tests/test_stubs.py

sdist: $(STAMPS)/installed ## make a source distribution in dist/
	$(VENV_PY) setup.py -q sdist

clean: ## remove what was built, the virtual environment included
	rm -rf build dist $(VENV) *.egg-info torch_uvm/*.so demo-output .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
