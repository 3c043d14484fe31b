"""Chat templates, rendered so that the cost of a turn depends on its new messages only.

A template renders whole conversations. `Renderer.render_after` renders the new messages after a
short stand-in for the past; `Renderer.repeated` finds out where a rendering of the conversation
differs from the texts of its turns. In both, a stand-in with a unique mark takes the place of each
sampled answer, because a template formats an answer differently than it was sampled.
"""

import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgspec

from arealite.api.observation import ChatMessage
from arealite.api.tool import function
from arealite.ext.gateway.families import Family
from arealite.ext.gateway.request_data import ApiError, function_call
from arealite.ext.gateway.tree import SampledAnswer
from arealite.ext.light_tokenizer.chat_template import compile_template
from arealite.system.data.forms import tool_calls

SYSTEM = 1
"""Kind of a conversation, a bit: with a system message."""
CALLS = 2
"""Kind of a conversation, a bit: with answers that have calls."""
THOUGHTS = 4
"""Kind of a conversation, a bit: with answers that have thoughts."""
TOOLS = 8
"""Kind of a conversation, a bit: with schemas of tools."""
OPENER_WINDOW = 40
"""Characters at the end of a prompt in which a thought's opener is searched."""
NEVER = "(?!)"
"""Pattern that matches nothing."""


