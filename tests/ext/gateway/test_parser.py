"""Answers of ten model families are parsed whole and streamed, in any tokens, to equal results."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

from arealite.api.episode import Origin
from arealite.api.llm import LLMResponse
from arealite.ext.gateway import families
from arealite.ext.gateway.families import FAMILIES, Family, MarkedPart, ToolSchemas, family_of
from arealite.ext.gateway.parser import Parser
from arealite.ext.gateway.rendering import Renderer
from arealite.ext.gateway.request_data import ChatRequest, Delta, ParsedAnswer
from arealite.ext.gateway.tree import Prompt
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


@cache
def renderer_of(name: str) -> Renderer:
    return Renderer(tokenizer_of(name), family_of(tokenizer_of(name)))


def parse(
    name: str,
    ids: list[int],
    rng: random.Random | None = None,
    *,
    opening: str = "",
    stop_reason: str = "stop",
    **options: Any,
) -> ParsedAnswer:
    """Parse tokens in random chunks, or whole; check that the deltas add up to the answer."""
    options = {"items": [], "tools": TOOLS, **options}
    request = ChatRequest(**options)
    prompt = Prompt(ids=[0] * 7, origin=Origin(reused=3, new=4), opening=opening)
    parser = Parser(renderer_of(name), request, prompt, id="a1", index=2)
    deltas: list[Delta] = []
    at = 0
    while rng and at < len(ids):
        size = rng.choice((1, 1, 2, 9))
        deltas += parser.feed(ids[at : at + size])
        at += size
    response = LLMResponse(
        output_ids=ids, logprobs=[0.0] * len(ids), versions=[1] * len(ids), stop_reason=stop_reason
    )
    rest, answer = parser.finish(response)
    assert (answer.id, answer.prompt_tokens, answer.cached_tokens) == ("a1", 7, 3)
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
    for attempt in range(20):
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


def canonical(name: str, text: str) -> list[int]:
    return tokenizer_of(name)(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("tool", [None, "search"])
def test_forced_call_begins_with_the_opening(name: str, tool: str | None) -> None:
    text = answer_of(name, message(name, calls=CALLS[:1])).lstrip()
    opening = family_of(tokenizer_of(name)).opening(tool).lstrip()
    at = text.index(opening.lstrip())
    answer = parse(name, ended(name, canonical(name, text[at + len(opening) :])), opening=opening)
    (call,) = answer.calls
    assert (call.name, json.loads(call.arguments)) == CALLS[0]
    assert answer.text == answer.thought == ""


def test_thought_that_the_prompt_began_is_a_thought() -> None:
    text = "I see.\n</think>\n\nDone"
    answer = parse("qwen3", ended("qwen3", canonical("qwen3", text)), opening="<think>\n")
    assert (answer.thought, answer.text) == ("I see.", "Done")
    answer = parse("qwen3", canonical("qwen3", "I see"), opening="<think>\n", stop_reason="length")
    assert (answer.thought, answer.text, answer.stop_reason) == ("I see", "", "length")
    answer = parse("qwen3", canonical("qwen3", "Text <think>no</think>"))
    assert (answer.thought, answer.text) == ("", "Text <think>no</think>")


@pytest.mark.parametrize("name", CHATS)
def test_calls_are_text_where_they_are_not_allowed(name: str) -> None:
    text, rng = answer_of(name, message(name, text="So:", calls=CALLS)), random.Random(3)
    ids = ended(name, canonical(name, text))
    refused: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}]
    for options in refused:
        answer = parse(name, ids, rng, **options)
        assert (answer.calls, answer.malformed, answer.stop_reason) == ((), 0, "stop")
        assert "indented" in answer.text
        assert "search" in answer.text
    answer = parse(name, ids, rng, is_parallel=False)
    (call,) = answer.calls
    assert (call.name, json.loads(call.arguments)) == CALLS[0]
    assert ("read-file" in answer.text) == (name not in ONE_CALL)
    assert answer.malformed == 0


BROKEN = {
    "qwen2_5": '<tool_call>\n{"name": "search", "arguments": {"text": "a"}\n</tool_call>',
    "qwen3": '<tool_call>{"name": "search", "arguments": "a"}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=search>\n<parameter=text>\na\n</function>\n</tool_call>",
    "llama3_1": '{"name": "search", "parameters": {"text": "a"',
    "mistral": '[TOOL_CALLS] [{"name": "search", "arguments": {"text": a}}]',
    "glm4_5": "<tool_call>search\n<arg_key>text\n<arg_value>a</arg_value>\n</tool_call>",
    "deepseek_v3": "<｜tool▁call▁begin｜>search<｜tool▁sep｜>[1]\n<｜tool▁call▁end｜>",
    "kimi_k2": "<|tool_call_begin|>functions.search:0{}<|tool_call_end|>",
    "gpt_oss": "<|channel|>commentary to=functions.search<|message|>text=a",
    "granite": '<|tool_call|>[{"name": "search", "arguments": {"text": "a"}}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_call_is_text_and_counted(name: str) -> None:
    rng = random.Random(5)
    for attempt in range(20):
        ids = ended(name, scattered(name, BROKEN[name], rng))
        answer = parse(name, ids, rng if attempt else None)
        assert (answer.text, answer.calls, answer.malformed) == (BROKEN[name], (), 1)
        assert answer.stop_reason == "stop"


@pytest.mark.parametrize("name", [n for n in CHATS if FAMILIES[n].close and n != "glm4_5"])
def test_close_marker_in_an_argument_does_not_end_the_call(name: str) -> None:
    close, rng = FAMILIES[name].close, random.Random(9)
    told = [("search", {"text": f"a {close}\n{close} b", "any": close})]
    text = answer_of(name, message(name, calls=told * 2))
    broken = text.replace(": {", ': {"text": "\\x", ', 1)
    for attempt in range(10):
        answer = parse(name, ended(name, scattered(name, text, rng)), rng if attempt else None)
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == told * 2
    if name == "qwen3":
        answer = parse(name, ended(name, canonical(name, broken)), rng)
        assert (len(answer.calls), answer.malformed) == (1, 1)


def test_arguments_without_types_are_converted_by_the_schema() -> None:
    form = "<tool_call>\n<function=search>{}</function>\n</tool_call>"
    values = {"is_new": "True", "count": "7", "text": "7", "ratio": "x", "any": "5", "else": "[1]"}
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items())
    (call,) = parse("qwen3_coder", canonical("qwen3_coder", form.format(tags))).calls
    wanted = {"is_new": True, "count": 7, "text": "7", "ratio": "x", "any": 5, "else": [1]}
    assert json.loads(call.arguments) == wanted


def test_unknown_tool_is_a_call_and_ids_depend_on_the_history() -> None:
    text = '<tool_call>{"name": "rm", "arguments": {"a":  [1,2]}}</tool_call>' * 2
    first, second = parse("qwen2_5", canonical("qwen2_5", text)).calls
    assert (first.name, first.arguments) == ("rm", '{"a":  [1,2]}')  # as sampled
    assert first.id != second.id
    assert (first.id[:5], len(first.id)) == ("call_", 29)
    assert parse("qwen2_5", canonical("qwen2_5", text)).calls == (first, second)
    third, _ = parse("qwen2_5", canonical("qwen2_5", text), items=[b"Go."]).calls
    assert third.id not in (first.id, second.id)


@pytest.mark.parametrize(
    ("text", "stop", "said", "stop_string"),
    [
        ("One\nObservation: 3", ("Observation:",), "One", "Observation:"),
        ("a STOP b", ("STOP b", "STOP"), "a", "STOP"),  # the server stopped where one ended first
        ("no end Obs", ("Observation:",), "no end Obs", ""),
        ("<think>\nx END y</think>z", ("END",), "", "END"),
    ],
)
def test_stop_string_is_cut_from_the_text(text, stop, said, stop_string) -> None:
    rng = random.Random(7)
    for attempt in range(30):
        ids = scattered("qwen3", text, rng)
        answer = parse("qwen3", ids, rng if attempt else None, stop=stop)
        assert (answer.text, answer.stop_string) == (said, stop_string)
        assert answer.stop_reason == ("stop_string" if stop_string else "stop")
        assert answer.response
        assert answer.response.output_ids == ids


def test_token_that_ended_the_turn_is_cut_and_others_stay() -> None:
    ids = canonical("glm4_5", "Hi<|user|>you<|observation|>")
    assert parse("glm4_5", ids, random.Random(1)).text == "Hi<|user|>you"
    assert parse("glm4_5", ids, stop_reason="length").text == "Hi<|user|>you<|observation|>"


def test_tokens_have_texts_if_logprobs_are_asked_for() -> None:
    ids = ended("qwen3", canonical("qwen3", "Hi 🙂"))
    assert parse("qwen3", ids).tokens == ()
    tokens = parse("qwen3", ids, logprobs=True).tokens
    assert (tokens[0], tokens[-1], len(tokens)) == ("H", "<|im_end|>", len(ids))


def test_completion_of_a_prompt_is_the_sampled_text() -> None:
    text = ' <think> {"name": "search"} <tool_call>{} \n'
    answer = parse("qwen3", ended("qwen3", canonical("qwen3", text)), random.Random(2), prompt="p")
    assert (answer.text, answer.thought, answer.calls) == (text, "", ())


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "{",
        "}",
        '"',
        "\\",
        "[",
        "]",
        "<",
        "to=",
    ),
    *("<function=search>", "</function>", "<parameter=text>", "</parameter>", "[TOOL_CALLS]", "\n"),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|channel|>",
        "analysis",
        ";",
        ",",
    ),
    *("<|message|>", "<|start|>assistant", "<|end|>", "<|call|>", "commentary to=functions.search"),
    *(
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>",
        "```json\n",
        "<｜tool▁call▁end｜>",
        " ",
        "\ud7ff",
    ),
    *("<|tool_call_begin|>", "functions.search:0", "<|tool_call_argument_begin|>", "NaN", "1e999"),
    *(
        "<|tool_call_end|>",
        "<|tool_call|>",
        "<|python_tag|>",
        '{"name": "search", ',
        "\\ud800",
        "🙂",
    ),
    *('"arguments": {}}', '"parameters": {"text": 1}}', '"arguments": {"text": "</tool_call>"}}'),
]


@pytest.mark.parametrize("name", CHATS)
def test_hostile_answer_is_parsed_equally_whole_and_streamed(name: str) -> None:
    rng, good, malformed, calls = random.Random(11), list[str](), 0, 0
    for options in ANSWERS:
        good.append(answer_of(name, message(name, **options)))
    for _ in range(80):
        text = "".join(rng.choices(good, k=2))
        for _ in range(rng.randrange(4)):
            at, end = rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)
            piece = rng.choice(("", text[at : at + 40], rng.choice(PIECES), rng.choice(good)))
            text = text[:at] + piece + text[max(at, min(end, at + 9)) :]
        ids, reason = scattered(name, text, rng), rng.choice(("stop", "length"))
        whole = parse(name, ids, stop_reason=reason)
        assert parse(name, ids, rng, stop_reason=reason) == whole
        assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls)
        calls, malformed = calls + len(whole.calls), malformed + whole.malformed
    assert min(calls, malformed) > 10


@pytest.mark.parametrize("name", CHATS)
def test_invalid_bytes_are_decoded_equally_whole_and_streamed(name: str) -> None:
    rng, vocabulary = random.Random(13), tokenizer_of(name).get_vocab()
    ordinary = [vocabulary[token] for token in vocabulary if len(token) == 1]
    for _ in range(20):
        ids = rng.choices(ordinary, k=200)
        assert parse(name, ids, rng).text == parse(name, ids).text


@pytest.mark.timeout(60)  # quadratic time would take an hour
@pytest.mark.parametrize("name", CHATS)
def test_long_answer_takes_linear_time(name: str) -> None:
    family = family_of(tokenizer_of(name))
    starts = ["", family.openers[-1], family.opening("search"), family.opening(None)]
    units = [
        *PIECES,
        *family.openers,
        family.close,
        "a",
        "1",
        "[[",
        "[],",
        '<tool_call>{"',
        "\ufffd",
    ]
    units += ["</arg_key><arg_value></arg_value>", "</function>\n", "to=a", "</parameter>", ":1"]
    for unit in units:
        text = random.Random(unit).choice(starts) + unit * (10_000 // max(1, len(unit)))
        parse(name, canonical(name, text))
    for start in starts[1:3]:
        for unit in ("a", " ", '"'):
            parse(name, canonical(name, start + unit * 20_000), random.Random(1))


def test_long_call_is_read_again_only_after_it_has_grown(monkeypatch) -> None:
    text, sizes = FAMILIES["qwen3"].opening("search") + '{"text": "' + "ab " * 40_000, list[int]()
    read = families.read_json

    def counting(family: Family, text: str, at: int, tools: ToolSchemas) -> MarkedPart:
        sizes.append(len(text) - at)
        return read(family, text, at, tools)

    monkeypatch.setattr(families, "read_json", counting)
    ids = ended("qwen3", canonical("qwen3", text + '"}}\n</tool_call>'))
    (call,) = parse("qwen3", ids, random.Random(1)).calls
    assert len(call.arguments) > 100_000
    assert sum(sizes) < 20 * len(text)
