"""Templates with other forms of calls, and stand-ins that take the place of answers."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from arealite.api.observation import ChatMessage
from arealite.ext.gateway.families import family_of
from arealite.ext.gateway.rendering import CALLS, TOOLS, Renderer
from arealite.ext.gateway.request_data import ApiError
from arealite.system.data.templates import decode
from tests.ext.gateway.chats import Client, full, results, user
from tests.fakes.chat_families import FAMILIES, tokenizer_of

TEMPLATE = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}{% if m.content %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}CALL{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
FORMS = {
    "json text": "{{ '[' + call.function.name + ' ' + call.function.arguments + ']' }}",
    "objects": "{{ '[' + call.function.name + ' ' + (call.function.arguments | tojson) + ']' }}",
    "python": "{{ call.function.name }}({% for k, v in call.function.arguments.items() %}"
    "{{ k }}='{{ v }}'{% endfor %})",
}


def with_template(template: str) -> Any:
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = template
    return tokenizer


def answer(content: str = "", **arguments: Any) -> ChatMessage:
    function = {"name": "add", "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


@pytest.mark.parametrize("form", FORMS)
async def test_arguments_have_the_form_that_the_template_needs(form: str) -> None:
    client = Client(with_template(TEMPLATE.replace("CALL", FORMS[form])))
    first = await client.ask(user("q"))
    said = client.say(first, calls=[("add", {"n": 1})], sampled="[add  {'n':1}]")
    second = await client.ask(*results(said, "r"))
    assert second.ids[: second.origin.reused] == full(first, said)
    assert second.origin.reason == ""
    renderer = client.conversation.renderer
    text = renderer.render([user("q"), renderer.prepare(answer(n="x"))], ())
    expected = {
        "json text": '[add {"n":"x"}]',
        "objects": '[add {"n": "x"}]',
        "python": "add(n='x')",
    }
    assert expected[form] in text


async def test_calls_that_the_template_leaves_out_stay_as_sampled() -> None:
    client = Client(with_template(TEMPLATE.replace("CALL", "")))
    earlier, new = list[int](), [user("q")]
    for turn in range(5):
        prompt = await client.ask(*new)
        assert prompt.ids[: len(earlier)] == earlier
        assert prompt.origin.reason == ("" if turn else "first")
        said = client.say(prompt, calls=[("add", {})], sampled="[add]")
        earlier, new = full(prompt, said), results(said, "r")


async def test_late_instructions_are_the_users_where_the_template_needs_it() -> None:
    client = Client(tokenizer_of("mistral"), tools=[])
    system: ChatMessage = {"role": "system", "content": "one"}
    late: ChatMessage = {"role": "developer", "content": "three"}
    first = await client.ask(system, {**system, "content": "two"}, user("q"), late)
    assert client.text(first.ids) == "<s>[INST] one\n\ntwo\n\nq\n\nthree[/INST]"
    said = client.say(first, calls=[("add", {})])
    second = await client.ask(*results(said, "r"))
    assert second.ids[: second.origin.reused] == full(first, said)


def test_text_after_an_answer_does_not_depend_on_the_answers_text() -> None:
    tokenizer = tokenizer_of("qwen3")
    renderer = Renderer(tokenizer, family_of(tokenizer))
    new: list[ChatMessage] = [{"role": "tool", "tool_call_id": "call00000", "content": "r"}]
    kinds = CALLS | TOOLS
    after = renderer.render_after(kinds, answer("text " * 1000, n=list(range(1000))), new)
    assert after == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert renderer.remaining(after, "<|im_end|>", "<|im_end|>\n") == after[len("<|im_end|>") :]
    assert renderer.remaining(after, "", "<|im_end|>\n") == after
    other = renderer.remaining(after, "<|endoftext|>", "<|im_end|>\n")
    assert other == after[len("<|im_end|>") :]


def test_new_question_that_drops_a_thought_has_no_incremental_text() -> None:
    tokenizer = tokenizer_of("qwen3")
    renderer = Renderer(tokenizer, family_of(tokenizer))
    thinking: ChatMessage = {"role": "assistant", "content": "a", "reasoning_content": "t"}
    assert renderer.render_after(0, thinking, [user("more")]) is None
    assert renderer.render_after(0, {**thinking, "reasoning_content": ""}, [user("more")])


async def test_tokenizer_without_a_chat_template_is_an_error_400() -> None:
    client = Client(with_template(None))  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="chat_template is not set"):
        await client.ask(user("q"))
    assert (await client.ask(prompt="Hello")).ids


@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_equals_that_of_the_tokenizer(name: str) -> None:
    tokenizer, draw = tokenizer_of(name), random.Random(name)
    for size in range(60):
        ids = [draw.randrange(len(tokenizer)) for _ in range(size)]
        assert decode(tokenizer, ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
