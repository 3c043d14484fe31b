"""The servers of a LoRA run are started so that they load its adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.api.hooks import RunFacts
from arealite.base.errors import UserError
from arealite.cli import configs
from arealite.ext.server_processes.sent_adapters import check_run
from arealite.ext.server_processes.server_group import ProbedPython
from arealite.ext.sglang.sglang_server import SGLangServer
from arealite.ext.vllm.vllm_server import VLLMServer
from tests.models import tiny_model

LORA = "trainer.ppo.engine.fsdp.lora"
SERVERS = "launcher.llm_servers=1"
PYTHON = ProbedPython(path="python", num_gpus=0, program_version="0.32.0")
Servers = Callable[..., ServerConfig]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., ExperimentConfig]:
    """Return a function that makes the config of a run of one type of servers."""
    model = tiny_model(tmp_path / "model")

    def make(kind: str, *words: str) -> ExperimentConfig:
        given = [f"model.path={model}", f"launcher.server_args=[llm_server.type={kind}]", *words]
        return configs.parse(ExperimentConfig, given, command="train", description="")

    return make


def command(server: ServerConfig) -> list[str]:
    group: Any = {"sglang": SGLangServer, "vllm": VLLMServer}[server.llm_server.type](server)
    return group.command("python", 0, is_cpu=True, port=1)


def environment(server: ServerConfig) -> dict[str, str]:
    group: Any = {"sglang": SGLangServer, "vllm": VLLMServer}[server.llm_server.type](server)
    return group.environment(None)


def warnings(config: ExperimentConfig) -> list[tuple[str, str]]:
    return [*check_run(config, RunFacts(model={}, shapes={}, free_bytes=0))]


def test_sglang_starts_with_the_rank_and_the_layers_of_the_adapter(
    run: Callable[..., ExperimentConfig],
) -> None:
    config = run("sglang", SERVERS, f"{LORA}.rank=12", f"{LORA}.targets=[v_proj,q_proj]")
    text = " ".join(command(configs.own_server(config)))
    assert "--enable-lora --lora-target-modules q_proj v_proj" in text
    assert "--max-lora-rank 12" in text and "--lora-backend torch_native" in text
    assert warnings(config) == []
    all_linear = run("sglang", SERVERS, f"{LORA}.rank=12", f"{LORA}.targets=[all-linear]")
    targets = configs.own_server(all_linear).llm_server.sglang.adapter_targets
    assert targets == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_vllm_starts_with_the_next_rank_that_it_has(run: Callable[..., ExperimentConfig]) -> None:
    config = run("vllm", SERVERS, f"{LORA}.rank=12")
    words = command(configs.own_server(config))
    assert {"--enable-lora", "--max-lora-rank=16", "--max-loras=2"} <= {*words}
    variables = environment(configs.own_server(config))
    assert variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert warnings(config) == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sglang", ["--max-lora-rank 32", "--max-loras-per-batch 9"]),
        ("vllm", ["--max-lora-rank=32", "--max-loras=8"]),
    ],
)
def test_servers_of_a_session_take_several_adapters_by_name(
    run: Callable[..., ExperimentConfig], kind: str, options: list[str]
) -> None:
    config = run(kind, SERVERS, f"{LORA}.only_named=true")
    command_line = " ".join(command(configs.own_server(config)))
    assert all(option in command_line for option in options), command_line
    assert warnings(config) == []
    words = ["launcher.llm_servers=1", f"{LORA}.only_named=true", f"{LORA}.rank=64"]
    assert "64" in " ".join(command(configs.own_server(run(kind, *words))))


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize(
    "words",
    [
        [SERVERS],
        [SERVERS, f"{LORA}.rank=4", "trainer.ppo.publisher.type=distributed"],
        [f"{LORA}.rank=4"],
    ],
)
def test_servers_of_other_runs_start_without_adapters(
    run: Callable[..., ExperimentConfig], kind: str, words: list[str]
) -> None:
    config = run(kind, *words)
    server = configs.own_server(config)
    assert "lora" not in " ".join(command(server))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment(server)
    assert warnings(config) == []


@pytest.mark.parametrize(
    ("kind", "option", "at_start"),
    [
        ("vllm", f"{LORA}.rank=600", "llm_server.vllm.adapter_rank=600"),
        ("sglang", f"{LORA}.targets=[fc]", "llm_server.sglang.adapter_targets=[fc]"),
    ],
)
def test_adapter_that_servers_cannot_take_is_named_before_the_start(
    run: Callable[..., ExperimentConfig],
    kind: str,
    option: str,
    at_start: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "arealite.ext.sglang.sglang_server.read_shapes", lambda _: {"model.fc.weight": [4, 4]}
    )
    config = run(kind, SERVERS, f"{LORA}.rank=8", option)
    server = configs.own_server(config)
    assert "lora" not in " ".join(command(server))
    ((part, warning),) = warnings(config)
    assert (part, kind in warning, "they get merged weights" in warning) == ("adapters", True, True)
    given = [f"llm_server.type={kind}", f"llm_server.{kind}.adapter_rank=8", at_start]
    chosen = configs.parse(ServerConfig, given, command="serve-llm", description="")
    group: Any = {"sglang": SGLangServer, "vllm": VLLMServer}[kind](chosen)
    with pytest.raises(UserError, match=f"{kind}.adapter_rank=0"):
        group.check(PYTHON, {}, is_cpu=False)
