"""`arealite eval` and `collect` with real servers: killed, stopped and resumed; SFT on samples."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from arealite.ext.evaluation.samples import Samples
from tests.e2e import gated
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, Site, all_gone
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

SAMPLES = 12
"""Samples of each of the 8 tasks of an evaluation."""


class Run:
    """A command in a separate folder."""

    def __init__(self, site: Site, folder: Path, command: str, *words: str) -> None:
        self.folder, self.gate = folder, folder / "gate"
        self.samples = folder / "runs" / "e2e" / "t" / command / "samples.sqlite"
        self.words = [
            *(sys.executable, "-m", "arealite.cli.main", command, *site.names()),
            *(f"model.path={site.model}", f"cluster.run_root={folder / 'runs'}"),
            "trainer.ppo.collector.concurrency=4",
            f"imports=[{gated.FILE}]",
            "trainer.ppo.collector.env.type=gated",
            f"trainer.ppo.collector.env.gated.gate={self.gate}",
            f"trainer.ppo.collector.env.gated.split={'eval' if command == 'eval' else 'train'}",
            *words,
        ]

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            self.words, cwd=ROOT, env=ENVIRONMENT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()

    def kept(self) -> dict[tuple[int, int], list[bytes]]:
        """Return the stored samples by (task, member)."""
        if not self.samples.exists():
            return {}
        samples = Samples(self.samples)
        try:
            return {key: samples.payloads(*key) for key in samples.done()}
        finally:
            samples.close()

    def cut(self, number: int, *, at: int, tasks: int) -> tuple[int, str]:
        """Run the command and send a signal when the first `tasks` remaining tasks have `at`
        samples; return exit code and output."""
        gated.write(self.gate, tasks)
        with self.started() as process:
            there = lambda: len(self.kept()) >= at or process.poll() is not None  # noqa: E731
            until(there, what="samples", seconds=SLOW_S)
            process.send_signal(number)
            shown, _ = process.communicate(timeout=SLOW_S)
            return process.returncode, shown

    def whole(self) -> str:
        """Run the command to its end; return its output."""
        self.gate.unlink()
        with self.started() as process:
            shown, _ = process.communicate(timeout=SLOW_S)
        assert process.returncode == 0, shown
        return shown


def test_evaluation_resumes_after_a_kill_and_after_ctrl_c(site: Site, tmp_path: Path) -> None:
    run = Run(
        site,
        tmp_path,
        "eval",
        f"dataset.eval={site.folder / 'eval.jsonl'}",
        f"n={SAMPLES}",
        "trainer.ppo.eval.sampling.max_new_tokens=32",
    )
    code, _ = run.cut(signal.SIGKILL, at=4, tasks=1)
    killed = run.kept()
    assert code == -signal.SIGKILL
    assert 4 <= len(killed) < 8 * SAMPLES
    code, shown = run.cut(signal.SIGINT, at=len(killed) + 4, tasks=2)
    stopped = run.kept()
    assert code == 130, shown
    assert f"{len(stopped)} of {8 * SAMPLES} samples are stored" in shown
    assert len(killed) < len(stopped) < 8 * SAMPLES
    run.whole()
    kept = run.kept()
    assert len(kept) == 8 * SAMPLES
    assert {key: kept[key] for key in stopped} == stopped
    assert {key: stopped[key] for key in killed} == killed
    result = json.loads((run.samples.parent / "eval.json").read_text())
    (row,) = result["results"]
    assert (row["tasks"], row["samples"], result["failed"]) == (8, 8 * SAMPLES, {})
    assert list(row["pass"]) == ["1", "2", "4", "8", "12"]


def test_sft_learns_from_collected_samples(site: Site, tmp_path: Path) -> None:
    out = tmp_path / "good.parquet"
    run = Run(
        site,
        tmp_path,
        "collect",
        f"cluster.name_root={tmp_path / 'names'}",
        "launcher.llm_servers=1",
        f"dataset.train={site.folder / 'train.jsonl'}",
        *("n=2", "tasks=16", "best_of=1", f"out={out}"),
        "trainer.ppo.collector.sampling.max_new_tokens=32",
    )
    code, _ = run.cut(signal.SIGKILL, at=1, tasks=4)
    assert code == -signal.SIGKILL
    all_gone(tmp_path)
    assert "16 rows of 16 trajectories" in run.whole()
    all_gone(tmp_path)
    done = site.train(
        tmp_path / "sft",
        *("--config", str(ROOT / "config/sft.yaml"), f"dataset.train={out}"),
        *("dataset.eval=null", "trainer.offline.batch_size=8", "trainer.offline.epochs=1"),
    )
    assert done.code == 0, done.shown + done.logs()
    assert [line["step"] for line in done.metrics()] == [1, 2]
