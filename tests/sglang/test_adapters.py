"""A real server serves each version of a LoRA run as an adapter of its own name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ext.served_policy.conftest import patient as patient
from tests.impl.engine.conftest import group as group
from tests.real_adapters import check_adapter_run, long_model, real_adapter_run
from tests.real_servers import sglang_options

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1000)]


def test_versions_are_served_as_adapters(tmp_path: Path, group: None) -> None:
    model = long_model(tmp_path / "model")
    with real_adapter_run(tmp_path, model, *sglang_options()) as run:
        check_adapter_run(run)
