"""Run folders made by hand, for reports: a ledger, metrics, token stats and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from arealite.api.episode import EpisodeRecord, Origin
from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Failure
from arealite.api.task import Task
from arealite.api.trainer_messages import StepReport
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.base import config as base_config
from arealite.base.trial_files import RunPaths
from arealite.ext.step_metrics import token_stats_store as token_stats
from arealite.ext.step_metrics.token_stats_store import TokenStats
from arealite.ext.view.report_text import ALPHABET
from arealite.impl.rollout.tree_maker import make_tree
from arealite.system.ledger.group import Group
from arealite.system.ledger.ledger import Ledger
from tests.impl.trainer.trajectories import header
from tests.payloads import encode_segments
from tests.system.scenes import experiment

CHARACTER = {byte: character for character, byte in ALPHABET.items()}
FINGERPRINT = {"group_size": "2"}
MARKS = ("<|im_start|>", "<|im_end|>")
Trajectory = tuple[int | None, TrajectoryHeader, list[Segment] | Payload]
"""The step that trained the group, or None; its header; and its segments or its payload."""


def make_tokenizer(folder: Path, words: Sequence[str | bytes]) -> dict[str | bytes, int]:
    """Write a byte-level tokenizer whose tokens are `words` and MARKS; return their ids."""
    raw = [word.encode() if isinstance(word, str) else word for word in words]
    vocabulary = {"".join(CHARACTER[byte] for byte in word): i for i, word in enumerate(raw)}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    return {word: i for i, word in enumerate(words)} | marks


def make_run(
    root: Path, trajectories: Iterable[Trajectory], *, lines: Sequence[dict[str, float]] = ()
) -> RunPaths:
    """Write a run's folder; trajectories of a group follow each other, steps ascend."""
    paths = RunPaths(root)
    add_trajectories(paths, trajectories)
    config = experiment(root)
    base_config.save(
        replace(config, model=replace(config.model, path=str(root / "model"))), paths.config
    )
    add_lines(paths, lines)
    return paths


def add_lines(paths: RunPaths, lines: Sequence[dict[str, float]]) -> None:
    """Append metrics, as a running run does."""
    with paths.metrics.open("a") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in lines))


def add_trajectories(
    paths: RunPaths, trajectories: Iterable[Trajectory], *, first: int = 0
) -> None:
    """Add groups to a run's ledger, which number the groups from `first`."""
    ledger = Ledger(paths.ledger, fingerprint=FINGERPRINT)
    trained: dict[int, list[str]] = {}
    groups = groupby(trajectories, key=lambda each: (each[0], each[1].group_id))
    for seq, ((step, group_id), members) in enumerate(groups, first):
        task = Task(task_id=f"train-{seq}", prompt="", ground_truth=None, extra_info={})
        group = Group(
            seq=seq, group_id=group_id, task=task, size=2, epoch=0, row=seq, step=step, place=seq
        )
        group.state, group.reason = (
            ("filtered", "zero_variance") if step is None else ("batched", None)
        )
        ledger.put_group(group)
        for _, made, content in members:
            payload = content if isinstance(content, Payload) else encode_segments(content)
            ledger.add_trajectory(made, payload)
            if step is not None:
                trained.setdefault(step, []).append(made.trajectory_id)
        ledger.commit()
    for step, ids in trained.items():
        ledger.train(StepReport(step=step, trained=ids, metrics={}))
    ledger.commit()
    ledger.close()


def add_failure(paths: RunPaths, group_id: str, detail: str) -> None:
    """Add the failure of an attempt to a run's ledger, as a run does."""
    ledger = Ledger(paths.ledger, fingerprint=FINGERPRINT)
    ledger.add_failure(group_id, 1, "l", Failure(failure_class="crash", detail=detail))
    ledger.commit()
    ledger.close()


def metrics(steps: int) -> list[dict[str, float]]:
    """Return lines as a run writes them: an evaluation, and a line a step."""
    made: list[dict[str, float]] = [{"step": 0, "time": 1e9, "eval/reward": 0.25}]
    for step in range(steps):
        made.append({
            "step": step + 1, "time": 1e9 + 2.0 * (step + 1), "reward/mean": step / max(1, steps),
            "staleness/mean": 0.5, "staleness/max": 1.0, "update/grad_norm": 1.0 / (step + 1),
            "policy/entropy": 0.5, "time/step_s": 2.0, "time/update_s": 1.1, "wait/batch_s": 0.7,
            "time/other_s": 0.2, "episode/trajectories": 4.0, "episode/seconds_mean": 2.0,
            "episode/wait/generation": 1.4, "episode/wait/environment": 0.3,
            "episode/wait/reward": 0.2, "rollout/lease_wait_s": 0.5 * step, "rollout/workers": 2.0,
            "datapipe/groups_wait_s": 0.6, "datapipe/slow_episodes_wait_s": 0.1,
            "publish/stall_s": 0.1,
            "publish/pause_s": 0.2, "publish/version": float(step),
        })  # fmt: skip
    return made


