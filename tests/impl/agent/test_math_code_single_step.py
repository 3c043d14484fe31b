"""The default agent: prompt to token ids, completion to text."""

from __future__ import annotations

import pytest

from arealite.api.agent import AgentFactory
from arealite.api.collector_config import AgentConfig, MathCodeSingleStepConfig
from arealite.api.episode import Seat
from arealite.base.errors import UserError
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import tokenizer
from tests.models import tiny_tokenizer

CHAT = [{"role": "user", "content": "1+1"}]


def agent(tok=None, **settings):
    config = AgentConfig(math_code_single_step=MathCodeSingleStepConfig(**settings))
    client = ScriptedClient(lambda request: response([10, 11, 2]))
    factory = AgentFactory(None, client=client, tokenizer=tok if tok is not None else tokenizer())
    return factory.make_agent(config, Seat(name="agent", group_id="g", episode_id="e"))


def template_less():
    tok = tiny_tokenizer()
    tok.chat_template = None
    return tok


@pytest.mark.parametrize("plain", [True, False])
async def test_text_is_sent_as_it_is_without_template_or_with_the_option(plain: bool) -> None:
    made = agent(use_chat_template=False) if plain else agent(template_less())
    action = await made.act("1+1=")
    (request,) = made.client.requests
    assert tokenizer().decode(request.input_ids) == "1+1="
    assert action.response.output_ids == [10, 11, 2]
    assert action.text == tokenizer().decode([10, 11])  # without the EOS
    assert [turn.input_ids for turn in made.record.turns] == [request.input_ids]
    assert made.record.seconds_generating > 0


@pytest.mark.parametrize(
    ("observation", "system", "text"),
    [
        (CHAT, None, "user: 1+1\nassistant: "),
        (CHAT, "think", "system: think\nuser: 1+1\nassistant: "),
        ("1+1", "think", "system: think\nuser: 1+1\nassistant: "),
        ("1+1", None, "user: 1+1\nassistant: "),
    ],
)
async def test_template_renders_chat_messages(observation, system, text: str) -> None:
    made = agent(system_prompt=system)
    await made.act(observation)
    assert tokenizer().decode(made.client.requests[0].input_ids) == text


async def test_messages_without_a_template_are_a_user_error() -> None:
    with pytest.raises(UserError, match="chat template"):
        await agent(template_less()).act(CHAT)


async def test_text_of_a_derived_agent_is_sent_unchanged() -> None:
    made = agent()
    made.build_prompt = lambda observation: f"{observation}="
    await made.act("1+1")
    assert tokenizer().decode(made.client.requests[0].input_ids) == "1+1="


async def test_answer_that_the_prompt_begins_is_continued() -> None:
    made = agent()
    action = await made.act([*CHAT, {"role": "assistant", "content": "it is "}])
    assert tokenizer().decode(made.client.requests[0].input_ids) == "user: 1+1\nassistant: it is "
    assert action.text == "it is " + tokenizer().decode([10, 11])
    assert (await made.act(CHAT)).text == tokenizer().decode([10, 11])
