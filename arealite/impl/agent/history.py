"""What was said to a seat and by it, as chat messages and as the tokens really sent and sampled.

Templates only know text. So what one adds after an answer is found in text, and only that is
tokenised: the answer stays the tokens that were sampled, and a conversation one training segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from arealite.api.llm import LLMResponse
from arealite.base import log
from arealite.system.data.chats import common_prefix_length, encode, render

logger = log.get(__name__)

SHOWN = 60
"""Characters that the log shows where a template rewrites."""
_told: set[str] = set()
"""Templates that the log has named."""


@dataclass(eq=False)
class Piece:
    """Tokens of the conversation in a row: what a template wrote, or what was sampled."""

    ids: list[int]
    """Shared with the agent's record: replaced, never changed."""
    text: str


first = lru_cache(maxsize=1024)(encode)
"""For first prompts: the episodes of a group share one."""


@lru_cache(maxsize=1024)
def ending(tokenizer: Any, token: int) -> str:
    """Return how a template writes a token that may end a turn, "" for one that is text."""
    is_text = tokenizer.decode([token], skip_special_tokens=True)
    return "" if is_text else tokenizer.decode([token])


class History:
    """One conversation, from its first prompt on."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.messages: list[dict[str, Any]] = []
        self.tools: tuple[Any, ...] = ()
        self.pieces: list[Piece] = []
        """What the next prompt begins with."""

    def ask(self, messages: Sequence[dict[str, Any]], tools: tuple[Any, ...] = ()) -> list[int]:
        """Add messages; return the prompt: all tokens so far, and those that the template adds.

        A template that tells the past differently than it went has its way: then the whole prompt
        is its own rendering.
        """
        self.messages += messages
        self.tools = tools or self.tools
        text = render(self.tokenizer, self.messages, tools=self.tools)
        held = "".join([piece.text for piece in self.pieces])
        if not held:
            ids = first(self.tokenizer, text)
        elif text.startswith(held):
            ids = self._encode(text[len(held) :])
        else:
            self._tell(held, text)
            self.pieces, held, ids = [], "", encode(self.tokenizer, text)
        self.pieces.append(Piece(ids, text[len(held) :]))
        return [token for piece in self.pieces for token in piece.ids]

    def add(self, response: LLMResponse, *, opening: str = "") -> str:
        """Add an answer; return its text, without the token that ended the turn.

        To the template, the answer is this text after `opening`, the end of the prompt that
        belongs to it. It is all that was sampled: thoughts, marks and calls included.
        """
        ids = response.output_ids
        said = text = self.decode(ids)
        if ids and response.stop_reason == "stop":
            said = text.removesuffix(ending(self.tokenizer, ids[-1]))
        self.pieces.append(Piece(ids, text))
        self.messages.append({"role": "assistant", "content": opening + said})
        return said

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _encode(self, text: str) -> list[int]:
        """Tokenise what comes next: behind the token that ended the turn, because tokenizers treat
        the beginning of a text, and white space behind a special token, in ways of their own."""
        last = self.pieces[-1].ids[-1:]
        if last and (end := ending(self.tokenizer, last[0])):
            ids = encode(self.tokenizer, end + text)
            if ids[:1] == last:
                return ids[1:]
        return encode(self.tokenizer, text)

    def _tell(self, held: str, text: str) -> None:
        template = str(self.tokenizer.chat_template)
        if template in _told:
            return
        _told.add(template)
        at = common_prefix_length(held, text)
        logger.warning(
            "chat template rewrites",
            hint="each turn whose prompt does not extend the last one is a segment of its own",
            at=at,
            was=held[at : at + SHOWN],
            now=text[at : at + SHOWN],
        )
