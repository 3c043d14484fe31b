"""A session trains and publishes adapters by name at a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_adapters import long_model
from tests.real_named_adapters import check_named_adapters
from tests.real_servers import sglang_options

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1000)]


async def test_session_has_adapters_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = long_model(tmp_path / "model")
    await check_named_adapters(tmp_path, model, monkeypatch, *sglang_options())
