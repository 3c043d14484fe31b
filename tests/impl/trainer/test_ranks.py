"""A step of two ranks with many micro-batches equals a step of one rank with few."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from arealite.impl.launcher.processes import threads
from tests.impl.trainer import worker
from tests.impl.trainer.worker import KINDS
from tests.models import tiny_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


def place(store: TCPStore, rank: int, size: int) -> dict[str, str]:
    """Return the environment of a rank that uses an existing store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("steps")
    tiny_model(folder / "model", init_std=0.1)
    # The stores listen before any rank starts; a free port could be taken in between.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    places = [(stores[0], 0, 1), (stores[1], 0, 2), (stores[1], 1, 2)]
    ranks = [place(*each) | threads(1) for each in places]
    assert run_ranks(worker.main, (folder,), ranks) == [0, 0, 0]
    names = "1-0", "2-0", "2-1"
    return {name: torch.load(folder / f"out-{name}.pt", weights_only=False) for name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_compute_the_same_parameters_as_one(outs: dict[str, Any], kind: str) -> None:
    one, two = (outs[name][kind] for name in ("1-0", "2-0"))
    assert one.keys() == two.keys()
    assert any(name.startswith("critic/") for name in one) == (kind == "gae")
    before = {name: value for name, value in one.items() if name != "metrics"}
    for name, value in before.items():
        worst = float((two[name] - value).abs().max())
        assert worst <= 1e-5 * max(float(value.abs().max()), 1e-2), (name, worst)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_report_the_same_metrics_as_one(outs: dict[str, Any], kind: str) -> None:
    lines = zip(outs["1-0"][kind]["metrics"], outs["2-0"][kind]["metrics"], strict=True)
    for one, two in lines:
        assert one["update/microbatches"] <= 2.0
        assert two["update/microbatches"] >= 10.0, "5 a rank"
        assert one.keys() == two.keys()
        for name, value in one.items():
            if name.split("/")[-1] not in ("microbatches", "computed_tokens", "computed_frac"):
                assert two[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name
        assert one["update/grad_norm"] > 1e-3
    assert outs["2-1"][kind]["metrics"] == []
