"""The local launcher with scripted children: ends of a run; no child survives."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from arealite.api.experiment_config import DatasetConfig, ExperimentConfig
from arealite.api.launcher import LauncherConfig
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.base.errors import UserError
from arealite.ext.audit import audit as audit_module
from arealite.ext.audit.audit import audit
from arealite.impl.launcher import processes, supervisor
from arealite.impl.launcher.local import LocalLauncher
from arealite.impl.launcher.processes import free_port
from arealite.system.health import vitals
from tests.waiting import has_exited, until, until_exited

RUN = """
import sys
from pathlib import Path
from tests.impl.launcher.test_local import ScriptedLauncher
sys.exit(ScriptedLauncher(Path(sys.argv[1]), dict(zip(sys.argv[2::2], sys.argv[3::2]))).run())
"""

UNTIL_TERM = """
import signal, sys, threading
signal.signal(signal.SIGTERM, lambda *_: stop.set())
stop = threading.Event()
print("ready", flush=True)
stop.wait(600)
"""
IGNORES_TERM = """
import signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
threading.Event().wait(600)
"""


class ScriptedLauncher(LocalLauncher):
    """Each role runs a short script instead of the real command."""

    def __init__(
        self,
        root: Path,
        scripts: dict[str, str],
        *,
        drain_s: float = 120.0,
        restarts: int = 0,
        silent_s: float = 8.0,
        steps: int = 1,
        held_out: str | None = None,
    ) -> None:
        config = ExperimentConfig(
            experiment_name="e",
            trial_name="t",
            cluster=ClusterConfig(name_root=str(root / "names"), run_root=str(root)),
            dataset=DatasetConfig(eval=held_out),
            trainer=TrainerConfig(ppo=PPOConfig(total_steps=steps)),
            launcher=LauncherConfig(
                trainer_ranks=2,
                drain_timeout_s=drain_s,
                max_restarts=restarts,
                silent_s=silent_s,
                llm_servers=int("llm_server" in scripts),
            ),
        )
        super().__init__(config)
        os.environ["METRICS"] = str(self.paths.metrics)
        self.paths.logs.mkdir(parents=True, exist_ok=True)
        self.scripts = scripts

    def command(self, role: str, index: int) -> list[str]:
        return [sys.executable, "-c", self.scripts[role]]


def run(
    root: Path, *, drain_s: float = 120.0, restarts: int = 0, steps: int = 1, **scripts: str
) -> tuple[int, str, LocalLauncher]:
    return launched(
        ScriptedLauncher(root, scripts, drain_s=drain_s, restarts=restarts, steps=steps)
    )


def launched(launcher: ScriptedLauncher) -> tuple[int, str, LocalLauncher]:
    shown: list[str] = []
    launcher.progress.say = shown.append  # type: ignore[method-assign]
    code = launcher.run()
    return code, "\n".join(shown), launcher


def assert_nothing_survives(launcher: LocalLauncher) -> None:
    assert len(launcher.children) == 4
    for child in launcher.children:
        assert child.process.returncode is not None
        assert has_exited(child.process.pid)


def trains(step: int) -> str:
    """Write the metrics of a step."""
    return f"""
