"""The self-check of two ranks: both reach the same result."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from arealite.impl.launcher.processes import threads
from tests.ext.self_check import worker
from tests.fakes.embedded import running, server_config
from tests.impl.trainer.test_ranks import place
from tests.models import tiny_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


async def test_two_ranks_reach_the_same_result(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model", init_std=0.1)
    tiny_model(tmp_path / "other", init_std=0.1, seed=1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [place(store, rank, 2) | threads(1) for rank in range(2)]
    async with running(server_config(tmp_path / "model", tmp_path / "names")) as server:
        await asyncio.wrap_future(server.resume("0"))
        codes = await asyncio.to_thread(run_ranks, worker.main, (tmp_path,), ranks)
    assert codes == [0, 0]
    one, two = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert one == two
    both = ["plain transformers", "server"]
    assert one["same"] == [both, "equal"]
    assert one["other"][0] == both
    assert "tensors differ" in one["other"][1]
    # The server holds version 0, and the plain copy gets the weights of the ranks.
    assert one["later"] == [["plain transformers"], "equal"]
