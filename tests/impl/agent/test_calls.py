"""Tool calls are parsed, or have an error with the reason."""

from __future__ import annotations

import json

import pytest

from arealite.impl.agent.calls import FORMATS, Call, foreign, hermes, llama_json

ADD = '{"name": "add", "arguments": {"a": 1}}'


def wrapped(*bodies: str) -> str:
    return "".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def test_calls_in_parallel_are_read_in_order_and_the_rest_is_text() -> None:
    text, calls = hermes("First " + wrapped(ADD, '{"name": "b", "arguments": {}}') + " then")
    assert text == "First  then"
    assert calls == [Call("add", {"a": 1}), Call("b", {})]


def test_text_without_calls_is_text() -> None:
    assert hermes("42 </tool_call>") == ("42 </tool_call>", [])
    assert llama_json("42") == ("42", [])


def test_marker_inside_an_argument_is_text() -> None:
    body = json.dumps({"name": "write", "arguments": {"text": "</tool_call><tool_call>"}})
    assert hermes(wrapped(body, ADD))[1] == [
        Call("write", {"text": "</tool_call><tool_call>"}),
        Call("add", {"a": 1}),
    ]


@pytest.mark.parametrize(
    ("body", "name", "error"),
    [
        ("add(1)", "", "not JSON"),
        ("{'name': 'add'}", "", "not JSON"),
        ('{"name": "add", "arguments": {"a": 1}', "", "not JSON"),
        ("", "", "not JSON"),
        ('["add"]', "", "a call must be an object"),
        ('{"arguments": {}}', "", "a call must be an object"),
        ('{"name": 3, "arguments": {}}', "", "a call must be an object"),
        ('{"name": "", "arguments": {}}', "", "a call must be an object"),
        ('{"name": "add"}', "add", '"arguments" must be an object'),
        ('{"name": "add", "arguments": "{}"}', "add", '"arguments" must be an object'),
        ('{"name": "add", "arguments": [1]}', "add", '"arguments" must be an object'),
        ('{"name": "add", "arguments": {"a": NaN}}', "", "NaN is not a finite number"),
        ('{"name": "add", "arguments": {"a": -1e999}}', "", "-1e999 is not a finite number"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "", "not JSON"),
        ('{"name": "add", "arguments": ' + "[" * 99999, "", "not JSON"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "", "not JSON: 'utf-8'"),
        (ADD + " and more", "add", "does not end with </tool_call>"),
    ],
)
def test_malformed_call_has_an_error_and_the_next_call_is_parsed(body, name, error) -> None:
    _, (bad, good) = hermes(wrapped(body, ADD))
    assert (bad.name, bad.arguments) == (name, {})
    assert error in bad.error
    assert good == Call("add", {"a": 1})


@pytest.mark.parametrize("text", ["<tool_call>" + ADD, "<tool_call>" + ADD[:9], "<tool_call>"])
def test_truncated_call_has_an_error(text) -> None:
    said, (call,) = hermes("a" + text)
    assert said == "a"
    assert call.error


def test_bare_objects_are_calls_if_the_answer_has_no_other_text() -> None:
    one = '{"name": "add", "parameters": {"a": 1}}'
    assert llama_json(f" <|python_tag|>{one}; {one}\n") == ("", [Call("add", {"a": 1})] * 2)
    assert llama_json(f"So: {one}") == (f"So: {one}", [])
    assert llama_json("{1, 2}") == ("{1, 2}", [])
    assert llama_json('{"answer": 3}') == ('{"answer": 3}', [])
    _, calls = llama_json(one + "; " + one[:-3])
    assert calls[0] == Call("add", {"a": 1})
    assert [bool(call.error) for call in calls] == [False, True]
    _, (call,) = llama_json('{"name": "add", "arguments": {}}')
    assert '"parameters" must be an object' in call.error


KNOWN = ["add", "find"]
FOREIGN = [
    ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "mistral"),
    ('[TOOL_CALLS]add[ARGS]{"a": 1}', "mistral"),
    ('I will add.\n[TOOL_CALLS]add{"a": 1}', "mistral"),
    (wrapped(ADD), "hermes"),
    ('<|python_tag|>{"name": "add", "parameters": {}}', "llama_json"),
    ("<|python_tag|>add.call(a=1)", "python_tag"),
    ('<function=add>{"a": 1}</function>', "function_tags"),
    ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>", "function_tags"),
    ('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}', "harmony"),
    ("<|start|>assistant<|channel|>commentary to=functions.add<|message|>{}", "harmony"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add", "deepseek"),
    ('```json\n{"name": "add", "arguments": {"a": 1}}\n```', "json"),
    ('[{"name": "add", "arguments": {"a": 1}}]', "json"),
    ('{"type": "function", "function": {"name": "add", "arguments": {}}}', "json"),
    ("[add(a=1), find(word='x')]", "pythonic"),
    ("```python\nadd(a=1)\n```", "pythonic"),
]


@pytest.mark.parametrize(("text", "name"), FOREIGN)
@pytest.mark.parametrize("configured", FORMATS)
def test_call_in_another_format_is_detected(text: str, name: str, configured: str) -> None:
    if FORMATS[configured](text)[1] == []:
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
