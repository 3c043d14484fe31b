"""Rejection sampling, SFT on the model's best answers, then RL, in one command.

    python3 examples/hybrid.py model.path=/models/Qwen2.5-1.5B dataset.train=tasks.jsonl

1. `arealite collect` samples 8 answers to each of the first 512 tasks, and keeps one right answer.
2. `sft` trains on the exact tokens of these answers.
3. PPO trains the resulting model on all tasks.

If the command is stopped, the same command resumes each step. On a laptop:

    python3 examples/hybrid.py

Watch eval/reward of the last stage: its value at step 0 is the result of rejection sampling (on a
laptop: 0.62; the start model has 0.31).
"""

import sys

from _run import KITS, ONE_GPU, ROOT, complete, sorting

from arealite.cli import main

COLLECT = {"n": 8, "tasks": 512, "best_of": 1, "min_reward": 1}
OPTIONS = [
    *ONE_GPU,
    "dataset.train=generated",
    "dataset.eval=generated",
    "trainer.offline.lr=1e-5",
    "trainer.offline.epochs=2",
    "trainer.offline.engine.fsdp.gradient_checkpointing=true",
    "trainer.ppo.batch_size=256",
    "trainer.ppo.total_steps=200",
    "trainer.ppo.lr=1e-6",
    "trainer.ppo.collector.sampling.max_new_tokens=1024",
    "trainer.ppo.eval.sampling.max_new_tokens=1024",
]


def laptop() -> list[str]:
    sft = ["trainer.offline.lr=3e-4", "trainer.offline.epochs=8"]
    return [*sorting(), *sft, "trainer.ppo.total_steps=40"]


def hybrid(words: list[str]) -> int:
    """Run the three steps; return the first exit code that is not 0."""
    chosen = [f"{key}={value}" for key, value in COLLECT.items()]
    chosen += [word for word in words if word.partition("=")[0] in COLLECT]
    shared = [word for word in words if word.partition("=")[0] not in COLLECT]
    tasks, held_out = (
        [word for word in shared if word.startswith(key)][-1]
        for key in ("dataset.train=", "dataset.eval=")
    )
    KITS.mkdir(parents=True, exist_ok=True)
    good = KITS / "good.parquet"
    server = "launcher.llm_servers=1"
    code = main.run("arealite.ext.evaluation.collect", [*shared, *chosen, f"out={good}", server])
    sft = ["--config", str(ROOT / "config/sft.yaml"), f"dataset.train={good}", "dataset.eval=null"]
    ppo = ["--then", str(ROOT / "config/async_ppo.yaml"), tasks, held_out]
    return code or main.run("arealite.cli.train", [*shared, *sft, *ppo])


if __name__ == "__main__":
    sys.exit(hybrid(complete(OPTIONS, laptop)))
