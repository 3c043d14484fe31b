"""Sample a model on held-out tasks: rewards and pass@k by source, with intervals.

    arealite eval model.path=M dataset.eval=tasks.jsonl n=8 launcher.llm_servers=1
    arealite eval --model M --environment math --num-episodes 20 --output math.json

{words}

Agents, environments, servers and all other keys are those of train.py. Without
launcher.llm_servers, the command uses the live servers of the same experiment
and trial. trainer.ppo.eval.sampling sets the sampling. After an interruption,
the same command resumes."""

import json
from collections import defaultdict
from collections.abc import Sequence
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from arealite.algo.pass_at_k import Z_95, Estimate, default_ks, mean_pass_at_k
from arealite.api.task import Task
from arealite.api.trajectory import TrajectoryHeader, means
from arealite.base.errors import UserError
from arealite.base.files import replacing
from arealite.base.printable import fold
from arealite.cli import preflight
from arealite.ext.evaluation import sampling_run
from arealite.ext.evaluation.config import EvaluateConfig
from arealite.ext.evaluation.samples import Samples
from arealite.ext.short_flags.short_flags import describe
from arealite.ext.view.terminal import Terminal

WORDS = sampling_run.words("eval")
DESCRIPTION = str(__doc__).format(words=describe(WORDS))
INTERVALS = "95 %; pass@k: Wilson over tasks; reward: normal over tasks"
UNKNOWN = Estimate(inf, inf, inf)
"""The mean of no values; null in JSON."""
EvalScores = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Evaluate a model; return 1 if samples failed."""
    config = sampling_run.parse(
        EvaluateConfig,
        argv,
        words=WORDS,
        command="arealite eval",
        description=DESCRIPTION,
    )
    _check_ks(config)
    if config.trainer.ppo.collector.envs:
        preflight.check_sources(config)
    else:
        preflight.required(config.dataset.eval, "dataset.eval")
    out = _output_file(config)
    with sampling_run.sampled(config) as (tasks, samples, failed):
        result = report(config, tasks, samples)
    result["failed"] = dict(failed)
    json_text = json.dumps(result, indent=2, allow_nan=False)
    with replacing(out) as temporary:
        temporary.write_text(f"{json_text}\n")
    show(result)
    print(out)
    return sampling_run.report_failed(failed)


def _check_ks(config: EvaluateConfig) -> None:
    """Check that each pass@k can be computed from n samples."""
    for k in config.k:
        if not 1 <= k <= config.n:
            raise UserError(f"k={config.k}: pass@{k} needs 1 <= k <= n={config.n}. Raise n.")


def _output_file(config: EvaluateConfig) -> Path:
    """Return the file of the result.

    Raises:
        UserError: No file can be written there.
    """
    if not config.out:
        return config.folder / "eval.json"
    out = Path(config.out).expanduser()
    if out.is_dir():
        raise UserError(f"out={out} is a folder. Name a file in an existing folder.")
    if not out.parent.is_dir():
        raise UserError(
            f"out={out}: its folder does not exist. Name a file in an existing folder.",
        )
    return out


def report(
    config: EvaluateConfig,
    tasks: Sequence[Task],
    samples: Samples,
) -> EvalScores:
    """Return the result as JSON: one row for each source and seat, and the failures."""
    headers_by_task: defaultdict[tuple[str, str], defaultdict[int, list[TrajectoryHeader]]]
    headers_by_task = defaultdict(lambda: defaultdict(list))
    versions = set[int]()
    for row, member, headers in samples.headers():
        if row >= len(tasks) or member >= tasks[row].eval_samples(config.n):
            continue  # a sample of an earlier evaluation with more tasks or samples
        source = tasks[row].source
        for header in headers:
            headers_by_task[source, header.seat][row].append(header)
            versions |= {header.oldest_version, header.newest_version}
    ks = _ks(config, tasks)
    results = [
        {"source": source, "seat": seat, **score(config, ks, [*by_task.values()])}
        for (source, seat), by_task in sorted(headers_by_task.items())
    ]
    failures = {
        name: {"attempts": attempts, "first": message}
        for name, (attempts, message) in samples.failures().items()
    }
    return {
        "model": config.model.path,
        "n": config.n,
        "solved": config.solved,
        "versions": [min(versions), max(versions)] if versions else [],
        "intervals": INTERVALS,
        "results": results,
        "failures": failures,
    }


def _ks(config: EvaluateConfig, tasks: Sequence[Task]) -> Sequence[int]:
    """Return each k of the pass@k to compute; without `config.k`, the defaults of all tasks."""
    if config.k:
        return config.k
    sample_counts = {task.eval_samples(config.n) for task in tasks}
    return sorted({k for num_samples in sample_counts for k in default_ks(num_samples)})


def score(
    config: EvaluateConfig,
    ks: Sequence[int],
    by_task: Sequence[Sequence[TrajectoryHeader]],
) -> EvalScores:
    """Return the averages of one seat over the tasks of one source.

    Samples without a score are counted. They take no part in `reward` and `pass`.
    """
    all_headers = [header for headers in by_task for header in headers]
    rewards_by_task = [_rewards(headers) for headers in by_task]
    num_scored = sum(map(len, rewards_by_task))
    solved_counts = [
        (len(rewards), sum(reward >= config.solved for reward in rewards))
        for rewards in rewards_by_task
    ]
    rates = {str(k): mean_pass_at_k(solved_counts, k) for k in ks}
    solved_rates = {k: as_json(rate) for k, rate in rates.items() if rate}
    task_means = [fmean(rewards) for rewards in rewards_by_task if rewards]
    mean_reward = mean_of_tasks(task_means) if task_means else UNKNOWN
    return {
        "tasks": len(by_task),
        "samples": len(all_headers),
        "unscored": len(all_headers) - num_scored,
        "reward": as_json(mean_reward),
        "pass": solved_rates,
        "parts": means(header.reward_parts for header in all_headers),
        "tokens": fmean(header.trained_tokens for header in all_headers),
        "turns": fmean(header.turns for header in all_headers),
        "truncated": fmean(header.truncated for header in all_headers),
    }


def _rewards(headers: Sequence[TrajectoryHeader]) -> list[float]:
    """Return the rewards of the trajectories that have one."""
    return [header.reward for header in headers if header.reward is not None]


def as_json(estimate: Estimate) -> dict[str, float | None]:
    """Convert an estimate to JSON, with None for infinity."""
    return {
        name: number if abs(number) < inf else None for name, number in estimate._asdict().items()
    }


def show(result: EvalScores) -> None:
    """Print the result as a table with one number per line, narrow enough for any terminal."""
    table = Table(
        title=f"{result['model']}, n={result['n']}",
        caption=result["intervals"],
    )
    for name in ("source", "what", "mean", "95 %"):
        table.add_column(
            name,
            justify="right" if name == "mean" else "left",
            overflow="fold",
        )
    for row in result["results"]:
        _add_rows(table, row)
    terminal = Terminal()
    if not terminal.is_terminal:
        terminal.width = 1000
    terminal.print(table, soft_wrap=False)
    for name, failure in result["failures"].items():
        print(fold(f"{failure['attempts']} × {name}: {failure['first']}"))


def _add_rows(table: Table, row: EvalScores) -> None:
    """Add the rows of one source and seat to the table; the first row names them."""
    label = row["source"] or "all"
    if row["seat"] != "agent":
        label = f"{label}, {row['seat']}"
    table.add_row(label, "reward", *_mean_and_interval(row["reward"]))
    for k, rate in row["pass"].items():
        table.add_row("", f"pass@{k}", *_mean_and_interval(rate))
    for part, mean in row["parts"].items():
        table.add_row("", part, f"{mean:.3f}", "")
    table.add_row("", "tokens", f"{row['tokens']:.1f}", "")
    counts = f"{row['samples']} samples of {row['tasks']} tasks"
    num_unscored = row.get("unscored")
    if num_unscored:
        counts += f", {num_unscored} without a score"
    table.add_row(
        "",
        "truncated",
        f"{row['truncated']:.3f}",
        counts,
        end_section=True,
    )


def _mean_and_interval(estimate: dict[str, float | None]) -> tuple[str, str]:
    """Return the cells of an estimate: its mean, and its interval."""
    mean = estimate["mean"]
    low = estimate["low"]
    high = estimate["high"]
    mean_cell = "–" if mean is None else f"{mean:.3f}"
    if low is None or high is None:
        return mean_cell, ""
    return mean_cell, f"{low:.3f} … {high:.3f}"


def mean_of_tasks(values: Sequence[float]) -> Estimate:
    """Average one value per task, with the normal confidence interval.

    The interval treats tasks, not samples, as independent: samples of one task are correlated
    (clustered standard errors, Miller 2024, arXiv:2411.00640).
    """
    mean = fmean(values)
    half_width = inf
    if len(values) > 1:
        half_width = Z_95 * stdev(values) / sqrt(len(values))
    return Estimate(
        mean=mean,
        low=mean - half_width,
        high=mean + half_width,
    )
