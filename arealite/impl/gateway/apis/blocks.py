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
    """Yield the blocks of a whole answer."""
    texts = [("thought", answer.thought), ("text", answer.text)]
    made = [Block(kind, 0, None, [text]) for kind, text in texts if text]
    made += [Block("call", 0, call, [call.arguments]) for call in answer.calls]
    for index, block in enumerate(made):
        block.index = index
        yield block


Step = Literal["begin", "start", "delta", "stop", "end"]


async def steps(deltas: AsyncIterator[Delta]) -> AsyncIterator[tuple[Step, Block, Delta]]:
    """Yield the steps of an answer: its begin and end, and start, deltas and stop of each block."""
    block = None
    async for delta in deltas:
        if block is None:
            block = Block("")
            yield "begin", block, delta
        if block.kind and (delta.call or delta.kind != block.kind):
            yield "stop", block, delta
            block = Block("", block.index + 1)
        if text := delta.call.arguments if delta.call else delta.text:
            if not block.kind:
                block.kind, block.call = delta.kind, delta.call
                yield "start", block, delta
            block.parts.append(text)
            yield "delta", block, delta
        if delta.answer:
            yield "end", block, delta
