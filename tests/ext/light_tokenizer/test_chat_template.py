"""Chat templates are rendered as transformers renders them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from jinja2.exceptions import SecurityError, TemplateError
from transformers import AutoTokenizer

from arealite.api.agent import load_tokenizer
from arealite.ext.light_tokenizer.light_tokenizer import LightTokenizer
from arealite.ext.light_tokenizer.tokenizer_folder import is_compared
from tests.fakes.chat_families import FAMILIES, SHAPES, tokenizer_of
from tests.fakes.tokenizer_folders import byte_level

pytestmark = pytest.mark.skipif(
    not is_compared(transformers.__version__), reason="transformers reads all folders"
)
SYSTEM = [{"role": "system", "content": "Be short. <b>é</b>"}]
CALLS = [
    {
        "id": "c00010000",
        "type": "function",
        "function": {"name": "search", "arguments": {"query": "a <b> 東京", "limit": 3}},
    }
]
RESULT = {"role": "tool", "tool_call_id": "c00010000", "name": "search", "content": "sunny"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search <the> web.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]
USER = {"role": "user", "content": "How is\n  the weather? "}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [USER, {"role": "assistant", "content": "Good."}],
    [USER, {"role": "assistant", "content": " Good.  "}],
    [USER, {"role": "assistant", "content": "Good.", "reasoning_content": "Sun."}, USER],
    [USER, {"role": "assistant", "content": "Good.", "thinking": "Sun."}],
    [USER, {"role": "assistant", "content": "<think>\nSun.\n</think>\n\nGood."}, USER],
    [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, RESULT],
    [USER, {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning": "T"}, RESULT],
    [USER, {"role": "assistant", "content": "I look.", "tool_calls": CALLS}, RESULT, USER],
    [USER, USER],
    [{"role": "user", "content": [{"type": "text", "text": "a part"}]}],
]


@pytest.fixture(scope="module", params=[*FAMILIES, *SHAPES])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LightTokenizer, Any]:
    """The light tokenizer and transformers' object of a family."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer_of(request.param).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), "utf-8")
    return load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)


def outcome(tokenizer: Any, chat: list[Any], options: dict[str, Any]) -> Any:
    """Return the rendering, or the type and text of the template's error."""
    try:
        return tokenizer.apply_chat_template(chat, **options)
    except Exception as error:  # noqa: BLE001  (a template can raise anything)
        return type(error), str(error)


def test_rendering_is_equal_for_every_template_and_kind_of_conversation(
    both: tuple[LightTokenizer, Any],
) -> None:
    light, full = both
    num_texts = 0
    switches = itertools.product([False, True], repeat=3)
    for has_system, has_tools, is_prompt in switches:
        for chat in CHATS:
            messages = SYSTEM * has_system + chat
            options: dict[str, Any] = {
                "tools": TOOLS if has_tools else None,
                "add_generation_prompt": is_prompt,
                "enable_thinking": is_prompt,
                "tokenize": False,
            }
            expected = outcome(full, messages, options)
            assert outcome(light, messages, options) == expected
            num_texts += isinstance(expected, str)
            options |= {"tokenize": True, "return_dict": False}
            assert outcome(light, messages, options) == outcome(full, messages, options)
    assert num_texts > 30
    assert light.full_object is None


def test_continued_message_is_equal_for_every_template(both: tuple[LightTokenizer, Any]) -> None:
    light, full = both
    options = {"continue_final_message": True, "tokenize": False}
    for chat in CHATS[1:3]:
        expected = outcome(full, chat, options)
        assert outcome(light, chat, options) == expected
        assert "Good." in str(expected)
    for chat in (CHATS[0], CHATS[3][:2], CHATS[-1]):
        assert outcome(light, chat, options) == outcome(full, chat, options)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m }}{% endfor %}",
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n a {% endif %}\n{% endfor %}",
        "{% generation %}{% set x = 1 %}<{{ messages[0].content }}>{% endgeneration %}{{ x }}",
        "{{ {'a<': 'é\\'', 'b': [1, none]} | tojson }}{{ [1, 2] | tojson(indent=1) }}",
        "{{ {'b': 'é', 'a': 2} | tojson(true, none, (',', ':'), true) }}",
        "{% set ns = namespace(x=1, self=2) %}{% set ns.x = 3 %}{{ ns.x }}{{ ns.self }}",
        "{{ dict(a=1) }}{{ dict([('b', 2)]) }}{{ dict.fromkeys('ab', 1) }}",
        "{{ strftime_now('%Y') }}{{ bos_token }}{{ eos_token }}{{ image_token }}{{ documents }}",
        "{{ raise_exception('no <such> role') }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].no_such.key }}",
        "{{ dict.__class__ }}",
        "{{ unclosed",
        "{{ tools }}{{ messages[0].thinking }}{{ messages[0].reasoning_content }}",
    ],
)
def test_environment_of_a_template_is_equal(template: str, tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "model")
    light, full = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    options = {"chat_template": template, "documents": [{"title": "t"}], "tokenize": False}
    for chat in ([USER], [USER, {"role": "assistant", "content": "x", "reasoning": "why"}]):
        expected, result = outcome(full, chat, options), outcome(light, chat, options)
        if isinstance(expected, tuple) and issubclass(expected[0], SecurityError):
            expected, result = expected[0], result[0]
        assert result == expected
    assert light.full_object is None


def test_message_that_is_no_plain_data_is_rendered_by_transformers(tmp_path: Path) -> None:
    class Word(str):
        """A text with methods of its own."""

    folder = byte_level(tmp_path / "model")
    light, full = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": Word("hi"), "extra": (1, object())}]
    options = {"chat_template": "{{ messages }}", "tokenize": False}
    assert outcome(light, chat, options) == outcome(full, chat, options)
    assert light.full_object is not None


def test_error_of_a_template_is_jinja2s(tmp_path: Path) -> None:
    light = load_tokenizer(str(byte_level(tmp_path / "model")))
    with pytest.raises(TemplateError, match=r"^no$"):
        light.apply_chat_template([USER], chat_template="{{ raise_exception('no') }}")
