"""Chat templates, rendered so that the cost of a turn depends on its new messages only.

A template renders whole conversations. `Renderer.render_after` renders the new messages after a
short stand-in for the past; `Renderer.repeated` finds out where a rendering of the conversation
differs from the texts of its turns. In both, a stand-in with a unique mark takes the place of each
sampled answer, because a template formats an answer differently than it was sampled.
"""

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgspec

from arealite.api.observation import ChatMessage
from arealite.base.chat_template import compile_template
from arealite.impl.agent.history import encode_after
from arealite.impl.gateway.exchange import ApiError, function_call
from arealite.impl.gateway.families import Family
from arealite.impl.gateway.tree import Sample
from arealite.system.data.forms import tool_calls

SYSTEM, CALLS, THOUGHTS, TOOLS = 1, 2, 4, 8
"""Kinds of conversations, as bits: with a system message, with answers that have calls, with those
that have thoughts, and with schemas of tools."""


class Ending(NamedTuple):
    """How a template ends a message of the assistant."""

    marks: list[str]
    """Marks in the prompt before the message."""
    calls: str
    """Text that closes the last call."""
    turn: str
    """The token that ends the turn, with white space; "" if the next header ends the turn."""


class Renderer:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any, family: Family) -> None:
        self.tokenizer = tokenizer
        self.family = family
        source = str(tokenizer.chat_template or "")
        self.handles_thoughts = bool(re.search("think|reasoning", source))
        """Whether the template handles thoughts. Any other template leaves them as sampled."""
        self.has_ids = "tool_call_id" in source
        self._mark = "q" + secrets.token_hex(6)
        self._id = secrets.token_hex(5)[:9]
        self._marks = re.compile(self._mark + r"[A-Z]\d{6}")
        self._opener = re.compile(rf"{re.escape(family.think[0]) or '(?!)'}\s*\Z")
        tokens = tokenizer.added_tokens_decoder.values()
        special = "|".join([re.escape(each.content) for each in tokens if each.special]) or "(?!)"
        self._special = re.compile(special)
        self._turn_end = re.compile(rf"(?:{special})\s*\Z")
        self._options: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._compiled = lru_cache(maxsize=2)(self._compile)
        self._ending = lru_cache(maxsize=1024)(self._find_ending)
        self._past = lru_cache(maxsize=32)(self._make_past)
        schema = {"type": "object", "properties": {}, "required": []}
        tool = {"name": self._number("F", 0), "description": "", "parameters": schema}
        self._tools = [{"type": "function", "function": tool}]
        self._is_json_text = "tool_calls" in source and self._needs_json()

    def encode(self, text: str, before: Sequence[int]) -> list[int]:
        """Tokenise text that follows the tokens `before`."""
        return encode_after(self.tokenizer, before, text) if text else []

    def opening(self, text: str) -> str:
        """Return the end of a prompt that belongs to the answer: a thought's opener, or ""."""
        found = self._opener.search(text, max(0, len(text) - 40))
        return found[0] if found else ""

    @cached_property
    def has_tools(self) -> bool:
        """Whether the template renders tools or calls."""
        return "tool" in self.tokenizer.get_chat_template(tools=[{}])

    @cached_property
    def has_late_system(self) -> bool:
        """Whether the template renders a system message that is not the first message."""
        user: ChatMessage = {"role": "user", "content": "q"}
        mark = self._number("S", 0)
        with suppress(ApiError):
            return mark in self.render([user, {"role": "system", "content": mark}, user], ())
        return False

    def prepare(self, message: ChatMessage) -> ChatMessage:
        """Return a message in the form that the template needs."""
        made = {"content": ""} | {key: each for key, each in message.items() if each}
        if thought := message.get("reasoning_content"):
            made["thinking"] = thought
        if self._is_json_text and (calls := tool_calls(message)):
            made["tool_calls"] = [{**c, "function": _with_json(c["function"])} for c in calls]
        return made

    def render(self, messages: Sequence[ChatMessage], tools: Any, *, is_prompt: bool = True) -> str:
        """Render prepared messages.

        If the template refuses a system message after the first message, or neighbours with one
        role, the system message is the user's, and the neighbours are one message.

        Args:
            messages: The conversation.
            tools: OpenAI function schemas.
            is_prompt: End with the header of the assistant's next message.

        Raises:
            ApiError: 400: the template refuses the messages.
        """
        options = {**self._options, "tools": tools or None, "add_generation_prompt": is_prompt}
        try:
            return self._compiled(bool(tools)).render(messages=messages, **options)
        except Exception as error:  # a template can raise anything
            if (changed := _alternating(messages)) != list(messages):
                return self.render(changed, tools, is_prompt=is_prompt)
            what = f"the model's chat template refuses the messages: {error}"
            raise ApiError(400, f"{what}. Remove or change what it does not support.") from error

    def _compile(self, has_tools: bool) -> Any:
        source = self.tokenizer.get_chat_template(tools=[{}] if has_tools else None)
        return compile_template(source)

    def _needs_json(self) -> bool:
        """Return whether the template needs the arguments of calls as JSON text."""
        mark = self._number("A", 0)
        for self._is_json_text in (False, True):
            answer = self.stand_in({"tool_calls": [_call(self._id)], "content": ""}, 0)
            with suppress(ApiError):
                text = self.render([*self._past(0), answer], (), is_prompt=False)
                if mark in text and repr({"a": mark}) not in text:
                    return self._is_json_text
        return False

    # ------------------------------------------------------------ stand-ins

    def stand_in(self, message: ChatMessage, number: int) -> ChatMessage:
        """Return a short answer of the same form with marks in the thought and the last text."""
        mark = self._number("A", number)
        calls = tool_calls(message)
        short: ChatMessage = {"role": "assistant", "content": mark}
        if message.get("reasoning_content"):
            short["reasoning_content"] = self._number("T", number)
        if calls:
            made = [_call(call.get("id"), call["function"]["name"]) for call in calls]
            made[-1]["function"]["arguments"] = {"a": mark}
            short |= {"content": "c" if message["content"] else "", "tool_calls": made}
        return self.prepare(short)

    def _number(self, kind: str, number: int) -> str:
        return f"{self._mark}{kind}{number:06}"

    def _make_past(self, kinds: int) -> list[ChatMessage]:
        """Return a short conversation of these kinds, up to the assistant's turn."""
        past: list[ChatMessage] = [{"role": "user", "content": self._number("U", 0)}]
        if kinds & SYSTEM:
            past.insert(0, {"role": "system", "content": self._number("S", 0)})
        if kinds & (CALLS | THOUGHTS):
            calls = [_call(self._id)] if kinds & CALLS else []
            thought = "t" if kinds & THOUGHTS else ""
            answer = {"content": "c", "reasoning_content": thought, "tool_calls": calls}
            role = {"role": "tool", "tool_call_id": self._id} if calls else {"role": "user"}
            past += [self.stand_in(answer, 1), {**role, "content": self._number("U", 1)}]
        return past

    def ending(self, kinds: int, message: ChatMessage) -> Ending:
        """Return how the template ends an answer of this form.

        Raises:
            ApiError: 400: the template refuses such answers, or leaves out their calls.
        """
        calls = tool_calls(message)
        has_thought = bool(message.get("reasoning_content"))
        found = self._ending(kinds, bool(message["content"]), has_thought, len(calls))
        if self._id not in found.calls:
            return found
        return found._replace(calls=found.calls.replace(self._id, str(calls[-1].get("id"))))

    def _find_ending(self, kinds: int, has_text: bool, has_thought: bool, calls: int) -> Ending:
        message = {"content": "c" * has_text, "reasoning_content": "t" * has_thought}
        answer = self.stand_in({**message, "tool_calls": [_call(self._id)] * calls}, 0)
        past = self._past(kinds)
        tools = self._tools if kinds & TOOLS else ()
        marks = self._marks.findall(self.render(past, tools))
        text = self.render([*past, answer], tools, is_prompt=False)
        _, mark, tail = text.partition(self._number("A", 0))
        if not mark:
            raise ApiError(400, "The model's chat template does not render such messages.")
        if not calls:
            return Ending(marks, "", tail)
        found = self._turn_end.search(tail)
        turn = found[0] if found else self._ending(kinds, True, False, 0).turn
        closed = tail.removesuffix(turn)
        return Ending(marks, closed, turn if closed != tail else "")

    # ------------------------------------------------------------ rendering

    def render_after(self, kinds: int, answer: ChatMessage, new: list[ChatMessage]) -> str | None:
        """Return the text after an answer: the end of its turn, new messages and the next header.

        Args:
            kinds: The kinds of the conversation before the answer.
            answer: The answer; its text is not rendered.
            new: The messages after it.

        Returns:
            The text; None if the new messages may change what the template renders before them.
        """
        try:
            end = self.ending(kinds, answer)
            short = self.stand_in(answer, 0)
            tools = self._tools if kinds & TOOLS else ()
            text = self.render([*self._past(kinds), short, *new], tools)
        except ApiError:
            return None
        head, _, tail = text.partition(self._number("A", 0))
        marks = [mark for mark in self._marks.findall(head) if mark != self._number("T", 0)]
        is_same = marks == end.marks and tail.startswith(end.calls)
        if not is_same or not self._keeps_thought(answer, 0, head):
            return None
        return tail[len(end.calls) :]

    def remaining(self, text: str, stop: str, turn: str) -> str:
        """Return what is left of the text after an answer, which ended with the token `stop`.

        The turn ends once: a sampled end token takes the place of the template's.

        Args:
            text: As from `render_after`.
            stop: Text of the sampled end token; "" if the answer ended without one.
            turn: `Ending.turn` of the answer.
        """
        if stop and text.startswith(stop):
            return text[len(stop) :]
        found = self._special.match(text) if stop and turn else None
        return text[found.end() :] if found else text

    def repeated(self, text: str, turns: Sequence[Sample], kinds: int) -> tuple[int, int]:
        """Compare a rendering with the turns of a conversation.

        Args:
            text: Rendering in which `stand_in(turn.message, number)` replaces each answer.
            turns: The sampled answers.
            kinds: The kinds of the conversation.

        Returns:
            Number of turns that the template repeats, and index in `text` of what follows them.
        """
        at = 0
        for number, turn in enumerate(turns):
            if not text.startswith(turn.prompt.text, at):
                return number, at
            mark = self._number("A", number)
            end = self.ending(kinds & TOOLS, turn.message).calls
            start = at + len(turn.prompt.text)
            found = text.find(mark, start)
            is_kept = found >= 0 and self._keeps_thought(turn.message, number, text[start:found])
            if not is_kept or not text.startswith(end, found + len(mark)):
                return number, at
            at = found + len(mark) + len(end)
        return len(turns), at

    def _keeps_thought(self, message: ChatMessage, number: int, text: str) -> bool:
        is_thought = self.handles_thoughts and message.get("reasoning_content")
        return not is_thought or self._number("T", number) in text


def _call(call_id: object, name: object = "f") -> dict[str, Any]:
    return function_call(call_id, name, {"a": "b"})


def _alternating(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages with instructions at the start only, and no two of one role in a row."""
    made = list[ChatMessage]()
    for each in messages:
        is_late = each["role"] == "system" and made and made[-1]["role"] != "system"
        message = {**each, "role": "user"} if is_late else each
        if made and message["role"] == made[-1]["role"] in ("system", "user"):
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n\n{message['content']}"}
        else:
            made.append(message)
    return made


def _with_json(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": msgspec.json.encode(function["arguments"]).decode()}
