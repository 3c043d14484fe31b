"""Prompts hold the exact tokens of earlier prompts and answers; only what is new is rendered."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from arealite.api.episode import Origin
from arealite.api.observation import ChatMessage
from arealite.ext.gateway import conversation
from arealite.ext.gateway.apis import past_messages
from arealite.ext.gateway.request_data import ApiError, ChatRequest, ParsedAnswer
from arealite.ext.gateway.tree import Prompt
from tests.ext.gateway.chats import TOOLS, Client, family_client, full, results, user
from tests.fakes.chat_families import FAMILIES

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


def answer_like_template(
    name: str, client: Client, prompt: Prompt, rng: random.Random
) -> ParsedAnswer:
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
        assert plain(client, prompt) == rendered(client, client.history)
        is_same = prompt.ids[: len(earlier)] == earlier
        assert is_same == (prompt.origin.reason in ("", "first")), prompt.origin
        assert prompt.origin.reused + prompt.origin.new == len(prompt.ids)
        rewrites += not is_same
        if is_same:
            assert prompt.origin.reused == len(earlier)
        answer = answer_like_template(name, client, prompt, rng)
        earlier = full(prompt, answer)
        new = results(answer, rng.choice(("12", "Größe\n🙂"))) or [
            user(rng.choice(("more", "東京")))
        ]
    assert client.conversation.is_incremental
    # Mistral's template moves tools and system prompt to the last user message.
    assert (rewrites > 0) == (
        name in THINKING or (name == "mistral" and (bool(client.tools) or not seed))
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAMILIES)
async def test_prompts_after_edits_and_rewinds_are_the_templates_text(name: str, seed: int) -> None:
    rng = random.Random(f"edits/{name}/{seed}")
    client = family_client(name, seed=seed)
    client.history.append(user("Hello"))
    known, kept = [list[int]()], 0
    for _ in range(30):
        prompt = await client.ask()
        assert plain(client, prompt) == rendered(client, client.history)
        reused = prompt.origin.reused
        assert any(prompt.ids[:reused] == each[:reused] for each in known), prompt.origin
        kept += reused
        answer = answer_like_template(name, client, prompt, rng)
        known.append(full(prompt, answer))
        client.history += results(answer, "12", "Größe") or [user("more")]
        questions = [i for i, each in enumerate(client.history) if each["role"] == "user"]
        last = rng.choice(questions)
        match rng.choice(("", "", "", "rewind", "edit", "compact", "again")):
            case "rewind":
                del client.history[last + 1 :]
            case "edit":
                client.history[last:] = [user(rng.choice("abc"))]
            case "compact":
                client.history[:last] = []
            case "again":
                client.history.pop()
                if client.history[-1]["role"] == "assistant":
                    client.history.pop()
    assert kept > 0


def plain(client: Client, prompt: Prompt) -> str:
    return client.text(prompt.ids).replace("<|return|>", "<|end|>")


# ------------------------------------------------------------ what clients do to history


async def test_answer_that_the_client_wrote_differently_is_recognised() -> None:
    client = family_client("kimi_k2")
    first = await client.ask(user("q"))
    calls = [("search", {"b": [{"y": 2.0, "x": "é"}], "a": 1})]
    answer = client.say(first, "  Let me see.\n", thought="long thought", calls=calls)
    client.history[-1] = {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {
                "id": "renamed",
                "type": "function",
                "function": {
                    "name": "search",
                    "arguments": '{ "a":1, "b":[{"x":"\\u00e9","y":2}] }',
                },
            }
        ],
    }
    second = await client.ask({"role": "tool", "tool_call_id": "renamed", "content": "r"})
    assert second.ids[: second.origin.reused] == full(first, answer)
    assert second.origin.reason == ""
    assert f"## Return of {answer.calls[0].id}\nr" in client.text(second.ids)


async def test_thoughts_that_the_client_dropped_stay_while_the_template_keeps_them() -> None:
    client = family_client("qwen3")
    answers = list[tuple[Prompt, ParsedAnswer]]()
    new = [user("q")]
    for turn in range(3):
        prompt = await client.ask(*new)
        answer = client.say(prompt, thought=f"thought {turn}", calls=[("add", {"n": turn})])
        del client.history[-1]["reasoning_content"]
        answers.append((prompt, answer))
        new = results(answer, "r")
    last = await client.ask(*new)
    assert last.ids[: last.origin.reused] == full(*answers[-1])
    final = client.say(last, "done", thought="the end")
    del client.history[-1]["reasoning_content"]
    asked = await client.ask(user("more"))
    assert asked.origin.reason == "rewritten"
    assert "thought" not in client.text(asked.ids)
    assert asked.ids[: asked.origin.reused] == answers[0][0].ids
    more = client.say(asked, "ok", calls=[("add", {})])
    again = await client.ask(*results(more, "r"))
    assert (again.origin.reason, again.ids[: again.origin.reused]) == ("", full(asked, more))
    assert final.text in client.text(asked.ids)


async def test_edited_history_branches_after_the_last_equal_answer() -> None:
    client = family_client("qwen2_5")
    first = await client.ask({"role": "system", "content": "Sys"}, user("one"))
    answer = client.say(first, "a")
    before = [*client.history]
    second = await client.ask(user("two"))
    client.say(second, "b")
    client.history = before
    edited = await client.ask(user("TWO"))
    assert edited.origin.reason == "edited"
    assert edited.ids[: edited.origin.reused] == full(first, answer)
    client.history = before[:2]
    again = await client.ask()
    assert (again.ids, again.origin.reason) == (first.ids, "resampled")
    client.history = [{"role": "system", "content": "Other"}, *before[1:]]
    assert (await client.ask(user("two"))).origin.reason == "tools"
    client.history, client.tools = before[:2], TOOLS[:1]
    assert (await client.ask()).origin.reason == "tools"


async def test_history_returns_to_the_answer_whose_call_ids_it_has() -> None:
    client = family_client("mistral")
    prompt = await client.ask(user("q"))
    calls = [("search", {"q": 1})]
    old = client.say(prompt, sampled="[TOOL_CALLS] [old]", calls=calls)
    client.history.pop()
    new = client.say(prompt, sampled="[TOOL_CALLS] [new]", calls=calls)
    client.history.pop()
    for answer in (old, new):
        client.history = [user("q"), answer.message()]
        found = await client.ask(*results(answer, "r"))
        assert found.ids[: found.origin.reused] == full(prompt, answer)
        assert answer.calls[0].id in client.text(found.ids)
    client.history[1] = client.message("", calls=calls)
    found = await client.ask()
    assert found.ids[: found.origin.reused] == full(prompt, new)


async def test_older_answer_with_an_equal_twin_keeps_its_continuation() -> None:
    client = family_client("qwen2_5")
    first = await client.ask(user("q"))
    client.say(first, "ok", sampled="ok")
    second = await client.ask(user("more"))
    answer = client.say(second, "fine")
    client.conversation.add(
        first,
        ParsedAnswer(
            id="twin", thought="", text="ok", calls=(), stop_reason="stop", response=answer.response
        ),
    )
    third = await client.ask(user("again"))
    assert third.ids[: third.origin.reused] == full(second, answer)


async def test_neighbouring_parts_of_one_answer_are_merged() -> None:
    client = family_client("qwen2_5")
    first = await client.ask(user("q"))
    calls = [("search", {"q": 1}), ("add", {})]
    answer = client.say(first, "text", thought="th", calls=calls)
    whole = client.history.pop()
    sent = whole["tool_calls"]
    assert isinstance(sent, list)
    client.history += [
        {"role": "assistant", "content": "", "reasoning_content": "th"},
        {"role": "assistant", "content": "text"},
        *({"role": "assistant", "content": "", "tool_calls": [call]} for call in sent),
    ]
    second = await client.ask(*results(answer, "1", "2"))
    assert second.ids[: second.origin.reused] == full(first, answer)
    other = client.say(second, "A")
    third = await client.ask()
    last = client.say(third, "B")
    fourth = await client.ask(user("?"))
    assert third.ids[: third.origin.reused] == full(second, other)
    assert fourth.ids[: fourth.origin.reused] == full(third, last)


async def test_previous_answer_is_continued_with_new_instructions_or_without() -> None:
    client = family_client("qwen2_5")
    system: ChatMessage = {"role": "system", "content": "Sys"}
    first = await client.ask(system, user("one"))
    answer = client.say(first, "a")
    client.history = [system]
    second = await client.ask(user("two"), previous=answer.id)
    assert second.ids[: second.origin.reused] == full(first, answer)
    client.history = []
    other = await client.ask(user("two"), previous=answer.id)
    assert "Sys" not in client.text(other.ids)
    assert "a<|im_end|>\n<|im_start|>user\ntwo" in client.text(other.ids)
    with pytest.raises(ApiError, match="unknown") as refused:
        await client.ask(user("two"), previous="unknown")
    assert refused.value.status == 404


# ------------------------------------------------------------ ends of turns


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_stop_string", [False, True])
async def test_turn_without_its_end_token_is_closed_by_the_template(
    name: str, is_stop_string: bool
) -> None:
    client = family_client(name, tools=[])
    first = await client.ask(user("q"))
    stop = "STOP" if is_stop_string else ""
    answer = client.say(first, "cut", sampled=f"cut{stop}", end="", stop_string=stop)
    second = await client.ask(user("more"))
    assert second.ids[: second.origin.reused] == full(first, answer)
    assert client.text(second.ids[: len(first.ids)]) == client.text(first.ids)
    rest = client.text(second.ids[second.origin.reused :])
    whole = rendered(client, client.history)
    assert whole.endswith(f"cut{rest}") or name == "mistral"


async def test_other_end_token_takes_the_place_of_the_templates() -> None:
    client = family_client("qwen2_5")
    first = await client.ask(user("q"))
    answer = client.say(first, "a", end="<|endoftext|>")
    second = await client.ask(user("more"))
    assert second.ids[: second.origin.reused] == full(first, answer)
    assert "a<|endoftext|>\n<|im_start|>user\nmore" in client.text(second.ids)


async def test_answer_that_the_template_refuses_is_text_for_it() -> None:
    client = family_client("llama3_1")
    first = await client.ask(user("q"))
    answer = client.say(first, calls=[("add", {}), ("add", {})])
    second = await client.ask(*results(answer, "1", "2"))
    assert second.ids[: second.origin.reused] == full(first, answer)
    for _ in range(3):
        client.say(second, "x")
        second = await client.ask(user("more"))
        assert second.origin.reason == ""


async def test_messages_that_the_template_refuses_are_an_error_400() -> None:
    client = family_client("mistral")
    with pytest.raises(ApiError, match="Tool call IDs must be") as refused:
        await client.ask(user("q"), {"role": "tool", "tool_call_id": "c1", "content": "x"})
    assert refused.value.status == 400


REFUSED: dict[str, tuple[list[ChatMessage], str | None]] = {
    "no message": ([], None),
    "unknown answer": ([user("two")], "unknown"),
    "template": ([user("q"), {"role": "tool", "tool_call_id": "c1", "content": "x"}], None),
}


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("fault", REFUSED)
async def test_refused_request_leaves_nothing_behind(fault: str, is_begun: bool) -> None:
    client = family_client("mistral")
    if is_begun:
        client.say(await client.ask(user("one")), "a")
    new, previous = REFUSED[fault]
    client.history, client.tools = [], []
    roots = [*client.conversation._roots.values()]
    with pytest.raises(ApiError):
        await client.ask(*new, previous=previous or "")
    assert [*client.conversation._roots.values()] == roots
    client.history = []
    asked = await client.ask(user("q"))
    assert asked.origin.reason == ("tools" if is_begun else "first")


async def test_equal_requests_at_the_same_time_share_their_messages() -> None:
    client = family_client("qwen2_5")
    client.history.append(user("q" * conversation.LONG * 2))  # rendered in a thread
    first, again = await asyncio.gather(client.ask(), client.ask())
    assert {first.origin.reason, again.origin.reason} == {"first", "resampled"}
    assert first.node is again.node
    answer = client.say(again, "a")
    second = await client.ask(user("more"))
    assert second.ids[: second.origin.reused] == full(again, answer)


# ------------------------------------------------------------ openings


def thinking_tokenizer() -> Any:
    tokenizer = copy.deepcopy(family_client("qwen3").tokenizer)
    header = "{{- '<|im_start|>assistant\\n' }}\n{%- if enable_thinking"
    assert header in tokenizer.chat_template
    opened = header.replace("assistant\\n", "assistant\\n<think>\\n")
    tokenizer.chat_template = tokenizer.chat_template.replace(header, opened)
    return tokenizer


async def test_opened_thought_belongs_to_the_answer() -> None:
    client = Client(thinking_tokenizer())
    earlier, reasons, new = list[int](), list[str](), [user("q")]
    for _ in range(6):
        prompt = await client.ask(*new)
        assert prompt.opening == "<think>\n"
        assert prompt.ids[: len(earlier)] == earlier
        call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
        said = f"thought\n</think>\n\n{call}"
        answer = client.say(prompt, thought="thought", calls=[("add", {})], sampled=said)
        earlier, new = full(prompt, answer), results(answer, "r")
        reasons.append(prompt.origin.reason)
    assert (reasons, client.conversation.is_incremental) == (["first"] + [""] * 5, True)
    last = await client.ask(*new, user("more"))
    assert last.origin.reason == "rewritten"
    assert client.text(last.ids) == rendered(client, client.history)


async def test_forced_call_is_a_part_of_the_prompt_and_of_the_answer() -> None:
    client = family_client("qwen3")
    first = await client.ask(user("q"), tool_choice="=add")
    assert first.opening == '<tool_call>\n{"name": "add", "arguments": '
    assert client.text(first.ids).endswith(f"assistant\n{first.opening}")
    answer = client.say(first, calls=[("add", {"n": 1})], sampled='{"n": 1}}\n</tool_call>')
    second = await client.ask(*results(answer, "r"), tool_choice="required")
    assert second.ids[: second.origin.reused] == full(first, answer)
    assert second.opening == '<tool_call>\n{"name": "'
    client.say(second, calls=[("add", {"n": 2})], sampled='add", "argu')
    assert (await client.ask(user("?"))).origin.reason in ("", "rewritten")


async def test_forced_call_closes_an_opened_thought() -> None:
    client = Client(thinking_tokenizer())
    prompt = await client.ask(user("q"), tool_choice="required")
    assert prompt.opening == '<think>\n\n</think>\n\n<tool_call>\n{"name": "'
    assert client.text(prompt.ids).endswith(f"assistant\n{prompt.opening}")


# ------------------------------------------------------------ completions


async def test_completion_that_repeats_prompt_and_answer_continues_its_tokens() -> None:
    client = family_client("qwen2_5")
    first = await client.ask(prompt="Question: q\nAnswer:")
    answer = client.say(first, " fox", sampled=" fox\nQuestion:", end="", stop_string="\nQuestion:")
    text = "Question: q\nAnswer: fox\nQuestion: more"
    second = await client.ask(prompt=text)
    assert second.ids[: second.origin.reused] == full(first, answer)
    assert (client.text(second.ids), second.origin.reason) == (text, "")
    ended = client.say(second, " ok")
    third = await client.ask(prompt=f"{text} ok<|im_end|>\n")
    assert third.ids[: third.origin.reused] == full(second, ended)
    cut = await client.ask(prompt=f"{text} ok then")
    assert cut.ids[: cut.origin.reused] == full(second, ended)[:-1]
    assert (client.text(cut.ids), cut.origin.reason) == (f"{text} ok then", "edited")
    ids = [*full(second, ended), 5, 6]
    assert (await client.ask(prompt=ids)).origin == Origin(
        reused=len(ids) - 2, new=2, reason="edited"
    )


@pytest.mark.parametrize("token", [-1, 10**7, 10**400])
async def test_completion_of_unknown_tokens_is_refused(token: int) -> None:
    client = family_client("qwen2_5")
    with pytest.raises(ApiError, match="prompt has ids that are not tokens"):
        await client.ask(prompt=[1, token])


# ------------------------------------------------------------ cost


def counted(render: Any, sizes: list[int], *args: Any, **options: Any) -> str:
    text = render(*args, **options)
    sizes.append(len(text))
    return text


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list to which each converted item is added."""
    items, convert = list[bytes](), past_messages.messages

    def listen(item: bytes) -> Iterable[ChatMessage]:
        items.append(item)
        return convert(item)

    conversation._converted.cache_clear()
    monkeypatch.setattr(past_messages, "messages", listen)
    return items


