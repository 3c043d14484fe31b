"""Commands escape control characters in foreign text: labels, names, prompts, errors and logs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arealite.base import log
from arealite.base.errors import RoleError
from arealite.base.printable import guard_output
from arealite.cli.main import main
from arealite.ext.evaluation import evaluate
from arealite.impl.launcher.processes import spawn
from arealite.impl.launcher.progress import RunProgress
from arealite.system.data.dataset import Permutation
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.ledger.ledger import Ledger
from tests.hostile import HOSTILE, SHOWN, SHOWN_FIRST, controls_in, foreign_controls_in
from tests.system.health.living import show, wait
from tests.system.health.run_folder import Run, line
from tests.system.scenes import experiment, failed, tasks
from tests.terminals import terminal

Command = Callable[[Path], list[str]]


def hostile_run(folder: Path) -> Run:
    """Create a run whose name, failures, servers, waits and death reasons are hostile."""
    made = Run(folder)
    made.paths.metrics.write_text(line(0, **{f"rollout/failed_{HOSTILE}": 3.0}))
    names = made.vitals.parent / "llm_server"
    names.mkdir()
    server = {"address": HOSTILE, "version": HOSTILE, "pid": os.getpid(), "host": HOSTILE}
    (names / f"{HOSTILE}.json").write_text(json.dumps(server))
    show(made.vitals, "rollout-0", wait(HOSTILE, f"environment {HOSTILE}", 900.0, detail=HOSTILE))
    return made


def top(folder: Path) -> list[str]:
    return ["top", str(hostile_run(folder).paths.root), "--once"]


def why(folder: Path) -> list[str]:
    run = hostile_run(folder)
    run.paths.end.write_text(HOSTILE)
    return ["why", str(run.paths.root)]


def audit(folder: Path) -> list[str]:
    ledger = Ledger(folder / "ledger.sqlite", fingerprint={"group_size": "2"})
    ppo = experiment(folder, max_attempts=1).trainer.ppo
    store = GroupStore(ledger, tasks(5), ppo=ppo, sampler=Permutation(5, seed=1, shuffle=True))
    store.version = 0
    group = store.next_group()
    assert group
    lease = store.lease(group, worker_id=HOSTILE, credit=2)
    for member in range(2):
        store.add_episode(failed(lease, member, HOSTILE), [])
    ledger.commit()
    ledger.close()
    return ["audit", str(folder / "ledger.sqlite")]


def play(folder: Path) -> list[str]:
    file = folder / "tasks.jsonl"
    file.write_text(json.dumps({"prompt": f"Reverse {HOSTILE}"}) + "\n")
    return ["play", "reverse", "--task", str(file)]


def opponent(folder: Path) -> list[str]:
    seats = ["seats.con.type=scripted", f"seats.con.scripted.answers=[{json.dumps(HOSTILE)}]"]
    return ["play", "debate", "rounds=1", *seats]


def envs(folder: Path) -> list[str]:
    text = f"from arealite.api.env import Env, envs\nclass Odd(Env):\n    {('Odd ' + HOSTILE)!r}\n"
    (folder / "odd_env.py").write_text(text + "    seats = ('agent',)\nenvs.register('odd')(Odd)\n")
    return ["envs", "imports=[odd_env]"]


def info(folder: Path) -> list[str]:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nprintf '%s' '{HOSTILE}'\n")
    python.chmod(0o755)
    return ["info", f"llm_server.sglang.python={python}"]


COMMANDS: dict[str, Command] = {
    "top": top,
    "why": why,
    "audit": audit,
    "play, a prompt": play,
    "play, an opponent": opponent,
    "envs": envs,
    "info": info,
    "unknown command": lambda _: [HOSTILE],
    "audit of nothing": lambda folder: ["audit", str(folder / HOSTILE)],
    "why of nothing": lambda folder: ["why", str(folder / HOSTILE)],
    "report of nothing": lambda folder: ["report", str(folder / HOSTILE)],
    "export of nothing": lambda folder: ["export", str(folder / HOSTILE)],
    "replay of nothing": lambda folder: ["replay", str(folder / HOSTILE)],
    "train, a key": lambda _: ["train", f"{HOSTILE}=1"],
    "train, a value": lambda _: ["train", "--dry-run", f"trainer.ppo.lr={json.dumps(HOSTILE)}"],
    "check": lambda _: ["check", f"trial_name={json.dumps(HOSTILE)}", "model.path=m"],
    "eval": lambda _: ["eval", f"{HOSTILE}=1"],
    "collect": lambda _: ["collect", f"{HOSTILE}=1"],
    "serve": lambda _: ["serve", f"{HOSTILE}=1"],
    "serve-llm": lambda _: ["serve-llm", f"{HOSTILE}=1"],
    "launch": lambda _: ["launch", "slurm", f"{HOSTILE}=1"],
    "role": lambda _: ["role", HOSTILE, "0", "run"],
    "surrogates": lambda _: ["audit", f"{HOSTILE}\udcff"],
}


@pytest.fixture(autouse=True)
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide two lines as standard input, and keep the logging of this process unchanged."""
    monkeypatch.setattr(log, "setup", lambda *_: None)
    kept, (end, begin) = os.dup(0), os.pipe()
    os.write(begin, b"one\ntwo\n")
    os.close(begin)
    os.dup2(end, 0)
    yield
    os.dup2(kept, 0)
    os.close(kept)
    os.close(end)