import json, os, time
line = {{"step": {step}, "time": time.time(), "reward/mean": 0.0}}
with open(os.environ["METRICS"], "a") as file: file.write(json.dumps(line) + "\\n")
"""


def after(file: Path) -> str:
    return f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.01)"


def test_run_ends_with_0_when_all_roles_have_exited(tmp_path: Path):
    done = tmp_path / "done"
    waits = after(done) + "\ntime.sleep(0.3)"
    trainer = f"print('trained'); open({str(done)!r}, 'w')"
    code, shown, launcher = run(tmp_path, datapipe=waits, rollout=waits, trainer=trainer)
    assert code == 0, shown
    assert_nothing_survives(launcher)
    assert (launcher.paths.logs / "trainer-0.log").read_text() == "trained\n"
    assert str(launcher.paths.root) in shown


def test_audit_does_not_block_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []

    def looks(_: Path, **__: bool) -> None:
        threads.append(threading.current_thread())
        raise UserError("there is no ledger")

    monkeypatch.setattr(audit_module, "audit", looks)
    code, shown, _ = run(tmp_path, datapipe="pass", rollout="pass", trainer="pass")
    assert code == 1 and "no audit: there is no ledger" in shown
    assert threads and threads[0] is not threading.main_thread()


def test_role_that_does_not_exit_is_reported(tmp_path: Path):
    done = tmp_path / "done"
    trainer = f"open({str(done)!r}, 'w')"
    code, shown, launcher = run(
        tmp_path, drain_s=1.0, datapipe=UNTIL_TERM, rollout=after(done), trainer=trainer
    )
    assert code == 1
    assert "datapipe-0" in shown
    assert "did not exit within 1 s" in shown
    assert_nothing_survives(launcher)


def test_dead_child_is_reported_with_its_code_and_last_lines(tmp_path: Path):
    dying = "import sys; print('the last words'); sys.exit(7)"
    code, shown, launcher = run(tmp_path, datapipe=UNTIL_TERM, rollout=dying, trainer=UNTIL_TERM)
    assert code == 7
    assert "rollout-0 died (exit code 7)" in shown
    assert "the last words" in shown
    assert_nothing_survives(launcher)


def test_line_of_a_deliberate_error_is_shown_alone(tmp_path: Path):
    dying = "import sys; print('Traceback [x]'); print('error: no such [/thing]'); sys.exit(2)"
    code, shown, _ = run(tmp_path, datapipe=UNTIL_TERM, rollout=dying, trainer=UNTIL_TERM)
    assert code == 2
    assert "error: no such [/thing]" in shown
    assert "Traceback" not in shown


def test_death_without_output_suggests_a_full_disk_and_missing_ledger_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(audit_module, "audit", audit)
    dying = "import sys; sys.exit(3)"
    code, shown, _ = run(tmp_path, datapipe=dying, rollout=UNTIL_TERM, trainer=UNTIL_TERM)
    assert code == 3
    assert "is the disk full?" in shown
    assert "no audit: " in shown


def test_killed_child_is_reported_with_its_signal(tmp_path: Path):
    dying = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    code, shown, launcher = run(tmp_path, datapipe=dying, rollout=UNTIL_TERM, trainer=UNTIL_TERM)
    assert code == 1
    assert "datapipe-0 died (killed by SIGKILL)" in shown
    assert_nothing_survives(launcher)


@pytest.mark.parametrize("late", [UNTIL_TERM, "import threading; threading.Event().wait(600)"])
def test_worker_that_started_too_late_for_the_end_message_is_stopped(tmp_path: Path, late: str):
    trainer = "import time; time.sleep(0.5)"
    code, shown, launcher = run(tmp_path, datapipe="pass", rollout=late, trainer=trainer)
    assert code == 0, shown
    assert "died" not in shown
    assert_nothing_survives(launcher)


def test_roles_that_outlive_the_datapipe_are_reported(tmp_path: Path):
    scripts = {"datapipe": trains(1), "rollout": UNTIL_TERM, "trainer": UNTIL_TERM}
    code, shown, launcher = run(tmp_path, drain_s=1.0, **scripts)
    assert code == 1
    assert "trainer-0, trainer-1 did not exit within 1 s" in shown
    assert_nothing_survives(launcher)


# ---------------------------------------------------------------- deaths and restarts


def nth(file: Path, first: str, *, then: str) -> str:
    """Return a script that runs `first` the first time, and `then` each later time."""
    return f"""
import os, signal, sys, threading, time
begun = os.path.exists({str(file)!r})
open({str(file)!r}, "a").write(os.environ.get("MASTER_PORT", "") + "\\n")
exec({then!r} if begun else {first!r})
"""


SUICIDE = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("role", ["datapipe", "rollout"])
def test_killed_role_is_restarted_and_the_run_continues(tmp_path: Path, role: str):
    lives, done = tmp_path / "lives", tmp_path / "done"
    ends = after(done)
    scripts = {
        "datapipe": ends,
        "rollout": ends,
        "trainer": f"import os, time\nwhile not (os.path.exists({str(lives)!r}) and "
        f"len(open({str(lives)!r}).readlines()) > 1): time.sleep(0.01)\nopen({str(done)!r}, 'w')",
    }
    scripts[role] = nth(lives, SUICIDE, then=ends)
    code, shown, launcher = run(tmp_path, restarts=5, **scripts)
    assert code == 0, shown
    assert f"{role}-0 died (killed by SIGKILL); started again (1 of 5)" in shown
    assert len(lives.read_text().splitlines()) == 2
    assert_nothing_survives(launcher)


def test_all_ranks_restart_on_a_new_port_after_one_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ports_here = iter((10001, 10002))  # otherwise the same port may be returned twice
    monkeypatch.setattr(processes, "free_port", lambda: next(ports_here))
    lives, done = tmp_path / "lives", tmp_path / "done"
    trainer = f"""
