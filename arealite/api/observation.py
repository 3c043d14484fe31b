"""Observations with choices and tools, the tool calls of an action, and Requests to actors."""

from typing import Any, cast

import msgspec

ChatMessage = dict[str, object]
"""A message of a chat: `role`, `content` and, of some roles, more."""


class Observation(msgspec.Struct, frozen=True):
    """The observation of a seat. Filled by the environment.

    An environment without choices and tools may pass a plain text or a list of chat messages.
    """

    content: str | list[ChatMessage]
    """New text for the seat, or new chat messages. Messages with role "tool" answer tool calls."""
    choices: tuple[str, ...] = ()
    """Legal actions; () if they are too many to list. For scripted agents: prompts do not contain
    them."""
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI function schemas of the available tools; the same in every turn."""

    def __str__(self) -> str:
        """Return the text; of chat messages, one line `role: content` for each."""
        if isinstance(self.content, str):
            return self.content
        lines = [f"{message.get('role')}: {message.get('content')}" for message in self.content]
        return "\n".join(lines)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Observation and reward of an actor; returned by `reset` and `step` of `arealite.make`."""

    actor: str
    """Name of the seat; in a vector with the number of the environment, as in `x::env=2`."""
    observation: Observation
    """`str(request.observation)` is its text. Choices and tools are attributes."""
    reward: float = 0.0
    """Sum of the rewards since the actor's previous request."""
    needs_action: bool = False
    """Whether the next `step` must have an action of this actor."""
    done: bool = False
    """Whether the episode is over."""
    episode_id: str = ""
    group_id: str = ""
    """Equal for the episodes of one task, whose rewards a group algorithm compares."""
    info: dict[str, Any] = {}
    """Named parts of the reward."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in a completion. Filled by the agent's parser."""

    call_id: str
    name: str
    """"" if the call cannot be parsed."""
    arguments: dict[str, Any]
    error: str = ""
    """Error of a malformed call, which the agent gets as its result; "" for a valid call."""


def observe(observation: object) -> Observation:
    """Convert a text or a list of chat messages to an Observation.

    Raises:
        TypeError: The observation is neither a text nor chat messages.
    """
    if not isinstance(observation, Observation):
        observation = Observation(cast("str | list[ChatMessage]", observation))
    content = cast("object", observation.content)
    if isinstance(content, str) or _is_chat(content):
        return observation
    raise TypeError(f"an observation is a text or chat messages, not {content!r:.100}")


def _is_chat(content: object) -> bool:
    """Return whether a value is a list of chat messages."""
    return isinstance(content, list) and all(map(is_message, cast(list[object], content)))


def is_message(value: object) -> bool:
    """Return whether a value is a chat message: it has a role, and a text or tool calls."""
    if not isinstance(value, dict):
        return False
    message = cast(dict[str, object], value)
    if not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if content is None:
        calls = message.get("tool_calls")
        return isinstance(calls, list) and calls != []
    return isinstance(content, str)


def messages(observation: object, *, system: str | None = None) -> list[ChatMessage]:
    """Convert an observation to chat messages, after the system message if `system` is given."""
    chat: list[ChatMessage] = []
    if system is not None:
        chat.append({"role": "system", "content": system})
    content = observe(observation).content
    if isinstance(content, str):
        chat.append({"role": "user", "content": content})
    else:
        chat.extend(content)
    return chat
