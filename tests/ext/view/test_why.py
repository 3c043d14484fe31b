"""`arealite why` prints one screen about a running, hanging or finished run."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from arealite.api.experiment_config import ExperimentConfig, name_dir, run_paths
from arealite.api.trial import ClusterConfig
from arealite.base.config import save
from arealite.cli.main import main
from arealite.ext.diagnosis import diagnosis, explain
from arealite.ext.diagnosis.diagnosis import examine
from arealite.ext.diagnosis.explain import WIDTH
from arealite.ext.view import why as why_module
from arealite.system.health.waits import OTHER_RANKS
from tests.system.health.living import HOLDS_THE_INTERPRETER, IDLE, WAITS, living, show, shown, wait
from tests.waiting import until

EPISODES = """
from arealite.system.health.waits import Wait
async def generate(number):
    with Wait(event=f"generation g{number}/0", owner="llm client", on="llm_server-a", seconds=300):
        await asyncio.Event().wait()
async def main():
    vitals.watch(asyncio.get_running_loop())
    await asyncio.gather(*(generate(number) for number in range(256)))
asyncio.run(main())
"""

HANGS = """
from arealite.system.health.waits import Wait
async def environment():
    event = "episode g7/0 (train-3)"
    with Wait(event=event, owner="collector", on="environment mine", seconds=600):
        await asyncio.Event().wait()
def others(number):
    exec(f"async def other{number}(): await asyncio.Event().wait()", globals())
    return [globals()[f"other{number}"]() for _ in range(2)]
async def main():
    vitals.watch(asyncio.get_running_loop())
    tasks = [asyncio.create_task(each) for number in range(4) for each in others(number)]
    tasks.append(asyncio.create_task(environment(), name="episode g7/0"))
    await asyncio.gather(*tasks)
asyncio.run(main())
"""


class Run:
    """A run's folder, with the folders of its logs and vitals."""

    def __init__(self, root: Path) -> None:
        cluster = ClusterConfig(name_root=str(root / "names"), run_root=str(root / "runs"))
        config = ExperimentConfig(cluster=cluster)
        self.root = run_paths(config).root
        self.logs = run_paths(config).logs
        self.vitals = name_dir(config) / "vitals"
        self.vitals.mkdir(parents=True)
        self.logs.mkdir(parents=True)
        save(config, run_paths(config).config)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Increase the limits, so that a role without a CPU is not suspected."""
    limits = dict.fromkeys(("silent_s", "blocked_s", "overdue_s"), 120.0)
    monkeypatch.setattr(why_module, "examine", partial(examine, **limits))


@pytest.fixture
def all_roles_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait until every role has written its stacks."""
    monkeypatch.setattr(explain, "ANSWER_S", 120.0)


def why(run: Run, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["why", str(run.root)])
    return code, capsys.readouterr().out


@pytest.mark.usefixtures("patient", "all_roles_reply")
def test_healthy_run_is_shown_with_its_waits_and_stacks(run: Run, capsys) -> None:
    with (
        living("rollout-0", run.vitals, EPISODES),
        living("llm_server-a", run.vitals, IDLE),
    ):
        begun = lambda: [w["count"] for w in shown("rollout-0", run.vitals)["waits"]] == [256]  # noqa: E731
        until(begun, what="episodes")
        code, text = why(run, capsys)
    assert code == 0
    assert text.startswith("No role blocks the run.")
    assert "256 x generation g0/0 on llm_server-a" in text
    assert "256 x task" in text and "in generate" not in text and "generate" in text
    *lines, _folder = text.splitlines()
    assert len(lines) < 25 and max(map(len, lines)) <= WIDTH


@pytest.mark.usefixtures("patient", "all_roles_reply")
def test_hanging_environment_is_shown_with_the_line_where_it_waits(run: Run, capsys) -> None:
    with living("rollout-0", run.vitals, HANGS) as process:
        long = lambda: any(w["waited_s"] > 2 for w in shown("rollout-0", run.vitals)["waits"])  # noqa: E731
        until(long, what="an episode of two seconds")
        code, text = why(run, capsys)
    first = "No role blocks the run. Longest wait: rollout-0: episode g7/0 (train-3) on "
    assert code == 0, "an episode may take its time"
    assert text.startswith(f"{first}environment mine, ")
    assert f"rollout-0 {process.pid:>26} ok " in text
    stacks = text.split("STACKS")[1].splitlines()
    assert "1 x task episode g7/0: " in stacks[2] and stacks[2].endswith(" environment")


