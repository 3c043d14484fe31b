"""A real vLLM server is proven at each version, and found with old weights or a stale cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ext.served_policy.conftest import patient as patient
from tests.ext.served_policy.real_runs import check_proofs_and_old_weights, real_run
from tests.impl.engine.conftest import group as group
from tests.vllm.inside_server import InsideServer
from tests.vllm.test_updates import config_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1000)]


def test_each_version_is_proven_and_old_weights_are_found(
    server: InsideServer, tmp_path: Path, group: None
) -> None:
    with real_run(config_of(server, tmp_path)) as run:
        check_proofs_and_old_weights(run)
