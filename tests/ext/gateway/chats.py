"""A client that keeps a conversation, as foreign agents do, and answers in random tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import msgspec

from arealite.api.llm import LLMResponse
from arealite.api.observation import ChatMessage
from arealite.ext.gateway.conversation import SeatConversations
from arealite.ext.gateway.families import family_of
from arealite.ext.gateway.rendering import Renderer
from arealite.ext.gateway.request_data import ChatRequest, ParsedAnswer, ParsedCall
from arealite.ext.gateway.tree import Prompt
from tests.fakes.chat_families import tokenizer_of
from tests.fakes.scripted_tokens import Splitter

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": {"type": "object"}},
    }
    for name in ("search", "add")
]


class Client:
    """A conversation, and the history that the client has of it."""

    def __init__(
        self, tokenizer: Any, *, seed: int = 0, tools: Any = TOOLS, family: Any = None
    ) -> None:
        self.tokenizer, self.tools, self.rng = tokenizer, tools, random.Random(seed)
        self.conversation = SeatConversations(Renderer(tokenizer, family_of(tokenizer)))
        self.history = list[ChatMessage]()
        self.splitter = Splitter(tokenizer)
        self.answers = 0

    async def ask(self, *new: ChatMessage, **options: Any) -> Prompt:
        """Ask with the whole history and new messages."""
        self.history += new
        items = [json.dumps(each).encode() for each in self.history]
        request = ChatRequest(items=items, **{"tools": self.tools, **options})
        return await self.conversation.ask(request)

    def say(
        self,
        prompt: Prompt,
        text: str = "",
        *,
        thought: str = "",
        calls: Iterable[tuple[str, dict[str, Any]]] = (),
        sampled: str | None = None,
        end: str | None = None,
        stop_string: str = "",
    ) -> ParsedAnswer:
        """Answer in random tokens, and append the answer to the client's history.

        Args:
            sampled: The answer's text; None: a text that has all parts.
            end: The special token that ends it; None: the tokenizer's EOS; "": `max_tokens`.
            stop_string: The stop string that ended it, at the end of `sampled`.
        """
        answer = self._answer(text, thought, calls)
        self.answers += 1
        if sampled is None:
            sampled = (f"<think>\n{thought}\n</think>\n\n" if thought else "") + text
            sampled += "".join(f"<tool_call>{call}" for call in answer.calls)
        end = str(self.tokenizer.eos_token) if end is None else end
        ids = self.splitter.split(sampled + end, self.rng)
        count, reason = len(ids), "stop" if end or stop_string else "length"
        response = LLMResponse(
            output_ids=ids, logprobs=[0.0] * count, versions=[0] * count, stop_reason=reason
        )
        answer = msgspec.structs.replace(answer, response=response, stop_string=stop_string)
        self.conversation.add(prompt, answer)
        self.history.append(answer.message())
        return answer

    def message(self, text: str, **parts: Any) -> ChatMessage:
        """Return the next answer as a message."""
        return self._answer(text, **parts).message()

    def _answer(
        self, text: str, thought: str = "", calls: Iterable[tuple[str, dict[str, Any]]] = ()
    ) -> ParsedAnswer:
        made = [
            ParsedCall(
                id=f"c{self.answers:06}{index:02}", name=name, arguments=json.dumps(arguments)
            )
            for index, (name, arguments) in enumerate(calls)
        ]
        return ParsedAnswer(
            id=f"a{self.answers}", thought=thought, text=text, calls=tuple(made), stop_reason="stop"
        )

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def family_client(name: str, **options: Any) -> Client:
    return Client(tokenizer_of(name), **options)


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def results(answer: ParsedAnswer, *texts: str) -> list[ChatMessage]:
    """Return the results of an answer's calls."""
    pairs = zip(answer.calls, texts, strict=False)
    return [{"role": "tool", "tool_call_id": c.id, "name": c.name, "content": t} for c, t in pairs]


def full(prompt: Prompt, answer: ParsedAnswer) -> list[int]:
    """Return the tokens of prompt and answer."""
    assert answer.response is not None
    return prompt.ids + answer.response.output_ids
