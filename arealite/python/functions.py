"""The functions of the Python API. Each runs a command of the command line as a child process."""

import json
import signal
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arealite.api import env as env_api
from arealite.api.agent import Agent
from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.env import Env
from arealite.api.env_server import EnvServerConfig
from arealite.api.sampling import CollectConfig, EvaluateConfig, SamplingRunConfig
from arealite.cli import configs, preflight
from arealite.impl.env_server.wire import SERVING
from arealite.python.command import Command, Config, Overrides, Parts, checked, resolve, words
from arealite.python.objects import registered
from arealite.python.run import Facts, Run
from arealite.system.data.dataset import read_rows

AnEnv = str | type[Env] | None
AnAgent = str | type[Agent] | None


def train(
    config: Config = "async_ppo", *,
    model: str | Path | None = None, dataset: Any = None, eval_dataset: Any = None,
    reward: Any = None, env: AnEnv = None, agent: AnAgent = None,
    trial: str | None = None, overrides: Overrides = None, wait: bool = True,
) -> Run:  # fmt: skip
    """Train a model with the run of `arealite train`, in child processes of this one.

    This process checks the input first. If there is no LLM server for the run, the run starts one.
    When this process ends, the run writes a checkpoint and stops.

    Args:
        config: A preset (async_ppo, ppo, sft, dpo, reward, algo/gspo, …) or a YAML file, or a list
            of them; later ones win.
        model: A Hugging Face folder, or the id of a model of the Hugging Face Hub.
        dataset: Training rows: dicts, a datasets.Dataset, a DataFrame, a file, or "generated".
        eval_dataset: Held-out rows in the same forms; None: no evaluation.
        reward: A function `f(completion, ground_truth)`, a Reward class, a list of them, a dict
            with a weight for each, "module:name", or the name of a registered reward.
        env: Name or class of a registered environment.
        agent: Name or class of a registered agent.
        trial: Name of the run. The same name resumes a run.
        overrides: Other options, as in {"trainer.ppo.lr": 1e-6}.
        wait: Print the run's output, and return when the run has ended.

    Raises:
        UserError: The input is wrong. No process was started.
        ArealiteError: The run failed.
    """

    def check() -> tuple[ExperimentConfig, list[str]]:
        own = words(overrides)
        rows = {"dataset.train": dataset, "dataset.eval": eval_dataset}
        parts = {"model": model, "reward": reward, "env": env, "agent": agent}
        made = resolve(ExperimentConfig, config, own + words(None, trial_name=trial), rows, parts)
        preflight.preflight(made[0])
        return made

    made, argv = checked(check)
    root = run_paths(made).root
    run = Run(root, _command=Command(["train", *argv], root.with_name(f"{root.name}.log")))
    return run.wait() if wait else run


def evaluate(
    model: str | Path, *,
    dataset: Any = None, env: AnEnv = None, reward: Any = None, agent: AnAgent = None,
    n: int = 1, config: Config = "async_ppo", overrides: Overrides = None,
) -> Facts:  # fmt: skip
    """Sample a model on held-out tasks, as `arealite eval` does.

    Args:
        model: A Hugging Face folder, or the id of a model of the Hugging Face Hub.
        dataset: The tasks, in the forms of `train`.
        env: Name or class of a registered environment.
        reward: The reward, in the forms of `train`.
        agent: Name or class of a registered agent.
        n: Samples per task.
        config: A preset or a YAML file, or a list of them.
        overrides: Other options, as in {"trainer.ppo.eval.sampling.temperature": 0.6}.

    Returns:
        `reward`, `pass@1`, `pass@2`, …: the mean for each source of tasks; the number of `failed`
        samples; and `results`, all figures with their intervals.

    Raises:
        UserError: The input is wrong.
        ArealiteError: The evaluation failed.
    """
    parts = {"model": model, "reward": reward, "env": env, "agent": agent}
    own = words(overrides, n=n)
    rows = {"dataset.eval": dataset}
    found = json.loads(sample("eval", EvaluateConfig, config, own, rows, parts).read_text())
    facts = Facts(model=found["model"], n=n, failed=sum(found["failed"].values()))
    for row in found["results"]:
        source = " ".join(filter(None, (row["source"], row["seat"].removeprefix("agent"))))
        means = {"reward": row["reward"], **{f"pass@{k}": at for k, at in row["pass"].items()}}
        for name, estimate in means.items():
            facts.setdefault(name, {})[source or "all"] = estimate["mean"]
    return Facts(facts, results=found["results"])


