"""A real vLLM server is proven at each version, and found with old weights or a stale cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.base.errors import InvariantError
from tests.ext.served_policy.conftest import patient as patient
from tests.ext.served_policy.real_runs import real_run
from tests.impl.engine.conftest import group as group
from tests.vllm.inside_server import InsideServer
from tests.vllm.test_updates import config_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1000)]


def test_each_version_is_proven_and_old_weights_are_found(
    server: InsideServer, tmp_path: Path, group: None
) -> None:
    with real_run(config_of(server, tmp_path)) as run:
        for version in range(4):
            run.publish(version)
        proofs = run.proofs()
        print(proofs)
        assert [proof.is_proven for proof in proofs] == [True] * 4, proofs
        assert max(proof.largest for proof in proofs) < 1e-3
        with pytest.raises(InvariantError, match="old weights: the scores equal version 3's"):
            run.publish(4, sends=False)
