"""The files in launchers/: restarts and their exit codes, GRPO, and environment servers."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import SamplingConfig
from arealite.cli import configs, options
from tests.e2e.conftest import write_rows
from tests.fakes.ports import held_port
from tests.models import tiny_model
from tests.waiting import spawned, until, until_exited

FOLDER = Path(__file__).resolve().parents[2] / "launchers"
SCRIPT, UNIT = FOLDER / "relaunch.sh", FOLDER / "arealite.service"
QUICK = os.environ | {"PAUSE_S": "0"}


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser


def relaunched(tmp_path: Path, ends: str, **environment: str) -> tuple[int, int]:
    """Run the script with the command `ends`; return its exit code and the number of runs."""
    runs = tmp_path / "runs"
    command = ["sh", "-c", f"echo x >> {runs}; {ends}"]
    done = subprocess.run([SCRIPT, *command], env=QUICK | environment, timeout=60, check=False)
    return done.returncode, len(runs.read_text().split())


@pytest.mark.parametrize("code", [0, 2, 3, 130])
def test_script_does_not_restart_after_a_final_exit_code(tmp_path: Path, code: int) -> None:
    assert relaunched(tmp_path, f"exit {code}") == (code, 1)


@pytest.mark.parametrize(
    ("ends", "code"), [("exit 1", 1), ("exit 4", 4), ("kill -9 $$", 137), ("kill -SEGV $$", 139)]
)
def test_script_restarts_a_failed_command_at_most_relaunches_times(
    tmp_path: Path, ends: str, code: int
) -> None:
    assert relaunched(tmp_path, ends, RELAUNCHES="3") == (code, 4)


def test_script_exits_when_the_command_exits_with_0(tmp_path: Path) -> None:
    third = f'[ "$(wc -l < {tmp_path}/runs)" -eq 3 ] || kill -9 $$'
    assert relaunched(tmp_path, third) == (0, 3)


@pytest.mark.parametrize("name", ["TERM", "HUP"])
def test_script_forwards_sigterm_and_sighup_and_does_not_restart(tmp_path: Path, name: str) -> None:
    ready = tmp_path / "ready"
    gently = f"trap 'echo checkpoint; exit 1' {name}; echo > {ready}; while :; do sleep 0.01; done"
    with spawned([str(SCRIPT), "sh", "-c", gently], QUICK) as script:
        until(ready.exists, what="the command")
        script.send_signal(getattr(signal, f"SIG{name}"))
        assert script.communicate(timeout=60)[0] == "checkpoint\n"
        assert script.returncode == 1


def test_script_restarts_a_command_also_if_its_output_is_closed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    read, write = os.pipe()
    os.close(read)
    try:
        command = [str(SCRIPT), "sh", "-c", f"echo x >> {runs}; exit 4"]
        own = QUICK | {"RELAUNCHES": "2"}
        done = subprocess.run(command, env=own, stdout=write, stderr=write, timeout=60)
    finally:
        os.close(write)
    assert (done.returncode, len(runs.read_text().split())) == (4, 3)


def test_unit_restarts_after_the_same_exit_codes_as_the_script() -> None:
    service, start = unit()["Service"], unit()["Unit"]
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"].split() == ["2", "3"]
    assert service["SuccessExitStatus"] == "130"
    assert start["StartLimitBurst"] == "10" and int(start["StartLimitIntervalSec"]) > 0


def test_stop_timeout_of_the_unit_exceeds_the_drain_timeout() -> None:
    service, config = unit()["Service"], ExperimentConfig()
    assert service["KillMode"] == "mixed" and "KillSignal" not in service
    assert int(service["TimeoutStopSec"]) > config.launcher.drain_timeout_s + 30


def test_command_line_of_the_unit_is_valid() -> None:
    python, script, *words = unit()["Service"]["ExecStart"].split()
    assert python.endswith("/.venv/bin/python") and (FOLDER.parent / script).is_file()
    default = configs.CONFIG_DIR / "async_ppo.yaml"
    layers = options.CommandLine(
        command="x", description="", schema=ExperimentConfig, default=default
    ).parse(words)
    config = configs.load(ExperimentConfig, layers.files, layers.overrides)
    assert (config.trial_name, config.launcher.llm_servers) == ("unattended", 1)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="this machine has no systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("%h/arealite/.venv/bin/python", shutil.which("true") or "")
    file = tmp_path / UNIT.name
    file.write_text(text.replace("%h/arealite", str(tmp_path)))
    command = ["systemd-analyze", "verify", "--man=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert not said, "\n".join(said)


def test_docs_show_the_unit_file() -> None:
    page = (FOLDER.parent / "docs" / "unattended.md").read_text()
    shown = page.split("```ini\n")[1].split("```")[0]
    assert shown == UNIT.read_text()


# ------------------------------------------------------------ grpo.sh


def grpo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = os.environ | {"PYTHON": sys.executable} | environment
    command = [str(FOLDER / "grpo.sh"), *words]
    return subprocess.run(command, env=own, capture_output=True, text=True, check=False)


def test_grpo_dry_run_checks_its_config_and_starts_nothing(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    for split in ("train", "eval"):
        write_rows(tmp_path / f"{split}.jsonl", 128, seed=1)
    own = [f"cluster.run_root={tmp_path / 'runs'}", f"cluster.name_root={tmp_path / 'names'}"]
    parts = [str(tmp_path / part) for part in ("model", "train.jsonl", "eval.jsonl")]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH"\necho "$@"\n')
    python.chmod(0o755)
    done = grpo(
        *("-n", *parts, *own),
        KL="0.02",
        EVAL_SAMPLING="0.0 0.9 64",
        GROUP="4",
        PYTHON=str(python),
        PYTHONPATH="/packages",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown, module_paths, check = done.stdout.splitlines()
    assert module_paths == f"{FOLDER.parent}:/packages"
    # The interpreter is started here, so that the command is a fork: see tests/forks.py.
    command = [sys.executable, *shlex.split(check)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "128 tasks to train, 128 held out" in checked.stdout
    assert checked.stdout.endswith("ok: all checks passed\n")
    assert not (tmp_path / "runs").exists()
    words = shlex.split(shown)
    assert words[:2] == [str(python), str(FOLDER.parent / "train.py")]
    assert command[1:4] == ["-m", "arealite.cli.main", "check"]
    assert command[4:] == words[2:]
    default = configs.CONFIG_DIR / "async_ppo.yaml"
    layers = options.CommandLine(
        command="x", description="", schema=ExperimentConfig, default=default
    ).parse(words[2:])
    config = configs.load(ExperimentConfig, layers.files, layers.overrides)
    ppo = config.trainer.ppo
    assert (config.launcher.llm_servers, ppo.collector.group_size) == (1, 4)
    assert (ppo.kl.coef, ppo.kl.reference) == (0.02, "initial")
    assert ppo.loss.reduction == "seq_mean_token_mean"
    assert ppo.collector.sampling == SamplingConfig()
    assert ppo.eval.sampling == SamplingConfig(temperature=0.0, top_p=0.9, max_new_tokens=64)


def test_grpo_runs_train_with_the_users_options_last() -> None:
    done = grpo("m", "t.jsonl", "trainer.ppo.lr=1e-5", PYTHON="echo")
    words = done.stdout.split()
    assert (words[0], words[-1]) == (str(FOLDER.parent / "train.py"), "trainer.ppo.lr=1e-5")
    assert {"model.path=m", "dataset.train=t.jsonl", "launcher.llm_servers=1"} <= {*words}
    assert not any(word.startswith("dataset.eval=") for word in words)


@pytest.mark.parametrize(
    ("words", "environment", "line"),
    [
        ([], {}, "Train with GRPO on this machine"),
        (["model"], {}, "launchers/grpo.sh [-n] MODEL TRAIN [EVAL] [key=value ...]"),
        (["model", "a=b"], {}, "launchers/grpo.sh [-n] MODEL TRAIN"),
        (["--model", "m", "t"], {}, "launchers/grpo.sh [-n] MODEL TRAIN"),
        (
            ["m", "t.jsonl"],
            {"SAMPLING": "1.0 256"},
            "trainer.ppo.collector.sampling needs three values: temperature, top_p and max_new",
        ),
    ],
)
def test_grpo_refuses_wrong_words(words, environment, line: str) -> None:
    done = grpo(*words, **environment, PYTHON="false")
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr


# ------------------------------------------------------------ servers.sh


def servers(*words: str, env: str = "tic_tac_toe") -> AbstractContextManager[Any]:
    own = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return spawned([str(FOLDER / "servers.sh"), "--env", env, *words], own)


@pytest.fixture
def ports() -> Iterator[int]:
    """Yield the first of two free ports that follow each other."""
    with ExitStack() as held:
        while True:
            port = held.enter_context(held_port())
            beside = held.enter_context(socket.socket())
            beside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError, OverflowError):
                beside.bind(("127.0.0.1", port + 1))
                break
        yield port


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "code", "line"),
    [
        pytest.param("INT", 130, "", id="Ctrl-C"),
        pytest.param("TERM", 143, "", id="SIGTERM"),
        pytest.param("HUP", 129, "", id="SIGHUP"),
        pytest.param("crash", 137, "a server exited with code 137", id="one server is killed"),
    ],
)
def test_servers_listen_on_consecutive_ports_and_end_together(ports, end, code, line) -> None:
    places = [f"127.0.0.1:{ports}", f"127.0.0.1:{ports + 1}"]
    with servers("--num_servers", "2", "--base_port", str(ports)) as script:
        hint = script.stdout.readline()
        assert "env.type=tic_tac_toe" in hint and f"addresses=[{','.join(places)}]" in hint
        ready = {script.stdout.readline().strip() for _ in places}
        assert ready == {f"serving on {place}" for place in places}
        children = psutil.Process(script.pid).children()
        for place in places:
            with urllib.request.urlopen(f"http://{place}/health", timeout=60) as answer:
                assert answer.status == 200
        if end == "crash":
            children[0].kill()
        else:
            script.send_signal(getattr(signal, f"SIG{end}"))
        rest = script.communicate(timeout=60)[0]
        assert (script.returncode, line in rest) == (code, True), rest
        until_exited(*children)


@pytest.mark.processes
def test_servers_of_an_unknown_environment_are_refused() -> None:
    with servers(env="tic_tac_to") as script:
        said = script.communicate(timeout=60)[0]
    assert script.returncode == 2
    assert "Unknown env type 'tic_tac_to'. Did you mean 'tic_tac_toe'?" in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--num_servers", "0"], "--num_servers 0 must be a whole number above 0"),
        (["--num_servers", "two"], "--num_servers two must be a whole number above 0"),
        (["--num_servers"], "--num_servers has no value"),
        (["--base_port", "65535", "--num_servers", "2"], "there is no port above 65535"),
        (["--port", "8000"], "--port is no option"),
    ],
)
def test_servers_refuse_wrong_words(words: list[str], line: str) -> None:
    with servers(*words) as script:
        said = script.communicate(timeout=60)[0]
    assert script.returncode == 2
    assert said.startswith("servers.sh: ") and line in said.splitlines()[0]