import os, signal, time
me = os.environ["RANK"]
lives = {str(lives)!r} + me
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(lives, "a").write(os.environ["MASTER_PORT"] + chr(10))
other = {str(lives)!r} + str(1 - int(me))
while not (os.path.exists(other) and os.path.getsize(other)): time.sleep(0.01)
if len(open(lives).read().split()) == 1:
    if me == "1": os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
open({str(done)!r}, "w")
"""
    code, shown, launcher = run(
        tmp_path, restarts=5, datapipe=after(done), rollout=after(done), trainer=trainer
    )
    assert code == 0, shown
    assert shown.count("died") == 1
    assert "trainer-1 died (killed by SIGKILL); started again (1 of 5)" in shown
    ports = [(tmp_path / f"lives{rank}").read_text().split() for rank in (0, 1)]
    assert ports == [["10001", "10002"]] * 2, "a new port for the new group"
    assert_nothing_survives(launcher)


def test_spent_budget_stops_the_run_with_the_first_death(tmp_path: Path):
    dying = nth(tmp_path / "lives", "print('the first words'); sys.exit(1)", then="sys.exit(7)")
    code, shown, launcher = run(
        tmp_path, restarts=2, datapipe=UNTIL_TERM, rollout=dying, trainer=UNTIL_TERM
    )
    assert code == 7
    assert "rollout-0 died (exit code 1: the first words); started again (1 of 2)" in shown
    assert "rollout-0 died (exit code 7); started again (2 of 2)" in shown
    last = shown[shown.index("error: ") :]
    assert "3 times without a further trained step" in last
    assert "rollout-0 died (exit code 1). Its last lines" in last
    assert "the first words" in last
    assert_nothing_survives(launcher)


def test_trained_step_resets_the_count_of_deaths(tmp_path: Path):
    lives, done = tmp_path / "lives", tmp_path / "done"
    dying = f"""
import os, sys
open({str(lives)!r}, "a").write("x")
step = len(open({str(lives)!r}).read())
{trains(0).replace('"step": 0', '"step": step')}
if step < 5: sys.exit(1)
open({str(done)!r}, "w")
"""
    ends = after(done)
    code, shown, _ = run(
        tmp_path, restarts=1, steps=9, datapipe=ends, rollout=dying + ends, trainer=ends
    )
    assert code == 0, shown
    assert shown.count("(1 of 1)") == 4


def rank_that_raises(statement: str, *, lives: Path, enough: int = 10**6) -> str:
    """Return a trainer whose rank 0 fails by a statement, before its life number `enough`."""
    return f"""
import os, sys
from arealite.base import exit_record
lives = {str(lives)!r}
if os.environ["RANK"] == "0":
    open(lives, "a").write("x")
    exit_record.claim()
    if os.path.getsize(lives) < {enough}:
        try:
            {statement}
        except Exception as error:
            exit_record.write(error)
            sys.exit(1)
else:
    {UNTIL_TERM.replace(chr(10), chr(10) + "    ")}
