"""The functions of the Python API. Each runs a command of the command line as a child process."""

import json
import signal
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arealite.api import env as env_api
from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.cli import configs, preflight
from arealite.ext.evaluation.config import CollectConfig, EvaluateConfig, SamplingRunConfig
from arealite.ext.hosting.server.env_messages import SERVING
from arealite.ext.hosting.server_config import EnvServerConfig
from arealite.ext.notebook.command_line import (
    ConfigFiles,
    Overrides,
    PartOptions,
    RunningCommand,
    checked,
    resolve,
    words,
)
from arealite.ext.notebook.objects import registered
from arealite.ext.notebook.run import Facts, Run
from arealite.system.data.dataset import read_rows

AnEnv = str | type[Env] | None
AnAgent = str | type[Agent] | None


def train(
    config: ConfigFiles = "async_ppo",
    *,
    model: str | Path | None = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    reward: Any = None,
    env: AnEnv = None,
    agent: AnAgent = None,
    trial: str | None = None,
    overrides: Overrides = None,
    wait: bool = True,
) -> Run:
    """Train a model with the run of `arealite train`, in child processes of this one.

    This process checks the input first. If there is no LLM server for the run, the run starts one,
    unless `launcher.llm_servers` is set. When this process ends, the run writes a checkpoint and
    stops.

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

    def check() -> ExperimentConfig:
        resolved = resolve(
            ExperimentConfig,
            config,
            words(overrides) + words(None, trial_name=trial),
            data={"dataset.train": dataset, "dataset.eval": eval_dataset},
            parts={"model": model, "reward": reward, "env": env, "agent": agent},
        )
        preflight.preflight(resolved)
        return resolved

    run_config = checked(check)
    root = run_paths(run_config).root
    log = root.with_name(f"{root.name}.log")
    command = RunningCommand(["train"], log, config=run_config)
    run = Run(root, _command=command)
    return run.wait() if wait else run


def evaluate(
    model: str | Path,
    *,
    dataset: Any = None,
    env: AnEnv = None,
    reward: Any = None,
    agent: AnAgent = None,
    n: int = 1,
    config: ConfigFiles = "async_ppo",
    overrides: Overrides = None,
) -> Facts:
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
    file = sample(
        "eval",
        EvaluateConfig,
        config,
        words(overrides, n=n),
        data={"dataset.eval": dataset},
        parts={"model": model, "reward": reward, "env": env, "agent": agent},
    )
    scores = json.loads(file.read_text())
    results = scores["results"]
    facts = Facts(model=scores["model"], n=n, failed=sum(scores["failed"].values()))
    for row in results:
        seat = row["seat"].removeprefix("agent")
        source = " ".join(filter(None, (row["source"], seat))) or "all"
        means = {"reward": row["reward"]["mean"]}
        for k, estimate in row["pass"].items():
            means[f"pass@{k}"] = estimate["mean"]
        for name, mean in means.items():
            facts.setdefault(name, {})[source] = mean
    return Facts(facts, results=results)


def collect(
    model: str | Path,
    *,
    dataset: Any = None,
    env: AnEnv = None,
    reward: Any = None,
    agent: AnAgent = None,
    n: int = 1,
    config: ConfigFiles = "async_ppo",
    overrides: Overrides = None,
) -> list[dict[str, object]]:
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
    file = sample(
        "collect",
        CollectConfig,
        config,
        words(overrides, n=n),
        data={"dataset.train": dataset},
        parts={"model": model, "reward": reward, "env": env, "agent": agent},
    )
    return [row for _, row in read_rows(str(file), "train", ())]


def sample(
    kind: str,
    schema: type[SamplingRunConfig],
    config: ConfigFiles,
    user_words: Sequence[str],
    *,
    data: PartOptions,
    parts: PartOptions,
) -> Path:
    """Run `eval` or `collect` to its end, as a new trial; return the file of its result.

    Args:
        kind: `eval` or `collect`.
        schema: The command's root config class.
        config: See resolve.
        user_words: See resolve.
        data: See resolve.
        parts: See resolve.

    Raises:
        UserError: The input is wrong.
        ArealiteError: The command failed.
    """
    name = f"{kind}-{uuid.uuid4().hex[:8]}"
    named_words = [f"trial_name={name}", *user_words]  # the user may name another trial
    run_config = checked(lambda: resolve(schema, config, named_words, data, parts))
    folder = run_paths(run_config).root.parent
    suffix = "json" if kind == "eval" else "jsonl"
    out = Path(run_config.out or folder / f"{name}.{suffix}").expanduser()
    written_before = _modified_ns(out)
    run_config = replace(run_config, out=str(out))
    command = RunningCommand([kind], folder / f"{name}.log", config=run_config)
    code = command.wait()
    has_result = out.exists() and _modified_ns(out) != written_before
    if code not in (0, 1) or not has_result:  # 1 with a result: some samples failed
        raise command.error(f"arealite {kind}")
    return out


def _modified_ns(file: Path) -> int:
    """Return the time of a file's last change in nanoseconds; 0 if there is no file."""
    return file.stat().st_mtime_ns if file.exists() else 0


@dataclass(kw_only=True)
class Server(AbstractContextManager["Server"]):
    """A running server. `close` stops it, as do the end of a `with` block and of this process."""

    address: str
    """host:port."""
    _command: RunningCommand

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

    def check() -> EnvServerConfig:
        selected = [envs] if isinstance(envs, str | type) else envs
        names = list[str]()
        imports = list[str]()
        for env in selected:
            name, modules = registered(env, env_api.envs)
            names.append(name)
            imports += modules
        argv = words(overrides, **{"server.port": port, "imports": imports or None})
        argv += words({"environments": names} if len(names) > 1 else {"env.type": names[0]})
        default = configs.CONFIG_DIR / "env_server.yaml"
        return configs.load(EnvServerConfig, default, argv)

    server_config = checked(check)
    log = run_paths(server_config).root.with_name(f"serve-{uuid.uuid4().hex[:8]}.log")
    command = RunningCommand(["serve"], log, config=server_config)
    return Server(address=command.wait_for_line(SERVING), _command=command)