@pytest.mark.parametrize("name", COMMANDS)
def test_control_characters_are_escaped_in_each_command(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    try:
        main(COMMANDS[name](tmp_path))
    except SystemExit as refused:
        assert refused.code == 2
    out, err = capfd.readouterr()
    assert not controls_in(out + err)
    assert SHOWN_FIRST in (out + err).replace("\\\\", "\\"), out + err


def test_control_characters_are_escaped_in_evaluation_results(
    capsys: pytest.CaptureFixture[str],
) -> None:
    number = {"mean": 0.5, "low": 0.4, "high": 0.6}
    row = {"source": HOSTILE, "seat": HOSTILE, "reward": number, "pass": {}, "samples": 1}
    row |= {"parts": {HOSTILE: 1.0}, "tokens": 1.0, "truncated": 0.0, "tasks": 1}
    failures = {HOSTILE: {"attempts": 1, "first": HOSTILE}}
    guard_output()
    evaluate.show(
        {"model": HOSTILE, "n": 1, "intervals": "", "results": [row], "failures": failures}
    )
    out = capsys.readouterr().out
    assert out.count(SHOWN_FIRST) >= 5 and not controls_in(out)


def test_control_characters_are_escaped_in_errors_and_tracebacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(argv: object) -> int:
        raise RoleError(HOSTILE)

    monkeypatch.setattr("arealite.ext.audit.command.main", fail)
    assert main(["audit", "x"]) == 4
    said = capsys.readouterr().err
    assert said.count(SHOWN) == 2 and not controls_in(said)


ROLE = """
import sys, warnings
from arealite.base import log
from tests.hostile import HOSTILE
def main(argv):
    log.setup("rollout-0")
    log.get("m").warning(HOSTILE, worker=HOSTILE, errors=[HOSTILE])
    print(HOSTILE)
    warnings.warn(HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.get("m").exception("failed")
    raise KeyError(argv[0])
"""


async def test_control_characters_are_escaped_in_role_logs_and_death_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hostile_role.py").write_text(ROLE)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from arealite.cli.main import run\n"
    code += "from tests.hostile import HOSTILE; run('hostile_role', [HOSTILE])"
    command = [sys.executable, "-c", code]
    child = await spawn("rollout-0", command, log=tmp_path / "log", environment={})
    assert await child.process.wait() == 1
    text = child.log.read_bytes().decode()
    assert text.replace("\\\\", "\\").count(SHOWN) >= 6 and not controls_in(text)
    RunProgress(tmp_path / "metrics.jsonl", 3).say(child.exit_report + HOSTILE)
    out = capsys.readouterr().out
    assert "rollout-0 died" in out and SHOWN in out and not controls_in(out)


TOP = ["-m", "arealite.cli.main", "top"]


def test_control_characters_are_escaped_in_top_on_a_terminal(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    with terminal([*TOP, str(run.paths.root), "--every", "0.1"]) as on:
        on.until("╯")
        on.press("q")
        assert on.end() == 0
        text = on.read().replace("\x1b[?25l", "").replace("\x1b[?25h", "")
    assert r"\x1b]0;owned" in text and not foreign_controls_in(text)


LAUNCHER = """
import sys
from pathlib import Path
from arealite.cli.main import run
SAYS = '''
import sys
from pathlib import Path
from arealite.base import log
from arealite.impl.launcher.progress import RunProgress
from tests.hostile import HOSTILE
def main(argv):
    progress = RunProgress(Path(argv[0]) / "metrics.jsonl", 3)
    log.get("a").warning(HOSTILE)
    with progress.shown():
        progress.say(HOSTILE)
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        log.get("a").warning(HOSTILE, why=HOSTILE)
        print("\\x1b]8;;http://evil.example\\x1b\\\\\\\\click\\x1b[8m")
    print(HOSTILE)
    return 0
'''
(Path(sys.argv[1]) / "says.py").write_text(SAYS)
sys.path.insert(0, sys.argv[1])
sys.exit(run("says", sys.argv[1:]))
"""


def test_control_characters_are_escaped_in_the_launchers_terminal(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    with terminal(["-c", LAUNCHER, str(run.paths.root)], columns=200) as on:
        assert on.end() == 0
        text = on.read().replace("\x1b[?25l", "").replace("\x1b[?25h", "")
    assert text.count(SHOWN_FIRST) >= 7 and r"\x1b]8;;http" in text
    assert not foreign_controls_in(text)
