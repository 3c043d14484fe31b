"""`arealite eval`: how well a model does, by environment: rewards, pass@k, failures."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from arealite.algo.pass_at_k import Estimate, ks, mean_of_tasks, mean_pass_at_k
from arealite.api.sampling import EvaluateConfig
from arealite.api.task import Task
from arealite.api.trajectory import TrajectoryHeader, means
from arealite.base.errors import UserError
from arealite.cli import configs, preflight, sampling
from arealite.cli.fold import fold
from arealite.impl.view.terminal import Terminal
from arealite.system.data.samples import Samples

DESCRIPTION = """\
Sample a model on held-out tasks: rewards and pass@k by source, with intervals.

    arealite eval model.path=M dataset.eval=tasks.jsonl n=8 launcher.llm_servers=1

Agents, environments and servers are those of train.py, as are all other keys;
without launcher.llm_servers it uses the live servers of the same experiment and
trial. Interrupted, the same command goes on. Tokens are drawn as
trainer.ppo.eval.sampling says."""
INTERVALS = "95 %; pass@k: Wilson over tasks; reward: normal over tasks"
Score = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Evaluate; 1 where some samples failed for good."""
    config = configs.parse(EvaluateConfig, argv, command="arealite eval", description=DESCRIPTION)
    config = configs.at_home(config)
    wrong = [k for k in config.k if not 1 <= k <= config.n]
    if wrong:
        raise UserError(f"k={config.k}: pass@{wrong[0]} needs 1 <= k <= n={config.n}. Raise n.")
    if config.trainer.ppo.collector.envs:
        preflight.check_sources(config)
    else:
        preflight.required(config.dataset.eval, "dataset.eval")
    out = Path(config.out).expanduser() if config.out else config.folder / "eval.json"
    if config.out and (out.is_dir() or not out.parent.is_dir()):
        why = "is a folder, name a file" if out.is_dir() else "its folder does not exist"
        raise UserError(f"out={out}: {why}.")
    with sampling.sampled(config, "eval") as (tasks, samples, failed):
        result = report(config, tasks, samples)
    result["failed"] = dict(failed)
    temporary = out.with_name(f".{out.name}.tmp")
    temporary.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    temporary.replace(out)
    show(result)
    print(out)
    return sampling.tell_failed(failed)


def report(config: EvaluateConfig, tasks: Sequence[Task], samples: Samples) -> Score:
    """Return the result as JSON: a row a source and seat, and what failed."""
    found: defaultdict[tuple[str, str], defaultdict[int, list[TrajectoryHeader]]]
    found = defaultdict(lambda: defaultdict(list))
    versions = set[int]()
    for row, member, headers in samples.headers():
        if row < len(tasks) and member < config.n:
            for header in headers:
                found[tasks[row].source, header.seat][row].append(header)
                versions |= {header.oldest_version, header.newest_version}
    failures = samples.failures()
    return {
        "model": config.model.path,
        "n": config.n,
        "solved": config.solved,
        "versions": [min(versions), max(versions)] if versions else [],
        "intervals": INTERVALS,
        "results": [
            {"source": source, "seat": seat, **score(config, [*by_task.values()])}
            for (source, seat), by_task in sorted(found.items())
        ],
        "failures": {name: {"attempts": n, "first": said} for name, (n, said) in failures.items()},
    }


def score(config: EvaluateConfig, by_task: Sequence[Sequence[TrajectoryHeader]]) -> Score:
    """Average what one seat did in the tasks of one source."""
    every = [header for headers in by_task for header in headers]
    counts = [(len(hs), sum(h.reward >= config.solved for h in hs)) for hs in by_task]
    rates = {str(k): mean_pass_at_k(counts, k) for k in config.k or ks(config.n)}
    return {
        "tasks": len(by_task),
        "samples": len(every),
        "reward": told(mean_of_tasks([fmean(h.reward for h in headers) for headers in by_task])),
        "pass": {k: told(rate) for k, rate in rates.items() if rate},
        "parts": means(header.reward_parts for header in every),
        "tokens": fmean(header.trained_tokens for header in every),
        "turns": fmean(header.turns for header in every),
        "truncated": fmean(header.truncated for header in every),
    }


def told(estimate: Estimate) -> dict[str, float | None]:
    """Return an estimate as JSON, which has no infinity."""
    return {
        name: value if abs(value) < float("inf") else None
        for name, value in estimate._asdict().items()
    }


def show(result: Score) -> None:
    """Print the result as a table: a line a number, which fits any terminal."""
    table = Table(title=f"{result['model']}, n={result['n']}", caption=result["intervals"])
    for name in ("source", "what", "mean", "95 %"):
        table.add_column(name, justify="right" if name == "mean" else "left", overflow="fold")
    for row in result["results"]:
        rates = {f"pass@{k}": estimate for k, estimate in row["pass"].items()}
        who = row["source"] or "all"
        first = who if row["seat"] == "agent" else f"{who}, {row['seat']}"
        for what, found in {"reward": row["reward"], **rates}.items():
            bounds = [found["low"], found["high"]]
            between = "" if None in bounds else " … ".join(f"{bound:.3f}" for bound in bounds)
            table.add_row(first, what, f"{found['mean']:.3f}", between)
            first = ""
        for what, mean in row["parts"].items():
            table.add_row("", what, f"{mean:.3f}", "")
        table.add_row("", "tokens", f"{row['tokens']:.1f}", "")
        counts = f"{row['samples']} samples of {row['tasks']} tasks"
        table.add_row("", "truncated", f"{row['truncated']:.3f}", counts, end_section=True)
    terminal = Terminal()
    terminal.width = terminal.width if terminal.is_terminal else 1000
    terminal.print(table, soft_wrap=False)
    for name, failure in result["failures"].items():
        print(fold(f"{failure['attempts']} × {name}: {failure['first']}"))
