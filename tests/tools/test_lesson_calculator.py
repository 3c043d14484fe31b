"""Demonstrations of the calculator's lesson are correct and parsed by the agent."""

from __future__ import annotations

import random

from arealite.api.observation import ToolCall
from arealite.ext.demo.tiny_model import make_tokenizer
from arealite.ext.gateway.families import HERMES
from arealite.ext.gateway.parser import read_calls
from arealite.ext.tools.calculator import evaluate
from tools.lesson import encode
from tools.lessons.calculator import LESSON


def test_examples_have_valid_calls_and_correct_answers() -> None:
    rng, ways = random.Random(1), set()
    for _ in range(200):
        prompt, answer = LESSON.examples(rng)
        task = prompt[0]["content"].removesuffix("=")
        _, calls = read_calls(answer, HERMES)
        ways.add((len(prompt), len(calls)))
        if calls:
            assert calls == (
                ToolCall(call_id="call_0", name="calculator", arguments={"expression": task}),
            )
        else:
            assert answer == evaluate(task)
    assert ways == {(1, 0), (1, 1), (3, 0)}


def test_call_has_few_tokens_and_decodes_unchanged() -> None:
    shape = LESSON.shape
    tokenizer = make_tokenizer(shape.alphabet, context=shape.context, words=shape.words)
    tokenizer.chat_template = LESSON.chat_template
    rng = random.Random(2)
    for _ in range(50):
        context, answer = encode(tokenizer, *LESSON.examples(rng))
        assert len(answer) <= 8
        assert len(context) + len(answer) <= shape.context
        text = tokenizer.decode(answer[:-1])
        assert text.startswith("<tool_call>") == (len(read_calls(text, HERMES)[1]) == 1)
