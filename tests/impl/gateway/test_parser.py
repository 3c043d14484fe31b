"""Answers of ten model families are parsed whole and streamed, in any tokens, to equal results."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from arealite.api.llm import LLMResponse
from arealite.impl.gateway.exchange import Answer, ChatRequest, Delta
from arealite.impl.gateway.families import family_of
from arealite.impl.gateway.parser import Parser
from tests.fakes.chat_families import FAMILIES as CHATS
from tests.fakes.chat_families import scattered, tokenizer_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Finds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "is_new": {"type": "boolean"},
                    "tags": {"type": "array"},
                    "options": {"type": "object"},
                    "any": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                },
            },
        },
    }
    for name in ("search", "mcp__files__read-file")
]
ARGUMENTS = {
    "text": 'Größe 東京 🙂 "quoted" {"a": [1]} \\n\n  indented\ttab',
    "count": -3,
    "ratio": 1e-7,
    "is_new": True,
    "tags": ["x", {"y": None}, []],
    "options": {"deep": {"er": "</tool"}},
    "any": "5 apples",
}
ONE_CALL = ("llama3_1", "gpt_oss")
THINKING = ("qwen3", "glm4_5", "gpt_oss")


def message(name: str, *, thought: str = "", text: str = "", calls: Any = ()) -> dict[str, Any]:
    """Return an answer as a message that the template of a family can render."""
    ids = {"mistral": "call{:05}", "kimi_k2": "functions.{name}:{}"}.get(name, "call_{}")
    told: dict[str, Any] = {"role": "assistant", "content": text}
    if thought and name in THINKING:
        told["reasoning_content"] = thought
    if calls:
        told["tool_calls"] = [
            {
                "id": ids.format(number, name=tool),
                "type": "function",
                "function": {"name": tool, "arguments": arguments},
            }
            for number, (tool, arguments) in enumerate(calls[: 1 if name in ONE_CALL else None])
        ]
        if name == "llama3_1":
            told["content"] = ""
    return told


def answer_of(name: str, told: dict[str, Any]) -> str:
    """Return what the template renders after the generation prompt, without the end of the turn."""

    def render(messages: list[Any], is_prompt: bool) -> str:
        return tokenizer_of(name).apply_chat_template(
            messages, tools=TOOLS, tokenize=False, add_generation_prompt=is_prompt
        )

    asked = [{"role": "user", "content": "Go."}]
    prompt, whole = render(asked, True), render([*asked, told], False)
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].rstrip("\n")
    for end in CHATS[name].ends:
        text = text.removesuffix(end)
    return text


def parse(
    name: str,
    ids: list[int],
    rng: random.Random | None = None,
    *,
    opening: str = "",
    stop_reason: str = "stop",
    **options: Any,
) -> Answer:
    """Parse tokens in random chunks, or whole; check that the deltas add up to the answer."""
    tokenizer = tokenizer_of(name)
    request = ChatRequest(items=[], **({"tools": TOOLS} | options))
    parser = Parser(family_of(tokenizer), tokenizer, request, opening=opening, seed="s", index=2)
    deltas: list[Delta] = []
    at = 0
    while rng and at < len(ids):
        size = rng.choice((1, 1, 2, 9))
        deltas += parser.feed(ids[at : at + size])
        at += size
    response = LLMResponse(ids, [0.0] * len(ids), [1] * len(ids), stop_reason)
    rest, answer = parser.finish(response, id="a1", prompt_tokens=7, cached_tokens=3)
    deltas += rest
    added = {
        kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("text", "thought")
    }
    assert added == {"text": answer.text, "thought": answer.thought}
    assert tuple(d.call for d in deltas if d.call) == answer.calls
    assert [d.kind for d in deltas].index("end") == len(deltas) - 1
    assert deltas[-1].answer == answer
    assert {d.index for d in deltas} == {2}
    answer.message()
    return answer


def ended(name: str, ids: list[int]) -> list[int]:
    return [*ids, tokenizer_of(name).convert_tokens_to_ids(CHATS[name].ends[0])]


CALLS = [("search", ARGUMENTS), ("mcp__files__read-file", {}), ("search", {"text": "null"})]
ANSWERS = [
    {"text": "Just text, with 🙂 and <b>tags</b>."},
    {"text": "Two\n\nparagraphs", "thought": "First I\nthink 東京."},
    {"calls": CALLS[:1]},
    {"calls": CALLS},
    {"text": "Let me look.", "thought": "Hmm.", "calls": CALLS},
]


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_rendered_answer_is_read_from_any_tokens(name: str, number: int) -> None:
    told, rng = message(name, **ANSWERS[number]), random.Random(number)
    text = answer_of(name, told)
    for attempt in range(40):
        ids = ended(name, scattered(name, text, rng))
        answer = parse(name, ids, rng if attempt else None)
        assert (answer.text, answer.thought) == (told["content"], told.get("reasoning_content", ""))
        wanted = [call["function"] for call in told.get("tool_calls", ())]
        read = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in answer.calls]
        assert read == wanted
        assert answer.stop_reason == ("calls" if wanted else "stop")
        assert answer.malformed == 0
        if name == "kimi_k2":
            assert [call.id for call in answer.calls] == [
                c["id"] for c in told.get("tool_calls", ())
            ]
        if name == "mistral":
            assert all(len(call.id) == 9 for call in answer.calls)
