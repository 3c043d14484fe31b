"""The functions of the Python API. Each runs a command of the command line as a child process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arealite.api.agent import Agent
from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.env import Env
from arealite.api.sampling import CollectConfig, EvaluateConfig
from arealite.cli import preflight
from arealite.python.command import Config, Overrides, checked, command, sample, words
from arealite.python.objects import word
from arealite.python.process import Process
from arealite.python.run import Facts, Run
from arealite.system.data.dataset import read_rows


def train(
    config: Config = "async_ppo",
    *,
    model: str | Path | None = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    reward: Any = None,
    env: str | type[Env] | None = None,
    agent: str | type[Agent] | None = None,
    trial: str | None = None,
    overrides: Overrides = None,
    wait: bool = True,
) -> Run:
    """Train a model: the same run as `arealite train`, in child processes of this one.

    The input is checked first, in this process. If no server of the run exists, the run starts one.
    If this process ends, the run writes a checkpoint and stops.

    Args:
        config: A YAML file, or the name of a preset: async_ppo, ppo, sft, dpo, reward, algo/gspo.
            Several are merged; later ones win.
        model: A Hugging Face folder, or the id of a model of the Hugging Face Hub.
        dataset: Training rows: dicts, a datasets.Dataset, a DataFrame, a file, or "generated".
        eval_dataset: Held-out rows, in the same forms; None: no evaluation.
        reward: A function `f(completion, ground_truth)`, a Reward class, a list of these, a dict
            with the weight of each, "module:name", or the name of a registered reward.
        env: A registered environment: its name or class.
        agent: A registered agent: its name or class.
        trial: Name of the run. A run with the same name resumes; None: the config's.
        overrides: Other options, as in {"trainer.ppo.lr": 1e-6}.
        wait: Print the run's output and return when it has ended; False: return at once.

    Returns:
        The run.

    Raises:
        UserError: The input is wrong. No process was started.
        ArealiteError: The run failed.
    """
    data = {"dataset.train": dataset, "dataset.eval": eval_dataset}
    parts = {"reward": reward, "env": env, "agent": agent}
    own = [*words(overrides), *([word("trial_name", trial)] if trial else [])]

    def check() -> tuple[ExperimentConfig, list[str]]:
        found = command(ExperimentConfig, config, model, data, parts, own)
        preflight.preflight(found[0])
        return found

    settings, argv = checked(check)
    folder = run_paths(settings).root
    log = folder.with_name(f"{folder.name}.log")
    run = Run(folder, _process=Process(["train", *argv], log))
    return run.wait() if wait else run


def evaluate(
    model: str | Path,
    *,
    dataset: Any = None,
    env: str | type[Env] | None = None,
    reward: Any = None,
    agent: str | type[Agent] | None = None,
    n: int = 1,
    config: Config = "async_ppo",
    overrides: Overrides = None,
) -> Facts:
    """Sample a model on held-out tasks, as `arealite eval` does.

    Args:
        model: A Hugging Face folder, or the id of a model of the Hugging Face Hub.
        dataset: The tasks, in a form of `train`.
        env: A registered environment: its name or class.
        reward: The reward, in a form of `train`.
        agent: A registered agent: its name or class.
        n: Samples per task.
        config: A YAML file, or the name of a preset.
        overrides: Other options, as in {"trainer.ppo.eval.sampling.temperature": 0.6}.

    Returns:
        `reward` and `pass@1`, `pass@2`, … with the mean of each source of tasks, the number of
        `failed` samples, and `results`: all figures with their intervals.

    Raises:
        UserError: The input is wrong.
        ArealiteError: The evaluation failed.
    """
    data, parts = {"dataset.eval": dataset}, {"reward": reward, "env": env, "agent": agent}
    own = [f"n={n}", *words(overrides)]
    out = sample("eval", EvaluateConfig, config, model, data, parts, own)
    found = json.loads(out.read_text())
    result = Facts(model=found["model"], n=found["n"])
    for row in found["results"]:
        label = " ".join(filter(None, (row["source"], row["seat"].removeprefix("agent"))))
        means = {"reward": row["reward"], **{f"pass@{k}": p for k, p in row["pass"].items()}}
        for name, estimate in means.items():
            result.setdefault(name, {})[label] = estimate["mean"]
    return Facts(result, failed=sum(found["failed"].values()), results=found["results"])


def collect(
    model: str | Path,
    *,
    dataset: Any = None,
    env: str | type[Env] | None = None,
    reward: Any = None,
    agent: str | type[Agent] | None = None,
    n: int = 1,
    config: Config = "async_ppo",
    overrides: Overrides = None,
) -> list[dict[str, object]]:
    """Sample a model and return its trajectories as rows, as `arealite collect` does.

    `arealite.train("sft", dataset=rows)` trains on them.

    Args:
        model: A Hugging Face folder, or the id of a model of the Hugging Face Hub.
        dataset: The tasks, in a form of `train`.
        env: A registered environment: its name or class.
        reward: The reward, in a form of `train`.
        agent: A registered agent: its name or class.
        n: Samples per task.
        config: A YAML file, or the name of a preset.
        overrides: Other options, as in {"min_reward": 1, "best_of": 2, "out": "rows.parquet"}.

    Returns:
        A row for each segment of a trajectory: text, tokens, loss_mask, logprobs, versions, reward.

    Raises:
        UserError: The input is wrong.
        ArealiteError: The collection failed.
    """
    data, parts = {"dataset.train": dataset}, {"reward": reward, "env": env, "agent": agent}
    own = [f"n={n}", *words(overrides)]
    out = sample("collect", CollectConfig, config, model, data, parts, own)
    return [row for _, row in read_rows(str(out), "train", ())]
