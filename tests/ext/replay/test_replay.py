"""A replay compares batches and rewards of the ledger with the records of the run."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.payloads import Payload
from arealite.api.trainer_messages import StepReport
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.base.errors import InvariantError
from arealite.ext.replay import replay_trainer as replaying
from arealite.ext.replay.replay_trainer import Differs, LedgerLink
from arealite.system.ledger.ledger import decode_header
from tests.payloads import change_turn
from tests.system.ledger.small_run import Shape, make_run
from tests.system.scenes import experiment

OLD = '{"reward/mean": 0.5, "update/padded_tokens": 9.0}'


@pytest.fixture
def link(tmp_path: Path) -> Callable[[], LedgerLink]:
    ledger = make_run(tmp_path, Shape(steps=2))
    world: Any = SimpleNamespace(rank=0, size=1)
    config = experiment(tmp_path, num_groups=3)
    return lambda: LedgerLink(
        ledger=ledger, config=config, world=world, stop=2, on_step=lambda step: None
    )


def test_replay_detects_a_changed_reward_of_a_payload(
    link: Callable[[], LedgerLink], tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, db:
        query = (
            "SELECT trajectory_id, header, prompt_tokens, turns FROM trajectories "
            "JOIN groups USING (group_id) JOIN payloads USING (trajectory_id) "
            "WHERE step = 1 AND member = 0"
        )
        key, encoded, prompt, turns = db.execute(query).fetchone()
        payload = Payload(prompt=prompt, turns=turns)
        (turn,) = TrajectoryTree.decode(payload).turns
        changed = change_turn(payload, reward=turn.reward + 1.0)
        # The digest is made anew, so that only the comparison of rewards detects the change.
        header = msgspec.structs.replace(decode_header(encoded), digest=changed.digest)
        row = msgspec.msgpack.encode(header), changed.turns, key
        put = "UPDATE trajectories SET header = ?, payload = ? WHERE trajectory_id = ?"
        db.execute(put, row)
    replayed = link()
    assert replayed.next_batch(0) is not None
    with pytest.raises(Differs, match=f"step 2: payload and header of {key} differ: reward"):
        replayed.next_batch(1)
    replayed.close()


@pytest.mark.parametrize(("reward", "differs"), [(0.5, False), (0.75, True)])
def test_replay_compares_the_mean_reward_of_a_step(
    link: Callable[[], LedgerLink], reward: float, differs: bool
) -> None:
    replayed = link()
    report = StepReport(
        step=1, trained=[], metrics={"reward/mean": reward}, ranks=1, fingerprint="1"
    )
    if differs:
        with pytest.raises(Differs, match=r"step 2 .*mean reward is 0\.75 here, 0\.5 in the run"):
            replayed.report(report)
    else:
        replayed.report(report)
    replayed.close()


@pytest.mark.parametrize(("metrics", "layout"), [(OLD, "padded"), ("{}", "auto")])
def test_replay_of_an_older_run_computes_each_row_separately(
    metrics: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, used = make_run(tmp_path, Shape(steps=2)), list[str]()
    with closing(sqlite3.connect(ledger)) as db, db:
        db.execute("UPDATE steps SET metrics = ?", (metrics,))

    def load(config: ExperimentConfig) -> None:
        used.append(config.trainer.ppo.engine.fsdp.layout)
        raise InvariantError("seen")

    monkeypatch.setattr(replaying.World, "init", lambda **_: SimpleNamespace(rank=0, size=1))
    monkeypatch.setattr(replaying, "load_ppo_engines", load)
    options: dict[str, Any] = {"stop": 2, "leave": False, "on_step": lambda step: None}
    with pytest.raises(InvariantError, match="seen"):
        replaying.replay(experiment(tmp_path), ledger, scratch=tmp_path, **options)
    assert used == [layout]
