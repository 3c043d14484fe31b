"""Finds what a chat template leaves out, by rendering changed conversations."""

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from arealite.base.errors import UserError
from arealite.system.data.forms import tool_calls
from arealite.system.data.templates import MARK, TAG, render

MARKER = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{1,20}\]")
"""A marker of a template, such as <|im_end|> or [/INST]."""
READ_KEYS = {"role", "content", "tool_calls", "tool_call_id"}
"""Keys of a message that `unread_keys` does not look for."""


def dropped_messages(
    tokenizer: Any,
    messages: Sequence[Any],
    tools: Sequence[object] = (),
) -> list[int]:
    """Return the indices of the messages whose text or calls the chat template leaves out.

    The messages are rendered again for each message: with a longer text, or without the message if
    it has calls and no text. If the result is the same, the template does not render the message.
    A message without text and calls is not listed.

    Args:
        tokenizer: The model's tokenizer.
        messages: A conversation or the beginning of one.
        tools: JSON schemas of the tools.

    Raises:
        UserError: the template refuses the messages.
    """
    is_question = messages[-1]["role"] != "assistant"
    show = partial(render, tokenizer, tools=tools, add_generation_prompt=is_question)
    rendered = show(messages)
    dropped = list[int]()
    for index, message in enumerate(messages):
        content = message.get("content") or ""
        has_content = bool(content.strip())
        if not has_content and not tool_calls(message):
            continue
        replacement = [{**message, "content": content + MARK}] if has_content else []
        changed = [*messages[:index], *replacement, *messages[index + 1 :]]
        with suppress(UserError):  # a template that refuses the change has read the message
            if show(changed) == rendered:
                dropped.append(index)
    return dropped


def unread_keys(tokenizer: Any, messages: Sequence[Any]) -> list[str]:
    """Return the keys of messages, such as `name`, that do not change what the template renders.

    Raises:
        UserError: the template refuses the messages.
    """
    keys = set[str]()
    for message in messages:
        keys.update(key for key, field in message.items() if field)
    keys -= READ_KEYS
    if not keys:
        return []
    show = partial(render, tokenizer, add_generation_prompt=False)
    rendered = show(messages)
    unread = list[str]()
    for key in sorted(keys):
        without_key = [{**message, key: None} for message in messages]
        if show(without_key) == rendered:
            unread.append(key)
    return unread


@lru_cache(maxsize=16)
def turn_markers(tokenizer: Any) -> frozenset[str]:
    """Return the markers that a chat template writes between an answer and the next one.

    Tags that stand in ordinary texts, too, are left out.
    """
    question = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": MARK}
    try:
        rendered = render(tokenizer, [question, answer, question], add_generation_prompt=False)
    except UserError:  # the template refuses such a conversation
        return frozenset()
    _, _, after_answer = rendered.rpartition(MARK)
    markers = MARKER.findall(after_answer)
    return frozenset(marker for marker in markers if not TAG.fullmatch(marker))


def rendered_marker(tokenizer: Any, content: str) -> str:
    """Return the marker that shows that a text is the output of a chat template; else ""."""
    bos = tokenizer.bos_token
    if bos and content.lstrip().startswith(bos):
        return bos
    for marker in sorted(turn_markers(tokenizer)):
        if marker in content:
            return marker
    return ""
