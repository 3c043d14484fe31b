# Every target makes what it needs: a fresh checkout and Python 3.11+ are enough.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# The pinned CPU build comes first: plain torch would bring gigabytes of CUDA to a machine without a GPU.
TORCH ?= torch==2.13.0
PIP := -m pip --disable-pip-version-check install --progress-bar off
# $(call installing,WHAT,VENV) COMMAND: what it prints goes to a log, which is shown only if it fails.
installing = tools/installing.sh "$(1)" $(2)/install.log
# $(call install,WHAT,VENV) PACKAGES
install = $(call installing,$(1) into $(2),$(2)) $(2)/bin/python $(PIP)
# Versions that are known to work together (`make constraints` writes them); torch is TORCH.
KNOWN_GOOD := -c constraints.txt
# $(call venv,VENV): make it, with pip.
venv = $(1)/bin/python -m pip --version >/dev/null 2>&1 || $(call installing,pip into $(1),$(1)) $(PYTHON) -m venv $(1)
SEED ?= 1
KILLS ?= 1000
# Processes of `make test`. Its tests wait more than they compute, so it is one more than CI's cores.
WORKERS ?= 3
# Not empty: measure which lines the tests run, also in child processes (out/coverage/index.html).
COV ?=
COVERAGE = $(if $(COV),--cov --cov-report=term:skip-covered --cov-report=html:out/coverage)
# The share of all CPUs' time that is taken from tests while they run, as by a busy host (0.45).
STEAL ?=
PYTEST = $(if $(STEAL),$(PY) tools/steal.py $(STEAL)) $(PY) -m pytest
# How many simulated runs.
SEEDS ?= 1000
# embedded; sglang: a real SGLang server on the CPU, in a virtual environment of its own; or shared:
# no server, the trainer's process generates.
BACKEND ?= embedded
SGLANG_VENV ?= .venv-sglang
# The peers that some tests and benchmarks compare with.
PEERS_VENV ?= .venv-peers
# The fuzzer of make test-attacks.
ATTACKS_VENV ?= .venv-attacks
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false

.PHONY: docs reference constraints bench-envs bench-report demo learn demo-seeds test test-extras test-docs test-faults test-attacks test-clusters test-learning test-sglang test-sglang-short test-peers sglang simulate soak check bench bench-start bench-top bench-server bench-rollout bench-workers bench-datapipe bench-ledger bench-reward bench-engine bench-train bench-trl bench-async bench-sglang clean help

help:
	@echo "make demo         the whole loop on this machine: server, training, curve, audit (SEED=1 BACKEND=embedded|sglang|shared)"
	@echo "make learn LESSON=tic_tac_toe  a tiny model learns an environment: one of tools/lessons (SEED=1)"
	@echo "make test         the tests, in several processes (WORKERS=3); COV=1 measures coverage"
	@echo "                  STEAL=0.45: while CPUs are taken away, as by a busy host; also test-extras, test-docs, test-faults"
	@echo "make test-extras  the tests that make test skipped, with every extra, bubblewrap and Chromium; installs them"
	@echo "make test-docs    every tutorial and every example, typed as written"
	@echo "make test-faults  whole runs that are killed, stopped, blocked and starved, and replayed"
	@echo "make test-attacks strangers, web pages and broken peers against live runs"
	@echo "make test-clusters  runs under torchrun, and on a real Slurm and Ray where those are installed"
	@echo "make test-sglang  the tests against real SGLang servers on the CPU; test-sglang-short: a part of two minutes"
	@echo "make test-learning  each algorithm learns the demo's task"
	@echo "make test-peers   losses and gradients against TRL's, in a virtual environment of its own: $(PEERS_VENV)"
	@echo "make sglang       the virtual environment they run in: $(SGLANG_VENV)"
	@echo "make simulate     simulated runs with crashes in virtual time; a failing one is a seed (SEEDS=1000)"
	@echo "make soak         the demo, run after run, under random kills of every role (KILLS=1000)"
	@echo "make check        format, lint, types, import floors, sizes, the reference"
	@echo "make constraints  constraints.txt from the versions that are installed"
	@echo "make docs         the site: out/site/index.html; make reference: docs/reference from the code"
	@echo "make bench        every benchmark but bench-sglang; each prints a table and writes out/bench/<name>.json"

$(VENV)/.run: pyproject.toml constraints.txt
	@$(call venv,$(VENV))
	@$(PY) -c "import torch" 2>/dev/null || $(call install,torch (once: some minutes),$(VENV)) $(TORCH)
	@$(call install,AReaLite,$(VENV)) $(KNOWN_GOOD) -e ".[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(call install,the tests' packages,$(VENV)) $(KNOWN_GOOD) -e ".[dev,demo]"
	@touch $@

sglang:
	PYTHON=$(PYTHON) tools/setup_sglang_cpu.sh $(SGLANG_VENV)

demo: $(VENV)/.run $(if $(filter sglang,$(BACKEND)),sglang)
	$(PY) tools/demo.py --seed $(SEED) --backend $(BACKEND)

