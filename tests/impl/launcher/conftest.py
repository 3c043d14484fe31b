"""Time for children that get no CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from arealite.impl.launcher import local, supervisor
from arealite.system.health import waits
from arealite.system.health.diagnosis import examine
from arealite.system.ledger.audit import AuditReport, Balance

NONE = Balance(0, 0, 0, 0, 0)
BALANCED = AuditReport(NONE, NONE, {}, {}, 1000, 0, 0, 0, 0, 0, 0)
"""Of a thousand steps."""


@pytest.fixture(autouse=True)
def ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted roles write no ledger; a run whose ledger cannot be audited would fail."""
    monkeypatch.setattr(local, "audit", lambda ledger, **_: BALANCED)


@pytest.fixture(autouse=True)
def waits_for_roles() -> Iterator[None]:
    """A launcher that gives up leaves its waits to the end of its process."""
    yield
    waits.table -= {wait for wait in waits.table if wait.owner == waits.SUPERVISOR}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may take long to end what the others have already left, to beat, and to look
    again at what was said."""
    monkeypatch.setattr(supervisor, "EARLY_S", 120.0)
    monkeypatch.setattr(supervisor, "examine", partial(examine, silent_s=120.0, blocked_s=120.0))
    monkeypatch.setattr(supervisor, "QUIET_S", 600.0)
