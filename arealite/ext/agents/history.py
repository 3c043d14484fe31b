"""A conversation as chat messages and, at the same time, as the tokens that were sent and sampled.

Chat templates work on text. `History` finds the text that the template adds after an answer and
tokenises only that text. So answers keep their sampled tokens, and a conversation is one training
segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from arealite.api.hooks import TextAfterAnswer, TextAfterAnswerMaker
from arealite.api.llm import LLMResponse
from arealite.api.observation import ChatMessage
from arealite.base import entries, log
from arealite.ext.agents.turn_tokens import common_prefix_length, encode_after, stop_text
from arealite.system.data.templates import beginning_of, decode, render_prompt

logger = log.get(__name__)

SHOWN = 60
"""Characters that the warning about a template shows."""
_warned: set[str] = set()
"""Templates that this process has warned about."""


@dataclass(eq=False, kw_only=True)
class Piece:
    """Consecutive tokens of the conversation: text of the template, or one sampled answer."""

    ids: list[int]
    """Shared with the agent's record. Assign a new list; never change this one."""
    text: str


@cache
def _text_makers() -> list[TextAfterAnswerMaker]:
    return entries.hooks("text_after_answer")


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
        if past and self.text_after_answer and not self.beginning:
            prompt = past + self.text_after_answer(
                messages,
                has_tools=bool(self.tools),
                last_id=self.pieces[-1].ids[-1],
            )
        else:
            prompt = render_prompt(self.tokenizer, self.messages, tools=self.tools)
        if not prompt.startswith(past):
            self._warn(past, prompt)
            self.pieces = []
            past = ""
        ids_before = self.pieces[-1].ids if self.pieces else []
        new_text = prompt.removeprefix(past)
        ids = encode_after(self.tokenizer, ids_before, new_text)
        self.pieces.append(Piece(ids=ids, text=new_text))
        return [token for piece in self.pieces for token in piece.ids]

    @cached_property
    def text_after_answer(self) -> TextAfterAnswer | None:
        """Renders what follows an answer; None if the template can render whole conversations."""
        return entries.first_result(_text_makers(), self.tokenizer)

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
        sampled_text = self.decode(ids)
        self.pieces.append(Piece(ids=ids, text=sampled_text))
        answer = sampled_text.removesuffix(stop_text(self.tokenizer, response))
        start = max(self.beginning, opening, key=len)  # both are ends of the prompt
        message: ChatMessage = {"role": "assistant"}
        if self.messages[-1]["role"] == "assistant":
            message = self.messages.pop()
        self.messages.append({**message, "content": start + answer})
        return answer

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return decode(self.tokenizer, ids)

    def _warn(self, past: str, prompt: str) -> None:
        """Warn, once per process and template, that the template rewrites earlier turns."""
        template = str(self.tokenizer.chat_template)
        if template in _warned:
            return
        _warned.add(template)
        at = common_prefix_length(past, prompt)
        logger.warning(
            "chat template rewrites earlier turns",
            hint="a turn whose prompt does not extend the last one starts a new training segment",
            at=at,
            was=past[at : at + SHOWN],
            now=prompt[at : at + SHOWN],
        )
