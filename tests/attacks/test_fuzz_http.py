"""Requests that schemathesis generates from a schema of the server's routes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arealite.ext.embedded import protocol
from tests.attacks.conftest import Live
from tests.attacks.kinds import EMBEDDED, KIND
from tests.e2e.conftest import SLOW_S, START_S
from tests.waiting import until

PROGRAM = os.environ.get("SCHEMATHESIS", "")
pytestmark = [
    pytest.mark.attacks,
    pytest.mark.timeout(START_S + SLOW_S),
    pytest.mark.skipif(not PROGRAM, reason="needs schemathesis, which make test-attacks installs"),
]

EXAMPLES = 20
"""Maximum number of examples for each route and phase."""
BODIES: dict[str, Any] = {
    "/generate": protocol.GenerateBody,
    "/abort_request": protocol.AbortBody,
    "/pause_generation": protocol.PauseGenerationReqInput,
    "/update_weights_from_disk": protocol.UpdateWeightFromDiskReqInput,
    "/update_weights_from_distributed": protocol.UpdateWeightsFromDistributedReqInput,
    "/destroy_weights_update_group": protocol.DestroyWeightsUpdateGroupReqInput,
    "/update_weight_version": protocol.UpdateWeightVersionReqInput,
}
RPC_BODY = {
    "type": "object",
    "properties": {
        "method": {"enum": ["arealite_check_weights", "arealite_state", "owned"]},
        "args": {},
        "kwargs": {"type": "object", "properties": {"path": {}, "shapes": {}, "unused": {}}},
        "timeout": {},
    },
}
"""Body of vLLM's /collective_rpc, which calls methods of its workers."""
SLOW = {KIND.join}
"""A valid request waits a minute for its host; test_insiders_http.py tests some."""
PROBE = "/ready"
"""Answers 503 while a fuzzed request has paused generation. test_strangers_http.py asks for it."""
WELL = [200]
REFUSED = sorted({405, *KIND.refusals, *KIND.fuzz_refusals})
CHECKS = "status_code_conformance" + ",not_a_server_error" * (500 not in REFUSED)


def schema_of(live: Live, statuses: list[int], left_out: Collection[str]) -> dict[str, Any]:
    """Return a schema of the server's routes with the types of their bodies."""
    answers = {str(status): {"description": "as it says"} for status in statuses}
    schema = embedded_schema(answers) if KIND is EMBEDDED else served_schema(live, answers)
    paths = {path: route for path, route in schema["paths"].items() if path not in left_out}
    return schema | {"paths": paths}


def served_schema(live: Live, answers: dict[str, Any]) -> dict[str, Any]:
    """Return the server's own schema of the routes of the lists, with other answers."""
    schema = live.read("/openapi.json")
    paths = dict[str, Any]()
    for path, methods in schema["paths"].items():
        if path in SLOW or path not in {*KIND.posts, *KIND.gets}:
            continue
        paths[path] = {name: method | {"responses": answers} for name, method in methods.items()}
        if path in KIND.posts and "requestBody" not in paths[path]["post"]:
            fields = {name: {} for name in KIND.posts[path]}
            body = {"type": "object", "properties": fields}
            if path == "/collective_rpc":
                body = RPC_BODY
            content = {"application/json": {"schema": body}}
            paths[path]["post"]["requestBody"] = {"content": content}
    assert {*KIND.posts} - SLOW <= {*paths}
    return schema | {"paths": paths}


def embedded_schema(answers: dict[str, Any]) -> dict[str, Any]:
    template = "#/components/schemas/{name}"
    _, parts = msgspec.json.schema_components([*BODIES.values()], ref_template=template)
    paths: dict[str, Any] = {
        path: {"get": {"responses": answers}} for path in [*KIND.gets, "/nowhere"] if path != PROBE
    }
    for path in KIND.posts.keys() - SLOW:
        name = BODIES[path].__name__ if path in BODIES else ""
        body = {"$ref": template.format(name=name)} if name else {"type": "object"}
        content = {"content": {"application/json": {"schema": body}}}
        paths[path] = {"post": {"requestBody": content, "responses": answers}}
    about = {"title": "the server", "version": "1"}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": parts}}


def fuzz(
    live: Live,
    folder: Path,
    phases: str,
    *,
    statuses: list[int],
    headers: Mapping[str, str],
    left_out: Collection[str] = (),
) -> int:
    """Run schemathesis without the token on its command line; return the number of requests.

    Args:
        live: The attacked run.
        folder: Folder for the files of schemathesis.
        phases: Phases of schemathesis.
        statuses: Statuses of right answers.
        headers: Headers of all requests.
        left_out: Paths that get no requests.
    """
    file, told = folder / "schema.json", folder / "requests.ndjson"
    file.write_text(json.dumps(schema_of(live, statuses, left_out)))
    lines = ["[headers]", *(f"{name} = {json.dumps(text)}" for name, text in headers.items())]
    (folder / "schemathesis.toml").write_text("\n".join(lines))
    done = subprocess.run(
        [
            *(PROGRAM, "run", str(file), "--url", live.server, "--phases", phases),
            *("--checks", CHECKS, "--no-shrink"),
            *("--max-examples", str(EXAMPLES), "--seed", "16", "--generation-deterministic"),
            *("--request-timeout", str(SLOW_S), "--suppress-health-check", "all"),
            *("--continue-on-failure", "--warnings", "off", "--no-color"),
            *("--report-ndjson-path", str(told)),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return told.read_text().count('"status_code"')


def test_fuzzed_requests_without_the_token_are_refused(live: Live, tmp_path: Path) -> None:
    assert fuzz(live, tmp_path, "fuzzing", statuses=[401, 405], headers={}) > 100
    assert live.is_untouched()
    live.wait_for_steps()


def test_fuzzed_requests_with_the_token_do_not_stop_the_run(live: Live, tmp_path: Path) -> None:
    """The trainer reverts pauses and versions that some requests set."""
    right = {"statuses": WELL + REFUSED, "headers": live.ours}
    assert fuzz(live, tmp_path, "coverage", **right, left_out=KIND.large_bodies) > 50
    assert fuzz(live, tmp_path, "fuzzing", **right) > 50
    until(live.is_untouched, what="the trainer's version", seconds=SLOW_S)
    live.wait_for_steps(5)
    assert live.pids() == live.roles
    assert live.server_pid == live.first_server_pid
