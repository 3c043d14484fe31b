"""Compare trained samples per second with TRL's GRPOTrainer: same model, prompts and loss.

Four cases: answers that end by themselves within 8 tokens, answers of exactly 128 tokens, answers
of heavy-tailed lengths (log-normal, median 20, σ 1, clipped to 4 … 128), all to prompts of 7
tokens, and answers of exactly 64 tokens to prompts of 512 tokens. AReaLite runs as a user starts
it: `train.py` with datapipe, worker, trainer and an embedded server, four processes. TRL generates
with transformers in the trainer's process. Both have both cores and run alternately.
Model: a random Qwen2 of 0.8 M parameters; 32 prompts × 8 samples per step, one update per step,
GRPO with group std, token mean, clip 0.2, no reference, AdamW, float32. TRL has two torch threads,
no checkpoints, logs, evaluation or gradient checkpointing, and its fastest micro-batch
(`trl_rows`). AReaLite's settings are in `OURS` and in the printed table. The first and last steps
are left out, because buffers fill and empty there.

    .venv-peers/bin/python tools/bench_trl.py [--repeats 3] [--cases short fixed heavy prompts]

Writes out/bench/trl.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arealite.api.agent import Agent, agents  # noqa: E402
from arealite.api.env import Env, envs  # noqa: E402
from arealite.api.observation import observe  # noqa: E402
from arealite.api.task import Task  # noqa: E402
from arealite.ext.demo.sorting import draw, question  # noqa: E402
from arealite.impl.agent.math_code_single_step import MathCodeSingleStepAgent  # noqa: E402
from tools import figures  # noqa: E402
from tools.trl_parts import clock_of, trl_config  # noqa: E402

PROMPTS, SAMPLES, MOST, LR = 32, 8, 128, 1e-5
BATCH = PROMPTS * SAMPLES
LENGTH = "completions/mean_length"
WARM_STEPS = 4
BUSY = 0.25
"""Cores in use by other processes from which on a pair is discarded, if there is a better pair."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Lengths of answers, number of timed steps, and settings of AReaLite."""

    longest: int
    trl_steps: int
    our_steps: int
    wanted: float
    staleness: int
    trl_rows: int
    """Rows of a micro-batch."""
    prompt: int = 7
    """Tokens of a prompt."""
    ours: tuple[str, ...] = ()


BUDGET = "trainer.ppo.engine.fsdp.max_tokens_per_microbatch"
OURS = (
    f"{BUDGET}=2048",
    "trainer.ppo.publisher.pause_mode=in_place",
    "launcher.llm_servers=1",
)
SHORT = *OURS, f"{BUDGET}=4096"
"""Settings for short rows, which need little memory per token."""
CASES = {
    "short": Case(8, 20, 40, 1.5, staleness=2, trl_rows=256, ours=SHORT),
    "fixed": Case(MOST, 6, 10, 1.5, staleness=2, trl_rows=256, ours=OURS),
    "heavy": Case(MOST, 8, 20, 5.0, staleness=2, trl_rows=256, ours=SHORT),
    "prompts": Case(64, 4, 8, 4.0, staleness=2, trl_rows=32, prompt=512, ours=OURS),
}
EXACT = "fixed", "prompts"
"""Cases in which every answer has the longest length."""
SPLIT = "rows", "forward", "advantages", "update", "report", "stage", "log", "other"


def heavy_length(rng: random.Random, longest: int = MOST) -> int:
    """Draw the length of one answer."""
    return round(min(max(rng.lognormvariate(math.log(20), 1.0), 4), longest))


def score(text: str) -> float:
    """Return the share of digits: it differs between the answers of a random model."""
    return sum(map(str.isdigit, text)) / max(1, len(text))


@envs.register("digits")
class DigitsEnv(Env):
    """Environment of one answer; TRL's reward function computes the same reward."""

    async def run(self, task: Task, **agents: Agent) -> None:
        (agent,) = agents.values()
        action = await agent.act(task.prompt)
        agent.reward(score(action.text))


class TextAgent(MathCodeSingleStepAgent):
    """Agent that sends the prompt as it is, like TRL: without a chat template."""

    def build_prompt(self, observation: object) -> str:
        return observe(observation).content