def many(
    count: int, *, tokens: int, words: int, group_size: int = 8, groups: int = 25, seed: int = 1
) -> Iterable[Trajectory]:
    """Yield trajectories of about `tokens` tokens, drawn from a Zipf distribution; a tenth of the
    tokens is the prompt, and a step has `groups` groups."""
    rng = np.random.default_rng(seed)
    chances = 1.0 / np.arange(1, words + 1)
    chances /= chances.sum()
    for number in range(count):
        group, member = divmod(number, group_size)
        step, length = group // groups, int(rng.integers(tokens // 2, 3 * tokens // 2))
        ids = rng.choice(words, length, p=chances).astype("<i4")
        mask = (np.arange(length) >= max(1, length // 10)).astype("u1")
        switch = int(rng.integers(1, length))
        versions = np.where(np.arange(length) < switch, max(0, step - 1), step)
        versions = np.where(mask, versions, -1).astype("<i4")
        logprobs = (-rng.exponential(0.8, length) * mask).astype("<f4")
        reward = float(rng.integers(0, 2))
        rewards = np.zeros(length, "<f4")
        rewards[-1] = reward
        segment = Segment(
            tokens=ids.tobytes(),
            loss_mask=mask.tobytes(),
            logprobs=logprobs.tobytes(),
            versions=versions.tobytes(),
            rewards=rewards.tobytes(),
            temperature=1.0,
        )
        segments = [segment]
        name = f"g{group}/{member}/agent"
        yield step, header(name, segments, reward=reward, source=f"source {group % 3}"), segments


def add_token_stats(paths: RunPaths, trajectories: Iterable[Trajectory], *, seed: int = 1) -> None:
    """Write advantages and differences of trained trajectories, as rank 0 does."""
    rng = np.random.default_rng(seed)
    for step, members in groupby(trajectories, key=lambda each: each[0]):
        if step is None:
            continue
        headers = [made for _, made, _ in members]
        counts = [made.trained_tokens for made in headers]
        advantages = np.concatenate([np.full(n, rng.normal()) for n in counts]).astype("<f2")
        differences = rng.normal(0.0, 0.01, sum(counts)).astype("<f2")
        ids = [made.trajectory_id for made in headers]
        stats = TokenStats(
            trajectory_ids=ids,
            counts=counts,
            advantages=advantages.tobytes(),
            differences=differences.tobytes(),
        )
        token_stats.write(paths.token_stats, step, 0, stats)


def page_data(file: Path) -> dict[str, Any]:
    """Return the blocks of a report: bytes by id."""
    import re
    import zlib
    from base64 import b64decode

    blocks = re.findall(
        r'<script type="application/octet-stream" id="(\w+)">([^<]*)<', file.read_text()
    )
    return {name: zlib.decompress(b64decode(packed)) for name, packed in blocks}


BRANCHED = (
    ([1, 2], Origin(reused=0, new=2, reason="first")),
    ([1, 2, 7, 8, 3], Origin(reused=4, new=1)),
    ([1, 2, 4], Origin(reused=2, new=1, reason="edited")),
    ([1, 2, 7, 8, 3, 7, 8, 5], Origin(reused=7, new=1)),
)


def branched_session(turns: Sequence[tuple[list[int], Origin]] = BRANCHED) -> Payload:
    """Return a session; as a default one of two segments, because the third turn is a branch."""
    record = EpisodeRecord()
    for prompt, origin in turns:
        turn = record.begin(prompt, SamplingConfig(), origin)
        record.add(
            turn,
            LLMResponse(
                output_ids=[7, 8], logprobs=[-0.5, -0.25], versions=[0, 1], stop_reason="stop"
            ),
        )
    return make_tree(record.turns).encode()


def branched_header(payload: Payload, member: int) -> TrajectoryHeader:
    """Return the header of a `branched_session`."""
    lengths = TrajectoryTree.decode(payload).segment_lengths
    return TrajectoryHeader(
        trajectory_id=f"g0/{member}/agent",
        group_id="g0",
        member=member,
        seat="agent",
        task_id="train-0",
        reward=0.0,
        reward_parts={},
        segment_lengths=lengths,
        trained_tokens=8,
        oldest_version=0,
        newest_version=1,
        turns=4,
        truncated=False,
        interruptions=0,
        seconds=0.1,
        waits={},
    )
