from __future__ import annotations

import pytest

from arealite.impl.publisher import servers
from tests.impl.engine.conftest import group as group
from tests.impl.publisher.conftest import kind as kind
from tests.impl.publisher.conftest import site as site


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publish waits for each proof, however slow the machine is."""
    monkeypatch.setattr(servers, "PROOF_S", 60.0)
    monkeypatch.setattr(servers, "LATER_PROOF_S", 60.0)
