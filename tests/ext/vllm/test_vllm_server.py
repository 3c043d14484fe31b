"""vLLM servers: translation of a config to command lines and environments or to a one-line error,
and real processes of a scripted stand-in for vLLM."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import arealite_vllm_guard
import pytest
import structlog.testing

from arealite.api.experiment_config import ServerConfig
from arealite.api.llm_server import UNTRUSTED
from arealite.api.server_protocol import Json
from arealite.base.errors import UserError
from arealite.ext.server_processes import server_process
from arealite.ext.server_processes.server_process import Launch, ServerProcess
from arealite.ext.vllm.vllm_control import NEEDS_RESTART
from arealite.ext.vllm.vllm_protocol import VLLMProtocol
from arealite.ext.vllm.vllm_server import INSIDE, REQUIRED_ARGUMENTS, SECRET_VARIABLE, VLLMServer
from arealite.impl.http_client import Pool
from arealite.system.names.name_registry import NameRegistry
from tests.fakes.server_program import make_quick, names, serving
from tests.fakes.vllm_program import VLLMProgram
from tests.fakes.vllm_program import vllm_config as config
from tests.waiting import eventually, has_exited


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)


@pytest.fixture
def program(tmp_path: Path) -> VLLMProgram:
    """Return a fake Python that has vLLM."""
    return VLLMProgram(tmp_path)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with a config.json alone."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder)
    return folder


def write_model(folder: Path, **fields: Any) -> None:
    model = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(model | fields))


def plan(settings: ServerConfig) -> list[Launch]:
    return VLLMServer(settings).plan()


def trial_keys(settings: ServerConfig) -> list[str]:
    """Return the texts that no other user may read: the secret and the token."""
    secret = NameRegistry.of(settings).secret
    assert secret is not None
    return [secret.key.hex(), hmac.digest(secret.key, b"http", "sha256").hex()]


def test_options_become_arguments_and_required_ones_come_last(
    program: VLLMProgram, model_folder: Path
):
    settings = config(
        program,
        model_folder,
        dtype="bfloat16",
        context_length=99,
        gpu_memory_utilization=0.5,
        tp=2,
        max_num_seqs=7,
        extra_args=["--api-key=k", "--middleware=theirs.Class", "--logprobs-mode=raw_logprobs"],
    )
    (launch,) = plan(settings)
    python, *words = launch.command(1234)
    assert python == str(program.path)
    assert words[:4] == ["-m", "vllm.entrypoints.cli.main", "serve", str(model_folder)]
    assert {
        "--dtype=bfloat16",
        "--max-model-len=99",
        "--gpu-memory-utilization=0.5",
        "--tensor-parallel-size=2",
        "--max-num-seqs=7",
        "--seed=1",
        "--enforce-eager",
        "--host=127.0.0.1",
        "--port=1234",
    } <= set(words)
    assert words[-len(REQUIRED_ARGUMENTS) :] == REQUIRED_ARGUMENTS
    # vLLM uses the last of equal arguments, and the last middleware runs first.
    assert words.index("--api-key=") > words.index("--api-key=k")
    assert words[-1] == "--middleware=arealite_vllm_guard.Guard"


def test_unset_options_are_not_passed_to_vllm(program: VLLMProgram, model_folder: Path):
    program.configure(gpus=1, version="0.32.0")
    (launch,) = plan(config(program, model_folder, device="cuda"))
    text = " ".join(launch.command(1))
    for flag in ("--max-model-len", "--gpu-memory", "--max-num-seqs", "--enforce-eager"):
        assert flag not in text
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert "VLLM_CPU_KVCACHE_SPACE" not in launch.environment


@pytest.mark.parametrize("is_eager", [True, False])
def test_enforce_eager_can_be_set(program: VLLMProgram, model_folder: Path, is_eager: bool):
    (launch,) = plan(config(program, model_folder, enforce_eager=is_eager))
    assert ("--enforce-eager" in launch.command(1)) == is_eager


def test_environment_has_what_the_modules_inside_need(
    program: VLLMProgram, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    settings = config(program, model_folder, kv_cache_gb=3, log_level="warning")
    (launch,) = plan(settings)
    variables = launch.environment
    assert variables["PYTHONPATH"] == f"{INSIDE}{os.pathsep}/theirs"
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert variables["VLLM_API_KEY"] == ""
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert variables["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert variables["VLLM_NO_USAGE_STATS"] == "1"
    assert variables["HF_HUB_OFFLINE"] == "0", "the user's own"
    secret_file = Path(variables[SECRET_VARIABLE])
    assert secret_file.read_text().strip() == trial_keys(settings)[0]


@pytest.mark.parametrize(
    ("enforce_eager", "compiles"), [(None, False), (True, False), (False, True)]
)
def test_cpu_server_compiles_its_sampler_only_if_it_is_not_eager(
    program: VLLMProgram,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    enforce_eager: bool | None,
    compiles: bool,
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    (launch,) = plan(config(program, model_folder, enforce_eager=enforce_eager))
    assert ("TORCHDYNAMO_DISABLE" not in launch.environment) == compiles


def test_server_of_a_trial_without_security_has_no_secret(
    program: VLLMProgram, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(SECRET_VARIABLE, "/theirs")
    settings = config(program, model_folder)
    object.__setattr__(settings.cluster, "security", False)
    (launch,) = plan(settings)
    assert launch.environment[SECRET_VARIABLE] == ""


def test_named_modules_are_in_the_folder_inside():
    assert arealite_vllm_guard.SECRET_VARIABLE == SECRET_VARIABLE
    for argument in REQUIRED_ARGUMENTS:
        _, _, target = argument.partition("=")
        module, _, name = target.partition(".")
        if module.startswith("arealite_"):
            assert f"class {name}" in (INSIDE / f"{module}.py").read_text()


@pytest.mark.parametrize(
    ("orders", "wrong", "text"),
    [
        ({"installed": False}, {}, "cannot run vLLM: it has no vllm. Name a Python that has it"),
        ({"version": "0.31.2+cpu"}, {}, "has vLLM 0.31.2+cpu, which does not report the version"),
        ({"version": "0.32.0"}, {}, "has vLLM 0.32.0, which is not built for a CPU"),
        ({}, {"device": "cuda"}, "1 servers of tp 1 x dp 1 need 1 GPUs, but 0 are visible"),
        ({}, {"python": "/no/such/python"}, "llm_server.vllm.python: /no/such/python cannot run"),
    ],
)
def test_python_that_cannot_run_a_server_is_refused_in_one_line(
    program: VLLMProgram,
    model_folder: Path,
    orders: dict[str, Any],
    wrong: dict[str, Any],
    text: str,
):
    program.configure(**orders)
    with pytest.raises(UserError) as caught:
        plan(config(program, model_folder, **wrong))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 64, "num_attention_heads": 4},
        {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 16},
        {"text_config": {"hidden_size": 64, "num_attention_heads": 4}},
    ],
)
def test_model_whose_heads_vllm_lacks_on_a_cpu_is_refused(
    program: VLLMProgram, model_folder: Path, fields: dict[str, Any]
):
    write_model(model_folder, **fields)
    with pytest.raises(UserError, match="attention heads of 16 numbers, but vLLM has only 32, 64,"):
        plan(config(program, model_folder))
    program.configure(gpus=1, version="0.32.0")
    assert plan(config(program, model_folder, device="cuda"))


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 128, "num_attention_heads": 4},
        {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 64},
        {"hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 8},
    ],
)
def test_model_whose_heads_vllm_has_on_a_cpu_is_accepted(
    program: VLLMProgram, model_folder: Path, fields: dict[str, Any]
):
    write_model(model_folder, **fields)
    assert plan(config(program, model_folder))


async def test_registered_server_has_the_fields_clients_need_and_shows_no_key(
    program: VLLMProgram, model_folder: Path
):
    settings = config(program, model_folder)
    async with serving(settings):
        (entry,) = names(settings)
        started = program.started()
        assert entry.value == {
            "address": f"http://{entry.id.replace('-', ':')}",
            "type": "vllm",
            "protocol": "vllm",
            "model_path": str(model_folder),
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 64,
            "context_length": 77,
            "dtype": "",
            "version": "default",
            "host": "127.0.0.1",
            "pid": started["pids"][0],
            "load": {"running": 0, "waiting": 0, "capacity": 0},
        }
        program.load(3, 4)
        program.answer("/weight_info", {"weight_version": "5"})
        load = {"running": 3, "waiting": 4, "capacity": 0}
        await eventually(
            lambda: (v := names(settings)[0].value)["version"] == "5" and v["load"] == load,
            "version 5 and the new load",
        )
        visible = json.dumps([started["arguments"], started["environment"], entry.value])
        for key in trial_keys(settings):
            assert key not in visible
        folder = started["environment"]["VLLM_RPC_BASE_PATH"]
        assert os.listdir(folder) == ["socket-1"] and len(folder) < 70
    assert not os.path.exists(folder)  # noqa: ASYNC240


async def test_server_that_only_a_restart_repairs_is_restarted_with_one_line(
    program: VLLMProgram, model_folder: Path
):
    settings = config(program, model_folder)
    with structlog.testing.capture_logs() as events:
        async with serving(settings):
            (before,) = names(settings)
            program.answer("/weight_info", {"weight_version": UNTRUSTED})
            (untrusted,) = await eventually(
                lambda: [e for e in names(settings) if e.value["version"] == UNTRUSTED],
                "the version of weights that the next update repairs",
            )
            assert untrusted.value["pid"] == before.value["pid"]
            program.answer("/weight_info", {"weight_version": NEEDS_RESTART})
            await eventually(lambda: has_exited(before.value["pid"]), "its end")
            program.answer("/weight_info", {"weight_version": "default"})
            (after,) = await eventually(
                lambda: [e for e in names(settings) if e.value["pid"] != before.value["pid"]],
                "its name after the restart",
            )
            assert after.id == before.id
            assert after.value["version"] == "default"
    losses = [event["error"] for event in events if event["event"] == "server lost"]
    assert "a failed update has broken its weights" in losses[0]


async def test_busy_server_that_answers_its_health_keeps_its_entry(
    program: VLLMProgram, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version is known only after a long load; it is silent without that for longer."""
    monkeypatch.setattr(server_process, "HEALTH_S", 0.01)
    settings = config(program, model_folder, silence_s=60.0)
    (launch,) = plan(settings)
    requested: list[str] = []
    with closing(Pool(1.0)) as pool:
        server = ServerProcess(launch, settings, pool)
        server._replied = -math.inf
        is_loaded = asyncio.Event()

        async def get(path: str, seconds: float, body: Json | None = None) -> bytes:
            requested.append(path)
            if path == "/weight_info":
                await is_loaded.wait()
            return b'{"weight_version": "7"}'

        monkeypatch.setattr(server, "_get", get)
        asking = asyncio.create_task(server._version())
        await eventually(lambda: "/health" in requested, "a request for its health")
        await eventually(lambda: server._value() is not None, "its entry")
        is_loaded.set()
        assert await asking == "7"
    assert requested.count("/weight_info") == 1


