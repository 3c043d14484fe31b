"""Environments in containers: started, found, replaced, removed; Docker itself is a fake."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import DeadlineError, UserError
from arealite.cli import configs, preflight
from arealite.ext.hosting.client import docker as docker_module
from arealite.ext.wrappers.play import make
from arealite.impl.rollout.collector import Collector
from tests.ext.hosting.client.test_children import pid_of
from tests.fakes import docker_program
from tests.fakes.env_servers import collecting, failed, played
from tests.waiting import eventually, has_exited, until_exited

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[4]
COLLECTOR = "trainer.ppo.collector"
LEFTOVER = f"arealite-{2**30}-ab"
"""Name of a container whose worker has exited: no process has this id."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put the fake `docker` on the PATH; return the folder of its containers."""
    folder, program = tmp_path / "containers", tmp_path / "docker"
    folder.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {docker_program.__name__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield folder
    for left in containers(folder):  # of a failed test
        os.killpg(left["pid"], signal.SIGKILL)


@asynccontextmanager
async def contained(env: str = "host_moods", **runtime: Any) -> AsyncIterator[Collector]:
    """Yield a collector whose environment runs in containers."""
    options = {"type": "docker", "image": f"env/{env}", "wait_s": 200.0} | runtime
    async with collecting(env, **options) as collector:
        yield collector


def containers(state: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in state.iterdir()]


async def test_episode_runs_in_a_container_that_close_removes(state: Path) -> None:
    limits = {"max_memory_mb": 512, "docker_args": ["--cpus=2"], "port": 8123}
    async with contained(**limits) as collector:
        pid = await pid_of(collector)
        (one,) = containers(state)
        assert one["pid"] == pid
        assert {"--rm", "--memory=512m", "--cpus=2"} <= {*one["words"]}
        (published,) = [word for word in one["words"] if word.startswith("--publish=")]
        assert published.startswith("--publish=127.0.0.1:")
        assert published.endswith(":8123")
    until_exited(pid)
    assert not containers(state)


async def test_killed_container_fails_its_episode_and_is_replaced(state: Path) -> None:
    async with contained() as collector:
        first = await pid_of(collector)
        assert failed(await played(collector, "die")) == "env_server_lost"
        second = await pid_of(collector)
        assert first != second
        os.kill(second, signal.SIGKILL)
        await eventually(lambda: has_exited(second))
        assert await pid_of(collector) not in (first, second)
        assert len(containers(state)) == 1


WORKER = """
import asyncio
from tests.ext.hosting.client.test_docker import contained

async def main():
    async with contained() as collector:
        print("up", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("is_guard_killed", [False, True])
async def test_containers_of_a_killed_worker_are_removed(
    state: Path, is_guard_killed: bool
) -> None:
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert worker.stdout is not None
    while (line := await worker.stdout.readline()) != b"up\n":
        assert line, "the worker exited"
    (one,) = containers(state)
    if is_guard_killed:  # nothing of the worker is left, as after the end of its job
        for child in psutil.Process(worker.pid).children():
            os.killpg(child.pid, signal.SIGKILL)
    worker.kill()
    await worker.wait()
    if is_guard_killed:
        assert not has_exited(one["pid"])
        async with contained() as collector:
            until_exited(one["pid"])
            assert await pid_of(collector) != one["pid"]
    await eventually(lambda: has_exited(one["pid"]))
    await eventually(lambda: not containers(state))


async def test_leftover_container_that_cannot_be_removed_does_not_stop_the_start(
    state: Path, tmp_path: Path
) -> None:
    program = tmp_path / "busy"
    program.write_text(
        f"#!/bin/sh\n[ $1$2$3 = rm--force{LEFTOVER} ] && exit 1\n"
        f'[ $1 = ps ] && exec echo {LEFTOVER}\nexec {tmp_path}/docker "$@"\n'
    )
    program.chmod(0o755)
    async with contained(docker=str(program)) as collector:
        assert await pid_of(collector)
    assert not containers(state)


async def test_container_that_exits_or_is_mute_is_a_user_error(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"image=broken does not answer .*: exit code 1; its error"):
        async with contained(image="broken"):
            pass
    usual = docker_module.START_S
    monkeypatch.setattr(docker_module, "START_S", 0.5)
    what = r"mute does not answer .health at port 8000 .*port.: collector waited"
    with pytest.raises(UserError, match=what) as caught:
        async with contained(image="mute"):
            pass
    late = caught.value.__cause__
    assert isinstance(late, DeadlineError)
    assert 0.49 < late.seconds < usual, "a busy machine waits longer than asked"
    assert str(caught.value).endswith(f": collector waited {late.seconds:.1f} s for its server.")
    assert not containers(state)


def test_openenv_environment_of_an_image_is_played_from_python(state: Path) -> None:
    runtime = {"type": "docker", "image": "env/host_steps"}
    options = {"action": {"text": "{text}"}, "observation": ["content"]}
    with make("openenv", runtime=runtime, **options) as env:
        (request,) = env.reset(seed=1)
        assert str(request.observation).startswith("Act in the environment")
        (request,) = env.step("hello")
        assert (str(request.observation), request.reward) == ("step 1: hello", 0.5)
        (request,) = env.step("end")
        assert request.done
        assert len(containers(state)) == 1
    assert not containers(state)


def checked(*words: str) -> None:
    """Check a run's options before it starts, with an environment in containers."""
    env = [f"{COLLECTOR}.env.type=code", f"{COLLECTOR}.env.runtime.type=docker"]
    overrides = [*env, *(f"{COLLECTOR}.env.runtime.{word}" for word in words)]
    preflight.check_envs(configs.load(ExperimentConfig, [], overrides))


def test_missing_image_program_or_daemon_is_one_line_before_the_run(tmp_path: Path) -> None:
    checked("image=env/code")
    with pytest.raises(UserError, match=r"env.runtime.image='': .*Set env.runtime.image=NAME"):
        checked()
    with pytest.raises(UserError, match=r"env.runtime.image='--privileged'"):
        checked("image=--privileged")
    with pytest.raises(UserError, match=r"No such image: nowhere\. Start Docker .* pull or build"):
        checked("image=nowhere")
    with pytest.raises(UserError, match=r"`none image inspect a` failed: .*'none'.*subprocess"):
        checked("image=a", "docker=none")
    dead = tmp_path / "dead"
    dead.write_text("#!/bin/sh\necho 'Is the docker daemon running?' >&2\nexit 1\n")
    dead.chmod(0o755)
    with pytest.raises(UserError, match="failed: Is the docker daemon running") as raised:
        checked("image=a", f"docker={dead}")
    assert "\n" not in str(raised.value)


def test_silent_daemon_is_one_line_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho 'connecting …' >&2\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setattr(docker_module, "COMMAND_S", 1.0)
    with pytest.raises(UserError, match=r"failed: Command .* timed out after 1.0 seconds\. Start"):
        checked("image=a", f"docker={silent}")


def test_image_name_reaches_no_shell(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such image"):
        checked(f"image='a; touch {tmp_path}/owned'")
    assert not (tmp_path / "owned").exists()