def collect(
    model: str | Path, *,
    dataset: Any = None, env: AnEnv = None, reward: Any = None, agent: AnAgent = None,
    n: int = 1, config: Config = "async_ppo", overrides: Overrides = None,
) -> list[dict[str, object]]:  # fmt: skip
    """Sample a model on tasks and return its trajectories, as `arealite collect` does.

    `arealite.train("sft", dataset=rows)` trains on them.

    Args:
        model: A Hugging Face folder, or the id of a model of the Hugging Face Hub.
        dataset: The tasks, in the forms of `train`.
        env: Name or class of a registered environment.
        reward: The reward, in the forms of `train`.
        agent: Name or class of a registered agent.
        n: Samples per task.
        config: A preset or a YAML file, or a list of them.
        overrides: Other options, as in {"min_reward": 1, "best_of": 2, "out": "rows.parquet"}.

    Returns:
        A row for each segment of a trajectory: text, tokens, loss_mask, logprobs, versions, reward.

    Raises:
        UserError: The input is wrong.
        ArealiteError: The collection failed.
    """
    parts = {"model": model, "reward": reward, "env": env, "agent": agent}
    own = words(overrides, n=n)
    rows = {"dataset.train": dataset}
    out = sample("collect", CollectConfig, config, own, rows, parts)
    return [row for _, row in read_rows(str(out), "train", ())]


def sample(
    kind: str, schema: type[SamplingRunConfig], config: Config, own: list[str],
    rows: Parts, parts: Parts,
) -> Path:  # fmt: skip
    """Run `eval` or `collect` to its end, as a new trial; return the file of its result."""
    name = f"{kind}-{uuid.uuid4().hex[:8]}"
    own = [f"trial_name={name}", *own]  # `own` may name another
    made, argv = checked(lambda: resolve(schema, config, own, rows, parts))
    folder = run_paths(made).root.parent
    out = Path(made.out or folder / f"{name}.{'json' if kind == 'eval' else 'jsonl'}").expanduser()
    command = Command([kind, *argv, *words(None, out=out)], folder / f"{name}.log")
    before = out.stat().st_mtime_ns if out.exists() else 0
    if command.wait() not in (0, 1) or not out.exists() or out.stat().st_mtime_ns == before:
        raise command.error(f"arealite {kind}")  # 1 with a result: some samples failed
    return out


@dataclass
class Server(AbstractContextManager["Server"]):
    """A running server. `close` stops it, as do the end of a `with` block and of this process."""

    address: str
    """host:port."""
    _command: Command

    def close(self) -> None:
        """Stop the server."""
        self._command.stop(signal.SIGTERM)

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(envs: Any, *, port: int = 0, overrides: Overrides = None) -> Server:
    """Serve environments in OpenEnv's wire format, as `arealite serve` does.

    Args:
        envs: Name or class of a registered environment, or a list of them.
        port: The port; 0: a free one.
        overrides: Other options, as in {"server.max_sessions": 64}.

    Returns:
        The server. It accepts connections at its `address`.

    Raises:
        UserError: The input is wrong.
    """

    def check() -> tuple[EnvServerConfig, list[str]]:
        wanted = [envs] if isinstance(envs, str | type) else envs
        parts = [registered(each, env_api.envs) for each in wanted]
        names = [name for name, _ in parts]
        modules = [each for _, more in parts for each in more]
        own = words(overrides, **{"server.port": port, "imports": modules or None})
        own += words({"environments": names} if names[1:] else {"env.type": names[0]})
        return configs.load(EnvServerConfig, configs.CONFIG_DIR / "env_server.yaml", own), own

    made, argv = checked(check)
    log = run_paths(made).root.with_name(f"serve-{uuid.uuid4().hex[:8]}.log")
    command = Command(["serve", *argv], log)
    return Server(command.wait_for_line(SERVING), command)
