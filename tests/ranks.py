"""Several ranks of one job for tests, forked from a process that has imported their modules.

Imports of torch and the engine take most of the time of a small rank.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")


def run_ranks(
    job: Callable[..., None],
    words: Sequence[Any],
    environments: Sequence[Mapping[str, str]],
    *,
    seconds: float = 240.0,
) -> list[int | None]:
    """Run `job(*words)` in a process for each environment; return their exit codes."""
    CONTEXT.set_forkserver_preload([job.__module__])
    ranks = [CONTEXT.Process(target=_rank, args=(env, job, words)) for env in environments]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(seconds)
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join(60)


def _rank(environment: Mapping[str, str], job: Callable[..., None], words: Sequence[Any]) -> None:
    os.environ |= environment
    job(*words)
