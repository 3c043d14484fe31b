"""The supervisor of a server with scripted servers: it restarts them and stops on a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.waiting import has_exited, spawned, until, until_exited

RUN = """
import sys
from arealite.api.experiment_config import ServerConfig
from arealite.api.trial import ClusterConfig
from arealite.ext.embedded import server_supervisor
from arealite.impl.launcher import supervisor
supervisor.PAUSES_S = (0.0, 0.02)
server_supervisor.TERMINATE_S = float(sys.argv[3])
config = ServerConfig(cluster=ClusterConfig(name_root=sys.argv[1]))
sys.exit(server_supervisor.supervise(config, [sys.executable, "-c", sys.argv[2], sys.argv[1]]))
"""
BEGIN = """
import os, signal, sys, threading
from arealite.impl.launcher.processes import die_with_parent
assert die_with_parent()
lives = os.path.join(sys.argv[1], "lives")
open(lives, "a").write(f"{os.getpid()}\\n")
life = len(open(lives).read().split())
"""
NAMED = """
from arealite.api.experiment_config import ServerConfig
from arealite.api.trial import ClusterConfig
from arealite.system.names.name_registry import NameRegistry
names = NameRegistry.of(ServerConfig(cluster=ClusterConfig(name_root=sys.argv[1])))
names.put("llm_server", f"x-{os.getpid()}", {"pid": os.getpid(), "host": "127.0.0.1"})
"""
SERVES = BEGIN + (
    "over = threading.Event(); signal.signal(signal.SIGTERM, lambda *_: over.set())\n"
    "open(sys.argv[1] + '/ready', 'a').write('x'); over.wait(600); print('gently')"
)
DEAF = SERVES.replace("lambda *_: over.set()", "signal.SIG_IGN")


def kept(
    folder: Path, script: str, *, terminate_s: float = 120.0
) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RUN, str(folder), script, str(terminate_s)]
    return spawned(command, os.environ | {"PYTHONPATH": os.getcwd()})


def lives(folder: Path) -> list[int]:
    file = folder / "lives"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def ready(folder: Path, count: int) -> None:
    file = folder / "ready"
    until(lambda: file.exists() and len(file.read_text()) == count, what=f"life {count}")


def shown(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read()


def test_killed_server_is_restarted_and_exits_on_sigterm(tmp_path: Path):
    with kept(tmp_path, SERVES) as parent:
        for count in (1, 2):
            ready(tmp_path, count)
            os.kill(lives(tmp_path)[-1], signal.SIGKILL)
        ready(tmp_path, 3)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(60) == 0
        says = shown(parent)
    assert "llm_server died (killed by SIGKILL); started again (1 of 5)" in says
    assert "started again (2 of 5)" in says
    assert says.endswith("gently\n")
    assert len(set(lives(tmp_path))) == 3
    assert all(map(has_exited, lives(tmp_path)))


def test_server_that_ignores_sigterm_is_killed(tmp_path: Path):
    with kept(tmp_path, DEAF, terminate_s=0.5) as parent:
        ready(tmp_path, 1)
        parent.send_signal(signal.SIGINT)
        assert parent.wait(60) == 0
    assert has_exited(lives(tmp_path)[0])


def test_server_is_killed_with_its_parent(tmp_path: Path):
    with kept(tmp_path, SERVES) as parent:
        ready(tmp_path, 1)
        parent.kill()
        parent.wait(60)
        until_exited(lives(tmp_path)[0])


@pytest.mark.parametrize("code", [0, 2, 3, 130])
def test_server_is_not_restarted_after_some_exit_codes(tmp_path: Path, code: int):
    with kept(tmp_path, BEGIN + f"print('error: why'); sys.exit({code})") as parent:
        assert parent.wait(60) == code
        assert shown(parent) == "error: why\n"
    assert len(lives(tmp_path)) == 1


def test_server_that_never_serves_is_given_up(tmp_path: Path):
    dying = BEGIN + "sys.exit(4 if life < 6 else 7)"
    with kept(tmp_path, dying) as parent:
        assert parent.wait(240) == 7
        says = shown(parent)
    assert len(lives(tmp_path)) == 6
    assert "llm_server died (exit code 4); started again (5 of 5)" in says
    assert says.splitlines()[-1].startswith("error: llm_server died (exit code 7)")


def test_server_that_served_has_a_new_count_and_its_name_is_removed(tmp_path: Path):
    dying = BEGIN + NAMED + "sys.exit(4 if life < 8 else 0)"
    with kept(tmp_path, dying) as parent:
        assert parent.wait(240) == 0
        says = shown(parent)
    assert says.count("started again (1 of 5)") == 7
    assert not list(tmp_path.rglob("llm_server/*.json"))
