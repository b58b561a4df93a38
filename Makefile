# Two commands matter: `make serve` and `make test`. Each does its own set-up, once.
PYTHON ?= python3
# Where pip shall look for torch first: an address of CPU wheels spares gigabytes of CUDA (see README).
TORCH_INDEX ?=
# Of the simulator: how many schedules, and the first one's number.
SEEDS ?= 3000
FIRST ?= 0
# Of the fault sweep: the cells with this in their name; none: all.
ONLY ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The installer's own chatter is kept for the case that it fails.
PIP := $(BIN)/python -m pip --disable-pip-version-check
BUILT := $(wildcard protos/flipmesh/*/v1/*.proto kernels/cpu/native/*.c kernels/cpu/native/*.h)

.DEFAULT_GOAL := help
.PHONY: help install fetch serve slow sanitize test sim faults check fix protos bench clean

help:
	@echo "make serve   set up, fetch the default model, serve it on http://127.0.0.1:8000"
	@echo "make test    set up and run the tests"
	@echo "make sim     simulated schedules of the flip, SEEDS of them from FIRST on"
	@echo "make slow    the sweeps that make test leaves out"
	@echo "make sanitize  the C kernels under address, undefined-behaviour and thread sanitizers"
	@echo "make faults  processes killed and stopped in every state of a flip; goes on where it was stopped; ONLY=text of a name"
	@echo "make check   lint, types, import contracts, bounds"
	@echo "make fix     format, and mend what the linter can"
	@echo "make bench   figures of this machine: kernels, then the whole mesh"
	@echo "make clean   remove what was built and installed (models stay in the cache)"

$(INSTALLED): pyproject.toml setup.py constraints.txt $(BUILT)
	@command -v cc >/dev/null || { echo "flipmesh builds one C extension: install a C compiler (Debian: apt install gcc)"; exit 1; }
	@test "$$(uname -s)" = Linux || { echo "flipmesh runs on Linux only (memfd, futex, pidfd)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
		{ echo "flipmesh needs Python 3.11, 3.12 or 3.13: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || \
		{ echo "flipmesh builds one C extension: install Python's headers (Debian: apt install python3-dev)"; exit 1; }
	@echo "installing into $(VENV) (a minute or two) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -z "$(TORCH_INDEX)" || $(PIP) install -q -c constraints.txt --no-deps --index-url $(TORCH_INDEX) torch
	@$(PIP) install -q -c constraints.txt -e '.[worker,dev]' >$(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
	@touch $@

install: $(INSTALLED)

fetch: $(INSTALLED)
	@$(BIN)/flipmesh fetch

serve: fetch
	@exec $(BIN)/honcho start

sanitize: $(INSTALLED)
	@$(BIN)/python -m tests.sanitize

slow: fetch
	@$(BIN)/pytest -m slow --timeout 600

# Whole meshes run one after the other: each wants every core.
test: fetch
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow and not gpu" -n 2 --dist loadfile --ignore tests/mesh --ignore tests/faults
	@$(BIN)/pytest -m "not slow and not gpu" tests/mesh tests/faults

sim: $(INSTALLED)
	@$(BIN)/python -m tests.sim.run --seeds $(SEEDS) --first $(FIRST)

faults: fetch
	@$(BIN)/python -m tests.faults --only "$(ONLY)"

check: $(INSTALLED)
	@$(BIN)/ruff format --check -q . && $(BIN)/ruff check -q . && $(BIN)/mypy && $(BIN)/lint-imports --no-cache && \
		$(BIN)/pytest tests/unit/mesh/test_bounds.py

fix: $(INSTALLED)
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q .

protos: $(INSTALLED)
	@$(BIN)/python setup.py -q build_protos build_ext --inplace

bench: fetch
	@$(BIN)/python -m kernels.bench.linear && $(BIN)/python -m kernels.bench.attention && \
		$(BIN)/python -m kernels.bench.collectives && $(BIN)/python -m tools.bench.run

clean:
	@rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .hypothesis kernels/*.so
	@find protos \( -name '*_pb2*.py' -o -name '*_pb2*.pyi' \) -delete
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
