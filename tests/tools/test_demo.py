"""Parts of the demo: processes, summary and plots. `make demo` runs the whole demo."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.base import config as base_config
from arealite.base.trial_files import RunPaths
from tests.waiting import until_exited
from tools import demo

AUDIT = SimpleNamespace(
    mixed_version_trajectories=5, interrupted=3, lost=[], repeated=["trajectory t"]
)


def step(number, reward, **more):
    line = {"step": number, "time": 100.0 + number, "reward/mean": reward, "time/step_s": 1.0}
    return line | {"length/trained_mean": 7.0, "episode/trajectories": 512.0} | more


LINES = [
    {"step": 0, "time": 99.0, "eval/reward": 0.3},
    step(0, 0.31, **{"publish/version": 1.0}),
    step(1, 0.5, **{"publish/version": 2.0}),
    {"step": 2, "time": 103.0, "eval/reward": 0.75},
]


def test_demo_config_has_the_values_of_the_recipe():
    config = base_config.load(
        ExperimentConfig, base_config.read_layers([demo.ROOT / "config/demo.yaml"], []), {}
    )
    ppo = config.trainer.ppo
    assert (config.experiment_name, config.trainer.type) == ("demo", "async_ppo")
    assert ppo.num_groups % ppo.updates == 0
    assert ppo.max_staleness >= 2
    assert ppo.publisher.pause_mode == "retract"
    assert len((demo.ROOT / "config/demo.yaml").read_text().splitlines()) < 80


def test_summary_condenses_metrics_and_audit():
    assert demo.summarize(LINES, AUDIT) == {
        "reward_before": 0.3,
        "reward_after": 0.75,
        "weight_updates": 2,
        "mixed_version_trajectories": 5,
        "interrupted_generations": 3,
        "lost": 0,
        "repeated": 1,
        "rl_seconds": 2.0,
        "trained_tokens_per_s": 3584.0,
    }


def test_summary_of_a_run_without_evaluation_has_no_rewards():
    summary = demo.summarize([step(0, 0.1)], AUDIT)
    assert summary["reward_before"] is None
    assert summary["reward_after"] is None


def test_plot_has_one_column_per_value():
    rows = demo.plot([0.0, 0.5, 1.0], height=2).splitlines()
    assert rows == ["1.00 │  █", "     │ ██", "     └─── 3 steps"]


def test_plot_is_written_or_its_absence_explained(tmp_path):
    said = demo.draw(tmp_path / "reward.png", LINES)
    drawn = tmp_path / "reward.png"
    assert said == str(drawn) if drawn.exists() else "pip install" in said


@pytest.mark.parametrize("keep", [False, True])
def test_earlier_run_is_removed_or_moved_aside(tmp_path, capsys, keep):
    root = tmp_path / "seed1"
    demo.clear(root, keep=keep)
    assert capsys.readouterr().out == ""
    root.mkdir()
    (root / "x").write_text("x")
    demo.clear(root, keep=keep)
    assert not root.exists()
    assert [path.name[:6] for path in tmp_path.iterdir()] == (["seed1-"] if keep else [])
    assert str(tmp_path) in capsys.readouterr().out


FAKE_SERVER = r"""
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else signal.SIG_DFL)
pid = os.fork()
os.write(1, b"%d\n" % os.getpid())
signal.pause()
"""


@pytest.mark.parametrize("mode", ["", "stubborn"])
def test_process_group_of_the_server_is_killed(monkeypatch, mode):
    monkeypatch.setattr(demo, "SERVER_GRACE_S", 0.2)
    process = subprocess.Popen(
        [sys.executable, "-c", FAKE_SERVER, mode], start_new_session=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    members = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
    demo.end_group(process)
    process.stdout.close()
    until_exited(*members)


def test_log_of_a_server_that_exited_is_shown(monkeypatch, tmp_path, capsys):
    shim = tmp_path / "arealite" / "launch_llm_server.py"
    shim.parent.mkdir()
    shim.write_text("import sys; sys.exit('no such model')")
    monkeypatch.chdir(tmp_path)
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        demo.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0]
    )
    with demo.server(["a=b"], log=Path("server.log")):
        started[0].wait(timeout=60)
    out = capsys.readouterr().out
    assert "python3 arealite/launch_llm_server.py a=b" in out
    assert "no such model" in out


def test_training_command_has_the_kit_and_the_steps(monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text(
        "import pathlib, sys; pathlib.Path('argv').write_text(' '.join(sys.argv[1:])); sys.exit(3)"
    )
    monkeypatch.chdir(tmp_path)
    assert demo.train(Path("kit"), ["seed=4"], 2) == 3
    assert (tmp_path / "argv").read_text() == (
        "--config config/demo.yaml seed=4 dataset.train=kit/train.jsonl "
        "dataset.eval=kit/eval.jsonl trainer.ppo.total_steps=2"
    )


INTERRUPTS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
assert os.getpgrp() == os.getpid()
while not pathlib.Path("waited-for").exists():
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGINT)
while True:  # not pause(): a signal just before it would be waited for in vain
    time.sleep(0.02)
"""