class LengthAgent(TextAgent):
    """Agent that generates exactly `length` tokens."""

    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        length = self.length()
        sampling = dataclasses.replace(
            self.seat.sampling, max_new_tokens=length, min_new_tokens=length
        )
        self.seat = dataclasses.replace(self.seat, sampling=sampling)

    def length(self) -> int:
        """Return the budget of the seat."""
        return self.seat.sampling.max_new_tokens


@agents.register("heavy")
class HeavyAgent(LengthAgent):
    """Agent that draws the length from the episode's name."""

    def length(self) -> int:
        return heavy_length(random.Random(self.seat.episode_id))


for name in ("fixed", "prompts"):
    agents.register(name)(LengthAgent)
agents.register("short")(TextAgent)


def make_kit(folder: Path, length: int) -> None:
    """Write the model, and prompts of `length` tokens that end like those of the demo."""
    from tests.models import tiny_model

    tiny_model(
        folder / "model",
        seed=0,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        max_position_embeddings=1024,
        init_std=0.02,
    )
    rng, rows = random.Random(0), list[dict[str, str]]()
    for each in draw(random.Random(0), 2048):
        before = "".join(rng.choices("123456789", k=length - len(question(each))))
        rows.append({"prompt": before + question(each), "ground_truth": ""})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ------------------------------------------------------------------------------------------ TRL


def trl_side(name: str, kit: Path) -> None:
    """Train with TRL in this process and print the measurements."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    case, ends = CASES[name], list[float]()
    steps = WARM_STEPS + case.trl_steps
    torch.set_num_threads(2)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [score(text) for text in completions]

    config = trl_config(
        kit / "trl",
        per_device_train_batch_size=case.trl_rows,
        gradient_accumulation_steps=BATCH // case.trl_rows,
        num_generations=SAMPLES,
        max_completion_length=case.longest,
        generation_kwargs={"min_new_tokens": case.longest} if name in EXACT else None,
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
    )
    rows = [json.loads(line) for line in (kit / "train.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(kit / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(kit / "model"),
        callbacks=[clock_of(ends)],
    )
    if name == "heavy":
        end_where_drawn(trainer)
    trainer.train()
    seconds = [b - a for a, b in itertools.pairwise(ends)][WARM_STEPS - 1 :]
    tokens = next(found for line in trainer.state.log_history if (found := line.get(LENGTH)))
    print(json.dumps({"seconds": statistics.mean(seconds), "tokens": tokens}))


def end_where_drawn(trainer: Any) -> None:
    """Makes each row of `generate` end with EOS at a drawn length, and not before."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    rng, eos = random.Random(0), trainer.model.generation_config.eos_token_id

    class Ends(LogitsProcessor):
        def __init__(self) -> None:
            self.shown, self.lengths = MOST**2, torch.empty(0)

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] <= self.shown:  # a new generation
                self.lengths = torch.tensor([heavy_length(rng) for _ in input_ids])
                self.first = input_ids.shape[1]
            self.shown = input_ids.shape[1]
            now = self.lengths == self.shown - self.first + 1
            scores[:, eos] = -torch.inf
            scores[now] = -torch.inf
            scores[now, eos] = 0.0
            return scores

    generate, ends = trainer.model.generate, LogitsProcessorList([Ends()])
    trainer.model.generate = lambda **options: generate(**options, logits_processor=ends)


