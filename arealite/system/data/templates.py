"""Renders chat messages with chat templates, and tokenizes prompts.

Agents, the gateway and offline trainers use the same functions, so a supervised row has exactly the
tokens that an agent would send and sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from arealite.base.errors import UserError
from arealite.system.data.forms import for_template, tool_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_encode = msgspec.json.Encoder(order="deterministic").encode
MARK = "q7f3c9d1e5"
"""A text that no message contains. It shows where, and whether, a template renders a message."""


def tokenize(tokenizer: Tokenizer, prompt: str | Sequence[object]) -> list[int]:
    """Tokenize a prompt: a text, or chat messages through the chat template.

    The result is cached, because the episodes of a group have the same prompt. The caller must not
    change the list.

    Raises:
        UserError: the prompt is a list of messages, and the tokenizer has no chat template.
    """
    encoded = _encode(prompt)
    cached = _short if len(encoded) <= SHORT else _long
    return cached(tokenizer, encoded)


def _tokenize(tokenizer: Tokenizer, encoded: bytes) -> list[int]:
    prompt = msgspec.json.decode(encoded)
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]  # type: ignore[return-value]
    return encode(tokenizer, render(tokenizer, prompt))


SHORT = 1024
"""Prompts up to this many bytes have a larger cache: a game has thousands of positions."""
_short, _long = lru_cache(maxsize=16384)(_tokenize), lru_cache(maxsize=2048)(_tokenize)


def render(
    tokenizer: Any,
    messages: Sequence[object],
    *,
    tools: Sequence[object] = (),
    add_generation_prompt: bool = True,
) -> str:
    """Render chat messages as text with the tokenizer's chat template.

    Args:
        tokenizer: A tokenizer of transformers.
        messages: Messages with `role` and `content`.
        tools: JSON schemas of the tools.
        add_generation_prompt: End with the header of the assistant's next message.

    Raises:
        UserError: the tokenizer has no chat template, or the template raises an error.
    """
    if not getattr(tokenizer, "chat_template", None):
        what = "The prompt is a list of messages, but the model's tokenizer has no chat template"
        raise UserError(f"{what}. Use a chat model, or write the dataset's prompts as plain text.")
    if any(map(tool_calls, messages)) and "tool_calls" not in str(tokenizer.chat_template):
        what = "the model's chat template renders no `tool_calls`, which the messages have"
        raise UserError(f"{what}. Use another model or template, or remove the messages.")
    try:
        return tokenizer.apply_chat_template(
            [for_template(message) for message in messages],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # a template can raise anything
        what = f"the model's chat template refuses the messages: {error}"
        fix = "Remove what it does not support (a system prompt, tools), or use another template."
        raise UserError(f"{what}. {fix}") from error


def dropped_messages(
    tokenizer: Any, messages: Sequence[Any], tools: Sequence[object] = ()
) -> list[int]:
    """Return the indices of the messages whose text or calls the chat template leaves out.

    The messages are rendered again for each message: with a longer text, or without the message if
    it has calls and no text. If the result is the same, the template does not render the message.
    A message without text and calls is not listed.

    Args:
        tokenizer: A tokenizer of transformers.
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
        text = message.get("content") or ""
        if not text.strip() and not tool_calls(message):
            continue
        longer = [{**message, "content": text + MARK}] if text.strip() else []
        with suppress(UserError):  # a template that refuses the change has read the message
            if show([*messages[:index], *longer, *messages[index + 1 :]]) == rendered:
                dropped.append(index)
    return dropped


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize the output of `render`, which contains the special tokens already.

    Other threads run meanwhile if the tokenizer is a fast one.
    """
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or fast.truncation or fast.padding:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return fast.encode_batch_fast([text], add_special_tokens=False)[0].ids


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, including special tokens."""
    fast = getattr(tokenizer, "backend_tokenizer", None)  # 3 times as fast
    if fast is None:
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return fast.decode(ids, skip_special_tokens=False)


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
