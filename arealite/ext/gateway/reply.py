"""The reply to one request: its prompt, its generations and the bytes of its answer."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.base import log
from arealite.base.errors import ContextOverflow
from arealite.ext.gateway.apis import Api
from arealite.ext.gateway.parser import Parser
from arealite.ext.gateway.request_data import ApiError, ChatRequest, Delta, ParsedAnswer
from arealite.ext.gateway.tree import Prompt

if TYPE_CHECKING:
    from arealite.ext.gateway.session import SessionSeat

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
        self.first_text = ""
        """Text of the first answer."""
        self.responses: list[LLMResponse] = []
        self.error: ApiError | None = None
        self.written = 0
        """Events that a client has received."""
        self.is_done = False
        self.is_delivered = False
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
            answers = await self._answers(request)
            self.chunks.append(api.encode(request, answers, model))
            self.finish()
            return
        answering = session.spawn(self._answers(request))
        answering.add_done_callback(lambda _: self._deltas.put_nowait(None))
        first_delta = await self._deltas.get()
        if first_delta is not None:
            deltas = self._until_done(first_delta, answering)
            async for event in api.events(request, deltas, model, id=self.id):
                self.chunks.append(event)
                self._wake()
        await answering
        self.finish()

    async def _until_done(
        self, first_delta: Delta, answering: asyncio.Task[list[ParsedAnswer]]
    ) -> AsyncIterator[Delta]:
        """Yield deltas until the generation ends; raise its error."""
        delta: Delta | None = first_delta
        while delta is not None:
            yield delta
            delta = await self._deltas.get()
        await answering

    async def _answers(self, request: ChatRequest) -> list[ParsedAnswer]:
        """Generate `request.n` answers to one prompt."""
        conversation = self.seat.conversation
        session = self.seat.session
        if request.tools and not conversation.renderer.has_tools:
            raise ApiError(
                400,
                "tools: the model's chat template ignores them; "
                "remove them, or train a model whose template has tools",
            )
        prompt = await conversation.ask(request)
        reason = prompt.origin.reason
        if reason not in ("", "first"):
            session.stats[f"branches_{reason}"] += 1
        sampling = choose_sampling(self.seat, request, len(prompt.ids))
        generations = [self._answer(request, prompt, sampling, index) for index in range(request.n)]
        if request.n == 1:
            answers = [await generations[0]]
        else:  # all must end, so that the turns of all are known
            tasks = [session.spawn(generation) for generation in generations]
            await asyncio.wait(tasks)
            answers = [task.result() for task in tasks]
        self.first_text = answers[0].text
        return answers

    async def _answer(
        self,
        request: ChatRequest,
        prompt: Prompt,
        sampling: SamplingConfig,
        index: int,
    ) -> ParsedAnswer:
        """Generate and parse one answer."""
        seat = self.seat
        parser = Parser(
            seat.conversation.renderer,
            request,
            prompt,
            id=secrets.token_hex(12) if index else self.id,
            index=index,
        )

        def push(deltas: list[Delta]) -> None:
            if self.is_stream:
                for delta in deltas:
                    self._deltas.put_nowait(delta)

        def feed(ids: list[int]) -> None:
            push(parser.feed(ids))

        on_tokens = feed if self.is_stream else None
        response = await self._generate(request, prompt, sampling, on_tokens)
        self.responses.append(response)
        deltas, answer = parser.finish(response)
        seat.conversation.add(prompt, answer)
        seat.session.stats["malformed_calls"] += answer.malformed
        push(deltas)
        return answer

    async def _generate(
        self,
        request: ChatRequest,
        prompt: Prompt,
        sampling: SamplingConfig,
        on_tokens: Callable[[list[int]], None] | None,
    ) -> LLMResponse:
        """Generate after a prompt; once more and shorter if the context was too small."""
        seat = self.seat
        generate = partial(
            seat.agent.generate,
            prompt.ids,
            origin=prompt.origin,
            on_tokens=on_tokens,
            extends=prompt.base.response if prompt.base else None,
        )
        try:
            return await generate(sampling=sampling)
        except ContextOverflow as error:
            seat.gateway.context = len(prompt.ids) + error.room
            shorter = choose_sampling(seat, request, len(prompt.ids))
            return await generate(sampling=shorter)


def choose_sampling(seat: "SessionSeat", request: ChatRequest, num_prompt: int) -> SamplingConfig:
    """Return the sampling options of a request with a prompt of `num_prompt` tokens.

    Raises:
        ApiError: The context has no room left, or the trainer cannot use the temperature.
    """
    run_sampling = seat.agent.seat.sampling
    changes: dict[str, Any] = _changed_policy(seat, request, run_sampling)
    if request.stop:
        changes["stop"] = [*run_sampling.stop, *request.stop]
    room = _room(seat, request, num_prompt)
    if room < run_sampling.max_new_tokens:
        changes["max_new_tokens"] = room
        changes["min_new_tokens"] = min(room, run_sampling.min_new_tokens)
    if not changes:
        return run_sampling
    sampling = replace(run_sampling, **changes)
    is_known = sampling.top_logprobs >= sampling.smallest_known_top
    if not (is_known or seat.agent.seat.is_eval):
        raise ApiError(
            400,
            f"top_p={sampling.top_p:g} cannot be trained: set a larger "
            "trainer.ppo.collector.sampling.top_logprobs, or remove top_p",
            "unsupported_value",
        )
    return sampling


def _changed_policy(
    seat: "SessionSeat", request: ChatRequest, run_sampling: SamplingConfig
) -> dict[str, float]:
    """Return temperature and top_p of a request that differ from the run's and are used.

    Raises:
        ApiError: The trainer cannot use the temperature.
    """
    gateway = seat.gateway
    changes = dict[str, float]()
    if request.temperature not in (None, run_sampling.temperature):
        changes["temperature"] = request.temperature
    if request.top_p not in (None, run_sampling.top_p):
        changes["top_p"] = request.top_p
    if not changes:
        return {}
    if gateway.config.sampling != "request":
        seat.session.stats["sampling_ignored"] += 1
        if changes.keys() - gateway.warned:
            gateway.warned |= changes.keys()
            logger.warning(
                "sampling options of an agent are ignored",
                **changes,
                hint="gateway.sampling=request uses them",
            )
        return {}
    if changes.get("temperature", 1) <= 0:
        raise ApiError(
            400,
            "temperature must be above 0, and top_p must be in (0, 1], for training; "
            f"got {changes}",
            "unsupported_value",
        )
    return changes


def _room(seat: "SessionSeat", request: ChatRequest, num_prompt: int) -> int:
    """Return the largest number of tokens of an answer.

    Raises:
        ApiError: The context has no room left.
    """
    context = seat.gateway.context
    room = request.max_tokens
    if room is None:
        room = seat.agent.seat.sampling.max_new_tokens
    if context is not None:
        room = min(room, context - num_prompt)
    if room < 1:
        raise ApiError(
            400,
            f"the prompt has {num_prompt} tokens, and the model's context {context}: "
            "no room for an answer. "
            "Shorten the history that the agent sends, or raise llm_server.context_length.",
            "context_length_exceeded",
        )
    return room
