"""External servers: checked before a run, registered while it lasts, never stopped."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from arealite.api.experiment_config import ExperimentConfig, ModelConfig
from arealite.api.llm_server import ExternalServersConfig
from arealite.api.trial import ClusterConfig
from arealite.base.errors import UserError
from arealite.ext.external import external_servers
from arealite.system.names.name_registry import NameRegistry, with_externals
from tests.fakes.deadlines import WaitExpirer
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.server_kinds import kind as kind
from tests.fakes.sglang import FakeSGLang
from tests.waiting import eventually

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 320,
    "hidden_size": 32,
    "max_position_embeddings": 2048,
}


def experiment(folder: Path, *addresses: str, trial: str = "t") -> ExperimentConfig:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    return ExperimentConfig(
        trial_name=trial,
        cluster=ClusterConfig(
            name_root=str(folder / "names"), user="test", heartbeat_s=0.05, ttl_s=600.0
        ),
        model=ModelConfig(path=str(folder / "model")),
        llm_server=ExternalServersConfig(addresses=list(addresses)),
    )


def at(server: ScriptedServer) -> str:
    return server.url.removeprefix("http://")


async def examine(config: ExperimentConfig) -> Any:
    return await asyncio.to_thread(external_servers.examine, config, MODEL)


async def refusal(config: ExperimentConfig) -> str:
    with pytest.raises(UserError) as refused:
        await examine(config)
    return str(refused.value)


@asynccontextmanager
async def registering(
    config: ExperimentConfig, **options: Any
) -> AsyncIterator[Callable[..., Any]]:
    """Register the config's servers; yield a function that waits for a matching registry entry."""
    names = NameRegistry.of(config)

    async def named(like: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                for entry in names.list("llm_server"):
                    if like(entry.value):
                        return entry.value
                await asyncio.sleep(0.02)

    async def unnamed() -> None:
        async with asyncio.timeout(60):
            while names.list("llm_server"):  # noqa: ASYNC110  (files have no event)
                await asyncio.sleep(0.02)

    named.gone = unnamed  # type: ignore[attr-defined]
    named.now = lambda: names.list("llm_server")  # type: ignore[attr-defined]
    task = asyncio.create_task(external_servers.ExternalServers(config, **options).run())
    try:
        yield named
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert not names.list("llm_server")


@pytest.mark.parametrize(
    "address",
    ["localhost", "http://localhost:1", "h:0", "h:99999", ":80", "a b:80", "h:80/v1", "::1:80"],
)
async def test_malformed_address_is_refused(tmp_path: Path, address: str) -> None:
    assert "is not host:port" in await refusal(experiment(tmp_path, address))


@pytest.mark.parametrize("address", ["h:1", "10.0.0.7:30000", "my-host.net:65535", "[::1]:80"])
def test_host_names_and_ip_addresses_are_accepted(address: str) -> None:
    external_servers.check_form(address, [address])


async def test_duplicate_address_is_refused(tmp_path: Path) -> None:
    assert "given twice" in await refusal(experiment(tmp_path, "h:80", "h:80"))


async def test_error_names_every_unreachable_address(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
        async with FakeSGLang() as server:
            says = await refusal(experiment(tmp_path, at(server), nobody, "127.0.0.1:1"))
    first, second = says.splitlines()
    assert first.startswith(f"llm_server.addresses: {nobody}: the server cannot be reached")
    assert "127.0.0.1:1: the server cannot be reached" in second


async def test_error_names_a_server_that_accepts_connections_and_never_answers(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(external_servers, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        says = await refusal(experiment(tmp_path, f"127.0.0.1:{silent.getsockname()[1]}"))
    assert re.search(r"did not answer: external servers waited \d+\.\d s", says)


async def test_server_with_an_api_key_is_used_only_with_that_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ScriptedServer]
) -> None:
    async with kind(api_key="theirs") as server:
        config = experiment(tmp_path, at(server))
        assert "Set llm_server.api_key_env" in await refusal(config)
        servers = ExternalServersConfig(addresses=[at(server)], api_key_env="THEIR_KEY")
        config = replace(config, llm_server=servers)
        monkeypatch.delenv("THEIR_KEY", raising=False)
        assert "the environment has no THEIR_KEY" in await refusal(config)
        monkeypatch.setenv("THEIR_KEY", "ours")
        assert "Set llm_server.api_key_env" in await refusal(config)
        monkeypatch.setenv("THEIR_KEY", "theirs")
        (entry,) = await examine(config)
    assert "theirs" not in str(entry)


@asynccontextmanager
async def answering(answer: Callable[[str], str]) -> AsyncIterator[str]:
    """Run a server whose answers are a function of the path; yield its address."""

    async def reply(request: web.Request) -> web.Response:
        return web.Response(text=answer(request.path))

    app = web.Application()
    app.router.add_get("/{path:.*}", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_server_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    async with answering(lambda path: "<html>welcome</html>") as address:
        assert "it is no server of a kind that is known here" in await refusal(
            experiment(tmp_path, address)
        )


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/models", {"data": {"id": "m"}}),
        ("/v1/models", {"data": ["m"]}),
        ("/v1/models", {"data": "m"}),
        ("/v1/models", {"data": [{"max_model_len": "2048"}]}),
        ("/server_info", {"max_req_input_len": [7]}),
    ],
)
async def test_server_whose_models_have_another_form_is_refused_with_one_line(
    tmp_path: Path, path: str, answer: dict[str, Any]
) -> None:
    answers = {"/model_info": {"model_path": "m", "weight_version": "1"}, path: answer}
    async with answering(lambda path: json.dumps(answers.get(path, {}))) as address:
        says = await refusal(experiment(tmp_path, address))
    assert says.startswith(f"llm_server.addresses: {address}: its /v1/models or /server_info has")
    assert "\n" not in says


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"hidden_size": 64}, "its hidden_size is 64, model.path has 32"),
        ({"vocab_size": 300}, "its vocab_size is 300, model.path has 320"),
    ],
)
async def test_server_with_a_model_of_another_shape_is_refused(
    tmp_path: Path, theirs: dict[str, Any], says: str, kind: type[ScriptedServer]
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(MODEL | theirs))
    async with kind(model_path=str(tmp_path / "theirs")) as server:
        assert says in await refusal(experiment(tmp_path, at(server)))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"model_type": "llama"}, "its model_type is llama, model.path has qwen2"),
        ({"architectures": ["X"]}, "its architectures is ['X']"),
        ({"context_length": 4096}, "its context is 4096, the model's is 2048"),
        ({"context_length": None}, None),
    ],
)
def test_other_model_compares_type_architectures_and_context(
    entry: dict[str, Any], says: str | None
) -> None:
    base = {"model_path": "m", "architectures": None, "model_type": None, "context_length": 2048}
    said = external_servers.other_model(base | entry, MODEL)
    assert said is None if says is None else says in str(said)


