"""Capabilities of server versions, read from OpenAPI descriptions as FastAPI writes them."""

from __future__ import annotations

from typing import Any

from arealite.ext.sglang.sglang_capabilities import read_capabilities

PATHS = [
    "/begin_weight_update",
    "/weights_checker",
    "/update_weight_version",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
]
TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}


def spec(paths: list[str], **fields: Any) -> dict[str, Any]:
    schemas = {
        "PauseGenerationReqInput": {"mode": {"enum": ["abort", "retract"]}},
        "UpdateWeightsFromDistributedReqInput": {"names": {}, "load_format": TEXT},
    } | fields
    described = {name: {"properties": properties} for name, properties in schemas.items()}
    return {"paths": {path: {} for path in paths}, "components": {"schemas": described}}


INFO = {"version": "0.5.23", "tp_size": 2, "dp_size": 1}


def test_new_server_has_all_capabilities() -> None:
    can = read_capabilities(spec(PATHS), INFO, {"weight_versions": []})
    assert (can.spans, can.sessions, can.buckets) == (True, True, True)
    assert (can.relabel, can.distributed) == (True, True)
    assert (can.tp, can.dp) == (2, 1)
    assert can.pause_mode("retract") == "retract"
    assert can.pause_mode("in_place") == "abort", "a mode it does not know"


def test_server_without_version_spans_is_paused_with_abort() -> None:
    can = read_capabilities(spec(PATHS), INFO, {"weight_version": "1"})
    assert can.pause_mode("retract") == "abort"


def test_old_server_has_no_optional_capabilities() -> None:
    old = spec(["/generate"], UpdateWeightsFromDistributedReqInput={"names": {}})
    can = read_capabilities(old, {}, {})
    assert not any((can.sessions, can.buckets, can.relabel, can.distributed))
    assert (can.tp, can.dp) == (1, 1)


def test_server_without_an_openapi_description_can_be_paused() -> None:
    assert read_capabilities({}, {}, {}).pause_modes == {"abort"}
