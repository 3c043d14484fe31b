"""Updates of a vLLM server of two workers, each of which holds a half of each matrix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from arealite.ext.distributed.distributed_publisher import DistributedPublisher
from arealite.impl.publisher.disk import DiskPublisher
from arealite.impl.publisher.servers import ServersPublisher
from tests.vllm.inside_server import InsideServer, inside_server
from tests.vllm.test_updates import Versions, check_ten_updates

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1000)]


@pytest.fixture
def two_workers(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[InsideServer]:
    root = tmp_path_factory.mktemp("tp2")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # else each needs a NUMA node
    with inside_server(root, "--tensor-parallel-size=2") as server:
        yield server


@pytest.mark.parametrize("way", [DiskPublisher, DistributedPublisher])
async def test_both_workers_get_each_version(
    two_workers: InsideServer, tmp_path: Path, way: type[ServersPublisher]
) -> None:
    states = two_workers.post_ok("/collective_rpc", method="arealite_state", kwargs={})["results"]
    assert len({state["start_id"] for state in states}) == 2
    await check_ten_updates(two_workers, Versions(two_workers), tmp_path, way, "retract")
