"""The whole loop with real processes: train, resume and stop, with one rank and with two."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from arealite.base.trial_files import RunPaths
from arealite.cli import main as cli
from arealite.ext.audit.audit import AuditReport, audit
from arealite.system.names.name_registry import read_secret
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Finished, Site, all_gone
from tests.waiting import until, until_exited

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]


def server_version(site: Site) -> str:
    (entry,) = (site.folder / "names").rglob("llm_server/*.json")
    address = json.loads(entry.read_text())["address"]
    secret = read_secret(entry.parents[1])
    assert secret is not None
    headers = {"Authorization": f"Bearer {secret.token}"}
    request = urllib.request.Request(f"{address}/model_info", headers=headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["weight_version"]


def steps_of(metrics: list[dict[str, float]]) -> list[int]:
    return [int(line["step"]) for line in metrics if "reward/mean" in line]


@contextlib.contextmanager
def training(site: Site, run_root: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a train.py of many steps; yield it once a step is trained."""
    metrics = RunPaths(run_root / "e2e" / "t").metrics
    with subprocess.Popen(
        site.command(run_root, "trainer.ppo.total_steps=100000"),
        cwd=run_root,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as run:
        trained = lambda: metrics.exists() and '"reward/mean"' in metrics.read_text()  # noqa: E731
        until(lambda: trained() or run.poll() is not None, what="a trained step", seconds=SLOW_S)
        yield run


@dataclass(frozen=True)
class First:
    """A finished run of four steps and its files; tests resume copies of its folder."""

    root: Path
    done: Finished
    told: list[dict[str, float]]
    books: AuditReport
    version: str

    def copy(self, root: Path) -> Path:
        shutil.copytree(self.root, root, dirs_exist_ok=True)
        return root


@pytest.fixture(scope="module")
def first(site: Site, tmp_path_factory: pytest.TempPathFactory) -> First:
    root = tmp_path_factory.mktemp("first")
    done = site.train(root, "trainer.ppo.checkpoint.every_steps=1")
    assert done.code == 0, done.shown + done.logs()
    return First(root, done, done.metrics(), audit(done.paths.ledger), server_version(site))


def test_run_trains_evaluates_and_exports(first: First):
    assert steps_of(first.told) == [1, 2, 3, 4]
    evals = [line for line in first.told if "eval/reward" in line]
    assert len(evals) == 2, "before the first step and after the last"
    assert first.books.ok
    assert not first.books.lost and not first.books.repeated
    assert first.books.groups.trained == 4 * 4
    assert first.version == "4"
    exported = AutoModelForCausalLM.from_pretrained(first.done.paths.export)
    assert all(parameter.isfinite().all() for parameter in exported.parameters())
    assert list(first.done.paths.tensorboard.rglob("events*"))
    assert "step 4/4" in first.done.shown


def trained(site: Site, run_root: Path, *options: str, steps: int) -> Finished:
    """Train up to step `steps`; check the steps in the metrics, and the server's version."""
    done = site.train(run_root, *options, f"trainer.ppo.total_steps={steps}")
    assert done.code == 0, done.shown + done.logs()
    assert steps_of(done.metrics()) == list(range(1, steps + 1))
    assert server_version(site) == str(steps)
    lines = [line for line in done.metrics() if "publish/stall_s" in line]
    assert lines and all(line["publish/servers"] == 1 for line in lines)
    assert audit(done.paths.ledger).ok
    return done


def test_resume_from_an_earlier_step_and_fresh_synchronous_run(
    site: Site, first: First, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first.copy(tmp_path)
    assert cli.main(["train", *site.command(tmp_path, "seed=2")[2:]]) == 2
    assert "was started with seed=1, now it is 2" in capsys.readouterr().err
    back = trained(site, tmp_path, "resume=step-000003", steps=4)
    assert "newer checkpoints are now in" in back.shown
    other = ["trainer.type=ppo", "trainer.ppo.max_staleness=0"]
    anew = trained(site, tmp_path, "resume=never", "seed=2", *other, steps=2)
    assert "the old run is now in" in anew.shown
    ages = [line["staleness/max"] for line in anew.metrics() if "staleness/max" in line]
    assert ages == [0, 0]
    assert audit(anew.paths.ledger).groups.trained == 2 * 4
    assert len(list((tmp_path / "e2e").glob("t.before-*/ledger.sqlite"))) == 1


def test_resume_with_other_ranks_workers_and_the_distributed_publisher(
    site: Site, first: First, tmp_path: Path
):
    first.copy(tmp_path)
    way = ["trainer.ppo.checkpoint.every_steps=1", "trainer.ppo.publisher.type=distributed"]
    for steps, ranks in ((5, 2), (6, 1)):
        number = [f"launcher.trainer_ranks={ranks}", f"launcher.rollout_workers={ranks}"]
        done = trained(site, tmp_path, *way, *number, f"trainer.ppo.updates={ranks}", steps=steps)
        manifest = done.paths.checkpoints / f"step-{steps:06d}" / "manifest.json"
        assert json.loads(manifest.read_text())["world_size"] == ranks
        assert audit(done.paths.ledger).groups.trained == steps * 4
        if ranks == 2:
            assert cli.main(["export", str(done.paths.root)]) == 0
            again = done.paths.root / f"export-step-{steps:06d}" / "model.safetensors"
            assert again.read_bytes() == (done.paths.export / "model.safetensors").read_bytes()


def test_ctrl_c_writes_a_checkpoint_for_the_next_run(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    paths = RunPaths(tmp_path / "e2e" / "t")
    with training(site, tmp_path) as run:
        children = psutil.Process(run.pid).children(recursive=True)
        assert len(children) >= 3
        assert cli.main(["train", *site.command(tmp_path)[2:]]) == 2, "a second train.py"
        assert f"in use by process {run.pid}" in capsys.readouterr().err
        run.send_signal(signal.SIGINT)
        shown = run.communicate(timeout=SLOW_S)[0]
    assert run.returncode == 130, shown
    assert "stopping after this step" in shown
    until_exited(*children)
    all_gone(tmp_path)
    stopped_at = max(
        int(json.loads(line)["step"]) for line in paths.metrics.read_text().splitlines()
    )
    assert [c.name for c in paths.checkpoints.glob("step-*")]
    again = site.train(tmp_path, f"trainer.ppo.total_steps={stopped_at + 3}")
    assert again.code == 0, again.shown + again.logs()
    assert steps_of(again.metrics()) == list(range(1, stopped_at + 4))
    assert audit(paths.ledger).ok
