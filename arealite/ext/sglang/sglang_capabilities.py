"""Reads a server's capabilities from its own description, not from its version number.

Versions of SGLang differ in pause modes, weight-update sessions and routes. No other code depends
on a version number.
"""

from arealite.api.server_protocol import Json
from arealite.impl.publisher.control import Capabilities


def read_capabilities(spec: Json, info: Json, meta: Json) -> Capabilities:
    """Read capabilities from the server's answers.

    Args:
        spec: Answer of /openapi.json.
        info: Answer of /server_info.
        meta: `meta_info` of a generation.
    """
    paths: Json = spec.get("paths") or {}
    schemas: Json = (spec.get("components") or {}).get("schemas") or {}

    def enum(schema: str, field: str) -> list[str] | None:
        """Return the allowed values of a body's field: [] any, None without such a field."""
        body_schema: Json = schemas.get(schema) or {}
        field_schema: Json | None = (body_schema.get("properties") or {}).get(field)
        if field_schema is None:
            return None
        if field_schema.get("enum"):
            return list(field_schema["enum"])
        if "const" in field_schema:
            return [field_schema["const"]]
        return []

    has_group_routes = (
        "/init_weights_update_group" in paths and "/update_weights_from_distributed" in paths
    )
    return Capabilities(
        version=str(info.get("version", "unknown")),
        pause_modes=frozenset(enum("PauseGenerationReqInput", "mode") or ["abort"]),
        spans="weight_versions" in meta,
        sessions="/begin_weight_update" in paths,
        buckets=enum("UpdateWeightsFromDistributedReqInput", "load_format") is not None,
        relabel="/update_weight_version" in paths,
        distributed=has_group_routes,
        tp=int(info.get("tp_size") or 1),
        dp=int(info.get("dp_size") or 1),
        names_adapters=serves_adapters(info) and "/update_weight_version" in paths,
    )


def serves_adapters(info: Json) -> bool:
    """Return whether SGLang loads LoRA adapters while it runs; `info`: answer of /server_info."""
    has_one_copy = info.get("dp_size", 1) == 1  # SGLang's replicas refuse the route
    return bool(info.get("enable_lora")) and has_one_copy
