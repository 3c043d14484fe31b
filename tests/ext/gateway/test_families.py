"""Whole answers: calls are read, or have an error with the reason; families are detected."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from arealite.api.observation import ToolCall
from arealite.base.errors import UserError
from arealite.ext.gateway.families import FAMILIES, HERMES, Family, family_of, foreign, read_json
from arealite.ext.gateway.parser import read_calls
from tests.fakes.chat_families import FAMILIES as CHATS

LLAMA = FAMILIES["llama3_1"]
ADD = '{"name": "add", "arguments": {"a": 1}}'
LLAMA_ADD = '{"name": "add", "parameters": {"a": 1}}'
"""The call of ADD, as Llama writes it."""


def read(text: str, family: Family = HERMES) -> tuple[str, list[ToolCall]]:
    said, calls = read_calls(text, family)
    assert [call.call_id for call in calls] == [f"call_{n}" for n in range(len(calls))]
    return said, [
        ToolCall(call_id="", name=call.name, arguments=call.arguments, error=call.error)
        for call in calls
    ]


def hermes(text: str) -> tuple[str, list[ToolCall]]:
    return read(text)


def llama_json(text: str) -> tuple[str, list[ToolCall]]:
    return read(text, LLAMA)


def made(name: str, arguments: dict[str, object]) -> ToolCall:
    return ToolCall(call_id="", name=name, arguments=arguments)


def wrapped(*bodies: str) -> str:
    return "".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


MARKERS = "</tool_call><tool_call>"
ANSWERS: dict[str, tuple[Family, str, str, list[ToolCall]]] = {
    "hermes, text": (HERMES, "42 </tool_call>", "42 </tool_call>", []),
    "hermes, calls in parallel": (
        HERMES,
        "First " + wrapped(ADD, '{"name": "b", "arguments": {}}') + " then",
        "First  then",
        [made("add", {"a": 1}), made("b", {})],
    ),
    "hermes, markers in an argument": (
        HERMES,
        wrapped(json.dumps({"name": "write", "arguments": {"text": MARKERS}}), ADD),
        "",
        [made("write", {"text": MARKERS}), made("add", {"a": 1})],
    ),
    "llama, text": (LLAMA, "42", "42", []),
    "llama, calls in parallel": (
        LLAMA,
        f" <|python_tag|>{LLAMA_ADD}; {LLAMA_ADD}\n",
        " \n",
        [made("add", {"a": 1})] * 2,
    ),
    "llama, text before a call": (LLAMA, f"So: {LLAMA_ADD}", f"So: {LLAMA_ADD}", []),
    "llama, a set": (LLAMA, "{1, 2}", "{1, 2}", []),
    "llama, an object": (LLAMA, '{"answer": 3}', '{"answer": 3}', []),
}
"""A family, an answer, and the text and calls in it."""


@pytest.mark.parametrize(("family", "answer", "text", "calls"), ANSWERS.values(), ids=ANSWERS)
def test_answer_is_read_as_text_and_calls(
    family: Family, answer: str, text: str, calls: list[ToolCall]
) -> None:
    assert read(answer, family) == (text, calls)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("add(1)", "not JSON"),
        ("{'name': 'add'}", "not JSON"),
        ('{"name": "add", "arguments": {"a": 1}', "not JSON"),
        ("", "not JSON"),
        ('["add"]', 'a call must be an object with a "name"'),
        ('{"arguments": {}}', "missing required field `name`"),
        ('{"name": 3, "arguments": {}}', "Expected `str`, got `int`"),
        ('{"name": "", "arguments": {}}', 'a call must be an object with a "name"'),
        ('{"name": "add"}', '"arguments" must be an object'),
        ('{"name": "add", "arguments": "{}"}', '"arguments" must be an object'),
        ('{"name": "add", "arguments": [1]}', '"arguments" must be an object'),
        ('{"name": "add", "arguments": {"a": NaN}}', "not JSON"),
        ('{"name": "add", "arguments": {"a": -1e999}}', "out of range"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "not JSON"),
        ('{"name": "add", "arguments": ' + "[" * 99999, "not JSON"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "not JSON"),
        (ADD + " and more", "does not end with </tool_call>"),
    ],
)
def test_malformed_call_has_an_error_and_the_next_call_is_parsed(body, error) -> None:
    _, (bad, good) = hermes(wrapped(body, ADD))
    assert (bad.name, bad.arguments) == ("", {})
    assert error in bad.error
    assert good == made("add", {"a": 1})


@pytest.mark.parametrize("text", ["<tool_call>" + ADD, "<tool_call>" + ADD[:9], "<tool_call>"])
def test_truncated_call_has_an_error(text) -> None:
    said, (call,) = hermes("a" + text)
    assert said == "a"
    assert call.error


def test_bare_object_that_is_no_call_has_an_error() -> None:
    _, calls = llama_json(LLAMA_ADD + "; " + LLAMA_ADD[:-3])
    assert calls[0] == made("add", {"a": 1})
    assert [bool(call.error) for call in calls] == [False, True]
    _, (call,) = llama_json('{"name": "add", "arguments": {}}')
    assert '"parameters" must be an object' in call.error


def with_template(template: str) -> SimpleNamespace:
    """Return the part of a tokenizer by which a family is detected."""
    return SimpleNamespace(chat_template=template)


@pytest.mark.parametrize("name", CHATS)
def test_family_is_detected_by_the_chat_template(name: str) -> None:
    assert family_of(with_template(CHATS[name].template)) == FAMILIES[name]


def test_family_of_a_template_without_calls_is_text() -> None:
    assert family_of(with_template("{{ messages }}")).name == "text"
    family = family_of(with_template("<think>"))
    assert (family.name, family.think) == ("text", ["<think>", "</think>"])
    assert family_of(with_template("<think>"), "granite").name == "granite"


def test_newer_templates_of_a_family_have_other_openings() -> None:
    family = family_of(with_template("[TOOL_CALLS][ARGS]"))
    assert family.opening("add") == "[TOOL_CALLS]add[ARGS]"
    assert read('[TOOL_CALLS]add[CALL_ID]abcdefgh1[ARGS]{"a": 1}', family)[1] == [
        made("add", {"a": 1})
    ]
    family = family_of(with_template("<｜tool▁calls▁begin｜>"))
    text = family.opening("add") + '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    assert read(text, family) == ("", [made("add", {"a": 1})])
    assert "function" not in text


def test_each_call_of_a_list_has_its_own_text() -> None:
    find = '{"name": "find", "arguments": {}}'
    answer = f"Both. [TOOL_CALLS] [{ADD}, {find}]"
    at = answer.index("[TOOL_CALLS]")
    part = read_json(FAMILIES["mistral"], answer, at, ())
    assert [call.raw for call in part.calls] == [answer[at:], ", find{}"]


def test_unknown_family_is_refused() -> None:
    with pytest.raises(UserError, match=r"gateway.parser=qwen33: .*Did you mean 'qwen3'"):
        family_of(with_template(CHATS["qwen3"].template), "qwen33")


KNOWN = ["add", "find"]
FOREIGN = [
    ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "mistral"),
    ('[TOOL_CALLS]add[ARGS]{"a": 1}', "mistral"),
    ('I will add.\n[TOOL_CALLS]add{"a": 1}', "mistral"),
    (wrapped(ADD), "hermes"),
    ('<|python_tag|>{"name": "add", "parameters": {}}', "llama_json"),
    ("<|python_tag|>add.call(a=1)", "python_tag"),
    ('<function=add>{"a": 1}</function>', "function_tags"),
    ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>", "qwen3_coder"),
    ('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}', "gpt_oss"),
    ("<|start|>assistant<|channel|>commentary to=functions.add<|message|>{}", "gpt_oss"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add", "deepseek_v3"),
    ('```json\n{"name": "add", "arguments": {"a": 1}}\n```', "json"),
    ('[{"name": "add", "arguments": {"a": 1}}]', "json"),
    ('{"type": "function", "function": {"name": "add", "arguments": {}}}', "json"),
    ("[add(a=1), find(word='x')]", "pythonic"),
    ("```python\nadd(a=1)\n```", "pythonic"),
]


@pytest.mark.parametrize(("text", "name"), FOREIGN)
@pytest.mark.parametrize("configured", ["hermes", "llama_json"])
def test_call_in_another_format_is_detected(text: str, name: str, configured: str) -> None:
    if {"hermes": hermes, "llama_json": llama_json}[configured](text)[1] == []:
        assert foreign(text, KNOWN) == name
        assert name != configured


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "Mistral models write [TOOL_CALLS] before a call.",
        "A call stands between <tool_call> and </tool_call>, or after <|python_tag|> in Llama's.",
        'Then `<function=add>{"a": 1}</function>` is what you would write.',
        "[TOOL_CALLS]",
        '{"name": "Ann", "age": 4}',
        '```json\n{"name": "Ann"}\n```',
        'The row is {"name": "add", "arguments": {}}.',
        "print(42)",
        "```python\nprint(add(1))\n```",
        "```python\ndef add(a):\n    return a\n```",
        "[add] is the tool that I would use: add(a=1) gives 1.",
        "add(a=1) = 2",
        "[1, 2]",
    ],
)
def test_text_that_mentions_a_format_is_not_a_call(text: str) -> None:
    assert foreign(text, KNOWN) == ""


def test_every_family_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "model_families.md").read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []
