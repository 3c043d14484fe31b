"""Reads a server's capabilities from its own description, not from its version number.

Versions of SGLang differ in pause modes, weight-update sessions and routes. No other code depends
on a version number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of one server process."""

    version: str
    """Version of the server's program, for logs."""
    pause_modes: frozenset[str]
    spans: bool
    """The server reports the version of every token; else one answer must have one version."""
    sessions: bool
    """Weights are sent between begin_weight_update and end_weight_update."""
    buckets: bool
    """The server accepts many tensors in one broadcast."""
    relabel: bool
    """The reported version can be changed without new weights."""
    distributed: bool
    tp: int
    dp: int

    @classmethod
    def read(cls, spec: Json, info: Json, meta: Json) -> "Capabilities":
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
        return cls(
            version=str(info.get("version", "unknown")),
            pause_modes=frozenset(enum("PauseGenerationReqInput", "mode") or ["abort"]),
            spans="weight_versions" in meta,
            sessions="/begin_weight_update" in paths,
            buckets=enum("UpdateWeightsFromDistributedReqInput", "load_format") is not None,
            relabel="/update_weight_version" in paths,
            distributed=has_group_routes,
            tp=int(info.get("tp_size") or 1),
            dp=int(info.get("dp_size") or 1),
        )

    def pause_mode(self, mode: str) -> str:
        """Return `mode`, or abort if the server cannot split an answer into versions.

        Return abort, too, if the server does not support `mode`.
        """
        is_supported = self.spans and mode in self.pause_modes
        return mode if is_supported else "abort"
