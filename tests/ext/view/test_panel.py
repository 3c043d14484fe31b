"""Content of the panel, at every size of a terminal, with and without colours."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from arealite.api.findings import Finding
from arealite.ext.view.panel import BAR, SPARK, bar, panel, spark
from arealite.ext.view.snapshot import PUBLISHING, MetricsReader, Snapshot
from arealite.impl.logger.metrics_file import MetricsLine
from arealite.system.names.name_registry import Entry


def step(number: int) -> MetricsLine:
    return {
        "step": float(number + 1),
        "time": 100.0 + 2 * number,
        "reward/mean": 0.25 + number / 100,
        "staleness/mean": 1.25,
        "staleness/max": 2.0,
        "episode/trajectories": 8.0,
        "episode/seconds_mean": 1.0,
        "episode/wait/generation": 0.7,
        "episode/wait/environment": 0.2,
        "datapipe/groups_wait_s": 0.3,
        "datapipe/slow_episodes_wait_s": 0.1,
        "rollout/lease_wait_s": 0.5 * number,
        "rollout/workers": 1.0,
        "rollout/episodes": 8.0 * number,
        "publish/version": float(number),
        **{f"publish/{part}_s": 0.001 * (number + 1) for part in PUBLISHING},
        "wait/batch_s": 0.5,
        "time/forward_s": 0.5,
        "time/update_s": 0.9,
        "time/other_s": 0.1,
        "time/step_s": 2.0,
        "throughput/trained_tokens_per_s": 1200.0,
        "throughput/generated_tokens_per_s": 2400.0,
    }


def server(number: int, **value: Any) -> Entry:
    load = {"running": 3, "waiting": 1}
    return Entry(
        role="llm_server",
        id=f"host-{number}",
        value={"version": 9, "load": load} | value,
        age_s=0.4,
    )


def measured(*lines: MetricsLine, evals: dict[int, MetricsLine] | None = None) -> MetricsReader:
    metrics = MetricsReader(Path("none"))
    metrics.evals |= evals or {}
    for line in lines:
        metrics.add({**line})
    return metrics


def shot(**changes: Any) -> Snapshot:
    evals = {0: {"eval/reward": 0.3}, 8: {"eval/reward": 0.5}}
    whole = Snapshot(
        name="demo/a",
        kind="async_ppo",
        state="running",
        total_steps=40,
        metrics=measured(*map(step, range(10)), evals=evals),
        failures={"episode_timeout": 1234},
        servers=[server(1)],
        findings=[],
    )
    return replace(whole, **changes)


def drawn(of: Snapshot, *, width: int = 80, height: int = 50, **console: Any) -> list[str]:
    file = io.StringIO()
    console = {"force_terminal": False} | console
    Console(file=file, width=width, **console).print(panel(of, width=width, height=height))
    return file.getvalue().splitlines()


def row(lines: list[str], label: str) -> str:
    (found,) = [line for line in lines if line.startswith(f"│ {label:<10}")]
    return " ".join(found.strip("│ ").split())


def test_panel_shows_the_start_of_a_run():
    of = shot(metrics=measured(), now="the trainer loads the model", failures={})
    assert row(drawn(of), "now") == "now the trainer loads the model"
    assert row(drawn(of, height=4), "now"), "it stays in a small terminal"
    assert not [line for line in drawn(shot()) if "│ now" in line]


def test_panel_of_a_run_has_all_rows():
    lines = drawn(shot())
    assert "demo/a · async_ppo · running" in lines[0]
    assert row(lines, "step") == "step 10 of 40 25 % 2 s a step 0:01:00 left"
    assert row(lines, "reward").startswith(
        "reward 0.340 +0.090 since step 1 ▁▁▂▃▄▅▆▇██ 0.25 … 0.34"
    )
    assert row(lines, "held-out").endswith("reward 0.500 after 8 steps, 0.300 after 0 steps")
    assert row(lines, "staleness") == "staleness 1.2 versions on average, 2 at most"
    assert row(lines, "trained") == "trained 1,200 tokens a second"
    assert row(lines, "generated") == "generated 2,400 tokens a second"
    assert "█forward 25 ▓update 45 ▒batch wait 25 ░other 5" in row(lines, "trainer")
    assert "generation 70" in row(lines, "episodes") and "rest 10" in row(lines, "episodes")
    assert "lease wait 25" in row(lines, "workers")
    assert "groups wait 15 ▓slow wait 5 ▒trainer works 80" in row(lines, "datapipe")
    assert row(lines, "  last") == "last 10.0 10.0 10.0 10.0 10.0"
    assert row(lines, "  mean") == "mean 5.5 5.5 5.5 5.5 5.5"
    assert [each for each in lines if "host-1  version 9  3 running  1 waiting  beat 0.4 s" in each]
    assert row(lines, "failures") == "failures episode_timeout 1,234"


def test_blocking_roles_are_named():
    finding = Finding(
        blocker="rollout-1",
        cause="stopped",
        since_s=9.0,
        detail="SIGSTOP",
        waiters=("trainer-0: batch 3, 9 s",),
    )
    lines = drawn(shot(findings=[finding]), width=100)
    assert "blocked by" in lines[-2]
    assert "rollout-1 is stopped: SIGSTOP; waiting: trainer-0: batch 3, 9 s" in lines[-2]
    alone = drawn(shot(findings=[replace(finding, waiters=())]))
    assert "in trouble" in alone[-2] and "blocked by" not in alone[-2], "no role waits for it"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [3, 8, 16, 24, 60])
def test_panel_fits_every_terminal(width: int, height: int):
    finding = Finding(
        blocker="rollout-1", cause="blocked", since_s=9.0, detail="a call does not come back " * 9
    )
    many = shot(servers=[server(number) for number in range(64)], findings=[finding])
    lines = drawn(many, width=width, height=height)
    assert len(lines) <= max(height, 3) and max(map(len, lines)) <= min(width, 118)
    assert lines[0].startswith("╭") and lines[-1].startswith("╰")
    assert "step" in lines[1], "the first thing to know, and the last to go"
    if height >= 8:
        assert any("in trouble" in line for line in lines)


def test_many_servers_share_a_row():
    entries = [server(number, version=9 + number % 2) for number in range(64)]
    lines = drawn(shot(servers=entries))
    said = [each for each in lines if "64 live" in each]
    assert "64 live  version 10 9  192 running  64 waiting" in said[0]
    assert sum("host-" in line for line in lines) == 8


def test_paused_server_is_shown_with_the_seconds_of_its_pause():
    lines = drawn(shot(servers=[server(1, paused_s=83.4), server(2, paused_s=None)]))
    assert any("host-1  version 9  paused for 83 s  3 running" in line for line in lines)
    assert any("host-2  version 9  3 running" in line for line in lines)


def test_server_without_load_is_shown():
    lines = drawn(
        shot(
            servers=[
                Entry(role="llm_server", id="a", value={"version": None, "load": None}, age_s=0.0)
            ]
        )
    )
    assert any("a  version None  beat 0.0 s" in line for line in lines)


def test_panel_before_the_first_step():
    begun = {"metrics": measured(), "servers": [], "total_steps": 0}
    lines = drawn(shot(failures={}, **begun))
    assert [line.strip("│ ") for line in lines[1:-1]] == ["step       0 of ?"]
    assert row(drawn(shot(**begun)), "failures") == "failures episode_timeout 1,234"


def test_panel_of_an_offline_run():
    lines = [
        {"step": float(n + 1), "time": float(n), "train/loss": 2.0 - n, "train/accuracy": 0.25,
         "train/epoch": 0.0, "time/update_s": 0.75, "time/rows_s": 0.25, "time/step_s": 1.0,
         "throughput/trained_tokens_per_s": 100.0}
        for n in range(2)
    ]  # fmt: skip
    said = drawn(
        shot(
            kind="sft",
            state="finished",
            total_steps=2,
            metrics=measured(*lines, evals={0: {"eval/loss": 2.5}, 2: {"eval/loss": 1.5}}),
            failures={},
            servers=[],
        )
    )
    assert row(said, "step") == "step 2 of 2 100 % 1 s a step"
    assert row(said, "loss").startswith("loss 1.000 -1.000 since step 1 █▁")
    assert row(said, "accuracy") == "accuracy 0.250"
    assert "loss 1.500 after 2 steps, 2.500 after 0 steps" in row(said, "held-out")
    assert not any(word in "".join(said) for word in ("staleness", "datapipe", "servers", "failur"))


def test_panel_without_colours_has_the_same_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    plain, bold = drawn(shot()), drawn(shot(), force_terminal=True)
    text = "\n".join(bold)
    assert "\x1b[1m" in text, "bold is no colour"
    assert not any(f"\x1b[{code}" in text for code in range(30, 50))
    assert [each.replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\x1b[2m", "")
            for each in bold] == plain  # fmt: skip


@given(st.dictionaries(st.text("abc", min_size=1), st.floats(0.001, 1e6), min_size=1, max_size=9))
def test_shares_add_up_to_100_and_fill_the_bar(parts: dict[str, float]):
    drawn_bar, _, legend = bar(parts).plain.partition("  ")
    assert len(drawn_bar) == BAR and sum(map(int, re.findall(r"\d+", legend))) == 100


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200))
def test_curve_has_a_character_for_each_part(values: list[float]):
    drawn_curve = spark(values)
    assert len(drawn_curve) == min(SPARK, len(values))


def test_metric_that_the_newest_step_lacks_is_a_dash():
    absent = {"reward/mean", "staleness/max", "throughput/trained_tokens_per_s"}
    lines = [*map(step, range(10))]
    lines[-1] = {name: value for name, value in lines[-1].items() if name not in absent}
    rows = drawn(shot(metrics=measured(*lines)))
    assert row(rows, "reward").startswith("reward - ▁")
    assert row(rows, "staleness") == "staleness 1.2 versions on average, - at most"
    assert row(rows, "trained") == "trained 1,200 tokens a second", "a mean over the other steps"
    assert "generation 70" in row(rows, "episodes")
