"""Roll out with a running language-model server, and print trajectories.

    python3 arealite/launch_llm_server.py &
    python3 tests/test_rollout.py                 # options as of train.py: key=value

The script reads config/async_ppo.yaml, and finds the server by experiment_name and trial_name. The
model and, without `dataset.train`, the tasks are those of the server. pytest runs the same two
commands.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from arealite.api.agent import load_tokenizer
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import clients
from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Episode, Lease
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.cli import configs
from arealite.cli.main import run
from arealite.impl.rollout.collector import Collector
from arealite.system.data.dataset import load_tasks
from arealite.system.names.name_registry import NameRegistry
from tests.payloads import decode_segments

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "config" / "async_ppo.yaml"
TASKS, SAMPLES = 2, 2


def read_config(argv: Sequence[str]) -> ExperimentConfig:
    """Return the config, with model, tasks and context length of the trial's server."""
    about = "Roll out with a running server, and print trajectories."
    words = ["--config", str(CONFIG), *argv]
    config = configs.parse(ExperimentConfig, words, command="test_rollout.py", description=about)
    entries = NameRegistry.of(config).list("llm_server")
    if not entries:
        raise UserError(
            f"no server of {config.experiment_name}/{config.trial_name} is running. Start one: "
            "python3 arealite/launch_llm_server.py"
        )
    model, context = entries[0].value["model_path"], entries[0].value["context_length"]
    ppo, rows = config.trainer.ppo, config.dataset.train or str(Path(model).parent / "train.jsonl")
    sampling = ppo.collector.sampling
    shorter = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, context // 2))
    ppo = replace(ppo, collector=replace(ppo.collector, sampling=shorter))
    return replace(
        config,
        model=replace(config.model, path=config.model.path or model),
        dataset=replace(config.dataset, train=rows),
        trainer=replace(config.trainer, ppo=ppo),
    )


async def roll_out(
    config: ExperimentConfig, tasks: Sequence[Task]
) -> list[tuple[Task, Episode, list[Payload]]]:
    """Run SAMPLES episodes of each task concurrently."""
    own = config.trainer.ppo.collector
    client = clients.get(own.client.type)(config, own.client)
    collector = Collector(config, client, load_tokenizer(config.model.path))
    jobs = [
        (
            Lease(
                lease_id=f"l{index}",
                group_id=f"g{index}",
                split="train",
                task=task,
                members=[*range(SAMPLES)],
                version=0,
            ),
            member,
        )
        for index, task in enumerate(tasks)
        for member in range(SAMPLES)
    ]
    await client.start()
    await collector.setup()
    try:
        found = await asyncio.gather(*(collector.run(lease, member) for lease, member in jobs))
    finally:
        await collector.close()
        await client.close()
    return [(job[0].task, *each) for job, each in zip(jobs, found, strict=True)]


def show(tokenizer: Any, task: Task, episode: Episode, payloads: Sequence[Payload]) -> None:
    """Print the trajectories of an episode, or its failure."""
    if episode.failure is not None:
        print(f"{task.task_id}: {episode.failure.failure_class}: {episode.failure.detail}")
    for header, payload in zip(episode.headers, payloads, strict=True):
        for segment in decode_segments(payload):
            tokens = memoryview(segment.tokens).cast("i").tolist()
            sampled = [token for token, on in zip(tokens, segment.loss_mask, strict=True) if on]
            print(f"trajectory {header.trajectory_id}")
            print(f"  reward     {header.reward:g}")
            print(f"  prompt     {task.prompt!r}")
            print(f"  completion {tokenizer.decode(sampled, skip_special_tokens=True)!r}")
            print(f"  tokens     {len(tokens)}, of which {len(sampled)} sampled")
            print(f"  versions   {header.oldest_version} to {header.newest_version}")


def main(argv: Sequence[str]) -> int:
    """Roll out and print; return 1 if an episode failed."""
    config = read_config(argv)
    tasks = load_tasks(config.dataset.train, "train")[:TASKS]
    made = asyncio.run(roll_out(config, tasks))
    for each in made:
        show(load_tokenizer(config.model.path), *each)
    return int(any(episode.failure is not None for _, episode, _ in made))


if __name__ == "__main__":
    sys.exit(run("__main__", sys.argv[1:]))


def script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run this file in a folder, as a user does."""
    command = [sys.executable, str(ROOT / "tests" / "test_rollout.py"), *words]
    return subprocess.run(
        command, cwd=folder, env=home(folder), capture_output=True, text=True, check=False
    )


def home(folder: Path) -> dict[str, str]:
    """Return an environment in which names are kept below a folder."""
    return os.environ | {"HOME": str(folder), "PYTHONPATH": ""}


def test_script_without_a_server_prints_the_command_that_starts_one(tmp_path: Path) -> None:
    done = script(tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: no server of arealite/trial is running. Start one: python3 "
        "arealite/launch_llm_server.py\n"
    )


def test_script_prints_trajectories_of_the_server_that_needs_no_arguments(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "arealite" / "launch_llm_server.py")]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=home(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            first = server.stdout.readline()
            assert first == (
                "model.path is not set: runs/demo/kit-seed1/model is served, a tiny model that "
                "sorts six digits. For your own: model.path=FOLDER\n"
            )
            assert any("server ready" in line for line in server.stdout)  # it blocks until then
            done = script(tmp_path)
        finally:
            server.send_signal(signal.SIGTERM)
    assert done.returncode == 0, done.stdout + done.stderr
    found = done.stdout.split("trajectory ")[1:]
    assert [each.split()[0] for each in found] == [
        f"g{task}/{sample}/agent" for task in range(TASKS) for sample in range(SAMPLES)
    ]
    for each in found:
        fields = dict(line.split(maxsplit=1) for line in each.splitlines()[1:])
        prompt, completion = fields["prompt"].strip("'"), fields["completion"].strip("'")
        assert (float(fields["reward"]) == 1.0) == (completion == "".join(sorted(prompt[:-1])))
        assert fields["versions"] == "0 to 0"
