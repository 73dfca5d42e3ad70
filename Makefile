# Everything runs in .venv, which the first use creates. Requirements: Python 3.10+, a C++ compiler and make.
#
#   make demo       tune a Llama-style decoder on this CPU and report the speed-up (report.html)
#   make test       the tests
#   make lint       style, types and import contracts
#   make docs       the manual as a site, in build/site
#   make test-asan  the native tests under AddressSanitizer and UBSan
#   make bench      the CPU benchmarks of docs/figures.md (slow)
#   make test-gpu   the tests that need a CUDA device, run by PYTHON with its torch; nothing is installed
#   make test-gpu-sanitizer
#                   gemmtune's GPU kernels under compute-sanitizer (memcheck, racecheck)
#   make bench-gpu  gemmtune's kernels on a GPU against PyTorch's
#   make mutants    mutation testing: a sample of changed operators that the tests must detect (hours; scripts/mutants --help)
#   make reliability
#                   all checks of docs/explanation/reliability.md at full size (an hour or two)
#
# PYTHON      the interpreter for .venv
# TORCH       the version of torch. A version other than the pinned one has a separate environment, .venv-torch$(TORCH), with
#             the versions of Triton and NVIDIA's libraries that this torch requires; the other packages stay pinned:
#             make test TORCH=2.15.0
#             On Linux x86 PyPI's torch is the CUDA build (2+ GB); for the CPU build:
#             make demo PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu' TORCH=2.13.0+cpu
# PIP_ARGS    passed to every pip install

PYTHON ?= python3
PINNED_TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED_TORCH)
PIP_ARGS ?=
VENV := .venv$(patsubst %,-torch%,$(filter-out $(PINNED_TORCH),$(TORCH)))
# The pins that do not apply to another torch. torch itself is installed by its version, and pinned to it afterwards.
UNPINNED := torch$(if $(filter-out $(PINNED_TORCH),$(TORCH)),\|triton\|nvidia-[a-z0-9-]*)
BIN := $(VENV)/bin
# The variables reach pip's isolated build environment, which -c does not (older pips read the first, newer the second).
PIP := PIP_CONSTRAINT=$(VENV)/constraints.txt PIP_BUILD_CONSTRAINT=$(VENV)/constraints.txt \
       $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS)
SOURCES := pyproject.toml CMakeLists.txt constraints.txt $(shell find src native -type f 2>/dev/null | grep -v __pycache__)

.DEFAULT_GOAL := help
.PHONY: help install demo docs test test-gpu test-gpu-sanitizer lint test-asan bench bench-gpu mutants reliability clean

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

$(VENV)/torch.stamp: constraints.txt
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10) and "gemmtune needs Python 3.10 or newer: make PYTHON=...")'
	@grep -v '^\($(UNPINNED)\)==' constraints.txt > $(VENV)/constraints.txt
	@echo "torch==$(TORCH)" >> $(VENV)/constraints.txt
	@echo "installing torch $(TORCH)"
	@$(PIP) 'torch==$(TORCH)'
	@touch $@

$(VENV)/gemmtune.stamp: $(VENV)/torch.stamp $(SOURCES)
	@echo "building and installing gemmtune (the first time takes a few minutes)"
	@$(PIP) '.[dev,report,docs]'
	@touch $@

install: $(VENV)/gemmtune.stamp

demo: install
	$(BIN)/python examples/demo.py

test: install
	$(BIN)/python -m pytest tests

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy --strict src

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-asan: install
	scripts/test-asan $(BIN)/python

bench: install
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/tuning.py
	$(BIN)/python benchmarks/e2e.py

test-gpu:
	PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m pytest -p no:cacheprovider tests/gpu

test-gpu-sanitizer:
	PYTHONPATH=src:$$PYTHONPATH scripts/test-sanitizer $(PYTHON)

bench-gpu:
	PYTHONPATH=src:$$PYTHONPATH $(PYTHON) benchmarks/h200.py

mutants: install
	scripts/mutants

reliability: install
	PYTHONPATH=tests $(BIN)/python -m reliability

clean:
	rm -rf .venv .venv-torch* build dist report.html .gemmtune .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
