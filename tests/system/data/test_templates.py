"""Prompts of messages and of texts keep all that they say, and nothing is added to them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from arealite.api.observation import ChatMessage
from arealite.base.errors import UserError
from arealite.ext.prompts.rendering_probes import dropped_messages, turn_markers, unread_keys
from arealite.system.data.templates import (
    encode,
    render,
    render_prompt,
    tokenize,
)
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


def test_key_that_the_template_does_not_render_is_found() -> None:
    tokenizer = tokenizer_of("qwen3")
    thought = {**ANSWER, "reasoning_content": "It is June."}
    assert unread_keys(tokenizer, [{**USER, "name": "Ann", "weight": 0}, thought]) == ["name"]
    assert unread_keys(tokenizer, [USER, thought, USER]) == ["reasoning_content"]
    assert unread_keys(tokenizer, [USER, call(), result()]) == []


# ------------------------------------------------------------ messages of developers


@pytest.mark.parametrize("name", FAMILIES)
def test_message_of_a_developer_is_rendered(name: str) -> None:
    tokenizer = tokenizer_of(name)
    developer = {"role": "developer", "content": "Be short."}
    text = render(tokenizer, [developer, USER])
    assert "Be short." in text
    assert text == render(tokenizer, [{**developer, "role": "system"}, USER])
    assert tokenize(tokenizer, [developer, USER]) == encode(tokenizer, text)


def test_template_that_names_the_developer_gets_this_role() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    developer = {"role": "developer", "content": "Be short."}
    assert render(tokenizer, [developer]) == "system: Be short."
    tokenizer.chat_template += "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert render(tokenizer, [developer]) == "developer: Be short.!"


# ------------------------------------------------------------ the beginning of an answer


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("beginning", ["It is", "It is ", "It is\n", "It is <think>"])
def test_answer_that_a_prompt_begins_is_continued(name: str, beginning: str) -> None:
    """The prompt is the template's own text of the whole answer, up to the beginning's end."""
    tokenizer, chat = tokenizer_of(name), [SYSTEM, USER]
    text = render_prompt(tokenizer, [*chat, {"role": "assistant", "content": beginning}])
    assert text.endswith(beginning)
    assert tokenize(tokenizer, [*chat, {"role": "assistant", "content": beginning}]) == (
        encode(tokenizer, text)
    )
    whole = [*chat, {"role": "assistant", "content": f"{beginning}sunny."}]
    if beginning == "It is":
        chat.append({"role": "assistant", "content": beginning})
        options = {"tokenize": False, "continue_final_message": True}
        assert text == tokenizer.apply_chat_template(chat, **options)
        chat.pop()
    if "<think>" not in beginning:
        assert render(tokenizer, whole, add_generation_prompt=False).startswith(f"{text}sunny.")


@pytest.mark.parametrize("name", ["qwen3", "glm4_5"])
def test_thought_that_a_prompt_begins_is_continued_without_an_empty_thought(name: str) -> None:
    tokenizer, beginning = tokenizer_of(name), "<think>\nFirst,"
    text = render_prompt(tokenizer, [USER, {"role": "assistant", "content": beginning}])
    assert text == render(tokenizer, [USER]) + beginning


def test_answer_after_a_thought_is_continued() -> None:
    tokenizer, thought = tokenizer_of("qwen3"), "<think>\nIt is June.\n</think>\n\n"
    text = render_prompt(tokenizer, [USER, {"role": "assistant", "content": thought + "It is"}])
    assert text == render(tokenizer, [USER]) + thought + "It is"
    parts = {"role": "assistant", "reasoning_content": "It is June.", "content": "It is"}
    assert render_prompt(tokenizer, [USER, parts]) == text


def test_prompt_without_a_beginning_ends_with_the_header_of_the_answer() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    text = render(tokenizer, [USER])
    assert text.endswith("<|im_start|>assistant\n")
    assert render_prompt(tokenizer, [USER]) == text
    assert render_prompt(tokenizer, [USER, {"role": "assistant", "content": ""}]) == text


def test_closed_answers_are_rendered_as_before() -> None:
    text = render(tokenizer_of("qwen2_5"), [USER, ANSWER])
    assert text.endswith("Sunny.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("name", "message", "error"),
    [
        ("llama3_1", {"role": "assistant", "content": " It is"}, "changes its beginning ' It is'"),
        ("qwen3", {"role": "assistant", "content": "a</think>b"}, "changes its beginning"),
        ("qwen3", call(), "the last message has tool calls"),
    ],
)
def test_beginning_that_cannot_be_continued_is_refused(
    name: str, message: ChatMessage, error: str
) -> None:
    with pytest.raises(UserError, match=error):
        tokenize(tokenizer_of(name), [USER, message])


# ------------------------------------------------------------ texts


def with_special_tokens(name: str, form: str) -> Any:
    """Return a tokenizer that puts special tokens around a text, as in "BOS $A EOS"."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tokenizer_of(name))
    words = {"BOS": tokenizer.bos_token or "<pad>", "EOS": tokenizer.eos_token}
    for short, token in words.items():
        form = form.replace(short, token)
    pairs = [(token, tokenizer.convert_tokens_to_ids(token)) for token in words.values()]
    processor = TemplateProcessing(single=form, pair=f"{form} $B", special_tokens=pairs)
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


@pytest.mark.parametrize("form", ["$A", "BOS $A", "$A EOS", "BOS $A EOS", "BOS BOS $A EOS EOS"])
def test_text_gets_the_special_tokens_of_its_beginning_only(form: str) -> None:
    tokenizer = with_special_tokens("llama3_1", form)
    begin = [tokenizer.bos_token_id] * form.count("BOS")
    for text in ("The quick fox", "a", "aa" * 2000, "<|eot_id|>", "The<|end_of_text|>"):
        plain = encode(tokenizer, text)
        ends = [tokenizer.eos_token_id] * form.count("EOS")
        assert tokenizer(text)["input_ids"] == begin + plain + ends
        assert tokenize(tokenizer, text) == begin + plain


@pytest.mark.parametrize("form", ["$A", "BOS $A", "BOS $A EOS"])
def test_text_that_begins_with_bos_gets_no_second_one(form: str) -> None:
    tokenizer = with_special_tokens("llama3_1", form)
    rendered = render(tokenizer, [SYSTEM, USER])
    assert rendered.startswith("<|begin_of_text|>")
    assert tokenize(tokenizer, rendered) == encode(tokenizer, rendered)
    assert tokenize(tokenizer, rendered).count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("name", "markers"),
    [
        ("qwen3", {"<|im_start|>", "<|im_end|>"}),
        ("llama3_1", {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}),
        ("mistral", {"[INST]", "[/INST]"}),
        ("deepseek_v3", {"<｜User｜>", "<｜end▁of▁sentence｜>"}),
        ("glm4_5", {"<|user|>"}),
    ],
)
def test_markers_of_a_turn_are_those_of_the_template(name: str, markers: set[str]) -> None:
    """Tags such as </s> and <think> also stand in ordinary texts."""
    assert turn_markers(tokenizer_of(name)) == markers


def test_template_without_markers_has_none() -> None:
    from tests.models import tiny_tokenizer

    assert turn_markers(tiny_tokenizer()) == frozenset()
