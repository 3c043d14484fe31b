"""Prompts hold the exact tokens of earlier prompts and answers; only what is new is rendered."""

from __future__ import annotations

import random
from typing import Any

import pytest

from arealite.impl.gateway.conversation import Prompt
from arealite.impl.gateway.exchange import Answer
from tests.fakes.chat_families import FAMILIES
from tests.impl.gateway.chats import TOOLS, Client, family_client, full, results, user

THINKING = ("qwen3", "glm4_5", "gpt_oss")
"""Families whose templates drop some thoughts."""
NEXT = {"glm4_5": ("<|user|>", "<|observation|>"), "gpt_oss": ("<|return|>", "<|call|>")}
"""Tokens that end a text and a call, where they are not the tokenizer's EOS."""


def rendered(client: Client, messages: list[dict[str, Any]], *, is_prompt: bool = True) -> str:
    made = [{**each, "thinking": each.get("reasoning_content")} for each in messages]
    options = {"tools": client.tools or None, "tokenize": False}
    text = client.tokenizer.apply_chat_template(made, add_generation_prompt=is_prompt, **options)
    return text.replace("<|return|>", "<|end|>")


def written(name: str, client: Client, message: dict[str, Any], end: str) -> str:
    """Return the text that the template writes for an answer, up to the end of the turn."""
    calls = message.get("tool_calls", ())
    after = [{"role": "tool", "tool_call_id": c["id"], "name": "f", "content": "r"} for c in calls]
    if not calls and "reasoning_content" not in message and name != "mistral":
        after = [user("?")]  # some templates write an empty thought into the last message only
    if name == "gpt_oss":
        after = []
    start = rendered(client, [user("q")])
    text = rendered(client, [user("q"), message, *after], is_prompt=False)
    assert text.startswith(start)
    body = text[len(start) :]
    if name == "gpt_oss":
        return body[: body.rindex(end.replace("return", "end"))]
    return body.partition(end)[0]


def answer_like_template(name: str, client: Client, prompt: Prompt, rng: random.Random) -> Answer:
    """Answer with the text that the template writes for it, in random tokens."""
    count = rng.choice((0, 1, 2)) if name not in ("llama3_1", "gpt_oss") else rng.choice((0, 1))
    drawn = [
        (rng.choice(("search", "add")), rng.choice(("Größe 🙂", 3, [1]))) for _ in range(count)
    ]
    calls = [(name, {"q": value}) for name, value in drawn]
    words = ("ok", "Größe, 東京 🙂", "a\n\nb </tool_call>", "12 {}")
    text = rng.choice(("", *words)) if calls else rng.choice(words)
    text = "" if calls and name in ("llama3_1", "mistral") else text
    thought = rng.choice(("", "I think")) if name in THINKING else ""
    end = NEXT.get(name, (client.tokenizer.eos_token,) * 2)[bool(calls)]
    body = written(name, client, client.message(text, thought=thought, calls=calls), end)
    return client.say(prompt, text, thought=thought, calls=calls, sampled=body, end=end)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FAMILIES)
async def test_prompts_are_exact_tokens_and_the_templates_own_text(name: str, seed: int) -> None:
    rng = random.Random(f"{name}/{seed}")
    client = family_client(name, seed=seed, tools=rng.choice(([], TOOLS, TOOLS)))
    new = [user("Hello")] if seed else [{"role": "system", "content": "Sys"}, user("Hello")]
    earlier, rewrites = list[int](), 0
    for _ in range(20):
        prompt = await client.ask(*new)
        assert client.text(prompt.ids).replace("<|return|>", "<|end|>") == rendered(
            client, client.history
        )
        is_same = prompt.ids[: len(earlier)] == earlier
        assert is_same == (prompt.origin.reason in ("", "first")), prompt.origin
        assert prompt.origin.taken + prompt.origin.rendered == len(prompt.ids)
        rewrites += not is_same
        if is_same:
            assert prompt.origin.taken == len(earlier)
        answer = answer_like_template(name, client, prompt, rng)
        earlier = full(prompt, answer)
        new = results(answer, rng.choice(("12", "Größe\n🙂"))) or [
            user(rng.choice(("more", "東京")))
        ]
    assert client.conversation.mismatches == 0
    # Mistral's template moves tools and system prompt to the last user message.
    assert (rewrites > 0) == (
        name in THINKING or (name == "mistral" and (bool(client.tools) or not seed))
    )
