"""Fixtures of the launcher tests: longer limits, for machines under load."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from arealite.ext.audit import audit as audit_module
from arealite.ext.audit.audit import AuditReport, LedgerBalance
from arealite.ext.diagnosis import health_monitor
from arealite.ext.diagnosis.diagnosis import examine
from arealite.impl.launcher import supervisor
from arealite.system.health import waits

NONE = LedgerBalance(offered=0, trained=0, filtered=0, buffered=0, in_flight=0)
BALANCED = AuditReport(
    groups=NONE,
    tokens=NONE,
    filtered_by_reason={},
    failures_by_class={},
    steps=1000,
    checkpoints=0,
    trained_trajectories=0,
    mixed_version_trajectories=0,
    interrupted=0,
    weight_versions=0,
    max_staleness=0,
)
"""One thousand steps."""


@pytest.fixture(autouse=True)
def ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the audit, because scripted roles write no ledger."""
    monkeypatch.setattr(audit_module, "audit", lambda ledger, **_: BALANCED)


@pytest.fixture(autouse=True)
def waits_for_roles() -> Iterator[None]:
    """Remove the waits of a launcher that gave up, which normally end with its process."""
    yield
    waits.table -= {wait for wait in waits.table if wait.owner == waits.SUPERVISOR}


@pytest.fixture(autouse=True)
def longer_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Increase the limits: on a loaded machine, exits, heartbeats and examinations take longer."""
    monkeypatch.setattr(supervisor, "EARLY_S", 120.0)
    monkeypatch.setattr(
        health_monitor, "examine", partial(examine, silent_s=120.0, blocked_s=120.0)
    )
    monkeypatch.setattr(health_monitor, "QUIET_S", 600.0)
