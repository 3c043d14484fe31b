"""Sampling clients: each has fixed weights, the base model or an adapter that was saved."""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from arealite.base.errors import UserError
from arealite.ext.session.calls import Call
from arealite.ext.session.sample_rows import Sample, check_targets
from arealite.ext.session.training_session import Session
from arealite.ext.tinker import bodies, messages
from arealite.ext.tinker.results import PROTOBUF, FutureResult

MAX_SAMPLES = 1024
"""Largest number of samples of a request."""


class LoadedAdapters:
    """Keeps the adapters of sampling clients loaded, the last used ones."""

    def __init__(self, session: Session, *, limit: int) -> None:
        self._session = session
        self._limit = limit
        self._num_uses = dict[str, int]()
        """Number of open requests of each adapter that has some."""
        self._loads = dict[str, Call[Any]]()
        """The call that loads each adapter, the last used one at the end."""

    @asynccontextmanager
    async def in_use(self, name: str, folder: Path) -> AsyncGenerator[None]:
        """Load an adapter if it is not loaded, and keep it during the body."""
        self._num_uses[name] = self._num_uses.get(name, 0) + 1
        try:
            load = self._loads.pop(name, None) or self._session.serve(name, folder)
            self._loads[name] = load
            try:
                await load
            except Exception:  # a later request loads it again
                if self._loads.get(name) is load:
                    del self._loads[name]
                raise
            yield
        finally:
            self._num_uses[name] -= 1
            if not self._num_uses[name]:
                del self._num_uses[name]
            self._unload_oldest()

    def _unload_oldest(self) -> None:
        """Begin to unload the adapters beyond the limit that no request uses."""
        unused = [name for name in self._loads if name not in self._num_uses]
        for name in unused[: max(0, len(self._loads) - self._limit)]:
            if self._loads[name].done():
                del self._loads[name]
                self._session.remove_adapter(name)


class SamplingClient:
    """One sampling session of a client."""

    def __init__(
        self,
        sampler_id: str,
        *,
        base_model: str,
        path: str | None,
        adapter: str,
        folder: Path | None,
        session: Session,
        loaded: LoadedAdapters,
    ) -> None:
        self.id = sampler_id
        self.base_model = base_model
        self.path = path
        """Path of the checkpoint; None: the base model, or the newest weights of a model."""
        self._adapter = adapter
        self._folder = folder
        """Folder of the adapter; None: the session keeps it loaded."""
        self._session = session
        self._loaded = loaded
        self.num_clients = 1

    async def sample(self, body: bodies.SampleBody) -> FutureResult:
        """Return samples, and the log-probabilities of the prompt if asked for."""
        prompt = checked_prompt(body, self._session.vocabulary_size)
        targets = target_ids(body)
        check_targets(targets, len(prompt), self._session.vocabulary_size)
        if self._folder is None:
            return await self._sample(body, prompt, targets)
        if not self._folder.is_dir():
            raise UserError(
                "the weights of this sampling client were removed: of each model the last "
                "tinker.max_samplers snapshots are kept. Use save_weights_for_sampler(name)."
            )
        async with self._loaded.in_use(self._adapter, self._folder):
            return await self._sample(body, prompt, targets)

    async def _sample(
        self, body: bodies.SampleBody, prompt: list[int], targets: list[list[int]]
    ) -> FutureResult:
        """Sample, and score the prompt meanwhile."""
        response = messages.make("SampleResponse")
        try:
            async with asyncio.TaskGroup() as tasks:
                if body.prompt_logprobs or body.topk_prompt_logprobs or targets:
                    tasks.create_task(self._add_scores(response, body, prompt, targets))
                samples = await self._session.sample(
                    prompt,
                    n=body.num_samples,
                    adapter=self._adapter,
                    seed=body.sampling_params.seed,
                    is_trained_on=False,
                    top_logprobs=body.topk_sample_logprobs,
                    **options_of(body.sampling_params, self._session.context_length - len(prompt)),
                )
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        for sample in samples:
            response.sequences.append(_sequence(sample, body.topk_sample_logprobs))
        return FutureResult(body=messages.serialized(response), content_type=PROTOBUF)

    async def _add_scores(
        self,
        response: Any,
        body: bodies.SampleBody,
        prompt: list[int],
        targets: list[list[int]],
    ) -> None:
        """Add the log-probabilities of the prompt's tokens; those of the first one are unknown."""
        num_top = body.topk_prompt_logprobs
        scores = await self._session.score(
            prompt,
            adapter=self._adapter,
            top=num_top,
            targets=targets,
        )
        num_tokens = len(prompt)
        num_scored = min(body.prompt_logprobs_last_n or num_tokens, num_tokens - 1)
        begin = num_tokens - num_scored
        if body.prompt_logprobs:
            logprobs = np.full(num_tokens, math.nan, "<f4")
            logprobs[begin:] = scores.logprobs[begin - 1 :]
            response.prompt_logprobs = logprobs.tobytes()
        if num_top:
            ids = np.full((num_tokens, num_top), -1, "<i4")
            logprobs = np.zeros(ids.shape, "<f4")
            ids[begin:] = scores.top_ids[begin - 1 :]
            logprobs[begin:] = scores.top_logprobs[begin - 1 :]
            response.topk_prompt_logprobs.CopyFrom(messages.top_logprobs(ids, logprobs))
        if body.target_prompt_logprobs:
            logprobs = np.where(np.array(targets) < 0, 0.0, scores.target_logprobs)
            tensor = messages.tensor_of(body.target_prompt_logprobs)
            response.target_prompt_logprobs.CopyFrom(messages.with_values(tensor, logprobs))


