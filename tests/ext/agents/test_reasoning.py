"""Actions hold the text after a thought; thoughts are dropped as whole tokens or kept."""

from __future__ import annotations

import pytest

from arealite.api.llm import LLMResponse
from arealite.ext.agents.reasoning import ReasoningAgent
from tests.ext.agents.conversations import chat_tokenizer, ended, extends, make, prompts, said

THOUGHT = "<think>1 > 2</think>\n\n"
MARKS = ("<think>", "</think>")


async def asked(
    name: str, keep: str, text: str = THOUGHT + "the", **options: str
) -> ReasoningAgent:
    """Return an agent that has answered `text` three times, one token per character."""
    tokenizer = chat_tokenizer(name)
    agent = make("reasoning", tokenizer, [said(tokenizer, text)] * 3, keep=keep)
    for question in "abc":
        await agent.act(question)
    return agent


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (THOUGHT + "the\n", "the\n"),
        ("<think>1</think>the</think>", "the</think>"),
        ("12</think> the", "the"),
        ("<think>1</think>", ""),
        ("<think>1 the", ""),
        ("so: <think>1", ""),
        ("the", "the"),
        (" the", " the"),
        ("", ""),
    ],
)
async def test_action_is_the_text_after_the_thought(text, answer) -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("reasoning", tokenizer, [said(tokenizer, text)])
    assert (await agent.act("a")).text == answer


async def test_unfinished_thought_started_by_the_template_gives_an_empty_action() -> None:
    tokenizer = chat_tokenizer("opening")
    agent = make("reasoning", tokenizer, [said(tokenizer, "1 2")])
    assert (await agent.act("a")).text == ""


@pytest.mark.parametrize(
    ("beginning", "sampled", "text"),
    [
        ("<think>", "1 > 2</think>the", "the"),
        ("12.\n<think>\n1", " > 2</think>the", "the"),
        ("<think>1", " > 2", ""),
        ("<think>1 > 2</think>\n\nthe", " 12", "the 12"),
        ("the", " 12", "the 12"),
    ],
)
@pytest.mark.parametrize("keep", ["all", "none"])
async def test_thought_that_the_prompt_begins_is_no_part_of_the_action(
    beginning: str, sampled: str, text: str, keep: str
) -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("reasoning", tokenizer, [said(tokenizer, sampled)] * 2, keep=keep)
    question = {"role": "user", "content": "a"}
    action = await agent.act([question, {"role": "assistant", "content": beginning}])
    assert action.text == text
    assert prompts(agent)[0].endswith(f"<|turn|>assistant\n{beginning}")
    await agent.act("b")
    is_begun_thought = beginning.startswith("<think>") and "</think>" not in beginning
    kept = text if keep == "none" and is_begun_thought else beginning + sampled
    assert f"<|turn|>assistant\n{kept}<|end|>" in prompts(agent)[1]


async def test_markers_are_configurable() -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("reasoning", tokenizer, [said(tokenizer, "[1]the")], begin="[", end="]")
    assert (await agent.act("a")).text == "the"


async def test_keep_all_keeps_all_thoughts() -> None:
    agent = await asked("chatml", "all")
    assert extends(agent) == [True, True]
    assert prompts(agent)[2].count(THOUGHT) == 2


async def test_keep_last_keeps_only_the_last_thought() -> None:
    agent = await asked("chatml", "last")
    assert extends(agent) == [True, False]
    assert [prompt.count(THOUGHT) for prompt in prompts(agent)] == [0, 1, 1]
    assert cut(agent, 2) == [0]


async def test_keep_none_drops_all_thoughts() -> None:
    agent = await asked("chatml", "none")
    assert extends(agent) == [False, False]
    assert [prompt.count("think") for prompt in prompts(agent)] == [0, 0, 0]
    assert cut(agent, 2) == [0, 1]


def cut(agent: ReasoningAgent, turn: int) -> list[int]:
    """Return the turns whose sampled answer is in the prompt of `turn` without its thought."""
    prompt = agent.record.turns[turn].input_ids
    found, at = [], 0
    for index, earlier in enumerate(agent.record.turns[:turn]):
        sampled = earlier.response.output_ids
        answer = sampled[-4:]  # t, h, e, end; the tokenizer merges t, h, e
        places = [at for at in range(len(prompt)) if prompt[at : at + 4] == answer]
        at = places[index]
        assert agent.tokenizer.decode(answer) == "the<|end|>"
        if agent.tokenizer.decode(prompt[:at]).endswith("assistant\n"):
            found.append(index)
    return found


async def test_template_that_drops_thoughts_too_retokenises_nothing() -> None:
    """Prompts consist of sampled tokens, also if the template drops the thoughts first."""
    agent = await asked("thoughtless", "none")
    assert cut(agent, 1) == [0]
    assert cut(agent, 2) == [0, 1]


async def test_dropping_a_thought_drops_the_templates_opening() -> None:
    agent = await asked("opening", "none", text="1 > 2</think>\n\nthe")
    assert [prompt.count("<think>") for prompt in prompts(agent)] == [1, 1, 1]
    assert prompts(agent)[2].count("assistant\nthe<|end|>") == 2
    assert cut(agent, 1) == [0]
    assert cut(agent, 2) == [0, 1]


@pytest.mark.parametrize("is_cut", [True, False])
async def test_dropping_an_unfinished_thought_leaves_an_empty_answer(is_cut) -> None:
    tokenizer = chat_tokenizer("chatml", *MARKS)
    answers = [said(tokenizer, "<think>1 2", cut=is_cut), said(tokenizer, "12")]
    agent = make("reasoning", tokenizer, answers, keep="none")
    await agent.act("a")
    await agent.act("b")
    assert prompts(agent)[1] == (
        "<|turn|>user\na<|end|>\n<|turn|>assistant\n<|end|>\n<|turn|>user\nb<|end|>\n"
        "<|turn|>assistant\n"
    )


async def test_markers_that_are_single_tokens_are_dropped() -> None:
    tokenizer = chat_tokenizer("chatml", *MARKS)
    agent = make("reasoning", tokenizer, [said(tokenizer, THOUGHT + "the")] * 2, keep="none")
    await agent.act("a")
    await agent.act("b")
    assert cut(agent, 1) == [0]


async def test_thought_that_ends_inside_a_token_is_kept() -> None:
    tokenizer = chat_tokenizer("chatml")
    spelled = [*"<think>1</think", ">T", *"he"]
    ids = [tokenizer.convert_tokens_to_ids(piece) for piece in spelled]
    agent = make("reasoning", tokenizer, [ended(tokenizer, ids)] * 2, keep="none")
    assert (await agent.act("a")).text == "The"
    await agent.act("b")
    assert "<think>1</think>The" in prompts(agent)[1]
    assert extends(agent) == [True]


async def test_recorded_turns_are_unchanged() -> None:
    tokenizer = chat_tokenizer("chatml")
    answer = said(tokenizer, THOUGHT + "the")
    before = LLMResponse(
        output_ids=answer.output_ids[:],
        logprobs=answer.logprobs,
        versions=answer.versions,
        stop_reason="stop",
    )
    agent = make("reasoning", tokenizer, [answer, answer], keep="none")
    await agent.act("a")
    sent = agent.record.turns[0].input_ids[:]
    await agent.act("b")
    assert agent.record.turns[0].response == before
    assert agent.record.turns[0].input_ids == sent
