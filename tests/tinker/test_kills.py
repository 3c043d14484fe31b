"""A service that is killed."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.tinker.conftest import serving
from tests.waiting import until_exited

pytestmark = pytest.mark.tinker


def test_killed_service_leaves_no_process_and_its_states_can_be_continued(
    tiny: Path, tmp_path: Path
) -> None:
    with serving(tiny, tmp_path) as service:
        saved = service.client("save_or_continue", "org/tiny")
        children = psutil.Process(service.process.pid).children(recursive=True)
        assert children
        service.process.kill()
        service.process.wait()
        until_exited(*children)

    with serving(tiny, tmp_path) as service:
        continued = service.client("save_or_continue", "org/tiny", saved["path"])

    assert continued["logprobs"] == saved["logprobs"]
