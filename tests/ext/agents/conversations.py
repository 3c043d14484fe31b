"""Tokenizers with several chat templates, and agents whose answers are scripted.

The tokenizer is a byte-level BPE with a few merges and, as added tokens, the marks that the
templates write: so texts have several tokenisations, as with real models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from arealite.api.agent import Agent, AgentFactory
from arealite.api.collector_config import AgentConfig
from arealite.api.episode import Seat
from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.system.data.templates import encode
from tests.fakes.client import ScriptedClient, response
from tests.models import CHAT_TEMPLATE

SPECIAL = (
    "<pad>",
    "<|end|>",
    "<|turn|>",
    "<|text|>",
    "<|head|>",
    "<|body|>",
    "<|done|>",
    "</s>",
)
MARKS = ("<tool_call>", "</tool_call>")
"""Added tokens that are not special: they are part of an answer's text."""
MERGES = ["t h", "th e", "\u010a \u010a", "> T", "\u0120 \u0120", "1 2", "</ t", "< /"]

CHATML = """\
{%- for m in messages %}
{%- if tools and loop.first %}
{{- '<|turn|>system\\n' }}{% if m.role == 'system' %}{{ m.content + '\\n\\n' }}{% endif %}
{{- 'Tools:\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- '<|end|>\\n' }}
{%- endif %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|turn|>user' }}{% endif %}
{{- '\\n<result>\\n' + m.content + '\\n</result>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|end|>\\n' }}{% endif %}
{%- elif not (tools and loop.first and m.role == 'system') %}
{{- '<|turn|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""

THOUGHTLESS = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- set said = m.content %}
{%- if m.role == 'assistant' and loop.index0 < ns.last %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|turn|>' + m.role + '\\n' + said + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""
"""A template that drops the thoughts before the last question."""

OPENING = THOUGHTLESS.replace(
    "assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}"
)
"""A template that opens each thought."""

HEADS = """\
{{- '<|text|>' }}
{%- for m in messages %}
{{- '<|head|>' + m.role + '<|body|>\\n\\n' + m.content | trim + '<|done|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|body|>\\n\\n' }}{% endif %}"""
"""A template that trims the content of messages."""

NO_SYSTEM = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[Q] ' + m.content + ' [A]' }}
{%- elif m.role == 'assistant' %}{{ m.content + '</s>' }}
{%- else %}{{ raise_exception('no role ' + m.role) }}{% endif %}
{%- endfor %}"""

TEMPLATES = {
    "chatml": (CHATML, "<|end|>"),
    "thoughtless": (THOUGHTLESS, "<|end|>"),
    "opening": (OPENING, "<|end|>"),
    "heads": (HEADS, "<|done|>"),
    "no system": (NO_SYSTEM, "</s>"),
    "tiny": (CHAT_TEMPLATE, "<|end|>"),  # the template does not write it
}


@cache
def chat_tokenizer(name: str, *marks: str) -> Any:
    """Return a tokenizer with a template; each of `marks` is one token."""
    from tokenizers import AddedToken
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    merges = [tuple(merge.split()) for merge in MERGES]
    merges.sort(key=lambda pair: pair == ("</", "t"))
    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *dict.fromkeys("".join(pair) for pair in merges)]
    template, end = TEMPLATES[name]
    tokenizer = Qwen2Tokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token=end,
    )
    tokenizer.add_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    added = [AddedToken(s, special=False, normalized=False) for s in (*MARKS, *marks)]
    tokenizer.add_tokens(added)
    tokenizer.chat_template = template
    return tokenizer


@cache
def space_prefix_tokenizer(name: str) -> Any:
    """Return a tokenizer that prepends a space to a text, as some SentencePiece tokenizers do."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "\u2581", "\n", *map(chr, range(33, 127))]
    core = Tokenizer(
        models.BPE(
            vocab={letter: i for i, letter in enumerate(letters)}, merges=[], unk_token="<unk>"
        )
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    template, end = TEMPLATES[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, unk_token="<unk>")
    tokenizer.add_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tokenizer.chat_template = template
    return tokenizer


def said(tokenizer: Any, text: str, *, cut: bool = False) -> LLMResponse:
    """Return the answer `text`, one token per character if that is another tokenisation.

    The answer ends with the end token; if `cut`, it is truncated.
    """

    ids = [id for letter in text for id in encode(tokenizer, letter)]
    ids = encode(tokenizer, text) if tokenizer.decode(ids) != text else ids
    return response(ids, stop_reason="length") if cut else ended(tokenizer, ids)


def ended(tokenizer: Any, ids: list[int]) -> LLMResponse:
    """Return an answer that ends with the end token."""
    return response([*ids, tokenizer.eos_token_id])


def make(
    kind: str,
    tokenizer: Any,
    answers: list[LLMResponse] | Callable[[Any], LLMResponse],
    *,
    max_new_tokens: int = 64,
    **options: Any,
) -> Agent:
    """Return an agent that gives the answers in order."""
    rest = None if callable(answers) else iter(answers)
    script = answers if callable(answers) else lambda _: next(rest)
    factory = AgentFactory(None, client=ScriptedClient(script), tokenizer=tokenizer)
    config = AgentConfig(type=kind)
    own = type(getattr(config, kind))(**options)
    seat = Seat(
        name="agent",
        group_id="g",
        episode_id="l/0",
        min_version=0,
        sampling=SamplingConfig(max_new_tokens=max_new_tokens),
    )
    return factory.make_agent(AgentConfig(type=kind, **{kind: own}), seat)


def prompts(agent: Agent) -> list[str]:
    """Return the text of all prompts that were sent."""
    sent = [turn.input_ids for turn in agent.record.turns]
    return [agent.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in sent]


def extends(agent: Agent) -> list[bool]:
    """Return, for each prompt after the first, whether it extends the turn before."""
    turns = agent.record.turns
    held = [turn.input_ids + turn.response.output_ids for turn in turns]
    return [turn.input_ids[: len(h)] == h for h, turn in zip(held, turns[1:], strict=False)]
