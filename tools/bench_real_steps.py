"""Compare whole steps of the lesson `alphabet_sort` with TRL's GRPOTrainer, and measure memory.

Both sides train the same model on the same tasks with the same reward, loss and lengths, one after
the other: 16 prompts × 8 samples a step. AReaLite runs as in the lesson, with its own server beside
the trainer. TRL generates with transformers in the trainer's process. The time of a step is the
median of eight steps of AReaLite and of two of TRL; the first steps are left out, and AReaLite's
last, beside which no answers are generated. With --pairs N, both sides alternate N times, each
setting of TRL (threads, rows of a micro-batch, dtype) once each time. The figures are medians, and
the ratio of a pair uses TRL's fastest setting.

Memory is the largest sum over AReaLite's processes of their PSS after the self-check. Instead of
the shared memory that they map, all files of the run in /dev/shm count if these are larger.

    make bench-real-steps
    .venv-peers/bin/python tools/bench_real_steps.py [--pairs 3] [--trl 2:16:float32 …]

Writes out/bench/real_steps.json. The model is SmolLM2-135M-Instruct, or FOLDER, for instance the
export of a lesson's warm start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from safetensors import safe_open  # noqa: E402

from arealite.ext.demo.lesson import find_lesson, write_data  # noqa: E402
from arealite.ext.demo.lessons.alphabet_sort import names_in_place  # noqa: E402
from tools import figures, smollm2  # noqa: E402
from tools.bench_trl import wait_for_quiet  # noqa: E402
from tools.trl_parts import clock_of, trl_config  # noqa: E402

BATCH, GROUP = 128, 8
WARM_STEPS = 2
"""First steps that are left out: buffers fill, and memory is allocated."""
LAST_STEPS = 2
"""Last steps of AReaLite that are left out: the staleness and one."""
SHARED_MEMORY = Path("/dev/shm")
BYTES_OF_TRAINING = 16
"""Weights, gradients and two moments of each parameter, in float32."""
TRL_SETTINGS = "2:16:float32", "2:32:float32", "1:16:float32"
LESSON = find_lesson("alphabet_sort")


# ------------------------------------------------------------------------------------------ TRL


def trl_side(setting: str, model: Path, data: Path, steps: int) -> None:
    """Train with TRL in this process, and print the measurements."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    threads, micro_batch, dtype = setting.split(":")
    torch.set_num_threads(int(threads))
    ends, rewards = list[float](), list[float]()

    def reward(completions: Any, ground_truth: list[str], **_: Any) -> list[float]:
        answers = [messages[0]["content"] for messages in completions]
        own_rewards = list(map(names_in_place, answers, ground_truth))
        rewards.append(statistics.mean(own_rewards))
        return own_rewards

    config = trl_config(
        data / "trl",
        bf16=dtype == "bfloat16",
        per_device_train_batch_size=int(micro_batch),
        gradient_accumulation_steps=BATCH // int(micro_batch),
        num_generations=GROUP,
        max_completion_length=LESSON.max_new_tokens,
        max_steps=steps,
        learning_rate=2e-5,
        warmup_steps=4,
        lr_scheduler_type="constant_with_warmup",
        epsilon_high=0.28,
        loss_type="dr_grpo",
        scale_rewards="none",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(read_rows(data / "train.jsonl")),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[clock_of(ends)],
    )
    trainer.train()
    seconds = [b - a for a, b in itertools.pairwise(ends)][WARM_STEPS - 1 :]
    print(json.dumps({"seconds": statistics.median(seconds), "rewards": rewards}))


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read a JSONL file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def run_trl(setting: str, model: Path, data: Path, steps: int) -> dict[str, Any]:
    """Measure TRL with one setting in a process of its own."""
    command = [sys.executable, __file__, "--setting", setting, "--model", str(model)]
    environment = os.environ | {"OMP_NUM_THREADS": setting.split(":")[0], "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--data", str(data), "--steps", str(steps)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stdout}{done.stderr}")
    measurements: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measurements


# ----------------------------------------------------------------------------------------- ours


