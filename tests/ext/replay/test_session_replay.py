"""The steps of a session are repeated bit for bit; a step that cannot be repeated is one line."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import arealite
from arealite.api.engine import LossInput
from arealite.cli import main as cli
from tests.ext.session.conftest import Open, model, opened, options  # noqa: F401

PROMPTS = ["2+3=", [5, 6, 7, 8]]
MODULE = """
def reinforce(batch):
    terms_N = -batch.fields["mine"] * batch.outputs["logprobs"]
    return (terms_N * batch.fields["loss_weight"]).sum()
"""


def of_a_test(batch: LossInput) -> torch.Tensor:
    """Return Σ weight · −A · logprob."""
    terms_N = -batch.fields["advantages"] * batch.outputs["logprobs"]
    return (terms_N * batch.fields["loss_weight"]).sum()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a run; a replay may change the number of threads."""
    threads = torch.get_num_threads()
    yield tmp_path / "runs/arealite/trial"
    torch.set_num_threads(threads)


def replay(run: Path, *words: str) -> int:
    return cli.main(["replay", str(run), *words])


async def sampled_rows(session: arealite.Session, n: int = 2) -> list[Any]:
    samples = await session.sample(PROMPTS, n=n, max_tokens=6)
    return session.rows(samples, [float(index % n) for index in range(len(samples))])


async def train(session: arealite.Session, rows: list[Any], **arguments: Any) -> None:
    session.forward_backward(rows, **arguments)
    await session.optim_step(lr=0.1)


async def test_steps_of_all_kinds_are_repeated(
    opened: Open,  # noqa: F811
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adamw = {"optimizer.type": "adamw"}
    async with opened(ledger=True, lora=2, overrides=adamw) as parts:
        session = parts.session
        rows = await sampled_rows(session)
        for _ in range(2):  # epochs, with the log-probabilities of the first pass
            await train(session, rows, loss="ppo", eps_high=0.3)
        await session.publish()
        rows = await sampled_rows(session)
        await train(session, rows, loss="grpo")  # with a reference
        await session.save("state")
        for row in await sampled_rows(session):  # several calls in an update
            row.fields["loss_weight"] = np.linspace(0.0, 1.0, len(row.tokens), dtype=np.float32)
            row.loss_mask[-1] = False
            session.forward_backward([row], loss="reinforce")
        await session.optim_step(lr=0.2, clip_grad_norm=0.01)
        await session.publish()
        await train(session, await sampled_rows(session))
        await session.load("state")
        rows = await sampled_rows(session)
        del rows[0]
        session.forward_backward(rows, loss="cispo")
        await session.optim_step()
    more_memory = {"engine.fsdp.max_tokens_per_microbatch": 16}
    async with opened(ledger=True, lora=2, overrides=adamw | more_memory) as parts:
        await train(parts.session, await sampled_rows(parts.session))
        await parts.session.publish()
        await train(parts.session, await sampled_rows(parts.session))
    assert replay(run) == 0
    assert "replayed 4 steps: bitwise equal" in capsys.readouterr().out
    assert replay(run, "--to", "2") == 0
    assert "replayed 2 steps: bitwise equal" in capsys.readouterr().out


async def test_numbers_and_fields_of_other_types_are_recorded(
    opened: Open,  # noqa: F811
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with opened(ledger=True) as parts:
        session = parts.session
        for rewards in (np.array([0.0, 1.0]), np.array([1.0, 0.0], np.float32), [True, False]):
            samples = await session.sample("2+3=", n=2, max_tokens=6)
            rows: list[Any] = [*session.rows(samples, [*rewards])]
            rows[0].temperature = np.float64(1.0)
            rows[0].fields["mine"] = [0.5] * len(rows[0].tokens)
            rows[1].fields["mine"] = torch.ones(len(rows[1].tokens))
            session.forward_backward(rows)
            await session.optim_step(lr=np.float64(0.1))
            await session.publish()
    assert replay(run) == 0
    assert "replayed 3 steps: bitwise equal" in capsys.readouterr().out


async def test_changed_record_differs_and_a_missing_one_is_refused(
    opened: Open,  # noqa: F811
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with opened(ledger=True) as parts:
        for _ in range(2):
            await train(parts.session, await sampled_rows(parts.session))
            await parts.session.publish()
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db, db:
        select = "SELECT updates FROM session_steps WHERE step = 1"
        updates = msgspec.msgpack.decode(db.execute(select).fetchone()[0])
        updates[0]["lr"] = 0.2
        db.execute(
            "UPDATE session_steps SET updates = ? WHERE step = 1",
            (msgspec.msgpack.encode(updates),),
        )
    assert replay(run) == 1
    assert "step 2 is the first that differs: its parameters" in capsys.readouterr().err
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db, db:
        db.execute("DELETE FROM session_steps WHERE step = 1")
    assert replay(run, "--to", "1") == 0
    assert replay(run) == 2
    assert "lacks the updates of step 2" in capsys.readouterr().err


async def test_own_loss_is_repeated_if_it_can_be_imported(
    opened: Open,  # noqa: F811
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def local_loss(batch: LossInput) -> torch.Tensor:
        return of_a_test(batch)

    (tmp_path / "my_losses.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    from my_losses import reinforce  # type: ignore[import-not-found]

    async with opened(ledger=True) as parts:
        session = parts.session
        rows = await sampled_rows(session)
        for row in rows:
            row.fields["mine"] = np.arange(len(row.tokens), dtype=np.float32)
        await train(session, rows, loss=reinforce)
        await session.publish()
        await train(session, await sampled_rows(session), loss=local_loss)
    sys.modules.pop("my_losses")
    assert replay(run) == 2
    assert re.search(
        r"step 2 cannot be repeated: .* function \S+local_loss, .* --to 1\.",
        capsys.readouterr().err,
    )
    assert replay(run, "--to", "1") == 0
    assert "replayed 1 steps: bitwise equal" in capsys.readouterr().out
    (tmp_path / "my_losses.py").unlink()
    sys.modules.pop("my_losses")
    assert replay(run, "--to", "1") == 2
    error = capsys.readouterr().err
    assert "step 1 cannot be repeated: its loss is the function my_losses:reinforce" in error
