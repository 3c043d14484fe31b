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
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from arealite.algo.pass_at_k import Estimate, default_ks, mean_of_tasks, mean_pass_at_k
from arealite.api.sampling import EvaluateConfig
from arealite.api.task import Task
from arealite.api.trajectory import TrajectoryHeader, means
from arealite.base.errors import UserError
from arealite.base.files import replacing
from arealite.cli import configs, preflight, sampling
from arealite.cli.fold import fold
from arealite.cli.options import describe, translate
from arealite.impl.view.terminal import Terminal
from arealite.system.data.samples import Samples

WORDS = sampling.words("eval")
DESCRIPTION = str(__doc__).format(words=describe(WORDS))
INTERVALS = "95 %; pass@k: Wilson over tasks; reward: normal over tasks"
Score = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Evaluate a model; return 1 if samples failed."""
    argv, given = translate(argv, WORDS)
    config = configs.parse(EvaluateConfig, argv, command="arealite eval", description=DESCRIPTION)
    config = sampling.with_defaults(configs.resolve_host(config), given, "eval")
    wrong = [k for k in config.k if not 1 <= k <= config.n]
    if wrong:
        raise UserError(f"k={config.k}: pass@{wrong[0]} needs 1 <= k <= n={config.n}. Raise n.")
    if config.trainer.ppo.collector.envs:
        preflight.check_sources(config)
    else:
        preflight.required(config.dataset.eval, "dataset.eval")
    out = Path(config.out).expanduser() if config.out else config.folder / "eval.json"
    if config.out and (out.is_dir() or not out.parent.is_dir()):
        why = "is a folder" if out.is_dir() else "its folder does not exist"
        raise UserError(f"out={out}: {why}. Name a file in an existing folder.")
    with sampling.sampled(config, "eval") as (tasks, samples, failed):
        result = report(config, tasks, samples)
    result["failed"] = dict(failed)
    with replacing(out) as temporary:
        temporary.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    show(result)
    print(out)
    return sampling.report_failed(failed)


def report(config: EvaluateConfig, tasks: Sequence[Task], samples: Samples) -> Score:
    """Return the result as JSON: one row for each source and seat, and the failures."""
    found: defaultdict[tuple[str, str], defaultdict[int, list[TrajectoryHeader]]]
    found = defaultdict(lambda: defaultdict(list))
    versions = set[int]()
    for row, member, headers in samples.headers():
        if row < len(tasks) and member < tasks[row].eval_samples(config.n):
            for header in headers:
                found[tasks[row].source, header.seat][row].append(header)
                versions |= {header.oldest_version, header.newest_version}
    failures = samples.failures()
    sizes = {task.eval_samples(config.n) for task in tasks}
    ks = config.k or sorted({k for n in sizes for k in default_ks(n)})
    return {
        "model": config.model.path,
        "n": config.n,
        "solved": config.solved,
        "versions": [min(versions), max(versions)] if versions else [],
        "intervals": INTERVALS,
        "results": [
            {"source": source, "seat": seat, **score(config, ks, [*by_task.values()])}
            for (source, seat), by_task in sorted(found.items())
        ],
        "failures": {name: {"attempts": n, "first": text} for name, (n, text) in failures.items()},
    }


def score(
    config: EvaluateConfig, ks: Sequence[int], by_task: Sequence[Sequence[TrajectoryHeader]]
) -> Score:
    """Return the averages of one seat over the tasks of one source."""
    every = [header for headers in by_task for header in headers]
    counts = [(len(hs), sum(h.reward >= config.solved for h in hs)) for hs in by_task]
    rates = {str(k): mean_pass_at_k(counts, k) for k in ks}
    return {
        "tasks": len(by_task),
        "samples": len(every),
        "reward": as_json(mean_of_tasks([fmean(h.reward for h in headers) for headers in by_task])),
        "pass": {k: as_json(rate) for k, rate in rates.items() if rate},
        "parts": means(header.reward_parts for header in every),
        "tokens": fmean(header.trained_tokens for header in every),
        "turns": fmean(header.turns for header in every),
        "truncated": fmean(header.truncated for header in every),
    }


def as_json(estimate: Estimate) -> dict[str, float | None]:
    """Convert an estimate to JSON, with None for infinity."""
    return {key: each if abs(each) < inf else None for key, each in estimate._asdict().items()}


def show(result: Score) -> None:
    """Print the result as a table with one number per line, narrow enough for any terminal."""
    table = Table(title=f"{result['model']}, n={result['n']}", caption=result["intervals"])
    for name in ("source", "what", "mean", "95 %"):
        table.add_column(name, justify="right" if name == "mean" else "left", overflow="fold")
    for row in result["results"]:
        rates = {f"pass@{k}": estimate for k, estimate in row["pass"].items()}
        source = row["source"] or "all"
        first = source if row["seat"] == "agent" else f"{source}, {row['seat']}"
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
