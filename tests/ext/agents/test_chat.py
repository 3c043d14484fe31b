"""A conversation keeps its sampled tokens with every chat template."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from arealite.api.agent import Agent
from arealite.api.env import Env, envs
from arealite.api.observation import Observation
from arealite.api.task import Task
from arealite.base.errors import ContextOverflow, UserError
from arealite.ext.agents import history
from arealite.ext.agents.config import ChatConfig
from arealite.impl.rollout.collector import Collector
from arealite.system.data.templates import encode, render
from tests.ext.agents.conversations import (
    TEMPLATES,
    chat_tokenizer,
    ended,
    extends,
    make,
    prompts,
    said,
    space_prefix_tokenizer,
)
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, lease
from tests.impl.rollout import worlds  # registers the environment `counter`
from tests.payloads import decode_segments

assert worlds is not None
ALWAYS = ("chatml", "no system")
"""Templates that render every answer unchanged, followed by the end token."""


@pytest.fixture(autouse=True)
def no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_warned", set())


# ------------------------------------------------------------ any conversation


def drawn(rng: random.Random, tokenizer: Any) -> list[int]:
    """Return random tokens: parts of characters, unmerged letters, special tokens, or none."""
    common = encode(tokenizer, "the\n\n>The 12 </think> <tool_call>")
    return [
        rng.choice(common) if rng.random() < 0.8 else rng.randrange(len(tokenizer) - 1)
        for _ in range(rng.choice((0, 1, 2, 12)))
    ]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", TEMPLATES)
async def test_prompt_extends_the_sampled_tokens_or_is_the_templates_rendering(name, seed) -> None:
    rng, tokenizer = random.Random(f"{name} {seed}"), chat_tokenizer(name)

    def sample(_: Any) -> Any:
        ids = drawn(rng, tokenizer)
        return ended(tokenizer, ids) if rng.random() < 0.7 else response(ids, stop_reason="length")

    agent = make("chat", tokenizer, sample)
    messages: list[dict[str, str]] = []
    held = ""
    for turn in range(6):
        text = "".join(rng.choices("the \n12>é", k=5))
        messages.append({"role": "user", "content": text})
        await agent.act(text)
        whole = render(tokenizer, messages)
        assert prompts(agent)[-1] == whole
        if turn:
            assert extends(agent)[-1] == whole.startswith(held)
        sampled = agent.record.turns[-1].response
        answer = tokenizer.decode(sampled.output_ids)
        held = whole + answer
        if sampled.stop_reason == "stop":
            answer = answer.removesuffix(tokenizer.eos_token)
        messages.append({"role": "assistant", "content": answer})
    if name in ALWAYS:
        assert all(extends(agent))


# ------------------------------------------------------------ one answer


@pytest.mark.parametrize(("name", "ends"), [("chatml", 3), ("no system", 1)])
async def test_sampled_end_token_is_in_the_next_prompt_once(name, ends) -> None:
    tokenizer = chat_tokenizer(name)
    agent = make("chat", tokenizer, [said(tokenizer, "the\n\n12")] * 2)
    action = await agent.act("a")
    await agent.act("b")
    first, second = agent.record.turns
    assert action.text == "the\n\n12"
    assert extends(agent) == [True]
    assert second.input_ids.count(tokenizer.eos_token_id) == ends
    # The sampled tokens differ from the tokenizer's tokenisation of their text.
    assert len(first.response.output_ids) > len(encode(tokenizer, "the\n\n12")) + 1


@pytest.mark.parametrize("name", ALWAYS)
async def test_text_after_an_answer_is_tokenised_in_its_context(name: str) -> None:
    """Some tokenizers prepend a space to a separate text."""
    tokenizer = space_prefix_tokenizer(name)
    agent = make("chat", tokenizer, [ended(tokenizer, encode(tokenizer, "the")[1:])] * 3)
    for question in "abc":
        await agent.act(question)
    assert extends(agent) == [True, True]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the"}]
    messages += [{"role": "user", "content": "b"}, {"role": "assistant", "content": "the"}]
    messages += [{"role": "user", "content": "c"}]
    assert prompts(agent)[2] == render(tokenizer, messages)
    assert agent.record.turns[2].input_ids == encode(tokenizer, render(tokenizer, messages))


async def test_template_closes_a_truncated_answer() -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("chat", tokenizer, [said(tokenizer, "the", cut=True), said(tokenizer, "x")])
    await agent.act("a")
    await agent.act("b")
    first, second = agent.record.turns
    assert extends(agent) == [True]
    held = len(first.input_ids) + len(first.response.output_ids)
    assert second.input_ids[held] == tokenizer.eos_token_id


async def test_empty_answer_is_a_turn() -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("chat", tokenizer, [ended(tokenizer, [])] * 2)
    assert (await agent.act("a")).text == ""
    await agent.act("b")
    assert "assistant\n<|end|>\n<|turn|>user\nb<|end|>" in prompts(agent)[1]


async def test_stop_string_is_part_of_the_answer() -> None:
    tokenizer = chat_tokenizer("chatml")
    stopped = response(encode(tokenizer, "the\n\n"), stop_reason="stop")
    agent = make("chat", tokenizer, [stopped, said(tokenizer, "x")])
    assert (await agent.act("a")).text == "the\n\n"
    await agent.act("b")
    assert extends(agent) == [True]
    assert "the\n\n<|end|>\n<|turn|>user" in prompts(agent)[1]


# ------------------------------------------------------------ answers that a prompt begins


@pytest.mark.parametrize("name", [*ALWAYS, "heads", "tiny"])
async def test_beginning_and_its_continuation_are_one_answer(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    agent = make("chat", tokenizer, [said(tokenizer, " 12"), said(tokenizer, "1")])
    question = {"role": "user", "content": "a"}
    action = await agent.act([question, {"role": "assistant", "content": "the"}])
    assert prompts(agent)[0] == render(tokenizer, [question]) + "the"
    assert action.text == "the 12"
    await agent.act("b")
    answer = {"role": "assistant", "content": "the 12"}
    messages = [question, answer, {"role": "user", "content": "b"}]
    assert prompts(agent)[1] == render(tokenizer, messages)
    assert extends(agent) == [name != "tiny"]  # this template does not end a turn


async def test_answer_of_a_later_turn_is_continued() -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("chat", tokenizer, [said(tokenizer, "1"), said(tokenizer, " 12")])
    await agent.act("a")
    beginning = {"role": "assistant", "content": "the"}
    action = await agent.act([{"role": "user", "content": "b"}, beginning])
    assert action.text == "the 12"
    assert extends(agent) == [True]
    assert prompts(agent)[1].endswith("<|turn|>user\nb<|end|>\n<|turn|>assistant\nthe")


# ------------------------------------------------------------ templates that rewrite


async def test_template_that_drops_thoughts_is_used_and_logged_once() -> None:
    tokenizer = chat_tokenizer("thoughtless")
    with capture_logs() as logs:
        for _ in range(2):
            answers = [said(tokenizer, "<think>12</think>\n\nthe")] * 3
            agent = make("chat", tokenizer, answers)
            for question in "abc":
                await agent.act(question)
            assert extends(agent) == [False, False]
            assert "12" not in prompts(agent)[2]
    (told,) = [log for log in logs if log["event"] == "chat template rewrites earlier turns"]
    assert told["was"].startswith("<think>12</think>")
    assert told["now"].startswith("the<|end|>")
    assert told["at"] == prompts(agent)[1].index("the<|end|>")


async def test_template_without_the_sampled_end_token_starts_new_segments() -> None:
    tokenizer = chat_tokenizer("tiny")
    agent = make("chat", tokenizer, [said(tokenizer, "the")] * 2)
    await agent.act("a")
    await agent.act("b")
    assert extends(agent) == [False]
    assert prompts(agent)[1] == "user: a\nassistant: the\nuser: b\nassistant: "


async def test_template_that_trims_starts_a_new_segment_only_if_it_trims() -> None:
    tokenizer = chat_tokenizer("heads")
    agent = make("chat", tokenizer, [said(tokenizer, text) for text in ("the", " the", "the")])
    for question in "abc":
        await agent.act(question)
    assert extends(agent) == [True, False]


# ------------------------------------------------------------ system prompts and tools


async def test_system_prompt_is_first_and_only_once() -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("chat", tokenizer, [said(tokenizer, "1")] * 2, system_prompt="S")
    await agent.act([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    await agent.act(Observation("c", choices=("d",)))
    second = prompts(agent)[1]
    assert second.startswith("<|turn|>system\nS<|end|>\n<|turn|>user\na<|end|>\n<|turn|>user\nb")
    assert second.count("system") == 1
    assert "\nc<|end|>" in second


async def test_template_renders_tools() -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("chat", tokenizer, [said(tokenizer, "1")] * 2, system_prompt="S")
    tools = ({"type": "function", "function": {"name": "add"}},)
    await agent.act(Observation("a", tools=tools))
    await agent.act("b")
    assert prompts(agent)[0].startswith('<|turn|>system\nS\n\nTools:\n{"type": "function"')
    assert extends(agent) == [True]


async def test_messages_that_the_template_refuses_are_a_user_error() -> None:
    with pytest.raises(UserError, match="refuses the messages: no role system"):
        await make("chat", chat_tokenizer("no system"), [], system_prompt="S").act("a")


# ------------------------------------------------------------ caps


async def test_action_of_turn_max_turns_is_the_last() -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("chat", tokenizer, [said(tokenizer, "1")] * 2, max_turns=2)
    assert [(await agent.act("a")).is_last for _ in range(3)] == [False, True, True]
    assert len(agent.record.turns) == 2


async def test_prompt_over_max_tokens_is_not_sent() -> None:
    tokenizer = chat_tokenizer("chatml")
    answers = [said(tokenizer, "1")] * 3
    free = make("chat", tokenizer, answers, max_new_tokens=4)
    for _ in range(3):
        await free.act("a")
    room = len(free.record.turns[2].input_ids) + 4
    agent = make("chat", tokenizer, answers, max_new_tokens=4, max_tokens=room - 1)
    actions = [await agent.act("a") for _ in range(3)]
    shown = [(action.text, action.is_last, action.response is None) for action in actions]
    assert shown == [("1", False, False), ("1", False, False), ("", True, True)]
    agent = make("chat", tokenizer, answers, max_new_tokens=4, max_tokens=room)
    assert not any([(await agent.act("a")).is_last for _ in range(3)])


async def test_first_prompt_over_max_tokens_fails_the_episode() -> None:
    agent = make("chat", chat_tokenizer("chatml"), [], max_tokens=80)
    with pytest.raises(ContextOverflow, match="max_tokens=80"):
        await agent.act("a" * 40)


# ------------------------------------------------------------ as training data


@envs.register("three questions")
class ThreeQuestions(Env):
    """Asks three questions and rewards the second answer."""

    resumable = True

    async def run(self, task: Task, **agents: Agent) -> None:
        for number in range(3):
            await agents["agent"].act(f"{task.prompt} {number}")
            if number == 1:
                agents["agent"].reward(1.0)


@pytest.mark.parametrize(
    ("name", "segments"), [("chatml", 1), ("no system", 1), ("thoughtless", 3), ("tiny", 3)]
)
async def test_conversation_is_one_segment_if_the_template_extends_earlier_turns(
    name, segments
) -> None:
    tokenizer = chat_tokenizer(name)
    sampled = said(tokenizer, "<think>1</think>\n\nthe")
    collector = Collector(
        experiment("three questions", agent="chat"), ScriptedClient(lambda _: sampled), tokenizer
    )
    await collector.setup()
    episode, payloads = await collector.run(lease(prompt="what"), 0)
    await collector.close()
    assert episode.failure is None
    (header,) = episode.headers
    made = decode_segments(payloads[0])
    assert len(made) == len(header.segment_lengths) == segments
    assert (header.turns, header.reward) == (3, 1.0)
    tokens = [array("i", segment.tokens).tolist() for segment in made]
    trained = [
        token
        for ids, segment in zip(tokens, made, strict=True)
        for token, is_trained in zip(ids, segment.loss_mask, strict=True)
        if is_trained
    ]
    assert trained == sampled.output_ids * 3
    rewards = [array("f", segment.rewards).tolist() for segment in made]
    assert sum(map(sum, rewards)) == 1.0
    last = rewards[1] if segments > 1 else rewards[0][: rewards[0].index(1.0) + 1]
    assert last[-1] == 1.0


@pytest.mark.parametrize("name", ["chatml", "thoughtless"])
async def test_interrupted_episode_resumes_with_its_recorded_turns(name: str) -> None:
    tokenizer, told = chat_tokenizer(name), []
    client = ScriptedClient(lambda _: said(tokenizer, "<think>1</think>\n\nthe"))
    collector = Collector(experiment("three questions", agent="chat"), client, tokenizer)
    rewards = Agent.reward

    def listen(agent: Agent, value: float) -> None:
        told.extend(collector.progress(True))
        rewards(agent, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "reward", listen)
        _, whole = await collector.run(lease(prompt="what"), 0)
    ((_, headers, payloads),) = told
    again = structs.replace(lease(prompt="what"), lease_id="again", turns=headers)
    assert (len(headers), len(client.requests)) == (2, 3)
    _, replayed = await collector.run(again, 0, payloads)
    assert len(client.requests) == 4
    assert replayed == whole


async def test_step_environment_ends_after_the_agents_last_action() -> None:
    tokenizer = chat_tokenizer("chatml")
    config = experiment("counter", "chat")
    chat = ChatConfig(max_turns=2)
    ppo = config.trainer.ppo
    own = replace(ppo.collector, agent=replace(ppo.collector.agent, chat=chat))
    config = replace(config, trainer=replace(config.trainer, ppo=replace(ppo, collector=own)))
    client = ScriptedClient(lambda _: said(tokenizer, "1"))
    episode, _ = await Collector(config, client, tokenizer).run(lease(prompt="a"), 0)
    (header,) = episode.headers
    assert (header.turns, header.reward) == (2, 1.0)
