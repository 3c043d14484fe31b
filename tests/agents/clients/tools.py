"""The tools and questions of every client program."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

QUESTIONS = ["How warm is it in Zürich, and what is 12 + 30?", "And in München? Add 1 to it."]


@dataclass
class Job:
    """One session of a client."""

    base_url: str
    anthropic_base_url: str
    api_key: str
    model: str
    is_stream: bool
    questions: list[str]
    folder: str
    """An empty folder for programs."""


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: Name of the city.
    """
    return f"{city}: 21 °C, leicht bewölkt ☁️"


TOOLS: dict[str, Any] = {"add": add, "weather": weather}


def call(name: str, arguments: str | dict[str, Any]) -> str:
    """Call a tool as an agent does: errors are its answer."""
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        return str(TOOLS[name](**given))
    except (TypeError, ValueError, KeyError) as error:
        return f"error: {error!r}"


def _schema(**properties: str) -> dict[str, Any]:
    fields = {name: {"type": kind} for name, kind in properties.items()}
    return {"type": "object", "properties": fields, "required": [*properties]}


SCHEMAS = {
    "add": ("Add two integers.", _schema(a="integer", b="integer")),
    "weather": ("Return the weather of a city.", _schema(city="string")),
}
