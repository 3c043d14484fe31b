"""Verification of a kill by the soak: time of the restart, and whether the launcher was down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import soak

NEVER = 1 << 22
"""The first process id that no process has."""


class FakeProcess:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        pass

    def wait(self, _: float = 0.0) -> int:
        return -9

    def poll(self) -> int | None:
        return None


class FakeSite:
    """A test restarts roles explicitly; a launcher is restarted at once."""

    def __init__(self, *roles: str) -> None:
        self.count = NEVER
        self.present: dict[str, FakeProcess] = {}
        self.launch()
        self.come(*roles)

    def launch(self) -> None:
        self.present = {n: p for n, p in self.present.items() if n.startswith("llm_server")}
        self.come("launcher")
        self.launcher = self.present["launcher"]

    def come(self, *roles: str) -> None:
        for role in roles:
            self.count += 1
            self.present[role] = FakeProcess(self.count)

    def roles(self) -> dict[str, Any]:
        return dict(self.present)


def killed(site: FakeSite, *plan: str) -> soak.Killer:
    """Kill the planned roles in order; killed roles exit, and the launcher restarts at once."""
    killer = soak.Killer(site, seed="1", plan=plan[::-1])  # type: ignore[arg-type]
    for _ in plan:
        assert killer._strike()
        if (name := killer.kills[-1].role) != "launcher":
            del site.present[name]
    return killer


def test_role_without_its_launcher_waits_for_the_next_launcher():
    site = FakeSite("datapipe-0", "rollout-0", "llm_server-0")
    killer = killed(site, "datapipe", "llm_server", "launcher")
    site.come("datapipe-0", "rollout-0", "llm_server-0")
    killer._verify()
    assert killer.verified == killer.kills
    assert [kill.launcher_died for kill in killer.kills] == [True, False, False]


def test_role_restarted_before_the_launcher_dies_has_no_launcher_death():
    site = FakeSite("datapipe-0", "rollout-0")
    killer = killed(site, "datapipe")
    site.come("datapipe-0")
    killer._verify()
    killer._next = "launcher"
    assert killer._strike()
    assert [kill.launcher_died for kill in killer.kills] == [False, False]


def told(
    kills: Sequence[soak.Kill], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    report = tmp_path / "soak.json"
    monkeypatch.setattr(soak, "REPORT", report)
    try:
        soak.summarize(list(kills), [], seconds=1.0)
    finally:
        result = json.loads(report.read_text())
    return result


def test_restart_times_exclude_kills_with_a_dead_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kills = [soak.Kill("datapipe-0", 1, 0.0, back_s) for back_s in (0.5, 2.0, 12.0)]
    kills[-1].launcher_died = True
    kills += [soak.Kill("trainer-1", 1, 0.0, 4.0), soak.Kill("rollout-0", 1, 0.0)]
    result = told(kills, tmp_path, monkeypatch)
    assert result["slowest_s_by_role"] == {"datapipe": 2.0, "no launcher": 12.0, "trainer": 4.0}
    assert result["kills_by_role"] == {"datapipe": 3, "trainer": 1}
    assert (result["verified_kills"], result["unverified_kills"], result["late"]) == (4, 1, 0)


@pytest.mark.parametrize("role", ["datapipe-0", "rollout-1", "llm_server-0"])
def test_late_restart_of_a_role_fails_the_soak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
):
    with pytest.raises(soak.SoakError, match=f"{role} 3.5 s"):
        told([soak.Kill(role, 1, 0.0, 3.5)], tmp_path, monkeypatch)
    assert json.loads((tmp_path / "soak.json").read_text())["late"] == 1