"""


def test_rank_that_fails_twice_with_one_exception_at_a_step_ends_the_run(tmp_path: Path):
    trainer = rank_that_raises("raise ValueError('no such column')", lives=tmp_path / "lives")
    code, shown, launcher = run(
        tmp_path, restarts=5, datapipe=UNTIL_TERM, rollout=UNTIL_TERM, trainer=trainer
    )
    assert code == 1
    assert shown.count("started again") == 1
    last = shown[shown.index("error: ") :]
    assert last.startswith("error: twice at the same step: trainer-0 died (exit code 1)")
    assert "ValueError: no such column" in last
    assert_nothing_survives(launcher)


@pytest.mark.parametrize(
    "statement",
    [
        "raise ConnectionResetError('by peer')",
        "raise MemoryError",
        "raise OSError(28, 'No space left on device')",
        "raise RuntimeError('CUDA error: an illegal memory access was encountered')",
        "raise type('OutOfMemoryError', (RuntimeError,), {})('of a device')",
        "raise ValueError(f'life {os.path.getsize(lives)}')",
        "from arealite.base.errors import RoleError; raise RoleError('the datapipe is gone')",
        "import signal; os.kill(os.getpid(), signal.SIGKILL)",
        "sys.exit(7)",
        "import torch.distributed; torch.distributed.barrier()",
    ],
)
def test_failures_that_a_restart_may_cure_keep_the_whole_budget(tmp_path: Path, statement: str):
    done = tmp_path / "lives"
    trainer = rank_that_raises(statement, lives=done, enough=4)
    trainer = trainer.replace(UNTIL_TERM.replace("\n", "\n    "), "pass")
    scripts = {"datapipe": UNTIL_TERM, "rollout": UNTIL_TERM, "trainer": trainer}
    _, shown, _ = run(tmp_path, restarts=3, drain_s=0.1, **scripts)
    assert "started again (3 of 3)" in shown
    assert "twice at the same step" not in shown


def test_trained_step_between_two_equal_exceptions_keeps_the_run(tmp_path: Path):
    lives = tmp_path / "lives"
    step = trains(0).replace('"step": 0', '"step": os.path.getsize(lives)')
    failing = f"exec({step!r}); raise ValueError('again')"
    trainer = rank_that_raises(failing, lives=lives, enough=4)
    trainer = trainer.replace(UNTIL_TERM.replace("\n", "\n    "), "pass")
    _, shown, _ = run(
        tmp_path,
        restarts=1,
        steps=9,
        drain_s=0.1,
        datapipe=UNTIL_TERM,
        rollout="pass",
        trainer=trainer,
    )
    assert shown.count("started again (1 of 1)") == 3


def test_exception_of_a_worker_keeps_the_whole_budget(tmp_path: Path):
    worker = rank_that_raises("raise ValueError('always')", lives=tmp_path / "lives")
    worker = worker.replace('os.environ["RANK"]', '"0"')
    code, shown, _ = run(
        tmp_path, restarts=2, datapipe=UNTIL_TERM, rollout=worker, trainer=UNTIL_TERM
    )
    assert code == 1
    assert "3 times without a further trained step" in shown


def test_error_of_a_companion_is_one_warning_and_the_run_continues(tmp_path: Path):
    async def serve() -> None:
        raise UserError("view.port=80 is in use.\nTake another port.")

    failed = tmp_path / "failed"
    scripts = {"datapipe": "pass", "rollout": "pass", "trainer": after(failed)}
    launcher = ScriptedLauncher(tmp_path, scripts)
    launcher._on_start = [lambda config, say: serve()]
    shown = list[str]()

    def say(line: str) -> None:
        shown.append(line)
        if "view.port" in line:
            failed.touch()

    launcher.progress.say = say  # type: ignore[method-assign]
    assert launcher.run() == 0, shown
    assert "warning: view.port=80 is in use. Take another port." in shown


@pytest.mark.parametrize("code", [2, 3])
def test_wrong_input_and_invariant_errors_are_not_retried(tmp_path: Path, code: int):
    scripts = {"datapipe": UNTIL_TERM, "rollout": UNTIL_TERM, "trainer": UNTIL_TERM}
    scripts["rollout"] = f"import sys; print('error: so it is'); sys.exit({code})"
    ended, shown, _ = run(tmp_path, restarts=5, **scripts)
    assert ended == code
    assert "error: so it is" in shown
    assert "again" not in shown


def test_failing_rank_with_the_best_reason_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervisor, "EXIT_REASON_S", 60.0)  # until both have ended
    trainer = """
