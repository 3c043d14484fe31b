"""Answers as blocks, each with one thought, text or call, for APIs that have such a form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from arealite.impl.gateway.exchange import Answer, Call, Delta


@dataclass
class Block:
    """One thought, text or call."""

    kind: str
    """As of Delta; "" if no block is open."""
    index: int = 0
    call: Call | None = None
    parts: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """The text so far; of a call its arguments."""
        return "".join(self.parts)


def blocks_of(answer: Answer) -> Iterator[Block]:
    """Yield the blocks of a whole answer. One without calls has a text, which may be empty."""
    made = [("thought", None, answer.thought)] if answer.thought else []
    if answer.text or not answer.calls:
        made.append(("text", None, answer.text))
    made += [("call", call, call.arguments) for call in answer.calls]
    for index, (kind, call, text) in enumerate(made):
        yield Block(kind, index, call, [text])


Step = Literal["start", "delta", "stop", "end"]


async def steps(deltas: AsyncIterator[Delta]) -> AsyncIterator[tuple[Step, Block, Delta]]:
    """Yield the steps of an answer: start, deltas and stop of each block, and the end."""
    block = Block("")
    async for delta in deltas:
        if block.kind and (delta.call or delta.kind != block.kind):
            yield "stop", block, delta
            block = Block("", block.index + 1)
        if delta.answer:
            yield "end", block, delta
            return
        if not block.kind:
            block.kind, block.call = delta.kind, delta.call
            yield "start", block, delta
        block.parts.append(delta.call.arguments if delta.call else delta.text)
        yield "delta", block, delta