async def test_cost_of_a_turn_does_not_grow_with_the_history(converted: list[bytes]) -> None:
    costs = dict[int, int]()
    for turns in (64, 128):
        client = family_client("qwen3")
        converted.clear()
        conversation._converted.cache_clear()
        render = client.conversation.renderer.render
        sizes = list[int]()
        client.conversation.renderer.render = partial(counted, render, sizes)  # type: ignore[method-assign]
        tokens, new = 0, [user("q")]
        for turn in range(turns):
            prompt = await client.ask(*new)
            tokens += prompt.origin.new
            answer = client.say(prompt, calls=[("add", {"n": turn})])
            new = results(answer, "result " * 20)
        costs[turns] = sum(sizes)
        assert tokens < 250 * turns
        assert len(converted) == len(client.history) - 1
    assert costs[128] < 2.2 * costs[64]


async def test_history_of_ten_thousand_messages_is_found_again(converted: list[bytes]) -> None:
    client = family_client("qwen2_5", tools=[])
    past: list[ChatMessage] = [
        user("q") if turn % 2 == 0 else {"role": "assistant", "content": str(turn)}
        for turn in range(9_999)
    ]
    first = await client.ask(*past)
    answer = client.say(first, "ok")
    second = await client.ask(user("more"))
    assert second.ids[: second.origin.reused] == full(first, answer)
    client.history = [*client.history[:-2], client.history[-2], user("less")]
    third = await client.ask()
    assert (third.origin.reused, third.origin.reason) == (len(full(first, answer)), "edited")
    assert len(converted) == 1 + 4_999 + 3