def run_ours(model: Path, data: Path, steps: int) -> dict[str, Any]:
    """Train as in the lesson; return seconds of a step, rewards and the most memory."""
    run_root = data / "runs"
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *("--config", str(ROOT / "config" / "async_ppo.yaml")),
        *("experiment_name=bench", "trial_name=t", f"cluster.name_root={data / 'names'}"),
        f"cluster.run_root={run_root}",
        f"model.path={model}",
        f"dataset.train={data / 'train.jsonl'}",
        "launcher.llm_servers=1",
        *LESSON.training_options(),
        f"trainer.ppo.total_steps={WARM_STEPS + steps + LAST_STEPS}",
        "trainer.ppo.checkpoint.every_steps=0",
        "trainer.ppo.checkpoint.export=false",
    ]
    metrics = run_root / "bench" / "t" / "metrics.jsonl"
    others = {*SHARED_MEMORY.iterdir()}
    memory = list[int]()
    with (data / "ours.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(1.0)
                if metrics.exists() and "trained_tokens" in metrics.read_text():
                    # The self-check has passed.
                    pss = pss_of_tree(process.pid)
                    shared = max(pss["Pss_Shmem"], shared_files(others))
                    memory.append(pss["Pss_Anon"] + pss["Pss_File"] + shared)
        finally:
            process.terminate()
            process.wait(60)
    if process.returncode:
        sys.exit(f"train.py failed:\n{(data / 'ours.log').read_text()[-3000:]}")
    lines = [line for line in read_rows(metrics) if "throughput/trained_tokens" in line]
    lines = lines[: WARM_STEPS + steps]
    times = [line["time"] for line in lines]
    seconds = [b - a for a, b in itertools.pairwise(times)][WARM_STEPS - 1 :]
    rewards = [line["reward/mean"] for line in lines]
    return {"seconds": statistics.median(seconds), "rewards": rewards, "memory": max(memory)}


def pss_of_tree(pid: int) -> Counter[str]:
    """Return the PSS of a process and all its descendants in bytes, by kind of memory."""
    total = Counter[str]()
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        threads = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(word) for thread in threads for word in thread.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return total
    for line in lines:
        if line.startswith("Pss_"):
            kind, kilobytes, _ = line.split()
            total[kind.removesuffix(":")] += int(kilobytes) * 1024
    for child in children:
        total += pss_of_tree(child)
    return total


def shared_files(others: Container[Path]) -> int:
    """Return the bytes of the files in /dev/shm, except those in `others`."""
    total = 0
    for folder in SHARED_MEMORY.iterdir():
        for file in [folder, *folder.rglob("*")] if folder not in others else []:
            with suppress(FileNotFoundError):  # it was removed
                total += file.stat().st_blocks * 512
    return total


def number_of_parameters(model: Path) -> int:
    """Return the number of parameters in a model folder."""
    with safe_open(model / "model.safetensors", "np") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118  (not a dict)


def main() -> None:
    """Measure both sides; print and save the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=smollm2.FOLDER)
    parser.add_argument("--trl", nargs="*", default=TRL_SETTINGS, metavar="THREADS:ROWS:DTYPE")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--trl-steps", type=int, default=2)
    parser.add_argument("--our-steps", type=int, default=8)
    for hidden in ("setting", "data", "steps"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.setting:
        trl_side(options.setting, options.model, Path(options.data), int(options.steps))
        return
    model = options.model.absolute()
    pairs = [measure_pair(model, options) for _ in range(options.pairs)]
    state = number_of_parameters(model) * BYTES_OF_TRAINING
    measurements = {
        "steps.ours_samples_s": statistics.median(
            BATCH / pair["ours"]["seconds"] for pair in pairs
        ),
        **{
            f"steps.trl_{setting}_samples_s": statistics.median(
                BATCH / pair[setting]["seconds"] for pair in pairs
            )
            for setting in options.trl
        },
        "memory.gib": statistics.median(pair["ours"]["memory"] / 2**30 for pair in pairs),
        "memory.over_training_state": statistics.median(
            pair["ours"]["memory"] / state for pair in pairs
        ),
    }
    if options.trl:
        ratios = [ours_over_trl(pair, options.trl) for pair in pairs]
        measurements["steps.ours_over_trl"] = statistics.median(ratios)
        print(f"ours over TRL, by pair: {' '.join(f'{ratio:.2f}' for ratio in ratios)}")
    figures.show(measurements, digits=2)
    figures.save("real_steps.json", measurements | {"model": str(options.model)})


def measure_pair(model: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure our side, then TRL with each setting; return the measurements by setting."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        write_data(LESSON, data, 1)
        wait_for_quiet()
        pair = {"ours": run_ours(model, data, options.our_steps)}
        print(f"ours: {pair['ours']}", flush=True)
        for setting in options.trl:
            wait_for_quiet()
            pair[setting] = run_trl(setting, model, data, WARM_STEPS + options.trl_steps)
            print(f"TRL {setting}: {pair[setting]}", flush=True)
    return pair


def ours_over_trl(pair: Mapping[str, Mapping[str, Any]], settings: Sequence[str]) -> float:
    """Return our samples/s over those of TRL's fastest setting."""
    fastest: float = min(pair[setting]["seconds"] for setting in settings)
    return fastest / pair["ours"]["seconds"]


if __name__ == "__main__":
    main()
