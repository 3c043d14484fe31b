"""Renders chat messages with chat templates, and tokenizes prompts.

Agents, the gateway and offline trainers use the same functions, so a supervised row has exactly the
tokens that an agent would send and sample.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from arealite.base.errors import UserError
from arealite.system.data.forms import for_template, tool_calls

if TYPE_CHECKING:
    from arealite.api.tokenizer import Tokenizer

_encode = msgspec.json.Encoder(order="deterministic").encode
MARK = "q7f3c9d1e5"
"""A text that no message contains. It shows where a template renders a message."""
TAG = re.compile(r"</?(\w+)>")
"""A marker that ordinary texts contain, too, such as <think> or </s>."""


def tokenize(tokenizer: Tokenizer, prompt: str | Sequence[object]) -> list[int]:
    """Tokenize a prompt: a text, or chat messages through the chat template (`render_prompt`).

    A text gets the special tokens that the tokenizer puts before it, such as BOS, unless it begins
    with them. Special tokens that the tokenizer appends, such as EOS, are left out. The result is
    cached, because the episodes of a group have the same prompt. The caller must not change it.

    Raises:
        UserError: the prompt is a list of messages, and cannot be rendered.
    """
    encoded = _encode(prompt)
    cached = _short if len(encoded) <= SHORT else _long
    return cached(tokenizer, encoded)


def _tokenize(tokenizer: Tokenizer, encoded: bytes) -> list[int]:
    prompt = msgspec.json.decode(encoded)
    if not isinstance(prompt, str):
        return encode(tokenizer, render_prompt(tokenizer, prompt))
    plain_ids = encode(tokenizer, prompt)
    num_plain = len(plain_ids)
    special_ids: Any = tokenizer(prompt)["input_ids"]
    for start in range(len(special_ids) - num_plain + 1):
        if special_ids[start : start + num_plain] != plain_ids:
            continue
        first_ids = special_ids[:start]
        has_first_ids = plain_ids[:start] == first_ids
        return plain_ids if has_first_ids else first_ids + plain_ids
    return special_ids  # the tokenizer reads the text differently between special tokens


SHORT = 1024
"""Prompts up to this many bytes have a larger cache: a game has thousands of positions."""
_short = lru_cache(maxsize=16384)(_tokenize)
_long = lru_cache(maxsize=2048)(_tokenize)


def render(
    tokenizer: Any,
    messages: Sequence[object],
    *,
    tools: Sequence[object] = (),
    add_generation_prompt: bool = True,
) -> str:
    """Render chat messages as text with the tokenizer's chat template.

    Args:
        tokenizer: The model's tokenizer.
        messages: Messages with `role` and `content`.
        tools: JSON schemas of the tools.
        add_generation_prompt: End with the header of the assistant's next message.

    Raises:
        UserError: the tokenizer has no chat template, or the template raises an error.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "The prompt is a list of messages, but the model's tokenizer has no chat template. "
            "Use a chat model, or write the dataset's prompts as plain text."
        )
    template = str(tokenizer.chat_template)
    if any(map(tool_calls, messages)) and "tool_calls" not in template:
        raise UserError(
            "the model's chat template renders no `tool_calls`, which the messages have. "
            "Use another model or template, or remove the messages."
        )
    try:
        return tokenizer.apply_chat_template(
            [for_template(message, template) for message in messages],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # a template can raise anything
        raise UserError(
            f"the model's chat template refuses the messages: {error}. "
            "Remove what it does not support (a system prompt, tools), or use another template."
        ) from error


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Any],
    *,
    tools: Sequence[object] = (),
) -> str:
    """Render chat messages as the prompt of an answer.

    If the last message is the assistant's, its text is the beginning of the answer: the prompt is
    the template's rendering up to the end of this text.

    Raises:
        UserError: as `render`; or the last message has tool calls; or the template changes its
            text, so that no prompt ends with it.
    """
    *earlier, last = messages
    if last["role"] != "assistant":
        return render(tokenizer, messages, tools=tools)
    if tool_calls(last):
        raise UserError(
            "the last message has tool calls, so an answer cannot continue it. "
            "Add the results of the calls, or remove the message."
        )
    beginning = str(last["content"])
    marked = [*earlier, {**last, "content": beginning + MARK}]
    rendered = render(tokenizer, marked, tools=tools, add_generation_prompt=False)
    prompt, mark, _ = rendered.rpartition(MARK)
    if not mark or not prompt.endswith(beginning):
        raise UserError(
            "the last message is the assistant's, so the answer continues it, but the chat "
            f"template changes its beginning {beginning[:40]!r}. Remove white space and thoughts "
            "from it, remove the message, or use another template."
        )
    context = prompt.removesuffix(beginning).rstrip()
    opened_tags = {tag[1] for tag in TAG.finditer(beginning) if not tag[0].startswith("</")}
    has_empty_thought = any(context.endswith(f"</{tag}>") for tag in opened_tags)
    if has_empty_thought:  # the template's
        return render(tokenizer, earlier, tools=tools) + beginning
    return prompt


def beginning_of(prompt: Any) -> str:
    """Return the beginning of the answer at the end of a prompt (`render_prompt`); "" without."""
    if not prompt or isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return ""
    return str(prompt[-1]["content"])


def encode(tokenizer: Tokenizer, rendered: str) -> list[int]:
    """Tokenize the output of `render`, which contains the special tokens already.

    Other threads run meanwhile if the tokenizer is a fast one.
    """
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or fast.truncation or fast.padding:
        return tokenizer(rendered, add_special_tokens=False)["input_ids"]
    (encoding,) = fast.encode_batch_fast([rendered], add_special_tokens=False)
    return encoding.ids


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, including special tokens."""
    fast = getattr(tokenizer, "backend_tokenizer", None)  # 3 times as fast
    if fast is None:
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return fast.decode(ids, skip_special_tokens=False)
