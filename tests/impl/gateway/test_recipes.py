"""Texts are filled into earlier renderings only where the template would render the same."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from arealite.impl.gateway.families import family_of
from arealite.impl.gateway.recipes import Recipe
from arealite.impl.gateway.rendering import ANSWERS, CALLS, SYSTEM, TOOLS, Renderer
from arealite.system.data.chats import decode
from tests.fakes.chat_families import FAMILIES, tokenizer_of

TEXTS = [
    *(
        "hello",
        " hello",
        "hello\n",
        "a 'quoted' \"text\" <b>&amp;</b> {{ x }} {% y %}",
        "é東🙂",
        "",
    ),
    *("<tool_response>\nx\n</tool_response>", "<think>t</think>x", "</think>", "false", "0", " "),
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
READS = """{% for m in messages %}[{{ m.role }}]
{%- if m.content.startswith('<x>') %}A{{ m.content }}{% elif 'y' in m.content %}B{{ m.content }}
{%- elif m.content == 'z' %}C{% else %}{{ '(' + m.content + ')' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def renderer_of(template: str) -> Renderer:
    tokenizer = copy.copy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = template
    return Renderer(tokenizer, family_of(tokenizer))


def check(renderer: Renderer, kinds: int, answer: Any, new: list[Any]) -> None:
    texts = [message["content"] for message in new]
    expected = renderer._follow(kinds, answer, new, texts)
    assert renderer.follow(kinds, answer, new) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_filled_rendering_equals_that_of_the_template(name: str) -> None:
    tokenizer, draw = tokenizer_of(name), random.Random(name)
    renderer = Renderer(tokenizer, family_of(tokenizer))
    said = {"role": "assistant", "content": "x"}
    called = {**said, "tool_calls": [CALL]}
    for _ in range(150):
        kinds = draw.choice([0, ANSWERS, ANSWERS | SYSTEM, ANSWERS | CALLS | TOOLS])
        roles = draw.choice([["user"], ["tool"], ["tool", "tool"], ["tool", "user"]])
        new = [{"role": role, "content": draw.choice(TEXTS)} for role in roles]
        new = [{**m, "tool_call_id": CALL["id"]} if m["role"] == "tool" else m for m in new]
        check(renderer, kinds, called if roles[0] == "tool" else said, new)


@pytest.mark.parametrize("first", ["<x>1", "y", "z", "plain"])
def test_text_for_which_the_template_decides_otherwise_is_rendered_anew(first: str) -> None:
    renderer, answer = renderer_of(READS), {"role": "assistant", "content": "a"}
    for text in (first, "plain", "<x>2", "<x>", "my y", "z", "zz", "(z)"):
        check(renderer, 0, answer, [{"role": "user", "content": text}])


@pytest.mark.parametrize(
    "use",
    [
        "m.content | upper",
        "m.content | length",
        "m.content[:3]",
        "m.content.split('l')[0]",
        "'%s' % m.content",
        "m.content ~ ('!' if (m.content ~ '').startswith('w') else '')",
        "m.content | replace('world', 'moon')",
        "'yes' if (m.content + '') == 'world' else 'no'",
        "m.content | tojson",
    ],
)
def test_template_that_changes_texts_renders_each(use: str) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ USE }}{% if m.role == 'assistant' %}"
    template += "{{ m.content }}{% endif %}{% endfor %}"
    renderer = renderer_of(template.replace("USE", use))
    for text in ("hello", "world", 'q"q'):
        check(
            renderer, 0, {"role": "assistant", "content": "a"}, [{"role": "user", "content": text}]
        )
    assert not any(recipe.is_usable for recipe in renderer._recipes.values())


def test_rendering_in_another_order_is_not_used() -> None:
    recipe = Recipe(["a", "b"], lambda texts: str(texts[1]) + str(texts[0]))
    assert not recipe.is_usable


@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_equals_that_of_the_tokenizer(name: str) -> None:
    tokenizer, draw = tokenizer_of(name), random.Random(name)
    for size in range(60):
        ids = [draw.randrange(len(tokenizer)) for _ in range(size)]
        assert decode(tokenizer, ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
