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
from arealite.impl.self_check.plain import PlainModel
from arealite.impl.self_check.reasons import Evidence, likely_reason
from arealite.impl.self_check.servers import Generated, Question
from arealite.impl.trainer.world import World
from arealite.impl.weights.sums import constants, sums
from arealite.system.names.registry import NameRegistry

logger = log.get(__name__)

OFF = "trainer.ppo.publisher.self_check"


def self_check(config: ExperimentConfig, engine: TrainEngine, world: World, version: int) -> None:
    """Compare the trainer's logprobs with those of each server and of plain transformers.

    All ranks call this function. It changes neither parameters nor metrics.

    Raises:
        UserError: On every rank: a difference is above its bound. The message has the likely
            reason.
    """
    if not config.trainer.ppo.publisher.self_check:
        logger.warning(f"self-check is off: {OFF}=false")
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
        self.model = read_json(self.folder)
        self.dtype = ppo.engine.fsdp.dtype
        temperature, limit = ppo.collector.sampling.temperature or 1.0, ppo.publisher.timeout_s
        self.question = Question(self.model, self.version, temperature, limit)
        self.plain: PlainModel | None = None
        """The reference, on rank 0, if it fits beside the trainer."""
        self.found: dict[str, str] = {}
        """The result of each comparison, for the log."""

    @property
    def is_initial(self) -> bool:
        """Whether the trainer's weights are those of the model folder."""
        return self.version == 0 and not getattr(self.config.model, "adapter", None)

    def compare(self) -> list[Comparison]:
        """Return the comparison with plain transformers, if it fits, and with each server."""
        servers = self.ask(self.question)
        if not servers:
            logger.warning("self-check: no server to compare with", version=self.version)
        rows = [row for server in servers for row in server.rows] or self.question.rows()
        ours_BT, made, at = self.score(rows), list[Comparison](), 0
        for server in servers:
            made.append(self.with_server(server, ours_BT[at : at + len(server.rows)]))
            at += len(server.rows)
        if why := self.load_plain():
            self.found["plain transformers"] = f"not compared: {why}"
        else:
            rows, ours_BT = (made[0].rows, made[0].ours_BT) if made else (rows, ours_BT)
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

    def with_server(self, server: Generated, ours_BT: np.ndarray) -> Comparison:
        """Return the comparison with one server; `ours_BT` are the trainer's logprobs."""
        theirs_BT = np.full_like(ours_BT, np.nan)
        for line, row, logprobs in zip(theirs_BT, server.rows, server.logprobs, strict=True):
            line[len(row.tokens) - len(logprobs) : len(row.tokens)] = logprobs
        coarsest = max(self.dtype, self.dtype_of(server), key=BOUNDS.__getitem__)
        other = f"server {server.address}"
        return Comparison(other, server.rows, ours_BT, theirs_BT, coarsest, server.info)

    def dtype_of(self, server: Generated) -> str:
        """Return the dtype that a server should have: the option for a server of this run, or else
        the one that it reports."""
        dtype = server.info.get("dtype")
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
        self.plain = PlainModel(self.folder) if self.world.is_rank0 else None
        weights = iter(()) if self.is_initial else self.engine.stream_weights()
        self.plain.update(weights) if self.plain else deque(weights, maxlen=0)
        return ""

    # ------------------------------------------------------------ the reason

    def refusal(self, wrong: Comparison) -> str:
        """Return on all ranks the error for a comparison, with its likely reason."""
        evidence, rows, module = self.evidence(wrong), wrong.rows, self._module
        if not wrong.info:
            evidence.place = self.place(rows[int(wrong.means_B.argmax())])
        elif module is not None:
            evidence.right |= sums(constants(module))
        mean, most = BOUNDS[wrong.dtype]
        what = f"The trainer and {wrong.other} give the same tokens different log-probabilities"
        size = f"{wrong.text}; {mean:g} and {most:g} are allowed in {wrong.dtype}"
        where = f" It begins in {evidence.place}." if evidence.place else ""
        reason = likely_reason(wrong, evidence)
        off = f"{OFF}=false starts the run anyway"
        text = f"{what} ({size}).{where} Likely reason: {reason}. ({off}.)"
        return self.world.broadcast(text)

    def evidence(self, wrong: Comparison) -> Evidence:
        """Collect facts about a difference, on all ranks."""
        rows, alone_BT = wrong.rows, masked(wrong.rows)
        for line, row in zip(alone_BT, rows, strict=True):
            line[: len(row.tokens)] = self.score([row])[0]
        alone = replace(wrong, theirs_BT=alone_BT, dtype=self.dtype)
        run = self.question.temperature
        by_temperature = {
            each: replace(wrong, ours_BT=self.score([replace(r, temperature=each) for r in rows]))
            for each in {1.0, run**2, 1 / run} - {run}
        }
        weights, module = sums(self.engine.stream_weights()), self._module
        folder = sums(plain.stored(self.folder))
        made = Evidence(alone, by_temperature, weights, {}, self.dtype, folder=folder)
        made.window = text_part(self.model).get("sliding_window")
        if module is not None:
            made.buffers = frozenset(name for name, _ in module.named_buffers())
        for server in self.ask(replace(self.question, alone=True)) if wrong.info else ():
            if wrong.other.endswith(server.address):
                made.wrong, made.dtype = server.sums, self.dtype_of(server)
                made.server_alone = self.with_server(server, self.score(server.rows))
        if not wrong.info and self.is_initial:
            made.right, made.wrong = folder, weights
        if not wrong.info and self.plain and module is not None:
            made.right |= sums(constants(self.plain.model))
            made.wrong |= sums(constants(module))
        return made

    def place(self, row: Sequence) -> str:
        """Return the module in which the trainer begins to differ from plain transformers."""
        with plain.watched(self._module) if self._module else nullcontext() as ours:
            self.score([row])
        if self.plain is None or ours is None:
            return ""
        return plain.first_difference(ours, self.plain.outputs(row), self.dtype)

    @property
    def _module(self) -> Any:
        """The trainer's model, if the engine shows it."""
        return getattr(self.engine, "module", None)