async def test_long_text_is_rendered_off_the_event_loop() -> None:
    client = family_client("qwen2_5")
    started, go = asyncio.Event(), threading.Event()
    loop, render = asyncio.get_running_loop(), client.conversation.renderer.render

    def waiting(messages: Any, *args: Any, **options: Any) -> str:
        if any(len(each["content"]) > 5_000 for each in messages):
            loop.call_soon_threadsafe(started.set)
            assert go.wait(timeout=60)
        return render(messages, *args, **options)

    client.conversation.renderer.render = waiting  # type: ignore[method-assign]
    long = asyncio.create_task(client.ask(user("long " * 2_000)))
    await started.wait()
    client.history = []
    short = await client.ask(user("short"))
    assert not long.done()
    go.set()
    assert len((await long).ids) > len(short.ids)


async def test_template_that_numbers_messages_is_rendered_as_a_whole_from_then_on() -> None:
    client = family_client("qwen2_5", tools=[])
    client.tokenizer = copy.deepcopy(client.tokenizer)
    client.tokenizer.chat_template = client.tokenizer.chat_template.replace(
        "'<|im_start|>' + message.role",
        "'<|im_start|>' + ((loop.index // 6) | string) + message.role",
    )
    made = Client(client.tokenizer, tools=[])
    reasons = list[str]()
    for turn in range(10):
        prompt = await made.ask(user(f"q{turn}"))
        reasons.append(prompt.origin.reason)
        assert turn < 4 or client.text(prompt.ids) == rendered(made, made.history)
        made.say(prompt, "ok")
    assert made.conversation.is_incremental is False
    assert reasons == ["first", "", "", "", "rewritten", "", "", "", "", ""]


async def test_counting_tokens_begins_no_branch() -> None:
    client = family_client("qwen2_5")
    items = [json.dumps(user("q")).encode()]
    request = ChatRequest(items=items, tools=TOOLS)
    counted = await client.conversation.ask(request, is_count_only=True)
    asked = await client.ask(user("q"))
    assert (counted.ids, asked.origin.reason) == (asked.ids, "first")
