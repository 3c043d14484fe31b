"""Random histories of a session's ledger, with kills: each sample counts once, in the last state.

A list stands for the weights: for each step, the updates that it has. Its hash is the fingerprint.
A kill leaves the file as it is, without the end of the session.
"""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arealite.api.algorithm import KLConfig, LossConfig
from arealite.api.engine_config import OptimizerConfig
from arealite.api.episode import Seat
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.api.turns import digest
from arealite.base.errors import UserError
from arealite.ext.audit.audit import audit
from arealite.ext.session.call_loss import named_loss
from arealite.ext.session.sample_ledger import GROUP, RecordedAnswer, SampleAgent, SampleLedger
from arealite.ext.session.sample_rows import Sample
from arealite.impl.engine import checkpoint
from tests.system.scenes import experiment

LOSS = named_loss(LossConfig(), KLConfig())
PROMPT = [1, 2, 3]
MAX_STALENESS = 4
Update = tuple[int, list[str]]
"""Its number, and the ids of its samples."""


class History:
    """A program that samples, trains, saves, loads and is killed, with a model of its weights."""

    def __init__(self, config: ExperimentConfig, rng: random.Random) -> None:
        self.config = config
        self.rng = rng
        self.paths = run_paths(config)
        self.updates = itertools.count()
        self.num_samples = 0
        self.open()

    def open(self) -> None:
        self.ledger = SampleLedger(self.config)
        state = self.ledger.state
        self.steps: list[list[Update]] = self.stored(state) if state else []
        self.pending: list[Update] = []
        self.version = self.ledger.start.step
        self.samples: list[Sample] = []
        self.stale: set[str] = set()
        assert self.in_ledger() == self.ids_of_steps()

    def stored(self, state: Path) -> list[list[Update]]:
        return json.loads((state / "weights.json").read_text())

    def fingerprint(self) -> str:
        return digest(json.dumps([self.steps, self.pending]).encode()).hex()

    def end_step(self) -> None:
        self.ledger.end_step(self.version, self.fingerprint)
        if self.pending:
            self.steps.append(self.pending)
            self.pending = []
        assert self.in_ledger() == self.ids_of_steps()

    def ids_of_steps(self) -> list[list[str]]:
        """Return the samples of each step, in the order of their first updates."""
        ids_of_steps = list[list[str]]()
        for step in self.steps:
            ids_of_steps.append([*dict.fromkeys(name for _, ids in step for name in ids)])
        return ids_of_steps

    def in_ledger(self) -> list[list[str]]:
        """Return the samples of each step of the ledger."""
        with closing(sqlite3.connect(self.paths.ledger)) as db:
            rows = db.execute("SELECT trained FROM steps ORDER BY step").fetchall()
        return [json.loads(trained) for (trained,) in rows]

    # ------------------------------------------------------------ calls

    def sample(self) -> None:
        group = f"{GROUP}{self.num_samples}"
        answers = [self.answer(group) for _ in range(self.rng.randint(1, 4))]
        self.samples += self.ledger.add_samples(answers)
        self.num_samples += len(answers)

    def answer(self, group: str) -> RecordedAnswer:
        nobody: Any = None
        agent = SampleAgent(None, client=nobody, tokenizer=nobody, seat=Seat())
        turn = agent.record.begin(PROMPT, SamplingConfig())
        ids = self.rng.choices(range(9), k=3)
        response = LLMResponse(
            output_ids=ids, logprobs=[-1.0] * 3, versions=[self.version] * 3, stop_reason="stop"
        )
        agent.record.add(turn, response)
        sample = Sample(
            prompt=PROMPT,
            prompt_ids=PROMPT,
            output_ids=ids,
            logprobs=response.logprobs,
            versions=response.versions,
            stop_reason="stop",
            text="",
            temperature=1.0,
            group=group,
        )
        return RecordedAnswer(sample, agent)

    def train(self) -> None:
        if not self.samples:
            return
        chosen = self.rng.sample(self.samples, self.rng.randint(1, min(3, len(self.samples))))
        ids = [sample.trajectory_id for sample in chosen]
        rows = [sample.row(0.5) for sample in chosen]
        closed = {name for step in self.ids_of_steps() for name in step} | self.stale
        if not closed.isdisjoint(ids):
            with pytest.raises(UserError, match=r"row \d is of the sample"):
                self.ledger.record_backward(rows, LOSS)
            return
        self.ledger.add_backward(self.ledger.record_backward(rows, LOSS), {"loss": 1.0})
        if self.rng.random() < 0.1:
            self.ledger.drop_gradient()
            return
        self.ledger.check_gradient()
        self.ledger.add_update(None, OptimizerConfig(), {"lr": 1.0})
        self.pending.append((next(self.updates), ids))

    def publish(self) -> None:
        self.end_step()
        self.version = max(self.version + 1, self.ledger.position(0).step)
        self.ledger.filter_stale(self.version - MAX_STALENESS)
        self.ledger.add_version(self.version, "")
        trained = {name for step in self.ids_of_steps() for name in step}
        for sample in self.samples:
            is_old = min(sample.versions) < self.version - MAX_STALENESS
            if is_old and sample.trajectory_id not in trained:
                self.stale.add(sample.trajectory_id)

    def save(self, *, is_killed: bool = False) -> None:
        self.end_step()
        position = self.ledger.position(self.version)
        path = self.paths.checkpoints / self.rng.choice("abc")
        folder = checkpoint.begin(path)
        (folder / "weights.json").write_text(json.dumps(self.steps))
        extra = msgspec.structs.asdict(position)
        (folder / "extra.json").write_text(json.dumps({"extra": extra}))
        checkpoint.commit(path, {"step": position.step})
        if not is_killed:
            self.ledger.add_state(position, path)

    def load(self) -> None:
        path = self.paths.checkpoints / self.rng.choice("abc")
        if not path.exists():
            return
        steps = self.stored(path)
        if json.dumps(steps) != json.dumps(self.steps[: len(steps)]):
            with pytest.raises(UserError, match="does not have the steps of the state"):
                self.ledger.check_state(path)
            return
        self.ledger.roll_back(self.ledger.check_state(path))
        self.steps = steps
        self.pending = []
        assert self.in_ledger() == self.ids_of_steps()

    def end(self) -> None:
        self.end_step()
        self.ledger.close()
        self.open()

    def kill(self) -> None:
        self.ledger._ledger.close()
        self.ledger._metrics.close()
        self.open()

    def kill_in_save(self) -> None:
        self.save(is_killed=True)
        steps = json.dumps(self.steps)
        self.kill()
        assert json.dumps(self.steps) == steps

    # ------------------------------------------------------------ rules

    def check(self) -> None:
        report = audit(self.paths.ledger)
        assert report.ok, report.table()
        assert report.groups.offered == self.num_samples
        ids = Counter(name for step in self.in_ledger() for name in step)
        assert max(ids.values(), default=1) == 1
        assert report.groups.trained == ids.total()


WEIGHTS = {"sample": 6, "train": 8, "publish": 4, "save": 2, "load": 2, "end": 1, "kill": 1}


@pytest.mark.parametrize("seed", range(20))
def test_random_history_counts_each_sample_once(seed: int, tmp_path: Path) -> None:
    history = History(experiment(tmp_path, staleness_policy="mask"), random.Random(seed))
    weights = WEIGHTS | {"kill_in_save": 1}
    for name in history.rng.choices([*weights], [*weights.values()], k=80):
        getattr(history, name)()
    history.check()
    history.end()
    history.check()
    history.ledger.close()
