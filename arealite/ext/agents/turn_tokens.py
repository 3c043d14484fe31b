"""Tokenizes what a turn adds to a conversation."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from arealite.api.llm import LLMResponse
from arealite.system.data.templates import encode

_first_prompt = lru_cache(maxsize=1024)(encode)
"""Tokenise a first prompt. The episodes of a group have the same first prompt."""


@lru_cache(maxsize=2**14)
def special_text(tokenizer: Any, token: int) -> str:
    """Return the text of a special token, which may end a turn; "" for an ordinary token."""
    is_ordinary = bool(tokenizer.decode([token], skip_special_tokens=True))
    return "" if is_ordinary else tokenizer.decode([token])


def stop_text(tokenizer: Any, response: LLMResponse | None) -> str:
    """Return the text of the special token that ended an answer; "" without one."""
    if response is None or response.stop_reason != "stop" or not response.output_ids:
        return ""
    return special_text(tokenizer, response.output_ids[-1])


def encode_after(tokenizer: Any, ids_before: Sequence[int], new_text: str) -> list[int]:
    """Tokenize the text that a turn adds to a conversation; the tokens before it stay as they are.

    The text is tokenized after the token that ended the turn: tokenizers treat the start of a
    text, and white space after a special token, differently. The caller must not change the
    result, because that of a first prompt is cached.
    """
    if not ids_before:
        return _first_prompt(tokenizer, new_text)
    last_id = ids_before[-1]
    end_of_turn = special_text(tokenizer, last_id)
    if end_of_turn:
        ids = encode(tokenizer, end_of_turn + new_text)
        if ids[:1] == [last_id]:
            return ids[1:]
    return encode(tokenizer, new_text)


def common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    for index, (element, other) in enumerate(zip(first, second, strict=False)):
        if element != other:
            return index
    return min(len(first), len(second))
