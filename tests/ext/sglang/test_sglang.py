"""Translation of a config to command lines, environments, ports and devices, or to a
one-line error."""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from arealite.api.experiment_config import ServerConfig
from arealite.base.errors import UserError
from arealite.ext.server_processes.server_process import Launch
from arealite.ext.sglang.sglang_server import SGLangServer
from tests.fakes.sglang_program import Program
from tests.fakes.sglang_program import wrapper_config as config


def plan(config: ServerConfig) -> list[Launch]:
    return SGLangServer(config).plan()


def options(words: list[str]) -> dict[str, str]:
    """Parse a command line as SGLang does: the last value of an option wins."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    return {name: value for name, value in pairs if name.startswith("--")}


def test_options_become_arguments_and_extra_args_come_last(program: Program, model_folder: Path):
    (launch,) = plan(
        config(
            program,
            model_folder,
            dtype="bfloat16",
            host="0.0.0.0",
            context_length=99,
            log_level="warning",
            mem_fraction=0.5,
            dp=3,
            attention_backend="triton",
            extra_args=["--max-running-requests", "7", "--enable-metrics"],
        )
    )
    python, dash_c, boot, secret, *words = launch.command(1234)
    assert (python, dash_c) == (str(program.path), "-c") and "sglang.launch_server" in boot
    text = Path(secret).read_text().strip()
    assert len(text) == 64 and not any(text in word for word in [boot, *words])
    given = options(words)
    assert (
        given
        | {
            "--model-path": str(model_folder),
            "--dtype": "bfloat16",
            "--device": "cpu",
            "--tp-size": "1",
            "--dp-size": "3",
            "--mem-fraction-static": "0.5",
            "--attention-backend": "triton",
            "--context-length": "99",
            "--host": "0.0.0.0",
            "--port": "1234",
            "--log-level": "warning",
            "--random-seed": "1",
            "--max-running-requests": "7",
        }
        == given
    )
    assert words[-1] == "--enable-metrics"


def test_unset_options_are_not_passed_to_sglang(program: Program, model_folder: Path):
    program.configure(gpus=1)
    (launch,) = plan(config(program, model_folder, device="cuda"))
    given = options(launch.command(1))
    unset = {"--mem-fraction-static", "--attention-backend", "--context-length"}
    assert given["--device"] == "cuda"
    assert not (unset | {"--disable-cuda-graph", "--max-total-tokens"}) & given.keys()
    assert "SGLANG_USE_CPU_ENGINE" not in launch.environment


def test_cpu_servers_get_the_settings_sglang_needs_on_a_cpu(
    program: Program, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    (launch,) = plan(config(program, model_folder, device="auto"))
    given = options(launch.command(1))
    assert (given["--device"], given["--attention-backend"]) == ("cpu", "torch_native")
    assert "--disable-cuda-graph" in given
    assert launch.environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert launch.environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert launch.environment["TORCHDYNAMO_DISABLE"] == "1"
    assert launch.environment["OMP_NUM_THREADS"] == "5", "the user's own"


@pytest.mark.parametrize(
    ("visible", "gpus", "slices"),
    [
        (None, 8, ["0,1,2,3", "4,5,6,7"]),
        ("3,1,GPU-ab,7,5,0,2,4", 8, ["3,1,GPU-ab,7", "5,0,2,4"]),
        (None, 9, ["0,1,2,3", "4,5,6,7"]),
    ],
)
def test_each_server_gets_the_next_visible_devices(
    program: Program,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    gpus: int,
    slices: list[str],
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    program.configure(gpus=gpus)
    launches = plan(config(program, model_folder, device="auto", num_servers=2, tp=2, dp=2))
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in launches] == slices


def consecutive_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports below the ephemeral range."""
    for first in range(20_000 + os.getpid() % 10_000, 32_000, count):
        with ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def test_ports_are_consecutive_and_seeds_differ(program: Program, model_folder: Path):
    port = consecutive_ports(3)
    launches = plan(config(program, model_folder, num_servers=3, port=port))
    assert [each.port for each in launches] == [port, port + 1, port + 2]
    seeds = {options(each.command(1))["--random-seed"] for each in launches}
    assert len(seeds) == 3, "servers of one seed would sample the same"
    free = plan(config(program, model_folder, num_servers=3))
    assert len({each.port for each in free}) == 3


def test_vocab_size_comes_from_text_config_if_present(program: Program, model_folder: Path):
    about = {"model_type": "both", "vocab_size": 9, "text_config": {"vocab_size": 17}}
    (model_folder / "config.json").write_text(json.dumps(about))
    (launch,) = plan(config(program, model_folder))
    assert launch.metadata == {
        "type": "sglang",
        "protocol": "sglang",
        "model_path": str(model_folder),
        "model_type": "both",
        "architectures": [],
        "vocab_size": 17,
        "host": "127.0.0.1",
    }


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"python": "/no/such/python"},
            "/no/such/python cannot run SGLang: No such file or directory. Name",
        ),
        ({"python": sys.executable}, "it has no sglang. Name a Python that has it (for a CPU, too"),
        ({"python": "/bin/false"}, "cannot run SGLang: exit code 1"),
        ({"python": "/bin/echo"}, "cannot run SGLang: invalid literal"),
        ({"device": "cuda"}, "1 servers of tp 1 x dp 1 need 1 GPUs, but 0 are visible"),
        (
            {"port": 65535, "num_servers": 2},
            "port=65536: cannot listen on 127.0.0.1:65536: no such port",
        ),
        ({"host": "192.0.2.1"}, "cannot listen on 192.0.2.1:0"),
    ],
)
def test_invalid_sglang_options_raise_a_one_line_user_error(
    program: Program, model_folder: Path, wrong: dict[str, Any], text: str
):
    with pytest.raises(UserError) as caught:
        plan(config(program, model_folder, **wrong))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_error_of_too_few_gpus_has_both_counts(program: Program, model_folder: Path):
    program.configure(gpus=3)
    with pytest.raises(UserError, match="2 servers of tp 2 x dp 1 need 4 GPUs, but 3 are visible"):
        plan(config(program, model_folder, device="auto", num_servers=2, tp=2))


def test_port_in_use_is_refused(program: Program, model_folder: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"listen on 127.0.0.1:{port}: Address already in use"):
            plan(config(program, model_folder, port=port))


@pytest.mark.parametrize("text", ["{nonsense", None])
def test_folder_without_a_model_is_refused(program: Program, model_folder: Path, text: str | None):
    (model_folder / "config.json").unlink()
    if text is not None:
        (model_folder / "config.json").write_text(text)
    with pytest.raises(UserError, match="no model there"):
        plan(config(program, model_folder))
    with pytest.raises(UserError, match=r"model\.path is empty"):
        plan(config(program, ""))


def test_log_folder_that_cannot_be_created_is_refused(program: Program, model_folder: Path):
    (program.folder / "runs").write_text("a file")
    with pytest.raises(UserError, match=r"Set cluster\.run_root"):
        plan(config(program, model_folder))
