"""Finds the text of an assistant's answer in the chat template's rendering of its conversation.

The trained text of an answer is what the template renders for it, from the generation prompt to the
end of the turn. An answer is refused if the template does not render it so, or leaves a part out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from arealite.base.errors import UserError
from arealite.ext.agents.turn_tokens import common_prefix_length
from arealite.ext.prompts.rendering_probes import MARKER, dropped_messages
from arealite.system.data.forms import thought_of, tool_calls, with_thought
from arealite.system.data.templates import MARK, encode, render

ChatMessages = Sequence[dict[str, Any]]

USER: dict[str, Any] = {"role": "user", "content": "q"}
SHORT_ANSWER = {"role": "assistant", "content": MARK}
CALL_ID = "c00010000"
"""Nine letters and digits: the only form of an id that Mistral's templates accept."""
CALL = {
    "id": CALL_ID,
    "type": "function",
    "function": {"name": "f", "arguments": {"a": "b"}},
}
CALL_ANSWER = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL_RESULT = {"role": "tool", "tool_call_id": CALL_ID, "name": "f", "content": "r"}
THOUGHT = "reasoning_content"
"""The key of an answer's thought in errors."""
SHORT_PART = 16
"""Characters below which a rendering can contain a part by chance."""
SHOWN = 32
"""Characters of a prompt that an error shows, and that are compared with an answer."""


class TurnEnd(NamedTuple):
    """How a chat template ends a turn of the assistant."""

    marker: str
    """The text of the token that ends the turn, such as <|im_end|>; "" if the template has none."""
    tail: str
    """The text after the content of the last answer of a conversation. It does not contain the
    marker if the header of the next message is the marker, as in GLM's templates."""


def turn_end(tokenizer: Any) -> TurnEnd:
    """Return how the chat template of a tokenizer ends a turn.

    Raises:
        UserError: the template refuses a conversation of three short messages.
    """
    return _turn_end(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=16)
def _turn_end(tokenizer: Any, _template: str) -> TurnEnd:
    last = render(tokenizer, [USER, SHORT_ANSWER], add_generation_prompt=False)
    longer = render(tokenizer, [USER, SHORT_ANSWER, USER], add_generation_prompt=False)
    _, _, after_last = last.rpartition(MARK)
    _, _, after_earlier = longer.rpartition(MARK)
    return TurnEnd(marker=_first_marker(tokenizer, after_earlier), tail=after_last)


@lru_cache(maxsize=16)
def _marker_after_calls(tokenizer: Any, _template: str) -> str:
    """Return the marker at the start of a tool's result, which ends a turn without a marker."""
    last = render(tokenizer, [USER, CALL_ANSWER], add_generation_prompt=False)
    longer = render(tokenizer, [USER, CALL_ANSWER, TOOL_RESULT], add_generation_prompt=False)
    return _first_marker(tokenizer, longer.removeprefix(last))


def _first_marker(tokenizer: Any, rendered: str) -> str:
    """Return the special token, or else the marker, at the start of a text; "" without one."""
    stripped = rendered.lstrip()
    special = [token for token in special_tokens(tokenizer) if stripped.startswith(token)]
    if special:
        return max(special, key=len)
    match = MARKER.match(stripped)
    return match[0] if match else ""


@lru_cache(maxsize=16)
def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of a tokenizer's special tokens."""
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    added = [token.content for token in added_tokens if token.special]
    return tuple(token for token in {*added, *tokenizer.all_special_tokens} if token)


def marker_id(tokenizer: Any, marker: str) -> int:
    """Return the id of the token that ends a turn.

    Raises:
        UserError: the tokenizer splits the marker, so that no generation ends there.
    """
    ids = encode(tokenizer, marker)
    if len(ids) != 1:
        raise UserError(
            f"the chat template ends a turn with {marker}, but the tokenizer splits it into "
            f"{len(ids)} tokens, so no generation ends there. Use the tokenizer that belongs to "
            "the template, or add the token."
        )
    return ids[0]


# ------------------------------------------------------------ one answer


