"""What passes between an environment and an agent besides plain text: observations with choices or
tools, and the tool calls that an action holds."""

from __future__ import annotations

from typing import Any, cast

import msgspec


class Observation(msgspec.Struct, frozen=True):
    """What a seat sees. Filled by the environment; plain text or a list of messages will do where
    there is nothing else to say."""

    content: str | list[dict[str, Any]]
    """What is new to the seat: the user's text, or chat messages (role "tool" answers a call)."""
    choices: tuple[str, ...] = ()
    """The actions that are allowed, () where there are too many to list. Scripted seats choose
    among them; no trained agent is told."""
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI function schemas of the tools that may be called; the same in every turn."""


class ToolCall(msgspec.Struct, frozen=True):
    """One call that an agent wrote. Filled by the agent's parser."""

    call_id: str
    name: str
    """"" where the call could not be read."""
    arguments: dict[str, Any]
    error: str = ""
    """What is wrong with the call, "" for one that can be made; told to the agent as its result."""


def observe(observation: Any) -> Observation:
    """Return any kind of observation as an Observation.

    Raises:
        TypeError: it is neither a text nor messages.
    """
    seen = observation if isinstance(observation, Observation) else Observation(observation)
    said = cast("Any", seen.content)
    is_chat = isinstance(said, list) and all(map(_is_message, cast(list[Any], said)))
    if not (isinstance(said, str) or is_chat):
        raise TypeError(f"an observation is a text or messages, not {said!r:.100}")
    return seen


def _is_message(said: Any) -> bool:
    """Whether something is a chat message: of some role, and of text unless it is the model's."""
    if not isinstance(said, dict):
        return False
    message = cast(dict[str, Any], said)
    role, text = message.get("role"), message.get("content")
    return isinstance(role, str) and (isinstance(text, str) or role == "assistant")


def messages(observation: Any, *, system: str | None = None) -> list[dict[str, Any]]:
    """Return an observation as chat messages, after the system message if there is one."""
    content = observe(observation).content
    said = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return said if system is None else [{"role": "system", "content": system}, *said]
