"""Rows and prompts on SmolLM2's own tokenizer and chat template."""

from __future__ import annotations

from typing import Any

import pytest

from arealite.api.agent import load_tokenizer
from arealite.base.errors import UserError
from arealite.ext.offline.answers import turn_end
from arealite.ext.offline.examples import ASSISTANT
from tests.ext.offline.test_rows import encode
from tests.smollm2 import smollm2

SYSTEM = {"role": "system", "content": "Answer in one word."}
QUESTION = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": "Paris."}
AGAIN = {"role": "user", "content": "And of Italy?"}
SECOND = {"role": "assistant", "content": "Rome."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}
SCHEMA = {"type": "function", "function": {"name": "search", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(smollm2()))


@pytest.mark.parametrize(
    "messages",
    [
        [QUESTION, ANSWER],  # the template adds its own system message
        [SYSTEM, QUESTION, ANSWER],
        [QUESTION, ANSWER, AGAIN, SECOND],
        [SYSTEM, QUESTION, ANSWER, AGAIN, SECOND],
    ],
)
def test_chat_row_has_the_tokens_of_the_templates_rendering(tokenizer: Any, messages: Any) -> None:
    (example,) = encode({"messages": messages}, tokenizer=tokenizer)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    whole = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert example.tokens.tolist() == whole[: len(example.tokens)]
    assert tokenizer.decode(whole[len(example.tokens) :]) == "\n"  # after the last <|im_end|>
    texts = [message["content"] for message in messages if message["role"] == "assistant"]
    trained = tokenizer.decode(example.tokens[example.kinds == ASSISTANT])
    assert trained == "".join(f"{text}<|im_end|>" for text in texts)


def test_columns_and_weights_are_honoured(tokenizer: Any) -> None:
    row = {"messages": [QUESTION, {**ANSWER, "weight": 0}, AGAIN, SECOND], "system": "Be short."}
    (example,) = encode(row, tokenizer=tokenizer)
    assert tokenizer.decode(example.tokens[example.kinds == ASSISTANT]) == "Rome.<|im_end|>"
    text = tokenizer.decode(example.tokens)
    assert text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"messages": [QUESTION, CALL]}, "renders no `tool_calls`"),
        ({"messages": [QUESTION, ANSWER], "tools": [SCHEMA]}, "leaves out the tool `search`"),
        (
            {"messages": [QUESTION, {**ANSWER, "reasoning_content": "France, Europe"}]},
            "leaves out `reasoning_content` of message 2",
        ),
    ],
)
def test_row_that_the_template_does_not_render_is_refused(
    tokenizer: Any, row: dict[str, Any], fault: str
) -> None:
    with pytest.raises(UserError, match=fault):
        encode(row, tokenizer=tokenizer)


def test_end_of_turn_is_the_templates(tokenizer: Any) -> None:
    assert turn_end(tokenizer).marker == "<|im_end|>"