@pytest.mark.usefixtures("patient")
def test_stopped_role_is_listed_first_with_its_waiters(run: Run, capsys) -> None:
    with (
        living("datapipe-0", run.vitals, IDLE) as process,
        living("trainer-0", run.vitals, WAITS),
    ):
        until(lambda: shown("trainer-0", run.vitals)["waits"], what="the trainer's wait")
        process.send_signal(signal.SIGSTOP)
        until(
            lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, what="its stop"
        )
        code, text = why(run, capsys)
    lines = text.splitlines()
    assert code == 1
    assert lines[0] == "BLOCKING ROLES"
    assert lines[1].startswith("* datapipe-0 is STOPPED")
    assert f"kill -CONT {process.pid}" in lines[1]
    assert lines[2].startswith("    <- trainer-0: batch 12, ")


@pytest.mark.usefixtures("patient")
def test_blocked_loop_is_shown_with_the_blocking_line(run: Run, capsys) -> None:
    stack = '  File "agent.py", line 7, in act\n    requests.get(url)\n'
    show(run.vitals, "rollout-0", blocked_s=900.0, blocked_stack=stack)
    code, text = why(run, capsys)
    assert code == 1
    assert text.splitlines()[1].startswith("* rollout-0 is BLOCKED for ")
    assert "requests.get(url)" in text.splitlines()[3]


def test_role_blocked_in_c_code_prints_its_stack_on_a_signal_and_continues(
    run: Run, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def size(file: Path) -> int:
        text = file.read_bytes()
        return len(text) if b"in match" in text else 0  # the file is written in pieces

    monkeypatch.setattr(explain, "_size", size)
    monkeypatch.setattr(explain, "SIGNAL_S", 120.0)
    monkeypatch.setattr(
        diagnosis, "cpu_times", lambda *_: None
    )  # without CPU times, the role cannot be starved
    with living("rollout-0", run.vitals, HOLDS_THE_INTERPRETER) as process:
        until(lambda: [f.cause for f in examine(run.vitals)] == ["silent"], what="silence")
        code, text = why(run, capsys)
        assert process.poll() is None
    assert code == 1
    assert text.splitlines()[1].startswith("* rollout-0 is SILENT")
    assert "in match" in text.split("STACKS")[1]


def test_dead_run_is_shown_with_the_last_log_lines_of_its_roles(run: Run, capsys) -> None:
    (run.logs / "trainer-0.log").write_text("first\nKilled by the night shift\n")
    with living("trainer-0", run.vitals, IDLE) as process:
        process.kill()
        process.wait()
        code, text = why(run, capsys)
    assert code == 1
    assert text.startswith("The run is not running.")
    assert "* trainer-0 is DEAD" in text and "| Killed by the night shift" in text
    assert "log: " in text


def test_missing_log_is_not_shown(run: Run, capsys) -> None:
    with living("launcher-0", run.vitals, IDLE) as process:
        process.kill()
        process.wait()
        assert "launcher-0 is DEAD" in (text := why(run, capsys)[1]) and "log: " not in text


def test_process_with_a_reused_pid_gets_no_signal(run: Run, capsys) -> None:
    """SIGUSR1 would kill a process without a handler."""
    with living("rollout-0", run.vitals, IDLE) as other:
        until(lambda: shown("rollout-0", run.vitals), what="vitals")
        text = (run.vitals / "rollout-0.json").read_text()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        forged = text.replace(f'"pid":{other.pid}', f'"pid":{process.pid}')
        (run.vitals / "rollout-0.json").write_text(forged)
        assert why(run, capsys)[0] == 1
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_finished_run_exits_with_0_and_a_wrong_folder_with_2(run: Run, capsys) -> None:
    code, text = why(run, capsys)
    assert code == 0 and "is not running" in text
    assert main(["why", str(run.root / "none")]) == 2


@pytest.mark.usefixtures("patient")
def test_collective_wait_shows_the_missing_rank(run: Run, capsys) -> None:
    counters = {"ranks": 3, "collectives": 8}
    for rank in (0, 2):
        waits = wait("collective 8", OTHER_RANKS, 9.0)
        show(run.vitals, f"trainer-{rank}", waits, counters=counters)
    show(run.vitals, "trainer-1", counters=counters | {"collectives": 7})
    code, text = why(run, capsys)
    assert code == 0, "it may be busy"
    assert text.count("collective 8 on trainer-1, ") == 2
