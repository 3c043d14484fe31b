"""The OpenAPI description of the gateway, and the bodies of its own routes."""

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
    bodies = dict(zip(kinds, [{"application/json": {"schema": ref}} for ref in refs], strict=True))
    responses = {str(status): {"description": ""} for status in STATUSES}
    key = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    paths: dict[str, Any] = {}
    for name in routes:
        method, path = name.replace(":.+", "").split()
        operation = {"responses": responses, "parameters": [key] if "{id" in path else []}
        if name in bodies:
            operation["requestBody"] = {"required": True, "content": bodies[name]}
        paths.setdefault(path, {})[method.lower()] = operation
    info = {"title": "AReaLite gateway", "version": arealite.__version__}
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}}
    described = {"openapi": "3.1.0", "info": info, "paths": paths, "security": [{"bearer": []}]}
    return {**described, "components": {"schemas": schemas, "securitySchemes": schemes}}