import os, sys, time
time.sleep(0.4 * int(os.environ["RANK"]))
print("error: a promise is broken" if os.environ["RANK"] == "1" else "error: a peer is gone")
sys.exit(1 + 2 * int(os.environ["RANK"]))
"""
    code, shown, _ = run(
        tmp_path, restarts=5, datapipe=UNTIL_TERM, rollout=UNTIL_TERM, trainer=trainer
    )
    assert code == 3
    assert "a promise is broken" in shown


@pytest.mark.parametrize("role", ["datapipe", "rollout", "trainer"])
def test_clean_exit_before_the_end_of_the_run_is_a_death(
    tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervisor, "EARLY_S", 0.2)
    scripts = {"datapipe": UNTIL_TERM, "rollout": UNTIL_TERM, "trainer": UNTIL_TERM}
    leaves = "import os\nif os.environ.get('RANK', '0') != '0': exit()\n"
    scripts[role] = leaves + UNTIL_TERM if role == "trainer" else "pass"
    code, shown, _ = run(tmp_path, **scripts)
    assert code == 1
    name = "trainer-1" if role == "trainer" else f"{role}-0"
    assert f"{name} died (exited too early)" in shown


def test_roles_of_a_finished_run_may_exit_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervisor, "EARLY_S", 2.0)
    configs = tmp_path / "e" / "t" / "configs"
    configs.mkdir(parents=True)
    (configs / "000003.yaml").touch()  # `resume` writes this file: three steps are trained
    stays = "import time\ntime.sleep(5.0)"  # longer than EARLY_S
    code, shown, launcher = run(tmp_path, steps=3, datapipe="pass", rollout="pass", trainer=stays)
    assert_nothing_survives(launcher)
    assert (code, "died" in shown) == (0, False), shown


def test_worker_that_exits_before_the_last_evaluation_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervisor, "EARLY_S", 2.0)  # longer than the last step needs to appear
    trained, lives, done = tmp_path / "trained", tmp_path / "lives", tmp_path / "done"
    evaluated = trains(1).replace("reward/mean", "eval/reward")
    trainer = f"""
{trains(1)}
if os.environ["RANK"] == "1":
    open({str(trained)!r}, "w")
    exit()  # it has no part in the evaluation
lives = {str(lives)!r}
while not os.path.exists(lives) or len(open(lives).readlines()) < 2: time.sleep(0.01)
{evaluated}
open({str(done)!r}, "w")
"""
    rollout = nth(lives, after(trained), then=after(done))
    scripts = {"datapipe": after(done), "rollout": rollout, "trainer": trainer}
    code, shown, _ = launched(ScriptedLauncher(tmp_path, scripts, restarts=5, held_out="some"))
    assert code == 0, shown
    assert "rollout-0 died (exited too early); started again (1 of 5)" in shown
    assert shown.count("died") == 1, "a rank may leave when all is trained"


class EndMarkingLauncher(ScriptedLauncher):
    """Writes a file when it has observed the trainer's end."""

    def _terminate(self, role: str) -> None:
        super()._terminate(role)
        if self.trainer.ended:
            (self.paths.root / "seen").touch()


def test_role_that_dies_after_the_trainers_end_is_not_restarted(tmp_path: Path):
    seen = tmp_path / "e" / "t" / "seen"
    dying = f"{after(seen)}\nimport signal; {SUICIDE}"
    scripts = {"datapipe": dying, "rollout": after(seen), "trainer": "pass"}
    code, shown, _ = launched(EndMarkingLauncher(tmp_path, scripts, restarts=5))
    assert code == 0, shown
    assert "datapipe-0 died (killed by SIGKILL); no longer needed" in shown


