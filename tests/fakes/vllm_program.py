"""A program that replaces `python -m vllm.entrypoints.cli.main serve`; see `server_program`.

As a real server with the guard, it reads the secret from the file that its environment names.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from arealite.api.experiment_config import ServerConfig
from arealite.api.llm_server import LLMServerConfig
from arealite.ext.vllm.config import VLLMServerConfig
from tests.fakes.server_program import FakeProgram, program_config

OPTIONS = {field.name for field in dataclasses.fields(VLLMServerConfig)}

START = """
words = sys.argv[1:]
arguments = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
port, seed = int(arguments["--port"]), arguments["--seed"]
secret = os.environ["AREALITE_SECRET_FILE"]
token = derived_token(secret) if secret else ""
(pathlib.Path(os.environ["VLLM_RPC_BASE_PATH"]) / f"socket-{seed}").touch()
"""


class VLLMProgram(FakeProgram):
    """A stand-in for vLLM."""

    start = START
    version = "0.32.0+cpu"
    answers = {  # noqa: RUF012
        "/inference/v1/generate": {"choices": [{"token_ids": [3]}]},
        "/version": {"version": "0.32.0"},
        "/v1/models": {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 77}]},
        "/weight_info": {"weight_version": "default"},
        "/server_info": {
            "vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}},
        },
    }

    def load(self, running: int, waiting: int) -> None:
        lines = [
            f'vllm:num_requests_running{{engine="0"}} {running}.0',
            'vllm:num_requests_waiting{engine="0"} 0.0',
            'vllm:num_requests_running{engine="1"} 0.0',
            f'vllm:num_requests_waiting{{engine="1"}} {waiting}.0',
        ]
        self.answer("/metrics", "\n".join(lines) + "\n")


def vllm_config(
    program: VLLMProgram,
    model: Path | str,
    *,
    dtype: str = "float32",
    heartbeat_s: float = 0.05,
    **server: Any,
) -> ServerConfig:
    """Return a config that runs `program`; options of type=vllm are set in their section."""
    own = {name: server.pop(name) for name in list(server) if name in OPTIONS}
    own = {
        "python": str(program.path),
        "device": "cpu",
        "start_timeout_s": 60.0,
        "silence_s": 600.0,
        "drain_timeout_s": 0.2,
    } | own
    section = LLMServerConfig(type="vllm", vllm=VLLMServerConfig(**own), **server)
    return program_config(program, model, dtype=dtype, heartbeat_s=heartbeat_s, server=section)
