"""The kind of server that is attacked: its routes, and the bodies of its requests.

The environment variable ATTACKED_SERVER has its name: embedded (the default), or vllm, which is a
real vLLM server. The attacks themselves are in the modules of the tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arealite.ext.vllm.vllm_control import PAUSES
from tests.real_servers import vllm_options

Json = dict[str, Any]
Request = tuple[str, Json]
"""Path and body of a POST request."""
SERVER_TESTS = [
    "test_strangers_http.py",
    "test_insiders_http.py",
    "test_browser.py",
    "test_fuzz_http.py",
    "test_end.py",
]
"""Modules that attack a server, and the module that ends the run. The others attack parts of a run
that are the same with every kind."""


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """The requests of one kind of server."""

    options: Callable[[], list[str]]
    """Returns the options of launch_llm_server."""
    model: Mapping[str, int]
    """Fields of the model's config that differ from those of `tiny_model`."""
    posts: Mapping[str, Json]
    """A body for each path that takes POST requests."""
    gets: list[str]
    generate: str
    """Path of the requests for tokens."""
    version: str
    """Path of the answer with the version of the weights."""
    pauses: list[Request]
    continues: str
    """Path of the request that ends a pause."""
    flush: str
    """Path of the request that empties the cache."""
    abort_all: Request
    update: Callable[[Path | str], Request]
    """Returns the request that checks the weights of a folder, or loads them."""
    refuses: Callable[[int, str], bool]
    """Returns whether an answer to `update`, status and text, is a refusal."""
    parts_of_update: list[Request]
    """Requests that a publisher sends between others."""
    join: str
    """Path of the request that joins a process group."""
    join_body: Callable[[Json], Json]
    """Returns a body with the numbers of a group."""
    spellings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of fields by the names of the embedded server."""
    served: frozenset[str] = frozenset()
    """Names of wrong bodies that the server may take."""
    takes_any_body: frozenset[str]
    """Paths whose body is not read, or may have any fields."""
    checks_host: bool = True
    """Whether a request with the token is refused, too, if its Host is another one."""
    checks_numbers: bool = True
    """Whether weights that are not finite are refused."""
    refusals: tuple[int, ...] = (400, 404, 413, 422)
    """Statuses of refused requests with the token."""
    too_large: tuple[int, ...] = (413,)
    """Statuses for a body without an end. Its connection may also be closed."""
    fuzz_refusals: tuple[int, ...] = ()
    """Further statuses of refused requests of the fuzzer."""
    large_bodies: frozenset[str] = frozenset()
    """Paths whose bodies have so many fields that requests for each would take hours."""

    def spell(self, body: bytes) -> bytes:
        """Return a body of the embedded server with the names of this kind."""
        for name, spelling in self.spellings.items():
            body = body.replace(f'"{name}"'.encode(), f'"{spelling}"'.encode())
        return body


GROUP = {"master_address": "10.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
EMBEDDED = ServerKind(
    options=list,
    model={},
    posts={
        "/generate": {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 1}},
        "/abort_request": {"abort_all": True},
        "/pause_generation": {"mode": "abort"},
        "/continue_generation": {},
        "/flush_cache": {},
        "/update_weights_from_disk": {"model_path": "/tmp"},
        "/update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
        "/init_weights_update_group": GROUP,
        "/destroy_weights_update_group": {},
        "/update_weight_version": {"new_version": "\x1b]0;owned\x07"},
    },
    gets=["/model_info", "/server_info", "/v1/models", "/v1/loads", "/openapi.json", "/ready"],
    generate="/generate",
    version="/model_info",
    pauses=[("/pause_generation", {"mode": mode}) for mode in ("abort", "retract", "in_place")],
    continues="/continue_generation",
    flush="/flush_cache",
    abort_all=("/abort_request", {"abort_all": True}),
    update=lambda folder: (
        "/update_weights_from_disk",
        {"model_path": str(folder), "weight_version": "1000"},
    ),
    refuses=lambda status, text: status == 400,
    parts_of_update=[
        (
            "/update_weights_from_distributed",
            {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]]},
        ),
        ("/destroy_weights_update_group", {}),
    ],
    join="/init_weights_update_group",
    join_body=lambda group: group,
    takes_any_body=frozenset(("/abort_request", "/continue_generation", "/flush_cache")),
)
VLLM = ServerKind(
    options=vllm_options,
    model={"hidden_size": 64, "num_attention_heads": 2},  # vLLM has no heads of 8 numbers
    posts={
        "/inference/v1/generate": {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 1}},
        "/inference/v1/abort_requests": {"request_ids": ["1"]},
        "/v1/completions": {"model": "policy", "prompt": [3, 4, 5], "max_tokens": 1},
        "/abort_requests": {},
        "/pause": {},
        "/resume": {},
        "/reset_prefix_cache": {},
        "/collective_rpc": {"method": "arealite_check_weights", "kwargs": {"path": "/tmp"}},
        "/start_weight_update": {},
        "/update_weights": {"update_info": {"path": "/tmp"}},
        "/finish_weight_update": {"weight_version": "1000"},
        "/init_weight_transfer_engine": {"init_info": GROUP | {"group_name": "g"}},
        "/shutdown_weight_transfer_engine": {},
        "/update_weight_version": {"new_version": "\x1b]0;owned\x07"},
    },
    gets=[
        "/weight_info",
        "/is_paused",
        "/server_info",
        "/v1/models",
        "/metrics",
        "/load",
        "/version",
        "/get_world_size",
        "/ping",
        "/docs",
        "/openapi.json",
    ],
    generate="/inference/v1/generate",
    version="/weight_info",
    pauses=[(path, {}) for path in PAUSES.values()],
    continues="/resume",
    flush="/reset_prefix_cache",
    abort_all=("/abort_requests", {}),
    update=lambda folder: (
        "/collective_rpc",
        {"method": "arealite_check_weights", "kwargs": {"path": str(folder)}},
    ),
    refuses=lambda status, text: status in (400, 422, 500) or '"refusal":""' not in text,
    parts_of_update=[
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"path": "/tmp"}}),
        ("/update_weights", {"update_info": {}}),
        ("/finish_weight_update", {"weight_version": "1000"}),
        ("/collective_rpc", {"method": "arealite_check_weights"}),
        ("/shutdown_weight_transfer_engine", {}),
    ],
    join="/init_weight_transfer_engine",
    # vLLM generates nothing while it waits for a group; with its 60 s the trainer would give up.
    join_body=lambda group: {"init_info": {"timeout_s": 10.0, **group}},
    takes_any_body=frozenset(
        ("/pause", "/resume", "/reset_prefix_cache", "/shutdown_weight_transfer_engine")
    ),
    spellings={"input_ids": "token_ids", "max_new_tokens": "max_tokens", "rid": "request_id"},
    served=frozenset(("endless", "too many stops")),  # an answer ends with the context
    checks_host=False,
    checks_numbers=False,
    refusals=(400, 404, 409, 413, 422, 500),
    too_large=(413, 400, 404),  # vLLM sees that its client is gone, or does not read the body
    fuzz_refusals=(415, 501, 503),
    large_bodies=frozenset(("/inference/v1/generate", "/v1/completions")),
)
KINDS = {"embedded": EMBEDDED, "vllm": VLLM}
NAME = os.environ.get("ATTACKED_SERVER") or "embedded"
assert NAME in KINDS, f"ATTACKED_SERVER={NAME}, but it must be one of {', '.join(KINDS)}"
KIND = KINDS[NAME]
