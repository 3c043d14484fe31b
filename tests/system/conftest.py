"""Fixtures of the tests of datapipe, ledger and links."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from arealite.api.experiment_config import ExperimentConfig
from tests.system.live import Live, StartPipe
from tests.system.scenes import experiment

OF_LIVE = "rows", "eval_rows", "endpoint", "context"


@pytest.fixture
async def start_pipe(tmp_path: Path) -> AsyncGenerator[StartPipe, None]:
    """Return a function that starts a datapipe; the options are those of Live and experiment."""
    started: list[Live] = []

    async def start(config: ExperimentConfig | None = None, **options: Any) -> Live:
        of_live = {name: options.pop(name) for name in OF_LIVE if name in options}
        live = Live(config or experiment(tmp_path, **options), **of_live)
        await live.start()
        started.append(live)
        return live

    yield start
    for live in started:
        await live.close()