def run_trl(name: str, kit: Path) -> dict[str, float]:
    """Measure TRL in a separate process, with both cores."""
    command, others = [sys.executable, __file__, "--trl", name, "--kit", str(kit)], Others()
    environment = os.environ | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stdout}{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {"samples_per_s": BATCH / found["seconds"], **found, "others": others.cores()}


# ----------------------------------------------------------------------------------------- ours


def names(kit: Path) -> list[str]:
    """Return the overrides by which server and trainer find each other."""
    return ["experiment_name=bench", "trial_name=t", f"cluster.name_root={kit / 'names'}"]


def environment() -> dict[str, str]:
    """Return the environment, with this module as a plugin; the config sets the threads."""
    folders = [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, folders))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def run_ours(name: str, kit: Path, repeat: int) -> dict[str, float]:
    """Train with AReaLite; return samples per second and the trainer's seconds by part."""
    case, run_root, others = CASES[name], kit / f"{name}-{repeat}", Others()
    last = WARM_STEPS + case.our_steps
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *("--config", str(ROOT / "config" / "async_ppo.yaml")),
        *names(kit),
        f"model.path={kit / 'model'}",
        f"dataset.train={kit / 'train.jsonl'}",
        f"cluster.run_root={run_root}",
        "imports=[bench_trl]",
        f"trainer.ppo.collector.agent.type={name}",
        "trainer.ppo.collector.env.type=digits",
        f"trainer.ppo.batch_size={BATCH}",
        f"trainer.ppo.lr={LR}",
        "trainer.ppo.optimizer.warmup_steps=0",
        f"trainer.ppo.collector.group_size={SAMPLES}",
        f"trainer.ppo.collector.sampling.max_new_tokens={case.longest}",
        f"trainer.ppo.max_staleness={case.staleness}",
        # No generation runs beside the last steps, so the trainer has all cores there.
        f"trainer.ppo.total_steps={last + case.staleness + 1}",
        "trainer.ppo.checkpoint.every_steps=0",
        "trainer.ppo.checkpoint.export=false",
        "logger.types=[]",
        *case.ours,
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"train.py failed:\n{done.stdout}{done.stderr}")
    lines = (run_root / "bench" / "t" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if "throughput/trained_tokens" in line]
    timed = steps[WARM_STEPS:last]
    seconds = (timed[-1]["time"] - steps[WARM_STEPS - 1]["time"]) / len(timed)

    def mean(key: str) -> float:
        return statistics.mean(line.get(key, 0.0) for line in timed)

    split = {f"{part}_s": mean(f"time/{part}_s") for part in SPLIT}
    split |= {f"wait_{part}_s": mean(f"wait/{part}_s") for part in ("batch", "publish")}
    tokens = mean("length/trained_mean")
    found = {"samples_per_s": BATCH / seconds, "seconds": seconds, "tokens": tokens}
    return found | {"others": others.cores()} | split


class Others:
    """Measures the cores that other processes use."""

    def __init__(self) -> None:
        self.began = self._read()

    def cores(self) -> float:
        """Return their mean number since the start."""
        return (self._read()[0] - self.began[0]) / (self._read()[1] - self.began[1])

    @staticmethod
    def _read() -> tuple[float, float]:
        lines = Path("/proc/stat").read_text().splitlines()
        user, nice, system, _, _, irq, soft, *_ = (int(word) for word in lines[0].split()[1:])
        busy = (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
        return busy - sum(os.times()[:4]), time.perf_counter()


def main() -> None:
    """Run both sides alternately and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--trl", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--kit", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=figures.FOLDER / "trl.json")
    options = parser.parse_args()
    if options.trl:
        trl_side(options.trl, options.kit)
        return
    found: dict[str, Any] = {}
    for name in options.cases:
        found[name] = compare(name, options.repeats)
    figures.save(options.out, found, keep=True)


def compare(name: str, repeats: int) -> dict[str, Any]:
    """Run one case on both sides alternately; return medians."""
    case, pairs = CASES[name], list[dict[str, dict[str, float]]]()
    print(f"{name}: {case}")
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            kit, pair = Path(folder), dict[str, dict[str, float]]()
            make_kit(kit, case.prompt)
            wait_for_quiet()
            pair["trl"] = run_trl(name, kit)
            wait_for_quiet()
            pair["ours"] = run_ours(name, kit, repeat)
        pairs.append(pair)
        for side, found in pair.items():
            print(f"  {side:5}", "  ".join(f"{k} {v:.3f}" for k, v in found.items()), flush=True)
    quiet = [pair for pair in pairs if all(side["others"] < BUSY for side in pair.values())]
    print(f"{name}: {len(quiet)} of {repeats} pairs ran without load of other processes")
    pairs = quiet or pairs
    sides = {
        side: {k: statistics.median(pair[side][k] for pair in pairs) for k in figures}
        for side, figures in pairs[0].items()
    }
    ratio = statistics.median(p["ours"]["samples_per_s"] / p["trl"]["samples_per_s"] for p in pairs)
    print(f"{name}: ours / TRL, median of {len(pairs)} pairs: {ratio:.2f} (goal: {case.wanted})")
    about = {"ratio": ratio, "pairs": len(pairs), "quiet_pairs": len(quiet)}
    return {**about, **sides, "settings": dataclasses.asdict(case)}


def wait_for_quiet(seconds: float = 120.0) -> None:
    """Wait until other processes use no CPU, at most `seconds`."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        others = Others()
        time.sleep(3.0)
        if others.cores() < BUSY / 2:
            return


if __name__ == "__main__":
    main()
