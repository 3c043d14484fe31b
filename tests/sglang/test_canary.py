"""A real SGLang server is proven at each version, and found with old weights or a stale cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from arealite.base.errors import InvariantError
from arealite.ext.sglang.sglang_control import SGLangControl
from arealite.system.names.name_registry import NameRegistry
from tests.ext.served_policy.conftest import patient as patient
from tests.ext.served_policy.real_runs import RealRun, check_proofs_and_old_weights, real_run
from tests.impl.engine.conftest import group as group
from tests.impl.publisher.sites import publishing
from tests.sglang.shared import SharedServer

pytestmark = pytest.mark.sglang


@pytest.fixture
def run(tmp_path: Path, sglang_server: SharedServer, group: None) -> Iterator[RealRun]:
    config = publishing(tmp_path, Path(sglang_server.folders[0]), timeout_s=60.0)
    assert sglang_server.real is not None
    entry = {
        "address": sglang_server.address,
        "type": "sglang",
        "pid": sglang_server.real.process.pid,
        "model_path": sglang_server.folders[0],
        "dtype": "float32",
    }
    NameRegistry.of(config).put("llm_server", "s", entry)
    with real_run(config) as made:
        yield made


def test_each_version_is_proven_and_old_weights_are_found(run: RealRun) -> None:
    check_proofs_and_old_weights(run)


def test_cache_that_an_update_did_not_flush_is_found(
    run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish(0)
    send_pause = SGLangControl.send_pause

    async def keep_cache(control: SGLangControl, mode: str) -> None:
        await send_pause(control, mode)
        control.flush = False

    monkeypatch.setattr(SGLangControl, "send_pause", keep_cache)
    with pytest.raises(InvariantError, match="stale prefix cache"):
        run.publish(1)
