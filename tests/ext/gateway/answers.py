"""Random answers for the tests of the gateway's APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from random import Random

from arealite.api.llm import LLMResponse
from arealite.ext.gateway.request_data import Delta, ParsedAnswer, ParsedCall

LETTERS = 'ab \n\t\r\x0b\x1cé漢🙂\u2028\u2029\x85"\\{}<>:'


def text(rng: Random, longest: int) -> str:
    """Return a random text with the characters at which careless clients split lines."""
    return "".join(rng.choices(LETTERS, k=rng.randrange(longest)))


def random_answer(rng: Random, *, names: list[str]) -> ParsedAnswer:
    """Return an answer with a thought, a text and calls, or without some of them."""
    calls = tuple(
        ParsedCall(
            id=f"call_{rng.getrandbits(60):x}",
            name=rng.choice(names),
            arguments=random_arguments(rng),
        )
        for _ in range(rng.choice([0, 0, 1, 3]) if names else 0)
    )
    tokens = rng.randrange(1, 9)
    ends = ["length", "calls"] if calls else ["length", "stop", "stop_string"]
    stop_reason = rng.choice(ends)
    return ParsedAnswer(
        id=f"{rng.getrandbits(60):x}",
        thought=text(rng, 20) if rng.random() < 0.6 else "",
        text=text(rng, 20) if rng.random() < 0.8 else "",
        calls=calls,
        stop_reason=stop_reason,
        stop_string="STOP" if stop_reason == "stop_string" else "",
        prompt_tokens=11,
        cached_tokens=4,
        response=LLMResponse(
            output_ids=[*range(tokens)],
            logprobs=[-0.5] * tokens,
            versions=[0] * tokens,
            stop_reason="stop",
        ),
        tokens=tuple(rng.choices(LETTERS, k=tokens)),
    )


def random_arguments(rng: Random) -> str:
    arguments = {text(rng, 4): text(rng, 9), "n": [1, None, {}]}
    return json.dumps(arguments, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))


def random_deltas(rng: Random, answers: list[ParsedAnswer]) -> Iterator[Delta]:
    """Yield the deltas of answers: cut anywhere, kinds and answers mixed, calls after texts."""
    open_streams = [
        [
            [*cut(rng, Delta(kind="thought", text=answer.thought, index=index))],
            [*cut(rng, Delta(kind="text", text=answer.text, index=index))]
            or ([] if answer.calls else [Delta(kind="text", index=index)]),
            [Delta(kind="call", call=call, index=index) for call in answer.calls],
            [Delta(kind="end", answer=answer, index=index)],
        ]
        for index, answer in enumerate(answers)
    ]
    while open_streams := [stream for stream in open_streams if any(stream)]:
        thought, words, calls, end = rng.choice(open_streams)
        texts = [each for each in (thought, words) if each]
        yield (rng.choice(texts) if texts else calls or end).pop(0)


def cut(rng: Random, whole: Delta) -> Iterator[Delta]:
    rest = whole.text
    while rest:
        length = rng.randrange(1, 6)
        yield Delta(kind=whole.kind, text=rest[:length], index=whole.index)
        rest = rest[length:]


async def stream(deltas: list[Delta]) -> AsyncIterator[Delta]:
    for delta in deltas:
        yield delta