# A tiny model learns one of tools/lessons.
learn: $(VENV)/.run
	$(PY) tools/learn.py $(LESSON) --seed $(SEED)

demo-seeds: $(VENV)/.run
	for seed in 1 2 3; do $(PY) tools/demo.py --seed $$seed || exit 1; done

# What is skipped is written to out/skips.txt.
test: $(VENV)/.dev
	SKIPS=out/skips.txt $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(COVERAGE)

# What the last `make test` skipped, with every package that it lacked.
test-extras: $(VENV)/.envs
	SKIPS=out/skips-extras.txt $(PY) tools/skips.py rerun out/skips.txt $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Tutorials and examples, typed as they stand.
test-docs: $(VENV)/.envs
	$(PYTEST) -m "docs or examples" -n $(WORKERS) --dist worksteal tests/docs tests/examples

test-faults: $(VENV)/.dev
	$(PYTEST) -m faults tests/e2e

# In a virtual environment of its own, because it is a pytest plugin, too.
$(ATTACKS_VENV)/.dev: Makefile
	@$(call venv,$(ATTACKS_VENV))
	@$(call install,schemathesis,$(ATTACKS_VENV)) "schemathesis>=4.32,<5"
	@touch $@

# Strangers, web pages and broken peers against live runs.
test-attacks: $(VENV)/.envs $(ATTACKS_VENV)/.dev
	SCHEMATHESIS=$(abspath $(ATTACKS_VENV))/bin/schemathesis $(PYTEST) -m attacks tests/attacks

# Every package that a test or an environment may need, and Debian's where root installs.
$(VENV)/.envs: $(VENV)/.dev tools/setup_envs.sh
	@$(call install,every extra,$(VENV)) $(KNOWN_GOOD) -e ".[dev,demo,browser,tools,envs,wandb,trackio,docs]"
	@tools/setup_envs.sh $(VENV)/install.log
	@touch $@

bench-envs: $(VENV)/.envs
	for name in episodes sandbox openenv browser reward; do $(PY) tools/bench_$$name.py || exit 1; done

$(VENV)/.ray: $(VENV)/.dev
	@$(call install,Ray,$(VENV)) -e ".[dev,demo,ray]"
	@touch $@

test-clusters: $(VENV)/.ray
	$(PY) -m pytest -m cluster tests/clusters

test-sglang: $(VENV)/.dev sglang
	$(PY) -m pytest -m sglang tests/contracts tests/sglang

# Those that are marked sglang_short: the contract's core, a client and every way to publish, on one server.
test-sglang-short: $(VENV)/.dev sglang
	$(PY) -m pytest -m "sglang and sglang_short" tests/contracts tests/sglang

$(PEERS_VENV)/.dev: pyproject.toml
	@$(call venv,$(PEERS_VENV))
	@$(call install,torch (once: some minutes),$(PEERS_VENV)) $(TORCH)
	@$(call install,AReaLite and TRL,$(PEERS_VENV)) -e ".[dev,peers]"
	@touch $@

test-learning: $(VENV)/.dev
	$(PY) -m pytest -m learning tests/learning

test-peers: $(PEERS_VENV)/.dev
	$(PEERS_VENV)/bin/python -m pytest -m peers tests/impl

simulate: $(VENV)/.dev
	$(PY) tools/simulate.py --seeds $(SEEDS)

soak: $(VENV)/.dev
	$(PY) -u tools/soak.py --kills $(KILLS)

check: $(VENV)/.dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright
	$(VENV)/bin/lint-imports --no-cache
	$(PY) tools/check_sizes.py
	$(PY) tools/check_language.py
	$(PY) tools/reference.py --check

# The versions that are installed now, once `make test` and `make test-extras` passed with them.
constraints: $(VENV)/.envs
	$(PY) tools/constraints.py >constraints.new && mv constraints.new constraints.txt

reference: $(VENV)/.dev
	$(PY) tools/reference.py

$(VENV)/.docs: $(VENV)/.dev
	@$(call install,mkdocs,$(VENV)) $(KNOWN_GOOD) -e ".[dev,demo,docs]"
	@touch $@

docs: $(VENV)/.docs reference
	$(PY) -m mkdocs build --quiet
	@echo "out/site/index.html"

bench: bench-start bench-server bench-rollout bench-workers bench-datapipe bench-ledger bench-reward bench-engine bench-train bench-async

bench-start bench-top bench-server bench-rollout bench-workers bench-datapipe bench-ledger bench-reward bench-engine bench-train bench-async: bench-%: $(VENV)/.dev
	$(PY) tools/bench_$*.py

bench-train: bench-trl

# The whole loop against TRL's; both sides run in the virtual environment that has TRL.
bench-trl: $(PEERS_VENV)/.dev
	$(PEERS_VENV)/bin/python tools/bench_trl.py

bench-report: $(VENV)/.envs
	$(PY) tools/bench_report.py

bench-sglang: $(VENV)/.dev sglang
	$(PY) tools/bench_sglang.py

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(PEERS_VENV) $(ATTACKS_VENV) out runs build dist
