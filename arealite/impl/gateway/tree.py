"""The tree of a conversation: messages as clients send them, and the answers sampled there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from arealite.api.episode import Origin
from arealite.api.llm import LLMResponse
from arealite.api.observation import ChatMessage
from arealite.system.data.forms import tool_calls

LONGEST_RUN = 16
"""Neighbouring messages of the assistant that may be parts of one answer."""
Key = tuple[str, str, tuple[tuple[str, bytes], ...]]
"""What a message is recognised by: role, stripped text, names and arguments of calls. A result of
a tool has the id of its call instead, if the template writes ids."""


class Item(NamedTuple):
    """A message of a request."""

    key: Key
    message: ChatMessage

    @property
    def is_system(self) -> bool:
        """Whether the message instructs the assistant."""
        return self.key[0] == "system"


@dataclass(eq=False)
class Node:
    """A message of the tree."""

    parent: Node | None = None
    """None: the root, which is no message."""
    key: Key = ("", "", ())
    message: ChatMessage = field(default_factory=dict[str, Any])
    """Prepared for the template."""
    kinds: int = 0
    """Kinds of the conversation up to this message."""
    characters: int = 0
    """Characters of the messages up to this one."""
    depth: int = 0
    """Number of messages up to this one; 0: the root."""
    children: dict[Key, Node] = field(default_factory=dict[Key, "Node"])
    samples: list[Sample] = field(default_factory=list["Sample"])
    """Sampled answers with this text and these calls."""
    is_asked: bool = False
    """Whether an answer to this message was requested."""

    def path(self, depth: int = 0) -> list[Node]:
        """Return the nodes from below `depth` to this one."""
        path = list[Node]()
        at = self
        while at.depth > depth and at.parent is not None:
            path.append(at)
            at = at.parent
        return path[::-1]


@dataclass(eq=False)
class Prompt:
    """The prompt of a request."""

    ids: list[int]
    """Shared with the agent's record: never changed."""
    origin: Origin
    opening: str = ""
    """The end of the prompt that belongs to the answer: a thought's opener, a forced call."""
    node: Node | None = None
    """The last message; None for the prompt of /v1/completions."""
    base: Sample | None = None
    """The answer whose tokens the prompt begins with."""
    text: str = ""
    """Text of the template after `base`, without the opening."""
    header: int | None = None
    """Number of tokens before the opening; None: one token has parts of both."""


@dataclass(eq=False)
class Sample:
    """A sampled answer."""

    prompt: Prompt
    """Without its ids. Its text is that between the answer before and this one."""
    new: list[int]
    """Tokens of prompt and answer after those of `prompt.base`."""
    length: int
    """Number of tokens of prompt and answer."""
    stop: str
    """Text of the special token that ended the answer; "" if there is none."""
    message: ChatMessage
    """Prepared for the template."""
    node: Node
    turns: int
    """Number of answers in prompt and answer."""
    response: LLMResponse | None
    is_continued: bool = False

    @property
    def ids(self) -> list[int]:
        """A new list of the tokens of prompt and answer.

        A list for each answer would take quadratic memory in the number of turns.
        """
        ids = list[int]()
        for each in self.chain():
            ids += each.new
        return ids

    def chain(self) -> list[Sample]:
        """Return the answers whose tokens the prompt of this one has, and this one."""
        chain = list[Sample]()
        at = self
        while at is not None:
            chain.append(at)
            at = at.prompt.base
        return chain[::-1]


@dataclass(eq=False)
class Completion:
    """The beginning of a text that continues an answer of /v1/completions."""

    text: str
    ids: list[int]
    reason: str = ""
    """`Origin.reason` of the next prompt that begins with it."""


def choose(samples: Sequence[Sample], message: ChatMessage) -> Sample:
    """Return the answer with the call ids of a message; without one, the newest."""
    ids = call_ids(message) if len(samples) > 1 else []
    return next((each for each in samples[::-1] if call_ids(each.message) == ids), samples[-1])


def call_ids(message: ChatMessage) -> list[object]:
    """Return the ids of a message's calls."""
    return [call.get("id") for call in tool_calls(message)]


def merge(node: Node, items: Sequence[Item], at: int) -> tuple[Item, int]:
    """Merge neighbouring messages of the assistant, if possible to a known message after `node`.

    Returns:
        The message, and the number of items from index `at` on that it consists of.
    """
    run = [*takewhile(lambda each: each.key[0] == "assistant", items[at : at + LONGEST_RUN])]
    if len(run) < 2:
        return items[at], 1
    tried = [(_merged(run[:size]), size) for size in range(len(run), 0, -1)]
    return next((each for each in tried if each[0].key in node.children), tried[0])


def _merged(items: Sequence[Item]) -> Item:
    messages = [item.message for item in items]
    texts = {
        name: "\n".join([str(each[name]) for each in messages if each.get(name)])
        for name in ("content", "reasoning_content")
    }
    calls = [call for each in messages for call in tool_calls(each)]
    made: ChatMessage = {"role": "assistant", **texts, "tool_calls": calls}
    return Item(key_of(made), made)


def key_of(message: ChatMessage) -> Key:
    """Return what a message is recognised by."""
    functions = [call["function"] for call in tool_calls(message)]
    calls = [(str(each["name"]), _canonical(each["arguments"])) for each in functions]
    return str(message["role"]), str(message.get("content") or "").strip(), tuple(calls)


def _canonical(arguments: object) -> bytes:
    """Return arguments as JSON in one form: keys sorted, 1.0 as 1."""
    return _encode(_decode(msgspec.json.encode(arguments)))


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(float_hook=_number).decode
