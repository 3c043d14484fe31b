"""The whole loop as real processes: train, resume, stop, break; one rank and two; your agent."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from arealite.base.names import RunPaths
from arealite.cli import main as cli
from arealite.system.audit import audit
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, Finished, Site, strays
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def server_version(site: Site) -> str:
    (entry,) = (site.folder / "names").rglob("llm_server/*.json")
    address = json.loads(entry.read_text())["address"]
    with urllib.request.urlopen(f"{address}/model_info") as answer:
        return json.load(answer)["weight_version"]


def steps_of(metrics: list[dict[str, float]]) -> list[int]:
    return [int(line["step"]) for line in metrics if "reward/mean" in line]


@contextlib.contextmanager
def training(site: Site, run_root: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a train.py that would go on for long; yield it once a step is trained."""
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


def test_a_run_from_start_to_export(site: Site, tmp_path: Path):
    done = site.train(tmp_path)
    assert done.code == 0, done.shown + done.logs()
    assert steps_of(done.metrics()) == [0, 1, 2, 3]
    evals = [line for line in done.metrics() if "eval/accuracy" in line]
    assert len(evals) == 2, "before the first step and after the last"
    report = audit(done.paths.ledger)
    assert report.ok
    assert not report.lost and not report.repeated
    assert report.groups.trained == 4 * 4
    assert server_version(site) == "4"
    exported = AutoModelForCausalLM.from_pretrained(done.paths.export)
    assert all(parameter.isfinite().all() for parameter in exported.parameters())
    assert list(done.paths.tensorboard.rglob("events*"))
    assert "step 4/4" in done.shown


def without_files(site: Site, run_root: Path, way: str, *options: str) -> Finished:
    """Train two steps whose weights go to the server by `way`."""
    by = f"trainer.ppo.publisher.type={way}"
    done = site.train(run_root, by, *options, "trainer.ppo.total_steps=2")
    assert done.code == 0, done.shown + done.logs()
    assert server_version(site) == "2"
    lines = [line for line in done.metrics() if "publish/stall_s" in line]
    assert lines and all(line["publish/servers"] == 1 for line in lines)
    assert steps_of(done.metrics()) == [0, 1]
    assert audit(done.paths.ledger).ok
    return done


def test_the_synchronous_trainer_with_weights_in_requests(site: Site, tmp_path: Path):
    synchronous = ["trainer.type=ppo", "trainer.ppo.max_staleness=0"]
    done = without_files(site, tmp_path, "tensor", *synchronous)
    ages = [line["staleness/max"] for line in done.metrics() if "staleness/max" in line]
    assert ages == [0, 0]


def test_two_ranks_and_two_workers_with_weights_through_a_group(site: Site, tmp_path: Path):
    two = ["launcher.trainer_ranks=2", "launcher.rollout_workers=2"]
    without_files(site, tmp_path, "distributed", *two, "trainer.ppo.updates=2")


def test_resume_goes_on_goes_back_on_purpose_and_begins_anew(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    every = "trainer.ppo.checkpoint.every_steps=1"
    first = site.train(tmp_path, "trainer.ppo.total_steps=2", every)
    assert first.code == 0, first.shown + first.logs()
    again = site.train(tmp_path, "trainer.ppo.total_steps=3", every)
    assert again.code == 0, again.shown + again.logs()
    assert steps_of(again.metrics()) == [0, 1, 2]
    report = audit(again.paths.ledger)
    assert report.ok
    assert report.groups.trained == 3 * 4
    assert cli.main(["train", *site.command(tmp_path, "seed=2")[2:]]) == 2
    assert "was begun with seed=1, now it is 2" in capsys.readouterr().err
    back = site.train(tmp_path, "trainer.ppo.total_steps=3", "resume=step-000002")
    assert back.code == 0, back.shown + back.logs()
    assert "newer checkpoints are now in" in back.shown
    assert steps_of(back.metrics()) == [0, 1, 2]
    assert audit(back.paths.ledger).ok
    anew = site.train(tmp_path, "trainer.ppo.total_steps=1", "resume=never", "seed=2")
    assert anew.code == 0, anew.shown + anew.logs()
    assert "the run that was here is now in" in anew.shown
    assert steps_of(anew.metrics()) == [0]
    assert audit(anew.paths.ledger).groups.trained == 4
    assert len(list((tmp_path / "e2e").glob("t.before-*/ledger.sqlite"))) == 1


def test_resume_at_another_number_of_ranks(site: Site, tmp_path: Path):
    every = "trainer.ppo.checkpoint.every_steps=1"
    for steps, ranks in ((1, 2), (2, 1), (3, 2)):
        number = [f"trainer.ppo.total_steps={steps}", f"launcher.trainer_ranks={ranks}"]
        done = site.train(tmp_path, *number, every)
        assert done.code == 0, done.shown + done.logs()
        manifest = done.paths.checkpoints / f"step-{steps:06d}" / "manifest.json"
        assert json.loads(manifest.read_text())["world_size"] == ranks
        assert steps_of(done.metrics()) == list(range(steps))
    report = audit(done.paths.ledger)
    assert report.ok
    assert report.groups.trained == 3 * 4
    command = [sys.executable, "-m", "arealite.cli.main", "export", str(done.paths.root)]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True)
    exported = (done.paths.root / "export-step-000003" / "model.safetensors").read_bytes()
    assert exported == (done.paths.export / "model.safetensors").read_bytes()


def test_ctrl_c_leaves_a_checkpoint_to_resume_from(
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
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert not strays(tmp_path)
    stopped_at = max(
        int(json.loads(line)["step"]) for line in paths.metrics.read_text().splitlines()
    )
    assert [c.name for c in paths.checkpoints.glob("step-*")]
    again = site.train(tmp_path, f"trainer.ppo.total_steps={stopped_at + 3}")
    assert again.code == 0, again.shown + again.logs()
    assert steps_of(again.metrics()) == list(range(stopped_at + 3))
    assert audit(paths.ledger).ok
