"""Sessions with two ranks equal those with one; a failed or killed rank ends no call in silence."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

import arealite
from arealite.api.engine import Sequence
from arealite.base.errors import RoleError, UserError
from arealite.cli import main as cli
from arealite.ext.session import ranks
from arealite.ext.session.ranks import split_by_tokens
from arealite.system.ledger.ledger import open_read_only
from tests.e2e import gated
from tests.ext.session import own_losses
from tests.ext.session.conftest import Open
from tests.waiting import until_exited

pytestmark = pytest.mark.processes
OF_A_NOTEBOOK = gated.GatedConfig
"""The options of an environment that this process has registered, and the ranks do not know."""


def made_rows(lengths: tuple[int, ...] = (9, 5, 7, 6, 12)) -> list[Sequence]:
    """Return rows of random tokens, all but the first of which are trained."""
    rng = np.random.default_rng(7)
    rows = list[Sequence]()
    for length in lengths:
        fields = {
            "advantages": np.full(length, rng.normal(), np.float32),
            "behav_logprobs": np.full(length, -4.0, np.float32),
            "versions": np.zeros(length, np.float32),
        }
        row = Sequence(
            tokens=rng.integers(3, 20, length).astype(np.int32),
            loss_mask=np.arange(length) > 0,
            temperature=1.0,
            fields=fields,
        )
        rows.append(row)
    return rows


def child_ranks() -> list[psutil.Process]:
    """Return the processes of ranks that run for this process."""
    children = psutil.Process().children(recursive=True)
    processes_of_ranks = list[psutil.Process]()
    for child in children:
        with suppress(psutil.NoSuchProcess):  # also one that has exited
            if ranks.ROLE in child.cmdline():
                processes_of_ranks.append(child)
    return processes_of_ranks


async def trained(session: arealite.Session, folder: Path) -> dict[str, Any]:
    """Train, save, load and publish; return what the calls returned, and the weights."""
    rows = made_rows()
    results: dict[str, Any] = {"backward": await session.forward_backward(rows, loss="ppo")}
    results["recorded"] = [row.fields["prox_logprobs"] for row in rows]
    results["step"] = await session.optim_step(lr=0.3)
    await session.save("state")
    await session.forward_backward(made_rows((5,)), own_losses.reinforce)  # a rank without rows
    results["one_row"] = await session.optim_step(lr=0.3)
    await session.load("state")
    await session.forward_backward(rows, loss="grpo")
    await session.optim_step(lr=0.1)
    results["evaluated"] = await session.evaluate(made_rows(), own_losses.reinforce)
    results["published"] = (await session.publish()).servers
    results["logprobs"] = await session.forward(rows)
    await session.export(folder)
    results["weights"] = load_file(folder / "model.safetensors")
    return results


def assert_close(measured: Any, expected: Any) -> None:
    """Compare results but for the number of micro-batches."""
    if isinstance(expected, dict):
        assert measured.keys() == expected.keys()
        for name in expected.keys() - {"microbatches", "computed_tokens"}:
            assert_close(measured[name], expected[name])
    elif isinstance(expected, list):
        assert len(measured) == len(expected)
        for one_measured, one_expected in zip(measured, expected, strict=True):
            assert_close(one_measured, one_expected)
    else:
        np.testing.assert_allclose(measured, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("lora", [0, 4])
async def test_two_ranks_compute_what_one_does(opened: Open, tmp_path: Path, lora: int) -> None:
    results = list[dict[str, Any]]()
    for count in (1, 2):
        async with opened(ranks=count, lora=lora) as parts:
            results.append(await trained(parts.session, tmp_path / f"export-{count}"))
            sample = (await parts.session.sample("2+3=", max_tokens=4))[0]
            assert {*sample.versions} == {1}
        assert not child_ranks()
    assert_close(results[1], results[0])


async def test_ledger_of_two_ranks_is_replayed_bit_for_bit(
    opened: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        async with opened(ranks=2, ledger=True) as parts:
            session = parts.session
            samples = await session.sample(["2+3=", "4+4="], n=3, max_tokens=6)
            rows = session.rows(samples, [float(index % 3) for index in range(6)])
            session.forward_backward(rows, own_losses.reinforce)
            await session.optim_step(lr=0.3)
            await session.save("state")
    assert cli.main(["replay", str(tmp_path / "runs/arealite/trial")]) == 0
    assert "replayed 2 steps: bitwise equal" in capsys.readouterr().out


async def test_failure_on_all_ranks_drops_the_gradient_and_the_session_continues(
    opened: Open,
) -> None:
    rows = made_rows()
    async with opened(ranks=2) as parts:
        session = parts.session
        rows[4].temperature = 0.0  # only the rank of the row would refuse it
        with pytest.raises(UserError, match="row 4 has the temperature 0"):
            await session.forward_backward(rows, own_losses.reinforce)
        rows[4].temperature = 1.0
        with pytest.raises(UserError, match=r"loss .*<lambda>: .*top level of a module"):
            session.forward_backward(rows, lambda batch: own_losses.reinforce(batch))
        await session.forward_backward(rows, own_losses.reinforce)
        expected = await session.optim_step(lr=0.0)
        session.forward_backward(rows, own_losses.reinforce)
        with pytest.raises(ZeroDivisionError, match="no loss"):
            await session.forward_backward(rows, own_losses.fails)
        with pytest.raises(UserError, match="no gradient"):
            await session.optim_step(lr=0.3)
        await session.forward_backward(rows, own_losses.reinforce)
        assert await session.optim_step(lr=0.0) == expected


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_that_fails_alone_without_a_collective_ends_the_training(
    opened: Open, rank: int
) -> None:
    """Only one of the ranks may have changed its parameters."""
    async with opened(ranks=2) as parts:
        (rank_1,) = child_ranks()
        all_ranks = parts.session._policy.ranks
        with pytest.raises((RoleError, ZeroDivisionError), match="after the last collective"):
            all_ranks.call(own_losses.fails_on_one_rank, rank)
        until_exited(rank_1)
        with pytest.raises(RoleError, match=r"has ended \(another rank has failed\).*Start"):
            await parts.session.forward(made_rows())


async def test_step_that_was_not_published_is_in_the_ledger_after_close(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_FORK", "1")  # the kernel kills a child with the thread that started it
    async with opened(ranks=2, ledger=True) as parts:
        session = parts.session
        samples = await session.sample("2+3=", n=2, max_tokens=6)
        session.forward_backward(session.rows(samples, [0.0, 1.0]), loss="reinforce")
        await session.optim_step(lr=0.3)
    with open_read_only(tmp_path / "runs/arealite/trial/ledger.sqlite") as db:
        assert db.execute("SELECT ranks FROM steps").fetchall() == [(2,)]


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        ("fails_on_rank_1", "rank 1: ZeroDivisionError: no loss"),
        (
            "kills_rank_1",
            r"session_rank-1 has ended \(killed by SIGKILL\); see .*session_rank-1.log",
        ),
        ("fails_on_rank_0", "no loss"),
    ],
)
async def test_failure_of_one_rank_is_named_and_ends_the_training(
    opened: Open, monkeypatch: pytest.MonkeyPatch, loss: str, reason: str
) -> None:
    monkeypatch.setattr(ranks, "ANSWER_S", 1.0)
    async with opened(ranks=2) as parts:
        session = parts.session
        (rank_1,) = child_ranks()
        with pytest.raises((RoleError, ZeroDivisionError), match=reason):
            await session.forward_backward(made_rows(), getattr(own_losses, loss))
        with pytest.raises(RoleError, match=r"session_rank-1 has ended.*Start the session"):
            await session.optim_step(lr=0.1)
        until_exited(rank_1)


async def test_rank_that_is_killed_between_calls_fails_the_next_one(opened: Open) -> None:
    async with opened(ranks=2) as parts:
        (rank_1,) = child_ranks()
        rank_1.kill()
        with pytest.raises(RoleError, match=r"session_rank-1 has ended \(killed by SIGKILL"):
            await parts.session.forward(made_rows())


async def test_rank_that_cannot_start_fails_the_start(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_FORK", "1")
    monkeypatch.setattr(ranks.sys, "executable", "/bin/false")
    with pytest.raises(RoleError, match=r"session_rank-1 has ended \(exit code 1\)"):
        async with opened(ranks=2):
            raise AssertionError("not reached")


def rows_of(adapter: str, lengths: tuple[int, ...]) -> list[Sequence]:
    return [replace(row, adapter=adapter) for row in made_rows(lengths)]


async def trained_by_name(session: arealite.Session, folder: Path) -> dict[str, Any]:
    """Train, save, load, publish, add and remove adapters; return what the calls returned."""
    # The rows of alice are on the first rank only, and those of bob also on the second one.
    rows = rows_of("alice", (9, 5)) + rows_of("bob", (7, 6, 12, 9))
    results: dict[str, Any] = {"backward": await session.forward_backward(rows, loss="ppo")}
    results["recorded"] = [row.fields["prox_logprobs"] for row in rows]
    results["alice"] = await session.optim_step(lr=0.3, adapter="alice")
    with pytest.raises(UserError, match=r"optimizer\.type=adamw: it is sgd"):
        await session.optim_step(lr=0.3, adapter="bob", type="adamw")  # the gradient stays
    results["bob"] = await session.optim_step(lr=0.3, adapter="bob")
    await session.save("state", adapter="bob")
    await session.forward_backward(rows_of("bob", (6,)), own_losses.reinforce)
    results["one_row"] = await session.optim_step(lr=0.3, adapter="bob")
    with pytest.raises(UserError, match="no gradient"):
        await session.optim_step(lr=0.3, adapter="alice")
    await session.load("state", adapter="bob")
    await session.add_adapter("carol", rank=3, targets=["all-linear"], seed=5)
    session.forward_backward(rows_of("carol", (8, 8)), own_losses.reinforce)
    with pytest.raises(ZeroDivisionError, match="no loss"):
        await session.forward_backward(rows_of("bob", (8, 8)), own_losses.fails)
    results["carol"] = await session.optim_step(lr=0.3, adapter="carol")
    for name in ("alice", "bob", "carol"):
        results[f"published {name}"] = (await session.publish(adapter=name)).servers
        await session.export(folder / name, adapter=name)
        results[f"weights {name}"] = load_file(folder / name / "adapter_model.safetensors")
    await session.remove_adapter("carol")
    with pytest.raises(UserError, match="carol"):
        await session.forward(rows_of("carol", (8,)))
    results["logprobs"] = await session.forward(rows + made_rows((5,)))
    return results


@pytest.mark.parametrize(
    ("layout", "shares_rows"),
    [("auto", False), ("packed", True), ("padded", False)],
)
async def test_two_ranks_train_adapters_by_name_as_one_does(
    opened: Open, tmp_path: Path, layout: str, shares_rows: bool
) -> None:
    results = list[dict[str, Any]]()
    for count in (1, 2):
        overrides = {
            "engine.fsdp.layout": layout,
            "engine.fsdp.context_parallel": count if shares_rows else 1,
        }
        async with opened(ranks=count, adapters=["alice", "bob"], overrides=overrides) as parts:
            folder = tmp_path / f"export-{count}"
            results.append(await trained_by_name(parts.session, folder))
            sample = (await parts.session.sample("2+3=", max_tokens=4, adapter="bob"))[0]
            (scores_T,) = await parts.session.forward([sample.row()])
            np.testing.assert_allclose(scores_T[-4:], sample.logprobs, atol=1e-4)
        assert not child_ranks()
    assert_close(results[1], results[0])


def test_rows_are_divided_in_order_by_their_tokens() -> None:
    rows = made_rows((10, 10, 20, 40))
    assert [[len(row.tokens) for row in part] for part in split_by_tokens(rows, 2)] == [
        [10, 10, 20],
        [40],
    ]
    assert split_by_tokens(rows[:1], 3) == [[], rows[:1], []]
