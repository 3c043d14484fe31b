"""Compares the trainer with each server and with plain transformers, before the first episode.

Each server generates a few hundred tokens from random prompts. The trainer scores the same tokens
in the layout of its training rows; plain transformers scores them row by row, with its reference
attention, in float32. Shape letters: B = rows, T = tokens of the longest row.
"""

import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from arealite.api.config import ExperimentConfig
from arealite.api.engine import Sequence, TrainEngine
from arealite.base import log
from arealite.base.errors import UserError
from arealite.base.model_folder import read_json, read_shapes, text_part
from arealite.impl.launcher.processes import server_overrides
from arealite.impl.self_check import plain
from arealite.impl.self_check.comparison import BOUNDS, Comparison, masked
from arealite.impl.self_check.reasons import Evidence, likely_reason
from arealite.impl.self_check.servers import NEW, Generated, Question
from arealite.impl.trainer.world import World
from arealite.impl.weights.sums import constants, sums
from arealite.system.names.registry import NameRegistry

logger = log.get(__name__)

OPTION = "trainer.ppo.publisher.self_check"


def self_check(config: ExperimentConfig, engine: TrainEngine, world: World, version: int) -> None:
    """Compare the trainer's logprobs with those of each server and of plain transformers.

    All ranks call this function. It changes neither parameters nor metrics.

    Raises:
        UserError: On every rank: a difference is above its bound. The message has the likely
            reason.
    """
    if not config.trainer.ppo.publisher.self_check:
        logger.warning(f"self-check is off: {OPTION}=false")
        return
    begin, check = time.perf_counter(), SelfCheck(config, engine, world, version)
    for comparison in check.compare():
        if not comparison.is_equal:
            raise UserError(check.refusal(comparison))
    logger.info("self-check passed", seconds=round(time.perf_counter() - begin, 2), **check.found)


