"""The OpenAPI description of the gateway, and the bodies of its own routes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

import arealite
from arealite.ext.gateway.apis import APIS
from arealite.ext.gateway.apis.past_messages import decode

SESSIONS = "/v1/rl/sessions"
STATUSES = (200, 400, 401, 403, 404, 410, 413, 415, 429, 503)


class LeaseBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/rl/sessions."""

    wait_s: float = 20.0
    """Longest time to wait for a task."""


class RewardBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/rl/sessions/{id}/reward."""

    reward: float | None = None
    """None: the sum of the parts."""
    parts: dict[str, float] = {}


decode_lease = partial(decode, msgspec.json.Decoder(LeaseBody))
decode_reward = partial(decode, msgspec.json.Decoder(RewardBody))


def describe(routes: Mapping[str, object]) -> dict[str, Any]:
    """Return the OpenAPI description of routes."""
    body_types: dict[str, Any] = {f"POST {path}": api.request_type for path, api in APIS.items()}
    body_types[f"POST {SESSIONS}"] = LeaseBody
    body_types[f"POST {SESSIONS}/{{id}}/reward"] = RewardBody
    references, schemas = msgspec.json.schema_components(
        body_types.values(), ref_template="#/components/schemas/{name}"
    )
    bodies = dict(zip(body_types, references, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        method, path = route.replace(":.+", "").split()
        operation = _operation(path, bodies.get(route))
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "AReaLite gateway", "version": arealite.__version__},
        "paths": paths,
        "security": [{"bearer": []}],
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _operation(path: str, body_schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return the description of one route.

    Args:
        path: Its path.
        body_schema: Reference to the schema of its body; None: no body.
    """
    id_parameter = {
        "name": "id",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
    }
    responses = {str(status): {"description": ""} for status in STATUSES}
    operation: dict[str, Any] = {
        "responses": responses,
        "parameters": [id_parameter] if "{id" in path else [],
    }
    if body_schema is not None:
        content = {"application/json": {"schema": body_schema}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
