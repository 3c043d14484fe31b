"""Reads the schemas of tools in the column `tools` of a row."""

from contextlib import suppress
from typing import Any, cast

import msgspec

from arealite.base.errors import UserError
from arealite.system.data.forms import DatasetRow, without_nulls


def read_tools(tools: object, place: str) -> list[dict[str, Any]]:
    """Return the schemas in a row's column `tools`: a list, or JSON text of a list; [] for null.

    Raises:
        UserError: the column is neither, or a schema has no name.
    """
    decoded = tools
    if isinstance(tools, str):
        with suppress(msgspec.DecodeError):
            decoded = cast(object, msgspec.json.decode(tools)) if tools.strip() else None
    schemas = cast(list[object], [] if decoded is None else decoded)
    is_list = isinstance(decoded, list | None)
    if not is_list or not all(map(is_schema, schemas)):
        raise UserError(
            f"{place}: `tools` must be a list of function schemas, or JSON text of such a list. "
            'Write [{"type": "function", "function": {"name": …, "parameters": …}}, …].'
        )
    return [without_nulls(schema) for schema in schemas]


def is_schema(schema: object) -> bool:
    """Return whether a value is the schema of a function, or a tool with one."""
    fields = cast(DatasetRow, schema) if isinstance(schema, dict) else DatasetRow()
    function = fields.get("function") or fields
    if not isinstance(function, dict):
        return False
    return isinstance(cast(DatasetRow, function).get("name"), str)
