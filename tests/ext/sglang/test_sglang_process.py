"""Servers that crash, become silent, fail to start or are stopped, as real processes of a
scripted stand-in for SGLang."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog.testing

from arealite.api.experiment_config import ServerConfig
from arealite.base.errors import DeadlineError, RoleError, UserError
from arealite.ext.server_processes import server_process
from arealite.ext.server_processes.server_process import ServerProcess
from arealite.ext.sglang.sglang_server import SGLangServer
from arealite.impl.http_client import Pool
from arealite.impl.launcher.processes import Child
from arealite.system.health import waits
from arealite.system.names.name_registry import NameRegistry
from tests.fakes.server_program import make_quick, names, serving, take_own_ports
from tests.fakes.sglang_program import Program, wrapper_config
from tests.waiting import eventually, has_exited, until, until_exited

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)


def quick_config(program: Program, model_folder: Path, **server: Any) -> ServerConfig:
    server = {"start_timeout_s": 60.0, "silence_s": 600.0, "drain_timeout_s": 0.2} | server
    return wrapper_config(program, model_folder, heartbeat_s=0.05, **server)


def gone(pids: list[int]) -> bool:
    return all(map(has_exited, pids))


async def test_registry_entry_has_the_fields_clients_need_and_follows_the_server(
    program: Program, model_folder: Path
):
    settings = quick_config(program, model_folder)
    async with serving(settings):
        (entry,) = names(settings)
        port = entry.value["address"].rsplit(":", 1)[1]
        assert entry.id == f"127.0.0.1-{port}"
        assert entry.value == {
            "address": f"http://127.0.0.1:{port}",
            "type": "sglang",
            "protocol": "sglang",
            "model_path": str(model_folder),
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 64,
            "context_length": 71,  # the context left for a prompt
            "dtype": None,
            "version": "default",
            "host": "127.0.0.1",
            "pid": program.started()["pids"][0],
            "load": {"running": 0, "waiting": 0, "capacity": 32},
        }
        program.load(3, 4)
        program.configure(
            answers=program.orders["answers"] | {"/model_info": {"weight_version": "5"}}
        )
        load = {"running": 3, "waiting": 4, "capacity": 32}
        await eventually(
            lambda: (v := names(settings)[0].value)["version"] == "5" and v["load"] == load,
            "version 5 and the new load, which are asked for side by side",
        )
        log = program.folder / f"runs/arealite/t/logs/llm_server-{entry.id}.log"
        assert "hello from the stand-in" in log.read_text()


async def test_server_without_load_endpoints_is_registered_without_load(
    program: Program, model_folder: Path
):
    missing = {"/v1/loads": None, "/server_info": None}
    program.configure(answers=program.orders["answers"] | missing)
    settings = quick_config(program, model_folder)
    async with serving(settings):
        assert names(settings)[0].value["load"] is None
        assert names(settings)[0].value["context_length"] == 77, "the model's own"
        program.configure(answers=program.orders["answers"] | {"/v1/loads": {"nonsense": 1}})
        told = program.orders["answers"] | {"/model_info": {"weight_version": "5"}}
        program.configure(answers=told)  # the load is polled after this
        value = await eventually(
            lambda: (v := names(settings)[0].value)["version"] == "5" and v, "version 5"
        )
        assert value["load"] is None


async def test_server_whose_models_have_another_form_cannot_be_used(
    program: Program, model_folder: Path
):
    program.configure(answers=program.orders["answers"] | {"/v1/models": {"data": "m"}})
    settings = quick_config(program, model_folder)
    with pytest.RaisesGroup(pytest.RaisesExc(UserError, match="/v1/models or /server_info has")):
        await SGLangServer(settings).serve()


@pytest.fixture(autouse=True)
def waits_for_servers() -> Iterator[None]:
    """Remove the wait that a server that was given up keeps until its process exits."""
    yield
    waits.table -= {wait for wait in waits.table if wait.owner == waits.SUPERVISOR}


async def test_server_is_shown_as_starting_and_restarting_until_it_answers(
    program: Program, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    shown = lambda: [w.event for w in waits.table if w.owner == waits.SUPERVISOR]  # noqa: E731
    monkeypatch.setattr(server_process, "PAUSES_S", (600.0,))
    settings = quick_config(program, model_folder)
    limit = settings.llm_server.sglang.max_restarts
    async with serving(settings):
        await eventually(lambda: not shown(), "its first name to be noted")
        os.kill(names(settings)[0].value["pid"], signal.SIGKILL)
        await eventually(lambda: shown() == [f"restart 1 of {limit}"], "its restart")


async def test_killed_server_is_unregistered_at_once_and_restarted(
    program: Program, model_folder: Path
):
    settings = quick_config(program, model_folder)
    program.configure(grandchild=True)
    async with serving(settings):
        (before,) = names(settings)
        group = program.started()["pids"]
        os.kill(before.value["pid"], signal.SIGKILL)
        await eventually(lambda: not names(settings), "the name to go, long before silence_s")
        await eventually(lambda: gone(group), "the rest of the group to die")
        (after,) = await eventually(lambda: names(settings), "the name to come back")
        assert after.id == before.id
        assert after.value["pid"] != before.value["pid"]


async def test_failed_restart_counts_as_a_death(
    program: Program, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    spawn = server_process.spawn

    async def refuse(name: str, *_: Any, **__: Any) -> Child:
        monkeypatch.setattr(server_process, "spawn", spawn)
        raise UserError(f"{name} cannot be started: no memory")

    settings = quick_config(program, model_folder)
    with structlog.testing.capture_logs() as events:
        async with serving(settings):
            (before,) = names(settings)
            monkeypatch.setattr(server_process, "spawn", refuse)
            os.kill(before.value["pid"], signal.SIGKILL)
            await eventually(lambda: not names(settings), "the name to go")
            await eventually(lambda: names(settings), "the name to come back")
    assert [e["restart_in_s"] for e in events if e["event"] == "server lost"] == [0.1, 0.2]


async def test_registry_entry_of_a_silent_server_expires(program: Program, model_folder: Path):
    settings = quick_config(program, model_folder)
    object.__setattr__(settings.cluster, "ttl_s", 0.5)
    async with serving(settings):
        registry = NameRegistry.of(settings)
        await eventually(lambda: registry.list("llm_server"), "its name")
        program.configure(hangs=["/model_info"])
        await eventually(lambda: not registry.list("llm_server"), "its name to die")
        assert names(settings), "it is started again after silence_s only"
        program.configure(hangs=[])


async def test_restart_uses_another_port_if_the_old_one_is_taken(
    program: Program, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_process, "PAUSES_S", (0.5,))
    settings = quick_config(program, model_folder)
    async with serving(settings):
        (before,) = names(settings)
        port = int(before.value["address"].rsplit(":", 1)[1])
        os.kill(before.value["pid"], signal.SIGKILL)
        await eventually(lambda: not names(settings), "the name to go")
        with socket.create_server(("127.0.0.1", port)):
            (after,) = await eventually(lambda: names(settings), "another name")
        assert after.id != before.id


async def test_restart_delay_grows_until_a_server_stays_up(
    program: Program, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_process, "PAUSES_S", (0.02, 0.04, 0.08, 0.15))
    settings = quick_config(program, model_folder)
    with structlog.testing.capture_logs() as events:
        async with serving(settings):

            def pauses() -> list[float]:
                return [e["restart_in_s"] for e in events if e["event"] == "server lost"]

            program.configure(exits={"1": 9})
            os.kill(names(settings)[0].value["pid"], signal.SIGKILL)
            await eventually(lambda: len(pauses()) >= 6, "six deaths")
            assert pauses()[:6] == [0.02, 0.04, 0.08, 0.15, 0.15, 0.15]
            assert any("exit code 9" in e.get("error", "") for e in events)
            program.configure(exits={})
            (entry,) = await eventually(lambda: names(settings), "the name to come back")
            monkeypatch.setattr(server_process, "STEADY_S", 0.0)
            deaths = len(pauses())
            os.kill(entry.value["pid"], signal.SIGKILL)
            await eventually(lambda: len(pauses()) > deaths, "another death")
            assert pauses()[-1] == 0.02, "it had held, so this is its first death again"


async def test_server_is_given_up_after_max_restarts(
    program: Program, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_process, "PAUSES_S", (0.02,))
    settings = quick_config(program, model_folder, max_restarts=2)
    with (
        structlog.testing.capture_logs() as events,
        pytest.raises(RoleError, match="every SGLang"),
    ):
        async with serving(settings) as task:
            program.configure(exits={"1": 9})
            os.kill(names(settings)[0].value["pid"], signal.SIGKILL)
            await task
    (wait,) = [each for each in waits.table if each.owner == waits.SUPERVISOR]
    assert wait.event == "given up after 3 deaths"
    assert " died (exit code 9: " in wait.detail and "\n" not in wait.detail, "the last death"
    assert wait.on.startswith("llm_server-127.0.0.1-")
    (end,) = [e for e in events if e["event"] == "server given up"]
    assert end["deaths"] == 3
    assert "SIGKILL" in end["first"], "the first death, not the last"


async def test_stop_signal_reports_servers_that_were_given_up_before(
    program: Program, model_folder: Path
):
    settings = quick_config(program, model_folder, num_servers=2, max_restarts=0)
    with structlog.testing.capture_logs() as events:
        async with serving(settings, count=2) as task:
            os.kill(program.started(1)["pids"][0], signal.SIGKILL)
            given_up = lambda: any(e["event"] == "server given up" for e in events)  # noqa: E731
            await eventually(given_up, "the end of one server")
            os.kill(os.getpid(), signal.SIGINT)
            async with asyncio.timeout(60):
                await task
    words = program.started(1)["arguments"]
    port = words[words.index("--port") + 1]
    (end,) = [e for e in events if e["event"] == "servers had been given up before the stop"]
    assert end["servers"] == [f"llm_server:{port}"]


@pytest.mark.parametrize("how", ["stopped", "refusing", "hanging"])
async def test_silent_server_is_killed_and_restarted(
    program: Program, model_folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    monkeypatch.setattr(server_process, "LOAD_S", 1.0)  # otherwise a load request may hang, too
    settings = quick_config(program, model_folder)
    options, asked = settings.llm_server.sglang, list[float]()
    bounded = ServerProcess._bounded

    def noted(server: ServerProcess, what: str, seconds: float, **more: Any) -> Any:
        asked.append(seconds)
        return bounded(server, what, seconds, **more)

    monkeypatch.setattr(ServerProcess, "_bounded", noted)
    async with serving(settings):
        object.__setattr__(options, "silence_s", 1.5)
        (entry,) = await eventually(lambda: 1.5 in asked and names(settings), "the next question")
        pid = entry.value["pid"]
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)
        elif how == "refusing":
            program.configure(sick=["1"])
        else:
            program.configure(hangs=["/model_info"])
        await eventually(lambda: gone([pid]), "the process to die")
        assert pid not in [entry.value["pid"] for entry in names(settings)]
        object.__setattr__(options, "silence_s", 600.0)
        program.configure(sick=[], hangs=[])
        (entry,) = await eventually(lambda: names(settings), "the name to come back")
        assert entry.value["pid"] != pid


async def test_silence_deadline_fires_if_a_probe_ends_at_the_same_time(
    program: Program, model_folder: Path
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = quick_config(program, model_folder, silence_s=0.9)
        with closing(Pool(60.0)) as pool:
            (launch,) = SGLangServer(settings).plan()
            server = ServerProcess(launch, settings, pool)
            server.port = silent.getsockname()[1]
            # Block the loop inside a probe beyond its deadline (0.3 s) and the silence deadline.
            asyncio.get_running_loop().call_later(0.1, time.sleep, 1.0)
            with pytest.raises(DeadlineError):
                await server._version()


async def test_server_that_hangs_only_on_loads_is_not_silent(
    program: Program, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_process, "LOAD_S", 0.5)
    settings = quick_config(program, model_folder)
    async with serving(settings):
        (entry,) = names(settings)
        program.configure(hangs=["/v1/loads"])
        await eventually(
            lambda: [e for e in names(settings) if e.value["load"] is None], "a name without load"
        )
        told = program.orders["answers"] | {"/model_info": {"weight_version": "6"}}
        program.configure(answers=told)
        (later,) = await eventually(
            lambda: [e for e in names(settings) if e.value["version"] == "6"], "its new version"
        )
        assert later.value["pid"] == entry.value["pid"]


@pytest.mark.parametrize(
    ("orders", "timeout_s", "text"),
    [
        ({"exits": {"2": 3}}, 600.0, "died (exit code 3)"),
        ({"sick": ["2"]}, 1.0, "/health"),
        ({"hangs": ["/generate"]}, 1.0, "/health"),
    ],
)
async def test_failed_start_of_one_server_stops_all_and_shows_its_last_log_lines(
    program: Program,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    orders: dict[str, Any],
    timeout_s: float,
    text: str,
):
    healthy = ServerProcess._healthy

    async def once_both_run(server: ServerProcess) -> None:
        if not orders.get("exits"):
            runs = [program.folder / f"started-{seed}.json" for seed in (1, 2)]
            await eventually(lambda: all(run.exists() for run in runs), "both to run")
        await healthy(server)

    monkeypatch.setattr(ServerProcess, "_healthy", once_both_run)
    program.configure(
        says="line one\nno memory is left for the KV cache", grandchild=True, **orders
    )
    settings = quick_config(program, model_folder, num_servers=2, start_timeout_s=timeout_s)
    with pytest.raises(ExceptionGroup) as caught:
        async with serving(settings, count=2):
            pass
    error = caught.value.exceptions[0]
    assert isinstance(error, UserError)
    assert text in str(error)
    assert "no memory is left for the KV cache" in str(error)
    assert "/logs/llm_server-127.0.0.1-" in str(error)
    if not orders.get("exits"):  # the 600 s do not delay the test: a dead process is not waited for
        await eventually(lambda: gone(program.started(2)["pids"]), "the sick one to end")
        await eventually(lambda: gone(program.started(1)["pids"]), "the healthy one to end")


async def test_sigterm_drains_running_requests(program: Program, model_folder: Path):
    settings = quick_config(program, model_folder, drain_timeout_s=600.0)
    program.configure(grandchild=True)
    async with serving(settings) as task:
        program.load(1, 0)
        pids = program.started()["pids"]
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: not names(settings), "the name to go first")
        await asyncio.sleep(3 * server_process.POLL_S)
        assert not program.terms() and not gone(pids), "a request is running"
        program.load(0, 0)
        await task
        assert program.terms() == 1
        await eventually(lambda: gone(pids), "the group to end")


async def test_server_that_ignores_sigterm_is_killed_after_the_timeout(
    program: Program, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    send = Child.send

    def heard(child: Child, number: int) -> None:
        send(child, number)
        until(program.terms, what="the signal to come")

    monkeypatch.setattr(Child, "send", heard)
    monkeypatch.setattr(server_process, "TERMINATE_S", 0.5)
    program.configure(ignores_term=True, grandchild=True)
    settings = quick_config(program, model_folder)
    async with serving(settings) as task:
        program.load(1, 1)
        pids = program.started()["pids"]
        begin = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        await task
        assert time.monotonic() - begin >= 0.7, "drain_timeout_s, then TERMINATE_S"
        assert program.terms() == 1
        await eventually(lambda: gone(pids), "the group to end")


async def test_cancellation_during_a_start_leaves_no_server_process(
    program: Program, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    create, made = asyncio.create_subprocess_exec, list[asyncio.subprocess.Process]()

    async def create_cancelled(*words: Any, **options: Any) -> asyncio.subprocess.Process:
        task.cancel()
        made.append(await create(*words, **options))
        return made[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_cancelled)
    task = asyncio.ensure_future(SGLangServer(quick_config(program, model_folder)).serve())
    await asyncio.wait((task,))
    assert task.cancelled()
    assert [process.returncode for process in made] == [-signal.SIGKILL]


async def test_second_signal_ends_the_drain(
    program: Program, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    leave, leaving = ServerProcess._drain, asyncio.Event()

    async def tell(server: ServerProcess, child: Child) -> None:
        leaving.set()
        await leave(server, child)

    monkeypatch.setattr(ServerProcess, "_drain", tell)
    settings = quick_config(program, model_folder, drain_timeout_s=600.0)
    async with serving(settings) as task:
        program.load(1, 0)
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(60):
            await leaving.wait()
        assert not names(settings)
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(60):
            await task
        await eventually(lambda: gone(program.started()["pids"]), "the group to end")


@contextmanager
def command(
    program: Program, model_folder: Path, *overrides: str
) -> Iterator[subprocess.Popen[str]]:
    """Run the command line; yield when the server is ready or the command has exited."""
    words = [
        "llm_server.type=sglang",
        f"llm_server.sglang.python={program.path}",
        "llm_server.sglang.device=cpu",
        f"llm_server.port={take_own_ports('127.0.0.1', 0, 2)[0]}",
        f"model.path={model_folder}",
        f"cluster.name_root={program.folder / 'names'}",
        f"cluster.run_root={program.folder / 'runs'}",
        "cluster.user=u",
        "trial_name=t",
        *overrides,
    ]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "arealite" / "launch_llm_server.py"), *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    registry = NameRegistry(root=program.folder / "names/u/arealite/t", ttl_s=600.0)
    try:
        until(lambda: process.poll() is not None or registry.list("llm_server"), what="a name")
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.processes
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0)])
def test_command_exits_with_0_after_a_signal(
    program: Program, model_folder: Path, number: signal.Signals, code: int
):
    program.configure(grandchild=True)
    with command(program, model_folder) as process:
        pids = program.started()["pids"]
        process.send_signal(number)
        _, shown = process.communicate(timeout=60)
        assert process.returncode == code, shown
        assert "server ready" in shown and "logs/llm_server-127.0.0.1-" in shown
    until(lambda: gone(pids), what="the group to end")


@pytest.mark.processes
def test_killed_command_leaves_no_process(program: Program, model_folder: Path):
    program.configure(grandchild=True, ignores_term=True)
    with command(program, model_folder, "llm_server.sglang.num_servers=2") as process:
        files = [program.folder / f"started-{seed}.json" for seed in (1, 2)]
        until(lambda: all(file.exists() for file in files), what="both servers")
        pids = program.started(1)["pids"] + program.started(2)["pids"]
        group = psutil.Process(process.pid).children(recursive=True)
        assert len(pids) == 4 and {p.pid for p in group} >= set(pids)
        process.kill()
        process.wait()
        until_exited(*group)


@pytest.mark.processes
def test_failed_start_prints_the_error_without_a_traceback(program: Program, model_folder: Path):
    program.configure(says="Traceback of SGLang's\nRuntimeError: no such dtype", exits={"1": 1})
    with command(program, model_folder) as process:
        _, shown = process.communicate(timeout=60)
    assert process.returncode == 2
    error = shown[shown.index("error: ") :]
    assert "died (exit code 1)" in error and "RuntimeError: no such dtype" in error
    assert "Traceback (most recent" not in shown
