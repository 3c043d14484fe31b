"""Answers batch requests: composes each batch once, and gives every rank its shard of the same.

Here, beside the groups, because what a rank gets must be identical however often it asks, also from
a restarted datapipe.
"""

from __future__ import annotations

import time
from collections import Counter

from arealite.algo.partition import partition
from arealite.algo.staleness import blocks
from arealite.api.trainer_messages import Batch, BatchRequest
from arealite.system.datapipe_group import Group
from arealite.system.datapipe_groups import GroupBook


class Batches:
    """The batches of a run, as ranks see them, and the time they were waited for."""

    def __init__(self, book: GroupBook, *, seed: int) -> None:
        self.book = book
        self.seed = seed
        self.waited: Counter[str] = Counter()
        """Seconds by cause since the last batch was composed."""
        self._cause: tuple[str, float] | None = None
        self._waits: dict[int, dict[str, float]] = {}

    def shard(self, request: BatchRequest) -> Batch:
        """Return a composed batch for one rank; a pure function of the batch and the world size."""
        groups = self.book.batches[request.step]
        headers = [header for group in groups for header in group.headers]
        minibatches, ranks = partition(
            [header.group_id for header in headers],
            [header.num_tokens for header in headers],
            updates=min(self.book.ppo.updates, len(groups)),
            ranks=request.world_size,
            seed=self.seed + request.step,
        )
        mine = [index for index, rank in enumerate(ranks) if rank == request.rank]
        waits = self._waits.get(request.step, {})
        return Batch(request.step, headers, ranks, minibatches, mine, waits)

    def compose(self, extra: dict[str, float]) -> list[Group] | None:
        """Compose the next batch if it may be released; `extra` joins what it says about waits."""
        step = self.book.next_step
        groups = self.book.compose()
        if groups is None:
            return None
        self.mark(None)
        counts = self.book.counts
        self._waits = {
            step: {
                **{f"{cause}_wait_s": seconds for cause, seconds in self.waited.items()},
                "buffered_groups": float(counts["complete"]),
                "leased_groups": float(counts["leased"]),
                "late_results": float(self.book.too_late),
                "stale_trajectories": float(self._count_stale(groups, step)),
                **{k.replace(":", "_"): float(v) for k, v in counts.items() if ":" in k},
                **{f"stale_below_{k}": float(v) for k, v in self.book.dropped_lengths.items()},
                **extra,
            }
        }
        self.waited = Counter({"groups": 0.0, "pace": 0.0})  # type: ignore[arg-type]
        return groups

    def _count_stale(self, groups: list[Group], step: int) -> int:
        oldest = step - self.book.ppo.max_staleness
        return sum(h.oldest_version < oldest for group in groups for h in group.headers)

    def mark(self, cause: str | None) -> None:
        """Attribute the time since the last mark, and begin to wait for `cause` (None: not)."""
        now = time.monotonic()
        if self._cause is not None:
            name, since = self._cause
            self.waited[name] += now - since  # type: ignore[assignment]
        self._cause = None if cause is None else (cause, now)

    def cause(self) -> str:
        """Return what holds the next batch back: pace (it is full) or groups."""
        return "pace" if self.book.counts["complete"] >= self.book.ppo.num_groups else "groups"

    def describe(self, step: int) -> str:
        """Say how far batch `step` is, and which group it waits for although it is full."""
        book = self.book
        text = f"batch {step}: {book.counts['complete']} of {book.ppo.num_groups} groups"
        if book.version is None:
            return text + ", no policy version is published yet"
        if self.cause() == "pace":
            late = blocks(list(book.candidates()), step, eta=book.ppo.max_staleness)
            names = ", ".join(f"g{c.seq} of version {c.start}" for c in late[:3])
            text += f", kept back until {len(late)} slow groups are in ({names})"
        return text
