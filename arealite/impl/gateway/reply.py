"""The reply to one request: its prompt, its generations and the bytes of its answer."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.base import log
from arealite.base.errors import ContextOverflow
from arealite.impl.gateway.apis import Api
from arealite.impl.gateway.conversation import Prompt
from arealite.impl.gateway.exchange import Answer, ApiError, ChatRequest, Delta
from arealite.impl.gateway.parser import Parser

if TYPE_CHECKING:
    from arealite.impl.gateway.session import SessionSeat

logger = log.get(__name__)


class Reply:
    """The reply to a request, and to all requests that repeat it."""

    def __init__(self, seat: "SessionSeat", name: str, is_stream: bool) -> None:
        self.seat = seat
        self.name = name
        self.is_stream = is_stream
        self.id = secrets.token_hex(12)
        """Id of the first answer."""
        self.chunks: list[bytes] = []
        """The body, or the events of the stream so far."""
        self.text = ""
        """Text of the first answer."""
        self.responses: list[LLMResponse] = []
        self.error: ApiError | None = None
        self.written = 0
        """Events that a client has received."""
        self.is_done = self.is_delivered = False
        self._deltas = asyncio.Queue[Delta | None]()
        self.changed = asyncio.Event()
        """Set for a moment after each chunk and at the end."""

    def finish(self, error: ApiError | None = None) -> None:
        """End the reply."""
        self.is_done = True
        self.error = error
        self.settle()
        self._wake()

    def settle(self) -> None:
        """Mark a stream as delivered if a client has received all its events.

        Many clients leave after the last event, before the end of the stream is written.
        """
        if self.is_done and self.is_stream and self.written == len(self.chunks):
            self.seat.deliver(self)

    def _wake(self) -> None:
        self.changed.set()
        self.changed.clear()

    async def run(self, api: Api, request: ChatRequest) -> None:
        """Generate the answers of the request, and encode them.

        An error before the first delta comes before the first event, so that it has a status. The
        model is called as in the request: Claude Code drops the thoughts of other models.
        """
        session = self.seat.session
        model = request.options.model or self.seat.gateway.config.model
        if not self.is_stream:
            self.chunks.append(api.encode(request, await self._answers(request), model))
            self.finish()
            return
        answering = session.spawn(self._answers(request))
        answering.add_done_callback(lambda _: self._deltas.put_nowait(None))
        if (first := await self._deltas.get()) is not None:
            deltas = self._until_done(first, answering)
            async for event in api.events(request, deltas, model, id=self.id):
                self.chunks.append(event)
                self._wake()
        await answering
        self.finish()

    async def _until_done(
        self, first: Delta, answering: asyncio.Task[list[Answer]]
    ) -> AsyncIterator[Delta]:
        """Yield deltas until the generation ends; raise its error."""
        delta: Delta | None = first
        while delta is not None:
            yield delta
            delta = await self._deltas.get()
        await answering

    async def _answers(self, request: ChatRequest) -> list[Answer]:
        """Generate `request.n` answers to one prompt."""
        conversation = self.seat.conversation
        if request.tools and not conversation.renderer.has_tools:
            fix = "remove them, or train a model whose template has tools"
            raise ApiError(400, f"tools: the model's chat template ignores them; {fix}")
        prompt = await conversation.ask(request)
        reason = prompt.origin.reason
        stats = self.seat.session.stats
        if reason not in ("", "first"):
            stats[f"branches_{reason}"] += 1
        sampling = choose_sampling(self.seat, request, len(prompt.ids))
        made = [self._answer(request, prompt, sampling, index) for index in range(request.n)]
        if request.n == 1:
            answers = [await made[0]]
        else:  # all must end, so that the turns of all are known
            await asyncio.wait(tasks := [*map(self.seat.session.spawn, made)])
            answers = [task.result() for task in tasks]
        self.text = answers[0].text
        return answers

    async def _answer(
        self, request: ChatRequest, prompt: Prompt, sampling: SamplingConfig, index: int
    ) -> Answer:
        """Generate and parse one answer."""
        seat = self.seat
        agent = self.seat.agent
        name = secrets.token_hex(12) if index else self.id
        parser = Parser(seat.conversation.renderer, request, prompt, id=name, index=index)

        def push(deltas: list[Delta]) -> None:
            for delta in deltas if self.is_stream else ():
                self._deltas.put_nowait(delta)

        def feed(ids: list[int]) -> None:
            push(parser.feed(ids))

        options: Any = {"origin": prompt.origin, "on_tokens": feed if self.is_stream else None}
        options["extends"] = prompt.base and prompt.base.response
        try:
            response = await agent.generate(prompt.ids, sampling=sampling, **options)
        except ContextOverflow as error:
            seat.gateway.context = len(prompt.ids) + error.room
            sampling = choose_sampling(seat, request, len(prompt.ids))
            response = await agent.generate(prompt.ids, sampling=sampling, **options)
        self.responses.append(response)
        deltas, answer = parser.finish(response)
        seat.conversation.add(prompt, answer)
        seat.session.stats["malformed_calls"] += answer.malformed
        push(deltas)
        return answer


def choose_sampling(seat: "SessionSeat", request: ChatRequest, prompt: int) -> SamplingConfig:
    """Return the sampling options of a request with a prompt of `prompt` tokens.

    Raises:
        ApiError: The context has no room left, or the trainer cannot use the temperature.
    """
    run = seat.agent.seat.sampling
    gateway = seat.gateway
    asked = {"temperature": request.temperature, "top_p": request.top_p}
    wanted = {k: v for k, v in asked.items() if v not in (None, getattr(run, k))}
    changes: dict[str, Any] = {"stop": [*run.stop, *request.stop]} if request.stop else {}
    if wanted and gateway.config.sampling == "request":
        if wanted.get("temperature", 1) <= 0:
            text = "temperature must be above 0, and top_p must be in (0, 1], for training"
            raise ApiError(400, f"{text}; got {wanted}", "unsupported_value")
        changes |= wanted
    elif wanted:
        seat.session.stats["sampling_ignored"] += 1
        if wanted.keys() - gateway.warned:
            gateway.warned |= wanted.keys()
            fix = "gateway.sampling=request uses them"
            logger.warning("sampling options of an agent are ignored", **wanted, hint=fix)
    room = run.max_new_tokens if request.max_tokens is None else request.max_tokens
    room = room if gateway.context is None else min(room, gateway.context - prompt)
    if room < 1:
        what = f"the prompt has {prompt} tokens, and the model's context {gateway.context}"
        fix = "Shorten the history that the agent sends, or raise llm_server.context_length."
        raise ApiError(400, f"{what}: no room for an answer. {fix}", "context_length_exceeded")
    if room < run.max_new_tokens:
        changes |= {"max_new_tokens": room, "min_new_tokens": min(room, run.min_new_tokens)}
    return replace(run, **changes) if changes else run