def test_stopped_child_is_reported_killed_and_restarted(tmp_path: Path):
    lives, done = tmp_path / "lives", tmp_path / "done"
    shows = "from arealite.system.health import vitals; from pathlib import Path; "
    folder = tmp_path / "names" / getpass.getuser() / "e" / "t" / "vitals"
    shows += f"vitals.start('rollout-0', Path({str(folder)!r})); "
    stops = shows + "os.kill(os.getpid(), signal.SIGSTOP)"
    ends = f"open({str(done)!r}, 'w')\n" + after(done)
    launcher = ScriptedLauncher(
        tmp_path,
        {
            "datapipe": after(done),
            "rollout": nth(lives, stops, then=ends),
            "trainer": after(done),
        },
        restarts=5,
        silent_s=1.0,
    )
    launcher.vitals.mkdir(parents=True)
    stale = launcher.vitals / "trainer-7.json"
    stale.write_text("{}")
    shown: list[str] = []
    launcher.progress.say = shown.append  # type: ignore[method-assign]
    assert launcher.run() == 0, shown
    text = "\n".join(shown)
    assert "rollout-0 is stopped: " in text
    assert "rollout-0 died (killed by SIGKILL); started again (1 of 5)" in text
    assert not stale.exists()


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_child_stopped_before_its_first_vitals_is_reported_and_restarted(tmp_path: Path, role: str):
    lives, done = tmp_path / "lives", tmp_path / "done"
    stops = "os.kill(os.getpid(), signal.SIGSTOP)"
    ends = f"open({str(done)!r}, 'w')\n" + after(done)
    scripts = dict.fromkeys(["datapipe", "rollout", "trainer"], after(done))
    scripts[role] = nth(lives, stops, then=ends)
    if role == "trainer":  # rank 1 alone is stopped
        script_by_rank = {"0": after(done), "1": scripts[role]}
        scripts[role] = f"import os\nexec({script_by_rank}[os.environ['RANK']])"
    launcher = ScriptedLauncher(tmp_path, scripts, restarts=5, silent_s=1.0)
    launcher.vitals.mkdir(parents=True)
    shown: list[str] = []
    launcher.progress.say = shown.append  # type: ignore[method-assign]
    vitals.start("launcher-0", launcher.vitals)
    try:
        assert launcher.run() == 0, shown
    finally:
        assert vitals._recorder is not None
        vitals._recorder.close()
    text = "\n".join(shown)
    name = "trainer-1" if role == "trainer" else "rollout-0"
    assert f"{name} is stopped: SIGSTOP or a debugger stopped pid " in text
    assert f"{name} died (killed by SIGKILL); started again (1 of 5)" in text


# ---------------------------------------------------------------- stopping


@contextlib.contextmanager
def started(root: Path, **scripts: str) -> Iterator[tuple[subprocess.Popen[str], list[Any]]]:
    """Run a scripted launcher as a process; yield it and its children, all of them ready."""
    words = [word for pair in scripts.items() for word in pair]
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(root), *words]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    logs = [
        root / f"e/t/logs/{n}.log" for n in ("datapipe-0", "rollout-0", "trainer-0", "trainer-1")
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            ready = lambda: all(log.exists() and log.read_text() for log in logs)  # noqa: E731
            until(ready, what="the children to be ready")
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) == 4
            yield process, children
            assert process.poll() is not None
            until_exited(*children)
        finally:
            process.kill()


def test_trainer_finishes_its_step_after_one_ctrl_c(tmp_path: Path):
    done = tmp_path / "done"
    trainer = UNTIL_TERM + f"print('checkpoint'); open({str(done)!r}, 'w')"
    others = "print('ready', flush=True)\n" + after(done)
    with started(tmp_path, datapipe=others, rollout=others, trainer=trainer) as (run, _):
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
    assert "checkpoint" in (tmp_path / "e/t/logs/trainer-0.log").read_text()


def test_second_ctrl_c_kills_roles_that_ignore_signals(tmp_path: Path):
    scripts = {"datapipe": IGNORES_TERM, "rollout": IGNORES_TERM, "trainer": IGNORES_TERM}
    with started(tmp_path, **scripts) as (run, _):
        run.send_signal(signal.SIGINT)
        assert run.stdout is not None
        assert "stopping" in run.stdout.readline()
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130


def test_roles_are_killed_with_their_launcher(tmp_path: Path):
    dying = (
        "from arealite.impl.launcher.processes import die_with_parent\ndie_with_parent()\n"
        + IGNORES_TERM
    )
    with started(tmp_path, datapipe=dying, rollout=dying, trainer=dying) as (run, _):
        run.kill()
        run.wait(60)


def test_free_port_can_be_bound():
    assert 1024 <= free_port() < 65536
