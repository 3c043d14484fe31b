"""Calls are sent to the environment, results come back, sampled tokens are unchanged."""

from __future__ import annotations

from typing import Any

from structlog.testing import capture_logs

from arealite.api.llm import LLMResponse
from arealite.api.observation import Observation, ToolCall
from arealite.ext.agents import tool_use
from arealite.system.data.templates import encode
from tests.ext.agents.conversations import chat_tokenizer, extends, make, prompts, said
from tests.fakes.chat_families import tokenizer_of

TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "find")
)
TWO = (
    'Both: <tool_call>\n{"name":  "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
)


def answers(calls: tuple[ToolCall, ...]) -> Observation:
    told = [
        {"role": "tool", "tool_call_id": call.call_id, "name": call.name, "content": call.error}
        for call in calls
    ]
    return Observation(told, tools=TOOLS)


async def test_conversation_with_calls_is_one_segment() -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("tool_use", tokenizer, [said(tokenizer, TWO), said(tokenizer, "12")])
    action = await agent.act(Observation("a", tools=TOOLS))
    assert action.text.strip() == "Both:"
    assert action.calls == (
        ToolCall(call_id="c00010000", name="add", arguments={"a": 1}),
        ToolCall(call_id="c00010001", name="find", arguments={}),
    )
    last = await agent.act(answers(action.calls))
    assert (last.text, last.calls) == ("12", ())
    assert extends(agent) == [True]
    second = prompts(agent)[1]
    assert TWO in second  # unchanged, with its two spaces
    assert second.count("<result>") == 2
    assert second.count('"name": "find", "parameters"') == 1


async def test_call_ids_are_unique_in_an_episode() -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("tool_use", tokenizer, [said(tokenizer, TWO)] * 2)
    first = await agent.act(Observation("a", tools=TOOLS))
    second = await agent.act(answers(first.calls))
    ids = [call.call_id for call in first.calls + second.calls]
    assert len(set(ids)) == 4
    assert all(len(each) == 9 and each.isalnum() for each in ids)


async def test_malformed_calls_are_counted_and_have_an_error() -> None:
    tokenizer = chat_tokenizer("chatml")
    bad = '<tool_call>{"name": "ad", "arguments": {}}</tool_call><tool_call>{</tool_call>'
    agent = make("tool_use", tokenizer, [said(tokenizer, bad), said(tokenizer, TWO)])
    action = await agent.act(Observation("a", tools=TOOLS))
    unknown, broken = action.calls
    assert "Unknown tool 'ad'. Did you mean 'add'? Known: add, find." in unknown.error
    assert (broken.name, broken.error[:8]) == ("", "not JSON")
    assert agent.record.reward_parts == {"malformed_calls": 2.0}
    await agent.act(answers(action.calls))
    assert "Did you mean 'add'?" in prompts(agent)[1]
    assert agent.record.reward_parts == {"malformed_calls": 2.0}


async def test_call_without_tools_has_an_error() -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("tool_use", tokenizer, [said(tokenizer, TWO)])
    action = await agent.act("a")
    assert [bool(call.error) for call in action.calls] == [True, True]


async def test_last_turn_may_call_tools_and_is_marked_last() -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("tool_use", tokenizer, [said(tokenizer, TWO)], max_turns=1)
    action = await agent.act(Observation("a", tools=TOOLS))
    assert (len(action.calls), action.is_last) == (2, True)


async def test_format_is_configurable() -> None:
    tokenizer = chat_tokenizer("heads")
    call = '{"name": "add", "parameters": {"a": 1}}'
    agent = make("tool_use", tokenizer, [said(tokenizer, call)], format="llama_json")
    action = await agent.act(Observation("a", tools=TOOLS))
    assert action.calls == (ToolCall(call_id="c00010000", name="add", arguments={"a": 1}),)


async def test_format_is_found_from_the_chat_template() -> None:
    tokenizer = tokenizer_of("mistral")
    call = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'
    agent = make("tool_use", tokenizer, [said(tokenizer, call)])
    action = await agent.act(Observation("a", tools=TOOLS))
    assert action.calls == (ToolCall(call_id="c00010000", name="add", arguments={"a": 1}),)


async def test_call_in_another_format_is_malformed_and_logged_once(monkeypatch) -> None:
    monkeypatch.setattr(tool_use, "_seen", set())
    tokenizer = chat_tokenizer("chatml")
    mistral = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'
    with capture_logs() as logs:
        for _ in range(2):
            agent = make("tool_use", tokenizer, [said(tokenizer, mistral)])
            (call,) = (await agent.act(Observation("a", tools=TOOLS))).calls
            assert call.error == "the call has the format mistral, not qwen2_5"
            assert agent.record.reward_parts == {"malformed_calls": 1.0}
    (told,) = logs
    assert (told["log_level"], told["seen"], told["configured"]) == ("warning", "mistral", "auto")
    assert "agent.tool_use.format" in told["hint"]
    assert "hermes or llama_json" in told["hint"]


async def test_answer_is_text_if_no_tools_are_offered() -> None:
    tokenizer = chat_tokenizer("chatml")
    agent = make("tool_use", tokenizer, [said(tokenizer, "[TOOL_CALLS] [{}]")])
    assert (await agent.act("a")).calls == ()


async def test_conversation_in_channels_continues_after_a_call_and_is_one_segment() -> None:
    tokenizer = tokenizer_of("gpt_oss")
    refusal = "{{ raise_exception('tags in content') if '<|channel|>' in (m.content or '') }}"
    loop = "{% for m in messages if m.role == 'assistant' %}" + refusal + "{% endfor %}"
    tokenizer.chat_template = loop + tokenizer.chat_template
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>"
    call = thought + "commentary to=functions.add <|constrain|>json<|message|>{}<|call|>"
    said_last = thought + "final<|message|>12<|return|>"
    turns = [answered(tokenizer, text) for text in (call, said_last, said_last)]
    agent = make("tool_use", tokenizer, turns, format="auto")
    action = await agent.act(Observation("a", tools=TOOLS))
    assert [(each.name, each.error) for each in action.calls] == [("add", "")]
    action = await agent.act(answers(action.calls))
    assert action.text.strip() == "12"
    await agent.act("and now?")
    assert extends(agent) == [True, True]
    third = prompts(agent)[2]
    assert call + "<|start|>functions.add to=assistant<|channel|>commentary" in third
    assert said_last + "<|start|>user<|message|>and now?<|end|><|start|>assistant" in third


def answered(tokenizer: Any, text: str) -> LLMResponse:
    ids = encode(tokenizer, text)
    return LLMResponse(
        output_ids=ids, logprobs=[0.0] * len(ids), versions=[0] * len(ids), stop_reason="stop"
    )


async def test_call_that_the_prompt_begins_is_read() -> None:
    tokenizer = chat_tokenizer("chatml")
    sampled = said(tokenizer, '"add", "arguments": {"n": 1}}\n</tool_call>')
    agent = make("tool_use", tokenizer, [sampled])
    beginning = {"role": "assistant", "content": '<tool_call>\n{"name": '}
    tools = ({"type": "function", "function": {"name": "add"}},)
    chat = [{"role": "user", "content": "q"}, beginning]
    action = await agent.act(Observation(chat, tools=tools))
    assert [(call.name, call.arguments, call.error) for call in action.calls] == [
        ("add", {"n": 1}, "")
    ]