def any_of(markers: Iterable[str]) -> str:
    """Return a pattern that matches any of some markers."""
    return "|".join(map(re.escape, markers)) or NEVER


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
        self._mark_prefix = "q" + secrets.token_hex(6)
        self._call_id = secrets.token_hex(5)[:9]
        self._marks = re.compile(self._mark_prefix + r"[A-Z]\d{6}")
        opener = re.escape(family.think[0]) or NEVER
        self._opener = re.compile(rf"{opener}\s*\Z")
        tokens = tokenizer.added_tokens_decoder.values()
        special = any_of(token.content for token in tokens if token.special)
        self._special = re.compile(special)
        self._turn_end = re.compile(rf"(?:{special})\s*\Z")
        self._options: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._compiled = lru_cache(maxsize=2)(self._compile)
        self._ending = lru_cache(maxsize=1024)(self._find_ending)
        self._past = lru_cache(maxsize=32)(self._make_past)
        self._tools = [function(self._mark("F", 0), "")]
        """Schema of a stand-in for all tools."""
        self._is_json_text = "tool_calls" in source and self._needs_json()

    def opening(self, prompt_text: str) -> str:
        """Return the end of a prompt that belongs to the answer: a thought's opener, or ""."""
        start = max(0, len(prompt_text) - OPENER_WINDOW)
        match = self._opener.search(prompt_text, start)
        return match[0] if match else ""

    @cached_property
    def has_tools(self) -> bool:
        """Whether the template renders tools or calls."""
        return "tool" in self.tokenizer.get_chat_template(tools=[{}])

    @cached_property
    def has_late_system(self) -> bool:
        """Whether the template renders a system message that is not the first message."""
        user: ChatMessage = {"role": "user", "content": "q"}
        mark = self._mark("S", 0)
        late_system: ChatMessage = {"role": "system", "content": mark}
        with suppress(ApiError):
            return mark in self.render([user, late_system, user], ())
        return False

    def prepare(self, message: ChatMessage) -> ChatMessage:
        """Return a message in the form that the template needs."""
        prepared: ChatMessage = {"content": ""}
        for key, field_value in message.items():
            if field_value:
                prepared[key] = field_value
        thought = message.get("reasoning_content")
        if thought:
            prepared["thinking"] = thought
        if self._is_json_text and tool_calls(message):
            calls = [_with_json_arguments(call) for call in tool_calls(message)]
            prepared["tool_calls"] = calls
        return prepared

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
        try:
            return self._compiled(bool(tools)).render(
                **self._options,
                messages=messages,
                tools=tools or None,
                add_generation_prompt=is_prompt,
            )
        except Exception as error:  # a template can raise anything
            alternating = _alternating(messages)
            if alternating != list(messages):
                return self.render(alternating, tools, is_prompt=is_prompt)
            raise ApiError(
                400,
                f"the model's chat template refuses the messages: {error}. "
                "Remove or change what it does not support.",
            ) from error

    def _compile(self, has_tools: bool) -> Any:
        tools = [{}] if has_tools else None
        source = self.tokenizer.get_chat_template(tools=tools)
        return compile_template(source)

    def _needs_json(self) -> bool:
        """Return whether the template needs the arguments of calls as JSON text."""
        mark = self._mark("A", 0)
        call = _stand_in_call(self._call_id)
        for is_json_text in (False, True):
            self._is_json_text = is_json_text
            message: ChatMessage = {"tool_calls": [call], "content": ""}
            answer = self.stand_in(message, 0)
            messages = [*self._past(0), answer]
            with suppress(ApiError):
                rendered = self.render(messages, (), is_prompt=False)
                is_python = repr({"a": mark}) in rendered
                if mark in rendered and not is_python:
                    return is_json_text
        return False

    # ------------------------------------------------------------ stand-ins

    def stand_in(self, message: ChatMessage, number: int) -> ChatMessage:
        """Return a short answer of the same form with marks in the thought and the last text."""
        mark = self._mark("A", number)
        calls = tool_calls(message)
        short: ChatMessage = {"role": "assistant", "content": mark}
        if message.get("reasoning_content"):
            short["reasoning_content"] = self._mark("T", number)
        if calls:
            short_calls = [
                _stand_in_call(call.get("id"), call["function"]["name"]) for call in calls
            ]
            short_calls[-1]["function"]["arguments"] = {"a": mark}
            short["content"] = "c" if message["content"] else ""
            short["tool_calls"] = short_calls
        return self.prepare(short)

    def _mark(self, kind: str, number: int) -> str:
        return f"{self._mark_prefix}{kind}{number:06}"

    def _make_past(self, kinds: int) -> list[ChatMessage]:
        """Return a short conversation of these kinds, up to the assistant's turn."""
        messages = list[ChatMessage]()
        if kinds & SYSTEM:
            messages.append({"role": "system", "content": self._mark("S", 0)})
        messages.append({"role": "user", "content": self._mark("U", 0)})
        if not kinds & (CALLS | THOUGHTS):
            return messages
        calls = list[dict[str, Any]]()
        reply: ChatMessage = {"role": "user"}
        if kinds & CALLS:
            calls.append(_stand_in_call(self._call_id))
            reply = {"role": "tool", "tool_call_id": self._call_id}
        answer: ChatMessage = {
            "content": "c",
            "reasoning_content": "t" if kinds & THOUGHTS else "",
            "tool_calls": calls,
        }
        messages.append(self.stand_in(answer, 1))
        reply["content"] = self._mark("U", 1)
        messages.append(reply)
        return messages

    def ending(self, kinds: int, message: ChatMessage) -> Ending:
        """Return how the template ends an answer of this form.

        Raises:
            ApiError: 400: the template refuses such answers, or leaves out their calls.
        """
        calls = tool_calls(message)
        has_text = bool(message["content"])
        has_thought = bool(message.get("reasoning_content"))
        ending = self._ending(kinds, has_text, has_thought, len(calls))
        if self._call_id not in ending.calls:
            return ending
        last_id = str(calls[-1].get("id"))
        call_end = ending.calls.replace(self._call_id, last_id)
        return ending._replace(calls=call_end)

    def _find_ending(
        self,
        kinds: int,
        has_text: bool,
        has_thought: bool,
        num_calls: int,
    ) -> Ending:
        message: ChatMessage = {
            "content": "c" if has_text else "",
            "reasoning_content": "t" if has_thought else "",
            "tool_calls": [_stand_in_call(self._call_id)] * num_calls,
        }
        answer = self.stand_in(message, 0)
        past = self._past(kinds)
        tools = self._tools_of(kinds)
        prompt_text = self.render(past, tools)
        marks = self._marks.findall(prompt_text)
        rendered = self.render([*past, answer], tools, is_prompt=False)
        _, mark, tail = rendered.partition(self._mark("A", 0))
        if not mark:
            raise ApiError(400, "The model's chat template does not render such messages.")
        if not num_calls:
            return Ending(marks=marks, calls="", turn=tail)
        match = self._turn_end.search(tail)
        turn = match[0] if match else self._ending(kinds, True, False, 0).turn
        call_end = tail.removesuffix(turn)
        has_turn = call_end != tail
        return Ending(
            marks=marks,
            calls=call_end,
            turn=turn if has_turn else "",
        )

    def _tools_of(self, kinds: int) -> Sequence[dict[str, Any]]:
        """Return the tools of a conversation with a short past."""
        return self._tools if kinds & TOOLS else ()

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
            ending = self.ending(kinds, answer)
            short_answer = self.stand_in(answer, 0)
            messages = [*self._past(kinds), short_answer, *new]
            rendered = self.render(messages, self._tools_of(kinds))
        except ApiError:
            return None
        head, _, tail = rendered.partition(self._mark("A", 0))
        thought_mark = self._mark("T", 0)
        marks = [mark for mark in self._marks.findall(head) if mark != thought_mark]
        is_same = marks == ending.marks and tail.startswith(ending.calls)
        if not is_same or not self._keeps_thought(answer, 0, head):
            return None
        return tail[len(ending.calls) :]

    def remaining(self, text_after: str, stop: str, turn: str) -> str:
        """Return what is left of the text after an answer, which ended with the token `stop`.

        The turn ends once: a sampled end token takes the place of the template's.

        Args:
            text_after: As from `render_after`.
            stop: Text of the sampled end token; "" if the answer ended without one.
            turn: `Ending.turn` of the answer.
        """
        if not stop:
            return text_after
        if text_after.startswith(stop):
            return text_after[len(stop) :]
        template_stop = self._special.match(text_after) if turn else None
        return text_after[template_stop.end() :] if template_stop else text_after

    def repeated(
        self, rendered: str, turns: Sequence[SampledAnswer], kinds: int
    ) -> tuple[int, int]:
        """Compare a rendering with the turns of a conversation.

        Args:
            rendered: Rendering in which `stand_in(turn.message, number)` replaces each answer.
            turns: The sampled answers.
            kinds: The kinds of the conversation.

        Returns:
            Number of turns that the template repeats, and index in `rendered` of what follows them.
        """
        end = 0
        for number, turn in enumerate(turns):
            turn_end = self._end_of_turn(rendered, end, turn, number, kinds)
            if turn_end is None:
                return number, end
            end = turn_end
        return len(turns), end

    def _end_of_turn(
        self,
        rendered: str,
        start: int,
        turn: SampledAnswer,
        number: int,
        kinds: int,
    ) -> int | None:
        """Return the index after a turn in a rendering; None if the template does not repeat it."""
        prompt_text = turn.prompt.template_text
        if not rendered.startswith(prompt_text, start):
            return None
        answer_start = start + len(prompt_text)
        call_end = self.ending(kinds & TOOLS, turn.message).calls
        mark = self._mark("A", number)
        mark_start = rendered.find(mark, answer_start)
        if mark_start < 0:
            return None
        mark_end = mark_start + len(mark)
        before_mark = rendered[answer_start:mark_start]
        if not self._keeps_thought(turn.message, number, before_mark):
            return None
        if not rendered.startswith(call_end, mark_end):
            return None
        return mark_end + len(call_end)

    def _keeps_thought(self, message: ChatMessage, number: int, rendered: str) -> bool:
        """Return whether a rendering has the thought of an answer, if the template handles any."""
        if not self.handles_thoughts or not message.get("reasoning_content"):
            return True
        return self._mark("T", number) in rendered


def _stand_in_call(call_id: object, name: object = "f") -> dict[str, Any]:
    return function_call(call_id, name, {"a": "b"})


def _alternating(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages with instructions at the start only, and no two of one role in a row."""
    alternating = list[ChatMessage]()
    for message in messages:
        last_role = alternating[-1]["role"] if alternating else None
        if message["role"] == "system" and last_role not in (None, "system"):
            message = {**message, "role": "user"}
        role = message["role"]
        if role == last_role and role in ("system", "user"):
            last = alternating[-1]
            joined = f"{last['content']}\n\n{message['content']}"
            alternating[-1] = {**last, "content": joined}
        else:
            alternating.append(message)
    return alternating


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON text."""
    function = call["function"]
    arguments_json = msgspec.json.encode(function["arguments"]).decode()
    return {**call, "function": {**function, "arguments": arguments_json}}
