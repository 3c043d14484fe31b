"""Sample a model on training tasks, and write its trajectories as rows of a file.

    arealite collect model.path=M dataset.train=tasks.jsonl n=8 best_of=1 min_reward=1 \\
        out=good.parquet launcher.llm_servers=1
    arealite collect --model M --environment math -n 100 -o good.jsonl --filter-reward 0.5

{words}

sft can train on the file: dataset.train=good.parquet. Each row is a segment:
tokens, loss_mask, logprobs, versions, reward, and the observation that followed
(next_state). Agents, environments, servers and all other keys are those of
train.py. After an interruption, the same command resumes."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from arealite.api.agent import load_tokenizer
from arealite.api.task import Task
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.base.errors import UserError
from arealite.base.folder_checks import check_folder
from arealite.base.printable import fold
from arealite.base.registry import unknown
from arealite.cli import preflight
from arealite.ext.evaluation import sampling_run
from arealite.ext.evaluation.config import CollectConfig
from arealite.ext.evaluation.row_files import SUFFIXES, FileRow, write_rows
from arealite.ext.evaluation.samples import Samples
from arealite.ext.short_flags.short_flags import Word, describe

WORDS = (*sampling_run.words("train"), Word("--filter-reward", "R", "min_reward={}"))
DESCRIPTION = str(__doc__).format(words=describe(WORDS))
SampleKey = tuple[int, int, str]
"""(task, sample, seat)."""


def main(argv: Sequence[str]) -> int:
    """Collect trajectories; return 1 if samples failed or no trajectory was selected."""
    config = sampling_run.parse(
        CollectConfig,
        argv,
        words=WORDS,
        command="arealite collect",
        description=DESCRIPTION,
    )
    out = Path(preflight.required(config.out, "out")).expanduser()
    if out.suffix not in SUFFIXES:
        unknown_suffix = unknown("suffix", out.suffix, SUFFIXES)
        raise UserError(f"{unknown_suffix} out={out}.")
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"out={out} is a folder, or its parent folder does not exist. Name a file.")
    check_folder(out.parent.absolute(), "folder", "out")
    preflight.check_sources(config)
    with sampling_run.sampled(config) as (tasks, samples, failed):
        selected = select(config, len(tasks), samples)
        tokenizer: Any = load_tokenizer(config.model.path)
        file_rows = rows(tasks, samples, selected, tokenizer.decode)
        num_rows = write_rows(out, file_rows)
    print(fold(f"{out}: {num_rows} rows of {len(selected)} trajectories"))
    if sampling_run.report_failed(failed):
        return 1
    return 0 if num_rows else 1


def select(
    config: CollectConfig,
    num_tasks: int,
    samples: Samples,
) -> set[SampleKey]:
    """Select trajectories: rewards within the bounds, then the `best_of` of each task and seat.

    A trajectory without a score is within no bound, and comes after all others.
    """
    ranked_members: defaultdict[tuple[int, str], list[tuple[float, int]]] = defaultdict(list)
    for task, member, headers in samples.headers():
        if task >= num_tasks or member >= config.n:
            continue  # a sample of an earlier command with more tasks or samples
        for header in headers:
            if _is_within_bounds(config, header.reward):
                rank = inf if header.reward is None else -header.reward
                ranked_members[task, header.seat].append((rank, member))
    return {
        (task, member, seat)
        for (task, seat), members in ranked_members.items()
        for _, member in sorted(members)[: config.best_of or None]
    }


def _is_within_bounds(config: CollectConfig, reward: float | None) -> bool:
    """Return whether a reward is at least min_reward and at most max_reward."""
    low = config.min_reward
    high = config.max_reward
    if reward is None:
        return low is None and high is None
    is_high_enough = low is None or reward >= low
    is_low_enough = high is None or reward <= high
    return is_high_enough and is_low_enough


def rows(
    tasks: Sequence[Task],
    samples: Samples,
    selected: set[SampleKey],
    decode: Callable[..., object],
) -> Iterator[FileRow]:
    """Yield one row for each segment of the `selected` trajectories, ordered by task and sample."""
    for task, member, headers in samples.headers():
        keys = [(task, member, header.seat) for header in headers]
        if selected.isdisjoint(keys):
            continue
        payloads = samples.payloads(task, member)
        trajectories = zip(keys, headers, payloads, strict=True)
        for key, header, payload in trajectories:
            if key not in selected:
                continue
            shared = shared_columns(tasks[task], header)
            segments = TrajectoryTree.decode(payload).segments()
            for number, segment in enumerate(segments):
                yield {
                    "sample": member,
                    "segment": number,
                    **shared,
                    **columns(segment, decode),
                }


def shared_columns(task: Task, header: TrajectoryHeader) -> FileRow:
    """Return the columns that are equal in all rows of a trajectory."""
    is_text = isinstance(task.prompt, str)
    return {
        "task_id": task.task_id,
        "source": header.source,
        "seat": header.seat,
        "prompt": task.prompt if is_text else None,
        "messages": None if is_text else task.prompt,
        "ground_truth": task.ground_truth,
        "reward": header.reward,
        "reward_parts": header.reward_parts,
        "turns": header.turns,
        "truncated": header.truncated,
    }


def columns(segment: Segment, decode: Callable[..., object]) -> FileRow:
    """Return the columns of a segment: its tokens, and the sampled tokens as text."""
    tokens = np.frombuffer(segment.tokens, "<i4")
    mask_bytes = np.frombuffer(segment.loss_mask, np.uint8)
    mask = mask_bytes.astype(bool)
    sampled_tokens = tokens[mask].tolist()
    logprobs = np.frombuffer(segment.logprobs, "<f4")
    versions = np.frombuffer(segment.versions, "<i4")
    return {
        "text": str(decode(sampled_tokens, skip_special_tokens=True)),
        "next_state": segment.turns[-1].node.next_state or None,
        "tokens": tokens.tolist(),
        "loss_mask": mask.tolist(),
        "logprobs": logprobs.tolist(),
        "versions": versions.tolist(),
    }
