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


class Key(NamedTuple):
    """The key by which a message is recognised."""

    role: str = ""
    content: str = ""
    """The stripped text."""
    calls: tuple[tuple[str, bytes], ...] = ()
    """Names and arguments of calls. A result of a tool has the id of its call instead, if the
    template writes ids."""


class KeyedMessage(NamedTuple):
    """A message of a request."""

    key: Key
    message: ChatMessage

    @property
    def is_assistant(self) -> bool:
        """Whether the message is an answer or a part of one."""
        return self.key.role == "assistant"

    @property
    def is_system(self) -> bool:
        """Whether the message instructs the assistant."""
        return self.key.role == "system"


@dataclass(eq=False, kw_only=True)
class MessageNode:
    """A message of the tree."""

    parent: MessageNode | None = None
    """None: the root, which is no message."""
    key: Key = Key()
    message: ChatMessage = field(default_factory=dict[str, Any])
    """Prepared for the template."""
    kinds: int = 0
    """Kinds of the conversation up to this message."""
    characters: int = 0
    """Characters of the messages up to this one."""
    depth: int = 0
    """Number of messages up to this one; 0: the root."""
    children: dict[Key, MessageNode] = field(default_factory=dict[Key, "MessageNode"])
    samples: list[SampledAnswer] = field(default_factory=list["SampledAnswer"])
    """Sampled answers with this text and these calls."""
    is_asked: bool = False
    """Whether an answer to this message was requested."""

    def path(self, depth: int = 0) -> list[MessageNode]:
        """Return the nodes from below `depth` to this one."""
        nodes = list[MessageNode]()
        node = self
        while node.depth > depth and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(eq=False, kw_only=True)
class Prompt:
    """The prompt of a request."""

    ids: list[int]
    """Shared with the agent's record: never changed."""
    origin: Origin
    opening: str = ""
    """The end of the prompt that belongs to the answer: a thought's opener, a forced call."""
    node: MessageNode | None = None
    """The last message; None for the prompt of /v1/completions."""
    base: SampledAnswer | None = None
    """The answer whose tokens the prompt begins with."""
    template_text: str = ""
    """Text of the template after `base`, without the opening."""
    header: int | None = None
    """Number of tokens before the opening; None: one token has parts of both."""


@dataclass(eq=False, kw_only=True)
class SampledAnswer:
    """A sampled answer."""

    prompt: Prompt
    """Without its ids. Its `template_text` is that between the answer before and this one."""
    new_ids: list[int]
    """Tokens of prompt and answer after those of `prompt.base`."""
    num_tokens: int
    """Number of tokens of prompt and answer."""
    stop: str
    """Text of the special token that ended the answer; "" if there is none."""
    message: ChatMessage
    """Prepared for the template."""
    node: MessageNode
    num_turns: int
    """Number of answers in prompt and answer."""
    response: LLMResponse | None
    is_continued: bool = False

    @property
    def ids(self) -> list[int]:
        """A new list of the tokens of prompt and answer.

        A list for each answer would take quadratic memory in the number of turns.
        """
        return [token for sample in self.chain() for token in sample.new_ids]

    def chain(self) -> list[SampledAnswer]:
        """Return the answers whose tokens the prompt of this one has, and this one."""
        samples = list[SampledAnswer]()
        sample = self
        while sample is not None:
            samples.append(sample)
            sample = sample.prompt.base
        return samples[::-1]


def choose(
    samples: Sequence[SampledAnswer], message: ChatMessage, *, preferred: SampledAnswer | None
) -> SampledAnswer:
    """Return the preferred answer or that with the call ids of a message; else the newest."""
    if preferred is not None and preferred in samples:
        return preferred
    ids = call_ids(message)
    with_ids = [sample for sample in samples if call_ids(sample.message) == ids]
    return (with_ids or samples)[-1]


def call_ids(message: ChatMessage) -> list[object]:
    """Return the ids of a message's calls."""
    return [call.get("id") for call in tool_calls(message)]


def merge(node: MessageNode, items: Sequence[KeyedMessage], start: int) -> tuple[KeyedMessage, int]:
    """Merge neighbouring messages of the assistant, if possible to a known message after `node`.

    Returns:
        The message, and the number of items from index `start` on that it consists of.
    """
    candidates = items[start : start + LONGEST_RUN]
    run = [*takewhile(lambda item: item.is_assistant, candidates)]
    if len(run) < 2:
        return items[start], 1
    for length in range(len(run), 0, -1):
        merged = _merged(run[:length])
        if merged.key in node.children:
            return merged, length
    return _merged(run), len(run)


def _merged(items: Sequence[KeyedMessage]) -> KeyedMessage:
    """Join the parts of an answer: texts and thoughts by line breaks, and all calls."""
    messages = [item.message for item in items]
    message: ChatMessage = {"role": "assistant"}
    for field_name in ("content", "reasoning_content"):
        texts = [str(part[field_name]) for part in messages if part.get(field_name)]
        message[field_name] = "\n".join(texts)
    message["tool_calls"] = [call for part in messages for call in tool_calls(part)]
    return KeyedMessage(key_of(message), message)


def key_of(message: ChatMessage) -> Key:
    """Return the key by which a message is recognised."""
    functions = [call["function"] for call in tool_calls(message)]
    calls = [(str(function["name"]), _canonical(function["arguments"])) for function in functions]
    return Key(
        role=str(message["role"]),
        content=str(message.get("content") or "").strip(),
        calls=tuple(calls),
    )


def _canonical(arguments: object) -> bytes:
    """Return arguments as JSON in one form: keys sorted, 1.0 as 1."""
    return _encode(_decode(msgspec.json.encode(arguments)))


def _number(digits: str) -> int | float:
    number = float(digits)
    return int(number) if number.is_integer() else number


_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(float_hook=_number).decode
