"""Prompts of messages and of texts keep all that they say, and nothing is added to them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from arealite.api.observation import ChatMessage
from arealite.system.data.templates import dropped_messages
from tests.fakes.chat_families import FAMILIES, tokenizer_of

SYSTEM: ChatMessage = {"role": "system", "content": "You are a helpful assistant."}
"""The text is the default of Qwen2.5's template."""
USER: ChatMessage = {"role": "user", "content": "Weather?"}
ANSWER: ChatMessage = {"role": "assistant", "content": "Sunny."}


def call(content: str = "") -> ChatMessage:
    function = {"name": "search", "arguments": {"query": "weather"}}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(content: str = "21 C") -> ChatMessage:
    return {"role": "tool", "tool_call_id": "call00000", "content": content}


# ------------------------------------------------------------ messages that are left out


@pytest.mark.parametrize("name", FAMILIES)
def test_usual_conversation_has_no_dropped_message(name: str) -> None:
    """A system message that equals the default, or is merged with a question, is rendered."""
    tokenizer, chat = tokenizer_of(name), [SYSTEM, USER, ANSWER, USER]
    assert dropped_messages(tokenizer, chat) == []
    assert dropped_messages(tokenizer, [*chat, call(), result(), ANSWER]) == []
    assert dropped_messages(tokenizer, [USER, {**ANSWER, "content": ""}, USER]) == []


@pytest.mark.parametrize(
    ("name", "chat", "dropped"),
    [
        ("deepseek_v3", [USER, ANSWER, SYSTEM, USER], [2]),
        ("deepseek_v3", [{**USER, "role": "critic"}, USER, {**USER, "role": "judge"}], [0, 2]),
        ("qwen3", [{**SYSTEM, "role": "critic"}, USER], [0]),
        ("mistral", [{**SYSTEM, "role": "critic"}, USER], [0]),
        ("llama3_1", [USER, call("I search."), result(), USER], [1]),  # the text beside the call
    ],
)
def test_message_that_the_template_leaves_out_is_found(
    name: str, chat: list[ChatMessage], dropped: list[int]
) -> None:
    assert dropped_messages(tokenizer_of(name), chat) == dropped


def test_call_without_text_that_the_template_leaves_out_is_found() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("deepseek_v3"))
    condition = "message.role == 'assistant'"
    assert condition in tokenizer.chat_template
    only_texts = f"{condition} and not message.tool_calls"
    tokenizer.chat_template = tokenizer.chat_template.replace(condition, only_texts)
    assert dropped_messages(tokenizer, [USER, call(), USER]) == [1]
