"""Commands whose output is closed or full, or whose terminal closes: the run goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from arealite.base.trial_files import RunPaths
from arealite.impl.launcher.processes import free_port
from tests.e2e import gated
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, Site, all_gone
from tests.e2e.test_offline import HELD, write_answers
from tests.e2e.test_sampling import Run as Sampling
from tests.models import tiny_model
from tests.terminals import closed_pipe
from tests.waiting import until
from tools import soak

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

AREALITE = (sys.executable, "-m", "arealite.cli.main")
PATHS = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}


class Run:
    """An SFT run of one rank whose trainer waits at the step that a file sets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = RunPaths(folder / "runs" / "e2e" / "t")
        self.gate = folder / "gate"
        self.log = self.paths.logs / "launcher-0.log"
        model = tiny_model(folder / "model", init_std=0.1)
        write_answers(folder / "answers.jsonl", 64)
        (folder / "held.py").write_text(HELD)
        self.command = [
            *(sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "config/sft.yaml")),
            *("experiment_name=e2e", "trial_name=t", f"cluster.name_root={folder / 'names'}"),
            *(f"model.path={model}", f"cluster.run_root={folder / 'runs'}"),
            *(f"dataset.train={folder / 'answers.jsonl'}", f"imports=[{folder / 'held.py'}]"),
            *("trainer.offline.batch_size=16", "trainer.offline.epochs=3"),
        ]

    def steps(self) -> int:
        if not self.paths.metrics.exists():
            return 0
        lines = self.paths.metrics.read_text().splitlines(keepends=True)
        return max((json.loads(line)["step"] for line in lines if line[-1] == "\n"), default=0)

    def reaches(self, step: int, train: subprocess.Popen[bytes]) -> None:
        until(
            lambda: self.steps() >= step or train.poll() is not None,
            what=f"step {step}",
            seconds=SLOW_S,
        )
        assert train.poll() is None, self.log.read_text() if self.log.exists() else "no log"