async def test_server_may_need_as_long_for_facts_about_itself_as_for_its_start(
    program: VLLMProgram, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the facts, it would look like a vLLM without routes for weights, and be killed."""
    settings = config(program, model_folder, start_timeout_s=500.0)
    (launch,) = plan(settings)
    limits_s = set[float]()
    with closing(Pool(1.0)) as pool:
        server = ServerProcess(launch, settings, pool)

        async def get(path: str, seconds: float, body: Json | None = None) -> bytes:
            limits_s.add(seconds)
            return json.dumps(program.orders["answers"][path.partition("?")[0]]).encode()

        monkeypatch.setattr(server, "_get", get)
        description = await server._description()
    assert description.context_length == 77
    assert limits_s == {500.0}


async def test_server_whose_engine_died_is_restarted(program: VLLMProgram, model_folder: Path):
    settings = config(program, model_folder)
    async with serving(settings):
        (before,) = names(settings)
        os.kill(before.value["pid"], signal.SIGKILL)
        (after,) = await eventually(
            lambda: [e for e in names(settings) if e.value["pid"] != before.value["pid"]],
            "its name after the restart",
        )
        assert after.id == before.id


async def test_server_that_closes_its_port_loses_its_entry_at_once_and_is_restarted(
    program: VLLMProgram, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM whose engine died waits for its open requests, perhaps for ever."""
    monkeypatch.setattr(server_process, "HEALTH_S", 0.1)
    settings = config(program, model_folder)
    async with serving(settings):
        (before,) = names(settings)
        pid = before.value["pid"]
        program.configure(closes=True)
        await eventually(lambda: not names(settings), "no entry")
        assert not has_exited(pid)
        program.configure(closes=False)
        with structlog.testing.capture_logs() as events:
            await eventually(lambda: has_exited(pid), "the end of the process")
            (after,) = await eventually(lambda: names(settings), "a restarted server")
    assert after.value["pid"] != pid
    (lost,) = [event for event in events if event["event"] == "server lost"]
    assert "it has closed its port, and did not exit" in lost["error"]


async def test_server_without_time_to_describe_itself_is_not_one_without_routes(
    program: VLLMProgram, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The time limit of a start counts, not that of a reply."""
    monkeypatch.setattr(VLLMProtocol, "status_s", 0.1)
    program.configure(hangs=["/server_info"])
    settings = config(program, model_folder, silence_s=0.3, start_timeout_s=3.0)
    with pytest.RaisesGroup(pytest.RaisesExc(UserError, match=r"waited 3\.0 s for http")):
        await VLLMServer(settings).serve()


async def test_server_that_dies_at_its_first_token_shows_the_end_of_its_log(
    program: VLLMProgram, model_folder: Path
):
    program.configure(exits={"1": 1}, says="RuntimeError: no such head size")
    with pytest.raises(ExceptionGroup) as caught:
        async with serving(config(program, model_folder)):
            pass
    assert "RuntimeError: no such head size" in str(caught.value.exceptions[0])


async def test_server_with_other_logprobs_is_refused_with_the_flag(
    program: VLLMProgram, model_folder: Path
):
    model_config = {"logprobs_mode": "raw_logprobs"}
    program.answer("/server_info", {"vllm_config": {"model_config": model_config}})
    with pytest.RaisesGroup(pytest.RaisesExc(UserError, match="--logprobs-mode processed")):
        await VLLMServer(config(program, model_folder)).serve()


async def test_sigterm_drains_running_requests(program: VLLMProgram, model_folder: Path):
    settings = config(program, model_folder, drain_timeout_s=600.0)
    async with serving(settings) as task:
        program.load(1, 0)
        pids = program.started()["pids"]
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: not names(settings), "the name to go first")
        await asyncio.sleep(3 * server_process.POLL_S)
        assert not program.terms() and not has_exited(pids[0]), "a request is running"
        program.load(0, 0)
        await task
        assert program.terms() == 1
        await eventually(lambda: has_exited(pids[0]), "its end")
