"""Writes answers as models of ten families write them, with variations of white space and JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from arealite.api.llm import LLMRequest

TEXT = (
    "the weather is 21 °C in Zürich and München — naïve café 東京 天気 🙂 👩‍💻 e\u0301 don't "
    '"quoted" back\\slash <tool <thin [TOOL [ARG {json} ```text <function= tabs\tand 12 + 30 ; & </'
    " ok"
)
WORDS = TEXT.split(" ")
SPACES = (" ", " ", " ", " ", "\n", "\n\n", "  ")


@dataclass(frozen=True)
class Reply:
    """What a model says in one turn."""

    text: str = ""
    thought: str = ""
    """Written by families that think."""
    calls: Sequence[tuple[str, dict[str, Any]]] = field(default_factory=tuple[Any, ...])


def words(rng: random.Random, count: int) -> str:
    """Return random words in several scripts, some of them the beginnings of markers."""
    return "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(count)).strip()


def _json(value: Any, rng: random.Random) -> str:
    separators = rng.choice([(", ", ": "), (",", ":"), (", ", ":")])
    is_ascii = rng.random() < 0.5
    return json.dumps(value, ensure_ascii=is_ascii, separators=separators)


def _named(name: str, key: str, arguments: dict[str, Any], rng: random.Random) -> str:
    return f'{{"name": "{name}", "{key}": {_json(arguments, rng)}}}'


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _hermes(reply: Reply, rng: random.Random) -> str:
    calls = [_named(name, "arguments", given, rng) for name, given in reply.calls]
    written = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return "\n".join([reply.text] * bool(reply.text) + written) + "<|im_end|>"


def _qwen3(reply: Reply, rng: random.Random) -> str:
    thought = f"<think>\n{reply.thought}\n</think>\n\n"
    return thought + _hermes(reply, rng)


def _qwen3_coder(reply: Reply, rng: random.Random) -> str:
    written = [reply.text] * bool(reply.text)
    for name, given in reply.calls:
        lines = [
            f"<parameter={key}>\n{_plain(value)}\n</parameter>" for key, value in given.items()
        ]
        body = "\n".join([f"<function={name}>", *lines, "</function>"])
        written.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(written) + "<|im_end|>"


def _llama(reply: Reply, rng: random.Random) -> str:
    if not reply.calls:
        return reply.text + "<|eot_id|>"
    call = _named(reply.calls[0][0], "parameters", reply.calls[0][1], rng)
    return rng.choice([call + "<|eot_id|>", f"<|python_tag|>{call}<|eom_id|>"])


def _mistral(reply: Reply, rng: random.Random) -> str:
    written = reply.text
    if reply.calls and rng.random() < 0.5:
        for name, given in reply.calls:
            written += f"[TOOL_CALLS]{name}[ARGS]{_json(given, rng)}"
    elif reply.calls:
        calls = [_named(name, "arguments", given, rng) for name, given in reply.calls]
        written += f"[TOOL_CALLS] [{', '.join(calls)}]"
    return written + "</s>"


def _glm(reply: Reply, rng: random.Random) -> str:
    written = f"\n<think>{reply.thought}</think>" + f"\n{reply.text}" * bool(reply.text)
    for name, given in reply.calls:
        written += f"\n<tool_call>{name}\n"
        for key, value in given.items():
            written += f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
        written += "</tool_call>"
    return written + ("<|observation|>" if reply.calls else "<|user|>")


def _deepseek(reply: Reply, rng: random.Random) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(given, rng)}\n```"
        "<｜tool▁call▁end｜>"
        for name, given in reply.calls
    ]
    section = f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>" if calls else ""
    return reply.text + section + "<｜end▁of▁sentence｜>"


def _kimi(reply: Reply, rng: random.Random) -> str:
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{_json(given, rng)}<|tool_call_end|>"
        for index, (name, given) in enumerate(reply.calls, rng.randrange(10**6))
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return reply.text + section + "<|im_end|>"


def _gpt_oss(reply: Reply, rng: random.Random) -> str:
    parts = [f"<|channel|>analysis<|message|>{reply.thought}"] if reply.thought else []
    if not reply.calls:
        parts.append(f"<|channel|>final<|message|>{reply.text}<|return|>")
    else:
        name, given = reply.calls[0]
        if reply.text:
            parts.append(f"<|channel|>commentary<|message|>{reply.text}")
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
        parts.append(f"{head}<|message|>{_json(given, rng)}<|call|>")
    return "<|end|><|start|>assistant".join(parts)


def _granite(reply: Reply, rng: random.Random) -> str:
    calls = [_named(name, "arguments", given, rng) for name, given in reply.calls]
    section = f"<|tool_call|>[{', '.join(calls)}]" if calls else ""
    return reply.text + section + "<|end_of_text|>"


WRITERS: dict[str, Callable[[Reply, random.Random], str]] = {
    "qwen2_5": _hermes,
    "qwen3": _qwen3,
    "qwen3_coder": _qwen3_coder,
    "llama3_1": _llama,
    "mistral": _mistral,
    "glm4_5": _glm,
    "deepseek_v3": _deepseek,
    "kimi_k2": _kimi,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
}
THINKS = frozenset({"qwen3", "glm4_5", "gpt_oss"})
"""Families whose answers have thoughts."""
ONE_CALL = frozenset({"llama3_1", "gpt_oss"})
"""Families that write one call a turn."""


def forced(family: str, reply: Reply, rng: random.Random) -> str:
    """Return the calls of a reply as an answer that must begin with a call."""
    name, given = reply.calls[0]
    if family == "gpt_oss":
        head = f" to=functions.{name}<|channel|>commentary json<|message|>"
        return f"{head}{_json(given, rng)}<|call|>"
    if family == "llama3_1":
        return _named(name, "parameters", given, rng) + "<|eot_id|>"
    if family == "mistral":
        return f"[TOOL_CALLS] [{_named(name, 'arguments', given, rng)}]</s>"
    if family == "qwen3":
        return _hermes(Reply(calls=reply.calls), rng)
    text = WRITERS[family](Reply(calls=reply.calls), rng)
    return text.removeprefix("\n<think></think>\n")


Plan = Callable[[LLMRequest, str, random.Random], Reply]
"""Returns the reply to a request; the text is the prompt's."""


def script(family: str, tokenizer: Any, plan: Plan) -> Callable[[LLMRequest, random.Random], str]:
    """Return a script of `ScriptedTokens` that writes replies in the form of a family.

    Where the prompt already ends with the beginning of a call, only the rest is written.
    """

    def write(request: LLMRequest, rng: random.Random) -> str:
        prompt = tokenizer.decode(request.input_ids, clean_up_tokenization_spaces=False)
        reply = plan(request, prompt, rng)
        text = WRITERS[family](reply, rng)
        called = forced(family, reply, rng) if reply.calls else ""
        for size in range(min(len(called), 200), 6, -1):
            if prompt.endswith(called[:size]):
                return called[size:]
        return text

    return write
