"""A program that replaces `python -m sglang.launch_server`; see `server_program`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from arealite.api.experiment_config import ServerConfig
from arealite.api.llm_server import LLMServerConfig
from arealite.ext.sglang.config import SGLangServerConfig
from tests.fakes.server_program import FakeProgram, program_config

OPTIONS = {field.name for field in dataclasses.fields(SGLangServerConfig)}

START = """
words, token = sys.argv[3:], ""
if sys.argv[1] == "-c":
    token = derived_token(words.pop(0))
port = int(words[words.index("--port") + 1])
seed = words[words.index("--random-seed") + 1]
"""


class Program(FakeProgram):
    """A stand-in for SGLang."""

    start = START
    version = "0.5.23"
    answers = {  # noqa: RUF012
        "/generate": {"output_ids": [3]},
        "/model_info": {"weight_version": "default", "model_path": "m"},
        "/v1/models": {"data": [{"id": "m", "max_model_len": 77}]},
        "/server_info": {"max_req_input_len": 71},
    }

    def load(self, running: int, waiting: int) -> None:
        room = {"max_running_requests": 16}
        first = {"num_running_reqs": running, "num_waiting_reqs": 0, **room}
        second = {"num_running_reqs": 0, "num_waiting_reqs": waiting, **room}
        self.answer("/v1/loads", {"loads": [first, second]})


def wrapper_config(
    program: Program,
    model: Path | str,
    *,
    dtype: str = "float32",
    heartbeat_s: float = 1.0,
    **server: Any,
) -> ServerConfig:
    """Return a config that runs `program`; options of type=sglang are set in their section."""
    own = {name: server.pop(name) for name in list(server) if name in OPTIONS}
    own = {"python": str(program.path), "device": "cpu"} | own
    section = LLMServerConfig(type="sglang", sglang=SGLangServerConfig(**own), **server)
    return program_config(program, model, dtype=dtype, heartbeat_s=heartbeat_s, server=section)
