"""Times and costs of a step compared with numbers computed by hand."""

from __future__ import annotations

import pytest

from arealite.api.publisher import PublishReport
from arealite.impl.trainer import metrics


def test_throughput_has_no_generation_rate_after_a_restart() -> None:
    line = {"time/step_s": 2.0, "throughput/trained_tokens": 30.0, "rollout/tokens": 100.0}
    assert metrics.throughput(line, before=60.0) == {
        "throughput/trained_tokens_per_s": 15.0,
        "throughput/generated_tokens_per_s": 20.0,
    }
    restarted = metrics.throughput(line, before=500.0)
    assert "throughput/generated_tokens_per_s" not in restarted
    assert "throughput/generated_tokens_per_s" not in metrics.throughput(line, before=None)


def test_publish_metrics_count_quarantined_servers() -> None:
    report = PublishReport(
        version=3,
        stage_s=0.1,
        pause_s=0.2,
        load_s=0.3,
        continue_s=0.4,
        stall_s=0.5,
        num_bytes=100,
        servers=2,
        quarantined=["s1"],
    )
    got = metrics.publish_metrics(report)
    assert (got["publish/version"], got["publish/stall_s"], got["publish/quarantined"]) == (
        3,
        0.5,
        1,
    )


def test_parts_of_a_lap_sum_to_the_step_time() -> None:
    clock = metrics.Stopwatch()
    with clock("wait/batch_s"):
        sum(range(1000))
    with clock("wait/batch_s"), clock("time/rows_s"):
        pass
    lap = clock.lap()
    parts = sum(v for k, v in lap.items() if k != "time/step_s")
    assert parts == pytest.approx(lap["time/step_s"])
    assert "wait/batch_s" not in clock.lap()


def test_publish_without_servers_has_no_seconds_of_servers() -> None:
    got = metrics.publish_metrics(PublishReport(version=3, stage_s=0.1, servers=0))
    assert (got["publish/servers"], got["publish/stage_s"]) == (0.0, 0.1)
    assert not got.keys() & {f"publish/{part}_s" for part in ("pause", "load", "continue", "stall")}