class Waited(subprocess.Popen):
    """Writes a file when `wait` is called, because an earlier interrupt would reach the test."""

    def wait(self, timeout=None):
        Path("waited-for").touch()
        return super().wait(timeout)


def test_training_gets_each_interrupt_once(monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text(INTERRUPTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.subprocess, "Popen", Waited)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        assert demo.train(Path("kit"), [], None) == 7
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("backend", list(demo.BACKENDS))
def test_server_is_started_with_a_valid_config(monkeypatch, tmp_path, backend):
    words = demo.BACKENDS[backend]
    config = base_config.load(
        ServerConfig, base_config.read_layers([demo.ROOT / "config/llm_server.yaml"], words), {}
    )
    assert config.llm_server.type == backend
    started = {}

    def note(name, result):
        return lambda *words, **_: started.setdefault(name, words) and result

    monkeypatch.setattr(demo, "make_kit", note("kit", tmp_path))
    monkeypatch.setattr(demo, "server", note("server", contextlib.nullcontext()))
    monkeypatch.setattr(demo, "train", note("train", 3))
    options = SimpleNamespace(seed=4, steps=None, keep=False, backend=backend, heads=None)
    assert demo.run_locked(RunPaths(tmp_path / "seed4-x"), options) == 3
    assert set(words) <= set(started["server"][0])
    assert not set(words) & set(started["train"][1])  # the recipe is the same with every server
    assert "trial_name=seed4-x" in started["server"][0]
    assert "trial_name=seed4-x" in started["train"][1]


def test_shared_backend_starts_no_server(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "make_kit", lambda kit, seed, heads: kit)
    monkeypatch.setattr(demo, "server", lambda *_, **__: pytest.fail("a server was started"))
    told = []
    monkeypatch.setattr(demo, "train", lambda kit, words, steps: told.extend(words) or 3)
    options = SimpleNamespace(seed=4, steps=None, keep=False, backend="shared", heads=None)
    assert demo.run_locked(RunPaths(tmp_path / "seed4-shared"), options) == 3
    assert "trainer.ppo.publisher.type=shared" in told


def test_second_demo_with_the_same_seed_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    codes, options = [], SimpleNamespace(seed=1, backend="embedded")
    monkeypatch.setattr(demo, "run_locked", lambda *_: codes.append(demo.run(options)) or 0)
    assert demo.run(options) == 0
    assert codes == [2]
    assert "seed 1 is running" in capsys.readouterr().out


def test_help_lists_the_options():
    shown = subprocess.run(
        [sys.executable, "tools/demo.py", "--help"],
        cwd=demo.ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0
    assert all(option in shown.stdout for option in ("--seed", "--steps", "--keep", "--backend"))