def target_ids(body: bodies.SampleBody) -> list[list[int]]:
    """Return the tokens that a request wants to score, [T - 1][M]; [] without any.

    Raises:
        UserError: They are no matrix, or an empty one.
    """
    if body.target_prompt_logprobs is None:
        return []
    ids = messages.array_of(messages.tensor_of(body.target_prompt_logprobs))
    if ids.ndim != 2 or not ids.size:
        raise UserError(f"target_prompt_logprobs: shape {[*ids.shape]}; send [tokens - 1, K].")
    return ids.tolist()


def checked_prompt(body: bodies.SampleBody, vocabulary: int) -> list[int]:
    """Return the tokens of a request's prompt.

    Raises:
        UserError: The request is wrong, or asks for what this service does not have.
    """
    unsupported = {
        "prompt_alt_tokens_k": body.prompt_alt_tokens_k,
        "record_stability_info": body.record_stability_info,
    }
    for name, value in unsupported.items():
        if value:
            raise UserError(f"{name}: this service does not have it. Leave it out.")
    prompt = list[int]()
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise UserError(f"prompt: this service takes text tokens only, no {chunk.type!r:.40}.")
        prompt += chunk.tokens
    if not prompt or min(prompt) < 0 or max(prompt) >= vocabulary:
        raise UserError(f"prompt: use at least one token; ids must be in [0, {vocabulary}).")
    return prompt


def options_of(params: bodies.SampleOptions, longest: int) -> dict[str, Any]:
    """Return the session's options of sampling.

    Args:
        params: What the client sent.
        longest: Number of tokens until the model's context is full.

    Raises:
        UserError: The prompt fills the context, or EOS must not end an answer.
    """
    if longest < 1:
        raise UserError("prompt: it fills the model's context. Use a shorter one.")
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if stop == []:
        raise UserError("stop=[]: this service always ends an answer at EOS. Leave it out.")
    strings = [text for text in stop or [] if isinstance(text, str)]
    ids = [token for token in stop or [] if isinstance(token, int)]
    return {
        "max_tokens": longest if params.max_tokens is None else min(longest, params.max_tokens),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "stop": strings,
        "stop_token_ids": ids,
    }


def _sequence(sample: Sample, num_top: int) -> Any:
    """Return a sample as a protobuf message."""
    sequence = messages.make(
        "SampledSequence",
        stop_reason=messages.STOP_REASONS[sample.stop_reason],
        tokens=np.array(sample.output_ids, "<i4").tobytes(),
        logprobs=np.array(sample.logprobs, "<f4").tobytes(),
    )
    if num_top:
        top = messages.top_logprobs(sample.top_ids, sample.top_logprobs)
        sequence.topk_sampled_logprobs.CopyFrom(top)
    return sequence
