"""Faults of chat templates are found before a run starts."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from arealite.base.errors import UserError
from arealite.ext.self_check.template import template_faults
from tests.fakes.chat_families import FAMILIES, tokenizer_of

ENDS = {"glm4_5": "<|user|>"}
"""The marker that ends a turn, where it is not the tokenizer's EOS."""


def stops(name: str, tokenizer: Any) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(ENDS.get(name, tokenizer.eos_token))]


@pytest.mark.parametrize("name", FAMILIES)
def test_template_of_each_family_has_no_fault(name: str) -> None:
    tokenizer = tokenizer_of(name)
    assert template_faults(tokenizer, stops(name, tokenizer)) == []


def test_end_of_turn_that_is_no_stop_token_is_reported() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    (fault,) = template_faults(tokenizer, {0})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "with <|im_end|>, which is no stop token; set trainer.ppo.collector.samp" in fault
    assert fault.endswith(f"stop_token_ids=[{end}]")


def test_end_of_turn_that_the_tokenizer_splits_is_refused() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|end_of_role|>")
    with pytest.raises(UserError, match=r"model\.path: .*<\|end_of_role\|>.* splits it into \d+"):
        template_faults(tokenizer, stops("qwen2_5", tokenizer))


def test_template_that_refuses_every_prompt_is_refused() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = "{{ raise_exception('no') }}" + tokenizer.chat_template
    with pytest.raises(UserError, match=r"model\.path: no prompt can be rendered: .*: no\. Corr"):
        template_faults(tokenizer, stops("qwen2_5", tokenizer))


def test_call_that_the_format_does_not_read_is_reported() -> None:
    tokenizer = tokenizer_of("mistral")
    (fault,) = template_faults(tokenizer, stops("mistral", tokenizer), format="qwen2_5")
    assert "writes a call as '[TOOL_CALLS]" in fault
    assert "which the format qwen2_5 does not read" in fault


def test_template_that_renders_no_tools_is_reported_if_the_agent_calls_tools() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = tokenizer.chat_template.replace("if tools", "if false")
    given = stops("qwen2_5", tokenizer)
    (fault,) = template_faults(tokenizer, given)
    assert fault.startswith("the chat template renders no tools, so the model does not see them")
    assert template_faults(tokenizer, given, has_tools=False) == []
