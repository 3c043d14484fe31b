"""A conversation as chat messages and, at the same time, as the tokens that were sent and sampled.

Chat templates work on text. `History` finds the text that the template adds after an answer and
tokenises only that text. So answers keep their sampled tokens, and a conversation is one training
segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from arealite.api.llm import LLMResponse
from arealite.api.observation import ChatMessage
from arealite.base import log
from arealite.base.errors import UserError
from arealite.system.data.templates import (
    beginning_of,
    common_prefix_length,
    decode,
    encode,
    render_prompt,
)

logger = log.get(__name__)

SHOWN = 60
"""Characters that the warning about a template shows."""
_warned: set[str] = set()
"""Templates that this process has warned about."""


@dataclass(eq=False)
class Piece:
    """Consecutive tokens of the conversation: text of the template, or one sampled answer."""

    ids: list[int]
    """Shared with the agent's record. Assign a new list; never change this one."""
    text: str


first = lru_cache(maxsize=1024)(encode)
"""Tokenise a first prompt. The episodes of a group have the same first prompt."""


@lru_cache(maxsize=2**14)
def ending(tokenizer: Any, token: int) -> str:
    """Return the text of a special token, which may end a turn; "" for an ordinary token."""
    return "" if tokenizer.decode([token], skip_special_tokens=True) else tokenizer.decode([token])


def encode_after(tokenizer: Any, before: Sequence[int], text: str) -> list[int]:
    """Tokenise text that follows other tokens.

    The text is tokenised after the token that ended the turn: tokenizers treat the start of a
    text, and white space after a special token, differently.
    """
    if len(before) and (end := ending(tokenizer, before[-1])):
        ids = encode(tokenizer, end + text)
        if ids[:1] == [before[-1]]:
            return ids[1:]
    return encode(tokenizer, text)


class History:
    """One conversation."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.messages: list[ChatMessage] = []
        self.tools: tuple[Any, ...] = ()
        self.pieces: list[Piece] = []
        """All tokens so far. The next prompt starts with them."""

    @property
    def beginning(self) -> str:
        """The beginning of the next answer, if the messages end with the assistant's; else ""."""
        return beginning_of(self.messages)

    def ask(self, messages: Sequence[ChatMessage], tools: tuple[object, ...] = ()) -> list[int]:
        """Add messages and return the next prompt: all tokens so far and those of the new text.

        If the template rewrites earlier turns, the prompt is its full rendering, tokenised again.

        Args:
            messages: Chat messages, for instance an observation.
            tools: Tool schemas for the template; empty: those of the last call.
        """
        self.messages += messages
        self.tools = tools or self.tools
        past = "".join([piece.text for piece in self.pieces])
        if past and self.has_channels and not self.beginning:
            text = past + self._text_after(messages)
        else:
            text = render_prompt(self.tokenizer, self.messages, tools=self.tools)
        if not past:
            ids = first(self.tokenizer, text)
        elif text.startswith(past):
            ids = encode_after(self.tokenizer, self.pieces[-1].ids, text[len(past) :])
        else:
            self._warn(past, text)
            self.pieces = []
            past = ""
            ids = encode(self.tokenizer, text)
        self.pieces.append(Piece(ids, text[len(past) :]))
        return [token for piece in self.pieces for token in piece.ids]

    @cached_property
    def has_channels(self) -> bool:
        """Whether the template writes each message of an answer into a channel, as GPT-OSS'."""
        from arealite.impl.gateway.families import family_of  # agents start without it

        return family_of(self.tokenizer).has_channels

    def _text_after(self, new: Sequence[ChatMessage]) -> str:
        """Return the text of `new` after the latest answer.

        GPT-OSS' template refuses answers with the channels that the model sampled, so a short
        answer of the same kind takes the place of the latest one.

        Raises:
            UserError: The template refuses the new messages, too.
        """
        from arealite.impl.gateway import exchange, families, rendering  # imports this module

        results = [each for each in new if each["role"] == "tool"]
        calls = [exchange.function_call(e.get("tool_call_id"), e.get("name"), {}) for e in results]
        answer = {"role": "assistant", "content": "" if calls else "c", "tool_calls": calls}
        renderer = rendering.Renderer(self.tokenizer, families.family_of(self.tokenizer))
        kinds = rendering.TOOLS if self.tools else 0
        text = renderer.render_after(kinds, answer, [renderer.prepare(each) for each in new])
        if text is None:
            raise UserError("the model's chat template refuses the messages after an answer")
        last = self.pieces[-1].ids
        stop = ending(self.tokenizer, last[-1])
        turn = renderer.ending(kinds, answer).turn
        return renderer.remaining(text, stop, turn)

    def add(self, response: LLMResponse, *, opening: str = "") -> str:
        """Add an answer. If the messages end with its beginning, both are one message.

        Args:
            response: The sampled answer.
            opening: The end of the prompt, if it belongs to the answer: the start of a thought
                that the template wrote.

        Returns:
            The sampled text, without the token that ended the turn.
        """
        ids = response.output_ids
        answer = text = self.decode(ids)
        if ids and response.stop_reason == "stop":
            answer = text.removesuffix(ending(self.tokenizer, ids[-1]))
        self.pieces.append(Piece(ids, text))
        message: ChatMessage = {"role": "assistant"}
        start = max(self.beginning, opening, key=len)  # both are ends of the prompt
        if self.messages[-1]["role"] == "assistant":
            message = self.messages.pop()
        self.messages.append({**message, "content": start + answer})
        return answer

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return decode(self.tokenizer, ids)

    def _warn(self, past: str, text: str) -> None:
        """Warn, once per process and template, that the template rewrites earlier turns."""
        template = str(self.tokenizer.chat_template)
        if template in _warned:
            return
        _warned.add(template)
        at = common_prefix_length(past, text)
        hint = "a turn whose prompt does not extend the last one starts a new training segment"
        was = past[at : at + SHOWN]
        now = text[at : at + SHOWN]
        logger.warning("chat template rewrites earlier turns", hint=hint, at=at, was=was, now=now)