class RenderedAnswer(NamedTuple):
    """The rendering of one answer."""

    prompt: str
    """The rendering of the messages before it, with the generation prompt."""
    text: str
    """Its own text, with the marker that ends the turn."""
    needs_eos: bool = False
    """Whether the template has no marker, so that the tokenizer's EOS ends the turn."""


class RenderedConversation:
    """A conversation, and what the chat template renders for it."""

    def __init__(
        self,
        tokenizer: Any,
        messages: ChatMessages,
        tools: Sequence[object] = (),
    ) -> None:
        """Keep the conversation.

        Args:
            tokenizer: A tokenizer with a chat template.
            messages: Messages with `role` and `content`.
            tools: JSON schemas of the tools.
        """
        self.tokenizer = tokenizer
        self.messages = messages
        self.tools = tools
        self._rendered = dict[int, str]()

    def prompt(self, end: int) -> str:
        """Return the rendering of the first messages, with the generation prompt.

        The rendering of the whole conversation has no generation prompt.
        """
        if end not in self._rendered:
            self._rendered[end] = self._render(self.messages[:end], end < len(self.messages))
        return self._rendered[end]

    def answer(
        self,
        index: int,
        *,
        following: int,
        begun: str = "",
    ) -> RenderedAnswer:
        """Return the rendering of the answer at an index.

        A template may render an answer differently when other messages follow: Qwen3's omits an
        empty thought. Then the answer has the text of the later rendering, if that rendering leaves
        out no part of the message.

        Args:
            index: Index of the answer in the messages.
            following: Number of messages up to the next answer, or of all messages.
            begun: The beginning of the answer that belongs to the prompt.

        Raises:
            UserError: the template does not render the answer after its generation prompt, or
                leaves out a part of the message.
        """
        answer = self._whole_answer(index, following)
        if not begun:
            return answer
        stripped = answer.text.lstrip()
        if not stripped.startswith(begun):
            raise UserError(
                f"the chat template changes {begun[:SHOWN]!r}, the beginning of message "
                f"{index + 1} in the prompt. Move the beginning into the completion."
            )
        num_spaces = len(answer.text) - len(stripped)
        begin = num_spaces + len(begun)
        return answer._replace(
            prompt=answer.prompt + answer.text[:begin],
            text=answer.text[begin:],
        )

    def _whole_answer(self, index: int, following: int) -> RenderedAnswer:
        prompt = self.prompt(index)
        end = index + 1
        whole = self._render(self.messages[:end], False)
        if not whole.startswith(prompt):
            begin = max(0, common_prefix_length(prompt, whole) - SHOWN)
            rendered = whole[begin : begin + 2 * SHOWN]
            raise UserError(
                f"the chat template's generation prompt ends with {prompt[begin:]!r}, but the "
                f"template renders {rendered!r} for message {end}, the "
                "assistant's, so no model would sample this message. If the prompt opens a "
                "thought, write the thought into the message's `reasoning_content`, or use "
                "another template."
            )
        answer = self._with_end(prompt, whole[len(prompt) :], self.messages[index])
        lost_keys = self._lost_parts(index, prompt[-SHOWN:], answer.text, end)
        if lost_keys:
            raise UserError(
                f"the chat template leaves out `{lost_keys[0]}` of message {end}, the assistant's, "
                "so it cannot be trained. Remove it from the row, or use another template."
            )
        return self._repeated(index, following, answer) or answer

    def _repeated(
        self, index: int, following: int, answer: RenderedAnswer
    ) -> RenderedAnswer | None:
        """Return an answer as it is rendered before later messages, if that rendering is different.

        None: it is equal, ends with another token than a generation, or leaves out a part.
        """
        if following == index + 1:
            return None
        later = self.prompt(following)
        if not later.startswith(answer.prompt):
            return None
        marker = turn_end(self.tokenizer).marker
        if not marker or not answer.text.endswith(marker):
            return None
        content, end_marker, _ = later[len(answer.prompt) :].partition(marker)
        repeated = content + end_marker
        if not end_marker or repeated == answer.text:
            return None
        if self._lost_parts(index, answer.prompt[-SHOWN:], repeated, following):
            return None
        return RenderedAnswer(prompt=answer.prompt, text=repeated)

    def check_context(self) -> None:
        """Check that the template renders all tools, and all messages except answers.

        Raises:
            UserError: it leaves one out.
        """
        whole = _squeeze(self.prompt(len(self.messages)))
        contents = [message.get("content") or "" for message in self.messages]
        if not all(_contains(whole, content) for content in contents):
            for index in dropped_messages(self.tokenizer, self.messages, self.tools):
                role = self.messages[index]["role"]
                if role != "assistant":
                    raise UserError(
                        f"the chat template leaves out message {index + 1}, whose role is "
                        f"'{role}'. Remove it, use another role, or another template."
                    )
        for tool in self.tools:
            name = tool_name(tool)
            if not _contains(whole, name):
                raise UserError(
                    f"the chat template leaves out the tool `{name}` of the column `tools`. "
                    "Remove the column, or use another template."
                )

    def _render(self, messages: ChatMessages, is_prompt: bool) -> str:
        return render(
            self.tokenizer,
            messages,
            tools=self.tools,
            add_generation_prompt=is_prompt,
        )

    def _with_end(
        self,
        prompt: str,
        rendered: str,
        message: dict[str, Any],
    ) -> RenderedAnswer:
        """Cut the rendering of an answer after the token that ends the turn, or add that token."""
        end = turn_end(self.tokenizer)
        stripped = rendered.rstrip()
        markers = [*special_tokens(self.tokenizer)]
        if end.marker and end.marker in end.tail:
            markers.append(end.marker)
        closing = [marker for marker in markers if stripped.endswith(marker)]
        if closing:
            marker_id(self.tokenizer, max(closing, key=len))
            return RenderedAnswer(prompt=prompt, text=stripped)
        content = rendered.removesuffix(end.tail) if end.tail.isspace() else rendered
        marker = end.marker
        if marker and tool_calls(message):
            marker = _marker_after_calls(self.tokenizer, str(self.tokenizer.chat_template))
        if not marker:
            return RenderedAnswer(prompt=prompt, text=content, needs_eos=True)
        marker_id(self.tokenizer, marker)
        return RenderedAnswer(prompt=prompt, text=content + marker)

    def _lost_parts(
        self,
        index: int,
        start: str,
        rendered: str,
        end: int,
    ) -> list[str]:
        """Return the keys of an answer whose values its rendering does not contain.

        Args:
            index: Index of the answer.
            start: The end of the generation prompt.
            rendered: The rendering of the answer.
            end: Number of messages that are rendered.
        """
        message = self.messages[index]
        parts = list(_parts(message))
        # The generation prompt can contain the start of the answer: the tag of its thought.
        squeezed = _squeeze(start + rendered)
        lost_keys = [key for key, part in parts if not _contains(squeezed, part)]
        marked_messages = {
            "content": {**message, "content": MARK},
            THOUGHT: with_thought(message, MARK),
        }
        for key, part in parts:
            is_short = 0 < len(part) < SHORT_PART
            if not is_short or key not in marked_messages or key in lost_keys:
                continue
            # The rendering can contain a short text by chance, so a unique text replaces it.
            messages = [
                *self.messages[:index],
                marked_messages[key],
                *self.messages[index + 1 : end],
            ]
            if MARK not in self._render(messages, end < len(self.messages)):
                lost_keys.append(key)
        return lost_keys


def _parts(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each part of a message that a rendering has to contain."""
    yield "content", message.get("content") or ""
    yield THOUGHT, thought_of(message)
    for call in tool_calls(message):
        yield "tool_calls", tool_name(call)


def tool_name(tool: Any) -> str:
    """Return the name of a tool's schema or of a tool call."""
    return str((tool.get("function") or tool).get("name"))


def _contains(squeezed: str, part: str) -> bool:
    """Return whether a squeezed rendering contains a text; JSON escapes may differ."""
    forms = (
        part,
        json.dumps(part)[1:-1],
        json.dumps(part, ensure_ascii=False)[1:-1],
    )
    return any(_squeeze(form) in squeezed for form in forms)


def _squeeze(rendered: str) -> str:
    """Return a text without white space, which templates trim and add."""
    return "".join(rendered.split())
