"""Real SGLang serves a folder of the hub, and versions of it under the names of the folder.

`make test-models` compares the other families with the embedded server.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from arealite.api.publisher import DiskPublisherConfig
from arealite.ext.distributed.distributed_publisher import DistributedPublisher
from arealite.impl.publisher.disk import DiskPublisher
from arealite.system.names.name_registry import NameRegistry
from tests.families.checks import Case, compare_answers, load, quiet
from tests.impl.engine.conftest import group as group
from tests.impl.engine.helpers import LOSS
from tests.impl.publisher.sites import publishing
from tests.sglang.real import real_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("group")]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_family_is_served_and_updated_exactly(family: str, tmp_path: Path) -> None:
    with quiet():
        case = Case(family, tmp_path, original=True)
        engine = case.engine()
    disk = DiskPublisherConfig(dir=str(tmp_path / "staged"))
    config = publishing(tmp_path, case.path, timeout_s=60.0, disk=disk)
    with real_sglang(case.path, tmp_path) as server:
        asyncio.run(compare_answers(case, server.address, case.reference, "SGLang"))
        entry = {"address": server.address, "type": "sglang", "pid": server.process.pid}
        entry |= {"model_path": str(case.path)}
        NameRegistry.of(config).put("llm_server", "s", entry)
        for version, way in enumerate((DiskPublisher, DistributedPublisher), 1):
            engine.train_batch(case.rows, LOSS)
            publisher = way(config, engine)
            try:
                while publisher.stage(version, engine.stream_weights()):
                    pass
                publisher.push(version)
            finally:
                publisher.close()
            out = tmp_path / f"export-{version}"
            engine.export(out)
            asyncio.run(compare_answers(case, server.address, load(out), way.__name__))