@dataclass(eq=False)
class SelfCheck:
    """The comparisons of one version of the weights. All ranks call the same methods."""

    config: ExperimentConfig
    engine: TrainEngine
    world: World
    version: int

    def __post_init__(self) -> None:
        self.folder, ppo = Path(self.config.model.path).expanduser(), self.config.trainer.ppo
        self.dtype, self.model = ppo.engine.fsdp.dtype, read_json(self.folder)
        temperature, limit = ppo.collector.sampling.temperature or 1.0, ppo.publisher.timeout_s
        self.question = Question(self.model, self.version, temperature, limit)
        self.plain: plain.PlainModel | None = None
        """The reference, on rank 0, if it fits beside the trainer."""
        self.module: Any = getattr(self.engine, "module", None)
        """The trainer's model, if the engine shows it."""
        self.is_initial = self.version == 0 and not getattr(self.config.model, "adapter", None)
        """Whether the trainer's weights are those of the model folder."""
        self.found: dict[str, str] = {}
        """The result of each comparison, for the log."""

    def compare(self) -> list[Comparison]:
        """Return the comparison with plain transformers, if it fits, and with each server."""
        servers, question = self.ask(self.question), self.question
        if not servers:
            logger.warning("self-check: no server to compare with", version=self.version)
        made = [self.with_server(server) for server in servers]
        if why := self.load_plain():
            self.found["plain transformers"] = f"not compared: {why}"
        else:
            random = [question.row(prompt, prompt[:1] * NEW) for prompt in question.prompts()]
            rows = servers[0].rows if servers else random
            ours_BT = made[0].ours_BT if made else self.score(rows)
            theirs_BT = self.world.broadcast(self.plain.score(rows) if self.plain else ours_BT)
            made.insert(0, Comparison("plain transformers", rows, ours_BT, theirs_BT, self.dtype))
        self.found |= {each.other: each.text for each in made}
        return made

    def ask(self, question: Question) -> list[Generated]:
        """Return on all ranks what the servers generated."""
        names = NameRegistry.of(self.config)
        return self.world.broadcast(question.ask(names) if self.world.is_rank0 else [])

    def score(self, rows: list[Sequence]) -> np.ndarray:
        """Return on all ranks the trainer's logprobs [B, T], NaN outside the loss masks."""
        size, rank = self.world.size, self.world.rank
        lengths = [[len(row.tokens) for row in rows[each::size]] for each in range(size)]
        scored = self.engine.forward(rows[rank::size], lengths)["logprobs"]
        ours_BT = np.zeros(masked(rows).shape)
        for line, values_T in zip(ours_BT[rank::size], scored, strict=True):
            line[: len(values_T)] = values_T
        return self.world.add(ours_BT) + masked(rows)

    def with_server(self, server: Generated) -> Comparison:
        """Return the comparison with one server."""
        theirs_BT = np.full_like(masked(server.rows), np.nan)
        for line, row, logprobs in zip(theirs_BT, server.rows, server.logprobs, strict=True):
            line[len(row.tokens) - len(logprobs) : len(row.tokens)] = logprobs
        coarsest = max(self.dtype, self.dtype_of(server.info), key=BOUNDS.__getitem__)
        name, ours_BT = f"server {server.address}", self.score(server.rows)
        return Comparison(name, server.rows, ours_BT, theirs_BT, coarsest, server.info)

    def dtype_of(self, info: dict[str, Any]) -> str:
        """Return the dtype that a server should have: the option for a server of this run, or else
        the one that it reports."""
        dtype = info.get("dtype")
        if self.config.launcher.llm_servers:
            words = [word.partition("=") for word in server_overrides(self.config)]
            dtype = [value.strip('"') for key, _, value in words if key == "model.dtype"][-1]
        return dtype if dtype in BOUNDS else "bfloat16"

    def load_plain(self) -> str:
        """Load plain transformers on rank 0; return on all ranks why it was not loaded, or "".

        Later versions get the trainer's weights, under the names of the folder.
        """
        numel = sum(map(prod, read_shapes(self.folder).values()))
        if why := self.world.broadcast(plain.obstacle(numel)):
            return why
        self.plain = plain.PlainModel(self.folder) if self.world.is_rank0 else None
        weights = iter(()) if self.is_initial else self.engine.stream_weights()
        self.plain.update(weights) if self.plain else deque(weights, maxlen=0)
        return ""

    # ------------------------------------------------------------ the reason

    def refusal(self, wrong: Comparison) -> str:
        """Return on all ranks the error for a comparison, with its likely reason."""
        evidence, (mean, most) = self.evidence(wrong), BOUNDS[wrong.dtype]
        what = f"The trainer and {wrong.other} give the same tokens different log-probabilities"
        size = f"{wrong.text}; {mean:g} and {most:g} are allowed in {wrong.dtype}"
        place = "" if wrong.info else self.place(wrong.rows[int(wrong.means_B.argmax())])
        where = f" It begins in {place}." if place else ""
        reason = f"Likely reason: {likely_reason(wrong, evidence)}."
        return self.world.broadcast(f"{what} ({size}).{where} {reason} ({OPTION}=false skips this)")

    def evidence(self, wrong: Comparison) -> Evidence:
        """Collect facts about a difference, on all ranks."""
        rows, run, alone_BT = wrong.rows, self.question.temperature, masked(wrong.rows)
        for line, row in zip(alone_BT, rows, strict=True):
            line[: len(row.tokens)] = self.score([row])[0]
        others = {1.0, run**2, 1 / run} - {run}
        warmer = {each: [replace(row, temperature=each) for row in rows] for each in others}
        made = Evidence(
            trainer_alone=replace(wrong, theirs_BT=alone_BT, dtype=self.dtype),
            by_temperature={t: replace(wrong, ours_BT=self.score(warmer[t])) for t in others},
            right=sums(self.engine.stream_weights()),
            folder=sums(plain.stored(self.folder)),
            dtype=self.dtype_of(wrong.info) if wrong.info else self.dtype,
            window=text_part(self.model).get("sliding_window"),
        )
        if self.module is not None:
            made.buffers = frozenset(name for name, _ in self.module.named_buffers())
            made.right |= sums(constants(self.module))
        if not wrong.info and self.plain and self.is_initial:
            made.wrong = made.right
            made.right = made.folder | sums(constants(self.plain.model))
        if wrong.info:
            servers = self.ask(replace(self.question, wants_sums=True))
            made.wrong = {server.address: server.sums for server in servers}.get(wrong.address, {})
        return made

    def place(self, row: Sequence) -> str:
        """Return the module in which the trainer begins to differ from plain transformers."""
        with plain.watched(self.module) if self.module else nullcontext() as ours:
            self.score([row])
        if self.plain is None or ours is None:
            return ""
        return plain.first_difference(ours, self.plain.outputs(row), self.dtype)