async def test_server_in_use_by_another_trial_is_refused(tmp_path: Path) -> None:
    async with FakeSGLang() as server:
        config = experiment(tmp_path, at(server))
        other = experiment(tmp_path, trial="other")
        entry_id = external_servers.entry_id(at(server))
        theirs = NameRegistry.of(other)
        theirs.put("llm_server", entry_id, server.entry() | {"type": "external"})
        assert "arealite/other uses this server already" in await refusal(config)
        theirs.remove("llm_server", entry_id)
        ours = NameRegistry.of(config)
        ours.put("llm_server", entry_id, server.entry() | {"type": "external"})
        (found,) = await examine(config)  # left by an earlier run of this trial
        assert found.value["vocab_size"] == 320
        ours.put("llm_server", entry_id, server.entry() | {"type": "sglang"})
        assert "arealite/t uses this server already" in await refusal(config)


async def test_external_server_is_registered_while_it_answers(
    tmp_path: Path, kind: type[ScriptedServer]
) -> None:
    async with kind(version="80") as server:
        async with registering(experiment(tmp_path, at(server))) as named:
            entry = await named(lambda value: value["type"] == "external")
            assert entry["address"] == server.url
            assert entry["vocab_size"] == 320
            assert (entry["version"], server.version) == ("-1", "-1")
            server.version = "5"
            await named(lambda value: value["version"] == "5")
            await server.kill()
            await named.gone()
            await server.restart()
            again = await named(lambda value: value["version"] != "5")
            assert again["pid"] != entry["pid"]
        assert {path for path, _ in server.calls} <= {"/update_weight_version"}


async def test_server_used_without_updates_keeps_its_version(
    tmp_path: Path, kind: type[ScriptedServer]
) -> None:
    async with kind(version="80") as server:
        async with registering(experiment(tmp_path, at(server)), updates=False) as named:
            entry = await named(lambda value: value["type"] == "external")
            assert entry["version"] == "80"
        assert not server.calls


async def test_silent_external_server_is_removed_from_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expirer = WaitExpirer(monkeypatch, external_servers)
    async with (
        FakeSGLang() as server,
        registering(experiment(tmp_path, at(server))) as named,
    ):
        first = await named(lambda value: True)
        on, what = f"llm_server-{external_servers.entry_id(at(server))}", "model_info"
        server.on_hang = lambda: expirer.expire(on, what=what)
        server.fail_next("hang", path="/model_info")
        await named(lambda value: value["pid"] != first["pid"])
    assert expirer.expired == [600.0], "as long as a name lives"


async def test_server_that_returns_with_another_model_is_not_registered(
    tmp_path: Path, kind: type[ScriptedServer]
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(MODEL | {"hidden_size": 64}))
    async with kind() as server:
        config = experiment(tmp_path, at(server))
        async with registering(config) as named:
            await named(lambda value: True)
            await server.kill()
            server.model_path = str(tmp_path / "theirs")
            await named.gone()
            with capture_logs() as events:
                await server.restart()
                refused = lambda: any("its hidden_size is 64" in e.get("error", "") for e in events)  # noqa: E731
                await eventually(refused, "a look at the other model")
            assert not named.now()
            server.model_path = "m"
            await named(lambda value: True)


async def test_datapipe_registers_external_servers_while_it_runs(tmp_path: Path) -> None:
    over = asyncio.Event()
    async with FakeSGLang() as server:
        config = experiment(tmp_path, at(server))
        names = NameRegistry.of(config)
        async with asyncio.timeout(60):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(with_externals(config, over.wait()))  # type: ignore[arg-type]
                while not names.list("llm_server"):  # noqa: ASYNC110  (files have no event)
                    await asyncio.sleep(0.02)
                over.set()
        assert not names.list("llm_server")
        await with_externals(replace(config, llm_server=ExternalServersConfig()), over.wait())  # type: ignore[arg-type]
