# Every target makes what it needs: a fresh checkout and Python 3.11+ are enough.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# The pinned CPU build comes first: plain torch would bring gigabytes of CUDA to a machine without a GPU.
TORCH ?= torch==2.13.0
PIP := $(PY) -m pip --disable-pip-version-check --quiet
SEED ?= 1
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo demo-seeds test check bench bench-start bench-server bench-rollout bench-datapipe bench-reward bench-engine bench-async clean help

help:
	@echo "make demo    the whole loop on this machine: server, training, curve, audit (SEED=1)"
	@echo "make test    the tests"
	@echo "make check   format, lint, types, import floors, sizes"
	@echo "make bench   every benchmark; each prints a table and writes out/bench/<name>.json"

$(VENV)/.run: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c "import torch" 2>/dev/null || $(PIP) install "$(TORCH)"
	$(PIP) install -e ".[demo]"
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) install -e ".[dev,demo]"
	touch $@

demo: $(VENV)/.run
	$(PY) tools/demo.py --seed $(SEED)

demo-seeds: $(VENV)/.run
	for seed in 1 2 3; do $(PY) tools/demo.py --seed $$seed || exit 1; done

test: $(VENV)/.dev
	$(PY) -m pytest

check: $(VENV)/.dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright
	$(VENV)/bin/lint-imports --no-cache
	$(PY) tools/check_sizes.py

bench: bench-start bench-server bench-rollout bench-datapipe bench-reward bench-engine bench-async

bench-start bench-server bench-rollout bench-datapipe bench-reward bench-engine bench-async: bench-%: $(VENV)/.dev
	$(PY) tools/bench_$*.py

clean:
	rm -rf $(VENV) out runs build dist
