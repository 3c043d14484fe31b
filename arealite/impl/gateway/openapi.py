"""The OpenAPI description of the gateway, and the bodies of its own routes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

import arealite
from arealite.impl.gateway.apis import APIS
from arealite.impl.gateway.apis.history import decode

SESSIONS = "/v1/rl/sessions"
STATUSES = (200, 400, 401, 403, 404, 410, 413, 415, 429, 503)


class LeaseBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/rl/sessions."""

    wait_s: float = 20.0
    """Longest time to wait for a task."""


class RewardBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/rl/sessions/{id}/reward."""

    reward: float | None = None
    """None: the sum of the parts."""
    parts: dict[str, float] = {}


decode_lease = partial(decode, msgspec.json.Decoder(LeaseBody))
decode_reward = partial(decode, msgspec.json.Decoder(RewardBody))


def describe(routes: Mapping[str, object]) -> dict[str, Any]:
    """Return the OpenAPI description of routes."""
    kinds: dict[str, Any] = {f"POST {path}": api.request_type for path, api in APIS.items()}
    kinds |= {f"POST {SESSIONS}": LeaseBody, f"POST {SESSIONS}/{{id}}/reward": RewardBody}
    template = "#/components/schemas/{name}"
    refs, schemas = msgspec.json.schema_components(kinds.values(), ref_template=template)
    bodies = dict(zip(kinds, refs, strict=True))
    key = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    paths: dict[str, Any] = {}
    for name in routes:
        method, path = name.replace(":.+", "").split()
        operation: dict[str, Any] = {"responses": {str(s): {"description": ""} for s in STATUSES}}
        if name in bodies:
            content = {"application/json": {"schema": bodies[name]}}
            operation["requestBody"] = {"required": True, "content": content}
        if "{id" in path:
            operation["parameters"] = [key]
        paths.setdefault(path, {})[method.lower()] = operation
    info = {"title": "AReaLite gateway", "version": arealite.__version__}
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}}
    components = {"schemas": schemas, "securitySchemes": schemes}
    described = {"openapi": "3.1.0", "info": info, "components": components, "paths": paths}
    return described | {"security": [{"bearer": []}]}