@contextmanager
def popen(
    command: Sequence[str], output: int, environment: dict[str, str] = PATHS, cwd: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with `output` as stdout and stderr; kill it at the end."""
    with subprocess.Popen(
        command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, cwd=cwd
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def announced(log: Path) -> bool:
    """Return whether the log has one line that says that the output cannot be written."""
    return log.read_text().count("is closed or full") == 1


def test_run_outlives_its_pipe_stops_at_a_hang_up_and_resumes_into_a_full_file(tmp_path: Path):
    run = Run(tmp_path)
    gated.write(run.gate, 2)
    read, write = os.pipe()
    with popen(run.command, write) as train, open(read) as output:
        os.close(write)
        assert output.readline().startswith("step 1/")  # as `| head -1`
        output.close()
        gated.write(run.gate, 6)
        run.reaches(5, train)
        until(run.log.exists, what="a line in the log")
        train.send_signal(signal.SIGHUP)
        assert train.wait(SLOW_S) == 130, run.log.read_text()
    text = run.log.read_text()
    assert announced(run.log) and "step 5/" in text and "stopping after this step" in text
    stopped_at = run.steps()
    assert (run.paths.checkpoints / f"step-{stopped_at:06d}").is_dir()
    run.gate.unlink()
    run.log.unlink()
    full = os.open("/dev/full", os.O_WRONLY)
    with popen(run.command, full) as train:
        os.close(full)
        assert train.wait(SLOW_S) == 0, run.log.read_text()
    text = run.log.read_text()
    assert announced(run.log) and f"resuming after step {stopped_at}" in text
    assert (run.paths.export / "model.safetensors").exists()
    all_gone(tmp_path)


def evaluation(site: Site, folder: Path) -> Sampling:
    rows = f"dataset.eval={site.folder / 'eval.jsonl'}"
    return Sampling(site, folder, "eval", rows, "n=2", "trainer.ppo.eval.sampling.max_new_tokens=8")


def test_evaluation_without_outputs_writes_its_result(site: Site, tmp_path: Path) -> None:
    run = evaluation(site, tmp_path)
    command = ["/bin/sh", "-c", 'exec "$@" >&- 2>&-', "sh", *run.words]
    done = subprocess.run(command, env=PATHS, cwd=ROOT, timeout=SLOW_S)
    log = run.samples.with_name("eval.log")
    assert done.returncode == 0, log.read_text()
    assert announced(log) and str(log.with_name("eval.json")) in log.read_text()
    (result,) = json.loads(log.with_name("eval.json").read_text())["results"]
    assert (result["tasks"], result["samples"]) == (8, 16)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_evaluation_keeps_its_samples_at_a_stop_signal(
    site: Site, tmp_path: Path, number: signal.Signals
) -> None:
    run = evaluation(site, tmp_path)
    code, shown = run.cut(number, at=2, tasks=1)
    assert code == 130, shown
    assert f"{len(run.kept())} of 16 samples are stored" in shown


def test_server_with_closed_outputs_outlives_a_crash(site: Site, tmp_path: Path) -> None:
    names = [f"cluster.name_root={tmp_path / 'names'}", f"cluster.run_root={tmp_path / 'runs'}"]
    script = str(ROOT / "arealite" / "launch_llm_server.py")
    command = [sys.executable, script, *names, f"model.path={site.model}", "experiment_name=e2e"]
    registered = lambda: list(tmp_path.rglob("llm_server/*.json"))  # noqa: E731
    with closed_pipe() as output, popen(command, output) as server:
        for is_last in (False, True):
            until(lambda: registered() or server.poll() is not None, what="it", seconds=SLOW_S)
            assert server.poll() is None
            if not is_last:
                children = psutil.Process(server.pid).children()
                (child,) = [c for c in children if not soak.is_warm_parent(c.cmdline())]
                child.kill()
                until(lambda: not registered(), what="the end of the child", seconds=SLOW_S)
        server.send_signal(signal.SIGHUP)
        assert server.wait(SLOW_S) == 0
    (log,) = tmp_path.rglob(f"logs/llm_server-{socket.gethostname()}.log")
    text = log.read_text()
    assert text.count("is closed or full") == 3, "the parent and two children"
    assert "llm_server died (killed by SIGKILL); started again (1 of 5)" in text
    assert not registered()


def test_environment_server_with_closed_outputs_serves(tmp_path: Path) -> None:
    words = ["--environments", "math", "--port", str(port := free_port())]
    with (
        closed_pipe() as output,
        popen([*AREALITE, "serve", *words], output, cwd=tmp_path) as server,
    ):
        logs = lambda: list(tmp_path.rglob("env_server-*.log"))  # noqa: E731
        serving = lambda: logs() and "serving on" in logs()[0].read_text()  # noqa: E731
        until(lambda: serving() or server.poll() is not None, what="the server", seconds=SLOW_S)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
            assert answer.status == 200
        server.send_signal(signal.SIGHUP)
        assert server.wait(60) == 0
    assert announced(logs()[0])


def test_rank_and_sidecar_with_closed_outputs_train(site: Site, tmp_path: Path) -> None:
    """The processes of torchrun, without torchrun."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = PATHS | ranks | place | {"TORCHELASTIC_RUN_ID": "closed"}
    command = site.command(tmp_path, "dataset.eval=null", "trainer.ppo.total_steps=2")
    with closed_pipe() as output, popen(command, output, environment) as train:
        code = train.wait(SLOW_S)
    paths = RunPaths(tmp_path / "e2e" / "t")
    logs = {log.name: log.read_text() for log in paths.logs.glob("*.log")}
    assert code == 0, logs
    assert (paths.export / "model.safetensors").exists()
    shown = "".join(text for name, text in logs.items() if "is closed or full" in text)
    assert "module=arealite.impl.trainer" in shown, "the lines of rank 0"
    assert "balanced: nothing lost" in shown, "the lines of the sidecar"
    all_gone(tmp_path)


QUICKSTART = """
import sys
from pathlib import Path
from arealite.cli import main
from arealite.ext.demo import quickstart
quickstart.make_kit = lambda kit, seed, heads: None
quickstart.train.main = lambda words: Path("trained").touch()
sys.exit(main.main(["quickstart", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--kit", "kit"], 141)])
def test_quickstart_with_a_closed_output_trains(
    words: list[str], code: int, tmp_path: Path
) -> None:
    with closed_pipe() as output:
        command = [sys.executable, "-c", QUICKSTART, *words]
        done = subprocess.run(command, stdout=output, stderr=output, env=PATHS, cwd=tmp_path)
    assert (done.returncode, (tmp_path / "trained").exists()) == (code, code == 0)
